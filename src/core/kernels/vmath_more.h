// More functions for vectors of float and double: powers, logarithms, trigonometric and hyperbolic functions, rounding,
// remainders. The error bounds are tested (tests/ops/test_map_functions.py). NaN gives NaN, nothing traps.
//
// Most of them compute in double also for float: one source for both, and no error of an intermediate result matters.
// The parameter T is then the type of the result, which decides how many terms a polynomial has.
#pragma once

#include "vmath.h"

namespace rg {
namespace {

using Doubles = Vec<double>;

// The polynomials have the exact values at the Chebyshev nodes of their range, computed with 60 digits. Relative to the
// result, they are within 2^-32 for float and 2^-58 for double.
template <class T>
struct MoreConstants;
template <>
struct MoreConstants<float> {
    // (sin r - r) / r^3 and (cos r - 1 + r^2 / 2) / r^4 in powers of r^2, |r| <= pi/4
    static constexpr double kSin[] = {-0.1666666666362283, 0.008333331785217696, -0.00019840038872556747,
                                      2.724378140946123e-06};
    static constexpr double kCos[] = {0.04166666666412721, -0.001388888759732781, 2.4800560429914505e-05,
                                      -2.7295830827614617e-07};
    // (asin s - s) / s^3 in powers of s^2, s <= 1/2
    static constexpr double kAsin[] = {0.16666666686085643,  0.07499992404401838,  0.04464766388813485,
                                       0.030269138728589183, 0.023611817008891752, 0.010574415516912909,
                                       0.030974540371355073};
    // (atan t - t) / t^3 in powers of t^2, t <= tan(pi/8)
    static constexpr double kAtan[] = {-0.3333333327922454, 0.1999997724823353,   -0.14284150629730288,
                                       0.11071354571201351, -0.08624598215196126, 0.05047937432040091};
    // (atanh(s) / s - 1 - s^2 / 3) / s^4 in powers of s^2, s <= (sqrt(2) - 1) / (sqrt(2) + 1)
    static constexpr double kLog[] = {0.19999999952466369, 0.1428576591112815, 0.11102381046269032, 0.0956022740525019};
    static constexpr int kSinhTerms = 6;     // 1/13! = 1.6e-10
    static constexpr float kExp2Low = -151;  // exp2 is 0 below
    static constexpr float kExp2High = 128;  // and infinite from here on
    static constexpr float kLn2Rest = -0x1.05c61p-29f;
    static constexpr float kIntegers = 0x1p24f;  // from here on, all values are even integers
};
template <>
struct MoreConstants<double> {
    static constexpr double kSin[] = {-0.16666666666666666,   0.008333333333333331,   -0.00019841269841264567,
                                      2.7557319218954762e-06, -2.505210610025599e-08, 1.6058510875319195e-10,
                                      -7.585486485235938e-13};
    static constexpr double kCos[] = {0.041666666666666664,    -0.0013888888888887241, 2.480158729853226e-05,
                                      -2.7557317151858866e-07, 2.0876121534608454e-09, -1.1380868171449914e-11};
    static constexpr double kAsin[] = {
        0.16666666666666666,   0.07500000000000118,  0.044642857142551895, 0.03038194447553234,  0.02237215744350722,
        0.017352816540325496,  0.01396378001220357,  0.011566459612121669, 0.009621842970100282, 0.009319560794767446,
        0.0030448799094556773, 0.019554513336123378, -0.01924167174674304, 0.02961201126495512};
    static constexpr double kAtan[] = {-0.3333333333333333,  0.19999999999999804,  -0.14285714285659779,
                                       0.11111111105150588,  -0.09090908753259112, 0.07692296368042296,
                                       -0.0666642476020052,  0.05878927554473807,  -0.05230443640686948,
                                       0.045515447340221615, -0.03456931506332609, 0.016284375050043393};
    static constexpr double kLog[] = {0.2,
                                      0.14285714285714682,
                                      0.11111111110827943,
                                      0.09090909167696401,
                                      0.07692297481259215,
                                      0.06667402346923655,
                                      0.05853118169745603,
                                      0.05861589311938259};
    static constexpr int kSinhTerms = 10;  // 1/21! = 2e-20
    static constexpr double kExp2Low = -1076;
    static constexpr double kExp2High = 1024;
    static constexpr double kLn2Rest = 0x1.abc9e3b39803fp-56;
    static constexpr double kIntegers = 0x1p53;
};

constexpr double kPi[2] = {0x1.921fb54442d18p+1, 0x1.1a62633145c07p-53};
constexpr double kHalfPi[3] = {0x1.921fb54442d18p+0, 0x1.1a62633145c07p-54, -0x1.f1976b7ed8fbcp-110};
constexpr double kQuarterPi[2] = {0x1.921fb54442d18p-1, 0x1.1a62633145c07p-55};
constexpr double kLn2[2] = {0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56};
constexpr double kLog2E[2] = {0x1.71547652b82fep+0, 0x1.777d0ffda0d24p-56};
constexpr double kLog10E[2] = {0x1.bcb7b1526e50ep-2, 0x1.95355baaafad3p-57};

template <int kCount>
RG_INLINE Doubles polynomial(const double (&coefficient)[kCount], Doubles x) {
    Doubles p = splat(coefficient[kCount - 1]);
#pragma GCC unroll 32
    for (int k = kCount - 2; k >= 0; --k) p = fma(p, x, splat(coefficient[k]));
    return p;
}

// A function of doubles, for vectors of T.
template <class Function>
RG_INLINE Doubles by_double(const Function& function, Doubles x) {
    return function(x);
}
template <class Function>
RG_INLINE Doubles by_double(const Function& function, Doubles x, Doubles y) {
    return function(x, y);
}
#if defined(RG_ISA_SCALAR)
template <class Function>
RG_INLINE float by_double(const Function& function, float x) {
    return float(function(double(x)));
}
template <class Function>
RG_INLINE float by_double(const Function& function, float x, float y) {
    return float(function(double(x), double(y)));
}
#else
template <class Function>
RG_INLINE Vec<float> by_double(const Function& function, Vec<float> x) {
    return narrow(function(widen_low(x)), function(widen_high(x)));
}
template <class Function>
RG_INLINE Vec<float> by_double(const Function& function, Vec<float> x, Vec<float> y) {
    return narrow(function(widen_low(x), widen_low(y)), function(widen_high(x), widen_high(y)));
}
#endif

// Whether any lane is at least `bound`.
#if defined(RG_ISA_AVX512)
RG_INLINE bool any_from(Vec<double> v, double bound) { return _mm512_cmp_pd_mask(v, splat(bound), _CMP_GE_OQ) != 0; }
RG_INLINE bool any_from(Vec<float> v, float bound) { return _mm512_cmp_ps_mask(v, splat(bound), _CMP_GE_OQ) != 0; }
#elif defined(RG_ISA_AVX2)
RG_INLINE bool any_from(Vec<double> v, double bound) {
    return _mm256_movemask_pd(_mm256_cmp_pd(v, splat(bound), _CMP_GE_OQ)) != 0;
}
RG_INLINE bool any_from(Vec<float> v, float bound) {
    return _mm256_movemask_ps(_mm256_cmp_ps(v, splat(bound), _CMP_GE_OQ)) != 0;
}
#elif defined(RG_ISA_NEON)
RG_INLINE bool any_from(Vec<double> v, double bound) { return v[0] >= bound || v[1] >= bound; }
RG_INLINE bool any_from(Vec<float> v, float bound) { return vmaxvq_u32(vcgeq_f32(v, splat(bound))) != 0; }
#else
RG_INLINE bool any_from(double v, double bound) { return v >= bound; }
RG_INLINE bool any_from(float v, float bound) { return v >= bound; }
#endif

// ---- rounding and remainders: exact --------------------------------------------------------------------------------

#if defined(RG_ISA_AVX512)
#define RG_ROUNDING(name, mode, neon_f32, neon_f64, scalar_f32, scalar_f64)                               \
    RG_INLINE Vec<float> name(Vec<float> x) { return _mm512_roundscale_ps(x, mode | _MM_FROUND_NO_EXC); } \
    RG_INLINE Vec<double> name(Vec<double> x) { return _mm512_roundscale_pd(x, mode | _MM_FROUND_NO_EXC); }
#elif defined(RG_ISA_AVX2)
#define RG_ROUNDING(name, mode, neon_f32, neon_f64, scalar_f32, scalar_f64)                          \
    RG_INLINE Vec<float> name(Vec<float> x) { return _mm256_round_ps(x, mode | _MM_FROUND_NO_EXC); } \
    RG_INLINE Vec<double> name(Vec<double> x) { return _mm256_round_pd(x, mode | _MM_FROUND_NO_EXC); }
#elif defined(RG_ISA_NEON)
#define RG_ROUNDING(name, mode, neon_f32, neon_f64, scalar_f32, scalar_f64) \
    RG_INLINE Vec<float> name(Vec<float> x) { return neon_f32(x); }         \
    RG_INLINE Vec<double> name(Vec<double> x) { return neon_f64(x); }
#else
#define RG_ROUNDING(name, mode, neon_f32, neon_f64, scalar_f32, scalar_f64) \
    RG_INLINE float name(float x) { return scalar_f32(x); }                 \
    RG_INLINE double name(double x) { return scalar_f64(x); }
#endif
RG_ROUNDING(vfloor, _MM_FROUND_TO_NEG_INF, vrndmq_f32, vrndmq_f64, floorf, floor)
RG_ROUNDING(vceil, _MM_FROUND_TO_POS_INF, vrndpq_f32, vrndpq_f64, ceilf, ceil)
RG_ROUNDING(vtrunc, _MM_FROUND_TO_ZERO, vrndq_f32, vrndq_f64, truncf, trunc)
RG_ROUNDING(vround, _MM_FROUND_TO_NEAREST_INT, vrndnq_f32, vrndnq_f64, rintf, rint)
#undef RG_ROUNDING

// The C library's remainder is exact, so its bits are the same everywhere.
RG_INLINE float remainder_of(float a, float b) { return fmodf(a, b); }
RG_INLINE double remainder_of(double a, double b) { return fmod(a, b); }

// a - trunc(a / b) * b, exact, with the sign of a. The rounded quotient is off by one at most, as long as it is below
// 2^24 (2^53 for double): the remainder is then exact and corrected. Larger quotients are left to the C library.
template <class A>
RG_INLINE Vec<A> vfmod(Vec<A> a, Vec<A> b) {
    const Vec<A> x = vabs<A>(a), y = vabs<A>(b), zero = splat(A(0));
    const Vec<A> quotient = x / y;
    Vec<A> r = fma(zero - vtrunc(quotient), y, x);
    r = r < zero ? r + y : r;
    r = r >= y ? r - y : r;
    r = y > vabs<A>(splat(MathConstants<A>::kLargest)) ? x : r;  // a finite a, and an infinite b
    r = copy_sign<A>(r, a);
    r = vabs<A>(a) > splat(MathConstants<A>::kLargest) ? a - a : r;
    if (any_from(quotient, MoreConstants<A>::kIntegers / 2)) {
        A lane[kLanes<A>], top[kLanes<A>], bottom[kLanes<A>], ratio[kLanes<A>];
        store(lane, r);
        store(top, a);
        store(bottom, b);
        store(ratio, quotient);
        for (int i = 0; i < kLanes<A>; ++i) {
            if (ratio[i] >= MoreConstants<A>::kIntegers / 2) lane[i] = remainder_of(top[i], bottom[i]);
        }
        r = load(lane);
    }
    return r;
}

// The remainder with the sign of b, as Python's and NumPy's %.
template <class A>
RG_INLINE Vec<A> vmod(Vec<A> a, Vec<A> b) {
    const Vec<A> r = vfmod<A>(a, b), zero = splat(A(0)), one = splat(A(1));
    const Vec<A> sign = copy_sign<A>(one, b), wrapped = r * sign < zero ? r + b : r;
    return r == zero ? copy_sign<A>(zero, b) : wrapped;
}

// NumPy's //: (a - mod) / b, which is an integer but for its rounding error.
template <class A>
RG_INLINE Vec<A> vfloor_div(Vec<A> a, Vec<A> b) {
    const Vec<A> r = vfmod<A>(a, b), zero = splat(A(0)), one = splat(A(1));
    Vec<A> quotient = (a - r) / b;
    quotient = (r * copy_sign<A>(one, b) < zero ? quotient - one : quotient);
    const Vec<A> below = vfloor(quotient);
    const Vec<A> whole = quotient - below > splat(A(0.5)) ? below + one : below;
    const Vec<A> value = quotient == zero ? copy_sign<A>(zero, a / b) : whole;
    return b == zero ? a / b : value;
}

// ---- exponentials --------------------------------------------------------------------------------------------------

// 2^x. Within 1.2 ulp; subnormal results within one smallest subnormal. Exact for integers.
template <class A>
RG_INLINE Vec<A> vexp2(Vec<A> x) {
    using M = MoreConstants<A>;
    x = at_most(at_least(x, splat(M::kExp2Low)), splat(M::kExp2High));
    Reduced<A> a;
    a.n = vround(x);
    const Vec<A> f = x - a.n;
    a.r = fma(f, splat(A(kLn2[0])), f * splat(M::kLn2Rest));
    return exp_reduced<A>(a);
}

// expm1 that keeps the sign of 0 and the bits of tiny x. Within 2 ulp.
template <class A>
RG_INLINE Vec<A> vexpm1_signed(Vec<A> x) {
    return vabs<A>(x) < splat(A(0x1p-60)) ? x : vexpm1<A>(x);
}

// e^x / 2, which overflows no sooner than the hyperbolic functions.
template <class A>
RG_INLINE Vec<A> vhalf_exp(Vec<A> x) {
    using M = MathConstants<A>;
    Reduced<A> a = reduce<A>(at_most(x, splat(M::kExpHigh + 1)));
    a.n = a.n - splat(A(1));
    return exp_reduced<A>(a);
}

// Within 3 ulp: e^|x| / 2 - e^-|x| / 2, and below 1 the Taylor series.
template <class A>
RG_INLINE Vec<A> vsinh(Vec<A> x) {
    const Vec<A> magnitude = vabs<A>(x), half = vhalf_exp<A>(magnitude), square = x * x;
    Vec<A> p = splat(A(0));
#pragma GCC unroll 32
    for (int k = MoreConstants<A>::kSinhTerms - 1; k >= 1; --k) {
        p = fma(p, square, splat(A(inverse_factorial(2 * k + 1))));
    }
    const Vec<A> small = fma(magnitude * square, p, magnitude);
    const Vec<A> large = half - splat(A(0.25)) / half;
    return copy_sign<A>(magnitude < splat(A(1)) ? small : large, x);
}

// Within 3 ulp.
template <class A>
RG_INLINE Vec<A> vcosh(Vec<A> x) {
    const Vec<A> half = vhalf_exp<A>(vabs<A>(x));
    return half + splat(A(0.25)) / half;
}

// ---- logarithms ----------------------------------------------------------------------------------------------------

// An unevaluated sum; low is at most half an ulp of high.
struct DoublePair {
    Doubles high, low;
};

// Exact for |a| >= |b|, and for a = 0.
RG_INLINE DoublePair quick_sum(Doubles a, Doubles b) {
    const Doubles sum = a + b;
    return {sum, (a - sum) + b};
}
RG_INLINE DoublePair exact_sum(Doubles a, Doubles b) {
    const Doubles sum = a + b, second = sum - a;
    return {sum, (a - (sum - second)) + (b - second)};
}

// log(x + rest), |rest| at most an ulp of x: n log(2) + 2 atanh(s) with s = (m - 1) / (m + 1), m from sqrt(1/2) to
// sqrt(2). For T = double the relative error is below 2^-62, because s and its first two terms are kept as pairs; for
// T = float it is below 2^-40, and `low` is 0. -inf at 0, NaN below.
template <class T, bool kRest>
RG_INLINE DoublePair log_pair(Doubles x, [[maybe_unused]] Doubles rest) {
    using M = MathConstants<double>;
    constexpr bool exact = sizeof(T) == sizeof(double);
    constexpr int mantissa = Format<double>::kMantissaBits;
    constexpr uint64_t bias = Format<double>::kExponentBias;
    const Doubles zero = splat(0.0), one = splat(1.0), normal = splat(M::kSmallestNormal);
    const Doubles scaled = exact ? (x < normal ? x * splat(0x1p54) : x) : x;
    const BitsVec<double> bits = bit_cast<BitsVec<double>>(scaled);
    const BitsVec<double> exponent = (bits >> mantissa) | (BitsVec<double>{} + ((bias + mantissa) << mantissa));
    const BitsVec<double> fraction = bits & (BitsVec<double>{} + ((uint64_t(1) << mantissa) - 1));
    Doubles n = bit_cast<Doubles>(exponent) - splat(0x1p52 + double(bias));
    if (exact) n = n - (x < normal ? splat(54.0) : zero);
    Doubles m = bit_cast<Doubles>(BitsVec<double>(fraction | (BitsVec<double>{} + (bias << mantissa))));
    const Doubles middle = splat(1.41421356237309504880);
    n = n + (m > middle ? one : zero);
    m = m * (m > middle ? splat(0.5) : one);
    DoublePair f = {m - one, zero};
    if (kRest) f = exact_sum(f.high, rest / scaled * m);
    const Doubles infinity = splat(__builtin_inf());
    const Doubles special = x < zero ? zero / zero : x == zero ? zero - infinity : x;
    if constexpr (!exact) {
        const Doubles s = f.high / (f.high + splat(2.0)), z = s * s;
        const Doubles tail = z * fma(z, polynomial(MoreConstants<T>::kLog, z), splat(1.0 / 3));
        const Doubles twice = s + s;
        const Doubles value = fma(n, splat(kLn2[0]), fma(twice, tail, twice));
        return {x > zero ? (x < infinity ? value : special) : special, zero};
    } else {
        const DoublePair d = quick_sum(splat(2.0), f.high);
        const Doubles s = f.high / d.high;
        const Doubles s_low = (fma(zero - s, d.high, f.high) + (f.low - s * (d.low + f.low))) / d.high;
        const Doubles z = s * s, z_low = fma(s, s, zero - z) + (s + s) * s_low;
        // p = z / 3 + z^2 / 5 + ...
        const Doubles third = z * splat(0x1.5555555555555p-2);
        const Doubles third_low = fma(z, splat(0x1.5555555555555p-2), zero - third) +
                                  fma(z, splat(0x1.5555555555555p-56), z_low * splat(0x1.5555555555555p-2));
        const DoublePair p = quick_sum(third, z * z * polynomial(MoreConstants<T>::kLog, z));
        const Doubles p_low = p.low + third_low;
        // s + s p
        const Doubles t = s * p.high, t_low = fma(s, p.high, zero - t) + fma(s, p_low, s_low * p.high);
        const DoublePair r = quick_sum(s, t);
        const Doubles r_low = r.low + (t_low + s_low);
        const DoublePair sum = quick_sum(n * splat(M::kLn2High), r.high + r.high);
        const Doubles low = sum.low + (fma(n, splat(M::kLn2Low), r_low + r_low));
        const DoublePair value = quick_sum(sum.high, low);
        return {x > zero ? (x < infinity ? value.high : special) : special,
                x > zero ? (x < infinity ? value.low : zero) : zero};
    }
}

// Within 1 ulp; exact for powers of two.
template <class T>
RG_INLINE Doubles vlog_base(Doubles x, const double (&scale)[2]) {
    const DoublePair l = log_pair<T, false>(x, splat(0.0));
    const Doubles high = l.high * splat(scale[0]);
    const Doubles low =
        fma(l.high, splat(scale[0]), splat(0.0) - high) + fma(l.high, splat(scale[1]), l.low * splat(scale[0]));
    const Doubles sum = high + low;
    return sum == sum ? sum : high;  // infinite
}
template <class A>
RG_INLINE Vec<A> vlog2(Vec<A> x) {
    return by_double([](Doubles v) RG_INLINE_LAMBDA { return vlog_base<A>(v, kLog2E); }, x);
}
template <class A>
RG_INLINE Vec<A> vlog10(Vec<A> x) {
    return by_double([](Doubles v) RG_INLINE_LAMBDA { return vlog_base<A>(v, kLog10E); }, x);
}

// log(1 + u). Within 1 ulp.
template <class T>
RG_INLINE Doubles log1p_double(Doubles u) {
    const DoublePair sum = exact_sum(splat(1.0), u);
    const DoublePair l = log_pair<T, true>(sum.high, sum.low);
    return vabs<double>(u) < splat(0x1p-60) ? u : l.high + l.low;
}
template <class A>
RG_INLINE Vec<A> vlog1p(Vec<A> x) {
    return by_double([](Doubles v) RG_INLINE_LAMBDA { return log1p_double<A>(v); }, x);
}

// log(a + sqrt(a^2 + ...)) of large a is log(2a), otherwise log1p(u).
template <class T>
RG_INLINE Doubles log1p_or_twice(Doubles u, Doubles a) {
    const Doubles large = splat(0x1p28), zero = splat(0.0);
    const DoublePair sum = exact_sum(splat(1.0), u);
    const DoublePair l = log_pair<T, true>(a < large ? sum.high : a, a < large ? sum.low : zero);
    return l.high + (l.low + (a < large ? zero : splat(kLn2[0])));
}
// Within 3 ulp: asinh(a) = log1p(a + a^2 / (1 + sqrt(1 + a^2))).
template <class A>
RG_INLINE Vec<A> vasinh(Vec<A> x) {
    const auto function = [](Doubles v) RG_INLINE_LAMBDA {
        const Doubles a = vabs<double>(v), one = splat(1.0), square = a * a;
        const Doubles value = log1p_or_twice<A>(a + square / (one + root(one + square)), a);
        return a < splat(0x1p-30) ? v : copy_sign<double>(value, v);
    };
    return by_double(function, x);
}
// Within 3 ulp: with t = x - 1, log1p(t + sqrt(2t + t^2)).
template <class A>
RG_INLINE Vec<A> vacosh(Vec<A> x) {
    const auto function = [](Doubles v) RG_INLINE_LAMBDA {
        const Doubles zero = splat(0.0), t = v - splat(1.0);
        const Doubles value = log1p_or_twice<A>(t + root(t * (t + splat(2.0))), v);
        return t < zero ? zero / zero : value;
    };
    return by_double(function, x);
}
// Within 3 ulp: log1p(2a / (1 - a)) / 2.
template <class A>
RG_INLINE Vec<A> vatanh(Vec<A> x) {
    const auto function = [](Doubles v) RG_INLINE_LAMBDA {
        const Doubles a = vabs<double>(v);
        const Doubles value = splat(0.5) * log1p_double<A>((a + a) / (splat(1.0) - a));
        return a < splat(0x1p-30) ? v : copy_sign<double>(value, v);
    };
    return by_double(function, x);
}

// x^y as C defines it: 1 for y = 0 and for x = 1, even with NaN; NaN for finite x < 0 unless y is an integer. e^(y
// log|x|) with the product as a pair. Within 2 ulp; subnormal results within one smallest subnormal.
template <class T>
RG_INLINE Doubles pow_double(Doubles x, Doubles y) {
    using M = MathConstants<double>;
    const Doubles zero = splat(0.0), one = splat(1.0), infinity = splat(__builtin_inf()), a = vabs<double>(x);
    const DoublePair l = log_pair<T, false>(a, zero);
    const Doubles high = y * l.high;
    Doubles low = zero;
    if (sizeof(T) == sizeof(double)) {
        low = fma(y, l.high, zero - high) + y * l.low;
        low = vabs<double>(high) < splat(1000.0) ? low : zero;
    }
    Reduced<double> e = reduce<double>(at_most(at_least(high, splat(M::kExpLow)), splat(M::kExpHigh)));
    e.r = e.r + low;
    Doubles value = exp_reduced<double>(e);
    value = a == one ? one : value;  // also for infinite y
    // The sign of an odd power; everything from 2^53 on is even.
    const Doubles half = y * splat(0.5), whole = vtrunc(y);
    const Doubles odd = whole == y ? (vtrunc(half) == half ? one : copy_sign<double>(one, x)) : one;
    value = odd < zero ? -value : value;
    const Doubles undefined = whole == y ? value : (x < zero ? (a < infinity ? zero / zero : value) : value);
    value = y == y ? undefined : y;
    value = x == x ? value : x;
    return y == zero ? one : (x == one ? one : value);
}
template <class A>
RG_INLINE Vec<A> vpow(Vec<A> x, Vec<A> y) {
    return by_double([](Doubles v, Doubles w) RG_INLINE_LAMBDA { return pow_double<A>(v, w); }, x, y);
}

// ---- trigonometric functions ---------------------------------------------------------------------------------------

constexpr double kLargeAngle = 0x1p40;

// 2/pi after the binary point.
constexpr uint64_t kTwoOverPi[] = {0xa2f9836e4e441529, 0xfc2757d1f534ddc0, 0xdb6295993c439041, 0xfe5163abdebbc561,
                                   0xb7246e3a424dd2e0, 0x06492eea09d1921c, 0xfe1deb1cb129a73e, 0xe88235f52ebb4484,
                                   0xe99c7026b45f7e41, 0x3991d639835339f4, 0x9c845f8bbdf9283b, 0x1ff897ffde05980f,
                                   0xef2f118b5a0a6d1f, 0x6d367ecf27cb09b7, 0x4f463f669e5fea2d, 0x7527bac7ebe5f17b,
                                   0x3d0739f78a5292ea, 0x6bfb5fb11f8d5d08, 0x56033046fc7b6bab, 0xf0cfbc209af4361d};

// One finite x with |x| >= 2^11, by Payne and Hanek: r = x - n pi/2 as a pair, and n modulo 4. With x = m 2^e, only the
// bits of 2/pi count that are neither multiples of 4 nor too small: 192 of them.
inline uint64_t reduce_large_angle(double x, double* high, double* low) {
    const uint64_t bits = bit_cast<uint64_t>(x), m = (bits & 0xfffffffffffff) | uint64_t(1) << 52;
    const int e = int(bits >> 52 & 0x7ff) - 1075;
    const int from = e - 2;  // the index of the first bit of 2/pi that counts, from 0
    uint64_t window[3];
    for (int i = 0; i < 3; ++i) {
        window[i] = 0;
        const int at = from + 64 * i;
        if (at < 0) {
            if (at > -64) window[i] = kTwoOverPi[0] >> -at;
        } else {
            const int shift = at % 64;
            window[i] = kTwoOverPi[at / 64] << shift;
            if (shift) window[i] |= kTwoOverPi[at / 64 + 1] >> (64 - shift);
        }
    }
    // m * window modulo 2^192; its first two bits are n
    __extension__ using Wide = unsigned __int128;
    const Wide last = Wide(m) * window[2], middle = Wide(m) * window[1] + uint64_t(last >> 64);
    const uint64_t top = m * window[0] + uint64_t(middle >> 64);
    Wide fraction = (Wide(top) << 64 | uint64_t(middle)) << 2 | uint64_t(last) >> 62;
    uint64_t n = top >> 62;
    const bool above = fraction >> 127 != 0;  // round n to nearest; the fraction is then negative
    if (above) {
        fraction = ~fraction + 1;
        ++n;
    }
    // Two doubles of 53 bits each.
    double turn = 0, rest = 0;
    if (fraction != 0) {
        const uint64_t upper = uint64_t(fraction >> 64);
        const int zeros = upper ? __builtin_clzll(upper) : 64 + __builtin_clzll(uint64_t(fraction));
        fraction <<= zeros;
        const uint64_t first = uint64_t(fraction >> 75), second = uint64_t(fraction >> 22) & 0x1fffffffffffff;
        const double unit = bit_cast<double>(uint64_t(1023 - 53 - zeros) << 52);
        turn = double(first) * unit;
        rest = double(second) * (unit * 0x1p-53);
    }
    const double product = turn * kHalfPi[0];
    const double error = __builtin_fma(turn, kHalfPi[0], -product) + (turn * kHalfPi[1] + rest * kHalfPi[0]);
    const bool negative = above != (bits >> 63 != 0);
    *high = negative ? -product : product;
    *low = negative ? -error : error;
    return bits >> 63 ? uint64_t(0) - n : n;
}

struct Angle {
    DoublePair r;             // |r| <= pi/4, and slightly more
    BitsVec<double> quarter;  // n in the lowest two bits
};

// r = x - n pi/2 with pi/2 as three doubles. n times the first and its difference from x are exact, and so is n times
// the second as a pair.
template <class T>
RG_INLINE Angle reduce_angle(Doubles x) {
    const Doubles zero = splat(0.0), integers = splat(0x1.8p52);
    const Doubles shifted = fma(x, splat(0x1.45f306dc9c883p-1), integers), n = shifted - integers;
    Angle out;
    out.quarter = bit_cast<BitsVec<double>>(shifted);
    const Doubles first = fma(zero - n, splat(kHalfPi[0]), x);
    if (sizeof(T) == sizeof(double)) {
        const Doubles second = n * splat(kHalfPi[1]), error = fma(n, splat(kHalfPi[1]), zero - second);
        const Doubles r = first - second;
        // (first - r) - second would need |first| >= |second|.
        const DoublePair difference = exact_sum(first, zero - second);
        const Doubles low = difference.low - fma(n, splat(kHalfPi[2]), error);
        out.r = quick_sum(r, low);
    } else {
        out.r = {fma(zero - n, splat(kHalfPi[1]), first), zero};
    }
    if (any_from(vabs<double>(x), kLargeAngle)) {
        double lane[kLanes<double>], high[kLanes<double>], low[kLanes<double>];
        uint64_t quarter[kLanes<double>];
        store(lane, x);
        store(high, out.r.high);
        store(low, out.r.low);
        __builtin_memcpy(quarter, &out.quarter, sizeof quarter);
        for (int i = 0; i < kLanes<double>; ++i) {
            const double magnitude = lane[i] < 0 ? -lane[i] : lane[i];
            if (magnitude < kLargeAngle || !(magnitude <= MathConstants<double>::kLargest)) continue;
            quarter[i] = reduce_large_angle(lane[i], high + i, low + i);
        }
        out.r = {load(high), load(low)};
        __builtin_memcpy(&out.quarter, quarter, sizeof quarter);
    }
    return out;
}

template <class T>
RG_INLINE Doubles sin_reduced(DoublePair r) {
    const Doubles z = r.high * r.high;
    if (sizeof(T) == sizeof(float)) return fma(r.high * z, polynomial(MoreConstants<T>::kSin, z), r.high);
    const Doubles cube = r.high * z * polynomial(MoreConstants<T>::kSin, z);
    return r.high + fma(r.low, fma(z, splat(-0.5), splat(1.0)), cube);
}
template <class T>
RG_INLINE Doubles cos_reduced(DoublePair r) {
    const Doubles z = r.high * r.high, half = z * splat(0.5), w = splat(1.0) - half;
    if (sizeof(T) == sizeof(float)) return fma(z * z, polynomial(MoreConstants<T>::kCos, z), w);
    const Doubles rest = fma(z * z, polynomial(MoreConstants<T>::kCos, z), splat(0.0) - r.high * r.low);
    return w + (((splat(1.0) - w) - half) + rest);
}

// sin, or cos, which is a quarter ahead.
template <class T, int kAhead>
RG_INLINE Doubles sin_or_cos(Doubles x) {
    const Angle angle = reduce_angle<T>(x);
    const BitsVec<double> quarter = angle.quarter + uint64_t(kAhead), one = BitsVec<double>{} + uint64_t(1);
    const Doubles s = sin_reduced<T>(angle.r), c = cos_reduced<T>(angle.r);
    const Doubles value = (quarter & one) == one ? c : s;
    const BitsVec<double> sign = (quarter >> 1) << 63;
    const Doubles result = bit_cast<Doubles>(BitsVec<double>(bit_cast<BitsVec<double>>(value) ^ sign));
    return kAhead ? result : (x == splat(0.0) ? x : result);
}
// Within 1 ulp for every finite x, however large.
template <class A>
RG_INLINE Vec<A> vsin(Vec<A> x) {
    return by_double([](Doubles v) RG_INLINE_LAMBDA { return sin_or_cos<A, 0>(v); }, x);
}
template <class A>
RG_INLINE Vec<A> vcos(Vec<A> x) {
    return by_double([](Doubles v) RG_INLINE_LAMBDA { return sin_or_cos<A, 1>(v); }, x);
}
// Within 3 ulp.
template <class A>
RG_INLINE Vec<A> vtan(Vec<A> x) {
    const auto function = [](Doubles v) RG_INLINE_LAMBDA {
        const Angle angle = reduce_angle<A>(v);
        const BitsVec<double> one = BitsVec<double>{} + uint64_t(1);
        const Doubles s = sin_reduced<A>(angle.r), c = cos_reduced<A>(angle.r);
        const Doubles tangent = (angle.quarter & one) == one ? (splat(0.0) - c) / s : s / c;
        return v == splat(0.0) ? v : tangent;
    };
    return by_double(function, x);
}

// ---- inverse trigonometric functions -------------------------------------------------------------------------------

// asin and acos: above 1/2 through asin(sqrt((1 - a) / 2)), with the rounding error of the root. Within 2 ulp.
template <class T, bool kCosine>
RG_INLINE Doubles asin_or_acos(Doubles x) {
    const Doubles zero = splat(0.0), two = splat(2.0), a = vabs<double>(x), limit = splat(0.5);
    const Doubles z = a < limit ? x * x : (splat(1.0) - a) * limit;
    const Doubles p = z * polynomial(MoreConstants<T>::kAsin, z);
    const Doubles s = root(z);
    const Doubles error = s == zero ? zero : fma(zero - s, s, z) / (s + s);
    const Doubles rest = fma(s, p, error);
    if (kCosine) {
        const Doubles small = splat(kHalfPi[0]) - (x - (splat(kHalfPi[1]) - x * p));
        const Doubles positive = two * (s + rest);
        const Doubles negative = splat(kPi[0]) - (fma(two, s, fma(two, rest, splat(-kPi[1]))));
        return a < limit ? small : (x < zero ? negative : positive);
    }
    const Doubles large = splat(kHalfPi[0]) - fma(two, s, fma(two, rest, splat(-kHalfPi[1])));
    return copy_sign<double>(a < limit ? fma(a, p, a) : large, x);
}
template <class A>
RG_INLINE Vec<A> vasin(Vec<A> x) {
    return by_double([](Doubles v) RG_INLINE_LAMBDA { return asin_or_acos<A, false>(v); }, x);
}
template <class A>
RG_INLINE Vec<A> vacos(Vec<A> x) {
    return by_double([](Doubles v) RG_INLINE_LAMBDA { return asin_or_acos<A, true>(v); }, x);
}

// a >= 0: an angle of 0, pi/4 or pi/2, plus the angle of (a - tan) / (1 + a tan), which is at most pi/8. Within 2.5
// ulp.
template <class T>
RG_INLINE Doubles atan_positive(Doubles a) {
    const Doubles zero = splat(0.0), one = splat(1.0), low = splat(0.41421356237309503),
                  high = splat(2.414213562373095);
    const Doubles top = a > high ? zero - one : (a > low ? a - one : a);
    const Doubles bottom = a > high ? a : (a > low ? a + one : one);
    const Doubles base = a > high ? splat(kHalfPi[0]) : (a > low ? splat(kQuarterPi[0]) : zero);
    const Doubles base_rest = a > high ? splat(kHalfPi[1]) : (a > low ? splat(kQuarterPi[1]) : zero);
    const Doubles t = top / bottom, z = t * t;
    return base + (t + fma(t * z, polynomial(MoreConstants<T>::kAtan, z), base_rest));
}
template <class A>
RG_INLINE Vec<A> vatan(Vec<A> x) {
    const auto function = [](Doubles v)
                              RG_INLINE_LAMBDA { return copy_sign<double>(atan_positive<A>(vabs<double>(v)), v); };
    return by_double(function, x);
}
// The angle of the point (x, y). Within 3 ulp.
template <class A>
RG_INLINE Vec<A> vatan2(Vec<A> y, Vec<A> x) {
    const auto function = [](Doubles v, Doubles w) RG_INLINE_LAMBDA {
        const Doubles a = vabs<double>(v), b = vabs<double>(w), zero = splat(0.0), one = splat(1.0);
        const Doubles largest = splat(MathConstants<double>::kLargest);
        Doubles ratio = a / b;
        ratio = a > largest ? (b > largest ? one : ratio) : ratio;  // both infinite
        ratio = a == zero ? (b == zero ? zero : ratio) : ratio;
        const Doubles angle = atan_positive<A>(ratio);
        const Doubles left = splat(kPi[0]) - (angle - splat(kPi[1]));
        return copy_sign<double>(copy_sign<double>(one, w) < zero ? left : angle, v);
    };
    return by_double(function, y, x);
}

}  // namespace
}  // namespace rg
