// Steps of a linear recurrence, and what its driver does to blocks of steps. The contracts are in ../kernels.h.
#pragma once

#include "../kernels.h"
#include "norm_common.h"
#include "product.h"

namespace rg {
namespace {

// for k < kSteps, for all columns:  state = a[k] * state + b[k];  y[k] = state;  da[k] = state * before[k]
//
// A vector of states stays in a register for kSteps. Of steps in memory, the next kSteps are prefetched.
template <class A, int kSteps, bool kFar, bool kStream, bool kDa>
void scan_group(const ScanSteps<A>& s, bool aligned, int64_t first) {
    const A *const a = s.a.data + first * s.a.stride, *const b = s.b.data + first * s.b.stride;
    const A* const before = kDa ? s.before.data + first * s.before.stride : nullptr;
    A *const y = s.y.data + first * s.y.stride, *const da = kDa ? s.da.data + first * s.da.stride : nullptr;
    const int64_t a_step = s.a.stride, b_step = s.b.stride, y_step = s.y.stride;
    [[maybe_unused]] const int64_t before_step = s.before.stride, da_step = s.da.stride;
    A* const state = s.state;
    for_vectors(aligned, y, s.size.cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
        Vec<A> h = read(state + i, n);
        if constexpr (kFar) {
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

template <class A, int kSteps, bool kFar, bool kStream, bool kDa>
void scan_groups(const ScanSteps<A>& s, bool aligned) {
    int64_t r = 0;
    for (; r + kSteps <= s.size.rows; r += kSteps) scan_group<A, kSteps, kFar, kStream, kDa>(s, aligned, r);
    for (; r < s.size.rows; ++r) scan_group<A, 1, kFar, kStream, kDa>(s, aligned, r);
}

// Steps at once: from memory many, for more requests in flight; in cache fewer, and one by one where the rows of all
// arrays, a page apart, would fall into the same few places of a small first-level cache.
template <class A, bool kDa>
void scan_as(const ScanSteps<A>& s) {
    constexpr int64_t lanes = kLanes<A>, line = 64 / int64_t(sizeof(A)), page = 4096 / int64_t(sizeof(A));
    constexpr int64_t long_row = 1024;
    const bool alike = s.y.stride % lanes == 0;  // all rows of y are aligned if one is
    if constexpr (kCanStream) {
        // Short rows must end at cache lines: half a line leaves the processor alone, at the price of many.
        bool stream = s.stream && s.size.cols >= (s.y.stride % line == 0 ? lanes : long_row);
        if (kDa) {  // and those of da too
            const int64_t apart = int64_t(uintptr_t(s.y.data) - uintptr_t(s.da.data));
            stream = stream && apart % (lanes * int64_t(sizeof(A))) == 0 && (s.y.stride - s.da.stride) % lanes == 0;
        }
        if (stream) {
            return alike ? scan_groups<A, 4, true, true, kDa>(s, true) : scan_groups<A, 1, true, true, kDa>(s, true);
        }
    }
    const bool aligned = alike && s.size.cols >= 8 * lanes;
    if (s.far) return scan_groups<A, 4, true, false, kDa>(s, aligned);
    if (kDa && s.y.stride % page == 0) return scan_groups<A, 1, false, false, kDa>(s, aligned);
    scan_groups<A, 2, false, false, kDa>(s, aligned);
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

// ---- sequences -----------------------------------------------------------------------------------------------------

// Steps [from, to) of one sequence, one by one; the state is that of the sequence.
template <class A>
void walk_sequence(const ScanSequences<A>& s, int64_t sequence, int64_t from, int64_t to) {
    if (from >= to) return;
    const int64_t first = s.down ? to - 1 : from, step = s.down ? -1 : 1;
    const auto at = [&](const auto& rows) { return rows.data + sequence * rows.stride + first; };
    const A* const a = s.constant ? s.a.data + sequence * s.a.stride : at(s.a);
    const A *const b = at(s.b), *const before = s.da.data ? at(s.before) : nullptr;
    A *const y = s.y.data ? at(s.y) : nullptr, *const da = s.da.data ? at(s.da) : nullptr;
    A h = s.state[sequence];
    for (int64_t i = 0; i != (to - from) * step; i += step) {
        h = fma_one(a[s.constant ? 0 : i], h, b[i]);
        if (da) da[i] = h * before[i];
        if (y) y[i] = h;
    }
    s.state[sequence] = h;
}

#if !defined(RG_ISA_SCALAR)

// A vector has one state of each of `live` sequences from `first` on; the lanes past them repeat the last. A square of
// steps and sequences is transposed in registers, stepped through, and transposed back.
//
// Sequences are independent, so each may be at another time: where results are streamed, every sequence is cut at the
// cache lines of its own y, and the steps before the first line and past the last are taken one by one.
//
// Memory and the tables of pages like long runs of one sequence: kBurst lines are prefetched at once, and the results
// of kHeld lines are written, and multiplied by the states before them, sequence by sequence.
template <class A, bool kDown, bool kDa>
void scan_lanes(const ScanSequences<A>& s, int64_t first, int64_t live) {
    constexpr int lanes = kLanes<A>;
    constexpr int64_t line = 64 / int64_t(sizeof(A));
    constexpr int64_t kHeld = 8, kBurst = 4;
    const auto address = [](const A* p) { return int64_t(uintptr_t(p) / sizeof(A)); };
    const bool stream_da = kDa && s.stream && (address(s.y.data) - address(s.da.data)) % line == 0 &&
                           (s.y.stride - s.da.stride) % line == 0;
    int64_t begin[lanes], lines = s.steps / line;  // begin: of the steps in whole lines; then of the next line
    for (int c = 0; c < lanes; ++c) {
        const A* const y = s.y.data + (first + (c < live ? c : live - 1)) * s.y.stride;
        const int64_t edge = !s.stream ? 0 : kDown ? address(y + s.steps) % line : (line - address(y) % line) % line;
        begin[c] = kDown ? s.steps - edge : edge;
        const int64_t whole = (s.steps - edge) / line;
        lines = whole < lines ? whole : lines;
    }
    if (lines <= 0) {
        for (int64_t c = first; c < first + live; ++c) walk_sequence(s, c, 0, s.steps);
        return;
    }
    const A *a[lanes], *b[lanes], *before[lanes];
    A *y[lanes], *da[lanes];
    for (int c = 0; c < lanes; ++c) {
        const int64_t sequence = first + (c < live ? c : live - 1);
        if (c < live) kDown ? walk_sequence(s, sequence, begin[c], s.steps) : walk_sequence(s, sequence, 0, begin[c]);
        const int64_t start = begin[c] - (kDown ? line : 0);
        a[c] = s.a.data + sequence * s.a.stride + (s.constant ? 0 : start);
        b[c] = s.b.data + sequence * s.b.stride + start;
        y[c] = s.y.data ? s.y.data + sequence * s.y.stride + start : nullptr;
        if constexpr (kDa) {
            before[c] = s.before.data + sequence * s.before.stride + start;
            da[c] = s.da.data + sequence * s.da.stride + start;
        }
    }
    alignas(64) A lane[lanes], held[lanes][kHeld * line];
    for (int c = 0; c < lanes; ++c) lane[c] = s.state[first + (c < live ? c : live - 1)];
    Vec<A> h = load(lane), factor{};
    if (s.constant) {
        for (int c = 0; c < lanes; ++c) lane[c] = *a[c];
        factor = load(lane);
    }
    for (int64_t n = 0, count; n < lines; n += count) {
        count = lines - n < kHeld ? lines - n : kHeld;
        const int64_t low = (kDown ? -(n + count - 1) : n) * line;
        for (int64_t m = 0; m < count; ++m) {
            const int64_t slot = (kDown ? count - 1 - m : m) * line, at = low + slot;
            if (s.stream) {
                for (int c = 0; c < live && m % kBurst == 0; ++c) {
                    const int64_t next = at + (kDown ? 1 - 2 * kBurst : kBurst) * line;
                    for (int k = 0; k < kBurst && !s.constant; ++k) prefetch(a[c] + next + k * line);
                    for (int k = 0; k < kBurst; ++k) prefetch(b[c] + next + k * line);
                }
                if constexpr (kDa) {
                    for (int64_t c = live * m / count; c < live * (m + 1) / count; ++c) {
                        for (int64_t i = 0; i < count; ++i) prefetch(before[c] + low + i * line);
                    }
                }
            }
            for (int64_t part = 0; part < line; part += lanes) {
                const int64_t i = kDown ? line - lanes - part : part;
                Vec<A> as[lanes], hs[lanes];
                if (s.constant) {
                    unrolled<lanes>([&](int c) RG_INLINE_LAMBDA { as[c] = factor; });
                } else {
                    load_transposed<A>(a, at + i, as);
                }
                load_transposed<A>(b, at + i, hs);
                unrolled<lanes>([&](int k) RG_INLINE_LAMBDA {
                    const int t = kDown ? lanes - 1 - k : k;
                    hs[t] = h = fma(as[t], h, hs[t]);
                });
                transpose_rows<A>(hs);
                unrolled<lanes>([&](int c) RG_INLINE_LAMBDA { store(held[c] + slot + i, hs[c]); });
            }
        }
        for (int c = 0; c < live; ++c) {
            for (int64_t i = 0; i < count * line; i += lanes) {
                const Vec<A> l = load(held[c] + i);
                if constexpr (kDa) write(stream_da, da[c] + low + i, 0, l * load(before[c] + low + i));
                if (y[c]) write(s.stream, y[c] + low + i, 0, l);
            }
        }
    }
    store(lane, h);
    for (int c = 0; c < live; ++c) {
        s.state[first + c] = lane[c];
        const int64_t done = begin[c] + (kDown ? -lines : lines) * line;
        kDown ? walk_sequence(s, first + c, 0, done) : walk_sequence(s, first + c, done, s.steps);
    }
}

#endif

template <class A>
void scan_sequences(const ScanSequences<A>& given) {
    ScanSequences<A> s = given;
    s.stream = s.stream && kCanStream && s.y.data;
    int64_t c = 0;
#if !defined(RG_ISA_SCALAR)
    constexpr int64_t lanes = kLanes<A>, few = 2;  // one by one is faster
    for (; s.sequences - c > few; c += lanes) {
        const int64_t live = s.sequences - c < lanes ? s.sequences - c : lanes;
        if (s.da.data) {
            s.down ? scan_lanes<A, true, true>(s, c, live) : scan_lanes<A, false, true>(s, c, live);
        } else {
            s.down ? scan_lanes<A, true, false>(s, c, live) : scan_lanes<A, false, false>(s, c, live);
        }
    }
#endif
    for (; c < s.sequences; ++c) walk_sequence(s, c, 0, s.steps);
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
