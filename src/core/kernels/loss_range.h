// Losses over one row or one block. The contracts are in ../kernels.h.
#pragma once

#include "../kernels.h"
#include "norm_range.h"
#include "vmath.h"

namespace rg {
namespace {

// The largest element of a row; NaN is ignored.
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
    return lane[0];
}

template <class A, bool kTotal, bool kStore>
void softmax_row_as(const A* x, int64_t count, A* exps, double* sums) {
    constexpr int64_t lanes = kLanes<A>;
    sums[0] = double(largest_of(x, count));
    const Vec<A> largest = splat(A(sums[0]));
    Sum<A> sum, total;
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        const Vec<A> d = load(x + i) - largest, e = vexp<A>(d);
        sum.add(e);
        if constexpr (kTotal) total.add(d);
        if constexpr (kStore) store(exps + i, e);
    }
    if (i < count) {
        const Vec<A> d = load_part(x + i, count - i, largest) - largest;
        A lane[kLanes<A>];
        store(lane, vexp<A>(d));
        const Vec<A> e = load_part(lane, count - i, splat(A(0)));
        sum.add(e);
        if constexpr (kTotal) total.add(d);
        if constexpr (kStore) store_part(exps + i, count - i, e);
    }
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
    for_vectors(y, count,
                [&](int64_t i, int64_t n) RG_INLINE_LAMBDA { write(y + i, n, fma(read(y + i, n), by, plus)); });
}

template <class A>
double difference(const A* y, const A* target, int64_t count, A square, A delta, A slope, A* values, A* gradient) {
    constexpr int64_t lanes = kLanes<A>;
    const Vec<A> by = splat(square), bound = splat(delta), half = splat(delta * A(0.5)), steep = splat(slope);
    Sum<A> sum;
    const auto part = [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const Vec<A> d = read(y + i, n) - read(target + i, n), size = vabs<A>(d);
        const Vec<A> value = size <= bound ? by * d * d : bound * (size - half);
        sum.add(value);
        if (values) write(values + i, n, value);
        if (gradient) write(gradient + i, n, steep * at_least(at_most(d, bound), -bound));
    };
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) part(i, 0);
    if (i < count) part(i, count - i);
    return sum.total();
}

}  // namespace
}  // namespace rg
