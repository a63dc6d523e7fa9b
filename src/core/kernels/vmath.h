// exp, expm1, log1p, tanh and sigmoid for vectors of float and double. The bounds below are over the whole range named
// and are tested (tests/test_activation.py). No tables; NaN comes out as NaN, nothing traps.
#pragma once

#include "vec.h"

namespace rg {
namespace {

// Polynomials are Taylor series cut where the next term is below a quarter of a unit in the last place on the reduced
// range, |r| <= ln(2)/2: r^8/8! = 5e-9 for float, r^14/14! = 4e-18 for double.
template <class A>
struct MathConstants;
template <>
struct MathConstants<float> {
    static constexpr int kExpDegree = 7;
    static constexpr int kAtanhTerms = 8;              // (1/3)^(2*8)/17 = 1.4e-9
    static constexpr float kRound = 0x1.8p23f;         // adding it leaves the nearest integer in the low bits
    static constexpr float kLn2High = 0x1.62e4p-1f;    // 14 bits: n * high is exact for |n| < 2^9
    static constexpr float kLn2Low = 0x1.7f7d1cp-20f;  // the rest of ln 2
    static constexpr float kExpLow = -104.0f;          // exp is 0 below
    static constexpr float kExpHigh = 89.0f;           // and infinite above
    static constexpr float kExpm1Low = -40.0f;         // expm1 is -1 below
};
template <>
struct MathConstants<double> {
    static constexpr int kExpDegree = 13;
    static constexpr int kAtanhTerms = 17;  // (1/3)^(2*17)/35 = 2e-18
    static constexpr double kRound = 0x1.8p52;
    static constexpr double kLn2High = 0x1.62e42fefap-1;  // 36 bits
    static constexpr double kLn2Low = 0x1.cf79abc9e3b398p-40;
    static constexpr double kExpLow = -746.0;
    static constexpr double kExpHigh = 710.0;
    static constexpr double kExpm1Low = -60.0;
};

template <class A>
constexpr A inverse_factorial(int k) {
    double f = 1;
    for (int i = 2; i <= k; ++i) f *= i;
    return A(1 / f);
}

template <class A>
struct Reduced {
    Vec<A> r;        // x - n * ln 2
    Vec<A> n;        // the integer, as a number
    Vec<A> shifted;  // n + kRound: n in its low bits
};

template <class A>
RG_INLINE Reduced<A> reduce(Vec<A> x) {
    using M = MathConstants<A>;
    Reduced<A> out;
    out.shifted = x * splat(A(1.4426950408889634074)) + splat(M::kRound);
    out.n = out.shifted - splat(M::kRound);
    out.r = fma(out.n, splat(-M::kLn2High), x);
    out.r = fma(out.n, splat(-M::kLn2Low), out.r);
    return out;
}

// 2^n for the integer in the low bits of `shifted`, n within the exponents of normal numbers.
template <class A>
RG_INLINE Vec<A> power_of_two(Vec<A> shifted) {
    using F = Format<A>;
    using U = typename F::Bits;
    const BitsVec<A> bits = bit_cast<BitsVec<A>>(shifted);
    const BitsVec<A> biased = bits + (BitsVec<A>{} + U(F::kExponentBias));
    return bit_cast<Vec<A>>(BitsVec<A>(biased << F::kMantissaBits));
}

// (e^r - 1 - r) / r^2 on the reduced range
template <class A>
RG_INLINE Vec<A> exp_tail(Vec<A> r) {
    constexpr int degree = MathConstants<A>::kExpDegree;
    Vec<A> p = splat(inverse_factorial<A>(degree));
    for (int k = degree - 1; k >= 2; --k) p = fma(p, r, splat(inverse_factorial<A>(k)));
    return p;
}

// Within 1 ulp; subnormal results within one unit of the smallest subnormal.
template <class A>
RG_INLINE Vec<A> vexp(Vec<A> x) {
    using M = MathConstants<A>;
    x = x < splat(M::kExpLow) ? splat(M::kExpLow) : x;
    x = x > splat(M::kExpHigh) ? splat(M::kExpHigh) : x;
    const Reduced<A> a = reduce<A>(x);
    const Vec<A> p = fma(a.r * a.r, exp_tail<A>(a.r), a.r) + splat(A(1));
    // Two factors, so that neither leaves the normal range where the product does.
    const Vec<A> half = a.n * splat(A(0.5)) + splat(M::kRound);
    const Vec<A> rest = (a.n - (half - splat(M::kRound))) + splat(M::kRound);
    return p * power_of_two<A>(half) * power_of_two<A>(rest);
}

// x <= 0. Within 2 ulp.
template <class A>
RG_INLINE Vec<A> vexpm1_nonpositive(Vec<A> x) {
    using M = MathConstants<A>;
    x = x < splat(M::kExpm1Low) ? splat(M::kExpm1Low) : x;
    const Reduced<A> a = reduce<A>(x);
    const Vec<A> p = fma(a.r * a.r, exp_tail<A>(a.r), a.r);
    const Vec<A> scale = power_of_two<A>(a.shifted);
    return fma(scale, p, scale - splat(A(1)));
}

// 0 <= u <= 1, as 2 * atanh(u / (2 + u)). Within 2 ulp.
template <class A>
RG_INLINE Vec<A> vlog1p_unit(Vec<A> u) {
    const Vec<A> s = u / (u + splat(A(2)));
    const Vec<A> s2 = s * s;
    Vec<A> p = splat(A(1) / A(2 * MathConstants<A>::kAtanhTerms + 1));
    for (int k = MathConstants<A>::kAtanhTerms - 1; k >= 1; --k) p = fma(p, s2, splat(A(1) / A(2 * k + 1)));
    const Vec<A> twice = s + s;
    return fma(twice * s2, p, twice);
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
    const BitsVec<A> bits = (bit_cast<BitsVec<A>>(magnitude) & ~mask) | (bit_cast<BitsVec<A>>(sign) & mask);
    return bit_cast<Vec<A>>(bits);
}

// Within 3 ulp everywhere, tiny arguments included: tanh|x| = -e / (e + 2) with e = expm1(-2|x|).
template <class A>
RG_INLINE Vec<A> vtanh(Vec<A> x) {
    const Vec<A> magnitude = vabs<A>(x);
    const Vec<A> e = vexpm1_nonpositive<A>(magnitude * splat(A(-2)));
    return copy_sign<A>(divide_near_one(e, e + splat(A(2))), x);
}

// Within 3 ulp, also far out on the negative side, where it is e^x.
template <class A>
RG_INLINE Vec<A> vsigmoid(Vec<A> x) {
    const Vec<A> e = vexp<A>(splat(A(0)) - vabs<A>(x));
    const Vec<A> s = divide_near_one(splat(A(1)), e + splat(A(1)));
    return x < splat(A(0)) ? e * s : s;
}

}  // namespace
}  // namespace rg
