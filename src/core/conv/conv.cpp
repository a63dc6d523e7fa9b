#include "conv.h"

#include <algorithm>

#include "../base/dispatch.h"
#include "../base/parallel.h"
#include "../base/scratch.h"
#include "../kernels.h"
#include "../product/blocked.h"
#include "patches.h"

namespace rg {
namespace {

// A row of a result: a channel of a group, or some pixels of it. Where its weights and its pixels begin.
struct ResultRow {
    int64_t channel, weight, to;
};

// to[n][row][gy][gx] = sum over channels f and taps of w[row][f][tap] * from[n][f][gy * step_y + tap.y][gx * step_x +
// tap.x] for a grid of pixels: a convolution, or its gradient for the input pixels that are a stride apart.
template <class A>
struct Pass {
    int64_t samples, groups, from_channels, to_channels;  // channels of one group
    PatchGrid<A> grid;
    const A* weights;
    int64_t w_group, w_from;
    Vector<ResultRow> rows;
    ConvImages<A> to;
    ConvEnd<A> end;

    int64_t to_group() const { return to_channels * to.c; }
    // From each row to the next in memory, if it is the same for all.
    bool rows_apart(int64_t* distance) const {
        *distance = rows.size() > 1 ? rows[1].to - rows[0].to : 0;
        for (size_t r = 1; r < rows.size(); ++r) {
            if (rows[r].to - rows[r - 1].to != *distance) return false;
        }
        return true;
    }
    A bias(int64_t group, const ResultRow& row) const {
        return end.bias ? end.bias[group * to_channels + row.channel] : A(0);
    }
    int64_t depth() const { return from_channels * int64_t(grid.taps.size()); }
    double flops() const {
        return 2.0 * double(samples * groups) * double(rows.size()) * double(grid.pixels()) *
               double(std::max<int64_t>(1, depth()));
    }
    Vector<int64_t> weight_offsets() const {
        Vector<int64_t> offsets;
        for (int64_t f = 0; f < from_channels; ++f) {
            for (const Tap& tap : grid.taps) offsets.push_back(f * w_from + tap.weight);
        }
        return offsets;
    }
};

// The weights and biases of all groups, packed by the calling thread for all.
struct PackedWeights {
    Buffer weights, biases;
};

// Calls visit(row, pixel - first, count, where they are) for pixels `first` to `last` of a group's result, counted over
// all samples, one line of the grid at a time.
template <class A, class Visit>
void for_pixels(const Pass<A>& pass, int64_t group, int64_t first, int64_t last, const Visit& visit) {
    const int64_t pixels = pass.grid.pixels(), width = pass.grid.width;
    for (int64_t p = first; p < last;) {
        const int64_t n = p / pixels, y = p % pixels / width, x = p % width, count = std::min(width - x, last - p);
        A* const line = pass.to.data + group * pass.to_group() + n * pass.to.n + y * pass.to.y + x * pass.to.x;
        for (size_t r = 0; r < pass.rows.size(); ++r) visit(int64_t(r), p - first, count, line + pass.rows[r].to);
        p += count;
    }
}

template <class A>
void copy_pixels(const A* from, int64_t from_step, int64_t count, A* to, int64_t to_step) {
    if (from_step == 1 && to_step == 1) {
        std::copy(from, from + count, to);
    } else {
        for (int64_t j = 0; j < count; ++j) to[j * to_step] = from[j * from_step];
    }
}

// Packs the weights of all groups as rows of tiles: [group][depth / kPanel][row][kPanel], `stride` apart.
template <class A>
void pack_weights(const Pass<A>& pass, const Workers& workers, int64_t stride, A* weights) {
    const int64_t depth = pass.depth(), deep = ceil_div(depth, kPanel<A>);
    const Vector<int64_t> from = pass.weight_offsets();
    workers.each(pass.groups * deep, [&](int64_t item) {
        const A* const w = pass.weights + item / deep * pass.w_group;
        A* to = weights + item * stride;
        const int64_t first = item % deep * kPanel<A>, units = std::min(kPanel<A>, depth - first);
        const int64_t* const offsets = from.data() + first;
        bool contiguous = true;
        for (int64_t u = 1; u < units; ++u) contiguous = contiguous && offsets[u] == offsets[0] + u;
        for (const ResultRow& row : pass.rows) {
            if (contiguous) {
                copy_pixels(w + row.weight + offsets[0], 1, units, to, 1);
            } else {
                for (int64_t u = 0; u < units; ++u) to[u] = w[row.weight + offsets[u]];
            }
            to += kPanel<A>;
        }
    });
}

// Runs a pass as products: the weights of all rows times the patches of a chunk of pixels, a few panels at a time.
template <class A>
void run_products(const Pass<A>& pass, int threads) {
    const KernelTable& table = kernel_table();
    const ProductKernels<A>& products = table.product.of<A>();
    const PatchGrid<A>& grid = pass.grid;
    const int64_t depth = pass.depth(), rows = int64_t(pass.rows.size());
    const int64_t pixels = grid.pixels(), all = pass.samples * pixels, taken = pass.groups * all;
    const Workers workers(cost::kFlop * pass.flops() + cost::kElement * double(taken) * double(rows) +
                              cost::kCopy * double(taken) * double(depth),
                          threads);

    // The results of a chunk, to which every run of the depth adds, take a quarter of the second-level cache, as do the
    // places of its patches. Patches are packed a few panels at a time, in whole tiles: into the first-level cache, or
    // little more.
    const int64_t at_once = products.panels_at_once(rows), wide = ceil_div(4, at_once) * at_once;
    const int64_t panel_bytes = std::max(rows * kPanel<A> * int64_t(sizeof(A)), Patches<A>::run_bytes(grid));
    const int64_t near = near_cache_bytes() / 4 / panel_bytes;
    const int64_t wanted = ceil_div(ceil_div(all, kPanel<A>) * pass.groups, 4 * workers.threads());
    const int64_t step = wide * kPanel<A>, chunk = std::max<int64_t>(1, std::min(near, wanted) / wide) * step;
    const int64_t chunks = ceil_div(all, chunk);
    const Patches<A> patches(grid, chunk);

    PackedWeights& packed = kept_by_thread<PackedWeights>();
    const int64_t deep = ceil_div(depth, kPanel<A>);
    const int64_t group = (rows + 1) * kPanel<A>;  // one row of padding, to avoid cache-set conflicts
    A* const weights = packed.weights.template take<A>(pass.groups * deep, group);
    pack_weights(pass, workers, group, weights);
    // Biases as a result that the first run adds to, as wide as the panels that are multiplied at a time.
    A* const biases = pass.end.bias ? packed.biases.template take<A>(pass.groups * rows, step) : nullptr;
    for (int64_t r = 0; biases && r < pass.groups * rows; ++r) {
        std::fill(biases + r * step, biases + (r + 1) * step, pass.bias(r / rows, pass.rows[size_t(r % rows)]));
    }

    int64_t to_row = 0;
    const bool in_rows = (pass.to.x == 1 || grid.width == 1) && (pass.to.y == grid.width || grid.height == 1) &&
                         pass.rows_apart(&to_row);
    workers.each(pass.groups * chunks, [&](int64_t item) {
        const int64_t g = item / chunks, first = item % chunks * chunk, last = std::min(all, first + chunk);
        const auto located = patches.locate(table, g * pass.from_channels, pass.from_channels, first, last);
        ConvScratch& scratch = conv_scratch();
        A* const images = pass.to.data + g * pass.to_group() + pass.rows[0].to;
        A* const result = scratch.result.template take<A>(rows, chunk);
        const int64_t panel_stride = (std::min(kDepthRun, depth) + 1) * kPanel<A>;
        A* const panels_of_patches = scratch.patches.template take<A>(wide * panel_stride);
        const auto near = [&](int64_t pixel, int64_t cols, int64_t k, int64_t run) -> StateArray<const A> {
            for (int64_t j = 0; j * kPanel<A> < cols; ++j) {
                located.pack(table, (pixel - first) / kPanel<A> + j, k, run, panels_of_patches + j * panel_stride);
            }
            return {panels_of_patches, kPanel<A>, panel_stride};
        };
        multiply_columns<A>(depth, first, last, step, near, [&](Product<A>& p, int64_t pixel, int64_t k) {
            p.rows = rows;
            p.a = weights + g * deep * group + k / kPanel<A> * group;
            p.a_row = kPanel<A>;
            p.a_step = 1;
            p.a_group = group;
            // Pixels of two samples are not contiguous: they go through memory where they are.
            const int64_t n = pixel / pixels;
            const bool in_place = in_rows && (pixel + p.cols - 1) / pixels == n;
            p.c = in_place ? images + n * pass.to.n + pixel % pixels : result + (pixel - first);
            p.c_row = in_place ? to_row : chunk;
            if (k > 0 || pass.end.accumulate) {
                p.base = p.c;
                p.base_row = p.c_row;
            } else if (biases) {
                p.base = biases + g * rows * step;
                p.base_row = step;
            }
            const auto staged = [&](int64_t r, int64_t at) { return p.c + r * p.c_row + at; };
            if (k == 0 && pass.end.accumulate && !in_place) {
                for_pixels(pass, g, pixel, pixel + p.cols, [&](int64_t r, int64_t at, int64_t many, const A* old) {
                    copy_pixels(old, pass.to.x, many, staged(r, at), 1);
                });
            }
            products.product(p);
            if (k + kDepthRun < depth) return;
            for (int64_t r = 0; pass.end.activation.kind != ActivationKind::identity && r < rows; ++r) {
                table.activation.of<A>().activate(pass.end.activation, staged(r, 0), p.cols, staged(r, 0));
            }
            if (!in_place) {
                for_pixels(pass, g, pixel, pixel + p.cols, [&](int64_t r, int64_t at, int64_t many, A* y) {
                    copy_pixels(staged(r, at), 1, many, y, pass.to.x);
                });
            }
        });
    });
}

// Runs a pass with few channels of results: sums the taps of each pixel directly.
template <class A>
void run_directly(const Pass<A>& pass, int threads) {
    const KernelTable& table = kernel_table();
    const PatchGrid<A>& grid = pass.grid;
    const int64_t depth = pass.depth();
    const Band<A> one_row(grid.taps, grid.step_y, grid.step_x, grid.width, 1);
    const int64_t row_bytes =
        std::max<int64_t>(1, checked_product(pass.from_channels, one_row.grid_row())) * int64_t(sizeof(A));
    const int64_t step = std::clamp<int64_t>(near_cache_bytes() / 4 / row_bytes, 1, grid.height);
    const Band<A> geometry(grid.taps, grid.step_y, grid.step_x, grid.width, step);
    const Vector<int64_t> offsets = geometry.offsets(grid.taps, pass.from_channels);
    const Vector<int64_t> from = pass.weight_offsets();
    Vector<A> weights;
    for (int64_t g = 0; g < pass.groups; ++g) {
        for (const ResultRow& row : pass.rows) {
            for (const int64_t offset : from) weights.push_back(pass.weights[g * pass.w_group + row.weight + offset]);
        }
    }
    const int64_t blocks = ceil_div(grid.height, step);
    const Workers workers(4 * cost::kFlop * pass.flops(), threads);
    const bool in_place = pass.to.x == 1 || grid.width == 1;
    workers.each(pass.samples * pass.groups * blocks, [&](int64_t item) {
        const int64_t top = item % blocks * step, rows = std::min(grid.height - top, step);
        const int64_t g = item / blocks % pass.groups, n = item / blocks / pass.groups;
        A* const band = conv_scratch().band.template take<A>(geometry.size(pass.from_channels));
        geometry.load(table, grid.from, grid.from.data + n * grid.from.n + g * pass.from_channels * grid.from.c,
                      pass.from_channels, grid.from_height, grid.from_width, top, rows, band);
        A* const copy = in_place ? nullptr : conv_scratch().result.template take<A>(rows, grid.width);
        for (size_t t = 0; t < pass.rows.size(); ++t) {
            A* const to = pass.to.data + n * pass.to.n + g * pass.to_group() + pass.rows[t].to + top * pass.to.y;
            const A* const w = weights.data() + (g * int64_t(pass.rows.size()) + int64_t(t)) * depth;
            A* const y = in_place ? to : copy;
            const int64_t y_row = in_place ? pass.to.y : grid.width;
            const auto each_pixel = [&](const auto& visit) {
                for (int64_t r = 0; r < rows; ++r) {
                    for (int64_t j = 0; j < grid.width; ++j) visit(y[r * y_row + j], to[r * pass.to.y + j * pass.to.x]);
                }
            };
            if (!in_place && pass.end.accumulate) each_pixel([](A& result, A old) { result = old; });
            table.conv.of<A>().tap_rows(band, geometry.grid_row(), offsets.data(), w, depth, {rows, grid.width},
                                        pass.end.accumulate, pass.bias(g, pass.rows[t]), y, y_row);
            for (int64_t r = 0; pass.end.activation.kind != ActivationKind::identity && r < rows; ++r) {
                table.activation.of<A>().activate(pass.end.activation, y + r * y_row, grid.width, y + r * y_row);
            }
            if (!in_place) each_pixel([](A result, A& out) { out = result; });
        }
    });
}

template <class A>
void run_pass(Pass<A> pass, int threads) {
    if (pass.rows.empty()) return;
    if (pass.grid.is_flat() && (pass.to.y == pass.grid.width * pass.to.x || pass.grid.height == 1)) pass.grid.flatten();
    int64_t(pass.rows.size()) <= kFewChannels ? run_directly(pass, threads) : run_products(pass, threads);
}

// The pixel of dy that input pixel `first` and those a stride apart read through tap k, if any: first = pixel * stride
// + k * dilation - before.
bool reads(const ConvAxis& axis, int64_t first, int64_t k, int64_t* pixel) {
    const int64_t distance = first + axis.before - k * axis.dilation;
    *pixel = distance / axis.stride;
    return distance % axis.stride == 0 && reaches(*pixel, ceil_div(axis.input - first, axis.stride), 1, axis.output);
}

// Where a tap's weight is, and the input pixel that it reads.
struct Place {
    int64_t weight, pixel;
};

// If an axis has one output pixel only, each of its taps reads another input pixel. These become rows of the result, so
// that nothing is multiplied by the padding of dy, and one pixel remains of the axis.
Vector<Place> take_lone_taps(int64_t w_stride, int64_t stride, ConvAxis* axis) {
    if (axis->output != 1) return {{0, 0}};
    Vector<Place> places;
    for (int64_t k = 0; k < axis->kernel; ++k) {
        const int64_t pixel = k * axis->dilation - axis->before;
        if (pixel >= 0 && pixel < axis->input) places.push_back({k * w_stride, pixel * stride});
    }
    *axis = {1, 1, 1};
    return places;
}

}  // namespace

template <class A>
void conv_forward(const ConvShape& shape, const ConvImages<const A>& x, const ConvWeights<const A>& w,
                  const ConvEnd<A>& end, int threads, const ConvImages<A>& y) {
    if (any_zero({shape.samples, shape.groups, shape.outputs, shape.y.output, shape.x.output})) return;
    const PatchGrid<A> grid = forward_grid(shape, x, w);
    Vector<ResultRow> rows;
    for (int64_t o = 0; o < shape.outputs; ++o) rows.push_back({o, o * w.o, o * y.c});
    run_pass<A>({shape.samples, shape.groups, shape.inputs, shape.outputs, grid, w.data, shape.outputs * w.o, w.i, rows,
                 y, end},
                threads);
}

template <class A>
void conv_input(const ConvShape& shape, const ConvImages<const A>& dy, const ConvWeights<const A>& w,
                const ConvEnd<A>& end, int threads, const ConvImages<A>& dx) {
    if (any_zero({shape.samples, shape.groups, shape.inputs, shape.y.input, shape.x.input})) return;
    const auto run = [&](const PatchGrid<A>& grid, const Vector<ResultRow>& rows, const ConvImages<A>& to) {
        run_pass<A>({shape.samples, shape.groups, shape.outputs, shape.inputs, grid, w.data, shape.outputs * w.o, w.o,
                     rows, to, end},
                    threads);
    };
    Vector<ResultRow> channels, rows;
    for (int64_t i = 0; i < shape.inputs; ++i) channels.push_back({i, i * w.i, i * dx.c});
    const auto write_untapped = [&] {
        run({dy, shape.y.output, shape.x.output, 1, 1, {}, shape.y.input, shape.x.input}, channels, dx);
    };
    if (any_zero({shape.outputs, shape.y.output, shape.x.output})) {  // kernels without weights may have any size
        if (!end.accumulate) write_untapped();
        return;
    }
    ConvAxis down = shape.y, across = shape.x;
    const Vector<Place> in_y = take_lone_taps(w.y, dx.y, &down), in_x = take_lone_taps(w.x, dx.x, &across);
    for (int64_t i = 0; i < shape.inputs; ++i) {
        for (const Place& y : in_y) {
            for (const Place& x : in_x) {
                rows.push_back({i, i * w.i + y.weight + x.weight, i * dx.c + y.pixel + x.pixel});
            }
        }
    }
    // Pixels that no tap reads: all are written as if there were no taps, and then those that some tap reads.
    const int64_t read = int64_t(in_y.size() * in_x.size()) * down.input * across.input;
    if (read < shape.y.input * shape.x.input && !end.accumulate) write_untapped();

    // Input pixels that are a stride apart read dy through the same taps.
    const int64_t step_y = std::min(down.stride, down.input), step_x = std::min(across.stride, across.input);
    for (int64_t y = 0; y < step_y; ++y) {
        for (int64_t x = 0; x < step_x; ++x) {
            PatchGrid<A> grid = {dy,
                                 down.output,
                                 across.output,
                                 1,
                                 1,
                                 {},
                                 ceil_div(down.input - y, down.stride),
                                 ceil_div(across.input - x, across.stride)};
            for (int64_t ky = 0; ky < down.kernel; ++ky) {
                for (int64_t kx = 0; kx < across.kernel; ++kx) {
                    Tap tap = {0, 0, ky * w.y + kx * w.x};
                    if (reads(down, y, ky, &tap.y) && reads(across, x, kx, &tap.x)) grid.taps.push_back(tap);
                }
            }
            run(grid, rows, {dx.data + y * dx.y + x * dx.x, dx.n, dx.c, dx.y * step_y, dx.x * step_x});
        }
    }
}

#define RG_INSTANTIATE(A)                                                                                    \
    template void conv_forward<A>(const ConvShape&, const ConvImages<const A>&, const ConvWeights<const A>&, \
                                  const ConvEnd<A>&, int, const ConvImages<A>&);                             \
    template void conv_input<A>(const ConvShape&, const ConvImages<const A>&, const ConvWeights<const A>&,   \
                                const ConvEnd<A>&, int, const ConvImages<A>&);
RG_INSTANTIATE(float)
RG_INSTANTIATE(double)
#undef RG_INSTANTIATE

}  // namespace rg
