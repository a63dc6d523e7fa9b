// Losses over one row or one block. The contracts are in ../kernels.h.
#pragma once

#include "../kernels.h"
#include "norm_common.h"
#include "vmath.h"

namespace rg {
namespace {

// The largest element of a row; NaN is ignored. Of zeros with both signs any may be found, so the result is never -0.
template <class A>
A largest_of(const A* x, int64_t count) {
    constexpr int64_t lanes = kLanes<A>;
    const Vec<A> none = splat(A(-__builtin_inf()));
    Vec<A> most[2] = {none, none};
    int64_t i = 0;
    for (; i + 2 * lanes <= count; i += 2 * lanes) {
        most[0] = at_least(most[0], load(x + i));
        most[1] = at_least(most[1], load(x + i + lanes));
    }
    for (; i + lanes <= count; i += lanes) most[0] = at_least(most[0], load(x + i));
    if (i < count) most[1] = at_least(most[1], load_part(x + i, count - i, none));
    A lane[kLanes<A>];
    store(lane, at_least(most[0], most[1]));
    for (int64_t half = lanes / 2; half > 0; half /= 2) {  // pairwise: for short rows a serial chain would dominate
        for (int64_t k = 0; k < half; ++k) lane[k] = lane[k + half] > lane[k] ? lane[k + half] : lane[k];
    }
    return lane[0] + A(0);
}

template <class A, bool kTotal, bool kStore>
void softmax_row_as(const A* x, int64_t count, A* exps, double* sums) {
    sums[0] = double(largest_of(x, count));
    const Vec<A> largest = splat(A(sums[0]));
    Sum sum, total;
    for_groups_of_vectors<A, Sum::kVectors<A>>(count, [&](int64_t i, int64_t n, int k) RG_INLINE_LAMBDA {
        const Vec<A> d = (n ? load_part(x + i, n, largest) : load(x + i)) - largest;
        const Vec<A> e = n ? first_of(vexp<A>(d), n, splat(A(0))) : vexp<A>(d);
        sum.add(k, e);
        if constexpr (kTotal) total.add(k, d);
        if constexpr (kStore) write(exps + i, n, e);
    });
    sums[1] = sum.total();
    sums[2] = total.total();
}

template <class A>
void softmax_row(const A* x, int64_t count, bool want_total, A* exps, double* sums) {
    with_flag(want_total, [&](auto wants_total) {
        with_flag(exps != nullptr, [&](auto stores) {
            softmax_row_as<A, decltype(wants_total)::value, decltype(stores)::value>(x, count, exps, sums);
        });
    });
}

template <class A>
void scale_row(A* y, int64_t count, A scale, A shift) {
    const Vec<A> by = splat(scale), plus = splat(shift);
    for_vectors(true, y, count,
                [&](int64_t i, int64_t n) RG_INLINE_LAMBDA { write(y + i, n, fma(read(y + i, n), by, plus)); });
}

template <class A>
double difference(const A* y, const A* target, int64_t count, A square, A delta, A slope, A* values, A* gradient) {
    const Vec<A> by = splat(square), bound = splat(delta), half = splat(delta * A(0.5)), steep = splat(slope);
    Sum sum;
    for_groups_of_vectors<A, Sum::kVectors<A>>(count, [&](int64_t i, int64_t n, int k) RG_INLINE_LAMBDA {
        const Vec<A> d = read(y + i, n) - read(target + i, n), size = vabs<A>(d);
        const Vec<A> value = size <= bound ? by * d * d : bound * (size - half);
        sum.add(k, value);
        if (values) write(values + i, n, value);
        if (gradient) write(gradient + i, n, steep * at_least(at_most(d, bound), -bound));
    });
    return sum.total();
}

}  // namespace
}  // namespace rg
