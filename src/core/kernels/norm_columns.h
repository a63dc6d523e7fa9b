// Normalization of columns: each column has its own statistics and parameters.
//
// Sums over a column are chains over kColumnChain of its rows in the arithmetic type. Two of them are added, which
// makes kColumnRows rows, and the result is added to a double. The width of vectors does not matter.
#pragma once

#include "norm_common.h"

namespace rg {
namespace {

constexpr int kColumnChain = kColumnRows / 2;

// Vectors of columns that are summed together: two cache lines or more of each row, and few enough for 16 registers.
constexpr int kColumnStrip = 4;

// Calls body(row, rows, strip, i, n) for each group of rows, then for strips of columns: kColumnStrip vectors, or one
// of n lanes (0: all).
template <int kVectors>
struct Strip {
    static constexpr int vectors = kVectors;
};
template <class A, class Body>
RG_INLINE void for_strips(BlockSize size, Body body) {
    constexpr int64_t lanes = kLanes<A>;
    for (int64_t row = 0; row < size.rows; row += kColumnRows) {
        const int64_t rows = size.rows - row < kColumnRows ? size.rows - row : kColumnRows;
        int64_t i = 0;
        for (; i + kColumnStrip * lanes <= size.cols; i += kColumnStrip * lanes) {
            body(row, rows, Strip<kColumnStrip>(), i, int64_t(0));
        }
        for (; i < size.cols; i += lanes) {
            body(row, rows, Strip<1>(), i, size.cols - i < lanes ? size.cols - i : int64_t(0));
        }
    }
}

// How far ahead of a strip to prefetch: whole rows, at least the next group of them, and enough bytes to hide the
// latency of memory. A strip of a longer row visits cache lines in an order that hardware prefetchers do not follow; if
// the strip is the whole row, they do better alone.
template <class A>
RG_INLINE int64_t rows_ahead(int64_t stride, int64_t cols) {
    constexpr int64_t elements = (32 << 10) / int64_t(sizeof(A));
    const int64_t step = stride < 0 ? -stride : stride;
    if (cols <= kColumnStrip * kLanes<A> || step == 0) return 0;
    return step * kColumnRows >= elements ? kColumnRows * stride : elements / step * stride;
}
// Prefetches for vector v of a strip, once per cache line.
template <class A>
RG_INLINE void prefetch_line(const A* p, int v) {
    if (kHasParts<A> && v * kLanes<A> * int(sizeof(A)) % 64 == 0) prefetch(p);
}

// Coefficients of the columns from i on.
template <class A, int kVectors>
struct ColumnVectors {
    Vec<A> at[kVectors];
    RG_INLINE ColumnVectors(const A* from, int64_t i, int64_t n) {
        unrolled<kVectors>([&](int v) RG_INLINE_LAMBDA { at[v] = read(from + i + v * kLanes<A>, n); });
    }
};

// Adds two sums over each column to arrays. terms(row, strip, i, n) prepares for rows from `row` on and columns from i
// on: it returns term(v, s, q), which adds the terms of the strip's vector v and goes to the next row after the last.
template <class A, class Terms>
RG_INLINE void sum_columns(BlockSize size, double* first, double* second, Terms terms) {
    for_strips<A>(size, [&](int64_t row, int64_t rows, auto strip, int64_t i, int64_t n) RG_INLINE_LAMBDA {
        constexpr int vectors = strip.vectors;
        auto term = terms(row, strip, i, n);
        Vec<A> s[vectors] = {}, q[vectors] = {};
        for (int64_t r = 0; r < rows;) {
            Vec<A> chain_s[vectors] = {}, chain_q[vectors] = {};
            const int64_t end = rows - r < kColumnChain ? rows : r + kColumnChain;
            for (; r < end; ++r) {
                unrolled<vectors>([&](int v) RG_INLINE_LAMBDA { term(v, chain_s[v], chain_q[v]); });
            }
            unrolled<vectors>([&](int v) RG_INLINE_LAMBDA { s[v] += chain_s[v], q[v] += chain_q[v]; });
        }
        unrolled<vectors>([&](int v) RG_INLINE_LAMBDA {
            add<A>(first + i + v * kLanes<A>, n, s[v]);
            add<A>(second + i + v * kLanes<A>, n, q[v]);
        });
    });
}

template <class A>
void col_moments(BlockSize size, Run<const A> x, const A* center, double* sum, double* sum_sq) {
    const int64_t ahead = rows_ahead<A>(x.stride, size.cols);
    sum_columns<A>(size, sum, sum_sq, [&](int64_t row, auto strip, int64_t i, int64_t n) RG_INLINE_LAMBDA {
        constexpr int vectors = strip.vectors;
        const ColumnVectors<A, vectors> c(center, i, n);
        const A* at = x.data + row * x.stride + i;
        return [=, stride = x.stride](int v, Vec<A>& s, Vec<A>& q) RG_INLINE_MUTABLE {
            const int64_t j = v * kLanes<A>;
            prefetch_line(at + j + ahead, v);
            const Vec<A> d = read(at + j, n) - c.at[v];
            s += d;
            q = fma(d, d, q);
            if (v + 1 == vectors) at += stride;
        };
    });
}

template <class A>
void col_moments_wide(BlockSize size, Run<const A> x, const double* center, double* sum, double* sum_sq) {
    for (int64_t row = 0; row < size.rows; ++row, x.data += x.stride) {
        for (int64_t i = 0; i < size.cols; ++i) {
            const double d = double(x.data[i]) - center[i];
            sum[i] += d;
            sum_sq[i] += d * d;
        }
    }
}

template <ActivationKind kAct, class A>
void col_sums_as(BlockSize size, Run<const A> x, Gradient<A> g, Standardization<const A*> statistics, double* sum_dz,
                 double* sum_dz_xhat) {
    const int64_t ahead = rows_ahead<A>(x.stride, size.cols), dy_ahead = rows_ahead<A>(g.dy_stride, size.cols);
    const int64_t y_ahead = rows_ahead<A>(g.y_stride, size.cols);
    sum_columns<A>(size, sum_dz, sum_dz_xhat, [&](int64_t row, auto strip, int64_t i, int64_t n) RG_INLINE_LAMBDA {
        constexpr int vectors = strip.vectors;
        const ColumnVectors<A, vectors> c(statistics.center, i, n), m(statistics.rstd, i, n);
        const ColumnVectors<A, vectors> o(statistics.offset, i, n);
        const A *at = x.data + row * x.stride + i, *dy = g.dy + row * g.dy_stride + i, *y = g.y + row * g.y_stride + i;
        return [=, stride = x.stride](int v, Vec<A>& s, Vec<A>& q) RG_INLINE_MUTABLE {
            const int64_t j = v * kLanes<A>;
            prefetch_line(at + j + ahead, v);
            prefetch_line(dy + j + dy_ahead, v);
            if (kAct != ActivationKind::identity) prefetch_line(y + j + y_ahead, v);
            const Vec<A> dz = read_dz<kAct>(dy + j, y + j, n);
            s += dz;
            q = fma(dz, fma(read(at + j, n) - c.at[v], m.at[v], o.at[v]), q);
            if (v + 1 == vectors) at += stride, dy += g.dy_stride, y += g.y_stride;
        };
    });
}

template <class A>
void col_sums(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<const A*> statistics,
              double* sum_dz, double* sum_dz_xhat) {
    with_fused(dz.activation,
               [&](auto fused) { col_sums_as<fused.kind>(size, x, dz, statistics, sum_dz, sum_dz_xhat); });
}

// Writing passes go row by row, in the order of memory: the coefficients stay in the first-level cache.
template <ActivationKind kAct, class Streamed, class A>
void col_apply_as(Streamed streamed, BlockSize size, Run<const A> x, Affine<const A*> z, Target<A> y) {
    for (int64_t row = 0; row < size.rows; ++row, x.data += x.stride, y.data += y.stride) {
        for_vectors(streamed.value, y.data, size.cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
            const Vec<A> c = read(z.center + i, n), m = read(z.scale + i, n), b = read(z.shift + i, n);
            write(streamed.value, y.data + i, n, value_of<kAct, A>(fma(read(x.data + i, n) - c, m, b)));
        });
    }
}

template <class A>
void col_apply(BlockSize size, Run<const A> x, Affine<const A*> z, ActivationKind f, Target<A> y) {
    with_fused(f, [&](auto fused) {
        with_stream<fused.kind>(y.stream, [&](auto streamed) { col_apply_as<fused.kind>(streamed, size, x, z, y); });
    });
}

template <ActivationKind kAct, class Streamed, class A>
void col_dx_as(Streamed streamed, BlockSize size, Run<const A> x, Gradient<A> g, Standardization<const A*> statistics,
               DxCoefficients<const A*> coefficients, Target<A> dx) {
    for (int64_t row = 0; row < size.rows; ++row, g.dy += g.dy_stride, g.y += g.y_stride, dx.data += dx.stride) {
        if (!x.data) {
            for_vectors(streamed.value, dx.data, size.cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
                write(streamed.value, dx.data + i, n, read(coefficients.a + i, n) * read_dz<kAct>(g, i, n));
            });
            continue;
        }
        for_vectors(streamed.value, dx.data, size.cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
            const Vec<A> c = read(statistics.center + i, n), m = read(statistics.rstd + i, n);
            const Vec<A> xhat = fma(read(x.data + i, n) - c, m, read(statistics.offset + i, n));
            const Vec<A> rest = fma(read(coefficients.b + i, n), xhat, read(coefficients.k + i, n));
            write(streamed.value, dx.data + i, n, fma(read(coefficients.a + i, n), read_dz<kAct>(g, i, n), rest));
        });
        x.data += x.stride;
    }
}

template <class A>
void col_dx(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<const A*> statistics,
            DxCoefficients<const A*> coefficients, Target<A> dx) {
    with_fused(dz.activation, [&](auto fused) {
        with_stream<fused.kind>(dx.stream, [&](auto streamed) {
            col_dx_as<fused.kind>(streamed, size, x, dz, statistics, coefficients, dx);
        });
    });
}

}  // namespace
}  // namespace rg
