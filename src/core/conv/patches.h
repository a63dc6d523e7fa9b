// Where convolutions find the pixels that their kernels read: in the images themselves, or in copies of parts of them.
#pragma once

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <new>

#include "../base/machine.h"
#include "../base/parallel.h"
#include "../base/scratch.h"
#include "../kernels.h"
#include "conv.h"

namespace rg {

// Sizes of padded images may overflow, since neither padding nor strides need fit in memory.
inline int64_t checked_product(int64_t a, int64_t b) {
    int64_t product = 0;
    if (__builtin_mul_overflow(a, b, &product) || product > INT64_MAX / 4) throw std::bad_alloc();
    return product;
}

// Whether an array of these sizes is empty. The other sizes may be so large that their product overflows.
inline bool any_zero(std::initializer_list<int64_t> sizes) {
    return std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
}

// A tap of a kernel: the pixel that grid pixel (0, 0) reads through it, and where its weight is.
struct Tap {
    int64_t y, x, weight;
};

// Whether any of `count` grid pixels, `step` apart, the first at `first`, is within an axis of `size` pixels. Taps that
// only ever read padding are left out, so that a band is no larger than its image and its grid.
inline bool reaches(int64_t first, int64_t count, int64_t step, int64_t size) {
    return first < size && first + (count - 1) * step >= 0;
}

// With so few channels, packing patches would cost more than their product: sum the taps of each pixel directly.
constexpr int64_t kFewChannels = 4;

// A thread's own memory: parts of images, where the patches of a chunk are, panels of patches, and part of a result.
struct ConvScratch {
    Buffer band, runs, panels, patches, result, sums;
};
inline ConvScratch& conv_scratch() { return kept_by_thread<ConvScratch>(); }

// The part of an image that some rows of the grid read, with its padding: [channel][row][column % step_x][column /
// step_x]. The pixels that a tap reads in a row of the grid are contiguous whatever the step.
template <class A>
class Band {
public:
    Band() = default;
    Band(const Vector<Tap>& taps, int64_t step_y, int64_t step_x, int64_t grid_width, int64_t grid_rows)
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
    int64_t size(int64_t channels) const { return channels * plane_ + kPanel<A>; }
    // Rows of the band for `grid_rows` rows of the grid.
    int64_t rows(int64_t grid_rows) const { return (grid_rows - 1) * step_y_ + span_; }
    int64_t offset(const Tap& tap) const {
        const int64_t x = tap.x - first_x_;
        return (tap.y - first_y_) * row_ + x % step_x_ * phase_ + x / step_x_;
    }
    Vector<int64_t> offsets(const Vector<Tap>& taps, int64_t channels) const {
        Vector<int64_t> all;
        checked_product(channels, plane_);
        for (int64_t f = 0; f < channels; ++f) {
            for (const Tap& tap : taps) all.push_back(f * plane_ + offset(tap));
        }
        return all;
    }

    // Loads the band of grid rows `first_row` to `first_row + grid_rows`: `channels` planes, and a panel of zeros,
    // since kernels read beyond the last pixel.
    void load(const KernelTable& table, const ConvImages<const A>& from, const A* image, int64_t channels,
              int64_t height, int64_t width, int64_t first_row, int64_t grid_rows, A* band) const {
        std::fill(band + channels * plane_, band + channels * plane_ + kPanel<A>, A(0));
        const int64_t y0 = first_row * step_y_ + first_y_;
        const int64_t begin = std::clamp<int64_t>(-first_x_, 0, width_);
        const int64_t end = std::clamp<int64_t>(width - first_x_, begin, width_);
        if (from.c == 1 && from.x != 1 && step_x_ == 1) {
            load_interleaved(table.product.of<A>(), from, image, channels, height, y0, grid_rows, begin, end, band);
        } else {
            for (int64_t f = 0; f < channels; ++f) {
                load_plane(table.conv.of<A>(), from, image + f * from.c, height, y0, grid_rows, begin, end,
                           band + f * plane_);
            }
        }
    }

private:
    void load_plane(const ConvKernels<A>& kernels, const ConvImages<const A>& from, const A* image, int64_t height,
                    int64_t y0, int64_t grid_rows, int64_t begin, int64_t end, A* to) const {
        const int64_t count = rows(grid_rows);
        const int64_t above = begin < end ? std::clamp<int64_t>(-y0, 0, count) : count;
        const int64_t below = std::clamp<int64_t>(height - y0, above, count);
        std::fill(to, to + above * row_, A(0));
        const A* const source = above < below ? image + (y0 + above) * from.y + (first_x_ + begin) * from.x : nullptr;
        if (source && step_x_ == 1 && from.x == 1 && from.y == row_ && end - begin == row_) {
            memcpy(to + above * row_, source, size_t((below - above) * row_) * sizeof(A));
        } else if (source && step_x_ == 1 && from.x == 1) {
            kernels.copy_rows(source, from.y, {below - above, end - begin}, begin, to + above * row_, row_);
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
        A* const square = conv_scratch().patches.take<A>(channels * kPanel<A>);
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
        for (int64_t p = 0; p < step_x_; ++p) {
            for (int64_t q = 0; q < phase_; ++q) {
                const int64_t j = q * step_x_ + p;
                to[p * phase_ + q] = j >= begin && j < end ? from[(j - begin) * stride] : A(0);
            }
        }
    }

    int64_t step_y_ = 1, step_x_ = 1;
    int64_t first_y_ = 0, first_x_ = 0, span_ = 0, width_ = 0;
    int64_t phase_ = 0, row_ = 0, grid_row_ = 0, plane_ = 0;
};

// What a kernel reads: a grid of pixels per sample, of which pixel (y, x) reads pixel (y * step_y + tap.y, x * step_x +
// tap.x) of the image through each tap. What is outside is 0.
template <class A>
struct PatchGrid {
    ConvImages<const A> from;
    int64_t from_height, from_width, step_y, step_x;
    Vector<Tap> taps;
    int64_t height, width;

    int64_t pixels() const { return height * width; }
    // If every pixel reads itself alone, the rows of an image can be taken as one.
    bool is_flat() const {
        return taps.size() == 1 && taps[0].y == 0 && taps[0].x == 0 && step_y == 1 && step_x == 1 &&
               from_height == height && from_width == width && (from.y == width * from.x || height == 1);
    }
    void flatten() {
        from_width = width = pixels();
        from_height = height = 1;
    }
};

template <class A, class W>
PatchGrid<A> forward_grid(const ConvShape& shape, const ConvImages<const A>& x, const ConvWeights<W>& w) {
    PatchGrid<A> grid = {x,  shape.y.input,  shape.x.input, shape.y.stride, shape.x.stride,
                         {}, shape.y.output, shape.x.output};
    if (shape.inputs == 0) return grid;  // kernels without weights may have any size
    for (int64_t ky = 0; ky < shape.y.kernel; ++ky) {
        for (int64_t kx = 0; kx < shape.x.kernel; ++kx) {
            const int64_t top = ky * shape.y.dilation - shape.y.before, left = kx * shape.x.dilation - shape.x.before;
            if (reaches(top, shape.y.output, shape.y.stride, shape.y.input) &&
                reaches(left, shape.x.output, shape.x.stride, shape.x.input)) {
                grid.taps.push_back({top, left, ky * w.y + kx * w.x});
            }
        }
    }
    return grid;
}

// The patches of a chunk of pixels: for every panel of them, the runs of each tap. The pixels of all samples are
// counted one after the other, so that a panel can have pixels of two samples.
template <class A>
class Patches {
public:
    // For chunks of up to `chunk` pixels.
    Patches(const PatchGrid<A>& grid, int64_t chunk)
        : grid_(grid),
          in_place_((grid.from.x == 1 && grid.step_x == 1) || grid.width == 1),
          most_runs_(most_runs(grid)),
          band_(in_place_ ? Band<A>()
                          : Band<A>(grid.taps, grid.step_y, grid.step_x, grid.width,
                                    std::min(grid.height, (chunk + grid.width - 2) / grid.width + 1))) {}

    // Memory for the runs of a panel.
    static int64_t run_bytes(const PatchGrid<A>& grid) {
        return int64_t(grid.taps.size()) * most_runs(grid) * int64_t(sizeof(PatchRun));
    }

    // Where the patches of a chunk are, in this thread's scratch memory.
    struct Chunk {
        const A* channels;
        int64_t channel, taps;
        const PatchRun* runs;
        int64_t panel_runs;
        const int64_t* counts;

        // Packs the patches of a panel: [depth][kPanel], where depth is channels and taps.
        void pack(const KernelTable& table, int64_t panel, int64_t first, int64_t depth, A* to) const {
            table.conv.of<A>().pack_taps(channels, channel, runs + panel * panel_runs, taps, counts[panel], first,
                                         depth, to);
        }
    };

    // Locates the patches of pixels `first` to `last` in channels `channel` and on. If the pixels of a row are not
    // contiguous, they are copied.
    Chunk locate(const KernelTable& table, int64_t channel, int64_t channels, int64_t first, int64_t last) const {
        const int64_t pixels = grid_.pixels(), panels = ceil_div(last - first, kPanel<A>);
        const int64_t taps = int64_t(grid_.taps.size()), panel_runs = taps * most_runs_;
        ConvScratch& scratch = conv_scratch();
        PatchRun* const runs = scratch.runs.template take<PatchRun>(panels, panel_runs);
        int64_t* const counts = scratch.panels.template take<int64_t>(panels);
        const A* const image = grid_.from.data + channel * grid_.from.c;
        const int64_t band_size = checked_product(channels, band_.plane()) + kPanel<A>;
        const int64_t first_sample = first / pixels, samples = (last - 1) / pixels - first_sample + 1;
        A* const bands = in_place_ ? nullptr : scratch.band.template take<A>(samples, band_size);
        for (int64_t s = 0; bands && s < samples; ++s) {
            const int64_t begin = first_sample + s, top = s == 0 ? first % pixels / grid_.width : 0;
            const int64_t bottom = s + 1 < samples ? grid_.height : (last - 1) % pixels / grid_.width + 1;
            band_.load(table, grid_.from, image + begin * grid_.from.n, channels, grid_.from_height, grid_.from_width,
                       top, bottom - top, bands + s * band_size);
        }
        // Row by row: where the next pixel is.
        int64_t sample = first_sample, y = first % pixels / grid_.width, x = first % grid_.width, top = y;
        for (int64_t panel = 0, pixel = first; panel < panels; ++panel) {
            Row rows[kPanel<A>];
            int64_t count = 0, to = 0;
            for (const int64_t size = std::min(kPanel<A>, last - pixel); to < size; ++count) {
                const int64_t length = std::min(grid_.width - x, size - to);
                rows[count] = {
                    in_place_ ? sample * grid_.from.n : (sample - first_sample) * band_size, y, y - top, x, to, length};
                to += length;
                x += length;
                if (x < grid_.width) continue;
                x = 0;
                if (++y < grid_.height) continue;
                y = top = 0;
                ++sample;
            }
            pixel += to;
            counts[panel] = count;
            PatchRun* run = runs + panel * panel_runs;
            for (const Tap& tap : grid_.taps) {
                for (int64_t i = 0; i < count; ++i, ++run) {
                    *run = in_place_ ? in_image(rows[i], tap) : in_band(rows[i], tap);
                }
            }
        }
        return {in_place_ ? image : bands, in_place_ ? grid_.from.c : band_.plane(), taps, runs, panel_runs, counts};
    }

private:
    // A panel can begin and end within a row of the grid.
    static int64_t most_runs(const PatchGrid<A>& grid) { return std::min(kPanel<A>, (kPanel<A> - 2) / grid.width + 2); }
    // Pixels of a panel in one row of the grid.
    struct Row {
        int64_t sample;  // where its sample begins
        int64_t y, y_in_band, x, to, length;
    };

    PatchRun in_image(const Row& row, const Tap& tap) const {
        const int64_t y = row.y * grid_.step_y + tap.y, x = row.x * grid_.step_x + tap.x;
        const int64_t begin = std::clamp<int64_t>(-x, 0, row.length);
        const int64_t end = std::clamp<int64_t>(grid_.from_width - x, begin, row.length);
        if (y < 0 || y >= grid_.from_height || begin == end) return {0, 0};
        return {row.sample + y * grid_.from.y + x * grid_.from.x - row.to, bits(row.to + begin, row.to + end)};
    }
    PatchRun in_band(const Row& row, const Tap& tap) const {
        return {row.sample + row.y_in_band * band_.grid_row() + row.x + band_.offset(tap) - row.to,
                bits(row.to, row.to + row.length)};
    }
    static uint32_t bits(int64_t begin, int64_t end) { return (uint32_t(1) << end) - (uint32_t(1) << begin); }

    const PatchGrid<A>& grid_;
    bool in_place_;
    int64_t most_runs_;
    Band<A> band_;
};

}  // namespace rg
