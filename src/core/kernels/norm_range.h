// Normalization over one block: sums, and the elementwise passes that use them. The contracts are in ../kernels.h.
//
// Sums of float run in float for at most kFlush vectors a lane and then move into doubles: the error of so short a sum,
// averaged over the lanes, is far below the rounding of the result, at a third of the cost of converting every element.
#pragma once

#include "vec.h"

namespace rg {
namespace {

constexpr int kChains = 4;  // independent sums, to hide the latency of addition
constexpr int kFlush = 16;

// Two running sums over vectors of A, four chains each.
template <class A>
struct PairSum {
    Vec<A> first[kChains] = {}, second[kChains] = {};
    Sum<A> first_total, second_total;
    int pending = 0;

    RG_INLINE void flush() {
        first_total.add((first[0] + first[1]) + (first[2] + first[3]));
        second_total.add((second[0] + second[1]) + (second[2] + second[3]));
        for (int k = 0; k < kChains; ++k) first[k] = second[k] = Vec<A>{};
        pending = 0;
    }
    // Feeds `cols` elements: term(i, chain) handles a whole vector at i, last(i, n) the rest.
    template <class Term, class Last>
    RG_INLINE void run(int64_t cols, Term term, Last last) {
        constexpr int64_t lanes = kLanes<A>;
        int64_t i = 0;
        while (cols - i >= kChains * lanes) {
            const int64_t steps = (cols - i) / (kChains * lanes);
            const int64_t now = steps < kFlush - pending ? steps : kFlush - pending;
            for (int64_t step = 0; step < now; ++step, i += kChains * lanes) {
                for (int k = 0; k < kChains; ++k) term(i + k * lanes, first[k], second[k]);
            }
            pending += int(now);
            if (pending >= kFlush) flush();
        }
        int k = 0;
        for (; i + lanes <= cols; i += lanes, ++k) term(i, first[k], second[k]);
        if (i < cols) last(i, cols - i, first[kChains - 1], second[kChains - 1]);
        if (++pending >= kFlush) flush();
    }
    RG_INLINE void total(double* sums) {
        flush();
        sums[0] += first_total.total();
        sums[1] += second_total.total();
    }
};

template <class A>
void plane_moments(const A* x, int64_t rows, int64_t cols, int64_t x_stride, A center, double* sums) {
    const Vec<A> c = splat(center);
    PairSum<A> sum;
    for (int64_t row = 0; row < rows; ++row, x += x_stride) {
        const auto add = [&](Vec<A> v, Vec<A>& s, Vec<A>& q) {
            const Vec<A> d = v - c;
            s += d;
            q = fma(d, d, q);
        };
        sum.run(
            cols, [&](int64_t i, Vec<A>& s, Vec<A>& q) { add(load(x + i), s, q); },
            [&](int64_t i, int64_t n, Vec<A>& s, Vec<A>& q) { add(load_part(x + i, n, c), s, q); });
    }
    sum.total(sums);
}

// Every element as a double. Eight sums side by side let the compiler use whatever vectors it has.
template <class A>
void plane_moments_wide(const A* x, int64_t rows, int64_t cols, int64_t x_stride, double center, double* sums) {
    double s[8] = {}, q[8] = {};
    for (int64_t row = 0; row < rows; ++row, x += x_stride) {
        int64_t i = 0;
        for (; i + 8 <= cols; i += 8) {
            for (int k = 0; k < 8; ++k) {
                const double d = double(x[i + k]) - center;
                s[k] += d;
                q[k] += d * d;
            }
        }
        for (int k = 0; i < cols; ++i, ++k) {
            const double d = double(x[i]) - center;
            s[k] += d;
            q[k] += d * d;
        }
    }
    for (int k = 0; k < 8; ++k) {
        sums[0] += s[k];
        sums[1] += q[k];
    }
}

template <class A>
void plane_apply(const A* x, int64_t rows, int64_t cols, int64_t x_stride, A center, A scale, A shift, A* y,
                 int64_t y_stride) {
    const Vec<A> c = splat(center), m = splat(scale), b = splat(shift);
    for (int64_t row = 0; row < rows; ++row, x += x_stride, y += y_stride) {
        int64_t i = 0;
        for (; i + kLanes<A> <= cols; i += kLanes<A>) store(y + i, fma(load(x + i) - c, m, b));
        if (i < cols) store_part(y + i, cols - i, fma(load_part(x + i, cols - i, c) - c, m, b));
    }
}

template <class A>
void plane_sums(const A* x, const A* dz, int64_t rows, int64_t cols, int64_t x_stride, int64_t dz_stride, A center,
                A rstd, A offset, double* sums) {
    const Vec<A> c = splat(center), m = splat(rstd), o = splat(offset);
    PairSum<A> sum;
    for (int64_t row = 0; row < rows; ++row, x += x_stride, dz += dz_stride) {
        const auto add = [&](Vec<A> v, Vec<A> g, Vec<A>& s, Vec<A>& q) {
            s += g;
            q = fma(g, fma(v - c, m, o), q);
        };
        sum.run(
            cols, [&](int64_t i, Vec<A>& s, Vec<A>& q) { add(load(x + i), load(dz + i), s, q); },
            [&](int64_t i, int64_t n, Vec<A>& s, Vec<A>& q) {
                add(load_part(x + i, n, c), load_part(dz + i, n, splat(A(0))), s, q);
            });
    }
    sum.total(sums);
}

template <class A>
void plane_dx(const A* x, const A* dz, int64_t rows, int64_t cols, int64_t x_stride, int64_t dz_stride, A center, A a,
              A b, A k, A* dx, int64_t dx_stride) {
    const Vec<A> c = splat(center), va = splat(a), vb = splat(b), vk = splat(k);
    if (!x) {
        for (int64_t row = 0; row < rows; ++row, dz += dz_stride, dx += dx_stride) {
            int64_t i = 0;
            for (; i + kLanes<A> <= cols; i += kLanes<A>) store(dx + i, va * load(dz + i));
            if (i < cols) store_part(dx + i, cols - i, va * load_part(dz + i, cols - i, va));
        }
        return;
    }
    for (int64_t row = 0; row < rows; ++row, x += x_stride, dz += dz_stride, dx += dx_stride) {
        const auto value = [&](Vec<A> v, Vec<A> g) { return fma(va, g, fma(vb, v - c, vk)); };
        int64_t i = 0;
        for (; i + kLanes<A> <= cols; i += kLanes<A>) store(dx + i, value(load(x + i), load(dz + i)));
        if (i < cols) {
            const int64_t n = cols - i;
            store_part(dx + i, n, value(load_part(x + i, n, c), load_part(dz + i, n, c)));
        }
    }
}

// ---- rows ----------------------------------------------------------------------------------------------------------

// Whether the squares neither overflowed in float nor vanished where eps is small enough for that to show.
template <class A>
RG_INLINE bool in_float_range(double m2, double count, double eps) {
    return sizeof(A) > sizeof(float) || (m2 < 1e36 && (eps > 1e-25 || m2 > count * 1e-30));
}

template <class A>
void row_moments(const A* x, int64_t rows, int64_t cols, int64_t x_stride, double eps, double* mean, double* var) {
    const double count = double(cols);
    for (int64_t row = 0; row < rows; ++row, x += x_stride) {
        // A first mean from plain sums is good enough to center on: what it is off by comes out of the second pass.
        Vec<A> chain[kChains] = {};
        int64_t i = 0;
        for (; i + kChains * kLanes<A> <= cols; i += kChains * kLanes<A>) {
            for (int k = 0; k < kChains; ++k) chain[k] += load(x + i + k * kLanes<A>);
        }
        for (; i + kLanes<A> <= cols; i += kLanes<A>) chain[0] += load(x + i);
        if (i < cols) chain[1] += load_part(x + i, cols - i, splat(A(0)));
        Sum<A> first;
        first.add((chain[0] + chain[1]) + (chain[2] + chain[3]));
        double center = double(A(first.total() / count));

        double sums[2] = {};
        plane_moments<A>(x, 1, cols, x_stride, A(center), sums);
        double deviation = sums[1] - sums[0] * sums[0] / count;
        if (!in_float_range<A>(deviation, count, eps)) {
            double wide[2] = {};
            plane_moments_wide<A>(x, 1, cols, x_stride, 0.0, wide);
            center = wide[0] / count;
            sums[0] = sums[1] = 0;
            plane_moments_wide<A>(x, 1, cols, x_stride, center, sums);
            deviation = sums[1] - sums[0] * sums[0] / count;
            if (center - center != 0) sums[0] = 0;  // infinite data: so is the mean, and the variance is undefined
        }
        mean[row] = center + sums[0] / count;
        var[row] = deviation < 0 ? 0 : deviation / count;
    }
}

template <class A, bool kGamma, bool kBeta>
RG_INLINE void row_apply_as(const A* x, int64_t rows, int64_t cols, int64_t x_stride, const A* center, const A* rstd,
                            const A* offset, const A* gamma, const A* beta, A* y, int64_t y_stride) {
    for (int64_t row = 0; row < rows; ++row, x += x_stride, y += y_stride) {
        const Vec<A> c = splat(center[row]), m = splat(rstd[row]), o = splat(offset[row]);
        const auto value = [&](Vec<A> v, Vec<A> g, Vec<A> b) {
            const Vec<A> xhat = fma(v - c, m, o);
            if constexpr (kGamma) return fma(xhat, g, b);
            return kBeta ? xhat + b : xhat;
        };
        int64_t i = 0;
        for (; i + kLanes<A> <= cols; i += kLanes<A>) {
            store(y + i, value(load(x + i), kGamma ? load(gamma + i) : c, kBeta ? load(beta + i) : Vec<A>{}));
        }
        if (i < cols) {
            const int64_t n = cols - i;
            const Vec<A> g = kGamma ? load_part(gamma + i, n, c) : c;
            const Vec<A> b = kBeta ? load_part(beta + i, n, c) : Vec<A>{};
            store_part(y + i, n, value(load_part(x + i, n, c), g, b));
        }
    }
}

template <class A>
void row_apply(const A* x, int64_t rows, int64_t cols, int64_t x_stride, const A* center, const A* rstd,
               const A* offset, const A* gamma, const A* beta, A* y, int64_t y_stride) {
    const auto form = gamma ? (beta ? row_apply_as<A, true, true> : row_apply_as<A, true, false>)
                            : (beta ? row_apply_as<A, false, true> : row_apply_as<A, false, false>);
    form(x, rows, cols, x_stride, center, rstd, offset, gamma, beta, y, y_stride);
}

template <class A, bool kGamma>
RG_INLINE void row_sums_as(const A* x, const A* dz, int64_t rows, int64_t cols, int64_t x_stride, int64_t dz_stride,
                           const A* center, const A* rstd, const A* offset, const A* gamma, double* sums) {
    for (int64_t row = 0; row < rows; ++row, x += x_stride, dz += dz_stride, sums += 2) {
        const Vec<A> c = splat(center[row]), m = splat(rstd[row]), o = splat(offset[row]), zero = splat(A(0));
        PairSum<A> sum;
        const auto add = [&](Vec<A> v, Vec<A> g, Vec<A>& s, Vec<A>& q) {
            s += g;
            q = fma(g, fma(v - c, m, o), q);
        };
        sum.run(
            cols,
            [&](int64_t i, Vec<A>& s, Vec<A>& q) {
                add(load(x + i), kGamma ? load(dz + i) * load(gamma + i) : load(dz + i), s, q);
            },
            [&](int64_t i, int64_t n, Vec<A>& s, Vec<A>& q) {
                const Vec<A> g = load_part(dz + i, n, zero);
                add(load_part(x + i, n, c), kGamma ? g * load_part(gamma + i, n, zero) : g, s, q);
            });
        sum.total(sums);
    }
}

template <class A>
void row_sums(const A* x, const A* dz, int64_t rows, int64_t cols, int64_t x_stride, int64_t dz_stride, const A* center,
              const A* rstd, const A* offset, const A* gamma, double* sums) {
    const auto form = gamma ? row_sums_as<A, true> : row_sums_as<A, false>;
    form(x, dz, rows, cols, x_stride, dz_stride, center, rstd, offset, gamma, sums);
}

template <class A>
struct RowBlock {
    const A *x, *dz;
    int64_t x_stride, dz_stride;
    const A *center, *rstd, *offset, *gamma, *b, *k;
    A* dx;
    int64_t dx_stride;
    double *dgamma, *dbeta;
};

// kRows rows at a time, so that the parameters' sums stay in registers until they are added to memory once.
template <class A, int kRows, bool kPart>
RG_INLINE void row_dx_column(const RowBlock<A>& t, int64_t i, int64_t n) {
    const Vec<A> zero = splat(A(0));
    const auto read = [&](const A* p) { return kPart ? load_part(p, n, zero) : load(p); };
    const Vec<A> gamma = t.gamma ? read(t.gamma + i) : splat(A(1));
    Vec<A> sum = zero, sum_xhat = zero;
    for (int row = 0; row < kRows; ++row) {
        const Vec<A> m = splat(t.rstd[row]);
        const Vec<A> d = read(t.x + row * t.x_stride + i) - splat(t.center[row]);
        const Vec<A> dz = read(t.dz + row * t.dz_stride + i);
        sum += dz;
        sum_xhat = fma(dz, fma(d, m, splat(t.offset[row])), sum_xhat);
        if (t.dx) {
            const Vec<A> dx = fma(m, gamma * dz, fma(splat(t.b[row]), d, splat(t.k[row])));
            A* out = t.dx + row * t.dx_stride + i;
            kPart ? store_part(out, n, dx) : store(out, dx);
        }
    }
    if (t.dgamma) kPart ? add_to_part<A>(t.dgamma + i, n, sum_xhat) : add_to(t.dgamma + i, sum_xhat);
    if (t.dbeta) kPart ? add_to_part<A>(t.dbeta + i, n, sum) : add_to(t.dbeta + i, sum);
}

template <class A, int kRows>
RG_INLINE void row_dx_rows(const RowBlock<A>& t, int64_t cols) {
    int64_t i = 0;
    for (; i + kLanes<A> <= cols; i += kLanes<A>) row_dx_column<A, kRows, false>(t, i, 0);
    if (i < cols) row_dx_column<A, kRows, true>(t, i, cols - i);
}

template <class A>
void row_dx(const A* x, const A* dz, int64_t rows, int64_t cols, int64_t x_stride, int64_t dz_stride, const A* center,
            const A* rstd, const A* offset, const A* gamma, const A* b, const A* k, A* dx, int64_t dx_stride,
            double* dgamma, double* dbeta) {
    constexpr int group = 4;
    for (int64_t row = 0; row < rows;) {
        const RowBlock<A> t{x + row * x_stride, dz + row * dz_stride, x_stride,     dz_stride,
                            center + row,       rstd + row,           offset + row, gamma,
                            b ? b + row : b,    k ? k + row : k,      dx ? dx + row * dx_stride : dx,
                            dx_stride,          dgamma,               dbeta};
        if (rows - row >= group) {
            row_dx_rows<A, group>(t, cols);
            row += group;
        } else {
            row_dx_rows<A, 1>(t, cols);
            row += 1;
        }
    }
}

// ---- columns -------------------------------------------------------------------------------------------------------

// Rows whose sums stay in registers before they are added to the doubles in memory.
constexpr int kColumnRows = 8;

// Calls body(first_row, rows, i, n): for each group of rows, then for each vector of columns; n = 0 means a whole vector.
template <int kRows, class A, class Body>
RG_INLINE void for_columns(int64_t rows, int64_t cols, Body body) {
    for (int64_t row = 0; row < rows; row += kRows) {
        const int64_t group = rows - row < kRows ? rows - row : kRows;
        int64_t i = 0;
        if (group == kRows) {
            for (; i + kLanes<A> <= cols; i += kLanes<A>) body(row, int64_t(kRows), i, int64_t(0));
        } else {
            for (; i + kLanes<A> <= cols; i += kLanes<A>) body(row, group, i, int64_t(0));
        }
        if (i < cols) body(row, group, i, cols - i);
    }
}

template <class A>
RG_INLINE Vec<A> read(const A* p, int64_t n) {
    return n ? load_part(p, n, splat(A(0))) : load(p);
}
template <class A>
RG_INLINE void write(A* p, int64_t n, Vec<A> v) {
    n ? store_part(p, n, v) : store(p, v);
}
template <class A>
RG_INLINE void add(double* p, int64_t n, Vec<A> v) {
    n ? add_to_part<A>(p, n, v) : add_to(p, v);
}

template <class A>
void col_moments(const A* x, int64_t rows, int64_t cols, int64_t x_stride, const A* center, double* sum,
                 double* sum_sq) {
    for_columns<kColumnRows, A>(rows, cols, [&](int64_t row, int64_t group, int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const Vec<A> c = read(center + i, n);
        Vec<A> s = splat(A(0)), q = splat(A(0));
        const A* p = x + row * x_stride + i;
        for (int64_t k = 0; k < group; ++k, p += x_stride) {
            const Vec<A> d = read(p, n) - c;
            s += d;
            q = fma(d, d, q);
        }
        add<A>(sum + i, n, s);
        add<A>(sum_sq + i, n, q);
    });
}

template <class A>
void col_moments_wide(const A* x, int64_t rows, int64_t cols, int64_t x_stride, const double* center, double* sum,
                      double* sum_sq) {
    for (int64_t row = 0; row < rows; ++row, x += x_stride) {
        for (int64_t i = 0; i < cols; ++i) {
            const double d = double(x[i]) - center[i];
            sum[i] += d;
            sum_sq[i] += d * d;
        }
    }
}

template <class A>
void col_apply(const A* x, int64_t rows, int64_t cols, int64_t x_stride, const A* center, const A* scale,
               const A* shift, A* y, int64_t y_stride) {
    for_columns<4, A>(rows, cols, [&](int64_t row, int64_t group, int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const Vec<A> c = read(center + i, n), m = read(scale + i, n), b = read(shift + i, n);
        const A* p = x + row * x_stride + i;
        A* out = y + row * y_stride + i;
        for (int64_t k = 0; k < group; ++k, p += x_stride, out += y_stride) write(out, n, fma(read(p, n) - c, m, b));
    });
}

template <class A>
void col_sums(const A* x, const A* dz, int64_t rows, int64_t cols, int64_t x_stride, int64_t dz_stride, const A* center,
              const A* rstd, const A* offset, double* sum_dz, double* sum_dz_xhat) {
    for_columns<kColumnRows, A>(rows, cols, [&](int64_t row, int64_t group, int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const Vec<A> c = read(center + i, n), m = read(rstd + i, n), o = read(offset + i, n);
        Vec<A> s = splat(A(0)), q = splat(A(0));
        const A* p = x + row * x_stride + i;
        const A* g = dz + row * dz_stride + i;
        for (int64_t k = 0; k < group; ++k, p += x_stride, g += dz_stride) {
            const Vec<A> v = read(g, n);
            s += v;
            q = fma(v, fma(read(p, n) - c, m, o), q);
        }
        add<A>(sum_dz + i, n, s);
        add<A>(sum_dz_xhat + i, n, q);
    });
}

template <class A>
void col_dx(const A* x, const A* dz, int64_t rows, int64_t cols, int64_t x_stride, int64_t dz_stride, const A* center,
            const A* a, const A* b, const A* k, A* dx, int64_t dx_stride) {
    for_columns<4, A>(rows, cols, [&](int64_t row, int64_t group, int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const Vec<A> va = read(a + i, n);
        const A* g = dz + row * dz_stride + i;
        A* out = dx + row * dx_stride + i;
        if (!x) {
            for (int64_t r = 0; r < group; ++r, g += dz_stride, out += dx_stride) write(out, n, va * read(g, n));
            return;
        }
        const Vec<A> c = read(center + i, n), vb = read(b + i, n), vk = read(k + i, n);
        const A* p = x + row * x_stride + i;
        for (int64_t r = 0; r < group; ++r, p += x_stride, g += dz_stride, out += dx_stride) {
            write(out, n, fma(va, read(g, n), fma(vb, read(p, n) - c, vk)));
        }
    });
}

}  // namespace
}  // namespace rg
