#include "reduce.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "../base/blocks.h"
#include "../base/dispatch.h"
#include "../base/parallel.h"

namespace rg {
namespace {

// Constants, because the bits of results depend on them.
constexpr int64_t kReduceUnit = 2048;    // elements of a row that is reduced at once
constexpr int64_t kReduceBlock = 65536;  // elements of a partial result, which is one thread's
constexpr int64_t kBlockRows = 256;      // the least rows of a block of columns, if there are as many

// The bits of results do not depend on these.
constexpr int64_t kMostResults = 1024;  // of one call of a kernel for rows
constexpr int64_t kStaged = 16384;      // elements that are copied to be contiguous
constexpr int64_t kColumnTile = 4096;

// The partial results, kept by the calling thread, and the elements that each thread copies to be contiguous.
struct ReduceScratch {
    Buffer partial, staged;
};

constexpr double kCost = 2 * cost::kCopy;  // of an element

double merge(ReduceKind kind, double a, double b) {
    switch (kind) {
        case ReduceKind::max:
            return b > a || b != b ? b : a;
        case ReduceKind::min:
            return b < a || b != b ? b : a;
        case ReduceKind::product:
            return a * b;
        default:
            return a + b;
    }
}

void merge_into(ReduceKind kind, double* results, const double* more, int64_t count) {
    if (kind == ReduceKind::sum || kind == ReduceKind::mean || kind == ReduceKind::sum_of_squares) {
        for (int64_t i = 0; i < count; ++i) results[i] += more[i];
    } else {
        for (int64_t i = 0; i < count; ++i) results[i] = merge(kind, results[i], more[i]);
    }
}

int64_t offset_in(const AxisList& list, int axes, int64_t index, int view) {
    int64_t offset = 0;
    for (int i = axes - 1; i > 0; --i) {
        offset += index % list.axis[i].extent * list.axis[i].stride[view];
        index /= list.axis[i].extent;
    }
    return axes > 0 ? offset + index * list.axis[0].stride[view] : 0;
}
int64_t offset_in(const AxisList& list, int64_t index, int view) { return offset_in(list, list.size, index, view); }

// Calls body(first, count, x, y) for runs of indices [first, last) of a list that do not cross its last axis: where
// they begin in x and in y.
template <class Body>
void for_runs(const AxisList& list, int64_t first, int64_t last, const Body& body) {
    const int64_t run = list.size ? list.axis[list.size - 1].extent : 1;
    while (first < last) {
        const int64_t count = std::min(run - remainder(first, run), last - first);
        body(first, count, offset_in(list, first, kX), offset_in(list, first, kY));
        first += count;
    }
}

int64_t last_stride(const AxisList& list, int view) { return list.size ? list.axis[list.size - 1].stride[view] : 0; }
int64_t last_extent(const AxisList& list) { return list.size ? list.axis[list.size - 1].extent : 1; }

// to[r][c] = from[r * row + c * col], in squares, so that lines that hold several rows are used while they are cached.
template <class A>
void copy_strided(const A* from, int64_t row, int64_t col, int64_t rows, int64_t cols, A* to) {
    constexpr int64_t kSquare = 16;
    if (magnitude(row) >= magnitude(col)) {
        for (int64_t r = 0; r < rows; ++r) {
            for (int64_t c = 0; c < cols; ++c) to[r * cols + c] = from[r * row + c * col];
        }
        return;
    }
    for (int64_t r = 0; r < rows; r += kSquare) {
        const int64_t end = std::min(rows, r + kSquare);
        for (int64_t c = 0; c < cols; ++c) {
            const A* const at = from + c * col;
            for (int64_t i = r; i < end; ++i) to[i * cols + c] = at[i * row];
        }
    }
}

// The same with columns, or rows, that run along several axes, from index `first` on.
template <class A>
void stage_rows(const A* from, int64_t row, int64_t rows, const AxisList& axes, int64_t first, int64_t cols, A* to) {
    if (axes.size <= 1) {
        return copy_strided(from + first * last_stride(axes, kX), row, last_stride(axes, kX), rows, cols, to);
    }
    const int64_t step = last_stride(axes, kX);
    for (int64_t r = 0; r < rows; ++r) {
        for_runs(axes, first, first + cols, [&](int64_t at, int64_t count, int64_t offset, int64_t) {
            const A* const run = from + r * row + offset;
            A* const line = to + r * cols + (at - first);
            for (int64_t c = 0; c < count; ++c) line[c] = run[c * step];
        });
    }
}
template <class A>
void stage_columns(const A* from, const AxisList& axes, int64_t first, int64_t rows, int64_t col, int64_t cols, A* to) {
    const int64_t step = last_stride(axes, kX);
    for_runs(axes, first, first + rows, [&](int64_t at, int64_t count, int64_t offset, int64_t) {
        copy_strided(from + offset, step, col, count, cols, to + (at - first) * cols);
    });
}

// What the two ways of reducing share: units of reduced elements, `per_block` of them to a partial result.
template <class A>
class Reduction {
public:
    explicit Reduction(const ReduceCall<A>& call) : kernels_(kernel_table().reduce.of<A>()), call_(call) {
        bool inner_reduced = true, settled = false;
        for (int i = call.axes.size - 1; i >= 0; --i) {
            const Axis& axis = call.axes.axis[i];
            const bool reduced = call.reduced >> i & 1;
            (reduced ? terms_ : outputs_) *= axis.extent;
            if (axis.extent == 1 || settled) continue;
            inner_reduced = reduced;
            settled = true;
        }
        by_rows_ = inner_reduced;
        // The last group of reduced axes is the inner one, the others are the outer ones.
        bool inside = true, seen = false;
        AxisList inner, outer, kept;
        for (int i = call.axes.size - 1; i >= 0; --i) {
            const Axis& axis = call.axes.axis[i];
            if (axis.extent == 1) continue;
            if (call.reduced >> i & 1) {
                AxisList& list = inside ? inner : outer;
                list.axis[list.size++] = axis;
                list.axis[list.size - 1].stride[kY] = 0;
                seen = true;
            } else {
                kept.axis[kept.size++] = axis;
                if (!seen) width_ *= axis.extent;
                if (seen) inside = false;
            }
        }
        settle(inner, inner_);
        settle(outer, outer_);
        settle(kept, kept_);
        inner_count_ = inner_.extent();
    }

    void run() {
        if (outputs_ == 0) return;
        if (terms_ == 0) return fill();
        by_rows_ ? plan_rows() : plan_columns();
        blocks_ = ceil_div(units_, per_block_);
        const int64_t tiles = by_rows_ ? ceil_div(outputs_, tile_) : outputs_ / last_extent(kept_) * tiles_across_;
        double* const partial =
            blocks_ > 1 ? kept_by_thread<ReduceScratch>().partial.take<double>(outputs_, blocks_) : nullptr;
        const Workers workers(kCost * double(outputs_) * double(terms_), call_.threads);
        workers.each(tiles * blocks_, [&](int64_t task) {
            const int64_t block = quotient(task, tiles), tile = remainder(task, tiles);
            const int64_t first = block * per_block_, last = std::min(units_, first + per_block_);
            double* const to = partial ? partial + block * outputs_ : nullptr;
            by_rows_ ? reduce_rows(tile, first, last, to) : reduce_columns(tile, first, last, to);
        });
        if (!partial) return;
        workers.each(ceil_div(outputs_, kMostResults), [&](int64_t tile) {
            const int64_t first = tile * kMostResults, count = std::min(kMostResults, outputs_ - first);
            double* const sums = partial + first;
            for (int64_t b = 1; b < blocks_; ++b) merge_into(call_.kind, sums, sums + b * outputs_, count);
            finish(first, count, sums);
        });
    }

private:
    // Both lists in the order of x, of which one was collected from its end.
    static void settle(const AxisList& reversed, AxisList& list) {
        for (int i = 0; i < reversed.size; ++i) list.axis[i] = reversed.axis[reversed.size - 1 - i];
        list.size = reversed.size;
        for (int i = 0; i < list.size; ++i) {
            for (int v : {kDy, kDx, kKeep}) list.axis[i].stride[v] = 0;
        }
        simplify(list);
    }

    void fill() const {
        const double none = call_.kind == ReduceKind::product ? 1
                            : call_.kind == ReduceKind::mean  ? std::numeric_limits<double>::quiet_NaN()
                                                              : 0;
        for (int64_t i = 0; i < outputs_; ++i) call_.y[offset_in(kept_, i, kY)] = A(none);
    }
    A rounded(double value) const { return A(call_.kind == ReduceKind::mean ? value / double(terms_) : value); }
    void finish(int64_t first, int64_t count, const double* results) const {
        const int64_t step = last_stride(kept_, kY);
        for_runs(kept_, first, first + count, [&](int64_t at, int64_t run, int64_t, int64_t offset) {
            A* const y = call_.y + offset;
            for (int64_t i = 0; i < run; ++i) y[i * step] = rounded(results[at - first + i]);
        });
    }

    // ---- rows: a unit is a row of the inner axes, or kReduceUnit elements of it

    void plan_rows() {
        unit_ = std::min(inner_count_, kReduceUnit);
        chunks_ = ceil_div(inner_count_, unit_);
        units_ = outer_.extent() * chunks_;
        per_block_ = std::max<int64_t>(1, kReduceBlock / unit_);
        straight_ = inner_count_ == 1 || (inner_.size == 1 && inner_.axis[0].stride[kX] == 1);
        tile_ = std::min(kMostResults, std::max<int64_t>(1, kStaged / unit_));
        along_outputs_ = chunks_ == 1 && (last_extent(kept_) >= 4 || outer_.size == 0);
        if (!along_outputs_) tile_ = std::max<int64_t>(1, kReduceBlock / 4 / std::min(units_, per_block_) / unit_);
    }
    // The reductions of `rows` rows of `cols` elements of the inner axes, from element `first` of each on.
    void rows_of(const A* from, int64_t row, int64_t rows, int64_t first, int64_t cols, double* results) const {
        if (straight_) { return kernels_.rows(call_.kind, from + first, row, {rows, cols}, results); }
        const int64_t most = std::max<int64_t>(1, kStaged / cols);
        A* const staged = kept_by_thread<ReduceScratch>().staged.take<A>(most * cols);
        for (int64_t r = 0; r < rows; r += most) {
            const int64_t now = std::min(most, rows - r);
            stage_rows(from + r * row, row, now, inner_, first, cols, staged);
            kernels_.rows(call_.kind, staged, cols, {now, cols}, results + r);
        }
    }
    void reduce_rows(int64_t tile, int64_t first_unit, int64_t last_unit, double* partial) const {
        const int64_t first = tile * tile_, last = std::min(outputs_, first + tile_);
        double more[kMostResults];
        if (along_outputs_) {
            double results[kMostResults];
            for (int64_t u = first_unit; u < last_unit; ++u) {
                const A* const x = call_.x + offset_in(outer_, u, kX);
                double* const to = u == first_unit ? results : more;
                for_runs(kept_, first, last, [&](int64_t at, int64_t count, int64_t offset, int64_t) {
                    rows_of(x + offset, last_stride(kept_, kX), count, 0, unit_, to + (at - first));
                });
                if (u > first_unit) merge_into(call_.kind, results, more, last - first);
            }
            return put(first, last - first, results, partial);
        }
        for (int64_t o = first; o < last; ++o) {
            const A* const x = call_.x + offset_in(kept_, o, kX);
            double result = 0;
            for (int64_t u = first_unit; u < last_unit;) {
                const int64_t count = units_of(x, u, last_unit, more);
                int64_t i = 0;
                if (u == first_unit) result = more[i++];
                for (; i < count; ++i) result = merge(call_.kind, result, more[i]);
                u += count;
            }
            put(o, 1, &result, partial);
        }
    }
    // Units of one output from `unit` on, as many as one call of the kernel can take; returns their number.
    int64_t units_of(const A* x, int64_t unit, int64_t last_unit, double* results) const {
        const int64_t most = std::min(kMostResults, last_unit - unit);
        if (chunks_ == 1) {
            const int64_t run = last_extent(outer_), count = std::min(run - remainder(unit, run), most);
            rows_of(x + offset_in(outer_, unit, kX), last_stride(outer_, kX), count, 0, unit_, results);
            return count;
        }
        const int64_t chunk = unit % chunks_, first = chunk * unit_, left = inner_count_ - first;
        const A* const from = x + offset_in(outer_, unit / chunks_, kX);
        const int64_t whole = std::min(left / unit_, most);
        if (whole == 0) {
            rows_of(from, 0, 1, first, left, results);
            return 1;
        }
        if (straight_) {
            rows_of(from, unit_, whole, first, unit_, results);
        } else {
            for (int64_t i = 0; i < whole; ++i) rows_of(from, 0, 1, first + i * unit_, unit_, results + i);
        }
        return whole;
    }

    // ---- columns: a unit is a block of rows of the inner axes; columns run along the last kept axis

    void plan_columns() {
        constexpr int64_t even = 16;
        block_rows_ = std::max(kBlockRows, ceil_div(kReduceBlock / width_, even) * even);
        chunks_ = ceil_div(inner_count_, block_rows_);
        units_ = outer_.extent() * chunks_;
        per_block_ = std::max<int64_t>(1, kReduceBlock / std::min(inner_count_, block_rows_) / width_);
        const int64_t cols = last_extent(kept_);
        straight_ = inner_.size <= 1 && last_stride(kept_, kX) == 1;
        tile_ = std::min(cols, straight_ ? kColumnTile : std::max<int64_t>(even, 4 * kStaged / block_rows_));
        tiles_across_ = ceil_div(cols, tile_);
    }
    void reduce_columns(int64_t tile, int64_t first_unit, int64_t last_unit, double* partial) const {
        const int64_t length = last_extent(kept_), col = last_stride(kept_, kX);
        const int64_t start = remainder(tile, tiles_across_) * tile_, cols = std::min(tile_, length - start);
        const int64_t first = quotient(tile, tiles_across_) * length + start;
        const A* const x = call_.x + offset_in(kept_, first, kX);
        double results[kColumnTile], more[kColumnTile];
        for (int64_t u = first_unit; u < last_unit; ++u) {
            const int64_t row = remainder(u, chunks_) * block_rows_, rows = std::min(block_rows_, inner_count_ - row);
            const A* const from = x + offset_in(outer_, quotient(u, chunks_), kX);
            double* const to = u == first_unit ? results : more;
            if (straight_) {
                const int64_t step = last_stride(inner_, kX);
                kernels_.columns(call_.kind, from + row * step, step, {rows, cols}, to);
            } else {
                A* const staged = kept_by_thread<ReduceScratch>().staged.take<A>(rows * cols);
                stage_columns(from, inner_, row, rows, col, cols, staged);
                kernels_.columns(call_.kind, staged, cols, {rows, cols}, to);
            }
            if (u > first_unit) merge_into(call_.kind, results, more, cols);
        }
        put(first, cols, results, partial);
    }

    void put(int64_t first, int64_t count, const double* results, double* partial) const {
        if (!partial) return finish(first, count, results);
        std::copy(results, results + count, partial + first);
    }

    const ReduceKernels<A>& kernels_;
    const ReduceCall<A>& call_;
    AxisList kept_, outer_, inner_;
    int64_t outputs_ = 1, terms_ = 1, width_ = 1, inner_count_ = 1;  // width_: of the kept axes after the inner ones
    bool by_rows_ = true, straight_ = true, along_outputs_ = true;
    int64_t unit_ = 1, chunks_ = 1, units_ = 1, per_block_ = 1, blocks_ = 1;
    int64_t block_rows_ = 1, tile_ = 1, tiles_across_ = 1;
};

// ---- truth values

// Whether a run of bytes has one that is 0 (all) or one that is not (any): then the result is known.
bool decides(const uint8_t* x, int64_t stride, int64_t count, bool all) {
    int64_t i = 0;
    if (stride == 1) {
        for (; i + 8 <= count && !all; i += 8) {
            uint64_t eight;
            memcpy(&eight, x + i, 8);
            if (eight) return true;
        }
        if (all && count > 0) return memchr(x, 0, size_t(count)) != nullptr;
    }
    for (; i < count; ++i) {
        if ((x[i * stride] == 0) == all) return true;
    }
    return false;
}

}  // namespace

template <class A>
void reduce(const ReduceCall<A>& call) {
    Reduction<A>(call).run();
}
template void reduce<float>(const ReduceCall<float>&);
template void reduce<double>(const ReduceCall<double>&);

void reduce_bool(const BoolReduceCall& call) {
    AxisList kept, terms;
    for (int i = 0; i < call.axes.size; ++i) {
        AxisList& list = call.reduced >> i & 1 ? terms : kept;
        list.axis[list.size++] = call.axes.axis[i];
        if (call.reduced >> i & 1) list.axis[list.size - 1].stride[kY] = 0;
    }
    const int64_t outputs = kept.extent(), count = terms.extent();
    if (outputs == 0) return;
    for (AxisList* list : {&kept, &terms}) {
        if (count > 0) sort_by_stride(*list, kX);
        simplify(*list);
    }
    const int64_t run = last_extent(terms), step = last_stride(terms, kX), across = last_stride(kept, kX);
    const Workers workers(kCost * double(outputs) * double(count), call.threads);
    const bool columns = across == 1 && (step != 1 || run < 8) && last_extent(kept) >= 16;
    if (!columns) {
        workers.each(outputs, [&](int64_t o) {
            const uint8_t* const x = call.x + offset_in(kept, o, kX);
            bool decided = false;
            for (int64_t i = 0; i < count && !decided; i += run) {
                decided = decides(x + offset_in(terms, i, kX), step, run, call.all);
            }
            call.y[offset_in(kept, o, kY)] = decided != call.all;
        });
        return;
    }
    const int64_t width = last_extent(kept), tiles = ceil_div(width, kColumnTile), to = last_stride(kept, kY);
    workers.each(outputs / width * tiles, [&](int64_t tile) {
        const int64_t start = remainder(tile, tiles) * kColumnTile, cols = std::min(kColumnTile, width - start);
        const int64_t first = quotient(tile, tiles) * width + start;
        const uint8_t* const x = call.x + offset_in(kept, first, kX);
        uint8_t found[kColumnTile] = {};  // for all: whether there is a 0
        for (int64_t i = 0; i < count; ++i) {
            const uint8_t* const row = x + offset_in(terms, i, kX);
            if (call.all) {
                for (int64_t c = 0; c < cols; ++c) found[c] |= uint8_t(row[c] == 0);
            } else {
                for (int64_t c = 0; c < cols; ++c) found[c] |= row[c];
            }
        }
        uint8_t* const y = call.y + offset_in(kept, first, kY);
        for (int64_t c = 0; c < cols; ++c) y[c * to] = uint8_t((found[c] != 0) != call.all);
    });
}

template <class A>
void arg_reduce(const ArgReduceCall<A>& call) {
    const ReduceKernels<A>& kernels = kernel_table().reduce.of<A>();
    const int64_t outputs = call.kept.extent(), n = call.count;
    if (outputs == 0 || n == 0) return;
    AxisList kept = call.kept;
    simplify(kept);
    const Workers workers(kCost * double(outputs) * double(n), call.threads);
    const int64_t width = last_extent(kept), across = last_stride(kept, kX), to = last_stride(kept, kY);
    const auto wins = [](double v, double best) { return v > best || (v != v && best == best); };
    if (call.stride != 1 && across == 1 && width > 1) {
        constexpr int64_t kRows = 1 << 16, kCols = 512;
        const int64_t tiles = ceil_div(width, kCols);
        workers.each(outputs / width * tiles, [&](int64_t tile) {
            const int64_t start = remainder(tile, tiles) * kCols, cols = std::min(kCols, width - start);
            const int64_t first = quotient(tile, tiles) * width + start;
            const A* const x = call.x + offset_in(kept, first, kX);
            A best[kCols], more[kCols];
            int64_t index[kCols], at[kCols];
            const A sign = call.largest ? A(1) : A(-1);
            kernels.arg_columns(sign, x, call.stride, {std::min(kRows, n), cols}, best, index);
            for (int64_t r = kRows; r < n; r += kRows) {
                kernels.arg_columns(sign, x + r * call.stride, call.stride, {std::min(kRows, n - r), cols}, more, at);
                for (int64_t c = 0; c < cols; ++c) {
                    if (!wins(double(more[c]), double(best[c]))) continue;
                    best[c] = more[c];
                    index[c] = r + at[c];
                }
            }
            int64_t* const y = call.y + offset_in(kept, first, kY);
            for (int64_t c = 0; c < cols; ++c) y[c * to] = index[c];
        });
        return;
    }
    const ReduceKind kind = call.largest ? ReduceKind::max : ReduceKind::min;
    const double sign = call.largest ? 1 : -1;
    workers.each(outputs, [&](int64_t o) {
        const A* const x = call.x + offset_in(kept, o, kX);
        A* const staged = call.stride == 1 ? nullptr : kept_by_thread<ReduceScratch>().staged.take<A>(kReduceUnit);
        const auto unit = [&](int64_t first, int64_t count) {
            if (!staged) return x + first;
            copy_strided(x + first * call.stride, 0, call.stride, 1, count, staged);
            return static_cast<const A*>(staged);
        };
        double best = 0;
        int64_t best_unit = 0;
        for (int64_t first = 0; first < n; first += kReduceUnit) {
            const int64_t count = std::min(kReduceUnit, n - first);
            double result;
            kernels.rows(kind, unit(first, count), count, {1, count}, &result);
            if (first > 0 && !wins(sign * result, sign * best)) continue;
            best = result;
            best_unit = first;
        }
        const int64_t count = std::min(kReduceUnit, n - best_unit);
        call.y[offset_in(kept, o, kY)] = best_unit + kernels.find(unit(best_unit, count), count, A(best));
    });
}
template void arg_reduce<float>(const ArgReduceCall<float>&);
template void arg_reduce<double>(const ArgReduceCall<double>&);

}  // namespace rg
