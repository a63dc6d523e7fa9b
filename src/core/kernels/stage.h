// Conversion from storage to arithmetic and back: dtypes, strides, accumulation, non-temporal stores.
#pragma once

#include "vec.h"

namespace rg {
namespace {

template <class T, class A>
RG_INLINE A element_as(T v) {
    if constexpr (sizeof(T) == sizeof(double)) {
        return A(v);
    } else {
        return A(to_float(v));
    }
}
template <class T, class A>
RG_INLINE T element_from(A v) {
    if constexpr (sizeof(T) == sizeof(double)) {
        return T(v);
    } else {
        return from_float<T>(float(v));
    }
}

template <class T, class A>
void load_elements(const T* src, int64_t stride, int64_t count, A* dst) {
    int64_t i = 0;
    if (stride == 1) {
        for (; i + kLanes<A> <= count; i += kLanes<A>) store(dst + i, load_as(src + i));
    }
    for (; i < count; ++i) dst[i] = element_as<T, A>(src[i * stride]);
}

template <class T, class A>
void store_elements(const A* src, int64_t count, T* dst, int64_t stride, bool accumulate) {
    int64_t i = 0;
    if (stride == 1) {
        for (; i + kLanes<A> <= count; i += kLanes<A>) {
            const Vec<A> v = load(src + i);
            store_as(dst + i, accumulate ? v + load_as(dst + i) : v);
        }
    }
    for (; i < count; ++i) {
        const A v = src[i];
        T& out = dst[i * stride];
        out = element_from<T, A>(accumulate ? v + element_as<T, A>(out) : v);
    }
}

// Whole aligned vectors are written with non-temporal stores; the head and tail of the range are not.
template <class A>
void stream_elements(const A* src, int64_t count, A* dst) {
    constexpr int64_t bytes = kLanes<A> * int64_t(sizeof(A));
    const int64_t misaligned = int64_t(uintptr_t(dst) % uintptr_t(bytes));
    const int64_t head = misaligned ? (bytes - misaligned) / int64_t(sizeof(A)) : 0;
    int64_t i = head < count ? head : count;
    store_elements<A, A>(src, i, dst, 1, false);
    for (; i + kLanes<A> <= count; i += kLanes<A>) stream(dst + i, load(src + i));
    store_elements<A, A>(src + i, count - i, dst + i, 1, false);
}

// The storage types of each arithmetic type: f32, f16 and bf16 for float, f64 for double.
void load_block(DType dtype, const void* src, int64_t stride, int64_t count, float* dst) {
    if (dtype == DType::f16) return load_elements<Half, float>((const Half*)src, stride, count, dst);
    if (dtype == DType::bf16) return load_elements<BFloat, float>((const BFloat*)src, stride, count, dst);
    load_elements<float, float>((const float*)src, stride, count, dst);
}
void load_block(DType, const void* src, int64_t stride, int64_t count, double* dst) {
    load_elements<double, double>((const double*)src, stride, count, dst);
}

void store_block(DType dtype, const float* src, int64_t count, void* dst, int64_t stride, bool accumulate,
                 bool stream) {
    if (dtype == DType::f16) return store_elements<Half, float>(src, count, (Half*)dst, stride, accumulate);
    if (dtype == DType::bf16) return store_elements<BFloat, float>(src, count, (BFloat*)dst, stride, accumulate);
    if (stream && stride == 1 && !accumulate) return stream_elements<float>(src, count, (float*)dst);
    store_elements<float, float>(src, count, (float*)dst, stride, accumulate);
}
void store_block(DType, const double* src, int64_t count, void* dst, int64_t stride, bool accumulate, bool stream) {
    if (stream && stride == 1 && !accumulate) return stream_elements<double>(src, count, (double*)dst);
    store_elements<double, double>(src, count, (double*)dst, stride, accumulate);
}

template <int kCount, bool kStream>
void add_streams_as(const float* const* sources, int64_t elements, float* dst) {
    const float *a = sources[0], *b = sources[kCount > 1 ? 1 : 0], *c = sources[kCount > 2 ? 2 : 0];
    for (int64_t i = 0; i + kLanes<float> <= elements; i += kLanes<float>) {
        Vec<float> v = load(a + i);
        if (kCount > 1) v += load(b + i);
        if (kCount > 2) v += load(c + i);
        kStream ? stream(dst + i, v) : store(dst + i, v);
    }
}

void add_streams(const float* const* sources, int count, int64_t elements, float* dst, bool stream) {
    const auto form = count == 1   ? (stream ? add_streams_as<1, true> : add_streams_as<1, false>)
                      : count == 2 ? (stream ? add_streams_as<2, true> : add_streams_as<2, false>)
                                   : (stream ? add_streams_as<3, true> : add_streams_as<3, false>);
    form(sources, elements, dst);
}

// Independent chains, as many as hide the latency of a multiply-add and fit in registers.
double multiply_adds(int64_t steps, float* result) {
#if defined(RG_ISA_AVX512) || defined(RG_ISA_NEON)
    constexpr int kChains = 24;
#else
    constexpr int kChains = 12;
#endif
    // Each chain converges to 1: no overflow, no subnormal numbers.
    const Vec<float> factor = splat(0.5f), term = splat(0.5f);
    Vec<float> chain[kChains];
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) chain[i] = splat(float(i));
    for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 24
        for (int i = 0; i < kChains; ++i) chain[i] = fma(chain[i], factor, term);
    }
    Vec<float> sum = chain[0];
#pragma GCC unroll 24
    for (int i = 1; i < kChains; ++i) sum += chain[i];
    float lanes[kLanes<float>];
    store(lanes, sum);
    *result = lanes[0];
    return 2.0 * double(kLanes<float>) * double(kChains) * double(steps);
}

}  // namespace
}  // namespace rg
