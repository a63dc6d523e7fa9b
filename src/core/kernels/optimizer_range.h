// One optimizer step over a range of a parameter: every array is read once and written once. The contracts are in
// ../kernels.h. Elementwise, so the bits of an element depend only on its own values.
#pragma once

#include "../kernels.h"
#include "norm_common.h"

namespace rg {
namespace {

// The larger of two values, or NaN if either is NaN.
template <class A>
RG_INLINE Vec<A> larger(Vec<A> a, Vec<A> b) {
    return a != a ? a : a > b ? a : b;
}

template <class A>
RG_INLINE Vec<A> sign_of(Vec<A> x) {
    const Vec<A> zero{}, one = splat(A(1));
    return x > zero ? one : x < zero ? -one : zero;
}

template <class A>
RG_INLINE Vec<A> averaged(const RunningAverage<A>& average, Vec<A> old, Vec<A> now) {
    return fma(splat(average.keep), old, splat(average.take) * now);
}

// kFirst, kSecond: whether the first and second optional states of the kind are present.
template <OptimizerKind kKind, bool kRegularized, bool kFirst, bool kSecond, class A>
void optimizer_step_as(const OptimizerRule<A>& rule, A* const* arrays, int64_t count) {
    A* const parameter = arrays[kParameter];
    const A* const gradient = arrays[kGradient];
    A *const state0 = arrays[kState], *const state1 = arrays[kState + 1], *const state2 = arrays[kState + 2];
    const Vec<A> scale = splat(rule.scale), low = splat(rule.low), high = splat(rule.high), l2 = splat(rule.l2),
                 l1 = splat(rule.l1), eps = splat(rule.eps), eps_inside = splat(rule.eps_inside),
                 momentum = splat(rule.momentum), gain = splat(rule.gain), rate = splat(rule.rate),
                 decay = splat(-rule.decay);
    const RunningAverage<A> first = rule.first, second = rule.second;
    const bool nesterov = rule.nesterov;

    for_vectors(true, parameter, count, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const Vec<A> p = read(parameter + i, n);
        Vec<A> g = at_least(at_most(scale * read(gradient + i, n), high), low);
        if constexpr (kRegularized) g = fma(l2, p, fma(l1, sign_of<A>(p), g));

        Vec<A> d = g;
        if constexpr (kKind == OptimizerKind::adam) {
            const Vec<A> m = averaged<A>(first, read(state0 + i, n), g);
            Vec<A> v = averaged<A>(second, read(state1 + i, n), g * g);
            write(state0 + i, n, m);
            write(state1 + i, n, v);
            if constexpr (kFirst) {
                v = larger<A>(v, read(state2 + i, n));
                write(state2 + i, n, v);
            }
            d = m / (root(v) + eps);
        }
        if constexpr (kKind == OptimizerKind::rmsprop) {
            const Vec<A> s = averaged<A>(second, read(state0 + i, n), g * g);
            write(state0 + i, n, s);
            Vec<A> spread = s;
            if constexpr (kFirst) {
                const Vec<A> mean = averaged<A>(second, read(state1 + i, n), g);
                write(state1 + i, n, mean);
                // A variance made negative by rounding error becomes 0.
                spread = at_least(fma(-mean, mean, s), Vec<A>{});
            }
            d = g / (root(spread + eps_inside) + eps);
        }
        constexpr bool kVelocity = kKind == OptimizerKind::sgd ? kFirst : kKind == OptimizerKind::rmsprop && kSecond;
        if constexpr (kVelocity) {
            A* const velocity = kKind == OptimizerKind::sgd ? state0 : state2;
            const Vec<A> share = gain * d, u = fma(momentum, read(velocity + i, n), share);
            write(velocity + i, n, u);
            d = nesterov ? fma(momentum, u, share) : u;
        }
        write(parameter + i, n, p + fma(decay, p, rate * d));
    });
}

template <class A>
void optimizer_step(const OptimizerRule<A>& rule, A* const* arrays, int64_t count) {
    using K = OptimizerKind;
    with_flag(rule.l2 != 0 || rule.l1 != 0, [&](auto regularized) {
        constexpr bool kRegularized = decltype(regularized)::value;
        if (rule.kind == K::sgd) {
            with_flag(arrays[kState] != nullptr, [&](auto velocity) {
                optimizer_step_as<K::sgd, kRegularized, decltype(velocity)::value, false>(rule, arrays, count);
            });
        } else if (rule.kind == K::adam) {
            with_flag(arrays[kState + 2] != nullptr, [&](auto largest) {
                optimizer_step_as<K::adam, kRegularized, decltype(largest)::value, false>(rule, arrays, count);
            });
        } else {
            with_flag(arrays[kState + 1] != nullptr, [&](auto mean) {
                with_flag(arrays[kState + 2] != nullptr, [&](auto velocity) {
                    constexpr bool kMean = decltype(mean)::value, kVelocity = decltype(velocity)::value;
                    optimizer_step_as<K::rmsprop, kRegularized, kMean, kVelocity>(rule, arrays, count);
                });
            });
        }
    });
}

// Squares in double, in which the square of any float is exact and in range.
template <class A>
double sum_squares(const A* x, int64_t count) {
    // Two chains, to hide the latency of addition; they take turns of 64 bytes of elements.
    Sum sum[2];
    constexpr int turn = 64 / int(sizeof(A)) / kLanes<A>;
    for_groups_of_vectors<A, 2 * turn>(count, [&](int64_t i, int64_t n, int k) RG_INLINE_LAMBDA {
        sum[k / turn].add_square(k % Sum::kVectors<A>, read(x + i, n));
    });
    return sum[0].total() + sum[1].total();
}

}  // namespace
}  // namespace rg
