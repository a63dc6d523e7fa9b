// One vector type whose width follows the instruction-set level. At the scalar level Vec<A> is A itself, so the same
// templates compile there to plain loops. Everything has internal linkage: see table.cpp.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if defined(RG_ISA_AVX512) || defined(RG_ISA_AVX2)
#include <immintrin.h>
#elif defined(RG_ISA_NEON)
#include <arm_neon.h>
#endif

#if defined(RG_ISA_AVX512)
#define RG_VECTOR_BYTES 64
#elif defined(RG_ISA_AVX2)
#define RG_VECTOR_BYTES 32
#elif defined(RG_ISA_NEON)
#define RG_VECTOR_BYTES 16
#else
#define RG_ISA_SCALAR 1
#endif

#define RG_INLINE inline __attribute__((always_inline))
#define RG_INLINE_LAMBDA __attribute__((always_inline))
// Of a lambda that changes what it has copied. Compilers disagree about the order.
#if defined(__clang__)
#define RG_INLINE_MUTABLE RG_INLINE_LAMBDA mutable
#else
#define RG_INLINE_MUTABLE mutable RG_INLINE_LAMBDA
#endif

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __asan_loadN(void*, size_t);
extern "C" void __asan_storeN(void*, size_t);
#endif

namespace rg {
namespace {

// The integer that holds a float's bit pattern, and the constants of the type's layout.
template <class A>
struct Format;
template <>
struct Format<float> {
    using Bits = uint32_t;
    static constexpr int kMantissaBits = 23;
    static constexpr Bits kExponentBias = 127;
};
template <>
struct Format<double> {
    using Bits = uint64_t;
    static constexpr int kMantissaBits = 52;
    static constexpr Bits kExponentBias = 1023;
};

#if defined(RG_ISA_SCALAR)

template <class A>
using Vec = A;
template <class A>
using BitsVec = typename Format<A>::Bits;
template <class A>
constexpr int kLanes = 1;

#else

template <class E>
struct Native;
template <>
struct Native<float> {
    typedef float type __attribute__((vector_size(RG_VECTOR_BYTES)));
};
template <>
struct Native<double> {
    typedef double type __attribute__((vector_size(RG_VECTOR_BYTES)));
};
template <>
struct Native<uint32_t> {
    typedef uint32_t type __attribute__((vector_size(RG_VECTOR_BYTES)));
};
template <>
struct Native<uint64_t> {
    typedef uint64_t type __attribute__((vector_size(RG_VECTOR_BYTES)));
};

template <class A>
using Vec = typename Native<A>::type;
template <class A>
using BitsVec = typename Native<typename Format<A>::Bits>::type;
template <class A>
constexpr int kLanes = RG_VECTOR_BYTES / int(sizeof(A));

#endif

// Not Vec<A>{} + value, which compiles to an addition because of -0.0.
#if defined(RG_ISA_AVX512)
RG_INLINE Vec<float> splat(float value) { return _mm512_set1_ps(value); }
RG_INLINE Vec<double> splat(double value) { return _mm512_set1_pd(value); }
#elif defined(RG_ISA_AVX2)
RG_INLINE Vec<float> splat(float value) { return _mm256_set1_ps(value); }
RG_INLINE Vec<double> splat(double value) { return _mm256_set1_pd(value); }
#elif defined(RG_ISA_NEON)
RG_INLINE Vec<float> splat(float value) { return vdupq_n_f32(value); }
RG_INLINE Vec<double> splat(double value) { return vdupq_n_f64(value); }
#else
RG_INLINE float splat(float value) { return value; }
RG_INLINE double splat(double value) { return value; }
#endif

// Through memcpy, because GCC splits vector types with reduced alignment into scalars.
template <class A>
RG_INLINE Vec<A> load(const A* p) {
    Vec<A> v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
template <class A>
RG_INLINE void store(A* p, Vec<A> v) {
    __builtin_memcpy(p, &v, sizeof v);
}

template <class To, class From>
RG_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

// AddressSanitizer does not check masked and streaming intrinsics, so they report their accesses explicitly.
template <class A>
RG_INLINE const A* reads(const A* p, [[maybe_unused]] int64_t n) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_loadN(const_cast<A*>(p), size_t(n) * sizeof(A));
#endif
    return p;
}
template <class A>
RG_INLINE const A* reads_lanes(const A* p, [[maybe_unused]] uint32_t lanes) {
#if defined(__SANITIZE_ADDRESS__)
    if (lanes) reads(p + __builtin_ctz(lanes), __builtin_popcount(lanes));
#endif
    return p;
}
template <class A>
RG_INLINE A* writes(A* p, [[maybe_unused]] int64_t n) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_storeN(p, size_t(n) * sizeof(A));
#endif
    return p;
}

// ---- fused multiply-add, parts of a vector -------------------------------------------------------------------------

#if defined(RG_ISA_AVX512)

RG_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return _mm512_fmadd_ps(a, b, c); }
RG_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return _mm512_fmadd_pd(a, b, c); }

RG_INLINE __mmask16 first_lanes(int64_t n) { return __mmask16((1u << n) - 1); }

// The first n lanes from memory (0 <= n < lanes), the others from fill.
RG_INLINE Vec<float> load_part(const float* p, int64_t n, Vec<float> fill) {
    return _mm512_mask_loadu_ps(fill, first_lanes(n), reads(p, n));
}
RG_INLINE Vec<double> load_part(const double* p, int64_t n, Vec<double> fill) {
    return _mm512_mask_loadu_pd(fill, __mmask8(first_lanes(n)), reads(p, n));
}
// Some lanes, which are contiguous: lane i if bit i is set.
template <class A>
struct Lanes {
    Lanes() = default;
    explicit RG_INLINE Lanes(uint32_t set) : bits(set) {}
    uint32_t bits;
};
// These lanes from memory, and the others of `rest`, in which these are 0.
RG_INLINE Vec<float> load_lanes(const float* p, Lanes<float> lanes, Vec<float> rest) {
    return _mm512_mask_loadu_ps(rest, __mmask16(lanes.bits), reads_lanes(p, lanes.bits));
}
RG_INLINE Vec<double> load_lanes(const double* p, Lanes<double> lanes, Vec<double> rest) {
    return _mm512_mask_loadu_pd(rest, __mmask8(lanes.bits), reads_lanes(p, lanes.bits));
}
RG_INLINE void store_part(float* p, int64_t n, Vec<float> v) { _mm512_mask_storeu_ps(writes(p, n), first_lanes(n), v); }
RG_INLINE void store_part(double* p, int64_t n, Vec<double> v) {
    _mm512_mask_storeu_pd(writes(p, n), __mmask8(first_lanes(n)), v);
}

// The first n lanes of v, the others from rest.
RG_INLINE Vec<float> first_of(Vec<float> v, int64_t n, Vec<float> rest) {
    return _mm512_mask_mov_ps(rest, first_lanes(n), v);
}
RG_INLINE Vec<double> first_of(Vec<double> v, int64_t n, Vec<double> rest) {
    return _mm512_mask_mov_pd(rest, __mmask8(first_lanes(n)), v);
}

RG_INLINE Vec<double> widen_low(Vec<float> v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
RG_INLINE Vec<double> widen_high(Vec<float> v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
RG_INLINE Vec<float> narrow(Vec<double> low, Vec<double> high) {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
}

RG_INLINE void stream(float* p, Vec<float> v) { _mm512_stream_ps(writes(p, kLanes<float>), v); }
RG_INLINE void stream(double* p, Vec<double> v) { _mm512_stream_pd(writes(p, kLanes<double>), v); }

#elif defined(RG_ISA_AVX2)

RG_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return _mm256_fmadd_ps(a, b, c); }
RG_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return _mm256_fmadd_pd(a, b, c); }

RG_INLINE __m256i first_lanes_ps(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
RG_INLINE __m256i first_lanes_pd(int64_t n) {
    return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3));
}
RG_INLINE Vec<float> load_part(const float* p, int64_t n, Vec<float> fill) {
    const __m256i mask = first_lanes_ps(n);
    return _mm256_blendv_ps(fill, _mm256_maskload_ps(reads(p, n), mask), _mm256_castsi256_ps(mask));
}
RG_INLINE Vec<double> load_part(const double* p, int64_t n, Vec<double> fill) {
    const __m256i mask = first_lanes_pd(n);
    return _mm256_blendv_pd(fill, _mm256_maskload_pd(reads(p, n), mask), _mm256_castsi256_pd(mask));
}
template <class A>
struct Lanes;
template <>
struct Lanes<float> {
    Lanes() = default;
    explicit RG_INLINE Lanes(uint32_t set) : bits(set) {
        const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        mask = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(set)), bit), bit);
    }
    uint32_t bits;
    __m256i mask;
};
template <>
struct Lanes<double> {
    Lanes() = default;
    explicit RG_INLINE Lanes(uint32_t set) : bits(set) {
        const __m256i bit = _mm256_setr_epi64x(1, 2, 4, 8);
        mask = _mm256_cmpeq_epi64(_mm256_and_si256(_mm256_set1_epi64x(int64_t(set)), bit), bit);
    }
    uint32_t bits;
    __m256i mask;
};
RG_INLINE Vec<float> load_lanes(const float* p, const Lanes<float>& lanes, Vec<float> rest) {
    return _mm256_or_ps(rest, _mm256_maskload_ps(reads_lanes(p, lanes.bits), lanes.mask));
}
RG_INLINE Vec<double> load_lanes(const double* p, const Lanes<double>& lanes, Vec<double> rest) {
    return _mm256_or_pd(rest, _mm256_maskload_pd(reads_lanes(p, lanes.bits), lanes.mask));
}
RG_INLINE void store_part(float* p, int64_t n, Vec<float> v) {
    _mm256_maskstore_ps(writes(p, n), first_lanes_ps(n), v);
}
RG_INLINE void store_part(double* p, int64_t n, Vec<double> v) {
    _mm256_maskstore_pd(writes(p, n), first_lanes_pd(n), v);
}

RG_INLINE Vec<float> first_of(Vec<float> v, int64_t n, Vec<float> rest) {
    return _mm256_blendv_ps(rest, v, _mm256_castsi256_ps(first_lanes_ps(n)));
}
RG_INLINE Vec<double> first_of(Vec<double> v, int64_t n, Vec<double> rest) {
    return _mm256_blendv_pd(rest, v, _mm256_castsi256_pd(first_lanes_pd(n)));
}

RG_INLINE Vec<double> widen_low(Vec<float> v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
RG_INLINE Vec<double> widen_high(Vec<float> v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
RG_INLINE Vec<float> narrow(Vec<double> low, Vec<double> high) {
    return _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low));
}

RG_INLINE void stream(float* p, Vec<float> v) { _mm256_stream_ps(writes(p, kLanes<float>), v); }
RG_INLINE void stream(double* p, Vec<double> v) { _mm256_stream_pd(writes(p, kLanes<double>), v); }

#else

#if defined(RG_ISA_NEON)

RG_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return vfmaq_f32(c, a, b); }
RG_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) { return vfmaq_f64(c, a, b); }
RG_INLINE Vec<double> widen_low(Vec<float> v) { return vcvt_f64_f32(vget_low_f32(v)); }
RG_INLINE Vec<double> widen_high(Vec<float> v) { return vcvt_high_f64_f32(v); }
RG_INLINE Vec<float> narrow(Vec<double> low, Vec<double> high) { return vcvt_high_f32_f64(vcvt_f32_f64(low), high); }

#else

// Rounded once, as the instruction is, so that this level computes the same bits as the others. The product of two
// floats is exact in double. The sum is rounded to odd: if it is inexact, the last bit is set. So the second rounding,
// to float, sees that it is not a tie (Boldo and Melquiond, 2008: exact if double has two bits more than float, or
// any number above).
RG_INLINE float fma(float a, float b, float c) {
    const double product = double(a) * double(b), addend = double(c), sum = product + addend;
    const double second = sum - product, error = (product - (sum - second)) + (addend - second);  // exact (Knuth)
    uint64_t bits = bit_cast<uint64_t>(sum);
    const bool inexact = error != 0 && sum - sum == 0;  // the error of an infinite sum is NaN
    if (inexact && (bits & 1) == 0) bits += (error > 0) == (sum > 0) ? uint64_t(1) : ~uint64_t(0);
    return float(bit_cast<double>(bits));
}
// In the C library, unless the compiler may assume the instruction.
RG_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }

#endif

template <class A>
RG_INLINE Vec<A> load_part(const A* p, int64_t n, Vec<A> fill) {
    __builtin_memcpy(&fill, p, size_t(n) * sizeof(A));
    return fill;
}
template <class A>
struct Lanes {
    Lanes() = default;
    explicit RG_INLINE Lanes(uint32_t set) : bits(set) {}
    uint32_t bits;
};
template <class A>
RG_INLINE Vec<A> load_lanes(const A* p, Lanes<A> lanes, Vec<A> rest) {
    if (lanes.bits == 0) return rest;
    if (lanes.bits == (uint32_t(1) << kLanes<A>)-1) return load(p);
    A values[kLanes<A>];
    store(values, rest);
    for (int i = 0; i < kLanes<A>; ++i) {
        if (lanes.bits >> i & 1) values[i] = p[i];
    }
    return load(values);
}
template <class A>
RG_INLINE void store_part(A* p, int64_t n, Vec<A> v) {
    __builtin_memcpy(p, &v, size_t(n) * sizeof(A));
}
RG_INLINE Vec<float> first_of(Vec<float> v, int64_t n, Vec<float> rest) {
    __builtin_memcpy(&rest, &v, size_t(n) * sizeof(float));
    return rest;
}
RG_INLINE Vec<double> first_of(Vec<double> v, int64_t n, Vec<double> rest) {
    __builtin_memcpy(&rest, &v, size_t(n) * sizeof(double));
    return rest;
}
template <class A>
RG_INLINE void stream(A* p, Vec<A> v) {
    store(p, v);
}

#endif

// Clamps x to a bound; NaN stays NaN.
#if defined(RG_ISA_AVX512)
RG_INLINE Vec<float> at_most(Vec<float> x, Vec<float> bound) { return _mm512_min_ps(bound, x); }
RG_INLINE Vec<double> at_most(Vec<double> x, Vec<double> bound) { return _mm512_min_pd(bound, x); }
RG_INLINE Vec<float> at_least(Vec<float> x, Vec<float> bound) { return _mm512_max_ps(bound, x); }
RG_INLINE Vec<double> at_least(Vec<double> x, Vec<double> bound) { return _mm512_max_pd(bound, x); }
#elif defined(RG_ISA_AVX2)
RG_INLINE Vec<float> at_most(Vec<float> x, Vec<float> bound) { return _mm256_min_ps(bound, x); }
RG_INLINE Vec<double> at_most(Vec<double> x, Vec<double> bound) { return _mm256_min_pd(bound, x); }
RG_INLINE Vec<float> at_least(Vec<float> x, Vec<float> bound) { return _mm256_max_ps(bound, x); }
RG_INLINE Vec<double> at_least(Vec<double> x, Vec<double> bound) { return _mm256_max_pd(bound, x); }
#else
RG_INLINE Vec<float> at_most(Vec<float> x, Vec<float> bound) { return x > bound ? bound : x; }
RG_INLINE Vec<double> at_most(Vec<double> x, Vec<double> bound) { return x > bound ? bound : x; }
RG_INLINE Vec<float> at_least(Vec<float> x, Vec<float> bound) { return x < bound ? bound : x; }
RG_INLINE Vec<double> at_least(Vec<double> x, Vec<double> bound) { return x < bound ? bound : x; }
#endif

// Where v is larger than `than`, or NaN; and a where a condition of that kind is true, b elsewhere.
#if defined(RG_ISA_AVX512)
RG_INLINE __mmask16 larger_or_nan(Vec<float> v, Vec<float> than) {
    return _mm512_cmp_ps_mask(v, than, _CMP_GT_OQ) | _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
}
RG_INLINE __mmask8 larger_or_nan(Vec<double> v, Vec<double> than) {
    return _mm512_cmp_pd_mask(v, than, _CMP_GT_OQ) | _mm512_cmp_pd_mask(v, v, _CMP_UNORD_Q);
}
RG_INLINE Vec<float> choose(__mmask16 where, Vec<float> a, Vec<float> b) { return _mm512_mask_mov_ps(b, where, a); }
RG_INLINE Vec<double> choose(__mmask8 where, Vec<double> a, Vec<double> b) { return _mm512_mask_mov_pd(b, where, a); }
RG_INLINE BitsVec<float> choose(__mmask16 where, BitsVec<float> a, BitsVec<float> b) {
    return (BitsVec<float>)_mm512_mask_mov_epi32((__m512i)b, where, (__m512i)a);
}
RG_INLINE BitsVec<double> choose(__mmask8 where, BitsVec<double> a, BitsVec<double> b) {
    return (BitsVec<double>)_mm512_mask_mov_epi64((__m512i)b, where, (__m512i)a);
}
#else
template <class V>
RG_INLINE auto larger_or_nan(V v, V than) {
    return (v > than) | (v != v);
}
template <class Where, class V>
RG_INLINE V choose(Where where, V a, V b) {
    return where ? a : b;
}
#endif

// Square root.
#if defined(RG_ISA_AVX512)
RG_INLINE Vec<float> root(Vec<float> x) { return _mm512_sqrt_ps(x); }
RG_INLINE Vec<double> root(Vec<double> x) { return _mm512_sqrt_pd(x); }
#elif defined(RG_ISA_AVX2)
RG_INLINE Vec<float> root(Vec<float> x) { return _mm256_sqrt_ps(x); }
RG_INLINE Vec<double> root(Vec<double> x) { return _mm256_sqrt_pd(x); }
#elif defined(RG_ISA_NEON)
RG_INLINE Vec<float> root(Vec<float> x) { return vsqrtq_f32(x); }
RG_INLINE Vec<double> root(Vec<double> x) { return vsqrtq_f64(x); }
#else
RG_INLINE float root(float x) { return sqrtf(x); }
RG_INLINE double root(double x) { return sqrt(x); }
#endif

// Every other of the elements p[0], p[1]...: the lanes of every_other(load(p), load(p + lanes - 1)) are p[0], p[2]...,
// and nothing past the last of them is read.
#if defined(RG_ISA_AVX512)
RG_INLINE Vec<float> every_other(Vec<float> low, Vec<float> high) {
    const __m512i from = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_permutex2var_ps(low, from, high);
}
RG_INLINE Vec<double> every_other(Vec<double> low, Vec<double> high) {
    return _mm512_permutex2var_pd(low, _mm512_setr_epi64(0, 2, 4, 6, 9, 11, 13, 15), high);
}
#elif defined(RG_ISA_AVX2)
RG_INLINE Vec<float> every_other(Vec<float> low, Vec<float> high) {
    const __m256d mixed = _mm256_castps_pd(_mm256_shuffle_ps(low, high, 0b11011000));  // 0 2 1' 3' | 4 6 5' 7'
    return _mm256_castpd_ps(_mm256_permute4x64_pd(mixed, 0b11011000));
}
RG_INLINE Vec<double> every_other(Vec<double> low, Vec<double> high) {
    return _mm256_permute4x64_pd(_mm256_shuffle_pd(low, high, 0b1010), 0b11011000);
}
#elif defined(RG_ISA_NEON)
RG_INLINE Vec<float> every_other(Vec<float> low, Vec<float> high) {
    return vcombine_f32(vget_low_f32(vuzp1q_f32(low, low)), vget_low_f32(vuzp2q_f32(high, high)));
}
RG_INLINE Vec<double> every_other(Vec<double> low, Vec<double> high) {
    return vcombine_f64(vget_low_f64(low), vget_high_f64(high));
}
#endif

// a[0], b[0], a[1], b[1]...: the first vector of it, and the second.
#if defined(RG_ISA_AVX512)
RG_INLINE Vec<float> interleave_low(Vec<float> a, Vec<float> b) {
    const __m512i from = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    return _mm512_permutex2var_ps(a, from, b);
}
RG_INLINE Vec<float> interleave_high(Vec<float> a, Vec<float> b) {
    const __m512i from = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    return _mm512_permutex2var_ps(a, from, b);
}
RG_INLINE Vec<double> interleave_low(Vec<double> a, Vec<double> b) {
    return _mm512_permutex2var_pd(a, _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), b);
}
RG_INLINE Vec<double> interleave_high(Vec<double> a, Vec<double> b) {
    return _mm512_permutex2var_pd(a, _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15), b);
}
#elif defined(RG_ISA_AVX2)
RG_INLINE Vec<float> interleave_low(Vec<float> a, Vec<float> b) {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20);
}
RG_INLINE Vec<float> interleave_high(Vec<float> a, Vec<float> b) {
    return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31);
}
RG_INLINE Vec<double> interleave_low(Vec<double> a, Vec<double> b) {
    return _mm256_permute2f128_pd(_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b), 0x20);
}
RG_INLINE Vec<double> interleave_high(Vec<double> a, Vec<double> b) {
    return _mm256_permute2f128_pd(_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b), 0x31);
}
#elif defined(RG_ISA_NEON)
RG_INLINE Vec<float> interleave_low(Vec<float> a, Vec<float> b) { return vzip1q_f32(a, b); }
RG_INLINE Vec<float> interleave_high(Vec<float> a, Vec<float> b) { return vzip2q_f32(a, b); }
RG_INLINE Vec<double> interleave_low(Vec<double> a, Vec<double> b) { return vzip1q_f64(a, b); }
RG_INLINE Vec<double> interleave_high(Vec<double> a, Vec<double> b) { return vzip2q_f64(a, b); }
#endif

// Whether stream() bypasses the cache; otherwise it is the same as store().
#if defined(RG_ISA_AVX512) || defined(RG_ISA_AVX2)
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;
#endif

// Prefetches a cache line; any address is safe.
RG_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Doubles as A: stored, as doubles again, and from memory.
#if defined(RG_ISA_AVX512)
RG_INLINE void store_rounded(float* p, Vec<double> v) { _mm256_storeu_ps(p, _mm512_cvtpd_ps(v)); }
RG_INLINE Vec<double> load_wide(const float* p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
#elif defined(RG_ISA_AVX2)
RG_INLINE void store_rounded(float* p, Vec<double> v) { _mm_storeu_ps(p, _mm256_cvtpd_ps(v)); }
RG_INLINE Vec<double> load_wide(const float* p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
#elif defined(RG_ISA_NEON)
RG_INLINE void store_rounded(float* p, Vec<double> v) { vst1_f32(p, vcvt_f32_f64(v)); }
RG_INLINE Vec<double> load_wide(const float* p) { return vcvt_f64_f32(vld1_f32(p)); }
#else
RG_INLINE void store_rounded(float* p, double v) { *p = float(v); }
RG_INLINE double load_wide(const float* p) { return *p; }
#endif
RG_INLINE void store_rounded(double* p, Vec<double> v) { store(p, v); }
RG_INLINE Vec<double> load_wide(const double* p) { return load(p); }
template <class A>
RG_INLINE Vec<double> rounded(Vec<double> v) {
    A lanes[kLanes<double>];
    store_rounded(lanes, v);
    return load_wide(lanes);
}

// ---- sums in double precision --------------------------------------------------------------------------------------

// The bits of a sum over elements do not depend on the width of the registers: it is kept in a fixed number of partial
// sums, elements are assigned to them by their position alone, and narrow levels use several registers for them. They
// are added pairwise, the upper half to the lower one, which is also a short dependency chain.

#if defined(RG_ISA_AVX512) || defined(RG_ISA_AVX2)
RG_INLINE double add_lanes(__m256d v) {
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd(v, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}
#endif
#if defined(RG_ISA_AVX512)
RG_INLINE double add_lanes(Vec<double> v) {
    return add_lanes(_mm256_add_pd(_mm512_castpd512_pd256(v), _mm512_extractf64x4_pd(v, 1)));
}
#elif defined(RG_ISA_NEON)
RG_INLINE double add_lanes(Vec<double> v) { return v[0] + v[1]; }
#elif defined(RG_ISA_SCALAR)
RG_INLINE double add_lanes(double v) { return v; }
#endif

// Calls body(k) for k < kCount. By recursion, because GCC keeps an array of vectors in registers only if it finds every
// index constant before it unrolls loops. The scalar level has more partial sums than registers, so it uses a loop.
template <int kCount, int k = 0, class Body>
RG_INLINE void unrolled(const Body& body) {
#if defined(RG_ISA_SCALAR)
    for (int i = 0; i < kCount; ++i) body(i);
#else
    if constexpr (k < kCount) {
        body(k);
        unrolled<kCount, k + 1>(body);
    }
#endif
}

// Adds the upper half of kRegisters registers to the lower one, until kLeft are left.
template <int kRegisters, int kLeft, class V>
RG_INLINE void add_halves(V* v) {
    if constexpr (kRegisters > kLeft) {
        constexpr int half = kRegisters / 2;
        unrolled<half>([&](int k) RG_INLINE_LAMBDA { v[k] += v[k + half]; });
        add_halves<half, kLeft>(v);
    }
}

// Eight partial sums: element i of a run is added to sum i % 8.
struct Sum {
    static constexpr int kCount = 8;
    static constexpr int kParts = kCount / kLanes<double>;
    Vec<double> part[kParts] = {};

    // The number of vectors of A with one element for each sum; an AVX-512 vector of float has two.
    template <class A>
    static constexpr int kVectors = kLanes<A> < kCount ? kCount / kLanes<A> : 1;

    // k: the vector's place among the kVectors
    RG_INLINE void add(int k, Vec<double> v) { part[k] += v; }
    RG_INLINE void add_square(int k, Vec<double> v) { part[k] = fma(v, v, part[k]); }
    RG_INLINE void add_product(int k, Vec<double> a, Vec<double> b) { part[k] = fma(a, b, part[k]); }
#if defined(RG_ISA_SCALAR)
    RG_INLINE void add(int k, float v) { add(k, double(v)); }
    RG_INLINE void add_square(int k, float v) { add_square(k, double(v)); }
    RG_INLINE void add_product(int k, float a, float b) { add_product(k, double(a), double(b)); }
#else
    RG_INLINE void add(int k, Vec<float> v) {
        add(2 * k % kParts, widen_low(v));
        add((2 * k + 1) % kParts, widen_high(v));
    }
    RG_INLINE void add_square(int k, Vec<float> v) {
        add_square(2 * k % kParts, widen_low(v));
        add_square((2 * k + 1) % kParts, widen_high(v));
    }
    RG_INLINE void add_product(int k, Vec<float> a, Vec<float> b) {
        add_product(2 * k % kParts, widen_low(a), widen_low(b));
        add_product((2 * k + 1) % kParts, widen_high(a), widen_high(b));
    }
#endif
    // Adds registers of partial sums, first to each other until there are eight sums. v is overwritten.
    template <class A, int kRegisters>
    RG_INLINE void add_all(Vec<A> (&v)[kRegisters]) {
        add_halves<kRegisters, kVectors<A>>(v);
#if defined(RG_ISA_AVX512)
        if constexpr (sizeof(A) == sizeof(float)) {
            part[0] += _mm512_cvtps_pd(_mm256_add_ps(_mm512_castps512_ps256(v[0]), _mm512_extractf32x8_ps(v[0], 1)));
            return;
        }
#endif
        unrolled<kVectors<A>>([&](int k) RG_INLINE_LAMBDA { add(k, v[k]); });
    }
    RG_INLINE double total() {
        add_halves<kParts, 1>(part);
        return add_lanes(part[0]);
    }
};

// A sum whose partial sums fit in a register, and vectors of such totals: shuffled together they take a fraction of the
// instructions of total(), with the same additions, and do not wait for each other. Lane i is the total of sums[i].
#if defined(RG_ISA_AVX512) || defined(RG_ISA_AVX2)
using ShortSum = __m256d;
RG_INLINE __m256d add_lanes(__m256d a, __m256d b, __m256d c, __m256d d) {
    const __m256d ac = _mm256_add_pd(_mm256_permute2f128_pd(a, c, 0x20), _mm256_permute2f128_pd(a, c, 0x31));
    const __m256d bd = _mm256_add_pd(_mm256_permute2f128_pd(b, d, 0x20), _mm256_permute2f128_pd(b, d, 0x31));
    return _mm256_add_pd(_mm256_unpacklo_pd(ac, bd), _mm256_unpackhi_pd(ac, bd));
}
#else
using ShortSum = Vec<double>;
#endif
RG_INLINE ShortSum shorten(Sum sum) {
#if defined(RG_ISA_AVX512)
    return _mm256_add_pd(_mm512_castpd512_pd256(sum.part[0]), _mm512_extractf64x4_pd(sum.part[0], 1));
#else
    add_halves<Sum::kParts, 1>(sum.part);
    return sum.part[0];
#endif
}
RG_INLINE Vec<double> totals(const ShortSum* sums) {
#if defined(RG_ISA_AVX512)
    const __m256d low = add_lanes(sums[0], sums[1], sums[2], sums[3]);
    const __m256d high = add_lanes(sums[4], sums[5], sums[6], sums[7]);
    return _mm512_insertf64x4(_mm512_castpd256_pd512(low), high, 1);
#elif defined(RG_ISA_AVX2)
    return add_lanes(sums[0], sums[1], sums[2], sums[3]);
#elif defined(RG_ISA_NEON)
    return vpaddq_f64(sums[0], sums[1]);
#else
    return sums[0];
#endif
}

#if defined(RG_ISA_SCALAR)

RG_INLINE void add_to(double* p, float v) { *p += v; }

// Adds vectors of A into doubles, one sum for each lane.
template <class A>
struct LaneSums {
    double lanes{};
    RG_INLINE void add(A v) { lanes += v; }
    RG_INLINE void store(double* p) const { *p = lanes; }
    static constexpr int kRegisters = 1;
    RG_INLINE void take(Vec<double>* v) const { *v = lanes; }
};

#else

RG_INLINE void add_to(double* p, Vec<float> v) {
    store(p, load(p) + widen_low(v));
    store(p + kLanes<double>, load(p + kLanes<double>) + widen_high(v));
}

template <class A>
struct LaneSums;
template <>
struct LaneSums<float> {
    Vec<double> low{}, high{};
    RG_INLINE void add(Vec<float> v) {
        low += widen_low(v);
        high += widen_high(v);
    }
    RG_INLINE void store(double* p) const {
        rg::store(p, low);
        rg::store(p + kLanes<double>, high);
    }
    static constexpr int kRegisters = 2;
    RG_INLINE void take(Vec<double>* v) const {
        v[0] = low;
        v[1] = high;
    }
};
template <>
struct LaneSums<double> {
    Vec<double> lanes{};
    RG_INLINE void add(Vec<double> v) { lanes += v; }
    RG_INLINE void store(double* p) const { rg::store(p, lanes); }
    static constexpr int kRegisters = 1;
    RG_INLINE void take(Vec<double>* v) const { *v = lanes; }
};

#endif

RG_INLINE void add_to(double* p, Vec<double> v) { store(p, load(p) + v); }

template <class A>
RG_INLINE void add_to_part(double* p, int64_t n, Vec<A> v) {
    A lane[kLanes<A>];
    store(lane, v);
    for (int64_t i = 0; i < n; ++i) p[i] += lane[i];
}

// ---- half-width storage --------------------------------------------------------------------------------------------

struct Half {
    uint16_t bits;
};
struct BFloat {
    uint16_t bits;
};

RG_INLINE float to_float(float v) { return v; }
RG_INLINE float to_float(BFloat v) { return bit_cast<float>(uint32_t(v.bits) << 16); }
RG_INLINE float to_float(Half v) {
    const uint32_t magnitude = v.bits & 0x7fffu, sign = uint32_t(v.bits & 0x8000u) << 16;
    // A subnormal half is an integer multiple of 2^-24, exact in float; the others only need their exponent rebiased.
    const float subnormal = float(magnitude) * 0x1p-24f;
    uint32_t bits = magnitude < 0x0400u ? bit_cast<uint32_t>(subnormal) : (magnitude << 13) + ((127u - 15u) << 23);
    if (magnitude >= 0x7c00u) bits = 0x7f800000u | (magnitude << 13);
    if (magnitude > 0x7c00u) bits |= 0x400000u;  // NaN becomes quiet, as the instruction makes it
    return bit_cast<float>(bits | sign);
}

template <class T>
T from_float(float v);
template <>
RG_INLINE float from_float<float>(float v) {
    return v;
}
template <>
RG_INLINE BFloat from_float<BFloat>(float v) {
    const uint32_t bits = bit_cast<uint32_t>(v);
    if (v != v) return {uint16_t((bits >> 16) | 0x40u)};
    return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};  // to nearest, ties to even
}
template <>
RG_INLINE Half from_float<Half>(float v) {
    const uint32_t bits = bit_cast<uint32_t>(v), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
        half = 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 rounds to a multiple of 2^-24
        half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - bit_cast<uint32_t>(0.5f);
    } else {
        half = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    return {uint16_t(sign | half)};
}

// A whole vector of stored elements, as arithmetic.
RG_INLINE Vec<float> load_as(const float* p) { return load(p); }
RG_INLINE Vec<double> load_as(const double* p) { return load(p); }
RG_INLINE void store_as(float* p, Vec<float> v) { store(p, v); }
RG_INLINE void store_as(double* p, Vec<double> v) { store(p, v); }

#if defined(RG_ISA_AVX512)

RG_INLINE Vec<float> load_as(const Half* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
RG_INLINE void store_as(Half* p, Vec<float> v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
RG_INLINE Vec<float> load_as(const BFloat* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
RG_INLINE void store_as(BFloat* p, Vec<float> v) {
    const __m512i bits = _mm512_castps_si512(v), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i chosen = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q), quiet);
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16)));
}

#elif defined(RG_ISA_AVX2)

RG_INLINE Vec<float> load_as(const Half* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
RG_INLINE void store_as(Half* p, Vec<float> v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
RG_INLINE Vec<float> load_as(const BFloat* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
RG_INLINE void store_as(BFloat* p, Vec<float> v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}

#else

template <class T>
RG_INLINE Vec<float> load_as(const T* p) {
    float lane[kLanes<float>];
    for (int i = 0; i < kLanes<float>; ++i) lane[i] = to_float(p[i]);
    return load(lane);
}
template <class T>
RG_INLINE void store_as(T* p, Vec<float> v) {
    float lane[kLanes<float>];
    store(lane, v);
    for (int i = 0; i < kLanes<float>; ++i) p[i] = from_float<T>(lane[i]);
}

#endif

}  // namespace
}  // namespace rg
