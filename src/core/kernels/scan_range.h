// Steps of a linear recurrence, and what its driver does to blocks of steps. The contracts are in ../kernels.h.
#pragma once

#include "../kernels.h"
#include "norm_common.h"
#include "product.h"

namespace rg {
namespace {

// for k < kSteps, for all columns:  state = a[k] * state + b[k];  y[k] = state;  da[k] = state * before[k]
//
// A vector of states stays in a register for kSteps. Streamed steps come from memory: the next kSteps are prefetched.
template <class A, int kSteps, bool kStream, bool kDa>
void scan_group(const ScanSteps<A>& s, bool aligned, int64_t first) {
    const A *const a = s.a.data + first * s.a.stride, *const b = s.b.data + first * s.b.stride;
    const A* const before = kDa ? s.before.data + first * s.before.stride : nullptr;
    A *const y = s.y.data + first * s.y.stride, *const da = kDa ? s.da.data + first * s.da.stride : nullptr;
    const int64_t a_step = s.a.stride, b_step = s.b.stride, y_step = s.y.stride;
    [[maybe_unused]] const int64_t before_step = s.before.stride, da_step = s.da.stride;
    A* const state = s.state;
    for_vectors(aligned, y, s.size.cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
        Vec<A> h = read(state + i, n);
        if constexpr (kStream) {
            unrolled<kSteps>([&](int k) RG_INLINE_LAMBDA {
                prefetch(a + (k + kSteps) * a_step + i);
                prefetch(b + (k + kSteps) * b_step + i);
                if constexpr (kDa) prefetch(before + (k + kSteps) * before_step + i);
            });
        }
        unrolled<kSteps>([&](int k) RG_INLINE_LAMBDA {
            h = fma(read(a + k * a_step + i, n), h, read(b + k * b_step + i, n));
            write(kStream, y + k * y_step + i, n, h);
            if constexpr (kDa) write(kStream, da + k * da_step + i, n, h * read(before + k * before_step + i, n));
        });
        write(state + i, n, h);
    });
}

template <class A, int kSteps, bool kStream, bool kDa>
void scan_groups(const ScanSteps<A>& s, bool aligned) {
    int64_t r = 0;
    for (; r + kSteps <= s.size.rows; r += kSteps) scan_group<A, kSteps, kStream, kDa>(s, aligned, r);
    for (; r < s.size.rows; ++r) scan_group<A, 1, kStream, kDa>(s, aligned, r);
}

// Steps at once: from memory many, for more requests in flight; in cache fewer, and one by one where the rows of all
// arrays, a page apart, would fall into the same few places of a small first-level cache.
template <class A, bool kDa>
void scan_as(const ScanSteps<A>& s) {
    constexpr int64_t lanes = kLanes<A>, page = 4096 / int64_t(sizeof(A)), long_row = 1024;
    const bool alike = s.y.stride % lanes == 0;  // all rows of y are aligned if one is
    if constexpr (kCanStream) {
        bool stream = s.stream && s.size.cols >= (alike ? lanes : long_row);
        if (kDa) {  // and those of da too
            const int64_t apart = int64_t(uintptr_t(s.y.data) - uintptr_t(s.da.data));
            stream = stream && apart % (lanes * int64_t(sizeof(A))) == 0 && (s.y.stride - s.da.stride) % lanes == 0;
        }
        if (stream) return alike ? scan_groups<A, 4, true, kDa>(s, true) : scan_groups<A, 1, true, kDa>(s, true);
    }
    const bool aligned = alike && s.size.cols >= 8 * lanes;
    if (kDa && s.y.stride % page == 0) return scan_groups<A, 1, false, kDa>(s, aligned);
    scan_groups<A, 2, false, kDa>(s, aligned);
}

// The same for one column, whose steps wait for one another.
#if defined(RG_ISA_SCALAR)
template <class A>
RG_INLINE A fma_one(A a, A b, A c) {
    return fma(a, b, c);
}
#else
RG_INLINE float fma_one(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
RG_INLINE double fma_one(double a, double b, double c) { return __builtin_fma(a, b, c); }
#endif
template <class A>
void scan_column(const ScanSteps<A>& s) {
    A h = *s.state;
    for (int64_t r = 0; r < s.size.rows; ++r) {
        h = fma_one(s.a.data[r * s.a.stride], h, s.b.data[r * s.b.stride]);
        if (s.da.data) s.da.data[r * s.da.stride] = h * s.before.data[r * s.before.stride];
        s.y.data[r * s.y.stride] = h;
    }
    *s.state = h;
}

template <class A>
void scan_steps(const ScanSteps<A>& s) {
    if (s.size.cols == 1) return scan_column(s);
    s.da.data ? scan_as<A, true>(s) : scan_as<A, false>(s);
}

template <class A>
void clear_where(const uint8_t* reset, int64_t step, int64_t count, A* x) {
    if (step == 0) {
        if (*reset) __builtin_memset(x, 0, size_t(count) * sizeof(A));
        return;
    }
    for (int64_t i = 0; i < count; ++i) x[i] = reset[i * step] ? A(0) : x[i];
}

template <class A>
void transpose_block(const A* from, int64_t from_row, BlockSize size, A* to, int64_t to_row) {
    constexpr int64_t lanes = kLanes<A>;
    const int64_t rows = size.rows / lanes * lanes, cols = size.cols / lanes * lanes;
    for (int64_t r = 0; r < rows; r += lanes) {
        for (int64_t c = 0; c < cols; c += lanes) {
            transpose_square(from + r * from_row + c, from_row, to + c * to_row + r, to_row);
        }
    }
    for (int64_t r = 0; r < size.rows; ++r) {
        for (int64_t c = r < rows ? cols : 0; c < size.cols; ++c) to[c * to_row + r] = from[r * from_row + c];
    }
}

}  // namespace
}  // namespace rg
