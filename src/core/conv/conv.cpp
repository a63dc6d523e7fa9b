#include "conv.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "../base/dispatch.h"
#include "../base/parallel.h"
#include "../base/scratch.h"
#include "../kernels.h"

namespace rg {
namespace {

// Sizes of padded images may overflow, since neither padding nor strides need fit in memory.
int64_t checked_product(int64_t a, int64_t b) {
    int64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product) || product > INT64_MAX / 4) throw std::bad_alloc();
    return product;
}

// A tap of a kernel: the pixel that grid pixel (0, 0) reads through it, and where its weight is.
struct Tap {
    int64_t y, x, weight;
};

// to[n][t][gy][gx] = sum over channels f and taps of w[t][f][tap] * from[n][f][gy * step_y + tap.y][gx * step_x +
// tap.x] for a grid of pixels: a convolution, or its gradient for the input pixels that are a stride apart.
template <class A>
struct Pass {
    int64_t samples, groups, from_channels, to_channels;  // channels of one group
    ConvImages<const A> from;
    int64_t from_height, from_width, step_y, step_x;
    std::vector<Tap> taps;
    const A* weights;
    int64_t w_group, w_to, w_from;
    ConvImages<A> to;
    int64_t height, width;  // of the grid
    ConvEnd<A> end;

    int64_t depth() const { return from_channels * int64_t(taps.size()); }
    int64_t pixels() const { return height * width; }
    double flops() const {
        return 2.0 * double(samples * groups) * double(to_channels) * double(pixels()) *
               double(std::max<int64_t>(1, depth()));
    }
    std::vector<int64_t> weight_offsets() const {
        std::vector<int64_t> offsets;
        for (int64_t f = 0; f < from_channels; ++f) {
            for (const Tap& tap : taps) offsets.push_back(f * w_from + tap.weight);
        }
        return offsets;
    }
};

// A thread's own memory: part of an image, panels of patches, those of dy, and part of a result.
struct ConvScratch {
    Buffer band, patches, dy, result, sums;
};
ConvScratch& my_scratch() { return kept_by_thread<ConvScratch>(); }
// The weights of all groups, packed by the calling thread for all.
struct PackedWeights {
    Buffer buffer;
};

// The part of an image that some rows of the grid read, with its padding: [channel][row][column % step_x][column /
// step_x]. The pixels that a tap meets in a row of the grid are contiguous whatever the step.
template <class A>
class Band {
public:
    Band(const std::vector<Tap>& taps, int64_t step_y, int64_t step_x, int64_t grid_width, int64_t grid_rows)
        : step_y_(step_y), step_x_(grid_width > 1 ? step_x : 1) {
        if (!taps.empty()) {
            const auto by_y = [](const Tap& a, const Tap& b) { return a.y < b.y; };
            const auto by_x = [](const Tap& a, const Tap& b) { return a.x < b.x; };
            const auto y = std::minmax_element(taps.begin(), taps.end(), by_y);
            const auto x = std::minmax_element(taps.begin(), taps.end(), by_x);
            first_y_ = y.first->y;
            first_x_ = x.first->x;
            span_ = y.second->y - first_y_ + 1;
            width_ = (grid_width - 1) * step_x + x.second->x - first_x_ + 1;
        }
        phase_ = ceil_div(width_, step_x_);
        row_ = phase_ * step_x_;
        grid_row_ = checked_product(step_y, row_);
        plane_ = checked_product(rows(grid_rows), row_);
    }

    // From one row of the grid to the next.
    int64_t grid_row() const { return grid_row_; }
    int64_t plane() const { return plane_; }
    // Rows of the band for so many rows of the grid.
    int64_t rows(int64_t grid_rows) const { return (grid_rows - 1) * step_y_ + span_; }
    int64_t offset(const Tap& tap) const {
        const int64_t x = tap.x - first_x_;
        return (tap.y - first_y_) * row_ + x % step_x_ * phase_ + x / step_x_;
    }
    std::vector<int64_t> offsets(const std::vector<Tap>& taps, int64_t channels) const {
        std::vector<int64_t> all;
        checked_product(channels, plane_);
        for (int64_t f = 0; f < channels; ++f) {
            for (const Tap& tap : taps) all.push_back(f * plane_ + offset(tap));
        }
        return all;
    }

    // Loads the band of grid rows `first_row` to `first_row + grid_rows`. Kernels read up to a panel beyond its end.
    A* load(const ProductKernels<A>& kernels, const ConvImages<const A>& from, const A* image, int64_t channels,
            int64_t height, int64_t width, int64_t first_row, int64_t grid_rows) const {
        A* const band = my_scratch().band.take<A>(channels * plane_ + kPanel<A>);
        std::fill(band + channels * plane_, band + channels * plane_ + kPanel<A>, A(0));
        const int64_t y0 = first_row * step_y_ + first_y_;
        const int64_t begin = std::clamp<int64_t>(-first_x_, 0, width_);
        const int64_t end = std::clamp<int64_t>(width - first_x_, begin, width_);
        if (from.c == 1 && from.x != 1 && step_x_ == 1) {
            load_interleaved(kernels, from, image, channels, height, y0, grid_rows, begin, end, band);
        } else {
            for (int64_t f = 0; f < channels; ++f) {
                load_plane(from, image + f * from.c, height, y0, grid_rows, begin, end, band + f * plane_);
            }
        }
        return band;
    }

private:
    void load_plane(const ConvImages<const A>& from, const A* image, int64_t height, int64_t y0, int64_t grid_rows,
                    int64_t begin, int64_t end, A* to) const {
        const int64_t count = rows(grid_rows);
        const int64_t above = begin < end ? std::clamp<int64_t>(-y0, 0, count) : count;
        const int64_t below = std::clamp<int64_t>(height - y0, above, count);
        std::fill(to, to + above * row_, A(0));
        const A* const source = above < below ? image + (y0 + above) * from.y + (first_x_ + begin) * from.x : nullptr;
        if (source && step_x_ == 1 && from.x == 1 && from.y == row_ && end - begin == row_) {
            memcpy(to + above * row_, source, size_t((below - above) * row_) * sizeof(A));
        } else {
            for (int64_t r = above; r < below; ++r) {
                copy_row(source + (r - above) * from.y, from.x, begin, end, to + r * row_);
            }
        }
        std::fill(to + below * row_, to + count * row_, A(0));
    }

    // Channels are contiguous: transpose a panel of pixels at a time.
    void load_interleaved(const ProductKernels<A>& kernels, const ConvImages<const A>& from, const A* image,
                          int64_t channels, int64_t height, int64_t y0, int64_t grid_rows, int64_t begin, int64_t end,
                          A* band) const {
        A* const square = my_scratch().patches.take<A>(channels * kPanel<A>);
        for (int64_t r = 0; r < rows(grid_rows); ++r) {
            const bool inside = y0 + r >= 0 && y0 + r < height && begin < end;
            for (int64_t f = 0; f < channels; ++f) {
                A* to = band + f * plane_ + r * row_;
                std::fill(to, to + (inside ? begin : row_), A(0));
                if (inside) std::fill(to + end, to + row_, A(0));
            }
            for (int64_t j = begin; inside && j < end; j += kPanel<A>) {
                const int64_t count = std::min(kPanel<A>, end - j);
                kernels.pack_columns(image + (y0 + r) * from.y + (first_x_ + j) * from.x, from.x, 1, count, channels,
                                     square);
                for (int64_t f = 0; f < channels; ++f) {
                    memcpy(band + f * plane_ + r * row_ + j, square + f * kPanel<A>, size_t(count) * sizeof(A));
                }
            }
        }
    }

    // Columns begin to end of a row, by phases, and zeros around them.
    void copy_row(const A* from, int64_t stride, int64_t begin, int64_t end, A* to) const {
        if (step_x_ == 1) {
            std::fill(to, to + begin, A(0));
            if (stride == 1) {
                memcpy(to + begin, from, size_t(end - begin) * sizeof(A));
            } else {
                for (int64_t j = begin; j < end; ++j) to[j] = from[(j - begin) * stride];
            }
            std::fill(to + end, to + row_, A(0));
            return;
        }
        for (int64_t p = 0; p < step_x_; ++p) {
            for (int64_t q = 0; q < phase_; ++q) {
                const int64_t j = q * step_x_ + p;
                to[p * phase_ + q] = j >= begin && j < end ? from[(j - begin) * stride] : A(0);
            }
        }
    }

    int64_t step_y_, step_x_;
    int64_t first_y_ = 0, first_x_ = 0, span_ = 0, width_ = 0;
    int64_t phase_ = 0, row_ = 0, grid_row_ = 0, plane_ = 0;
};

// The runs of the panel of grid pixels `first` to `first + count`, in a band that begins with grid row `top`.
template <class A>
int64_t patch_runs(const Band<A>& band, int64_t first, int64_t count, int64_t top, int64_t width, PatchRun* runs) {
    int64_t n = 0;
    for (int64_t done = 0; done < count;) {
        const int64_t y = (first + done) / width, x = (first + done) % width;
        runs[n++] = {(y - top) * band.grid_row() + x, done};
        done += width - x;
    }
    return n;
}

// Packs the patches of grid pixels `first` to `last` as panels, [pixels / kPanel][depth][kPanel].
template <class A>
void pack_patches(const ConvKernels<A>& kernels, const Band<A>& geometry, const A* band, const int64_t* offsets,
                  int64_t depth, int64_t first, int64_t last, int64_t width, A* panels, int64_t panel_stride) {
    const int64_t top = first / width;
    for (int64_t pixel = first; pixel < last; pixel += kPanel<A>, panels += panel_stride) {
        PatchRun runs[kPanel<A>];
        const int64_t count = patch_runs(geometry, pixel, std::min(kPanel<A>, last - pixel), top, width, runs);
        kernels.pack_taps(band, offsets, depth, runs, count, panels);
    }
}

// Grid pixels `first` to `last` of all rows of a result, from an array of images to rows and back.
template <class T, class Visit>
void for_pixels(const ConvImages<T>& images, T* image, int64_t channels, int64_t width, int64_t first, int64_t last,
                const Visit& visit) {
    for (int64_t p = first; p < last;) {
        const int64_t y = p / width, x = p % width, count = std::min(width - x, last - p);
        for (int64_t c = 0; c < channels; ++c)
            visit(c, p - first, count, image + c * images.c + y * images.y + x * images.x);
        p += count;
    }
}

// Runs a pass as products: patches of a chunk of pixels, in panels, times the weights of all channels.
template <class A>
void run_products(const Pass<A>& pass, int threads) {
    const KernelTable& table = kernel_table();
    const ProductKernels<A>& products = table.product.of<A>();
    const ConvKernels<A>& kernels = table.conv.of<A>();
    const Workers workers(cost::kFlop * pass.flops(), threads);
    const int64_t depth = pass.depth(), rows = pass.to_channels, pixels = pass.pixels();

    // Panels of patches take a quarter of the second-level cache, beside the weights and the result.
    const int64_t panels = ceil_div(pixels, kPanel<A>), wide = products.panels_at_once(rows);
    const int64_t near = near_cache_bytes() / 4 / (kDepthRun * kPanel<A> * int64_t(sizeof(A)));
    const int64_t wanted = ceil_div(panels * pass.samples * pass.groups, 4 * workers.threads());
    const int64_t chunk_panels =
        std::min(ceil_div(panels, wide), std::max<int64_t>(1, std::min(near, wanted) / wide)) * wide;
    const int64_t chunk = chunk_panels * kPanel<A>, chunks = ceil_div(pixels, chunk);
    const int64_t grid_rows = std::min(pass.height, (chunk + pass.width - 2) / pass.width + 1);
    const Band<A> geometry(pass.taps, pass.step_y, pass.step_x, pass.width, grid_rows);
    const std::vector<int64_t> offsets = geometry.offsets(pass.taps, pass.from_channels);

    // Weights as rows of tiles: [depth / kPanel][row][kPanel], with one row of padding to avoid cache-set conflicts.
    const int64_t groups_deep = ceil_div(depth, kPanel<A>), group = (rows + 1) * kPanel<A>;
    A* const packed = kept_by_thread<PackedWeights>().buffer.template take<A>(pass.groups * groups_deep, group);
    const std::vector<int64_t> from = pass.weight_offsets();
    workers.each(pass.groups * groups_deep, [&](int64_t item) {
        const A* w = pass.weights + item / groups_deep * pass.w_group;
        A* to = packed + item * group;
        const int64_t first = item % groups_deep * kPanel<A>, units = std::min(kPanel<A>, depth - first);
        for (int64_t r = 0; r < rows; ++r, to += kPanel<A>) {
            for (int64_t u = 0; u < units; ++u) to[u] = w[r * pass.w_to + from[size_t(first + u)]];
        }
    });

    const bool in_place = (pass.to.x == 1 || pass.width == 1) && (pass.to.y == pass.width || pass.height == 1);
    workers.each(pass.samples * pass.groups * chunks, [&](int64_t item) {
        const int64_t first = item % chunks * chunk, last = std::min(pixels, first + chunk), count = last - first;
        const int64_t g = item / chunks % pass.groups, n = item / chunks / pass.groups, top = first / pass.width;
        const A* const band = geometry.load(
            products, pass.from, pass.from.data + n * pass.from.n + g * pass.from_channels * pass.from.c,
            pass.from_channels, pass.from_height, pass.from_width, top, (last - 1) / pass.width - top + 1);
        A* const image = pass.to.data + n * pass.to.n + g * rows * pass.to.c;
        Product<A> p = {};
        p.rows = rows;
        p.cols = count;
        p.c = in_place ? image + first : my_scratch().result.template take<A>(rows, chunk);
        p.c_row = in_place ? pass.to.c : chunk;
        p.base = pass.end.accumulate || pass.end.bias ? p.c : nullptr;
        p.base_row = p.c_row;
        if (pass.end.bias) {
            for (int64_t r = 0; r < rows; ++r) {
                std::fill(p.c + r * p.c_row, p.c + r * p.c_row + count, pass.end.bias[g * rows + r]);
            }
        } else if (pass.end.accumulate && !in_place) {
            for_pixels(pass.to, image, rows, pass.width, first, last,
                       [&](int64_t c, int64_t at, int64_t many, const A* old) {
                           for (int64_t j = 0; j < many; ++j) p.c[c * p.c_row + at + j] = old[j * pass.to.x];
                       });
        }
        const int64_t longest = std::min(kDepthRun, depth);
        p.panel_stride = (longest + 1) * kPanel<A>;
        A* const patches =
            my_scratch().patches.template take<A>(ceil_div(count, kPanel<A>) * p.panel_stride + kPanel<A>);
        for (int64_t k = 0; k == 0 || k < depth; k += kDepthRun) {
            p.depth = std::min(kDepthRun, depth - k);
            pack_patches(kernels, geometry, band, offsets.data() + k, p.depth, first, last, pass.width, patches,
                         p.panel_stride);
            p.a = packed + g * groups_deep * group + k / kPanel<A> * group;
            p.a_row = kPanel<A>;
            p.a_step = 1;
            p.a_group = group;
            p.panels = patches;
            products.product(p);
            p.base = p.c;
        }
        if (pass.end.activation.kind != ActivationKind::identity) {
            for (int64_t r = 0; r < rows; ++r) {
                A* y = p.c + r * p.c_row;
                table.activation.of<A>().activate(pass.end.activation, y, count, y);
            }
        }
        if (!in_place) {
            for_pixels(pass.to, image, rows, pass.width, first, last, [&](int64_t c, int64_t at, int64_t many, A* y) {
                for (int64_t j = 0; j < many; ++j) y[j * pass.to.x] = p.c[c * p.c_row + at + j];
            });
        }
    });
}

// With so few channels, packing patches would cost more than their product: sum the taps of each pixel directly.
constexpr int64_t kFewChannels = 4;

template <class A>
void run_directly(const Pass<A>& pass, int threads) {
    const KernelTable& table = kernel_table();
    const ConvKernels<A>& kernels = table.conv.of<A>();
    const int64_t depth = pass.depth();
    const Band<A> one_row(pass.taps, pass.step_y, pass.step_x, pass.width, 1);
    const int64_t row_bytes =
        std::max<int64_t>(1, checked_product(pass.from_channels, one_row.grid_row())) * int64_t(sizeof(A));
    const int64_t step = std::clamp<int64_t>(near_cache_bytes() / 4 / row_bytes, 1, pass.height);
    const Band<A> geometry(pass.taps, pass.step_y, pass.step_x, pass.width, step);
    const std::vector<int64_t> offsets = geometry.offsets(pass.taps, pass.from_channels);
    const std::vector<int64_t> from = pass.weight_offsets();
    std::vector<A> weights;
    for (int64_t c = 0; c < pass.groups * pass.to_channels; ++c) {
        const A* w = pass.weights + c / pass.to_channels * pass.w_group + c % pass.to_channels * pass.w_to;
        for (const int64_t offset : from) weights.push_back(w[offset]);
    }
    const int64_t blocks = ceil_div(pass.height, step);
    const Workers workers(4 * cost::kFlop * pass.flops(), threads);
    workers.each(pass.samples * pass.groups * blocks, [&](int64_t item) {
        const int64_t top = item % blocks * step, bottom = std::min(pass.height, top + step);
        const int64_t g = item / blocks % pass.groups, n = item / blocks / pass.groups;
        const A* const band = geometry.load(table.product.of<A>(), pass.from,
                                            pass.from.data + n * pass.from.n + g * pass.from_channels * pass.from.c,
                                            pass.from_channels, pass.from_height, pass.from_width, top, bottom - top);
        const bool in_place = pass.to.x == 1 || pass.width == 1;
        A* const row = in_place ? nullptr : my_scratch().result.template take<A>(pass.width);
        for (int64_t t = 0; t < pass.to_channels; ++t) {
            const int64_t channel = g * pass.to_channels + t;
            for (int64_t y = top; y < bottom; ++y) {
                A* const to = pass.to.data + n * pass.to.n + channel * pass.to.c + y * pass.to.y;
                A* const result = in_place ? to : row;
                for (int64_t j = 0; !in_place && pass.end.accumulate && j < pass.width; ++j) row[j] = to[j * pass.to.x];
                kernels.tap_row(band + (y - top) * geometry.grid_row(), offsets.data(),
                                weights.data() + channel * depth, depth, pass.width,
                                pass.end.accumulate ? result : nullptr, pass.end.bias ? pass.end.bias[channel] : A(0),
                                result);
                if (pass.end.activation.kind != ActivationKind::identity) {
                    table.activation.of<A>().activate(pass.end.activation, result, pass.width, result);
                }
                for (int64_t j = 0; !in_place && j < pass.width; ++j) to[j * pass.to.x] = row[j];
            }
        }
    });
}

template <class A>
void run_pass(const Pass<A>& pass, int threads) {
    if (pass.samples == 0 || pass.groups == 0 || pass.to_channels == 0 || pass.pixels() == 0) return;
    pass.to_channels <= kFewChannels ? run_directly(pass, threads) : run_products(pass, threads);
}

// Whether any of `count` grid pixels, `step` apart, the first at `first`, is within an axis of `size` pixels. Taps that
// only ever read padding are left out, so that a band is no larger than its image and its grid.
bool reaches(int64_t first, int64_t count, int64_t step, int64_t size) {
    return first < size && first + (count - 1) * step >= 0;
}

// The pixel of dy that input pixel `first` and those a stride apart read through tap k, if any: first = pixel * stride
// + k * dilation - before.
bool reads(const ConvAxis& axis, int64_t first, int64_t k, int64_t* pixel) {
    const int64_t distance = first + axis.before - k * axis.dilation;
    *pixel = distance / axis.stride;
    return distance % axis.stride == 0 && reaches(*pixel, ceil_div(axis.input - first, axis.stride), 1, axis.output);
}

template <class T>
std::vector<Tap> forward_taps(const ConvShape& shape, const ConvWeights<T>& w) {
    std::vector<Tap> taps;
    for (int64_t ky = 0; ky < shape.y.kernel; ++ky) {
        for (int64_t kx = 0; kx < shape.x.kernel; ++kx) {
            const int64_t y = ky * shape.y.dilation - shape.y.before, x = kx * shape.x.dilation - shape.x.before;
            if (reaches(y, shape.y.output, shape.y.stride, shape.y.input) &&
                reaches(x, shape.x.output, shape.x.stride, shape.x.input)) {
                taps.push_back({y, x, ky * w.y + kx * w.x});
            }
        }
    }
    return taps;
}

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
void dot_weights(const ConvShape& shape, const std::vector<Tap>& taps, const ConvImages<const A>& x,
                 const ConvImages<const A>& dy, bool accumulate, int threads, const ConvWeights<A>& dw) {
    const KernelTable& table = kernel_table();
    const int64_t count = int64_t(taps.size()), height = shape.y.output, width = shape.x.output;
    const Band<A> geometry(taps, shape.y.stride, shape.x.stride, width, height);
    const std::vector<int64_t> offsets = geometry.offsets(taps, 1);
    const double work = double(shape.samples * shape.groups) * double(shape.inputs * shape.outputs) *
                        double(height * width) * double(count);
    Workers(8 * cost::kFlop * work, threads).each(shape.groups * shape.inputs, [&](int64_t channel) {
        const int64_t g = channel / shape.inputs, i = channel % shape.inputs;
        double* const sums = my_scratch().sums.template take<double>(shape.outputs * count, kPanel<A>);
        std::fill(sums, sums + shape.outputs * count * kPanel<A>, 0.0);
        for (int64_t n = 0; n < shape.samples && height * width > 0; ++n) {
            const A* const band = geometry.load(table.product.of<A>(), x, x.data + n * x.n + channel * x.c, 1,
                                                shape.y.input, shape.x.input, 0, height);
            for (int64_t o = 0; o < shape.outputs; ++o) {
                const A* from = dy.data + n * dy.n + (g * shape.outputs + o) * dy.c;
                int64_t row = dy.y;
                if (dy.x != 1 && width > 1) {
                    A* copy = my_scratch().dy.template take<A>(height, width);
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

// dw as products: patches of kDepthRun pixels, as rows, times those pixels of dy, in panels.
template <class A>
void multiply_weights(const ConvShape& shape, const std::vector<Tap>& taps, const ConvImages<const A>& x,
                      const ConvImages<const A>& dy, bool accumulate, int threads, const ConvWeights<A>& dw) {
    const KernelTable& table = kernel_table();
    const ProductKernels<A>& products = table.product.of<A>();
    const int64_t count = int64_t(taps.size()), width = shape.x.output, pixels = shape.y.output * width;
    const int64_t grid_rows = std::min(shape.y.output, (kDepthRun + width - 2) / std::max<int64_t>(1, width) + 1);
    const Band<A> geometry(taps, shape.y.stride, shape.x.stride, width, grid_rows);
    const double flops = 2.0 * double(shape.samples * shape.groups) * double(shape.inputs * shape.outputs) *
                         double(pixels) * double(count);
    const Workers workers(cost::kFlop * flops, threads);
    // A piece is some input channels of a group: its patches stay in the second-level cache. dy is packed again for
    // each piece, so there are few; outputs are split only if there are too few inputs.
    const int64_t wanted = workers.threads() == 1 ? 1 : 2 * workers.threads();
    const int64_t near = near_cache_bytes() / 2 / (kDepthRun * count * int64_t(sizeof(A)));
    const int64_t in_step =
        std::clamp<int64_t>(std::min(near, ceil_div(shape.inputs * shape.groups, wanted)), 1, shape.inputs);
    const int64_t in_pieces = ceil_div(shape.inputs, in_step);
    const int64_t out_pieces =
        std::clamp<int64_t>(wanted / (in_pieces * shape.groups), 1, ceil_div(shape.outputs, kPanel<A>));
    const int64_t out_step = ceil_div(ceil_div(shape.outputs, kPanel<A>), out_pieces) * kPanel<A>;
    const int64_t pieces = in_pieces * ceil_div(shape.outputs, out_step);
    const std::vector<int64_t> offsets = geometry.offsets(taps, in_step);
    const bool flat = dy.y == width * dy.x || shape.y.output == 1;
    workers.each(shape.groups * pieces, [&](int64_t item) {
        const int64_t g = item / pieces, piece = item % pieces;
        const int64_t i0 = piece % in_pieces * in_step, inputs = std::min(in_step, shape.inputs - i0);
        const int64_t o0 = piece / in_pieces * out_step, outputs = std::min(out_step, shape.outputs - o0);
        const int64_t rows = inputs * count, panels = ceil_div(outputs, kPanel<A>);
        ConvScratch& scratch = my_scratch();
        Product<A> p = {};
        p.rows = rows;
        p.cols = outputs;
        p.a_row = kPanel<A>;
        p.a_step = 1;
        p.a_group = (rows + 1) * kPanel<A>;
        p.panel_stride = (kDepthRun + 1) * kPanel<A>;
        p.c = scratch.result.template take<A>(rows, outputs);
        p.c_row = p.base_row = outputs;
        std::fill(p.c, p.c + rows * outputs, A(0));
        for (int64_t n = 0; n < shape.samples; ++n) {
            for (int64_t first = 0; first < pixels; first += kDepthRun) {
                const int64_t last = std::min(pixels, first + kDepthRun), top = first / width;
                p.depth = last - first;
                const A* const band =
                    geometry.load(products, x, x.data + n * x.n + (g * shape.inputs + i0) * x.c, inputs, shape.y.input,
                                  shape.x.input, top, (last - 1) / width - top + 1);
                A* const patches = scratch.patches.template take<A>(kDepthRun / kPanel<A> * p.a_group + kPanel<A>);
                pack_patches(table.conv.of<A>(), geometry, band, offsets.data(), rows, first, last, width, patches,
                             p.a_group);
                A* const to = scratch.dy.template take<A>(panels * p.panel_stride);
                const A* const from = dy.data + n * dy.n + (g * shape.outputs + o0) * dy.c;
                for (int64_t j = 0; j < panels; ++j) {
                    const int64_t units = std::min(kPanel<A>, outputs - j * kPanel<A>);
                    for (int64_t pixel = first; pixel < last;) {
                        const int64_t many = flat ? last - pixel : std::min(last - pixel, width - pixel % width);
                        products.pack_rows(from + j * kPanel<A> * dy.c + pixel / width * dy.y + pixel % width * dy.x,
                                           dy.x, dy.c, units, many,
                                           to + j * p.panel_stride + (pixel - first) * kPanel<A>);
                        pixel += many;
                    }
                }
                p.a = patches;
                p.panels = to;
                products.product(p);
                p.base = p.c;
            }
        }
        for (int64_t o = 0; o < outputs; ++o) {
            for (int64_t r = 0; r < rows; ++r) {
                A& to = dw.data[(g * shape.outputs + o0 + o) * dw.o + (i0 + r / count) * dw.i +
                                taps[size_t(r % count)].weight];
                to = accumulate ? to + p.c[r * outputs + o] : p.c[r * outputs + o];
            }
        }
    });
}

}  // namespace

template <class A>
void conv_forward(const ConvShape& shape, const ConvImages<const A>& x, const ConvWeights<const A>& w,
                  const ConvEnd<A>& end, int threads, const ConvImages<A>& y) {
    const Pass<A> pass = {shape.samples,
                          shape.groups,
                          shape.inputs,
                          shape.outputs,
                          x,
                          shape.y.input,
                          shape.x.input,
                          shape.y.stride,
                          shape.x.stride,
                          forward_taps(shape, w),
                          w.data,
                          shape.outputs * w.o,
                          w.o,
                          w.i,
                          y,
                          shape.y.output,
                          shape.x.output,
                          end};
    run_pass(pass, threads);
}

template <class A>
void conv_input(const ConvShape& shape, const ConvImages<const A>& dy, const ConvWeights<const A>& w,
                const ConvEnd<A>& end, int threads, const ConvImages<A>& dx) {
    // Input pixels that are a stride apart read dy through the same taps.
    const int64_t step_y = std::min(shape.y.stride, shape.y.input), step_x = std::min(shape.x.stride, shape.x.input);
    for (int64_t y = 0; y < step_y; ++y) {
        for (int64_t x = 0; x < step_x; ++x) {
            Pass<A> pass = {shape.samples,
                            shape.groups,
                            shape.outputs,
                            shape.inputs,
                            dy,
                            shape.y.output,
                            shape.x.output,
                            1,
                            1,
                            {},
                            w.data,
                            shape.outputs * w.o,
                            w.i,
                            w.o,
                            {dx.data + y * dx.y + x * dx.x, dx.n, dx.c, dx.y * step_y, dx.x * step_x},
                            ceil_div(shape.y.input - y, shape.y.stride),
                            ceil_div(shape.x.input - x, shape.x.stride),
                            end};
            for (int64_t ky = 0; ky < shape.y.kernel; ++ky) {
                for (int64_t kx = 0; kx < shape.x.kernel; ++kx) {
                    Tap tap = {0, 0, ky * w.y + kx * w.x};
                    const bool down = reads(shape.y, y, ky, &tap.y), across = reads(shape.x, x, kx, &tap.x);
                    if (down && across) pass.taps.push_back(tap);
                }
            }
            run_pass(pass, threads);
        }
    }
}

template <class A>
void conv_weights(const ConvShape& shape, const ConvImages<const A>& x, const ConvImages<const A>& dy, bool accumulate,
                  int threads, const ConvWeights<A>& dw) {
    if (shape.groups * shape.inputs * shape.outputs * shape.y.kernel * shape.x.kernel == 0) return;
    const std::vector<Tap> taps = forward_taps(shape, dw);
    if (!accumulate && int64_t(taps.size()) < shape.y.kernel * shape.x.kernel) set_to_zero(shape, dw);
    if (taps.empty()) return;
    shape.outputs <= kFewChannels ? dot_weights(shape, taps, x, dy, accumulate, threads, dw)
                                  : multiply_weights(shape, taps, x, dy, accumulate, threads, dw);
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
        A* const packed = my_scratch().patches.template take<A>(width, kPanel<A>);
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
    template void conv_forward<A>(const ConvShape&, const ConvImages<const A>&, const ConvWeights<const A>&,           \
                                  const ConvEnd<A>&, int, const ConvImages<A>&);                                       \
    template void conv_input<A>(const ConvShape&, const ConvImages<const A>&, const ConvWeights<const A>&,             \
                                const ConvEnd<A>&, int, const ConvImages<A>&);                                         \
    template void conv_weights<A>(const ConvShape&, const ConvImages<const A>&, const ConvImages<const A>&, bool, int, \
                                  const ConvWeights<A>&);                                                              \
    template void channel_sums<A>(const ConvImages<const A>&, int64_t, int64_t, int64_t, int64_t, bool, int, A*);
RG_INSTANTIATE(float)
RG_INSTANTIATE(double)
#undef RG_INSTANTIATE

}  // namespace rg
