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

template <class A, bool kTarget, bool kTotal, bool kStore>
void softmax_row_as(const A* x, const A* target, int64_t count, A* exps, double* sums) {
    sums[0] = double(largest_of(x, count));
    const Vec<A> largest = splat(A(sums[0])), none = splat(A(0));
    Sum sum, total, targets, products;
    for_groups_of_vectors<A, Sum::kVectors<A>>(count, [&](int64_t i, int64_t n, int k) RG_INLINE_LAMBDA {
        const Vec<A> d = (n ? load_part(x + i, n, largest) : load(x + i)) - largest;
        const Vec<A> e = n ? first_of(vexp<A>(d), n, none) : vexp<A>(d);
        sum.add(k, e);
        if constexpr (kTotal) total.add(k, d);
        if constexpr (kTarget) {
            const Vec<A> t = read(target + i, n);
            targets.add(k, t);
            products.add_product(k, t, t == none ? none : d);  // a target of 0 contributes 0, even if d is infinite
        }
        if constexpr (kStore) write(exps + i, n, e);
    });
    sums[1] = sum.total();
    sums[2] = total.total();
    if constexpr (kTarget) {
        sums[3] = targets.total();
        sums[4] = products.total();
    }
}

template <class A>
void softmax_row(const A* x, const A* target, int64_t count, bool want_total, A* exps, double* sums) {
    with_flag(exps != nullptr, [&](auto stores) {
        constexpr bool kStore = decltype(stores)::value;
        if (target) return softmax_row_as<A, true, true, kStore>(x, target, count, exps, sums);
        with_flag(want_total, [&](auto wants_total) {
            softmax_row_as<A, false, decltype(wants_total)::value, kStore>(x, target, count, exps, sums);
        });
    });
}

template <class A>
void scale_row(A* y, int64_t count, A scale, A shift) {
    const Vec<A> by = splat(scale), plus = splat(shift);
    for_vectors(true, y, count,
                [&](int64_t i, int64_t n) RG_INLINE_LAMBDA { write(y + i, n, fma(read(y + i, n), by, plus)); });
}

// f(a, b) in double precision, rounded once.
template <class F>
RG_INLINE Vec<double> in_double(Vec<double> a, Vec<double> b, const F& f) {
    return f(a, b);
}
#if defined(RG_ISA_SCALAR)
template <class F>
RG_INLINE float in_double(float a, float b, const F& f) {
    return float(f(double(a), double(b)));
}
#else
template <class F>
RG_INLINE Vec<float> in_double(Vec<float> a, Vec<float> b, const F& f) {
    return narrow(f(widen_low(a), widen_low(b)), f(widen_high(a), widen_high(b)));
}
#endif

// In double, because exps * total and target * sum almost cancel where the probability is close to its target.
template <class A>
void soft_gradient_row(A* exps, const A* target, int64_t count, const SoftTargets& rule) {
    const Vec<double> total = splat(rule.total), keep = splat(rule.keep), share = splat(rule.share),
                      minus_sum = splat(-rule.sum), factor = splat(rule.factor);
    for_vectors(true, exps, count, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const auto gradient = [&](Vec<double> e, Vec<double> t)
                                  RG_INLINE_LAMBDA { return factor * fma(e, total, minus_sum * fma(t, keep, share)); };
        write(exps + i, n, in_double(read(exps + i, n), read(target + i, n), gradient));
    });
}

// ---- elements ------------------------------------------------------------------------------------------------------

template <class A>
struct LossTerm {
    Vec<A> value, slope;
};

// factor * x, where a factor of 0 gives 0 even if x is infinite or NaN.
template <class A>
RG_INLINE Vec<A> counted(Vec<A> factor, Vec<A> x) {
    return factor == splat(A(0)) ? splat(A(0)) : factor * x;
}

template <ElementLoss kLoss, class A>
RG_INLINE LossTerm<A> loss_term(const ElementLossRule<A>& rule, Vec<A> y, Vec<A> target) {
    const Vec<A> zero = splat(A(0)), one = splat(A(1)), a = splat(rule.a), b = splat(rule.b);
    if constexpr (kLoss == ElementLoss::difference) {
        const Vec<A> d = y - target, size = vabs<A>(d);
        return {size <= b ? a * d * d : b * (size - splat(rule.b * A(0.5))), at_least(at_most(d, b), -b)};
    } else if constexpr (kLoss == ElementLoss::absolute) {
        const Vec<A> d = y - target;
        return {vabs<A>(d), d > zero ? one : d < zero ? -one : d == zero ? a : d};
    } else if constexpr (kLoss == ElementLoss::hinge) {
        const Vec<A> side = target + target - one, margin = side * y;
        return {at_least(one - margin, zero), margin <= one ? -side : margin > one ? zero : margin};
    } else if constexpr (kLoss == ElementLoss::log) {
        const Vec<A> p = y + a, q = (one - y) + a, rest = one - target;
        return {zero - (counted<A>(target, vlog<A>(p)) + counted<A>(rest, vlog<A>(q))),
                counted<A>(rest, one / q) - counted<A>(target, one / p)};
    } else {
        // sigmoid(y) = 1 / (1 + e^-y) and -log(sigmoid(y)) = log(1 + e^-y), from e^-|y|, which does not overflow.
        const Vec<A> size = vabs<A>(y), e = vexp<A>(-size), most = one / (one + e), least = e * most;
        const Vec<A> t = fma(target, a, b), rest = one - t;
        return {vlog1p_unit<A>(e) + counted<A>(y < zero ? t : rest, size),
                rest * (y < zero ? least : most) - t * (y < zero ? most : least)};
    }
}

template <ElementLoss kLoss, class A>
double element_losses_as(const ElementLossRule<A>& rule, const A* y, const A* target, const A* weights, int64_t count,
                         A* values, A* gradient) {
    const Vec<A> scale = splat(rule.scale), steep = splat(rule.slope);
    Sum sum;
    for_groups_of_vectors<A, Sum::kVectors<A>>(count, [&](int64_t i, int64_t n, int k) RG_INLINE_LAMBDA {
        LossTerm<A> term = loss_term<kLoss, A>(rule, read(y + i, n), read(target + i, n));
        if (weights) {
            const Vec<A> weight = read(weights + i, n);
            term = {term.value * weight, term.slope * weight};
        }
        // The loss of two zeros need not be 0.
        if (kHasParts<A> && n) term.value = first_of(term.value, n, splat(A(0)));
        sum.add(k, term.value);
        if (values) write(values + i, n, term.value * scale);
        if (gradient) write(gradient + i, n, steep * term.slope);
    });
    return sum.total();
}

template <class A>
double element_losses(const ElementLossRule<A>& rule, const A* y, const A* target, const A* weights, int64_t count,
                      A* values, A* gradient) {
    using L = ElementLoss;
    const auto run = rule.loss == L::difference ? element_losses_as<L::difference, A>
                     : rule.loss == L::absolute ? element_losses_as<L::absolute, A>
                     : rule.loss == L::hinge    ? element_losses_as<L::hinge, A>
                     : rule.loss == L::log      ? element_losses_as<L::log, A>
                                                : element_losses_as<L::sigmoid, A>;
    return run(rule, y, target, weights, count, values, gradient);
}

// ---- rows ----------------------------------------------------------------------------------------------------------

template <class A>
double dot(const A* x, const A* y, int64_t count) {
    Sum sum;
    for_groups_of_vectors<A, Sum::kVectors<A>>(count, [&](int64_t i, int64_t n, int k) RG_INLINE_LAMBDA {
        sum.add_product(k, read(x + i, n), read(y + i, n));
    });
    return sum.total();
}

template <class A>
void blend_row(const A* x, const A* y, int64_t count, A a, A b, A* result) {
    const Vec<A> of_x = splat(a), of_y = splat(b);
    for_vectors(true, result, count, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
        write(result + i, n, fma(of_x, read(x + i, n), of_y * read(y + i, n)));
    });
}

}  // namespace
}  // namespace rg
