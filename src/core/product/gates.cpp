#include "gates.h"

#include <algorithm>

#include "blocked.h"

namespace rg {
namespace {

// The panels of w' in the order of a row of gates: a block of units of each gate in turn. An absent gate is 0.
template <class A>
struct ForwardPanels {
    const GateMatrix<const A>& w;
    int64_t units;

    bool by_rows() const { return false; }
    void pack(const ProductKernels<A>& kernels, int64_t panel, int64_t k, int64_t depth, A* to) const {
        const int64_t blocks = ceil_div(units, kPanel<A>), unit = w.block_of(blocks, panel) * kPanel<A>;
        const A* from = w.gate[w.gate_of(blocks, panel)];
        if (from) {
            kernels.pack_columns(from + unit * w.row_stride + k * w.col_stride, w.row_stride, w.col_stride,
                                 std::min(kPanel<A>, units - unit), depth, to);
        } else {
            std::fill(to, to + depth * kPanel<A>, A(0));
        }
    }
};

// The panels of w: the units of all gates, in blocks as in a row of gates, by columns. Absent gates and units are 0.
template <class A>
struct BackwardPanels {
    const GateMatrix<const A>& w;
    int64_t units, columns;

    bool by_rows() const { return true; }
    void pack(const ProductKernels<A>& kernels, int64_t panel, int64_t k, int64_t depth, A* to) const {
        const int64_t blocks = ceil_div(units, kPanel<A>), at = k / kPanel<A>, column = panel * kPanel<A>;
        const int64_t unit = w.block_of(blocks, at) * kPanel<A>;
        const A* from = w.gate[w.gate_of(blocks, at)];
        const int64_t there = from ? std::min(depth, units - unit) : 0;
        if (there > 0) {
            kernels.pack_rows(from + unit * w.row_stride + column * w.col_stride, w.row_stride, w.col_stride,
                              std::min(kPanel<A>, columns - column), there, to);
        }
        std::fill(to + there * kPanel<A>, to + depth * kPanel<A>, A(0));
    }
};

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

template <class A>
struct PanelRows {
    StateArray<const A> u;

    StateArray<const A> near(const ProductKernels<A>& kernels, int64_t row, int64_t rows, int64_t k, int64_t depth,
                             int64_t) const {
        return as_panels(kernels, {u.data + k / kPanel<A> * u.panel, u.row, u.panel}, row, rows, depth);
    }
};

}  // namespace

template <class A>
void project(const ProductKernels<A>& kernels, const StateArray<const A>& u, int64_t rows, int64_t inputs,
             int64_t units, const GateMatrix<const A>& w, const A* bias, A* gates, Buffer& buffer, int threads) {
    Product<A> whole = {};
    whole.rows = rows;
    whole.depth = inputs;
    whole.cols = w.count * ceil_div(units, kPanel<A>) * kPanel<A>;
    whole.base = bias;
    whole.c = gates;
    whole.c_row = whole.cols;
    BlockedProduct<A, PanelRows<A>, ForwardPanels<A>> product(kernels, whole, {u}, {w, units}, buffer);
    multiply_blocks(Workers(cost::kFlop * product.flops(), threads), product);
}

template <class A>
void input_gradient(const ProductKernels<A>& kernels, const A* dz, int64_t dz_panel, int64_t rows, int64_t units,
                    int64_t inputs, const GateMatrix<const A>& w, bool accumulate, A* du, int64_t du_row,
                    Buffer& buffer, int threads) {
    Product<A> whole = {};
    whole.rows = rows;
    whole.depth = w.count * ceil_div(units, kPanel<A>) * kPanel<A>;
    whole.cols = inputs;
    whole.base = accumulate ? du : nullptr;
    whole.base_row = du_row;
    whole.c = du;
    whole.c_row = du_row;
    BlockedProduct<A, PanelRows<A>, BackwardPanels<A>> product(kernels, whole, {{dz, kPanel<A>, dz_panel}},
                                                               {w, units, inputs}, buffer);
    multiply_blocks(Workers(cost::kFlop * product.flops(), threads), product);
}

template <class A>
void weight_gradient(const ProductKernels<A>& kernels, const A* dz, int64_t dz_panel, int64_t rows, int64_t units,
                     const StateArray<const A>& u, int64_t inputs, bool accumulate, const GateMatrix<A>& dw,
                     int threads) {
    if (inputs == 0) return;
    const int64_t blocks = ceil_div(units, kPanel<A>), panels = ceil_div(inputs, kPanel<A>);
    const int64_t run = std::max<int64_t>(1, std::min(kDepthRun, rows));
    const double flops = 2.0 * dw.count * double(rows) * double(blocks * kPanel<A>) * double(inputs);
    // A piece packs its columns of u once for all of its blocks of units, so pieces should be wide. Blocks of units are
    // split first; columns only if blocks alone would give less than half of the wanted pieces.
    const int64_t most = std::max<int64_t>(1, near_cache_bytes() / 2 / int64_t(sizeof(A)) / (run * kPanel<A>));
    const Workers workers(cost::kFlop * flops, threads);
    const int64_t wanted = workers.threads() == 1 ? 1 : 8 * workers.threads(), wide = ceil_div(panels, most);
    const int64_t panel_step =
        whole_tiles(kernels, ceil_div(panels, std::max(wide, ceil_div(wanted, 2 * blocks))), kPanel<A>);
    const int64_t across = ceil_div(panels, panel_step);
    const int64_t block_step = ceil_div(blocks, std::min(ceil_div(wanted, across), blocks));
    const int64_t down = ceil_div(blocks, block_step);
    workers.each(down * across, [&](int64_t piece) {
        const int64_t first_block = piece % down * block_step, first_col = piece / down * panel_step * kPanel<A>;
        const int64_t last_block = std::min(blocks, first_block + block_step);
        const int64_t last_col = std::min(inputs, first_col + panel_step * kPanel<A>);
        const auto near = [&](int64_t col, int64_t cols, int64_t row, int64_t depth) {
            return as_panels(kernels, {u.data + col / kPanel<A> * u.panel, u.row, u.panel}, row, depth, cols);
        };
        const auto multiply = [&](Product<A>& p, int64_t col, int64_t row) {
            p.a_row = 1;
            p.a_step = kPanel<A>;
            p.a_group = kPanel<A> * kPanel<A>;
            p.c_row = p.base_row = dw.row_stride;
            for (int64_t i = dw.count * first_block; i < dw.count * last_block; ++i) {
                const int64_t block = i / dw.count, k = i % dw.count, unit = block * kPanel<A>;
                A* const gate = dw.gate[k];
                if (!gate) continue;
                p.a = dz + dw.panel(blocks, block, k) * dz_panel + row * kPanel<A>;
                p.rows = std::min(kPanel<A>, units - unit);
                p.c = gate + unit * dw.row_stride + col;
                p.base = row > 0 || accumulate ? p.c : nullptr;
                kernels.product(p);
            }
        };
        multiply_columns<A>(rows, first_col, last_col, last_col - first_col, near, multiply);
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
    const ForwardPanels<A> from = {w, units};
    const int64_t count = w.count * ceil_div(units, kPanel<A>), panel_stride = depth * kPanel<A>;
    const double work = 8.0 * double(count) * double(panel_stride);  // the equivalent number of flops
    Workers(cost::kFlop * work, threads).each(count, [&](int64_t panel) {
        from.pack(kernels, panel, 0, depth, panels + panel * panel_stride);
    });
}

template <class A>
void pack_backward(const ProductKernels<A>& kernels, const GateMatrix<const A>& w, int64_t units, int64_t columns,
                   A* panels, int64_t panel_stride, int threads) {
    const BackwardPanels<A> from = {w, units, columns};
    const int64_t count = ceil_div(columns, kPanel<A>);
    const int64_t depth = w.count * ceil_div(units, kPanel<A>) * kPanel<A>;
    const double work = 8.0 * double(count) * double(panel_stride);
    Workers(cost::kFlop * work, threads).each(count, [&](int64_t panel) {
        for (int64_t k = 0; k < depth; k += kPanel<A>) {
            from.pack(kernels, panel, k, kPanel<A>, panels + panel * panel_stride + k * kPanel<A>);
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
