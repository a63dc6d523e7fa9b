#include <algorithm>

#include "../base/dispatch.h"
#include "../base/parallel.h"
#include "../base/scratch.h"
#include "../kernels.h"
#include "conv.h"
#include "patches.h"

namespace rg {
namespace {

template <class A>
void set_to_zero(const ConvShape& shape, const ConvWeights<A>& dw) {
    for (int64_t o = 0; o < shape.groups * shape.outputs; ++o) {
        for (int64_t i = 0; i < shape.inputs; ++i) {
            for (int64_t y = 0; y < shape.y.kernel; ++y) {
                for (int64_t x = 0; x < shape.x.kernel; ++x) dw.data[o * dw.o + i * dw.i + y * dw.y + x * dw.x] = 0;
            }
        }
    }
}

// dw of few output channels: dot products of dy and the input, tap by tap.
template <class A>
void dot_weights(const ConvShape& shape, const PatchGrid<A>& grid, const ConvImages<const A>& dy, bool accumulate,
                 int threads, const ConvWeights<A>& dw) {
    const KernelTable& table = kernel_table();
    const ConvImages<const A>& x = grid.from;
    const Vector<Tap>& taps = grid.taps;
    const int64_t count = int64_t(taps.size()), height = shape.y.output, width = shape.x.output;
    const Band<A> geometry(taps, shape.y.stride, shape.x.stride, width, height);
    const Vector<int64_t> offsets = geometry.offsets(taps, 1);
    const double work = double(shape.samples * shape.groups) * double(shape.inputs * shape.outputs) *
                        double(height * width) * double(count);
    Workers(8 * cost::kFlop * work, threads).each(shape.groups * shape.inputs, [&](int64_t channel) {
        const int64_t g = channel / shape.inputs, i = channel % shape.inputs;
        double* const sums = conv_scratch().sums.template take<double>(shape.outputs * count, kPanel<A>);
        std::fill(sums, sums + shape.outputs * count * kPanel<A>, 0.0);
        for (int64_t n = 0; n < shape.samples; ++n) {
            A* const band = conv_scratch().band.template take<A>(geometry.size(1));
            geometry.load(table, x, x.data + n * x.n + channel * x.c, 1, shape.y.input, shape.x.input, 0, height, band);
            for (int64_t o = 0; o < shape.outputs; ++o) {
                const A* from = dy.data + n * dy.n + (g * shape.outputs + o) * dy.c;
                int64_t row = dy.y;
                if (dy.x != 1 && width > 1) {
                    A* copy = conv_scratch().patches.template take<A>(height, width);
                    for (int64_t p = 0; p < height * width; ++p) copy[p] = from[p / width * dy.y + p % width * dy.x];
                    from = copy;
                    row = width;
                }
                table.conv.of<A>().tap_sums(band, geometry.grid_row(), offsets.data(), count, {height, width}, from,
                                            row, sums + o * count * kPanel<A>);
            }
        }
        for (int64_t o = 0; o < shape.outputs; ++o) {
            for (int64_t t = 0; t < count; ++t) {
                const double* lanes = sums + (o * count + t) * kPanel<A>;
                double sum = 0;
                for (int64_t u = 0; u < kPanel<A>; ++u) sum += lanes[u];
                A& to = dw.data[(g * shape.outputs + o) * dw.o + i * dw.i + taps[size_t(t)].weight];
                to = A(accumulate ? double(to) + sum : sum);
            }
        }
    });
}

// What the calling thread keeps for all: panels of dy, and the sums, [group][input][tap][output].
struct WeightSums {
    Buffer panels, sums;
};

// dw as products: the patches of kDepthRun pixels, as rows, times those pixels of dy, in panels. dy is packed once,
// some samples at a time. Then each piece of dw, which is some input channels of a group, adds up all of their pixels.
template <class A>
void multiply_weights(const ConvShape& shape, const PatchGrid<A>& grid, const ConvImages<const A>& dy, bool accumulate,
                      int threads, const ConvWeights<A>& dw) {
    const KernelTable& table = kernel_table();
    const ProductKernels<A>& products = table.product.of<A>();
    const int64_t count = int64_t(grid.taps.size()), width = grid.width, pixels = grid.pixels();
    const int64_t run = std::min(kDepthRun, pixels), sample_runs = ceil_div(pixels, kDepthRun);
    const int64_t runs = shape.samples * sample_runs, panels = ceil_div(shape.outputs, kPanel<A>);
    const double flops = 2.0 * double(shape.samples * shape.groups) * double(shape.inputs * shape.outputs) *
                         double(pixels) * double(count);
    const double copied =
        double(shape.samples * shape.groups) * double(pixels) * double(shape.inputs * count + shape.outputs);
    const Workers workers(cost::kFlop * flops + cost::kCopy * copied, threads);
    // The sums of a piece, and its patches, take a quarter of the second-level cache each.
    const int64_t near = near_cache_bytes() / 4 / (count * std::max(shape.outputs, run) * int64_t(sizeof(A)));
    const int64_t wanted = workers.threads() == 1 ? 1 : 4 * workers.threads();
    const int64_t in_step =
        std::clamp<int64_t>(std::min(near, ceil_div(shape.inputs * shape.groups, wanted)), 1, shape.inputs);
    const int64_t in_pieces = ceil_div(shape.inputs, in_step);
    const int64_t out_pieces = std::clamp<int64_t>(wanted / (in_pieces * shape.groups), 1, panels);
    const int64_t out_step = ceil_div(panels, out_pieces) * kPanel<A>;
    const int64_t pieces = in_pieces * ceil_div(shape.outputs, out_step);
    const Patches<A> patches(grid, run);
    const bool in_rows = grid.is_flat() && grid.from.x == 1;  // the pixels of a channel are a row of patches

    // Panels of dy, [group][run][panel][pixel][kPanel], for some runs at a time. Every piece of the inputs reads them,
    // so the more of these, the more runs; they stay in the last level, or else in the second.
    const int64_t panel_stride = (run + 1) * kPanel<A>, run_stride = checked_product(panels, panel_stride);
    const int64_t room = in_pieces == 1 ? near_cache_bytes() / 4 * workers.threads() : caches().last_level / 4;
    const int64_t far = room / (checked_product(shape.groups, run_stride) * int64_t(sizeof(A)));
    const int64_t run_step = std::clamp<int64_t>(far, 1, std::max<int64_t>(1, runs));
    WeightSums& kept = kept_by_thread<WeightSums>();
    A* const packed = kept.panels.template take<A>(shape.groups * run_step, run_stride);
    A* const sums = kept.sums.template take<A>(shape.groups * shape.inputs, count, shape.outputs);
    const bool flat = dy.y == width * dy.x || grid.height == 1;
    for (int64_t first_run = 0; first_run < runs; first_run += run_step) {
        const int64_t many_runs = std::min(run_step, runs - first_run);
        workers.each(shape.groups * many_runs, [&](int64_t item) {
            const int64_t g = item / many_runs, at = first_run + item % many_runs;
            const int64_t first = at % sample_runs * kDepthRun, last = std::min(pixels, first + kDepthRun);
            const A* const from = dy.data + at / sample_runs * dy.n + g * shape.outputs * dy.c;
            A* const to = packed + (g * run_step + item % many_runs) * run_stride;
            for (int64_t j = 0; j < panels; ++j) {
                const int64_t units = std::min(kPanel<A>, shape.outputs - j * kPanel<A>);
                for (int64_t pixel = first; pixel < last;) {
                    const int64_t many = flat ? last - pixel : std::min(last - pixel, width - pixel % width);
                    products.pack_rows(from + j * kPanel<A> * dy.c + pixel / width * dy.y + pixel % width * dy.x, dy.x,
                                       dy.c, units, many, to + j * panel_stride + (pixel - first) * kPanel<A>);
                    pixel += many;
                }
            }
        });
        workers.each(shape.groups * pieces, [&](int64_t item) {
            const int64_t g = item / pieces, piece = item % pieces;
            const int64_t i0 = piece % in_pieces * in_step, inputs = std::min(in_step, shape.inputs - i0);
            const int64_t o0 = piece / in_pieces * out_step;
            Product<A> p = {};
            p.rows = inputs * count;
            p.cols = std::min(out_step, shape.outputs - o0);
            p.panel_stride = panel_stride;
            p.c = sums + (g * shape.inputs + i0) * count * shape.outputs + o0;
            p.c_row = p.base_row = shape.outputs;
            p.base = p.c;
            for (int64_t r = 0; first_run == 0 && r < p.rows; ++r) {
                std::fill(p.c + r * p.c_row, p.c + r * p.c_row + p.cols, A(0));
            }
            for (int64_t at = 0; at < many_runs; ++at) {
                const int64_t n = (first_run + at) / sample_runs, k = (first_run + at) % sample_runs * kDepthRun;
                p.depth = std::min(kDepthRun, pixels - k);
                p.panels = packed + (g * run_step + at) * run_stride + o0 / kPanel<A> * panel_stride;
                if (in_rows) {
                    p.a = grid.from.data + n * grid.from.n + (g * shape.inputs + i0) * grid.from.c + k;
                    p.a_row = grid.from.c;
                    p.a_group = kPanel<A>;
                } else {
                    const auto located =
                        patches.locate(table, g * shape.inputs + i0, inputs, n * pixels + k, n * pixels + k + p.depth);
                    p.a_row = kPanel<A>;
                    p.a_group = (p.rows + 1) * kPanel<A>;
                    A* const rows = conv_scratch().patches.template take<A>(ceil_div(run, kPanel<A>), p.a_group);
                    for (int64_t j = 0; j * kPanel<A> < p.depth; ++j) {
                        located.pack(table, j, 0, p.rows, rows + j * p.a_group);
                    }
                    p.a = rows;
                }
                p.a_step = 1;
                products.product(p);
            }
        });
    }
    // The sums as rows of dw, kPanel columns of them at a time.
    const int64_t rows = shape.inputs * count;
    Vector<int64_t> to;
    for (int64_t i = 0; i < shape.inputs; ++i) {
        for (const Tap& tap : grid.taps) to.push_back(i * dw.i + tap.weight);
    }
    const int64_t across = ceil_div(rows, kPanel<A>);
    workers.each(shape.groups * across, [&](int64_t item) {
        const int64_t g = item / across, first = item % across * kPanel<A>, units = std::min(kPanel<A>, rows - first);
        A* const columns = conv_scratch().patches.template take<A>(shape.outputs, kPanel<A>);
        products.pack_columns(sums + (g * rows + first) * shape.outputs, shape.outputs, 1, units, shape.outputs,
                              columns);
        for (int64_t o = 0; o < shape.outputs; ++o) {
            A* const row = dw.data + (g * shape.outputs + o) * dw.o;
            const A* const from = columns + o * kPanel<A>;
            for (int64_t u = 0; u < units; ++u) {
                A& element = row[to[size_t(first + u)]];
                element = accumulate ? element + from[u] : from[u];
            }
        }
    });
}

}  // namespace

template <class A>
void conv_weights(const ConvShape& shape, const ConvImages<const A>& x, const ConvImages<const A>& dy, bool accumulate,
                  int threads, const ConvWeights<A>& dw) {
    if (any_zero({shape.groups, shape.inputs, shape.outputs, shape.y.kernel, shape.x.kernel})) return;
    const PatchGrid<A> grid = forward_grid(shape, x, dw);
    const bool none = grid.taps.empty() || any_zero({shape.samples, grid.height, grid.width});
    if (!accumulate && (none || int64_t(grid.taps.size()) < shape.y.kernel * shape.x.kernel)) set_to_zero(shape, dw);
    if (none) return;
    shape.outputs <= kFewChannels ? dot_weights(shape, grid, dy, accumulate, threads, dw)
                                  : multiply_weights(shape, grid, dy, accumulate, threads, dw);
}

template <class A>
void channel_sums(const ConvImages<const A>& images, int64_t samples, int64_t channels, int64_t height, int64_t width,
                  bool accumulate, int threads, A* sums) {
    const KernelTable& table = kernel_table();
    const Workers workers(cost::kElement * double(samples * channels) * double(height * width), threads);
    const auto put = [&](int64_t channel, double total) {
        A& sum = sums[channel];
        sum = A(accumulate ? double(sum) + total : total);
    };
    if (any_zero({samples, height, width})) {
        if (!accumulate) std::fill(sums, sums + channels, A(0));
        return;
    }
    if (images.x == 1) {
        workers.each(channels, [&](int64_t channel) {
            const bool flat = images.y == width || height == 1;
            const BlockSize size = flat ? BlockSize{1, height * width} : BlockSize{height, width};
            double moments[2] = {};
            for (int64_t n = 0; n < samples; ++n) {
                const A* from = images.data + n * images.n + channel * images.c;
                table.norm.of<A>().plane_moments(size, {from, images.y, 0}, A(0), moments);
            }
            put(channel, moments[0]);
        });
        return;
    }
    workers.each(ceil_div(channels, kPanel<A>), [&](int64_t panel) {
        const int64_t first = panel * kPanel<A>, units = std::min(kPanel<A>, channels - first);
        double totals[kPanel<A>] = {};
        A* const packed = conv_scratch().patches.template take<A>(width, kPanel<A>);
        for (int64_t n = 0; n < samples; ++n) {
            for (int64_t y = 0; y < height; ++y) {
                table.product.of<A>().pack_rows(images.data + n * images.n + first * images.c + y * images.y, images.x,
                                                images.c, units, width, packed);
                table.product.of<A>().panel_sums(packed, nullptr, 0, width, totals);
            }
        }
        for (int64_t u = 0; u < units; ++u) put(first + u, totals[u]);
    });
}

#define RG_INSTANTIATE(A)                                                                                              \
    template void conv_weights<A>(const ConvShape&, const ConvImages<const A>&, const ConvImages<const A>&, bool, int, \
                                  const ConvWeights<A>&);                                                              \
    template void channel_sums<A>(const ConvImages<const A>&, int64_t, int64_t, int64_t, int64_t, bool, int, A*);
RG_INSTANTIATE(float)
RG_INSTANTIATE(double)
#undef RG_INSTANTIATE

}  // namespace rg
