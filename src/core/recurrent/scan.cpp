#include "scan.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "../base/blocks.h"
#include "../base/dispatch.h"
#include "../base/machine.h"
#include "../base/parallel.h"
#include "../base/scratch.h"
#include "../kernels.h"

namespace rg {
namespace {

// Columns of a task. Of data in a cache, their states and a few steps stay in the first level; of data in memory, rows
// must be long for the memory's sake. Where time is contiguous instead, blocks of some sequences are transposed.
constexpr int64_t kNearColumns = 1024, kFarColumns = 4096, kSequences = 32;
// Elements of a block of short rows without gaps that is streamed as one run.
constexpr int64_t kRun = 2048;
static_assert(kFarColumns <= kTile, "a block of staged steps fits a tile");

template <class A>
struct ScanScratch {
    alignas(64) A a[kTile], in[kTile], out[kTile], states[kTile], da[kTile], turned[kTile];
    alignas(64) A state[kFarColumns], constant[kFarColumns], other[kFarColumns];
    alignas(64) double sums[kFarColumns];
};

// An array at the columns of a task. Strides of time and of columns, in elements.
template <class T>
struct Place {
    T* data = nullptr;
    int64_t time = 0, column = 0;
};

// The steps of a block, in the order of computation: from `first` on, upwards or downwards.
struct Stretch {
    int64_t first, rows;
    int step;
    int64_t low(int64_t sign) const {  // the time whose row is at the lowest address, if time's stride has this sign
        return (step > 0) == (sign > 0) ? first : first + step * (rows - 1);
    }
};

// One task: some columns, and how blocks of their steps reach the kernel. A block whose rows are contiguous is used in
// place; any other is staged in a tile, whose rows are in the order of their addresses.
template <class A>
class Task {
public:
    // `runs`: short rows of results may leave the cache as runs. That is worth it where there are two results, and the
    // arrays are far larger than the caches: otherwise they are faster written in place, through the cache.
    Task(int64_t columns, bool streamed, bool runs)
        : kernels_(kernel_table().scan.of<A>()),
          storage_(kernel_table().storage.of<A>()),
          scratch_(kept_by_thread<ScanScratch<A>>()),
          cols_(columns),
          stream_(streamed),
          runs_(streamed && runs) {}

    ScanScratch<A>& scratch() { return scratch_; }

    bool direct(const Place<const A>& place) const { return place.column == 1 || cols_ == 1; }
    bool direct(const Place<A>& place) const { return place.column == 1 || cols_ == 1; }

    // Whether rows of results are staged because they follow one another and do not begin at cache lines: a block of
    // them can be streamed, a row cannot.
    bool runs(const Place<A>& place) const {
        return runs_ && place.data && place.column == 1 && magnitude(place.time) == cols_ && cols_ > 1 &&
               cols_ < kNearColumns && cols_ * int64_t(sizeof(A)) % 64 != 0;
    }

    Steps<const A> take(const Place<const A>& place, const Stretch& block, bool copy, A* tile) const {
        if (!copy && direct(place)) return {place.data + block.first * place.time, block.step * place.time};
        const int64_t sign = place.time < 0 ? -1 : 1, stride = sign * place.time;
        const A* const from = place.data + block.low(sign) * place.time;
        if (place.column == 0 && cols_ > 1) {
            const int64_t rows = stride == 0 && !copy ? 1 : block.rows;
            for (int64_t r = 0; r < rows; ++r) std::fill(tile + r * cols_, tile + (r + 1) * cols_, from[r * stride]);
            if (rows != block.rows) return {tile, 0};
        } else if (stride == 1 && !direct(place)) {
            if (stream_) prefetch(place, from, (block.step > 0) == (sign > 0) ? block.rows : -block.rows, block.rows);
            kernels_.transpose(from, place.column, {cols_, block.rows}, tile, cols_);
        } else {
            for (int64_t r = 0; r < block.rows; ++r) {
                storage_.load(kType, from + r * stride, place.column, cols_, tile + r * cols_);
            }
        }
        const Steps<A> rows = ordered(tile, block, sign);
        return {rows.data, rows.stride};
    }

    // Where the kernel writes a result: in place, or into a tile that put() then stores. Null data: it is discarded.
    Steps<A> target(const Place<A>& place, const Stretch& block, bool staged, A* tile) const {
        if (!place.data && !staged) return {tile, 0};
        if (in_place(place, staged)) return {place.data + block.first * place.time, block.step * place.time};
        return ordered(tile, block, place.time < 0 ? -1 : 1);
    }
    void put(const Place<A>& place, const Stretch& block, bool staged, bool accumulate, const A* tile) const {
        if (!place.data || in_place(place, staged)) return;
        const int64_t sign = place.time < 0 ? -1 : 1, stride = sign * place.time;
        A* const to = place.data + block.low(sign) * place.time;
        if (runs(place)) return storage_.store(kType, tile, block.rows * cols_, to, 1, accumulate, stream_);
        if (stride == 1 && !direct(place) && !accumulate && !stream_) {
            return kernels_.transpose(tile, cols_, {block.rows, cols_}, to, place.column);
        }
        if (stride == 1 && !direct(place)) {
            A* const turned = scratch_.turned;
            kernels_.transpose(tile, cols_, {block.rows, cols_}, turned, block.rows);
            for (int64_t c = 0; c < cols_; ++c) {
                storage_.store(kType, turned + c * block.rows, block.rows, to + c * place.column, 1, accumulate,
                               stream_);
            }
            return;
        }
        for (int64_t r = 0; r < block.rows; ++r) {
            storage_.store(kType, tile + r * cols_, cols_, to + r * stride, place.column, accumulate, stream_);
        }
    }

    void take_row(const Place<const A>& place, A otherwise, A* row) const {
        if (!place.data) {
            std::fill(row, row + cols_, otherwise);
        } else {
            storage_.load(kType, place.data, cols_ == 1 ? 1 : place.column, cols_, row);
        }
    }
    void put_row(const Place<A>& place, const A* row, bool accumulate) const {
        if (!place.data) return;
        storage_.store(kType, row, cols_, place.data, cols_ == 1 ? 1 : place.column, accumulate, false);
    }

    // Sets rows to 0 where reset; time `shift` steps after the block's own.
    void clear(const Place<const uint8_t>& reset, const Stretch& block, int64_t shift, Steps<A> rows) const {
        for (int64_t r = 0; r < block.rows; ++r) {
            const int64_t time = block.first + block.step * r + shift;
            kernels_.clear(reset.data + time * reset.time, cols_ == 1 ? 1 : reset.column, cols_,
                           rows.data + r * rows.stride);
        }
    }

    // a of the block's steps, or of those `shift` later; 0 where reset.
    Steps<const A> factors(const Place<const A>& a, const Place<const uint8_t>& reset, const Stretch& block,
                           int64_t shift) const {
        const Stretch shifted = {block.first + shift, block.rows, block.step};
        const Steps<const A> rows = take(a, shifted, reset.data, scratch_.a);
        if (reset.data) clear(reset, block, shift, {const_cast<A*>(rows.data), rows.stride});  // a copy, in the tile
        return rows;
    }

    // Whether the kernel writes a result to its place, not to a tile.
    bool in_place(const Place<A>& place, bool staged) const {
        return place.data && !staged && direct(place) && !runs(place);
    }

    // `stream`: the results are in place. `far`: the inputs are, and the results in tiles; where all are in place, the
    // processor's own prefetching is better.
    void run(ScanSteps<A> steps, bool far, bool stream) const {
        steps.size.cols = cols_;
        steps.state = scratch_.state;
        steps.far = stream_ && far;
        steps.stream = stream_ && stream;
        kernels_.run(steps);
    }

    // Where time is contiguous in all arrays, with the same sign, the kernel transposes in registers. a may have no
    // time. Results that are null are not wanted.
    bool sequential(const Place<const A>& a, const Place<const A>& in, const Place<A>& out,
                    const Place<const A>& states, const Place<A>& da) const {
        const auto fits = [&](const auto& place) { return !place.data || place.time == in.time; };
        return in.data && cols_ > 1 && in.column != 1 && magnitude(in.time) == 1 && (a.time == 0 || fits(a)) &&
               fits(out) && (!da.data || (fits(da) && fits(states)));
    }
    // `times`: how many, from `first` on. a and the states before are of `shift` steps later and earlier.
    void run_sequences(const Place<const A>& a, const Place<const A>& in, const Place<A>& out,
                       const Place<const A>& states, const Place<A>& da, int64_t first, int64_t times, int64_t shift,
                       bool backwards) const {
        const auto rows = [&](const auto& place, int64_t later) {
            const int64_t low = first + later + (place.time < 0 ? times - 1 : 0);
            return Steps<std::remove_pointer_t<decltype(place.data)>>{place.data + low * place.time, place.column};
        };
        ScanSequences<A> call{};
        call.steps = times;
        call.sequences = cols_;
        call.down = backwards == (in.time > 0);
        call.a = rows(a, shift);
        call.constant = a.time == 0;
        call.b = rows(in, 0);
        call.state = scratch_.state;
        if (out.data) call.y = rows(out, 0);
        if (da.data) {
            call.before = rows(states, -shift);
            call.da = rows(da, 0);
        }
        call.stream = stream_;
        kernels_.run_sequences(call);
    }

private:
    // The next block of sequences whose elements are contiguous.
    void prefetch(const Place<const A>& place, const A* from, int64_t ahead, int64_t count) const {
        constexpr int64_t line = 64 / int64_t(sizeof(A));
        for (int64_t c = 0; c < cols_; ++c) {
            const A* const next = from + c * place.column + ahead;
            for (int64_t i = 0; i < count; i += line) __builtin_prefetch(next + i, 0, 2);
        }
    }

    static constexpr DType kType = sizeof(A) == sizeof(double) ? DType::f64 : DType::f32;

    Steps<A> ordered(A* tile, const Stretch& block, int64_t sign) const {
        if ((block.step > 0) == (sign > 0)) return {tile, cols_};
        return {tile + (block.rows - 1) * cols_, -cols_};
    }

    const ScanKernels<A>& kernels_;
    const StorageKernels<A>& storage_;
    ScanScratch<A>& scratch_;
    int64_t cols_;
    bool stream_, runs_;
};

// How the columns are cut into tasks: along one axis, the one that is contiguous in the result if there is one.
struct ScanTasks {
    ScanAxis inner{};
    const ScanSpace& space;
    int inner_axis = -1;
    int64_t columns = 1, pieces = 1, tasks = 1;

    // `result`: the array that decides. Results do not depend on how columns are cut.
    ScanTasks(const ScanSpace& given, int result, bool far, int threads) : space(given) {
        inner.extent = 1;
        for (int i = 0; i < space.size; ++i) {
            if (inner_axis < 0 || better(space.axis[i], space.axis[inner_axis], result)) inner_axis = i;
        }
        if (inner_axis >= 0) inner = space.axis[inner_axis];
        const bool turned =
            inner.extent > 1 && magnitude(inner.stride[result]) != 1 && magnitude(space.time.stride[result]) == 1;
        const int64_t most = turned ? kSequences : far ? kFarColumns : kNearColumns;
        pieces = ceil_div(inner.extent, most);
        const int64_t outer = space.columns() / std::max<int64_t>(1, inner.extent);
        if (outer < threads && inner.extent >= 64 * threads) pieces = ceil_div(pieces, threads) * threads;
        columns = std::min(most, ceil_div(ceil_div(inner.extent, pieces), 16) * 16);
        pieces = ceil_div(inner.extent, columns);
        tasks = outer * pieces;
    }
    int64_t count(int64_t task) const { return std::min(columns, inner.extent - task % pieces * columns); }

    template <class T>
    Place<T> place(T* data, int view, int64_t task) const {
        if (!data) return {};
        int64_t outer = task / pieces, offset = task % pieces * columns * inner.stride[view];
        for (int i = space.size - 1; i >= 0; --i) {
            if (i == inner_axis) continue;
            offset += outer % space.axis[i].extent * space.axis[i].stride[view];
            outer /= space.axis[i].extent;
        }
        return {data + offset, space.time.stride[view], inner.stride[view]};
    }

private:
    bool better(const ScanAxis& a, const ScanAxis& b, int result) const {
        const int64_t of_a = magnitude(a.stride[result]), of_b = magnitude(b.stride[result]);
        if (of_a == 1 || of_b == 1) return of_a == 1 && (of_b != 1 || a.extent > b.extent);
        return magnitude(space.time.stride[result]) == 1 ? a.extent > b.extent : of_a < of_b;
    }
};

// The bytes of an array, by its strides: along an axis of stride 0 it is broadcast.
int64_t extent_of(const ScanSpace& space, int view) {
    int64_t elements = space.time.stride[view] ? space.time.extent : 1;
    for (int i = 0; i < space.size; ++i) elements *= space.axis[i].stride[view] ? space.axis[i].extent : 1;
    return elements;
}

// The rows that a block may have if one of its arrays is staged, or one result is for its run.
int64_t block_rows(bool staged, bool runs, int64_t cols, int64_t steps) {
    return runs ? std::max<int64_t>(1, kRun / cols) : staged ? kTile / cols : std::max<int64_t>(1, steps);
}

}  // namespace

template <class A>
void scan_forward(const ScanForward<A>& call) {
    const ScanSpace& space = call.space;
    const int64_t steps = space.time.extent, columns = space.columns();
    if (columns == 0) return;
    const int64_t elements = 2 * steps * columns + extent_of(space, kScanA);
    const bool stream = call.y && call.y != call.b && exceeds_caches(elements * int64_t(sizeof(A)));
    const ScanTasks tasks(space, call.y ? kScanOut : kScanIn, stream, call.threads);
    const double work = cost::kElement * double(steps + 1) * double(columns);
    Workers(work, call.threads).each(tasks.tasks, [&](int64_t index) {
        const int64_t cols = tasks.count(index);
        Task<A> task(cols, stream, false);
        ScanScratch<A>& scratch = task.scratch();
        const auto a = tasks.place(call.a, kScanA, index), b = tasks.place(call.b, kScanIn, index);
        const auto reset = tasks.place(call.reset, kScanReset, index);
        const auto y = tasks.place(call.y, kScanOut, index);
        task.take_row(tasks.place(call.h0, kScanStart, index), A(0), scratch.state);
        const bool sequential = !reset.data && task.sequential(a, b, y, {}, {});
        if (sequential) task.run_sequences(a, b, y, {}, {}, 0, steps, 0, false);
        const bool staged = reset.data || !task.direct(a) || !task.direct(b) || (y.data && !task.direct(y));
        const int64_t most = block_rows(staged, false, cols, steps);
        for (int64_t t = 0; t < steps && !sequential; t += most) {
            const Stretch block = {t, std::min(most, steps - t), 1};
            ScanSteps<A> run{};
            run.size.rows = block.rows;
            run.a = task.factors(a, reset, block, 0);
            run.b = task.take(b, block, false, scratch.in);
            run.y = task.target(y, block, false, scratch.out);
            task.run(run, false, task.in_place(y, false));
            task.put(y, block, false, false, scratch.out);
        }
        task.put_row(tasks.place(call.hn, kScanEnd, index), scratch.state, false);
    });
}

template <class A>
void scan_backward(const ScanBackward<A>& call) {
    const ScanSpace& space = call.space;
    const int64_t steps = space.time.extent, columns = space.columns();
    if (columns == 0 || !(call.da || call.da_sums || call.db || call.dh0)) return;
    const bool wants_da = call.da || call.da_sums;
    const int64_t arrays = (call.dy ? 1 : 0) + (call.db ? 1 : 0) + (call.da ? 1 : 0) + (wants_da ? 1 : 0);
    const int64_t elements = arrays * steps * columns + extent_of(space, kScanA);
    const bool stream = call.dy != call.db && !call.accumulate && exceeds_caches(elements * int64_t(sizeof(A)));
    const ScanTasks tasks(space,
                          call.db   ? kScanOut
                          : call.da ? kScanDa
                          : call.dy ? kScanIn
                                    : kScanA,
                          stream, call.threads);
    const RowKernels<A>& rows = kernel_table().rows.of<A>();
    const bool runs = call.da && call.db && exceeds_caches(elements / 2 * int64_t(sizeof(A)));
    const double work = 2 * cost::kElement * double(steps + 1) * double(columns);
    Workers(work, call.threads).each(tasks.tasks, [&](int64_t index) {
        const int64_t cols = tasks.count(index);
        Task<A> task(cols, stream, runs);
        ScanScratch<A>& scratch = task.scratch();
        const auto dy = tasks.place(call.dy, kScanIn, index), a = tasks.place(call.a, kScanA, index);
        const auto reset = tasks.place(call.reset, kScanReset, index);
        const auto states = tasks.place(call.y, kScanStates, index);
        const auto da = tasks.place(call.da, kScanDa, index), db = tasks.place(call.db, kScanOut, index);
        // Adding -0 keeps every value, and the sign of 0.
        std::fill(scratch.constant, scratch.constant + cols, A(-0.0));
        std::fill(scratch.sums, scratch.sums + cols, 0.0);
        task.take_row(tasks.place(call.dhn, kScanStart, index), steps ? A(-0.0) : A(0), scratch.state);

        // l of a block's steps, given `a` of the steps after them, and the states before them.
        const bool staged_da = call.da_sums || (call.da && (call.accumulate || reset.data));
        const bool far =
            (task.runs(db) || task.runs(da)) && !reset.data && task.direct(a) && task.direct(dy) && task.direct(states);
        const auto run = [&](const Stretch& block, Steps<const A> factors, Steps<const A> before) {
            ScanSteps<A> run{};
            run.size.rows = block.rows;
            run.a = factors;
            run.b = dy.data ? task.take(dy, block, false, scratch.in) : Steps<const A>{scratch.constant, 0};
            run.y = task.target(db, block, db.data && call.accumulate, scratch.out);
            if (wants_da) {
                run.before = before;
                run.da = task.target(da, block, staged_da, scratch.da);
            }
            task.run(run, far, task.in_place(db, call.accumulate) && (!wants_da || task.in_place(da, staged_da)));
            task.put(db, block, call.accumulate, call.accumulate, scratch.out);
            if (!wants_da) return;
            if (reset.data) task.clear(reset, block, 0, run.da);
            for (int64_t r = 0; r < block.rows && call.da_sums; ++r) {
                A* const row = run.da.data + r * run.da.stride;
                rows.accumulate(row, cols, false, scratch.sums, row);
            }
            task.put(da, block, staged_da, call.accumulate, scratch.da);
        };
        // The last step has no later one: l = 1 * dhn + dy. The first has no state before it but h0.
        std::fill(scratch.a, scratch.a + cols, A(1));
        if (wants_da) task.take_row(tasks.place(call.h0, kScanFirst, index), A(0), scratch.other);
        if (steps == 1) run({0, 1, -1}, {scratch.a, 0}, {scratch.other, 0});
        if (steps > 1) {
            const auto before = [&](const Stretch& block) -> Steps<const A> {
                if (!wants_da) return {};
                return task.take(states, {block.first - 1, block.rows, block.step}, false, scratch.states);
            };
            const Stretch last = {steps - 1, 1, -1};
            run(last, {scratch.a, 0}, before(last));
            const bool staged = reset.data || call.accumulate || staged_da || !task.direct(a) ||
                                (dy.data && !task.direct(dy)) || (db.data && !task.direct(db)) ||
                                (da.data && !task.direct(da)) || (wants_da && !task.direct(states));
            const int64_t most = block_rows(staged, task.runs(db) || task.runs(da), cols, steps);
            const bool sequential =
                !reset.data && !call.accumulate && !call.da_sums && task.sequential(a, dy, db, states, da);
            if (sequential) task.run_sequences(a, dy, db, states, da, 1, steps - 2, 1, true);
            for (int64_t t = steps - 2; t >= 1 && !sequential; t -= most) {
                const Stretch block = {t, std::min(most, t), -1};
                run(block, task.factors(a, reset, block, 1), before(block));
            }
            const Stretch first = {0, 1, -1};
            run(first, task.factors(a, reset, first, 1), {scratch.other, 0});
        }
        if (call.dh0) {
            if (steps > 0) {
                const Stretch first = {0, 1, -1};
                ScanSteps<A> product{};  // state = a[0] * l[0] - 0
                product.size.rows = 1;
                product.a = task.factors(a, reset, first, 0);
                product.b = {scratch.constant, 0};
                product.y = {scratch.out, 0};
                task.run(product, false, false);
            }
            task.put_row(tasks.place(call.dh0, kScanEnd, index), scratch.state, call.accumulate);
        }
        if (call.da_sums) {
            const Place<double> to = tasks.place(call.da_sums, kScanSums, index);
            for (int64_t c = 0; c < cols; ++c) to.data[c * to.column] = scratch.sums[c];
        }
    });
}

#define RG_INSTANTIATE(A)                                 \
    template void scan_forward<A>(const ScanForward<A>&); \
    template void scan_backward<A>(const ScanBackward<A>&);
RG_INSTANTIATE(float)
RG_INSTANTIATE(double)
#undef RG_INSTANTIATE

}  // namespace rg
