// Reductions of contiguous rows, and of the columns of a block. The contracts are in ../kernels.h.
#pragma once

#include "../kernels.h"
#include "norm_common.h"
#include "vec.h"

namespace rg {
namespace {

template <bool kFirst, class X, class Y>
struct Choice {
    using type = X;
};
template <class X, class Y>
struct Choice<false, X, Y> {
    using type = Y;
};

// How elements are merged into a partial result of type T: double for sums and products, A for the largest.
template <ReduceKind kKind, class A>
struct Reducer {
    static constexpr bool kWide = kKind != ReduceKind::max && kKind != ReduceKind::min;
    static constexpr bool kAdds = kKind == ReduceKind::sum || kKind == ReduceKind::sum_of_squares;
    using T = typename Choice<kWide, double, A>::type;

    // Merging it changes nothing; partial sums are never -0, because they start with 0.
    template <class E>
    static constexpr E identity() {
        return kKind == ReduceKind::max       ? E(-__builtin_inf())
               : kKind == ReduceKind::min     ? E(__builtin_inf())
               : kKind == ReduceKind::product ? E(1)
                                              : E(0);
    }
    // Of equal elements (0 and -0) the first stays, of several NaN the last.
    template <class V>
    static RG_INLINE V merge(V a, V b) {
        if constexpr (kKind == ReduceKind::max) return choose(larger_or_nan(b, a), b, a);
        if constexpr (kKind == ReduceKind::min) return choose(larger_or_nan(-b, -a), b, a);
        if constexpr (kKind == ReduceKind::product) return a * b;
        return a + b;
    }
    template <class V>
    static RG_INLINE V step(V a, V v) {
        if constexpr (kKind == ReduceKind::sum_of_squares) return fma(v, v, a);
        return merge(a, v);
    }
    // Without branches, which data would decide.
    static RG_INLINE T merge_scalars(T a, T b) {
        if constexpr (kWide) {
            return kKind == ReduceKind::product ? a * b : a + b;
        } else {
            using Bits = typename Format<T>::Bits;
            const bool taken = (kKind == ReduceKind::max ? b > a : b < a) | (b != b);
            const Bits from = bit_cast<Bits>(a);
            return bit_cast<T>(Bits(from ^ ((from ^ bit_cast<Bits>(b)) & (Bits(0) - Bits(taken)))));
        }
    }

    // The registers of T that hold one vector of A.
    static constexpr int kPerVector = kLanes<A> / kLanes<T>;
    static RG_INLINE void step_into(Vec<T>* to, Vec<A> v) {
        if constexpr (sizeof(A) == sizeof(T)) {
            *to = step(*to, v);
        } else {
#if defined(RG_ISA_SCALAR)
            *to = step(*to, T(v));
#else
            to[0] = step(to[0], widen_low(v));
            to[1] = step(to[1], widen_high(v));
#endif
        }
    }
};

// The upper half of the registers is merged into the lower one, until one is left.
template <class R, int kRegisters, class V>
RG_INLINE void merge_halves(V* v) {
    if constexpr (kRegisters > 1) {
        constexpr int half = kRegisters / 2;
        unrolled<half>([&](int k) RG_INLINE_LAMBDA { v[k] = R::merge(v[k], v[k + half]); });
        merge_halves<R, half>(v);
    }
}

// One row in kCount partial results; a row of at most kCount elements has the same bits in any larger number of them.
template <class R, class A, int kCount>
RG_INLINE double reduce_row(const A* x, int64_t cols) {
    using T = typename R::T;
    constexpr int vectors = kCount / kLanes<A>, registers = kCount / kLanes<T>, per = registers / vectors;
    const Vec<A> fill = splat(R::template identity<A>());
    Vec<T> part[registers];
    unrolled<registers>([&](int k) RG_INLINE_LAMBDA { part[k] = splat(R::template identity<T>()); });
    const auto add = [&](int64_t i, int64_t n, int k) RG_INLINE_LAMBDA {
        R::step_into(part + k * per, kHasParts<A> && n ? load_part(x + i, n, fill) : load(x + i));
    };
    if constexpr (kCount == kReduceLanes) {
        for_groups_of_vectors<A, vectors>(cols, add);
    } else {
        constexpr int64_t lanes = kLanes<A>;
        if (cols == kCount) {
            unrolled<vectors>([&](int k) RG_INLINE_LAMBDA { add(k * lanes, int64_t(0), k); });
        } else {
            for_last_vectors<A, vectors>(0, cols, add);
        }
    }
    merge_halves<R, registers>(part);
    if constexpr (R::kAdds) {
        return add_lanes(part[0]);
    } else {
        T lane[kLanes<T>];
        store(lane, part[0]);
        for (int half = kLanes<T> / 2; half > 0; half /= 2) {
            for (int k = 0; k < half; ++k) lane[k] = R::merge_scalars(lane[k], lane[k + half]);
        }
        return double(lane[0]);
    }
}

template <class R, class A>
void reduce_rows_as(const A* x, int64_t row, BlockSize size, double* results) {
    const auto each = [&](auto reduce) RG_INLINE_LAMBDA {
        for (int64_t r = 0; r < size.rows; ++r) results[r] = reduce(x + r * row);
    };
    // A group of partial results that no element belongs to would only cost time.
    if constexpr (kLanes<A> <= 8) {
        if (size.cols <= 8) {
            return each([&](const A* from) RG_INLINE_LAMBDA { return reduce_row<R, A, 8>(from, size.cols); });
        }
    }
    if (size.cols <= 16) {
        return each([&](const A* from) RG_INLINE_LAMBDA { return reduce_row<R, A, 16>(from, size.cols); });
    }
    each([&](const A* from) RG_INLINE_LAMBDA { return reduce_row<R, A, int(kReduceLanes)>(from, size.cols); });
}

// Calls body with the kind as a type; the mean is the sum.
template <class A, class Body>
RG_INLINE void with_reducer(ReduceKind kind, Body body) {
    using K = ReduceKind;
    if (kind == K::sum_of_squares) return body(Reducer<K::sum_of_squares, A>{});
    if (kind == K::max) return body(Reducer<K::max, A>{});
    if (kind == K::min) return body(Reducer<K::min, A>{});
    if (kind == K::product) return body(Reducer<K::product, A>{});
    body(Reducer<K::sum, A>{});
}

template <class A>
void reduce_rows(ReduceKind kind, const A* x, int64_t row, BlockSize size, double* results) {
    with_reducer<A>(kind, [&](auto r) RG_INLINE_LAMBDA { reduce_rows_as<decltype(r), A>(x, row, size, results); });
}

// ---- columns -------------------------------------------------------------------------------------------------------

// Columns whose chains stay in the first-level cache, and rows that are read side by side: no more than a set of that
// cache has lines, because rows of a power of two are all in one set.
constexpr int64_t kReduceColumns = 512, kReduceRowsAtOnce = 8;

// A vector of columns, of n or all, over `rows` rows: chains are read unless kFirst, and merged into results if kLast.
template <class R, class A, bool kFirst, bool kLast>
RG_INLINE void reduce_strip(const A* x, int64_t row, int64_t rows, int64_t n, typename R::T* chains, double* results) {
    using T = typename R::T;
    constexpr int per = R::kPerVector, count = int(kReduceChains);
    Vec<T> chain[count * per];
    unrolled<count * per>([&](int k) RG_INLINE_LAMBDA {
        const T* from = chains + k / per * kReduceColumns + k % per * kLanes<T>;
        chain[k] = kFirst ? splat(R::template identity<T>()) : load(from);
    });
    // The next rows of these columns, which come after this tile's other columns.
    if constexpr (!kLast) {
        for (int64_t k = rows; k < 2 * rows; ++k) prefetch(x + k * row);
    }
    int64_t r = 0;
    if (!(kHasParts<A> && n)) {
        for (; r + count <= rows; r += count) {
            unrolled<count>([&](int k) RG_INLINE_LAMBDA { R::step_into(chain + k * per, load(x + (r + k) * row)); });
        }
    } else {
        for (; r + count <= rows; r += count) {
            unrolled<count>([&](int k) RG_INLINE_LAMBDA { R::step_into(chain + k * per, read(x + (r + k) * row, n)); });
        }
    }
    unrolled<count - 1>([&](int k) RG_INLINE_LAMBDA {
        if (r + k < rows) R::step_into(chain + k * per, read(x + (r + k) * row, n));
    });
    if constexpr (kLast) {
        T merged[kLanes<A>];
        unrolled<per>([&](int k) RG_INLINE_LAMBDA {
            store(merged + k * kLanes<T>,
                  R::merge(R::merge(chain[k], chain[2 * per + k]), R::merge(chain[per + k], chain[3 * per + k])));
        });
        const int64_t wanted = kHasParts<A> && n ? n : kLanes<A>;
        for (int64_t c = 0; c < wanted; ++c) results[c] = double(merged[c]);
    } else {
        unrolled<count * per>(
            [&](int k) RG_INLINE_LAMBDA { store(chains + k / per * kReduceColumns + k % per * kLanes<T>, chain[k]); });
    }
}

template <class R, class A>
void reduce_columns_as(const A* x, int64_t row, BlockSize size, double* results) {
    using T = typename R::T;
    T chains[kReduceChains * kReduceColumns];
    for (int64_t first = 0; first < size.cols; first += kReduceColumns) {
        const int64_t cols = size.cols - first < kReduceColumns ? size.cols - first : kReduceColumns;
        // A narrow block stays in registers from its first row to its last.
        const int64_t at_once = cols <= kLanes<A> ? size.rows : kReduceRowsAtOnce;
        for (int64_t r = 0; r < size.rows; r += at_once) {
            const int64_t rows = size.rows - r < at_once ? size.rows - r : at_once;
            const A* const from = x + r * row + first;
            const auto strips = [&](auto is_first, auto is_last) RG_INLINE_LAMBDA {
                for_vectors(false, from, cols, [&](int64_t c, int64_t n) RG_INLINE_LAMBDA {
                    reduce_strip<R, A, decltype(is_first)::value, decltype(is_last)::value>(
                        from + c, row, rows, n, chains + c, results + first + c);
                });
            };
            const bool last = r + rows == size.rows;
            if (r == 0) {
                last ? strips(Flag<true>{}, Flag<true>{}) : strips(Flag<true>{}, Flag<false>{});
            } else {
                last ? strips(Flag<false>{}, Flag<true>{}) : strips(Flag<false>{}, Flag<false>{});
            }
        }
    }
}

template <class A>
void reduce_columns(ReduceKind kind, const A* x, int64_t row, BlockSize size, double* results) {
    with_reducer<A>(kind, [&](auto r) RG_INLINE_LAMBDA { reduce_columns_as<decltype(r), A>(x, row, size, results); });
}

// ---- indices -------------------------------------------------------------------------------------------------------

template <class A>
int64_t find_value(const A* x, int64_t count, A value) {
    int64_t i = 0;
    if (value != value) {
        while (i < count && x[i] == x[i]) ++i;
    } else {
        while (i < count && x[i] != value) ++i;
    }
    return i;
}

template <class A>
void arg_columns(A sign, const A* x, int64_t row, BlockSize size, A* best, int64_t* index) {
    using Bits = typename Format<A>::Bits;
    const Vec<A> by = splat(sign), infinity = splat(A(__builtin_inf()));
    for_vectors(false, best, size.cols, [&](int64_t c, int64_t n) RG_INLINE_LAMBDA {
        Vec<A> most = read(x + c, n) * by;
        BitsVec<A> at{};
        for (int64_t r = 1; r < size.rows; ++r) {
            const Vec<A> v = read(x + r * row + c, n) * by;
            const auto wins = larger_or_nan(v, most), over = larger_or_nan(most, infinity);  // over: it is NaN already
            at = choose(over, at, choose(wins, BitsVec<A>(BitsVec<A>{} + Bits(r)), at));
            most = choose(over, most, choose(wins, v, most));
        }
        write(best + c, n, most);
        Bits rows[kLanes<A>];
        __builtin_memcpy(rows, &at, sizeof rows);
        const int64_t wanted = kHasParts<A> && n ? n : kLanes<A>;
        for (int64_t k = 0; k < wanted; ++k) index[c + k] = int64_t(rows[k]);
    });
}

}  // namespace
}  // namespace rg
