#include <algorithm>

#include "../base/dispatch.h"
#include "../base/parallel.h"
#include "../base/scratch.h"
#include "../kernels.h"
#include "../product/blocked.h"
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

// Panels of dy, and the sums, [group][input][tap][output], which the calling thread keeps for all.
struct WeightScratch {
    Buffer panels, sums;
};

// The patches of a group's input channels as an operand, [input and tap][pixel of all samples].
template <class A>
struct PatchRows {
    const KernelTable& table;
    const PatchGrid<A>& grid;
    const Patches<A>& patches;
    int64_t first_channel;

    StateArray<const A> near(const ProductKernels<A>&, int64_t row, int64_t rows, int64_t k, int64_t depth,
                             int64_t) const {
        const int64_t taps = int64_t(grid.taps.size()), channel = row / taps, first = row - channel * taps;
        if (grid.is_flat() && grid.from.x == 1) {  // the pixels of a channel are a row of patches
            const int64_t n = k / grid.pixels(), pixel = k - n * grid.pixels();
            const A* const image = grid.from.data + n * grid.from.n + pixel;
            return {image + (first_channel + channel) * grid.from.c, grid.from.c, kPanel<A>};
        }
        const auto located = patches.locate(table, first_channel + channel, ceil_div(first + rows, taps), k, k + depth);
        const int64_t group = (rows + 1) * kPanel<A>, panels = ceil_div(depth, kPanel<A>);
        A* const packed = conv_scratch().patches.template take<A>(panels, group);
        for (int64_t j = 0; j < panels; ++j) located.pack(table, j, first, rows, packed + j * group);
        return {packed, kPanel<A>, group};
    }
};

// dy as an operand, [pixel of all samples][output].
template <class A>
struct GradientPanels {
    ConvImages<const A> dy;  // from the first output on
    int64_t outputs, width, pixels;
    bool flat;  // the rows of an image can be taken as one

    bool by_rows() const { return dy.c == 1; }
    void pack(const ProductKernels<A>& kernels, int64_t panel, int64_t k, int64_t depth, A* to) const {
        const int64_t output = panel * kPanel<A>, units = std::min(kPanel<A>, outputs - output);
        const A* const from = dy.data + output * dy.c;
        const int64_t n = k / pixels, line = flat ? pixels : width;
        for (int64_t pixel = k - n * pixels, last = pixel + depth; pixel < last;) {
            const int64_t y = pixel / line, x = pixel - y * line, many = std::min(last - pixel, line - x);
            kernels.pack_rows(from + n * dy.n + y * dy.y + x * dy.x, dy.x, dy.c, units, many, to);
            to += many * kPanel<A>;
            pixel += many;
        }
    }
};

constexpr int64_t kLeastRows = 28;  // of a thread's piece of the sums: two tiles

// dw as products: the patches of all pixels, as rows, times those pixels of dy.
template <class A>
void multiply_weights(const ConvShape& shape, const PatchGrid<A>& grid, const ConvImages<const A>& dy, bool accumulate,
                      int threads, const ConvWeights<A>& dw) {
    const KernelTable& table = kernel_table();
    const ProductKernels<A>& products = table.product.of<A>();
    const int64_t count = int64_t(grid.taps.size()), pixels = grid.pixels(), rows = shape.inputs * count;
    const int64_t run = std::min(kDepthRun, pixels);
    A* const sums = kept_by_thread<WeightScratch>().sums.template take<A>(shape.groups, rows, shape.outputs);

    Product<A> whole = {};
    whole.rows = rows;
    whole.depth = checked_product(shape.samples, pixels);
    whole.cols = whole.c_row = shape.outputs;
    const double flops = 2.0 * double(rows) * double(shape.outputs) * double(whole.depth);
    const double each = cost::kFlop * flops + cost::kCopy * double(whole.depth) * double(rows + shape.outputs);
    // A block of patches, and its sums, take a quarter of the second-level cache each. Every block of rows reads the
    // panels of dy: if there is only one, they can stay in the second-level cache too.
    Blocking blocking;
    blocking.segment = pixels;
    blocking.near_depth = blocking.pack_depth = kDepthRun;
    const int64_t near = near_cache_bytes() / 4 / (count * std::max(shape.outputs, run) * int64_t(sizeof(A)));
    blocking.near_rows = std::max<int64_t>(1, near) * count;
    blocking.least_rows = kLeastRows;
    // Outputs are split only if there are too few rows to share, because every piece packs its patches for itself.
    const int64_t wanted = 4 * threads, row_pieces = std::min(wanted, ceil_div(rows, kLeastRows));
    blocking.pieces = 2 * row_pieces > wanted ? row_pieces : wanted;
    if (rows <= blocking.near_rows && (threads == 1 || rows <= kLeastRows)) {
        const int64_t deep = checked_product(run, ceil_div(shape.outputs, kPanel<A>) * kPanel<A>) * int64_t(sizeof(A));
        blocking.room = std::max(deep, near_cache_bytes() / 4 * threads);
    }
    const Patches<A> patches(grid, run);
    const bool flat = dy.y == grid.width * dy.x || grid.height == 1;
    multiply_all(shape.groups, each, threads, [&](int64_t g) {
        Product<A> product = whole;
        product.c = sums + g * rows * shape.outputs;
        ConvImages<const A> part = dy;
        part.data += g * shape.outputs * dy.c;
        return BlockedProduct<A, PatchRows<A>, GradientPanels<A>>(
            products, product, {table, grid, patches, g * shape.inputs},
            {part, shape.outputs, grid.width, pixels, flat}, kept_by_thread<WeightScratch>().panels, blocking);
    });
    // The sums as rows of dw, kPanel columns of them at a time.
    Vector<int64_t> to;
    for (int64_t i = 0; i < shape.inputs; ++i) {
        for (const Tap& tap : grid.taps) to.push_back(i * dw.i + tap.weight);
    }
    const int64_t across = ceil_div(rows, kPanel<A>);
    Workers(each * double(shape.groups), threads).each(shape.groups * across, [&](int64_t item) {
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
