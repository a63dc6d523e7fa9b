// exp, expm1, log1p, log, tanh, sigmoid and erf for vectors of float and double. The error bounds hold over the whole
// stated range and are tested (tests/ops/test_activation_precision.py). No tables; NaN gives NaN, nothing traps.
#pragma once

#include "vec.h"

namespace rg {
namespace {

template <class A>
struct MathConstants;
template <>
struct MathConstants<float> {
    // (e^r - 1 - r) / r^2 in powers of r, |r| <= ln(2)/2: the minimax polynomial of this degree for the relative error
    // of e^r - 1, which is 1.3e-8 (3.1e-19 for double). From the Remez algorithm with 50 digits.
    static constexpr float kExpTail[] = {0.499999981f, 0.166665432f, 0.0416672017f, 0.00836657881f, 0.0013882511f};
    static constexpr int kAtanhTerms = 8;  // (1/3)^(2*8)/17 = 1.4e-9
    // Adding it leaves the nearest integer in the low bits, biased as the exponent of a power of two.
    static constexpr float kRound = 0x1.8p23f + Format<float>::kExponentBias;
    static constexpr float kLn2High = 0x1.62e4p-1f;    // 14 bits: n * high is exact for |n| < 2^9
    static constexpr float kLn2Low = 0x1.7f7d1cp-20f;  // the rest of ln 2
    static constexpr float kExpLow = -104.0f;          // exp is 0 below
    static constexpr float kExpHigh = 89.0f;           // and infinite above
    static constexpr float kExpm1Low = -40.0f;         // expm1 is -1 below
    static constexpr float kLargest = 0x1.fffffep127f;
    static constexpr float kSmallestNormal = 0x1p-126f;
    static constexpr float kSplit = 0x1.001p12f;  // 2^12 + 1: Veltkamp's, leaves 12 bits, whose square is exact
    static constexpr float kSquareEnd =
        12.0f;  // e^-(x^2) is 0 from here on; beyond, the two factors of vexp leave their range
    static constexpr int kErfTerms = 7;  // (1/4)^7 / (7! * 15) = 8e-10
    // (x + k) e^(x^2) erfc(x) in powers of t = (x - k) / (x + k), k = kErfcCenter. The polynomial has the exact values
    // at the Chebyshev nodes of the range that matters, 1/2 <= x <= 10.2 (27.5 for double). It was computed with 50
    // digits; its relative error is at most 5e-9 (2.5e-17). Rounding the coefficients adds up to half an ulp.
    static constexpr float kErfcCenter = 2.5f;
    static constexpr float kScaledErfc[] = {1.05403185f,     -0.804651916f,    0.453914374f,
                                            -0.171249419f,   0.0283560064f,    0.00837851316f,
                                            -0.00478036562f, -0.000392167945f, 0.000594667566f};
};
template <>
struct MathConstants<double> {
    static constexpr double kExpTail[] = {0.500000000000000001,    0.166666666666666766,    0.0416666666666665075,
                                          0.00833333333332160927,  0.00138888888889628496,  0.000198412698862024203,
                                          2.48015871719034312e-05, 2.75572441105288222e-06, 2.7557402914294226e-07,
                                          2.5109078942720667e-08,  2.08753303231187333e-09};
    static constexpr int kAtanhTerms = 17;  // (1/3)^(2*17)/35 = 2e-18
    static constexpr double kRound = 0x1.8p52 + Format<double>::kExponentBias;
    static constexpr double kLn2High = 0x1.62e42fefap-1;  // 36 bits
    static constexpr double kLn2Low = 0x1.cf79abc9e3b398p-40;
    static constexpr double kExpLow = -746.0;
    static constexpr double kExpHigh = 710.0;
    static constexpr double kExpm1Low = -60.0;
    static constexpr double kLargest = 0x1.fffffffffffffp1023;
    static constexpr double kSmallestNormal = 0x1p-1022;
    static constexpr double kSplit = 0x1.0000002p27;
    static constexpr double kSquareEnd = 36.0;
    static constexpr int kErfTerms = 12;  // (1/4)^12 / (12! * 25) = 5e-18
    static constexpr double kErfcCenter = 3.0;
    static constexpr double kScaledErfc[] = {1.0740069070883398,      -0.88339445316988352,    0.5902283571041087,
                                             -0.3104672619005861,     0.1195277612868581,      -0.026827234623733834,
                                             -0.0012124166167030706,  0.0030340619869510897,   -0.00054830982182593377,
                                             -0.00027677769201986098, 0.0001075624160113078,   3.0397138088624926e-05,
                                             -1.7474634213101201e-05, -4.744899233073382e-06,  2.7765031753525645e-06,
                                             9.8725402185135729e-07,  -4.2655353981761908e-07, -2.1409861488809633e-07,
                                             6.3782420965861634e-08,  3.2002607561747932e-08,  -8.985841327881437e-09};
};

constexpr double kTwoOverRootPi = 1.12837916709551257390;

constexpr double inverse_factorial(int k) {
    double f = 1;
    for (int i = 2; i <= k; ++i) f *= i;
    return 1 / f;
}

template <class A>
struct Reduced {
    Vec<A> r;        // x - n * ln 2
    Vec<A> n;        // the integer, as a floating-point value
    Vec<A> shifted;  // n + kRound: the exponent of 2^n in its low bits
};

// A different `round` puts the exponent of a different power of two into `shifted`.
template <class A>
RG_INLINE Reduced<A> reduce(Vec<A> x, A round = MathConstants<A>::kRound) {
    using M = MathConstants<A>;
    Reduced<A> out;
    out.shifted = fma(x, splat(A(1.4426950408889634074)), splat(round));
    out.n = out.shifted - splat(round);
    out.r = fma(out.n, splat(-M::kLn2High), x);
    out.r = fma(out.n, splat(-M::kLn2Low), out.r);
    return out;
}

// 2^n from `shifted`, for n in the exponent range of normal numbers.
template <class A>
RG_INLINE Vec<A> power_of_two(Vec<A> shifted) {
    return bit_cast<Vec<A>>(BitsVec<A>(bit_cast<BitsVec<A>>(shifted) << Format<A>::kMantissaBits));
}

// e^r - 1 on the reduced range
template <class A>
RG_INLINE Vec<A> expm1_reduced(Vec<A> r) {
    constexpr auto& coefficient = MathConstants<A>::kExpTail;
    constexpr int degree = int(sizeof coefficient / sizeof(A)) - 1;
    Vec<A> tail = splat(coefficient[degree]);
#pragma GCC unroll 32
    for (int k = degree - 1; k >= 0; --k) tail = fma(tail, r, splat(coefficient[k]));
    return fma(r * r, tail, r);
}

// p * 2^n for 1/2 < p < 2, also if the result is outside the normal range: rounded once, so the bits are the same with
// one instruction as with two factors, of which the first product is exact.
#if defined(RG_ISA_AVX512)
template <class A>
RG_INLINE Vec<A> scale_by_power(Vec<A> p, Vec<A> n);
template <>
RG_INLINE Vec<float> scale_by_power<float>(Vec<float> p, Vec<float> n) {
    return _mm512_scalef_ps(p, n);
}
template <>
RG_INLINE Vec<double> scale_by_power<double>(Vec<double> p, Vec<double> n) {
    return _mm512_scalef_pd(p, n);
}
#else
template <class A>
RG_INLINE Vec<A> scale_by_power(Vec<A> p, Vec<A> n) {
    using M = MathConstants<A>;
    // Two factors, so that neither leaves the normal range where the product does.
    const Vec<A> half = n * splat(A(0.5)) + splat(M::kRound);
    const Vec<A> rest = (n - (half - splat(M::kRound))) + splat(M::kRound);
    return p * power_of_two<A>(half) * power_of_two<A>(rest);
}
#endif

// e^r * 2^n
template <class A>
RG_INLINE Vec<A> exp_reduced(const Reduced<A>& a) {
    return scale_by_power<A>(expm1_reduced<A>(a.r) + splat(A(1)), a.n);
}

// Within 1.1 ulp; subnormal results within one smallest subnormal.
template <class A>
RG_INLINE Vec<A> vexp(Vec<A> x) {
    using M = MathConstants<A>;
    x = at_most(at_least(x, splat(M::kExpLow)), splat(M::kExpHigh));
    return exp_reduced<A>(reduce<A>(x));
}

// x <= 0. Within 2 ulp.
template <class A>
RG_INLINE Vec<A> vexpm1_nonpositive(Vec<A> x) {
    using M = MathConstants<A>;
    x = at_least(x, splat(M::kExpm1Low));
    const Reduced<A> a = reduce<A>(x);
    const Vec<A> p = expm1_reduced<A>(a.r);
    const Vec<A> scale = power_of_two<A>(a.shifted);
    return fma(scale, p, scale - splat(A(1)));
}

// Any x. Within 2 ulp; subnormal results within one smallest subnormal.
template <class A>
RG_INLINE Vec<A> vexpm1(Vec<A> x) {
    using M = MathConstants<A>;
    x = at_least(x, splat(M::kExpm1Low));
    x = x > splat(M::kExpHigh) ? splat(M::kExpHigh) : x;
    const Reduced<A> a = reduce<A>(x);
    const Vec<A> p = expm1_reduced<A>(a.r);
    // Compute half of the result and double it: just below overflow, 2^n is out of range but 2^(n - 1) is not.
    const Vec<A> scale = power_of_two<A>(a.shifted - splat(A(1)));
    const Vec<A> half = fma(scale, p, scale - splat(A(0.5)));
    return half + half;
}

// -0.3 <= u <= 1, as 2 * atanh(u / (2 + u)). Within 2 ulp.
template <class A>
RG_INLINE Vec<A> vlog1p_unit(Vec<A> u) {
    const Vec<A> s = u / (u + splat(A(2)));
    const Vec<A> s2 = s * s;
    Vec<A> p = splat(A(1) / A(2 * MathConstants<A>::kAtanhTerms + 1));
#pragma GCC unroll 32
    for (int k = MathConstants<A>::kAtanhTerms - 1; k >= 1; --k) p = fma(p, s2, splat(A(1) / A(2 * k + 1)));
    const Vec<A> twice = s + s;
    return fma(twice * s2, p, twice);
}

// log(x) = n log(2) + log(m) with x = m 2^n and m from sqrt(1/2) to sqrt(2). Within 3 ulp, subnormal x included; -inf
// at 0, NaN below.
template <class A>
RG_INLINE Vec<A> vlog(Vec<A> x) {
    using M = MathConstants<A>;
    using U = typename Format<A>::Bits;
    constexpr int mantissa = Format<A>::kMantissaBits;
    constexpr U bias = Format<A>::kExponentBias;
    constexpr A integers = A(U(1) << mantissa);  // from here on, the lowest bit counts ones
    // A subnormal is multiplied by 2^(mantissa + 1), which makes it normal.
    const Vec<A> normal = splat(M::kSmallestNormal), none = splat(A(0));
    const BitsVec<A> bits = bit_cast<BitsVec<A>>(x < normal ? x * splat(2 * integers) : x);
    const BitsVec<A> exponent = (bits >> mantissa) | (BitsVec<A>{} + U((bias + mantissa) << mantissa));
    const BitsVec<A> fraction = bits & (BitsVec<A>{} + U((U(1) << mantissa) - 1));
    Vec<A> n = bit_cast<Vec<A>>(exponent) - splat(integers + A(bias));
    n = n - (x < normal ? splat(A(mantissa + 1)) : none);
    Vec<A> m = bit_cast<Vec<A>>(BitsVec<A>(fraction | (BitsVec<A>{} + U(bias << mantissa))));
    const Vec<A> middle = splat(A(1.41421356237309504880));
    n = n + (m > middle ? splat(A(1)) : none);
    m = m * (m > middle ? splat(A(0.5)) : splat(A(1)));
    const Vec<A> value = fma(n, splat(M::kLn2High), fma(n, splat(M::kLn2Low), vlog1p_unit<A>(m - splat(A(1)))));
    const Vec<A> infinity = splat(A(__builtin_inf()));
    const Vec<A> positive = x < infinity ? value : x;  // NaN stays NaN
    return x < none ? none / none : x == none ? none - infinity : positive;
}

template <class A>
RG_INLINE Vec<A> vabs(Vec<A> x) {
    using U = typename Format<A>::Bits;
    const BitsVec<A> keep = BitsVec<A>{} + U(~(U(1) << (sizeof(A) * 8 - 1)));
    return bit_cast<Vec<A>>(BitsVec<A>(bit_cast<BitsVec<A>>(x) & keep));
}

// The magnitude of the first with the sign of the second.
template <class A>
RG_INLINE Vec<A> copy_sign(Vec<A> magnitude, Vec<A> sign) {
    using U = typename Format<A>::Bits;
    const BitsVec<A> mask = BitsVec<A>{} + U(U(1) << (sizeof(A) * 8 - 1));
    const BitsVec<A> bits = bit_cast<BitsVec<A>>(magnitude);
    return bit_cast<Vec<A>>(BitsVec<A>(bits ^ ((bits ^ bit_cast<BitsVec<A>>(sign)) & mask)));
}

// Within 3 ulp everywhere, tiny arguments included: tanh|x| = -e / (e + 2) with e = expm1(-2|x|).
template <class A>
RG_INLINE Vec<A> vtanh(Vec<A> x) {
    const Vec<A> magnitude = vabs<A>(x);
    const Vec<A> e = vexpm1_nonpositive<A>(magnitude * splat(A(-2)));
    return copy_sign<A>(e / (e + splat(A(2))), x);
}

// sigmoid(x) and sigmoid(-x) = 1 - sigmoid(x), each within 3 ulp, also in its small tail, where it is e^-|x|.
template <class A>
struct SigmoidPair {
    Vec<A> plus, minus;
};
template <class A>
RG_INLINE SigmoidPair<A> vsigmoid_pair(Vec<A> x) {
    using M = MathConstants<A>;
    const Vec<A> e = exp_reduced<A>(reduce<A>(at_least(splat(A(0)) - vabs<A>(x), splat(M::kExpLow))));
    const Vec<A> s = splat(A(1)) / (e + splat(A(1)));
    const Vec<A> rest = e * s;
    return {x < splat(A(0)) ? rest : s, x < splat(A(0)) ? s : rest};
}
// sigmoid(x) alone, as t / (t + t e^-x): with t = 2^-64 nothing overflows before the result is 0, so both signs of x
// use the same formula. Within 3 ulp.
template <class A>
RG_INLINE Vec<A> vsigmoid(Vec<A> x) {
    using M = MathConstants<A>;
    const Vec<A> t = splat(A(0x1p-64));
    // It is 1 long before 43, where t e^-x is still normal.
    x = at_most(at_least(x, splat(M::kExpLow)), splat(A(43)));
    const Reduced<A> a = reduce<A>(-x, M::kRound - 64);
    const Vec<A> scale = power_of_two<A>(a.shifted);
    return t / fma(scale, expm1_reduced<A>(a.r), scale + t);
}

// e^(-scale x^2), scale 1 or 1/2. Within 2 ulp, although x^2 is up to 104 (745 for double) and its rounding error alone
// would cost that many: x = head + rest, where head^2 is exact, and x^2 - head^2 = (x - head)(x + head) is added to the
// remainder.
template <class A>
RG_INLINE Vec<A> vexp_minus_square(Vec<A> x, A scale) {
    using M = MathConstants<A>;
    const Vec<A> end = splat(scale < 1 ? A(1.4) * M::kSquareEnd : M::kSquareEnd);
    x = vabs<A>(x);
    x = x > end ? end : x;
    const Vec<A> spread = x * splat(M::kSplit), head = spread - (spread - x);
    const Vec<A> high = head * head * splat(-scale), low = (x - head) * (x + head) * splat(-scale);
    Reduced<A> a = reduce<A>(high + low);
    a.r = fma(a.n, splat(-M::kLn2High), high) + low;
    a.r = fma(a.n, splat(-M::kLn2Low), a.r);
    return exp_reduced<A>(a);
}

// e^(x^2) erfc(x) for 1/2 <= x <= kSquareEnd. Within 3 ulp where erfc(x) is not 0.
template <class A>
RG_INLINE Vec<A> vscaled_erfc(Vec<A> x) {
    constexpr auto& coefficient = MathConstants<A>::kScaledErfc;
    constexpr int degree = int(sizeof coefficient / sizeof(A)) - 1;
    const Vec<A> center = splat(MathConstants<A>::kErfcCenter);
    const Vec<A> s = splat(A(1)) / (x + center), t = (x - center) * s;
    Vec<A> p = splat(coefficient[degree]);
#pragma GCC unroll 32
    for (int k = degree - 1; k >= 0; --k) p = fma(p, t, splat(coefficient[k]));
    return p * s;
}

// |x| <= 1/2, by the Taylor series: the term k is 2 / sqrt(pi) * (-1)^k x^(2k + 1) / (k! (2k + 1)). Within 2 ulp.
template <class A>
RG_INLINE Vec<A> verf_small(Vec<A> x) {
    const Vec<A> minus_square = splat(A(0)) - x * x;
    Vec<A> p = splat(A(0));
#pragma GCC unroll 32
    for (int k = MathConstants<A>::kErfTerms - 1; k >= 0; --k) {
        p = fma(p, minus_square, splat(A(kTwoOverRootPi * inverse_factorial(k) / (2 * k + 1))));
    }
    return x * p;
}

// Within 4 ulp: above 1/2 erfc(x) is the smaller part of 1 - erfc(x).
template <class A>
RG_INLINE Vec<A> verf(Vec<A> x) {
    const Vec<A> end = splat(MathConstants<A>::kSquareEnd);
    Vec<A> magnitude = vabs<A>(x);
    magnitude = magnitude > end ? end : magnitude;
    const Vec<A> large = splat(A(1)) - vexp_minus_square<A>(magnitude, A(1)) * vscaled_erfc<A>(magnitude);
    return copy_sign<A>(magnitude < splat(A(0.5)) ? verf_small<A>(magnitude) : large, x);
}

}  // namespace
}  // namespace rg
