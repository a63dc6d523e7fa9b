// Cuts arrays of any layout into blocks that fit in cache, and converts blocks to and from the arithmetic type. How an
// array is cut depends on its shape alone.
#pragma once

#include <string.h>

#include <algorithm>

#include "../kernels.h"
#include "scratch.h"
#include "shape.h"

namespace rg {

constexpr int64_t kTile = 4096;  // elements of a staged block: 16 KiB of float, half of a small first-level cache

// Indices are split by division for every block. The divisor is mostly 1, and a division costs as much as a short row.
inline int64_t quotient(int64_t a, int64_t b) { return b == 1 ? a : a / b; }
inline int64_t remainder(int64_t a, int64_t b) { return b == 1 ? 0 : a % b; }

// A thread's staging buffers for one block.
template <class A>
struct Tile {
    alignas(64) A x[kTile], y[kTile], dz[kTile], out[kTile];
};
template <class A>
Tile<A>& my_tile() {
    return kept_by_thread<Tile<A>>();
}

// ---- axes ----------------------------------------------------------------------------------------------------------

inline int64_t magnitude(int64_t v) { return v < 0 ? -v : v; }

// Drops axes of extent 1 and merges adjacent axes that form one axis in every view.
inline void simplify(AxisList& list) {
    int size = 0;
    for (int i = 0; i < list.size; ++i) {
        const Axis axis = list.axis[i];
        if (axis.extent == 1) continue;
        Axis* last = size ? &list.axis[size - 1] : nullptr;
        bool joins = last;
        for (int v = 0; v < kViews && joins; ++v) joins = last->stride[v] == axis.stride[v] * axis.extent;
        if (joins) {
            const int64_t extent = last->extent * axis.extent;
            *last = axis;
            last->extent = extent;
        } else {
            list.axis[size++] = axis;
        }
    }
    list.size = size;
}

struct Offsets {
    int64_t at[kViews] = {};
    void add(const Axis& axis, int64_t index) {
        for (int v = 0; v < kViews; ++v) at[v] += axis.stride[v] * index;
    }
    // index counts through axes [0, axes) of the list, the last fastest
    void add(const AxisList& list, int axes, int64_t index) {
        for (int i = axes - 1; i > 0; --i) {
            add(list.axis[i], index % list.axis[i].extent);
            index /= list.axis[i].extent;
        }
        if (axes > 0) add(list.axis[0], index);
    }
};

// The smallest stride goes last.
inline void sort_by_stride(AxisList& list, int view) {
    for (int i = 1; i < list.size; ++i) {
        for (int j = i; j > 0; --j) {
            Axis &before = list.axis[j - 1], &axis = list.axis[j];
            if (magnitude(before.stride[view]) >= magnitude(axis.stride[view])) break;
            std::swap(before, axis);
        }
    }
}

// A block of elements: `rows` runs of `cols`, at `offset` in each view.
struct Block {
    Offsets offset;
    int64_t rows = 1, cols = 1;
    const Axis* row_axis = nullptr;      // null: one row
    const AxisList* col_axes = nullptr;  // columns run along the last of these, or along all of them if all_axes
    bool all_axes = false;
    int64_t first_col = 0;  // with all_axes: where in the row the block starts
    int64_t ahead = 0;      // elements from here to the next block, for prefetching

    BlockSize size() const { return {rows, cols}; }
    int64_t row_stride(int view) const { return row_axis ? row_axis->stride[view] : 0; }
    int64_t col_stride(int view) const { return col_axes->size ? col_axes->axis[col_axes->size - 1].stride[view] : 1; }
};

// The R-space of one channel as blocks of at most kTile elements.
struct PlaneGrid {
    const AxisList& r;
    int64_t cols, rows, cols_per_block, rows_per_block, pieces, row_blocks, blocks;

    explicit PlaneGrid(const AxisList& r_axes) : r(r_axes) {
        cols = r.size ? r.axis[r.size - 1].extent : 1;
        rows = r.size > 1 ? r.axis[r.size - 2].extent : 1;
        pieces = ceil_div(cols, kTile);
        cols_per_block = ceil_div(ceil_div(cols, pieces), 64) * 64;
        row_blocks = pieces > 1 ? rows : ceil_div(rows, std::max<int64_t>(1, kTile / cols));
        rows_per_block = ceil_div(rows, row_blocks);
        row_blocks = ceil_div(rows, rows_per_block);
        blocks = r.extent() / (rows * cols) * row_blocks * pieces;
    }
    void place(int64_t index, Block& block) const {
        const int64_t piece = remainder(index, pieces), row = quotient(index, pieces);
        const int64_t row_block = remainder(row, row_blocks);
        block.cols = std::min(cols_per_block, cols - piece * cols_per_block);
        block.rows = std::min(rows_per_block, rows - row_block * rows_per_block);
        block.col_axes = &r;
        if (r.size) block.offset.add(r.axis[r.size - 1], piece * cols_per_block);
        if (r.size > 1) {
            block.row_axis = &r.axis[r.size - 2];
            block.offset.add(*block.row_axis, row_block * rows_per_block);
            block.offset.add(r, r.size - 2, quotient(row, row_blocks));
        }
    }
};

// ---- blocks in and out ---------------------------------------------------------------------------------------------

template <class A>
constexpr DType kOwnType = sizeof(A) == sizeof(float) ? DType::f32 : DType::f64;

inline int64_t element_size(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

// Reads and writes blocks in the arithmetic type: in place where the storage allows, else through the thread's tile.
template <class A>
class Storage {
public:
    Storage(const KernelTable& table, DType dtype, const Activation& activation)
        : conversions_(table.storage.of<A>()),
          activations_(table.activation.of<A>()),
          dtype_(dtype),
          size_(element_size(dtype)),
          activation_(activation) {}

    bool has_activation() const { return activation_.kind != ActivationKind::identity; }
    bool in_place(const Block& b, int view) const {
        return dtype_ == kOwnType<A> && !b.all_axes && (b.cols == 1 || b.col_stride(view) == 1);
    }

    Run<const A> read(const void* base, int view, const Block& b, A* scratch) const {
        const char* start = static_cast<const char*>(base) + b.offset.at[view] * size_;
        if (in_place(b, view)) return {reinterpret_cast<const A*>(start), b.row_stride(view), b.ahead};
        load(start, view, b, scratch);
        return {scratch, b.cols, 0};
    }

    // dy times the activation's slope. A fused activation is left to the kernel, any other is applied to a staged
    // block.
    Gradient<A> read_dz(const void* dy, const void* y, const Block& b, Tile<A>& tile) const {
        const Run<const A> g = read(dy, kDy, b, tile.dz);
        if (!has_activation()) return {g.data, g.data, g.stride, 0, g.ahead, ActivationKind::identity};
        const Run<const A> out = read(y, kY, b, tile.y);
        if (is_fused(activation_.kind)) return {g.data, out.data, g.stride, out.stride, g.ahead, activation_.kind};
        for (int64_t row = 0; row < b.rows; ++row) {
            activations_.apply_output_slope(activation_, out.data + row * out.stride, g.data + row * g.stride, b.cols,
                                            tile.dz + row * b.cols);
        }
        return {tile.dz, tile.dz, b.cols, 0, 0, ActivationKind::identity};
    }
    // The same with the slope from z, which put_z(to) writes as contiguous rows of b.cols.
    template <class PutZ>
    Gradient<A> read_dz_by_input(const void* dy, const Block& b, Tile<A>& tile, const PutZ& put_z) const {
        const Run<const A> g = read(dy, kDy, b, tile.dz);
        put_z(tile.y);
        for (int64_t row = 0; row < b.rows; ++row) {
            activations_.apply_input_slope(activation_, tile.y + row * b.cols, g.data + row * g.stride, b.cols,
                                           tile.dz + row * b.cols);
        }
        return {tile.dz, tile.dz, b.cols, 0, 0, ActivationKind::identity};
    }

    // The activation that a kernel applies to its result, and whether the activation must be applied to a staged block.
    ActivationKind fused() const { return is_fused(activation_.kind) ? activation_.kind : ActivationKind::identity; }
    bool activates_staged() const { return !is_fused(activation_.kind); }

    // Where a kernel writes a block's result: the array itself or the tile, which finish() copies to the array.
    Run<A> target(void* base, int view, const Block& b, Tile<A>& tile, bool direct, bool stream) const {
        if (!direct || !writes_in_place(base, view, b, stream)) return {tile.out, b.cols, 0};
        return {reinterpret_cast<A*>(static_cast<char*>(base) + b.offset.at[view] * size_), b.row_stride(view), 0};
    }
    bool writes_in_place(const void* base, int view, const Block& b, bool stream) const {
        return in_place(b, view) && (!stream || streams_well(base, view, b));
    }
    // Streamed rows that begin or end inside a cache line write that line twice. If rows are short and contiguous, it
    // is better to stream the block as one run.
    bool streams_well(const void* base, int view, const Block& b) const {
        const uintptr_t start = uintptr_t(base) + uintptr_t(b.offset.at[view] * size_);
        const bool aligned = start % 64 == 0 && b.row_stride(view) * size_ % 64 == 0;
        return aligned || b.cols >= 1024 || b.row_stride(view) != b.cols;
    }
    void finish(void* base, int view, const Block& b, Run<A> result, Tile<A>& tile, bool accumulate,
                bool stream) const {
        if (result.data == tile.out) write(base, view, b, {tile.out, b.cols, 0}, accumulate, stream);
    }
    void write(void* base, int view, const Block& b, Run<const A> values, bool accumulate, bool stream) const {
        char* start = static_cast<char*>(base) + b.offset.at[view] * size_;
        const int64_t step = b.row_stride(view) * size_;
        const bool one_run = b.row_stride(view) == b.cols && b.col_stride(view) == 1 && values.stride == b.cols;
        if (b.all_axes) {
            scatter(start, view, b, values, accumulate);
        } else if (b.rows == 1 || one_run) {
            store(values.data, b.rows * b.cols, start, b.cols == 1 ? 1 : b.col_stride(view), accumulate, stream);
        } else {
            for (int64_t row = 0; row < b.rows; ++row) {
                store(values.data + row * values.stride, b.cols, start + row * step, b.col_stride(view), accumulate,
                      stream);
            }
        }
    }
    void activate(const Block& b, Tile<A>& tile) const {
        activations_.activate(activation_, tile.out, b.rows * b.cols, tile.out);
    }

private:
    void store(const A* values, int64_t count, char* start, int64_t stride, bool accumulate, bool stream) const {
        if (dtype_ == kOwnType<A> && stride == 1 && !accumulate && !stream) {
            memcpy(start, values, size_t(count) * sizeof(A));
        } else {
            conversions_.store(dtype_, values, count, start, stride, accumulate, stream);
        }
    }
    void load(const char* start, int view, const Block& b, A* dst) const {
        const int64_t step = b.row_stride(view) * size_;
        if (b.all_axes) {
            for (int64_t row = 0; row < b.rows; ++row) {
                for_runs(b, view, [&](int64_t offset, int64_t stride, int64_t done, int64_t count) {
                    conversions_.load(dtype_, start + row * step + offset * size_, stride, count,
                                      dst + row * b.cols + done);
                });
            }
        } else if (b.rows == 1 || (b.row_stride(view) == b.cols && b.col_stride(view) == 1)) {
            conversions_.load(dtype_, start, b.col_stride(view), b.rows * b.cols, dst);
        } else {
            for (int64_t row = 0; row < b.rows; ++row) {
                conversions_.load(dtype_, start + row * step, b.col_stride(view), b.cols, dst + row * b.cols);
            }
        }
    }
    void scatter(char* start, int view, const Block& b, Run<const A> values, bool accumulate) const {
        const int64_t step = b.row_stride(view) * size_;
        for (int64_t row = 0; row < b.rows; ++row) {
            for_runs(b, view, [&](int64_t offset, int64_t stride, int64_t done, int64_t count) {
                store(values.data + row * values.stride + done, count, start + row * step + offset * size_, stride,
                      accumulate, false);
            });
        }
    }
    // A row that spreads over several axes, run by run along the last.
    template <class Each>
    void for_runs(const Block& b, int view, Each each) const {
        const AxisList& axes = *b.col_axes;
        const Axis& last = axes.axis[axes.size - 1];
        for (int64_t done = 0; done < b.cols;) {
            const int64_t col = b.first_col + done, inside = col % last.extent;
            const int64_t count = std::min(last.extent - inside, b.cols - done);
            Offsets at;
            at.add(axes, axes.size, col);
            each(at.at[view], last.stride[view], done, count);
            done += count;
        }
    }

    const StorageKernels<A>& conversions_;
    const ActivationKernels<A>& activations_;
    DType dtype_;
    int64_t size_;
    Activation activation_;
};

}  // namespace rg
