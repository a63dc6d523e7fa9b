// Activations: the value from the input z, the slope from z or, for those that normalization fuses, from the output y.
// Formulas: docs/activations.md.
#pragma once

#include "../base/shape.h"
#include "vmath.h"

namespace rg {
namespace {

constexpr double kSeluLambda = 1.0507009873554804934193349852946;
constexpr double kSeluAlpha = 1.6732632423543772848170429916717;
constexpr double kGeluSigmoid = 1.702;

// z - tanh z in double. Below 0.25 the difference cancels, so a series is used: each term is at most
// (0.25 / (pi/2))^2 = 1/40 of the one before, so ten terms leave an error of 2e-16.
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
#pragma GCC unroll 16
    for (int k = 8; k >= 0; --k) p = fma(p, z2, splat(coefficient[k]));
    return vabs<double>(z) < splat(0.25) ? p * z2 * z : z - vtanh<double>(z);
}

// tanh(X)^2 where X - tanh X = y: Newton's method from cbrt(3y) or y + 1, whichever is closer. X - tanh X is convex for
// X > 0, so the iteration converges; from a start within 6 %, five steps reach the rounding error.
RG_INLINE Vec<double> tanh_shrink_slope(Vec<double> y) {
    const Vec<double> target = vabs<double>(y);
    // A third of the bit pattern approximates the cube root: this divides the exponent by 3, and two thirds of the bias
    // are added back.
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

// Comparisons are written so that NaN takes the branch that propagates it.
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
// The rounding error of a stored y can make a vanishing slope negative.
template <class A>
RG_INLINE Vec<A> at_least_zero(Vec<A> v) {
    return v < splat(A(0)) ? splat(A(0)) : v;
}

// Large parameters can overflow in intermediate results even if the final result is in range.
template <class A>
RG_INLINE Vec<A> keep_finite(Vec<A> v) {
    return clamp_between<A>(v, splat(-MathConstants<A>::kLargest), splat(MathConstants<A>::kLargest));
}

// z * weight, but 0 if the weight is 0, even for an infinite z.
template <class A>
RG_INLINE Vec<A> weigh(Vec<A> z, Vec<A> weight) {
    return weight == splat(A(0)) ? splat(A(0)) : z * weight;
}

// 1 - tanh(z)^2, as 4 sigmoid(2z) sigmoid(-2z): this keeps its relative accuracy where it vanishes.
template <class A>
RG_INLINE Vec<A> tanh_slope(Vec<A> z) {
    const SigmoidPair<A> s = vsigmoid_pair<A>(z + z);
    return splat(A(4)) * s.plus * s.minus;
}

// The slope of t sigmoid(t).
template <class A>
RG_INLINE Vec<A> sigmoid_gate_slope(Vec<A> t) {
    const SigmoidPair<A> s = vsigmoid_pair<A>(t);
    return s.plus + weigh<A>(t, s.plus * s.minus);
}

// The cumulative distribution keeps its relative accuracy where it vanishes: for z < 0 it is erfc(|z| / sqrt 2) / 2,
// and the exponential has the square of z, not of the rounded quotient.
template <class A>
struct NormalDistribution {
    Vec<A> cumulative, density;
};
template <class A>
RG_INLINE NormalDistribution<A> normal_distribution(Vec<A> z) {
    const Vec<A> half = splat(A(0.5)), end = splat(MathConstants<A>::kSquareEnd);
    Vec<A> x = vabs<A>(z) * splat(A(0.70710678118654752440));
    x = x > end ? end : x;
    const Vec<A> e = vexp_minus_square<A>(z, A(0.5));
    const Vec<A> beyond = x < half ? half - half * verf_small<A>(x) : e * (half * vscaled_erfc<A>(x));
    return {z < splat(A(0)) ? beyond : splat(A(1)) - beyond, e * splat(A(0.39894228040143267794))};
}

// t = 2 a (z + b z^3). gelu_tanh(z) is z sigmoid(t), since (1 + tanh u) / 2 = sigmoid(2u), and that does not cancel.
template <class A>
RG_INLINE Vec<A> gelu_tanh_argument(Vec<A> z, Vec<A> a, Vec<A> b) {
    z = keep_finite<A>(z);
    const Vec<A> u = keep_finite<A>(a * z) * keep_finite<A>(fma(b, keep_finite<A>(z * z), splat(A(1))));
    return u + u;
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
    if constexpr (kind == K::hard_sigmoid || kind == K::closed_hard_sigmoid) {
        return clamp_between<A>(fma(a, z, b), zero, one);
    }
    if constexpr (kind == K::softplus) {
        const Vec<A> t = b * z;
        // a b z rather than a t, which is 0 * infinity where t overflows and a is 0.
        return fma(a * b, t < zero ? zero : z, a * vlog1p_unit<A>(vexp<A>(zero - vabs<A>(t))));
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
    if constexpr (kind == K::celu) return z < zero ? a * vexpm1<A>(z / a) : z;  // a < 0: a growing exponential
    if constexpr (kind == K::hard_shrink) return vabs<A>(z) < vabs<A>(a) ? zero : z;
    if constexpr (kind == K::soft_shrink) return vabs<A>(z) < vabs<A>(a) ? zero : z - copy_sign<A>(a, z);
    if constexpr (kind == K::tanh_shrink) return tanh_shrink_value(z);
    if constexpr (kind == K::threshold) return z <= a ? b : z;
    if constexpr (kind == K::relu6) return clamp_between<A>(z, zero, splat(A(6)));
    if constexpr (kind == K::abs) return vabs<A>(z);
    if constexpr (kind == K::erf) return verf<A>(z);
    if constexpr (kind == K::gelu) return weigh<A>(z, normal_distribution<A>(z).cumulative);
    if constexpr (kind == K::gelu_tanh) return weigh<A>(z, vsigmoid<A>(gelu_tanh_argument<A>(z, a, b)));
    if constexpr (kind == K::gelu_sigmoid) return weigh<A>(z, vsigmoid<A>(splat(A(kGeluSigmoid)) * z));
    if constexpr (kind == K::silu) return weigh<A>(z, vsigmoid<A>(z));
    if constexpr (kind == K::hard_swish) {
        return weigh<A>(z, clamp_between<A>(z + splat(A(3)), zero, splat(A(6))) / splat(A(6)));
    }
    return z;
}

// dy f'(z) with the slope from z, for any finite a and b. At a kink it matches the slope computed from the output, if
// the output determines it. Constant pieces are selected, not multiplied.
template <ActivationKind kind, class A>
RG_INLINE Vec<A> activation_input_slope_times(Vec<A> z, Vec<A> dy, Vec<A> a, Vec<A> b) {
    using K = ActivationKind;
    const Vec<A> zero = splat(A(0)), one = splat(A(1));
    if constexpr (kind == K::relu) return z <= zero ? zero : dy;
    if constexpr (kind == K::leaky_relu) return z < zero ? a * dy : dy;
    if constexpr (kind == K::sigmoid) {
        const SigmoidPair<A> s = vsigmoid_pair<A>(z);
        return dy * (s.plus * s.minus);
    }
    if constexpr (kind == K::tanh) return dy * tanh_slope<A>(z);
    if constexpr (kind == K::scaled_tanh) return dy * (a * (b * tanh_slope<A>(b * z)));
    if constexpr (kind == K::abs) {
        const Vec<A> left = z < zero ? zero - one : z;  // 0 at 0, and NaN at NaN
        return dy * (z > zero ? one : left);
    }
    if constexpr (kind == K::linear || kind == K::linear_with_bias) return a * dy;
    if constexpr (kind == K::clamp) return clamp_slope<A>(z, dy, a, b);
    if constexpr (kind == K::hard_sigmoid) return clamp_slope<A>(fma(a, z, b), a * dy, zero, one);
    if constexpr (kind == K::closed_hard_sigmoid) {
        const Vec<A> ramp = fma(a, z, b), above = ramp < zero ? zero : a * dy;
        return ramp > one ? zero : above;
    }
    if constexpr (kind == K::softplus) return dy * (a * (b * vsigmoid<A>(b * z)));
    if constexpr (kind == K::softsign) {
        const Vec<A> inverse = one / (one + vabs<A>(z));  // squared last, because (1 + |z|)^2 may overflow
        return dy * (inverse * inverse);
    }
    if constexpr (kind == K::elu) return z < zero ? dy * (a * vexp<A>(z)) : dy;
    if constexpr (kind == K::clamped_leaky_relu) {
        const Vec<A> t = z < zero ? a * z : z, inside = z < zero ? a * dy : dy;
        return t >= b ? zero : inside;
    }
    if constexpr (kind == K::log_sigmoid) return dy * vsigmoid_pair<A>(z).minus;
    if constexpr (kind == K::selu) {
        return z < zero ? dy * (splat(A(kSeluLambda * kSeluAlpha)) * vexp<A>(z)) : splat(A(kSeluLambda)) * dy;
    }
    if constexpr (kind == K::celu) return z < zero ? dy * vexp<A>(z / a) : dy;
    if constexpr (kind == K::hard_shrink || kind == K::soft_shrink) return vabs<A>(z) < vabs<A>(a) ? zero : dy;
    if constexpr (kind == K::tanh_shrink) {
        const Vec<A> t = vtanh<A>(z);
        return dy * (t * t);
    }
    if constexpr (kind == K::threshold) return z <= a ? zero : dy;
    if constexpr (kind == K::relu6) return clamp_slope<A>(z, dy, zero, splat(A(6)));
    if constexpr (kind == K::erf) return dy * (splat(A(kTwoOverRootPi)) * vexp_minus_square<A>(z, A(1)));
    if constexpr (kind == K::gelu) {
        const NormalDistribution<A> normal = normal_distribution<A>(z);
        return dy * (normal.cumulative + weigh<A>(z, normal.density));
    }
    if constexpr (kind == K::gelu_tanh) {
        // t' = 2 a (1 + 3 b z^2)
        const SigmoidPair<A> s = vsigmoid_pair<A>(gelu_tanh_argument<A>(z, a, b));
        const Vec<A> finite = keep_finite<A>(z), square = keep_finite<A>(splat(A(3)) * finite * finite);
        const Vec<A> steepness = keep_finite<A>(fma(b, square, one));
        return dy * (s.plus + splat(A(2)) * (s.plus * s.minus * finite * a * steepness));
    }
    if constexpr (kind == K::gelu_sigmoid) return dy * sigmoid_gate_slope<A>(splat(A(kGeluSigmoid)) * z);
    if constexpr (kind == K::silu) return dy * sigmoid_gate_slope<A>(z);
    if constexpr (kind == K::hard_swish) {
        const Vec<A> ramp = (z + z + splat(A(3))) / splat(A(6)), right = z > splat(A(3)) ? dy : dy * ramp;
        return z < splat(A(-3)) ? zero : right;
    }
    return dy;
}

// dy f'(z) with the slope from the output, for the kinds where the output determines it.
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

// Whole vectors only.
template <ActivationKind kind, class A>
void activate_as(const Activation& activation, const A* z, int64_t count, A* y) {
    const Vec<A> a = splat(A(activation.alpha)), b = splat(A(activation.beta));
    for (int64_t i = 0; i < count; i += kLanes<A>) store(y + i, activation_value<kind, A>(load(z + i), a, b));
}

// Whole vectors only. from: z or y
template <ActivationKind kind, bool kFromInput, class A>
void apply_slope_as(const Activation& activation, const A* from, const A* dy, int64_t count, A* dz) {
    const Vec<A> a = splat(A(activation.alpha)), b = splat(A(activation.beta));
    for (int64_t i = 0; i < count; i += kLanes<A>) {
        const Vec<A> v = load(from + i), g = load(dy + i);
        if constexpr (kFromInput) {
            store(dz + i, activation_input_slope_times<kind, A>(v, g, a, b));
        } else {
            store(dz + i, activation_slope_times<kind, A>(v, g, a, b));
        }
    }
}

template <class A>
struct ActivationFunctions {
    void (*value)(const Activation&, const A*, int64_t, A*);
    void (*input_slope)(const Activation&, const A*, const A*, int64_t, A*);
    void (*output_slope)(const Activation&, const A*, const A*, int64_t, A*);  // null: y does not determine the slope
};

template <ActivationKind kind, class A>
constexpr auto apply_output_slope_of() -> decltype(ActivationFunctions<A>::output_slope) {
    if constexpr (output_tells_slope(kind)) return apply_slope_as<kind, false, A>;
    return nullptr;
}

template <class A>
ActivationFunctions<A> activation_functions(const Activation& activation) {
    using K = ActivationKind;
    // With alpha = 0 the shrinks are the identity, also at y = 0.
    const bool shrink = activation.kind == K::hard_shrink || activation.kind == K::soft_shrink;
    switch (shrink && activation.alpha == 0 ? K::identity : activation.kind) {
#define RG_ENTRY(name, ...) \
    case K::name:           \
        return {activate_as<K::name, A>, apply_slope_as<K::name, true, A>, apply_output_slope_of<K::name, A>()};
        RG_ACTIVATIONS(RG_ENTRY)
#undef RG_ENTRY
    }
    return activation_functions<A>({});
}

// The last elements of a range, less than a whole vector, padded with ones.
template <class A>
struct Rest {
    A lane[kLanes<A>];
    Rest(const A* p, int64_t n) { store(lane, load_part(p, n, splat(A(1)))); }
};

template <class A>
void activate(const Activation& activation, const A* z, int64_t count, A* y) {
    const auto function = activation_functions<A>(activation).value;
    const int64_t rest = count % kLanes<A>, whole = count - rest;
    function(activation, z, whole, y);
    if (rest) {
        Rest<A> last(z + whole, rest);
        function(activation, last.lane, kLanes<A>, last.lane);
        store_part(y + whole, rest, load(last.lane));
    }
}

template <class A>
RG_INLINE void apply_slope(void (*function)(const Activation&, const A*, const A*, int64_t, A*),
                           const Activation& activation, const A* from, const A* dy, int64_t count, A* dz) {
    const int64_t rest = count % kLanes<A>, whole = count - rest;
    function(activation, from, dy, whole, dz);
    if (rest) {
        const Rest<A> last(from + whole, rest);
        Rest<A> slopes(dy + whole, rest);
        function(activation, last.lane, slopes.lane, kLanes<A>, slopes.lane);
        store_part(dz + whole, rest, load(slopes.lane));
    }
}

template <class A>
void apply_input_slope(const Activation& activation, const A* z, const A* dy, int64_t count, A* dz) {
    apply_slope(activation_functions<A>(activation).input_slope, activation, z, dy, count, dz);
}

template <class A>
void apply_output_slope(const Activation& activation, const A* y, const A* dy, int64_t count, A* dz) {
    apply_slope(activation_functions<A>(activation).output_slope, activation, y, dy, count, dz);
}

// ---- one vector at a time, for kernels that fuse activations with other work ---------------------------------------

// f(z) or f'(z) with the parameters a and b in every lane.
template <class A>
using ActivationFunction = Vec<A> (*)(Vec<A> z, Vec<A> a, Vec<A> b);

template <ActivationKind kind, class A>
Vec<A> activation_input_slope(Vec<A> z, Vec<A> a, Vec<A> b) {
    return activation_input_slope_times<kind, A>(z, splat(A(1)), a, b);
}

template <class A>
struct VectorActivation {
    ActivationFunction<A> value, input_slope;
};

template <class A>
VectorActivation<A> vector_activation(ActivationKind kind) {
    using K = ActivationKind;
    switch (kind) {
#define RG_ENTRY(name, ...) \
    case K::name:           \
        return {activation_value<K::name, A>, activation_input_slope<K::name, A>};
        RG_ACTIVATIONS(RG_ENTRY)
#undef RG_ENTRY
    }
    return vector_activation<A>(K::identity);
}

}  // namespace
}  // namespace rg
