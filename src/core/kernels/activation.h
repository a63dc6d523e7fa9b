// Fused activations: the value from the input, the slope from the output. Formulas: docs/activations.md.
#pragma once

#include "../shape.h"
#include "vmath.h"

namespace rg {
namespace {

constexpr double kSeluLambda = 1.0507009873554804934193349852946;
constexpr double kSeluAlpha = 1.6732632423543772848170429916717;

// z - tanh z in double. Below 0.25 the difference cancels, so its own series is used: each term is at most
// (0.25 / (pi/2))^2 = 1/40 of the one before, ten terms leave 2e-16.
RG_INLINE Vec<double> tanh_shrink_value(Vec<double> z) {
    constexpr double coefficient[10] = {1.0 / 3,
                                        -2.0 / 15,
                                        17.0 / 315,
                                        -62.0 / 2835,
                                        1382.0 / 155925,
                                        -21844.0 / 6081075,
                                        929569.0 / 638512875,
                                        -6404582.0 / 10854718875,
                                        443861162.0 / 1856156927625,
                                        -18888466084.0 / 194896477400625};
    const Vec<double> z2 = z * z;
    Vec<double> p = splat(coefficient[9]);
    for (int k = 8; k >= 0; --k) p = fma(p, z2, splat(coefficient[k]));
    return vabs<double>(z) < splat(0.25) ? p * z2 * z : z - vtanh<double>(z);
}

// tanh(X)^2 where X - tanh X = y: Newton's method from cbrt(3y) or y + 1, whichever is nearer. X - tanh X is convex for
// X > 0, so the steps cannot run away; a start within 6 % is at rounding level after five.
RG_INLINE Vec<double> tanh_shrink_slope(Vec<double> y) {
    const Vec<double> target = vabs<double>(y);
    // A third of the bit pattern is nearly the cube root: exponents divide, and two thirds of the bias go back in.
    const BitsVec<double> third = bit_cast<BitsVec<double>>(target * splat(3.0)) / (BitsVec<double>{} + 3u);
    const BitsVec<double> root = third + (BitsVec<double>{} + uint64_t(0x2a9f789300000000));
    Vec<double> x = target < splat(0.5) ? bit_cast<Vec<double>>(root) : target + splat(1.0);
    for (int step = 0; step < 5; ++step) {
        const Vec<double> value = tanh_shrink_value(x), t = x - value;
        x = x - (value - target) / (t * t);
    }
    const Vec<double> t = x - target;
    const Vec<double> inside = target > splat(20.0) ? splat(1.0) : t * t;
    return target == splat(0.0) ? splat(0.0) : inside;
}

#if defined(RG_ISA_SCALAR)
RG_INLINE float tanh_shrink_value(float z) { return float(tanh_shrink_value(double(z))); }
RG_INLINE float tanh_shrink_slope(float y) { return float(tanh_shrink_slope(double(y))); }
#else
RG_INLINE Vec<float> tanh_shrink_value(Vec<float> z) {
    return narrow(tanh_shrink_value(widen_low(z)), tanh_shrink_value(widen_high(z)));
}
RG_INLINE Vec<float> tanh_shrink_slope(Vec<float> y) {
    return narrow(tanh_shrink_slope(widen_low(y)), tanh_shrink_slope(widen_high(y)));
}
#endif

// Comparisons are written so that NaN takes the branch that keeps it.
template <class A>
RG_INLINE Vec<A> clamp_between(Vec<A> z, Vec<A> low, Vec<A> high) {
    z = z < low ? low : z;
    return z > high ? high : z;
}
template <class A>
RG_INLINE Vec<A> clamp_slope(Vec<A> y, Vec<A> dy, Vec<A> low, Vec<A> high) {
    dy = y <= low ? splat(A(0)) : dy;
    return y >= high ? splat(A(0)) : dy;
}
// Rounding of a stored y can push a vanishing slope below zero.
template <class A>
RG_INLINE Vec<A> at_least_zero(Vec<A> v) {
    return v < splat(A(0)) ? splat(A(0)) : v;
}

template <ActivationKind kind, class A>
RG_INLINE Vec<A> activation_value(Vec<A> z, Vec<A> a, Vec<A> b) {
    using K = ActivationKind;
    const Vec<A> zero = splat(A(0)), one = splat(A(1));
    if constexpr (kind == K::relu) return z <= zero ? zero : z;
    if constexpr (kind == K::leaky_relu) return z < zero ? a * z : z;
    if constexpr (kind == K::sigmoid) return vsigmoid<A>(z);
    if constexpr (kind == K::tanh) return vtanh<A>(z);
    if constexpr (kind == K::scaled_tanh) return a * vtanh<A>(b * z);
    if constexpr (kind == K::linear) return a * z;
    if constexpr (kind == K::clamp) return clamp_between<A>(z, a, b);
    if constexpr (kind == K::hard_sigmoid) return clamp_between<A>(fma(a, z, b), zero, one);
    if constexpr (kind == K::softplus) {
        const Vec<A> t = b * z;
        return a * ((t < zero ? zero : t) + vlog1p_unit<A>(vexp<A>(zero - vabs<A>(t))));
    }
    if constexpr (kind == K::softsign) return z / (one + vabs<A>(z));
    if constexpr (kind == K::elu) return z < zero ? a * vexpm1_nonpositive<A>(z) : z;
    if constexpr (kind == K::clamped_leaky_relu) {
        const Vec<A> t = z < zero ? a * z : z;
        return t > b ? b : t;
    }
    if constexpr (kind == K::linear_with_bias) return fma(a, z, b);
    if constexpr (kind == K::log_sigmoid) { return (z > zero ? zero : z) - vlog1p_unit<A>(vexp<A>(zero - vabs<A>(z))); }
    if constexpr (kind == K::selu) {
        return z < zero ? splat(A(kSeluLambda * kSeluAlpha)) * vexpm1_nonpositive<A>(z) : splat(A(kSeluLambda)) * z;
    }
    if constexpr (kind == K::celu) return z < zero ? a * vexpm1_nonpositive<A>(z / a) : z;
    if constexpr (kind == K::hard_shrink) return vabs<A>(z) < vabs<A>(a) ? zero : z;
    if constexpr (kind == K::soft_shrink) return vabs<A>(z) < vabs<A>(a) ? zero : z - copy_sign<A>(a, z);
    if constexpr (kind == K::tanh_shrink) return tanh_shrink_value(z);
    if constexpr (kind == K::threshold) return z <= a ? b : z;
    if constexpr (kind == K::relu6) return clamp_between<A>(z, zero, splat(A(6)));
    return z;
}

template <ActivationKind kind, class A>
RG_INLINE Vec<A> activation_slope_times(Vec<A> y, Vec<A> dy, Vec<A> a, Vec<A> b) {
    using K = ActivationKind;
    const Vec<A> zero = splat(A(0)), one = splat(A(1));
    if constexpr (kind == K::relu) return y <= zero ? zero : dy;
    if constexpr (kind == K::leaky_relu) return y < zero ? a * dy : dy;
    if constexpr (kind == K::sigmoid) return dy * (y * (one - y));
    if constexpr (kind == K::tanh) return dy * ((one - y) * (one + y));
    if constexpr (kind == K::scaled_tanh) return dy * ((b / a) * at_least_zero<A>((a - y) * (a + y)));
    if constexpr (kind == K::linear || kind == K::linear_with_bias) return a * dy;
    if constexpr (kind == K::clamp) return clamp_slope<A>(y, dy, a, b);
    if constexpr (kind == K::hard_sigmoid) return clamp_slope<A>(y, a * dy, zero, one);
    if constexpr (kind == K::softplus) return dy * ((zero - a * b) * vexpm1_nonpositive<A>((zero - y) / a));
    if constexpr (kind == K::softsign) {
        const Vec<A> rest = one - vabs<A>(y);
        return dy * (rest * rest);
    }
    if constexpr (kind == K::elu) return y < zero ? dy * at_least_zero<A>(y + a) : dy;
    if constexpr (kind == K::clamped_leaky_relu) {
        const Vec<A> inside = y < zero ? a * dy : dy;
        return y >= b ? zero : inside;
    }
    if constexpr (kind == K::log_sigmoid) return dy * (zero - vexpm1_nonpositive<A>(y));
    if constexpr (kind == K::selu) {
        return y < zero ? dy * at_least_zero<A>(y + splat(A(kSeluLambda * kSeluAlpha))) : splat(A(kSeluLambda)) * dy;
    }
    if constexpr (kind == K::celu) return y < zero ? dy * at_least_zero<A>(one + y / a) : dy;
    if constexpr (kind == K::hard_shrink || kind == K::soft_shrink) return y == zero ? zero : dy;
    if constexpr (kind == K::tanh_shrink) return dy * tanh_shrink_slope(y);
    if constexpr (kind == K::threshold) return y == b ? zero : dy;
    if constexpr (kind == K::relu6) return clamp_slope<A>(y, dy, zero, splat(A(6)));
    return dy;
}

template <ActivationKind kind, class A>
void activate_as(const Activation& activation, const A* z, int64_t count, A* y) {
    const Vec<A> a = splat(A(activation.alpha)), b = splat(A(activation.beta));
    int64_t i = 0;
    for (; i + kLanes<A> <= count; i += kLanes<A>) store(y + i, activation_value<kind, A>(load(z + i), a, b));
    const int64_t rest = count - i;
    if (rest) store_part(y + i, rest, activation_value<kind, A>(load_part(z + i, rest, splat(A(1))), a, b));
}

template <ActivationKind kind, class A>
void apply_slope_as(const Activation& activation, const A* y, const A* dy, int64_t count, A* dz) {
    const Vec<A> a = splat(A(activation.alpha)), b = splat(A(activation.beta)), one = splat(A(1));
    int64_t i = 0;
    for (; i + kLanes<A> <= count; i += kLanes<A>) {
        store(dz + i, activation_slope_times<kind, A>(load(y + i), load(dy + i), a, b));
    }
    const int64_t rest = count - i;
    if (rest) {
        const Vec<A> part =
            activation_slope_times<kind, A>(load_part(y + i, rest, one), load_part(dy + i, rest, one), a, b);
        store_part(dz + i, rest, part);
    }
}

template <class A>
struct ActivationFunctions {
    void (*value)(const Activation&, const A*, int64_t, A*);
    void (*slope)(const Activation&, const A*, const A*, int64_t, A*);
};

template <class A>
ActivationFunctions<A> activation_functions(const Activation& activation) {
    using K = ActivationKind;
#define RG_CASE(name) \
    case K::name:     \
        return {activate_as<K::name, A>, apply_slope_as<K::name, A>};
    // With alpha = 0 the shrinks are the identity, also at y = 0.
    const bool shrink = activation.kind == K::hard_shrink || activation.kind == K::soft_shrink;
    switch (shrink && activation.alpha == 0 ? K::identity : activation.kind) {
        RG_CASE(relu)
        RG_CASE(leaky_relu)
        RG_CASE(sigmoid)
        RG_CASE(tanh)
        RG_CASE(scaled_tanh)
        RG_CASE(linear)
        RG_CASE(clamp)
        RG_CASE(hard_sigmoid)
        RG_CASE(softplus)
        RG_CASE(softsign)
        RG_CASE(elu)
        RG_CASE(clamped_leaky_relu)
        RG_CASE(linear_with_bias)
        RG_CASE(log_sigmoid)
        RG_CASE(selu)
        RG_CASE(celu)
        RG_CASE(hard_shrink)
        RG_CASE(soft_shrink)
        RG_CASE(tanh_shrink)
        RG_CASE(threshold)
        RG_CASE(relu6)
        case K::identity:
            break;
    }
#undef RG_CASE
    return {activate_as<K::identity, A>, apply_slope_as<K::identity, A>};
}

template <class A>
void activate(const Activation& activation, const A* z, int64_t count, A* y) {
    activation_functions<A>(activation).value(activation, z, count, y);
}

template <class A>
void apply_slope(const Activation& activation, const A* y, const A* dy, int64_t count, A* dz) {
    activation_functions<A>(activation).slope(activation, y, dy, count, dz);
}

}  // namespace
}  // namespace rg
