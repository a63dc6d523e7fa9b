#include "conv.h"

#include <algorithm>
#include <vector>

#include "../base/dispatch.h"
#include "../base/parallel.h"
#include "../base/scratch.h"
#include "../kernels.h"
#include "patches.h"

namespace rg {
namespace {

// to[n][t][gy][gx] = sum over channels f and taps of w[t][f][tap] * from[n][f][gy * step_y + tap.y][gx * step_x +
// tap.x] for a grid of pixels: a convolution, or its gradient for the input pixels that are a stride apart.
template <class A>
struct Pass {
    int64_t samples, groups, from_channels, to_channels;  // channels of one group
    PatchGrid<A> grid;
    const A* weights;
    int64_t w_group, w_to, w_from;
    ConvImages<A> to;
    ConvEnd<A> end;

    int64_t depth() const { return from_channels * int64_t(grid.taps.size()); }
    double flops() const {
        return 2.0 * double(samples * groups) * double(to_channels) * double(grid.pixels()) *
               double(std::max<int64_t>(1, depth()));
    }
    std::vector<int64_t> weight_offsets() const {
        std::vector<int64_t> offsets;
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

// Calls visit(channel, pixel - first, count, where they are) for pixels `first` to `last` of some channels of a result,
// counted over all samples, row by row.
template <class T, class Visit>
void for_pixels(const ConvImages<T>& images, T* image, int64_t channels, int64_t pixels, int64_t width, int64_t first,
                int64_t last, const Visit& visit) {
    for (int64_t p = first; p < last;) {
        const int64_t n = p / pixels, y = p % pixels / width, x = p % width, count = std::min(width - x, last - p);
        T* const row = image + n * images.n + y * images.y + x * images.x;
        for (int64_t c = 0; c < channels; ++c) visit(c, p - first, count, row + c * images.c);
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

// Runs a pass as products: the weights of all channels times the patches of a chunk of pixels, a tile's width at a
// time.
template <class A>
void run_products(const Pass<A>& pass, int threads) {
    const KernelTable& table = kernel_table();
    const ProductKernels<A>& products = table.product.of<A>();
    const PatchGrid<A>& grid = pass.grid;
    const int64_t depth = pass.depth(), rows = pass.to_channels, pixels = grid.pixels(), all = pass.samples * pixels;
    const int64_t taken = pass.groups * all;
    const Workers workers(cost::kFlop * pass.flops() + cost::kElement * double(taken) * double(rows) +
                              cost::kCopy * double(taken) * double(depth),
                          threads);

    // A chunk's results take a quarter of the second-level cache, beside the weights: every run of the depth adds to
    // them.
    // Patches are packed a few panels at a time, in whole tiles: into the first-level cache, or little more.
    const int64_t at_once = products.panels_at_once(rows), wide = ceil_div(4, at_once) * at_once;
    const int64_t panels = ceil_div(all, kPanel<A>);
    const int64_t near = near_cache_bytes() / 4 / (rows * kPanel<A> * int64_t(sizeof(A)));
    const int64_t wanted = ceil_div(panels * pass.groups, 4 * workers.threads());
    const int64_t chunk_panels = std::max<int64_t>(1, std::min(near, wanted) / wide) * wide;
    const int64_t chunk = chunk_panels * kPanel<A>, chunks = ceil_div(all, chunk), step = wide * kPanel<A>;
    const Patches<A> patches(grid, chunk);

    // Weights as rows of tiles: [depth / kPanel][row][kPanel], with one row of padding to avoid cache-set conflicts.
    const int64_t groups_deep = ceil_div(depth, kPanel<A>), group = (rows + 1) * kPanel<A>;
    PackedWeights& packed = kept_by_thread<PackedWeights>();
    A* const weights = packed.weights.template take<A>(pass.groups * groups_deep, group);
    const std::vector<int64_t> from = pass.weight_offsets();
    workers.each(pass.groups * groups_deep, [&](int64_t item) {
        const A* w = pass.weights + item / groups_deep * pass.w_group;
        A* to = weights + item * group;
        const int64_t first = item % groups_deep * kPanel<A>, units = std::min(kPanel<A>, depth - first);
        const int64_t* const offsets = from.data() + first;
        bool contiguous = true;
        for (int64_t u = 1; u < units; ++u) contiguous = contiguous && offsets[u] == offsets[0] + u;
        for (int64_t r = 0; r < rows; ++r, to += kPanel<A>) {
            const A* const row = w + r * pass.w_to;
            if (contiguous) {
                std::copy(row + offsets[0], row + offsets[0] + units, to);
            } else {
                for (int64_t u = 0; u < units; ++u) to[u] = row[offsets[u]];
            }
        }
    });
    // Biases as the result that the first run adds to, the same for every tile's width.
    A* const biases = pass.end.bias ? packed.biases.template take<A>(pass.groups * rows, step) : nullptr;
    for (int64_t r = 0; biases && r < pass.groups * rows; ++r) {
        std::fill(biases + r * step, biases + (r + 1) * step, pass.end.bias[r]);
    }

    const bool in_rows = (pass.to.x == 1 || grid.width == 1) && (pass.to.y == grid.width || grid.height == 1);
    workers.each(pass.groups * chunks, [&](int64_t item) {
        const int64_t g = item / chunks, first = item % chunks * chunk, last = std::min(all, first + chunk);
        const auto located = patches.locate(table, g * pass.from_channels, pass.from_channels, first, last);
        ConvScratch& scratch = conv_scratch();
        A* const images = pass.to.data + g * rows * pass.to.c;
        A* const result = scratch.result.template take<A>(rows, chunk);
        Product<A> p = {};
        p.rows = rows;
        p.a_row = kPanel<A>;
        p.a_step = 1;
        p.a_group = group;
        p.panel_stride = (std::min(kDepthRun, depth) + 1) * kPanel<A>;
        A* const panels_of_patches = scratch.patches.template take<A>(wide * p.panel_stride);
        for (int64_t k = 0; k == 0 || k < depth; k += kDepthRun) {
            p.depth = std::min(kDepthRun, depth - k);
            p.a = weights + g * groups_deep * group + k / kPanel<A> * group;
            for (int64_t pixel = first; pixel < last; pixel += step) {
                p.cols = std::min(step, last - pixel);
                for (int64_t j = 0; j * kPanel<A> < p.cols; ++j) {
                    located.pack(table, (pixel - first) / kPanel<A> + j, k, p.depth,
                                 panels_of_patches + j * p.panel_stride);
                }
                p.panels = panels_of_patches;
                // Pixels of two samples are not in one row: they go through memory that is.
                const int64_t n = pixel / pixels;
                const bool in_place = in_rows && (pixel + p.cols - 1) / pixels == n;
                p.c = in_place ? images + n * pass.to.n + pixel % pixels : result + (pixel - first);
                p.c_row = in_place ? pass.to.c : chunk;
                if (k > 0) {
                    p.base = p.c;
                    p.base_row = p.c_row;
                } else if (biases) {
                    p.base = biases + g * rows * step;
                    p.base_row = step;
                } else if (pass.end.accumulate) {
                    p.base = p.c;
                    p.base_row = p.c_row;
                    if (!in_place) {
                        for_pixels(pass.to, images, rows, pixels, grid.width, pixel, pixel + p.cols,
                                   [&](int64_t c, int64_t at, int64_t many, const A* old) {
                                       copy_pixels(old, pass.to.x, many, p.c + c * chunk + at, 1);
                                   });
                    }
                }
                products.product(p);
                if (k + kDepthRun < depth) continue;
                for (int64_t r = 0; pass.end.activation.kind != ActivationKind::identity && r < rows; ++r) {
                    A* const y = p.c + r * p.c_row;
                    table.activation.of<A>().activate(pass.end.activation, y, p.cols, y);
                }
                if (!in_place) {
                    for_pixels(pass.to, images, rows, pixels, grid.width, pixel, pixel + p.cols,
                               [&](int64_t c, int64_t at, int64_t many, A* y) {
                                   copy_pixels(p.c + c * chunk + at, 1, many, y, pass.to.x);
                               });
                }
            }
        }
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
    const std::vector<int64_t> offsets = geometry.offsets(grid.taps, pass.from_channels);
    const std::vector<int64_t> from = pass.weight_offsets();
    std::vector<A> weights;
    for (int64_t c = 0; c < pass.groups * pass.to_channels; ++c) {
        const A* w = pass.weights + c / pass.to_channels * pass.w_group + c % pass.to_channels * pass.w_to;
        for (const int64_t offset : from) weights.push_back(w[offset]);
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
        for (int64_t t = 0; t < pass.to_channels; ++t) {
            const int64_t channel = g * pass.to_channels + t;
            A* const to = pass.to.data + n * pass.to.n + channel * pass.to.c + top * pass.to.y;
            A* const y = in_place ? to : copy;
            const int64_t y_row = in_place ? pass.to.y : grid.width;
            const auto each_pixel = [&](const auto& visit) {
                for (int64_t r = 0; r < rows; ++r) {
                    for (int64_t j = 0; j < grid.width; ++j) visit(y[r * y_row + j], to[r * pass.to.y + j * pass.to.x]);
                }
            };
            if (!in_place && pass.end.accumulate) each_pixel([](A& result, A old) { result = old; });
            table.conv.of<A>().tap_rows(band, geometry.grid_row(), offsets.data(), weights.data() + channel * depth,
                                        depth, {rows, grid.width}, pass.end.accumulate,
                                        pass.end.bias ? pass.end.bias[channel] : A(0), y, y_row);
            for (int64_t r = 0; pass.end.activation.kind != ActivationKind::identity && r < rows; ++r) {
                table.activation.of<A>().activate(pass.end.activation, y + r * y_row, grid.width, y + r * y_row);
            }
            if (!in_place) each_pixel([](A result, A& out) { out = result; });
        }
    });
}

template <class A>
void run_pass(Pass<A> pass, int threads) {
    if (pass.samples == 0 || pass.groups == 0 || pass.to_channels == 0 || pass.grid.pixels() == 0) return;
    if (pass.grid.is_flat() && (pass.to.y == pass.grid.width * pass.to.x || pass.grid.height == 1)) pass.grid.flatten();
    pass.to_channels <= kFewChannels ? run_directly(pass, threads) : run_products(pass, threads);
}

// The pixel of dy that input pixel `first` and those a stride apart read through tap k, if any: first = pixel * stride
// + k * dilation - before.
bool reads(const ConvAxis& axis, int64_t first, int64_t k, int64_t* pixel) {
    const int64_t distance = first + axis.before - k * axis.dilation;
    *pixel = distance / axis.stride;
    return distance % axis.stride == 0 && reaches(*pixel, ceil_div(axis.input - first, axis.stride), 1, axis.output);
}

}  // namespace

template <class A>
void conv_forward(const ConvShape& shape, const ConvImages<const A>& x, const ConvWeights<const A>& w,
                  const ConvEnd<A>& end, int threads, const ConvImages<A>& y) {
    const PatchGrid<A> grid = forward_grid(shape, x, w);
    run_pass<A>(
        {shape.samples, shape.groups, shape.inputs, shape.outputs, grid, w.data, shape.outputs * w.o, w.o, w.i, y, end},
        threads);
}

template <class A>
void conv_input(const ConvShape& shape, const ConvImages<const A>& dy, const ConvWeights<const A>& w,
                const ConvEnd<A>& end, int threads, const ConvImages<A>& dx) {
    // Input pixels that are a stride apart read dy through the same taps.
    const int64_t step_y = std::min(shape.y.stride, shape.y.input), step_x = std::min(shape.x.stride, shape.x.input);
    for (int64_t y = 0; y < step_y; ++y) {
        for (int64_t x = 0; x < step_x; ++x) {
            PatchGrid<A> grid = {dy,
                                 shape.y.output,
                                 shape.x.output,
                                 1,
                                 1,
                                 {},
                                 ceil_div(shape.y.input - y, shape.y.stride),
                                 ceil_div(shape.x.input - x, shape.x.stride)};
            for (int64_t ky = 0; ky < shape.y.kernel; ++ky) {
                for (int64_t kx = 0; kx < shape.x.kernel; ++kx) {
                    Tap tap = {0, 0, ky * w.y + kx * w.x};
                    const bool down = reads(shape.y, y, ky, &tap.y), across = reads(shape.x, x, kx, &tap.x);
                    if (down && across) grid.taps.push_back(tap);
                }
            }
            const ConvImages<A> to = {dx.data + y * dx.y + x * dx.x, dx.n, dx.c, dx.y * step_y, dx.x * step_x};
            run_pass<A>({shape.samples, shape.groups, shape.outputs, shape.inputs, grid, w.data, shape.outputs * w.o,
                         w.i, w.o, to, end},
                        threads);
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
