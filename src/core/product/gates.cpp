#include "gates.h"

#include <algorithm>

#include "../base/parallel.h"

namespace rg {
namespace {

// How a result of rows x panels is cut into about `wanted` pieces of `row_step` by `panel_step`.
struct Cut {
    int64_t row_step, panel_step, row_pieces, panel_pieces;
    int64_t pieces() const { return row_pieces * panel_pieces; }
};

Cut cut(int64_t rows, int64_t panels, int64_t panel_step, int64_t least_rows, int64_t wanted) {
    Cut c;
    c.panel_step = panel_step;
    c.panel_pieces = ceil_div(panels, c.panel_step);
    const int64_t row_pieces = std::min(ceil_div(wanted, c.panel_pieces), ceil_div(rows, least_rows));
    c.row_step = ceil_div(rows, std::max<int64_t>(1, row_pieces));
    c.row_pieces = ceil_div(rows, c.row_step);
    return c;
}

// Rounds up to a multiple of the panels that a product of so many rows takes at a time.
template <class A>
int64_t whole_tiles(const ProductKernels<A>& kernels, int64_t panels, int64_t rows) {
    const int64_t wide = kernels.panels_at_once(rows);
    return ceil_div(std::max<int64_t>(1, panels), wide) * wide;
}

template <class Body>
void run_pieces(const Cut& c, const Workers& workers, const Body& body) {
    workers.each(c.pieces(),
                 [&](int64_t piece) { body(piece % c.row_pieces * c.row_step, piece / c.row_pieces * c.panel_step); });
}

int64_t pieces_wanted(const Workers& workers) { return workers.threads() == 1 ? 1 : 8 * workers.threads(); }

// Packs one block of units of one gate as kPanel rows of the operand of dz * w; units beyond the last are 0.
template <class A>
void pack_gate_rows(const ProductKernels<A>& kernels, const GateMatrix<const A>& w, int gate, int64_t block,
                    int64_t units, int64_t column, int64_t columns, A* panel) {
    const int64_t first = block * kPanel<A>;
    const int64_t there = w.gate[gate] ? std::min(kPanel<A>, units - first) : 0;
    if (there > 0) {
        kernels.pack_rows(w.gate[gate] + first * w.row_stride + column * w.col_stride, w.row_stride, w.col_stride,
                          columns, there, panel);
    }
    std::fill(panel + there * kPanel<A>, panel + kPanel<A> * kPanel<A>, A(0));
}

// Packs one block of units of all gates as panels of the operand of a * w'; an absent gate is 0.
template <class A>
void pack_block_columns(const ProductKernels<A>& kernels, const GateMatrix<const A>& w, int64_t block, int64_t units,
                        int64_t depth, A* panels) {
    const int64_t unit = block * kPanel<A>, there = std::min(kPanel<A>, units - unit), panel = depth * kPanel<A>;
    for (int k = 0; k < 4; ++k) {
        A* to = panels + k * panel;
        if (w.gate[k]) {
            kernels.pack_columns(w.gate[k] + unit * w.row_stride, w.row_stride, w.col_stride, there, depth, to);
        } else {
            std::fill(to, to + panel, A(0));
        }
    }
}

// A range of rows in panels: in place if they already are, else packed.
template <class A>
StateArray<const A> as_panels(const ProductKernels<A>& kernels, const StateArray<const A>& u, int64_t row, int64_t rows,
                              int64_t columns) {
    // A caller's rows may end with the last column; internal arrays are padded.
    const bool in_place = u.row == kPanel<A> && (u.panel != kPanel<A> || columns % kPanel<A> == 0);
    if (in_place) return {u.data + row * u.row, u.row, u.panel};
    const int64_t panel = (rows + 1) * kPanel<A>;  // one row of padding, to avoid cache-set conflicts
    A* packed = row_scratch().take<A>(ceil_div(columns, kPanel<A>) * panel);
    for (int64_t column = 0; column < columns; column += kPanel<A>) {
        kernels.pack_rows(u.data + row * u.row + column / kPanel<A> * u.panel, u.row, 1,
                          std::min(kPanel<A>, columns - column), rows, packed + column / kPanel<A> * panel);
    }
    return {packed, kPanel<A>, panel};
}

// c[rows][cols] (+)= a * b, with b in packed panels: blocks of rows that stay in the second-level cache, by runs of
// panels. Each block of `a` is loaded once, and each panel once for every block of rows.
template <class A>
void multiply_packed(const ProductKernels<A>& kernels, const StateArray<const A>& a, const Product<A>& whole,
                     int threads) {
    const double flops = 2.0 * double(whole.rows) * double(whole.depth) * double(whole.cols);
    const Workers workers(cost::kFlop * flops, threads);
    const int64_t wanted = pieces_wanted(workers), panels = ceil_div(whole.cols, kPanel<A>);
    const int64_t depth_step = std::max<int64_t>(1, std::min<int64_t>(whole.depth, 4 * kDepthRun));
    const int64_t near_rows = rows_in_cache<A>(depth_step);
    const int64_t row_pieces = std::min(wanted, ceil_div(whole.rows, kTileRows));
    const Cut pieces = cut(whole.rows, panels, whole_tiles(kernels, ceil_div(panels * row_pieces, wanted), whole.rows),
                           kTileRows, wanted);
    run_pieces(pieces, workers, [&](int64_t first_row, int64_t first_panel) {
        const int64_t last_row = std::min(whole.rows, first_row + pieces.row_step);
        const int64_t first_col = first_panel * kPanel<A>;
        for (int64_t row = first_row; row < last_row; row += near_rows) {
            for (int64_t k = 0; k == 0 || k < whole.depth; k += depth_step) {
                Product<A> p = whole;
                p.rows = std::min(near_rows, last_row - row);
                p.depth = std::min(depth_step, whole.depth - k);
                p.cols = std::min(pieces.panel_step * kPanel<A>, whole.cols - first_col);
                const StateArray<const A> near =
                    as_panels(kernels, {a.data + k / kPanel<A> * a.panel, a.row, a.panel}, row, p.rows, p.depth);
                p.a = near.data;
                p.a_row = near.row;
                p.a_step = 1;
                p.a_group = near.panel;
                p.panels += first_panel * p.panel_stride + k * kPanel<A>;
                p.c += row * p.c_row + first_col;
                if (k > 0) {
                    p.base = p.c;
                    p.base_row = p.c_row;
                } else if (p.base) {
                    p.base += row * p.base_row + first_col;
                }
                kernels.product(p);
            }
        }
    });
}

}  // namespace

template <class A>
void project(const ProductKernels<A>& kernels, const StateArray<const A>& u, int64_t rows, int64_t inputs,
             int64_t units, const GateMatrix<const A>& w, const A* bias, A* gates, Buffer& buffer, int threads) {
    if (rows == 0) return;
    const int64_t gates_row = 4 * ceil_div(units, kPanel<A>) * kPanel<A>;
    A* packed = buffer.take<A>(gates_row * inputs);
    pack_forward(kernels, w, units, inputs, packed, threads);
    Product<A> p = {};
    p.rows = rows;
    p.depth = inputs;
    p.cols = gates_row;
    p.panels = packed;
    p.panel_stride = inputs * kPanel<A>;
    p.base = bias;
    p.c = gates;
    p.c_row = gates_row;
    multiply_packed(kernels, u, p, threads);
}

template <class A>
void input_gradient(const ProductKernels<A>& kernels, const A* dz, int64_t dz_panel, int64_t rows, int64_t units,
                    int64_t inputs, const GateMatrix<const A>& w, bool accumulate, A* du, int64_t du_row,
                    Buffer& buffer, int threads) {
    if (rows == 0 || inputs == 0) return;
    const int64_t dz_row = 4 * ceil_div(units, kPanel<A>) * kPanel<A>;
    Product<A> p = {};
    p.rows = rows;
    p.depth = dz_row;
    p.cols = inputs;
    p.panel_stride = (dz_row + 1) * kPanel<A>;  // one row of padding, to avoid cache-set conflicts
    A* packed = buffer.take<A>(ceil_div(inputs, kPanel<A>) * p.panel_stride);
    pack_backward(kernels, w, units, inputs, packed, p.panel_stride, threads);
    p.panels = packed;
    p.base = accumulate ? du : nullptr;
    p.base_row = du_row;
    p.c = du;
    p.c_row = du_row;
    multiply_packed(kernels, {dz, kPanel<A>, dz_panel}, p, threads);
}

template <class A>
void weight_gradient(const ProductKernels<A>& kernels, const A* dz, int64_t dz_panel, int64_t rows, int64_t units,
                     const StateArray<const A>& u, int64_t inputs, bool accumulate, const GateMatrix<A>& dw,
                     int threads) {
    if (inputs == 0) return;
    const int64_t blocks = ceil_div(units, kPanel<A>), panels = ceil_div(inputs, kPanel<A>);
    const int64_t run = std::max<int64_t>(1, std::min(kDepthRun, rows));
    const double flops = 8.0 * double(rows) * double(blocks * kPanel<A>) * double(inputs);
    // A piece packs its columns of u once for all of its blocks of units, so pieces should be wide. Blocks of units are
    // split first; columns only if blocks alone would give less than half of the wanted pieces.
    const int64_t most = std::max<int64_t>(1, near_cache_bytes() / 2 / int64_t(sizeof(A)) / (run * kPanel<A>));
    const Workers workers(cost::kFlop * flops, threads);
    const int64_t wanted = pieces_wanted(workers), wide = ceil_div(panels, most);
    const Cut pieces =
        cut(blocks, panels,
            whole_tiles(kernels, ceil_div(panels, std::max(wide, ceil_div(wanted, 2 * blocks))), kPanel<A>), 1, wanted);
    run_pieces(pieces, workers, [&](int64_t first_block, int64_t first_panel) {
        const int64_t last_block = std::min(blocks, first_block + pieces.row_step);
        const int64_t first_col = first_panel * kPanel<A>;
        const int64_t cols = std::min(pieces.panel_step * kPanel<A>, inputs - first_col);
        StateArray<const A> columns = u;
        columns.data += first_panel * u.panel;
        for (int64_t row = 0; row == 0 || row < rows; row += run) {  // runs once even without rows: 0 must be written
            const int64_t depth = std::min(run, rows - row);
            const StateArray<const A> panels_of_u = as_panels(kernels, columns, row, depth, cols);
            for (int64_t block = first_block; block < last_block; ++block) {
                const int64_t unit = block * kPanel<A>;
                for (int k = 0; k < 4; ++k) {
                    if (!dw.gate[k]) continue;
                    Product<A> p = {};
                    p.a = dz + (4 * block + k) * dz_panel + row * kPanel<A>;
                    p.a_row = 1;
                    p.a_step = kPanel<A>;
                    p.a_group = kPanel<A> * kPanel<A>;
                    p.rows = std::min(kPanel<A>, units - unit);
                    p.depth = depth;
                    p.cols = cols;
                    p.panels = panels_of_u.data;
                    p.panel_stride = panels_of_u.panel;
                    p.c = dw.gate[k] + unit * dw.row_stride + first_col;
                    p.c_row = dw.row_stride;
                    p.base = row > 0 || accumulate ? p.c : nullptr;
                    p.base_row = dw.row_stride;
                    kernels.product(p);
                }
            }
        }
    });
}

template <class A>
void sum_by_index(const A* dz, int64_t dz_panel, int64_t rows, int64_t panels, const int64_t* indices, int64_t count,
                  A* sums, int64_t sums_panel, int threads) {
    const double work = double(panels) * double(rows + count) * double(kPanel<A>);
    Workers(cost::kFlop * work, threads).each(panels, [&](int64_t panel) {
        const A* from = dz + panel * dz_panel;
        A* const to = sums + panel * sums_panel;
        std::fill(to, to + count * kPanel<A>, A(0));
        for (int64_t row = 0; row < rows; ++row, from += kPanel<A>) {
            A* sum = to + indices[row] * kPanel<A>;
            for (int64_t u = 0; u < kPanel<A>; ++u) sum[u] += from[u];
        }
    });
}

template <class A>
void pack_forward(const ProductKernels<A>& kernels, const GateMatrix<const A>& w, int64_t units, int64_t depth,
                  A* panels, int threads) {
    const int64_t blocks = ceil_div(units, kPanel<A>), panel = depth * kPanel<A>;
    const double work = 32.0 * double(blocks) * double(panel);  // the equivalent number of flops
    Workers(cost::kFlop * work, threads).each(blocks, [&](int64_t block) {
        pack_block_columns(kernels, w, block, units, depth, panels + 4 * block * panel);
    });
}

template <class A>
void pack_backward(const ProductKernels<A>& kernels, const GateMatrix<const A>& w, int64_t units, int64_t columns,
                   A* panels, int64_t panel, int threads) {
    const int64_t blocks = ceil_div(units, kPanel<A>);
    const int64_t column_blocks = ceil_div(columns, kPanel<A>);
    const double work = 8.0 * double(column_blocks) * double(panel);
    Workers(cost::kFlop * work, threads).each(column_blocks, [&](int64_t c) {
        const int64_t column = c * kPanel<A>;
        for (int64_t j = 0; j < 4 * blocks; ++j) {
            pack_gate_rows(kernels, w, int(j % 4), j / 4, units, column, std::min(kPanel<A>, columns - column),
                           panels + c * panel + j * kPanel<A> * kPanel<A>);
        }
    });
}

#define RG_INSTANTIATE(A)                                                                                           \
    template void project<A>(const ProductKernels<A>&, const StateArray<const A>&, int64_t, int64_t, int64_t,       \
                             const GateMatrix<const A>&, const A*, A*, Buffer&, int);                               \
    template void input_gradient<A>(const ProductKernels<A>&, const A*, int64_t, int64_t, int64_t, int64_t,         \
                                    const GateMatrix<const A>&, bool, A*, int64_t, Buffer&, int);                   \
    template void weight_gradient<A>(const ProductKernels<A>&, const A*, int64_t, int64_t, int64_t,                 \
                                     const StateArray<const A>&, int64_t, bool, const GateMatrix<A>&, int);         \
    template void sum_by_index<A>(const A*, int64_t, int64_t, int64_t, const int64_t*, int64_t, A*, int64_t, int);  \
    template void pack_forward<A>(const ProductKernels<A>&, const GateMatrix<const A>&, int64_t, int64_t, A*, int); \
    template void pack_backward<A>(const ProductKernels<A>&, const GateMatrix<const A>&, int64_t, int64_t, A*,      \
                                   int64_t, int);
RG_INSTANTIATE(float)
RG_INSTANTIATE(double)
#undef RG_INSTANTIATE

}  // namespace rg
