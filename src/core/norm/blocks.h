// What the drivers that work block by block share: sizes, scratch, geometry, blocks in and out of storage, scheduling,
// statistics. Everything that decides how sums are cut follows from the shape alone.
#pragma once

#include <math.h>
#include <string.h>

#include <algorithm>
#include <limits>

#include "../base/dispatch.h"
#include "../base/parallel.h"
#include "../base/scratch.h"
#include "norm.h"

namespace rg {

// ---- sizes, all of them functions of the shape ---------------------------------------------------------------------

constexpr int64_t kTile = 4096;          // elements of a staged block: 16 KiB of float, a third of a first-level cache
constexpr int64_t kColumns = 2048;       // columns of a block of columns; their sums and statistics fill 50 KiB
constexpr int64_t kChunkRows = 64;       // rows that share one partial sum per column, at the least
constexpr int64_t kMaxParts = 64;        // partial sums per column, and groups of samples, at the most
constexpr int64_t kCenterRows = 32;      // rows of columns whose mean is what moments are taken about
constexpr int64_t kCenterElements = 64;  // likewise elements of planes and long rows
constexpr int64_t kRowGroup = 8;         // short rows handled together

constexpr int64_t kMinParallel = 8192;   // elements below which the team is not even told: it would take as long
constexpr int64_t kMinWake = 131072;     // elements below which sleeping members are left asleep
constexpr int64_t kMinStream = 2 << 20;  // bytes of a result above which it cannot be expected to stay in cache

// Indices are taken apart for every block, mostly by 1, and a division costs as much as a short row.
inline int64_t quotient(int64_t a, int64_t b) { return b == 1 ? a : a / b; }
inline int64_t remainder(int64_t a, int64_t b) { return b == 1 ? 0 : a % b; }

// ---- scratch -------------------------------------------------------------------------------------------------------

// What a thread needs while it works on one block.
template <class A>
struct Tile {
    alignas(64) A x[kTile], y[kTile], dz[kTile], out[kTile];
};
template <class A>
Tile<A>& my_tile() {
    return kept_by_thread<Tile<A>>();
}

struct CallScratch {
    Buffer partial, totals, coefficients, centers;
};
inline CallScratch& my_call_scratch() { return kept_by_thread<CallScratch>(); }
struct SetScratch {
    Buffer partial, coefficients;
};
inline SetScratch& my_set_scratch() { return kept_by_thread<SetScratch>(); }

inline void trim_scratch() {
    CallScratch& call = my_call_scratch();
    SetScratch& set = my_set_scratch();
    for (Buffer* b :
         {&call.partial, &call.totals, &call.coefficients, &call.centers, &set.partial, &set.coefficients}) {
        b->trim();
    }
}

// ---- geometry ------------------------------------------------------------------------------------------------------

inline int64_t magnitude(int64_t v) { return v < 0 ? -v : v; }

// Drops axes of extent 1 and joins neighbours that are one axis in every view.
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

// Planes run along R, rows along C with R = 1 and one set a row, columns along C otherwise.
enum class Family { plane, row, column };

struct Geometry {
    AxisList n, c, r;
    int64_t N, C, R, K, sets_per_n;
    Family family;

    explicit Geometry(const NormShape& shape) : n(shape.n), c(shape.c), r(shape.r), K(shape.channels_per_set) {
        N = n.extent();
        C = c.extent();
        R = r.extent();
        sets_per_n = C / std::max<int64_t>(1, K);
        sort_by_stride(r, kX);  // the order inside a set is free
        simplify(n);
        simplify(c);
        simplify(r);
        const int64_t r_step = r.size ? magnitude(r.axis[r.size - 1].stride[kX]) : 0;
        const int64_t c_step = c.size ? magnitude(c.axis[c.size - 1].stride[kX]) : 0;
        if (R == 1 && K == C) {
            family = Family::row;
        } else if (R > 1 && (C == 1 || r_step <= c_step)) {
            family = Family::plane;
        } else {
            family = Family::column;
        }
    }
    int64_t elements() const { return N * C * R; }
    double set_size() const { return double(K) * double(R); }
};

// A block of elements: `rows` runs of `cols`, found at `offset` in each view.
struct Block {
    Offsets offset;
    int64_t rows = 1, cols = 1;
    const Axis* row_axis = nullptr;      // null: one row
    const AxisList* col_axes = nullptr;  // columns run along the last of these, or along all of them if all_axes
    bool all_axes = false;
    int64_t first_col = 0;  // with all_axes: where in the row the block starts
    int64_t ahead = 0;      // elements from here to the block that will be read next

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

// ---- grids: how a set, or a chunk of one, is cut into blocks
// ----------------------------------------------------------

// Blocks of whole columns: items are (chunk of rows, block of columns).
struct ColumnGrid {
    const Geometry& g;
    int64_t inner_rows, row_lists;  // rows along the last R axis, and how often they come
    int64_t chunk_rows, chunks_per_list, chunks, col_blocks, cols_per_block;

    explicit ColumnGrid(const Geometry& geometry) : g(geometry) {
        inner_rows = g.r.size ? g.r.axis[g.r.size - 1].extent : 1;
        row_lists = g.R / inner_rows;
        chunk_rows = std::max(std::min(inner_rows, kChunkRows), ceil_div(inner_rows, kMaxParts));
        chunk_rows = ceil_div(chunk_rows, kRowGroup) * kRowGroup;
        chunks_per_list = ceil_div(inner_rows, chunk_rows);
        chunks = row_lists * chunks_per_list;
        col_blocks = ceil_div(g.C, kColumns);
        cols_per_block = ceil_div(ceil_div(g.C, col_blocks), 64) * 64;
        col_blocks = ceil_div(g.C, cols_per_block);
    }
    int64_t items() const { return chunks * col_blocks; }
    int64_t chunk_of(int64_t item) const { return item / col_blocks; }
    int64_t first_col(int64_t item) const { return item % col_blocks * cols_per_block; }

    Block place(int64_t n, int64_t item) const {
        const int64_t chunk = chunk_of(item), col = first_col(item);
        const int64_t first = chunk % chunks_per_list * chunk_rows;
        Block b;
        b.offset.add(g.n, g.n.size, n);
        b.col_axes = &g.c;
        b.cols = std::min(cols_per_block, g.C - col);
        if (g.c.size) b.offset.add(g.c.axis[0], col);
        b.rows = std::min(chunk_rows, inner_rows - first);
        if (g.r.size) {
            b.row_axis = &g.r.axis[g.r.size - 1];
            b.offset.add(*b.row_axis, first);
            b.offset.add(g.r, g.r.size - 1, chunk / chunks_per_list);
        }
        return b;
    }
    // Calls body(part, first_col) on parts of a block small enough for a tile, or on all of it at once.
    template <class Body>
    void for_parts(const Block& whole, int64_t col0, bool fits, const Body& body) const {
        if (fits) return body(whole, col0);
        const int64_t cols = std::min(whole.cols, kTile / kRowGroup);
        const int64_t rows = kTile / cols / kRowGroup * kRowGroup;
        for (int64_t row = 0; row < whole.rows; row += rows) {
            for (int64_t col = 0; col < whole.cols; col += cols) {
                Block b = whole;
                b.rows = std::min(rows, whole.rows - row);
                b.cols = std::min(cols, whole.cols - col);
                if (b.row_axis) b.offset.add(*b.row_axis, row);
                if (col) b.offset.add(whole.col_axes->axis[0], col);
                body(b, col0 + col);
            }
        }
    }
};

// Short rows go kRowGroup at a time through one block; a row longer than a tile is cut into segments.
struct RowGrid {
    const Geometry& g;
    int64_t rows_per_block, rows_per_chunk, chunks, segments, cols_per_segment;

    explicit RowGrid(const Geometry& geometry) : g(geometry) {
        const int64_t cols = std::max<int64_t>(1, g.C);
        segments = ceil_div(cols, kTile);
        cols_per_segment = ceil_div(ceil_div(cols, segments), 64) * 64;
        segments = ceil_div(cols, cols_per_segment);
        // Powers of two up to kRowGroup that fit a tile; blocks stay inside the last axis of N.
        rows_per_block = 1;
        while (rows_per_block < kRowGroup && 2 * rows_per_block * cols <= kTile) rows_per_block *= 2;
        const int64_t least = g.N <= 128 ? 16 : 32;
        rows_per_chunk = ceil_div(std::max(least, ceil_div(g.N, kMaxParts)), kRowGroup) * kRowGroup;
        chunks = ceil_div(g.N, rows_per_chunk);
    }
    bool is_long() const { return segments > 1; }
    Block place(int64_t row, int64_t rows, int64_t segment) const {
        Block b;
        const int64_t col = segment * cols_per_segment;
        b.offset.add(g.n, g.n.size, row);
        b.rows = rows;
        if (g.n.size) b.row_axis = &g.n.axis[g.n.size - 1];
        b.col_axes = &g.c;
        b.all_axes = g.c.size > 1;
        b.cols = is_long() ? std::min(cols_per_segment, g.C - col) : g.C;
        b.ahead = is_long() ? 0 : rows * b.row_stride(kX);
        if (b.all_axes) {
            b.first_col = col;
        } else if (g.c.size) {
            b.offset.add(g.c.axis[0], col);
        }
        return b;
    }
    // Calls body(first_row, rows) for the blocks of a chunk.
    template <class Body>
    void for_blocks(int64_t chunk, const Body& body) const {
        const int64_t last = std::min(g.N, (chunk + 1) * rows_per_chunk);
        const int64_t list = g.n.size ? g.n.axis[g.n.size - 1].extent : 1;
        for (int64_t row = chunk * rows_per_chunk; row < last;) {
            const int64_t rows = std::min({rows_per_block, last - row, list - row % list});
            body(row, rows);
            row += rows;
        }
    }
};

// ---- blocks in and out ---------------------------------------------------------------------------------------------

template <class A>
constexpr DType kOwnType = sizeof(A) == sizeof(float) ? DType::f32 : DType::f64;

inline int64_t element_size(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

template <class A>
struct Run {
    A* data;
    int64_t stride;  // from row to row
    int64_t ahead;   // to where the next block will be read; 0 for one that was staged
};

// Reads and writes blocks as arithmetic, in place where the storage allows and through the thread's tile where not.
template <class A>
class Storage {
public:
    Storage(const KernelTable& table, DType dtype, const Activation& activation)
        : kernels(table.norm.of<A>()),
          activations(table.activation.of<A>()),
          dtype_(dtype),
          size_(element_size(dtype)),
          activation_(activation) {}

    const NormKernels<A>& kernels;
    const ActivationKernels<A>& activations;

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

    // dy times the activation's slope: by the kernel that reads it if that can, else staged.
    Gradient<A> read_dz(const void* dy, const void* y, const Block& b, Tile<A>& tile) const {
        const Run<const A> g = read(dy, kDy, b, tile.dz);
        if (!has_activation()) return {g.data, g.data, g.stride, 0, g.ahead, ActivationKind::identity};
        const Run<const A> out = read(y, kY, b, tile.y);
        if (is_fused(activation_.kind)) return {g.data, out.data, g.stride, out.stride, g.ahead, activation_.kind};
        for (int64_t row = 0; row < b.rows; ++row) {
            activations.apply_output_slope(activation_, out.data + row * out.stride, g.data + row * g.stride, b.cols,
                                           tile.dz + row * b.cols);
        }
        return {tile.dz, tile.dz, b.cols, 0, 0, ActivationKind::identity};
    }
    // The same with the slope from z, which put_z(to) writes: rows of b.cols, one after the other.
    template <class PutZ>
    Gradient<A> read_dz_by_input(const void* dy, const Block& b, Tile<A>& tile, const PutZ& put_z) const {
        const Run<const A> g = read(dy, kDy, b, tile.dz);
        put_z(tile.y);
        for (int64_t row = 0; row < b.rows; ++row) {
            activations.apply_input_slope(activation_, tile.y + row * b.cols, g.data + row * g.stride, b.cols,
                                          tile.dz + row * b.cols);
        }
        return {tile.dz, tile.dz, b.cols, 0, 0, ActivationKind::identity};
    }

    // What a kernel is to apply to a result, and whether that leaves something to be done on the staged block.
    ActivationKind fused() const { return is_fused(activation_.kind) ? activation_.kind : ActivationKind::identity; }
    bool activates_staged() const { return !is_fused(activation_.kind); }

    // Where a kernel may put a block's result; finish() brings it home.
    Run<A> target(void* base, int view, const Block& b, Tile<A>& tile, bool direct, bool stream) const {
        A* start = reinterpret_cast<A*>(static_cast<char*>(base) + b.offset.at[view] * size_);
        if (direct && in_place(b, view) && (!stream || streams_well(b, view, start))) {
            return {start, b.row_stride(view), 0};
        }
        return {tile.out, b.cols, 0};
    }
    // Streamed rows that begin and end inside a cache line write those lines twice: where rows are short and follow
    // each other in memory, it is better to stream the block as one run.
    bool streams_well(const Block& b, int view, const A* start) const {
        const bool aligned = uintptr_t(start) % 64 == 0 && b.row_stride(view) * size_ % 64 == 0;
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
        activations.activate(activation_, tile.out, b.rows * b.cols, tile.out);
    }

private:
    void store(const A* values, int64_t count, char* start, int64_t stride, bool accumulate, bool stream) const {
        if (dtype_ == kOwnType<A> && stride == 1 && !accumulate && !stream) {
            memcpy(start, values, size_t(count) * sizeof(A));
        } else {
            kernels.store(dtype_, values, count, start, stride, accumulate, stream);
        }
    }
    void load(const char* start, int view, const Block& b, A* dst) const {
        const int64_t step = b.row_stride(view) * size_;
        if (b.all_axes) {
            for (int64_t row = 0; row < b.rows; ++row) {
                for_runs(b, view, [&](int64_t offset, int64_t stride, int64_t done, int64_t count) {
                    kernels.load(dtype_, start + row * step + offset * size_, stride, count, dst + row * b.cols + done);
                });
            }
        } else if (b.rows == 1 || (b.row_stride(view) == b.cols && b.col_stride(view) == 1)) {
            kernels.load(dtype_, start, b.col_stride(view), b.rows * b.cols, dst);
        } else {
            for (int64_t row = 0; row < b.rows; ++row) {
                kernels.load(dtype_, start + row * step, b.col_stride(view), b.cols, dst + row * b.cols);
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

    DType dtype_;
    int64_t size_;
    Activation activation_;
};

// ---- scheduling ----------------------------------------------------------------------------------------------------

struct Crew {
    int threads;
    bool wake;
    Crew(int64_t elements, int asked) : threads(elements < kMinParallel ? 1 : asked), wake(elements >= kMinWake) {}
    template <class Body>
    void each(int64_t items, const Body& body) const {
        parallel_for(items, threads, wake, body);
    }
    template <class Body>
    void ranges(int64_t items, const Body& body) const {
        parallel_ranges(items, threads, wake, body);
    }
};

// A pass over statistics sets: begin(set), collect(set, item) for every item, finish(set), apply(set, item) for every
// item. Sets are (n, s); samples come in groups so that sums over n need one partial result per group only.
struct Plan {
    int64_t N, sets_per_n, items, group_size, groups;
    bool phased;    // too few sets for the team: all sets go through each step together
    bool resident;  // a set stays in cache from collect to apply
    int64_t set_bytes;

    // bytes_per_set: what collect and apply read of a set
    Plan(const Geometry& g, int64_t items_per_set, int64_t bytes_per_set, const Crew& crew)
        : N(g.N),
          sets_per_n(g.family == Family::column ? 1 : g.sets_per_n),
          items(items_per_set),
          set_bytes(bytes_per_set) {
        group_size = ceil_div(N, kMaxParts);
        groups = ceil_div(N, group_size);
        resident = set_bytes <= cache_bytes();
        phased = crew.threads > 1 && items > 1 && group_size == 1 && N * sets_per_n < 2 * crew.threads;
    }
    int64_t sets() const { return N * sets_per_n; }
    // The sets of one group of samples at one place, i = group * sets_per_n + place.
    template <class Body>
    void for_sets(int64_t i, const Body& body) const {
        const int64_t first = quotient(i, sets_per_n) * group_size, place = remainder(i, sets_per_n);
        for (int64_t n = first; n < std::min(first + group_size, N); ++n) body(n * sets_per_n + place);
    }
    // Results that leave the cache, enough sets for everybody, and room for two of them and what is on its way.
    bool pipelines(bool stream) const { return stream && !phased && 3 * set_bytes <= cache_bytes(); }
};

// Blocks of planes, by set and item; a set's items are (channel, block of the channel).
struct PlaneBlocks {
    const Geometry& g;
    PlaneGrid grid;

    explicit PlaneBlocks(const Geometry& geometry) : g(geometry), grid(geometry.r) {}
    int64_t items() const { return g.K * grid.blocks; }
    int64_t sample(int64_t set) const { return g.N == 1 ? 0 : quotient(set, g.sets_per_n); }
    int64_t channel(int64_t set, int64_t item) const {
        const int64_t s = g.N == 1 ? set : remainder(set, g.sets_per_n);
        return s * g.K + quotient(item, grid.blocks);
    }
    Block block(int64_t set, int64_t item) const {
        Block b;
        b.offset.add(g.n, g.n.size, sample(set));
        b.offset.add(g.c, g.c.size, channel(set, item));
        grid.place(remainder(item, grid.blocks), b);
        return b;
    }
    // From a block to the set's next one: a channel's runs lie far apart, where the hardware does not look ahead.
    int64_t ahead(int64_t set, int64_t item, const Block& b) const {
        return item + 1 < items() ? block(set, item + 1).offset.at[kX] - b.offset.at[kX] : 0;
    }
};

template <class Pass>
void run(const Plan& plan, const Crew& crew, Pass& pass) {
    if (plan.phased) {
        const auto all = [&](auto step) {
            crew.each(plan.sets() * plan.items, [&](int64_t i) { step(i / plan.items, i % plan.items); });
        };
        crew.each(plan.sets(), [&](int64_t set) { pass.begin(set); });
        if (pass.collects()) all([&](int64_t set, int64_t item) { pass.collect(set, item); });
        crew.each(plan.sets(), [&](int64_t set) { pass.finish(set); });
        // In the same order, so that members meet again what they have read.
        if (pass.applies()) all([&](int64_t set, int64_t item) { pass.apply(set, item); });
        return;
    }
    crew.ranges(plan.groups * plan.sets_per_n, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            plan.for_sets(i, [&](int64_t set) {
                pass.begin(set);
                if (pass.collects()) {
                    for (int64_t item = 0; item < plan.items; ++item) pass.collect(set, item);
                }
                pass.finish(set);
                if (!pass.applies()) return;
                for (int64_t k = 0; k < plan.items; ++k) pass.apply(set, plan.resident ? k : plan.items - 1 - k);
            });
        }
    });
}

// The same for large results: one set is written while the next one's sums are collected, in one sweep.
template <class Pass>
void run_pipelined(const Plan& plan, const Crew& crew, Pass& pass) {
    crew.ranges(plan.groups * plan.sets_per_n, [&](int64_t first, int64_t last) {
        int64_t previous = -1;
        for (int64_t i = first; i < last; ++i) {
            plan.for_sets(i, [&](int64_t set) {
                pass.begin(set);
                for (int64_t item = 0; item < plan.items; ++item) {
                    previous < 0 ? pass.collect(set, item) : pass.apply_and_collect(previous, set, item);
                }
                pass.finish(set);
                previous = set;
            });
        }
        for (int64_t item = 0; item < plan.items; ++item) pass.apply(previous, item);
    });
}

// ---- statistics ----------------------------------------------------------------------------------------------------

struct Moments {
    double mean, m2;
};

// From sums about a center. Accepted unless the center was so far off that squares cancel (the error of m2 grows with
// 1 + distance^2 / var, here at most 5), or float's range was left: then the caller sums again in doubles.
template <class A>
bool accept(double center, const double* sums, double count, double eps, Moments& out) {
    const double share = 1 / count, shift = sums[0] * share, m2 = sums[1] - sums[0] * shift;
    out = {center + shift, m2 < 0 ? 0 : m2};
    if (!(sums[0] * shift <= 4 * m2)) return false;
    if (sizeof(A) == sizeof(double)) return true;
    // A lost square is below 1e-38: nothing beside any usual eps.
    return m2 < 1e36 && (eps > 1e-25 || m2 > count * 1e-30);
}

// The second of two wide passes, about the first one's mean.
inline Moments wide_moments(double center, const double* sums, double count) {
    // Infinite or missing data: the mean says which, and the variance is undefined (inf - inf).
    if (center - center != 0) return {center, std::numeric_limits<double>::quiet_NaN()};
    const double m2 = sums[1] - sums[0] * sums[0] / count;
    return {center + sums[0] / count, m2 < 0 ? 0 : m2};
}

// Two wide passes over a set: sum(center, sums) adds all of it, about 0 for the mean and then about the mean.
template <class Sum>
Moments sum_wide(double count, const Sum& sum) {
    double sums[2] = {};
    sum(0.0, sums);
    const double center = sums[0] / count;
    sums[0] = sums[1] = 0;
    sum(center, sums);
    return wide_moments(center, sums, count);
}

template <class A>
struct SetStatistics {
    A center, rstd, offset;
    double exact_rstd, exact_offset;  // for what is computed from them, so that it is rounded once
    SetStatistics(double mean, double var, double eps) {
        center = A(mean);
        exact_rstd = 1 / sqrt(var + eps);
        exact_offset = (double(center) - mean) * exact_rstd;
        rstd = A(exact_rstd);
        offset = A(exact_offset);
    }
};

// A channel's z = (x - center) * scale + shift, in forward and, to the same bits, in backward.
template <class A>
struct Affine {
    A center, scale, shift;
    Affine(const SetStatistics<A>& s, double gamma, double beta)
        : center(s.center), scale(A(gamma * s.exact_rstd)), shift(A(beta + gamma * s.exact_offset)) {}
};

template <class A>
struct RowStatistics {
    A center[kRowGroup], rstd[kRowGroup], offset[kRowGroup];
    RowStatistics(const double* mean, const double* var, int64_t rows, double eps) {
        for (int64_t row = 0; row < rows; ++row) {
            const SetStatistics<A> s(mean[row], var[row], eps);
            center[row] = s.center;
            rstd[row] = s.rstd;
            offset[row] = s.offset;
        }
    }
};

}  // namespace rg
