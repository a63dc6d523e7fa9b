// Shared by both normalization drivers: sizes, scratch, geometry, scheduling, statistics. How sums are cut depends on
// the shape alone.
#pragma once

#include <math.h>

#include <algorithm>
#include <limits>

#include "../base/blocks.h"
#include "../base/dispatch.h"
#include "../base/machine.h"
#include "../base/parallel.h"
#include "../base/scratch.h"
#include "norm.h"

namespace rg {

// ---- sizes, all of them functions of the shape ---------------------------------------------------------------------

constexpr int64_t kColumns = 2048;       // most columns of a range; their sums and statistics take 50 KiB
constexpr int64_t kLeastColumns = 64;    // of a range of columns: hardware prefetchers need long runs
constexpr int64_t kChunkRows = 64;       // minimum number of rows per partial sum of a column
constexpr int64_t kMaxParts = 64;        // maximum number of partial sums per column, and of groups of samples
constexpr int64_t kCenterRows = 32;      // for columns: moments are taken about the mean of this many rows
constexpr int64_t kCenterElements = 64;  // for planes and long rows: of this many elements
constexpr int64_t kRowGroup = 64;        // most short rows of a block: what a block costs besides is shared by more
static_assert(kRowGroup % kRowLanes == 0 && kRowGroup % kColumnRows == 0);

// ---- scratch -------------------------------------------------------------------------------------------------------

struct CallScratch {
    Buffer partial, totals, coefficients, centers;
};
inline CallScratch& my_call_scratch() { return kept_by_thread<CallScratch>(); }
struct SetScratch {
    Buffer partial, coefficients, rstds;
};
inline SetScratch& my_set_scratch() { return kept_by_thread<SetScratch>(); }

inline void trim_scratch() {
    CallScratch& call = my_call_scratch();
    SetScratch& set = my_set_scratch();
    for (Buffer* b : {&call.partial, &call.totals, &call.coefficients, &call.centers, &set.partial, &set.coefficients,
                      &set.rstds}) {
        b->trim();
    }
}

// ---- geometry ------------------------------------------------------------------------------------------------------

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
        sort_by_stride(r, kX);  // the order of elements within a set does not matter
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

// ---- grids: how a set, or a chunk of one, is cut into blocks
// ----------------------------------------------------------

// Columns [first, first + cols) of sample n. They hold whole sets.
struct ColumnRange {
    int64_t n, first, cols;
};

// Chunks of rows: a column has one partial sum per chunk.
struct ColumnGrid {
    const Geometry& g;
    int64_t inner_rows, row_lists;  // rows along the last R axis, and the number of such runs of rows
    int64_t chunk_rows, chunks_per_list, chunks;

    explicit ColumnGrid(const Geometry& geometry) : g(geometry) {
        inner_rows = g.r.size ? g.r.axis[g.r.size - 1].extent : 1;
        row_lists = g.R / inner_rows;
        chunk_rows = std::max(std::min(inner_rows, kChunkRows), ceil_div(inner_rows, kMaxParts));
        chunk_rows = ceil_div(chunk_rows, kColumnRows) * kColumnRows;
        chunks_per_list = ceil_div(inner_rows, chunk_rows);
        chunks = row_lists * chunks_per_list;
    }
    int64_t row_stride(int view) const { return g.r.size ? g.r.axis[g.r.size - 1].stride[view] : 0; }
    Block place(const ColumnRange& range, int64_t chunk) const {
        const int64_t first = chunk % chunks_per_list * chunk_rows;
        Block b;
        b.offset.add(g.n, g.n.size, range.n);
        b.col_axes = &g.c;
        b.cols = range.cols;
        if (g.c.size) b.offset.add(g.c.axis[0], range.first);
        b.rows = std::min(chunk_rows, inner_rows - first);
        if (g.r.size) {
            b.row_axis = &g.r.axis[g.r.size - 1];
            b.offset.add(*b.row_axis, first);
            b.offset.add(g.r, g.r.size - 1, chunk / chunks_per_list);
        }
        return b;
    }
    // Calls body(part, col) on parts of a block small enough for a tile, or on all of it at once; col is the part's
    // first column in the block. Parts of a block that is summed must have whole groups of kColumnRows rows.
    template <class Body>
    static void for_parts(const Block& whole, bool fits, int64_t row_multiple, const Body& body) {
        if (fits) return body(whole, int64_t(0));
        const int64_t cols = std::min(whole.cols, kTile / row_multiple);
        const int64_t rows = kTile / cols / row_multiple * row_multiple;
        for (int64_t row = 0; row < whole.rows; row += rows) {
            for (int64_t col = 0; col < whole.cols; col += cols) {
                Block b = whole;
                b.rows = std::min(rows, whole.rows - row);
                b.cols = std::min(cols, whole.cols - col);
                if (b.row_axis) b.offset.add(*b.row_axis, row);
                if (col) b.offset.add(whole.col_axes->axis[0], col);
                body(b, col);
            }
        }
    }
};

// Short rows go through blocks of at most `group`; a row longer than a tile is cut into segments.
struct RowGrid {
    const Geometry& g;
    int64_t group, rows_per_block, rows_per_chunk, chunks, segments, cols_per_segment;
    bool prefetch;  // the next block; worthwhile if it is not in the last-level cache

    // most: the number of elements of a block, if it has more than one row. Rows that are added up over a chunk: in
    // groups of kColumnRows; others in any power of two up to kRowGroup.
    RowGrid(const Geometry& geometry, int64_t rows_per_group, int64_t most, bool prefetch_next)
        : g(geometry), group(rows_per_group), prefetch(prefetch_next) {
        const int64_t cols = std::max<int64_t>(1, g.C);
        segments = ceil_div(cols, kTile);
        cols_per_segment = ceil_div(ceil_div(cols, segments), 64) * 64;
        segments = ceil_div(cols, cols_per_segment);
        rows_per_block = 1;  // or another power of two, so that blocks end where chains do
        while (rows_per_block < group && 2 * rows_per_block * cols <= most) rows_per_block *= 2;
        const int64_t least = g.N <= 128 ? 16 : 32;
        rows_per_chunk = ceil_div(std::max(least, ceil_div(g.N, kMaxParts)), 8) * 8;
        if (group > kColumnRows) rows_per_chunk = std::max(rows_per_chunk, rows_per_block);
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
        b.ahead = prefetch && !is_long() ? rows * b.row_stride(kX) : 0;
        if (b.all_axes) {
            b.first_col = col;
        } else if (g.c.size) {
            b.offset.add(g.c.axis[0], col);
        }
        return b;
    }
    // Whether sums over the rows of a chunk are flushed before this row: after every kColumnRows rows and at the end.
    bool ends_chain(int64_t row) const {
        const int64_t in_chunk = row % rows_per_chunk;
        return in_chunk % kColumnRows == 0 || row == g.N;
    }
    // Calls body(first_row, rows) for the blocks of a chunk. Blocks stay inside the last axis of N, and rows that are
    // flushed together.
    template <class Body>
    void for_blocks(int64_t chunk, const Body& body) const {
        const int64_t first = chunk * rows_per_chunk, last = std::min(g.N, first + rows_per_chunk);
        const int64_t list = g.n.size ? g.n.axis[g.n.size - 1].extent : 1;
        for (int64_t row = first; row < last;) {
            const int64_t rest = group - (row - first) % group;
            const int64_t rows = std::min({rows_per_block, last - row, list - row % list, rest});
            body(row, rows);
            row += rows;
        }
    }
};

// ---- scheduling ----------------------------------------------------------------------------------------------------

// A pass over statistics sets: begin(set), collect(set, item) for every item, finish(set), apply(set, item) for every
// item. Sets are (n, s); samples are grouped so that sums over n need only one partial sum per group.
struct Plan {
    int64_t N, sets_per_n, items, group_size, groups;
    bool phased;    // too few sets to keep all threads busy: each step runs over all sets in parallel
    bool resident;  // a set stays in cache from collect to apply
    int64_t set_bytes;

    // bytes_per_set: the bytes of a set that collect and apply read
    Plan(const Geometry& g, int64_t items_per_set, int64_t bytes_per_set, const Workers& workers)
        : N(g.N), sets_per_n(g.sets_per_n), items(items_per_set), set_bytes(bytes_per_set) {
        group_size = ceil_div(N, kMaxParts);
        groups = ceil_div(N, group_size);
        resident = set_bytes <= near_cache_bytes();
        phased = workers.threads() > 1 && items > 1 && group_size == 1 && N * sets_per_n < 2 * workers.threads();
    }
    int64_t sets() const { return N * sets_per_n; }
    // The sets of one group of samples at one place, i = group * sets_per_n + place.
    template <class Body>
    void for_sets(int64_t i, const Body& body) const {
        const int64_t first = quotient(i, sets_per_n) * group_size, place = remainder(i, sets_per_n);
        for (int64_t n = first; n < std::min(first + group_size, N); ++n) body(n * sets_per_n + place);
    }
    // Results too large for the cache, enough sets for all threads, and room in cache for two sets and prefetched data.
    bool pipelines(bool stream) const { return stream && !phased && 3 * set_bytes <= near_cache_bytes(); }
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
    // The distance to the set's next block: a channel's runs are far apart, and the hardware prefetcher misses them.
    int64_t ahead(int64_t set, int64_t item, const Block& b) const {
        return item + 1 < items() ? block(set, item + 1).offset.at[kX] - b.offset.at[kX] : 0;
    }
};

// Planes that are one run each, several at a time: as rows of a block, each with the coefficients of its channel. A
// plane is too short for what a pass over it costs besides.
struct Lines {
    int64_t sets, batches, per_set;  // whole sets of a batch, at most; batches of a sample; lines of a set

    explicit Lines(const Geometry& g) : per_set(g.K) {
        constexpr int64_t enough = 16;
        sets = std::max<int64_t>(1, std::min(enough / g.K, kTile / (g.K * g.R)));
        batches = ceil_div(g.sets_per_n, sets);
    }
    // Shorter ones have less than kCenterElements to take their center from.
    static bool fit(const Geometry& g) {
        return g.r.size == 1 && g.c.size <= 1 && g.R >= kCenterElements && g.R <= kTile;
    }
    // The channels from `channel` on.
    static Block block(const Geometry& g, int64_t sample, int64_t channel, int64_t lines) {
        Block b;
        b.offset.add(g.n, g.n.size, sample);
        b.rows = lines;
        b.cols = g.R;
        b.col_axes = &g.r;
        if (g.c.size) {
            b.row_axis = &g.c.axis[0];
            b.offset.add(*b.row_axis, channel);
        }
        return b;
    }
    // Calls pass.lines(sample, first set, sets) for every batch.
    template <class Pass>
    void run(const Plan& plan, const Workers& workers, Pass& pass) const {
        workers.each(plan.groups * batches, [&](int64_t i) {
            const int64_t first = i / batches * plan.group_size, set = i % batches * sets;
            for (int64_t n = first; n < std::min(first + plan.group_size, plan.N); ++n) {
                pass.lines(n, set, std::min(sets, plan.sets_per_n - set));
            }
        });
    }
};

template <class Pass>
void run(const Plan& plan, const Workers& workers, Pass& pass) {
    if (plan.phased) {
        const auto all = [&](auto step) {
            workers.each(plan.sets() * plan.items, [&](int64_t i) { step(i / plan.items, i % plan.items); });
        };
        workers.each(plan.sets(), [&](int64_t set) { pass.begin(set); });
        if (pass.collects()) all([&](int64_t set, int64_t item) { pass.collect(set, item); });
        workers.each(plan.sets(), [&](int64_t set) { pass.finish(set); });
        // In the same order, so that each thread gets the data that it has in cache.
        if (pass.applies()) all([&](int64_t set, int64_t item) { pass.apply(set, item); });
        return;
    }
    workers.ranges(plan.groups * plan.sets_per_n, [&](int64_t first, int64_t last) {
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

// The same for large results: one set is written while the sums of the next are accumulated, in one pass over memory.
template <class Pass>
void run_pipelined(const Plan& plan, const Workers& workers, Pass& pass) {
    workers.ranges(plan.groups * plan.sets_per_n, [&](int64_t first, int64_t last) {
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

// A pass over columns: begin(range), collect(range, chunk) for every chunk, finish(range), apply(range, chunk) for
// every chunk. A thread takes a range of columns through all steps. If there are too few ranges for the threads, each
// step runs over the chunks of all samples in parallel. Columns are independent: the results do not depend on the
// ranges.
struct ColumnPlan {
    int64_t N, C, chunks, group_size, groups;  // samples are grouped as in Plan
    int64_t width, ranges;                     // columns of a range, and their number in a sample
    bool phased;
    bool resident;  // what collect reads stays in the threads' second-level caches until apply

    // arrays: the number of arrays that collect and apply read; row_bytes: from one row of them to the next
    ColumnPlan(const Geometry& g, const ColumnGrid& grid, int64_t arrays, int64_t element_bytes, int64_t row_bytes,
               const Workers& workers)
        : N(g.N), C(g.C), chunks(grid.chunks) {
        group_size = ceil_div(N, kMaxParts);
        groups = ceil_div(N, group_size);
        const int64_t threads = workers.threads(), near = near_cache_bytes();
        // Rows that are a multiple of a power of two apart compete for the same lines of a cache: a narrower range of
        // their columns does not take less of it.
        const int64_t spread = magnitude(row_bytes) & -magnitude(row_bytes);
        const auto footprint = [&](int64_t columns) {
            return g.R * arrays * std::max(columns * element_bytes, std::min(spread, C * element_bytes));
        };
        width = std::min(C, kColumns);
        const int64_t near_columns = near / (g.R * arrays * element_bytes) / kLeastColumns * kLeastColumns;
        if (near_columns > 0 && footprint(near_columns) <= near) width = std::min(width, near_columns);
        // Data that comes from far is read faster in whole rows, even if the threads then have to synchronise.
        if (groups < 2 * threads && footprint(C) <= near * threads) {
            width = std::min(width, ceil_div(ceil_div(C, threads), kLeastColumns) * kLeastColumns);
        }
        width = std::min(C, ceil_div(width, g.K) * g.K);
        ranges = ceil_div(C, width);
        const int64_t units = groups * ranges;
        phased = threads > 1 && N * chunks > 1 && group_size == 1 && units < 2 * threads && units % threads != 0;
        resident = phased ? N * footprint(C) <= near * threads : footprint(width) <= near;
    }
    ColumnRange range(int64_t n, int64_t index) const { return {n, index * width, std::min(width, C - index * width)}; }
};

template <class Pass>
void run(const ColumnPlan& plan, const Workers& workers, Pass& pass) {
    // What collect read last is still in a cache: apply starts there, unless all of it is near.
    const auto reversed = [&](int64_t i, int64_t count) { return plan.resident ? i : count - 1 - i; };
    if (plan.phased) {
        const int64_t items = plan.N * plan.chunks;
        const auto whole = [&](int64_t n) { return ColumnRange{n, 0, plan.C}; };
        workers.each(plan.N, [&](int64_t n) { pass.begin(whole(n)); });
        if (pass.collects()) {
            workers.each(items, [&](int64_t i) { pass.collect(whole(i / plan.chunks), i % plan.chunks); });
        }
        workers.each(plan.N, [&](int64_t n) { pass.finish(whole(n)); });
        if (!pass.applies()) return;
        workers.each(items, [&](int64_t i) {
            const int64_t item = reversed(i, items);
            pass.apply(whole(item / plan.chunks), item % plan.chunks);
        });
        return;
    }
    workers.each(plan.groups * plan.ranges, [&](int64_t unit) {
        const int64_t first = unit / plan.ranges * plan.group_size;
        for (int64_t n = first; n < std::min(first + plan.group_size, plan.N); ++n) {
            const ColumnRange range = plan.range(n, unit % plan.ranges);
            pass.begin(range);
            if (pass.collects()) {
                for (int64_t chunk = 0; chunk < plan.chunks; ++chunk) pass.collect(range, chunk);
            }
            pass.finish(range);
            if (!pass.applies()) continue;
            for (int64_t i = 0; i < plan.chunks; ++i) pass.apply(range, reversed(i, plan.chunks));
        }
    });
}

// ---- statistics ----------------------------------------------------------------------------------------------------

struct Moments {
    double mean, m2;
};

// Computes moments from sums about a center. Returns false if the center was so far from the mean that squares cancel
// (the error of m2 grows with 1 + distance^2 / var, which must be at most 5), or if the squares left float's range. The
// caller then sums again in double.
template <class A>
bool accept(double center, const double* sums, double count, double eps, Moments& out) {
    const double share = 1 / count, shift = sums[0] * share, m2 = sums[1] - sums[0] * shift;
    out = {center + shift, m2 < 0 ? 0 : m2};
    if (!(sums[0] * shift <= 4 * m2)) return false;
    if (sizeof(A) == sizeof(double)) return true;
    // A square lost to underflow is below 1e-38: negligible beside any usual eps.
    return m2 < 1e36 && (eps > 1e-25 || m2 > count * 1e-30);
}

// The second of two wide passes, about the first one's mean.
inline Moments wide_moments(double center, const double* sums, double count) {
    // Infinite or NaN data: the mean says which, and the variance is undefined (inf - inf).
    if (center - center != 0) return {center, std::numeric_limits<double>::quiet_NaN()};
    const double m2 = sums[1] - sums[0] * sums[0] / count;
    return {center + sums[0] / count, m2 < 0 ? 0 : m2};
}

// Two wide passes over a set. sum(center, sums) accumulates moments of the whole set: first about 0 for the mean, then
// about the mean.
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
struct SetStatistics : Standardization<A> {
    double exact_rstd, exact_offset;  // in double, so that values derived from them are rounded only once
    SetStatistics(double mean, double var, double eps) : SetStatistics(mean, 1 / sqrt(var + eps)) {}
    SetStatistics(double mean, double rstd) {
        this->center = A(mean);
        exact_rstd = rstd;
        exact_offset = (double(this->center) - mean) * exact_rstd;
        this->rstd = A(exact_rstd);
        this->offset = A(exact_offset);
    }
};

template <class A>
Affine<const A*> addresses(const Affine<A>& z) {
    return {&z.center, &z.scale, &z.shift};
}
// The coefficients of a channel's z. Backward recomputes z with the same bits as forward.
template <class A>
Affine<A> affine(const SetStatistics<A>& s, double gamma, double beta) {
    return {s.center, A(gamma * s.exact_rstd), A(beta + gamma * s.exact_offset)};
}

// 1 / std of sets, several at a time. Valid until the thread's next call.
template <class A>
const double* reciprocal_stds(const NormKernels<A>& kernels, const double* var, int64_t sets, double eps) {
    double* rstds = my_set_scratch().rstds.take<double>(sets);
    kernels.reciprocal_std(sets, var, eps, rstds);
    return rstds;
}

template <class A>
struct RowStatistics {
    A center[kRowGroup], rstd[kRowGroup], offset[kRowGroup];
    RowStatistics(const NormKernels<A>& kernels, const double* mean, const double* var, int64_t rows, double eps) {
        kernels.row_standardize(rows, mean, var, eps, {center, rstd, offset});
    }
    operator Standardization<const A*>() const { return {center, rstd, offset}; }
};

}  // namespace rg
