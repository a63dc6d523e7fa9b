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

// The first n lanes, or all of them for n = 0.
template <class A>
RG_INLINE Vec<A> read(const A* p, int64_t n) {
    return n ? load_part(p, n, splat(A(0))) : load(p);
}
// A streamed vector passes the cache by and must be aligned; for_vectors sees to that.
template <bool kStream, class A>
RG_INLINE void write(A* p, int64_t n, Vec<A> v) {
    n ? store_part(p, n, v) : kStream ? stream(p, v) : store(p, v);
}
template <class A>
RG_INLINE void add(double* p, int64_t n, Vec<A> v) {
    n ? add_to_part<A>(p, n, v) : add_to(p, v);
}

// Calls body(i, n) for every vector of a run that is written to `out`, n = 0 for whole ones. Whole ones are aligned in
// `out`: a store across two cache lines costs two. Only elementwise passes may do so: where a sum is cut must not depend
// on an address.
template <class A, class Body>
RG_INLINE void for_vectors(const A* out, int64_t cols, Body body) {
    constexpr int64_t lanes = kLanes<A>;
    int64_t i = 0;
    if (lanes > 1) {
        const int64_t misaligned = int64_t(uintptr_t(out) / sizeof(A)) % lanes;
        if (misaligned) {
            i = lanes - misaligned < cols ? lanes - misaligned : cols;
            body(int64_t(0), i);
        }
    }
    for (; i + lanes <= cols; i += lanes) body(i, int64_t(0));
    if (i < cols) body(i, cols - i);
}

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
        // Constant indices: a chain that is found by a variable lives in memory, not in a register.
        if (i + lanes <= cols) term(i, first[0], second[0]), i += lanes;
        if (i + lanes <= cols) term(i, first[1], second[1]), i += lanes;
        if (i + lanes <= cols) term(i, first[2], second[2]), i += lanes;
        if (i < cols) last(i, cols - i, first[3], second[3]);
        if (++pending >= kFlush) flush();
    }
    RG_INLINE void total(double* sums) {
        flush();
        sums[0] += first_total.total();
        sums[1] += second_total.total();
    }
};

template <class A>
void plane_moments(const A* x, int64_t rows, int64_t cols, int64_t x_stride, int64_t ahead, A center, double* sums) {
    const Vec<A> c = splat(center);
    PairSum<A> sum;
    for (int64_t row = 0; row < rows; ++row, x += x_stride) {
        const auto add = [&](Vec<A> v, Vec<A>& s, Vec<A>& q) {
            const Vec<A> d = v - c;
            s += d;
            q = fma(d, d, q);
        };
        sum.run(
            cols,
            [&](int64_t i, Vec<A>& s, Vec<A>& q) {
                prefetch(x + i + ahead);
                add(load(x + i), s, q);
            },
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

template <class A, bool kStream>
RG_INLINE void plane_apply_as(const A* x, int64_t rows, int64_t cols, int64_t x_stride, int64_t ahead, A center,
                              A scale, A shift, A* y, int64_t y_stride) {
    const Vec<A> c = splat(center), m = splat(scale), b = splat(shift);
    for (int64_t row = 0; row < rows; ++row, x += x_stride, y += y_stride) {
        for_vectors(y, cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
            prefetch(x + i + ahead);
            write<kStream>(y + i, n, fma(read(x + i, n) - c, m, b));
        });
    }
}

template <class A>
void plane_apply(const A* x, int64_t rows, int64_t cols, int64_t x_stride, int64_t ahead, A center, A scale, A shift,
                 A* y, int64_t y_stride, bool stream) {
    const auto form = stream ? plane_apply_as<A, true> : plane_apply_as<A, false>;
    form(x, rows, cols, x_stride, ahead, center, scale, shift, y, y_stride);
}

template <class A>
void plane_sums(const A* x, const A* dz, int64_t rows, int64_t cols, int64_t x_stride, int64_t dz_stride,
                int64_t x_ahead, int64_t dz_ahead, A center, A rstd, A offset, double* sums) {
    const Vec<A> c = splat(center), m = splat(rstd), o = splat(offset);
    PairSum<A> sum;
    for (int64_t row = 0; row < rows; ++row, x += x_stride, dz += dz_stride) {
        const auto add = [&](Vec<A> v, Vec<A> g, Vec<A>& s, Vec<A>& q) {
            s += g;
            q = fma(g, fma(v - c, m, o), q);
        };
        sum.run(
            cols,
            [&](int64_t i, Vec<A>& s, Vec<A>& q) {
                prefetch(x + i + x_ahead);
                prefetch(dz + i + dz_ahead);
                add(load(x + i), load(dz + i), s, q);
            },
            [&](int64_t i, int64_t n, Vec<A>& s, Vec<A>& q) {
                add(load_part(x + i, n, c), load_part(dz + i, n, splat(A(0))), s, q);
            });
    }
    sum.total(sums);
}

template <class A, bool kStream>
RG_INLINE void plane_dx_as(const A* x, const A* dz, int64_t rows, int64_t cols, int64_t x_stride, int64_t dz_stride,
                           int64_t x_ahead, int64_t dz_ahead, A center, A a, A b, A k, A* dx, int64_t dx_stride) {
    const Vec<A> c = splat(center), va = splat(a), vb = splat(b), vk = splat(k);
    for (int64_t row = 0; row < rows; ++row, dz += dz_stride, dx += dx_stride) {
        if (!x) {
            for_vectors(dx, cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
                write<kStream>(dx + i, n, va * read(dz + i, n));
            });
            continue;
        }
        for_vectors(dx, cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
            prefetch(x + i + x_ahead);
            prefetch(dz + i + dz_ahead);
            write<kStream>(dx + i, n, fma(va, read(dz + i, n), fma(vb, read(x + i, n) - c, vk)));
        });
        x += x_stride;
    }
}

template <class A>
void plane_dx(const A* x, const A* dz, int64_t rows, int64_t cols, int64_t x_stride, int64_t dz_stride,
              int64_t x_ahead, int64_t dz_ahead, A center, A a, A b, A k, A* dx, int64_t dx_stride, bool stream) {
    const auto form = stream ? plane_dx_as<A, true> : plane_dx_as<A, false>;
    form(x, dz, rows, cols, x_stride, dz_stride, x_ahead, dz_ahead, center, a, b, k, dx, dx_stride);
}

// ---- rows ----------------------------------------------------------------------------------------------------------

// Whether the squares neither overflowed in float nor vanished where eps is small enough for that to show.
template <class A>
RG_INLINE bool in_float_range(double m2, double count, double eps) {
    return sizeof(A) > sizeof(float) || (m2 < 1e36 && (eps > 1e-25 || m2 > count * 1e-30));
}

template <class A>
void row_moments(const A* x, int64_t rows, int64_t cols, int64_t x_stride, double eps, double* mean, double* var) {
    const double count = double(cols), share = 1 / count;
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
        double center = double(A(first.total() * share));

        double sums[2] = {};
        plane_moments<A>(x, 1, cols, x_stride, 0, A(center), sums);
        double deviation = sums[1] - sums[0] * sums[0] * share;
        if (!in_float_range<A>(deviation, count, eps)) {
            double wide[2] = {};
            plane_moments_wide<A>(x, 1, cols, x_stride, 0.0, wide);
            center = wide[0] / count;
            sums[0] = sums[1] = 0;
            plane_moments_wide<A>(x, 1, cols, x_stride, center, sums);
            deviation = sums[1] - sums[0] * sums[0] * share;
            if (center - center != 0) sums[0] = 0;  // infinite data: so is the mean, and the variance is undefined
        }
        mean[row] = center + sums[0] * share;
        var[row] = deviation < 0 ? 0 : deviation * share;
    }
}

template <class A, bool kGamma, bool kBeta, bool kStream>
RG_INLINE void row_apply_as(const A* x, int64_t rows, int64_t cols, int64_t x_stride, int64_t ahead, const A* center,
                            const A* rstd, const A* offset, const A* gamma, const A* beta, A* y, int64_t y_stride) {
    for (int64_t row = 0; row < rows; ++row, x += x_stride, y += y_stride) {
        const Vec<A> c = splat(center[row]), m = splat(rstd[row]), o = splat(offset[row]);
        for_vectors(y, cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
            prefetch(x + i + ahead);
            Vec<A> v = fma(read(x + i, n) - c, m, o);
            if constexpr (kGamma) {
                v = fma(v, read(gamma + i, n), kBeta ? read(beta + i, n) : Vec<A>{});
            } else if constexpr (kBeta) {
                v = v + read(beta + i, n);
            }
            write<kStream>(y + i, n, v);
        });
    }
}

template <class A, bool kStream>
constexpr auto row_apply_form(bool gamma, bool beta) {
    return gamma ? (beta ? row_apply_as<A, true, true, kStream> : row_apply_as<A, true, false, kStream>)
                 : (beta ? row_apply_as<A, false, true, kStream> : row_apply_as<A, false, false, kStream>);
}

template <class A>
void row_apply(const A* x, int64_t rows, int64_t cols, int64_t x_stride, int64_t ahead, const A* center, const A* rstd,
               const A* offset, const A* gamma, const A* beta, A* y, int64_t y_stride, bool stream) {
    const auto form = stream ? row_apply_form<A, true>(gamma, beta) : row_apply_form<A, false>(gamma, beta);
    form(x, rows, cols, x_stride, ahead, center, rstd, offset, gamma, beta, y, y_stride);
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
    int64_t x_stride, dz_stride, x_ahead, dz_ahead;
    const A *center, *rstd, *offset, *gamma, *b, *k;
    A* dx;
    int64_t dx_stride;
    double *dgamma, *dbeta;
};

// kRows rows at a time, so that the parameters' sums stay in registers until they are added to memory once. The columns
// are aligned in dx: sums over rows do not care where columns are cut.
template <class A, int kRows, bool kStream>
RG_INLINE void row_dx_rows(const RowBlock<A>& t, int64_t cols) {
    for_vectors(t.dx, cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const Vec<A> gamma = t.gamma ? read(t.gamma + i, n) : splat(A(1));
        Vec<A> sum = splat(A(0)), sum_xhat = splat(A(0));
        for (int row = 0; row < kRows; ++row) {
            const A *x = t.x + row * t.x_stride + i, *g = t.dz + row * t.dz_stride + i;
            prefetch(x + t.x_ahead);
            prefetch(g + t.dz_ahead);
            const Vec<A> m = splat(t.rstd[row]), d = read(x, n) - splat(t.center[row]), dz = read(g, n);
            sum += dz;
            sum_xhat = fma(dz, fma(d, m, splat(t.offset[row])), sum_xhat);
            if (t.dx) {
                const Vec<A> rest = fma(splat(t.b[row]), d, splat(t.k[row]));
                write<kStream>(t.dx + row * t.dx_stride + i, n, fma(m, gamma * dz, rest));
            }
        }
        if (t.dgamma) add<A>(t.dgamma + i, n, sum_xhat);
        if (t.dbeta) add<A>(t.dbeta + i, n, sum);
    });
}

template <class A>
void row_dx(const A* x, const A* dz, int64_t rows, int64_t cols, int64_t x_stride, int64_t dz_stride, int64_t x_ahead,
            int64_t dz_ahead, const A* center, const A* rstd, const A* offset, const A* gamma, const A* b, const A* k,
            A* dx, int64_t dx_stride, bool stream, double* dgamma, double* dbeta) {
    constexpr int group = 4;
    stream = stream && dx_stride % kLanes<A> == 0;
    for (int64_t row = 0; row < rows;) {
        const RowBlock<A> t{x + row * x_stride,
                            dz + row * dz_stride,
                            x_stride,
                            dz_stride,
                            x_ahead,
                            dz_ahead,
                            center + row,
                            rstd + row,
                            offset + row,
                            gamma,
                            b + row,
                            k + row,
                            dx ? dx + row * dx_stride : dx,
                            dx_stride,
                            dgamma,
                            dbeta};
        if (rows - row >= group) {
            stream ? row_dx_rows<A, group, true>(t, cols) : row_dx_rows<A, group, false>(t, cols);
            row += group;
        } else {
            row_dx_rows<A, 1, false>(t, cols);
            row += 1;
        }
    }
}

// ---- columns -------------------------------------------------------------------------------------------------------

// Rows whose sums stay in registers before they are added to the doubles in memory.
constexpr int kColumnRows = 8;

// Calls body(first_row, rows, i, n): for each group of rows, then for each vector of columns, aligned as `run` is.
// Columns do not mix, so where they are cut changes nothing.
template <int kRows, class A, class Body>
RG_INLINE void for_columns(const A* run, int64_t rows, int64_t cols, Body body) {
    int64_t row = 0;
    for (; row + kRows <= rows; row += kRows) {
        for_vectors(run, cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA { body(row, int64_t(kRows), i, n); });
    }
    if (row < rows) {
        for_vectors(run, cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA { body(row, rows - row, i, n); });
    }
}

template <class A>
void col_moments(const A* x, int64_t rows, int64_t cols, int64_t x_stride, const A* center, double* sum,
                 double* sum_sq) {
    for_columns<kColumnRows>(x, rows, cols, [&](int64_t row, int64_t group, int64_t i, int64_t n) RG_INLINE_LAMBDA {
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

template <class A, bool kStream>
RG_INLINE void col_apply_as(const A* x, int64_t rows, int64_t cols, int64_t x_stride, int64_t ahead, const A* center,
                            const A* scale, const A* shift, A* y, int64_t y_stride) {
    for_columns<4, A>(y, rows, cols, [&](int64_t row, int64_t group, int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const Vec<A> c = read(center + i, n), m = read(scale + i, n), b = read(shift + i, n);
        const A* p = x + row * x_stride + i;
        A* out = y + row * y_stride + i;
        for (int64_t k = 0; k < group; ++k, p += x_stride, out += y_stride) {
            prefetch(p + ahead);
            write<kStream>(out, n, fma(read(p, n) - c, m, b));
        }
    });
}

template <class A>
void col_apply(const A* x, int64_t rows, int64_t cols, int64_t x_stride, int64_t ahead, const A* center,
               const A* scale, const A* shift, A* y, int64_t y_stride, bool stream) {
    const auto form = stream && y_stride % kLanes<A> == 0 ? col_apply_as<A, true> : col_apply_as<A, false>;
    form(x, rows, cols, x_stride, ahead, center, scale, shift, y, y_stride);
}

template <class A>
void col_sums(const A* x, const A* dz, int64_t rows, int64_t cols, int64_t x_stride, int64_t dz_stride, const A* center,
              const A* rstd, const A* offset, double* sum_dz, double* sum_dz_xhat) {
    for_columns<kColumnRows>(x, rows, cols, [&](int64_t row, int64_t group, int64_t i, int64_t n) RG_INLINE_LAMBDA {
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

template <class A, bool kStream>
RG_INLINE void col_dx_as(const A* x, const A* dz, int64_t rows, int64_t cols, int64_t x_stride, int64_t dz_stride,
                         int64_t x_ahead, int64_t dz_ahead, const A* center, const A* a, const A* b, const A* k, A* dx,
                         int64_t dx_stride) {
    for_columns<4, A>(dx, rows, cols, [&](int64_t row, int64_t group, int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const Vec<A> va = read(a + i, n);
        const A* g = dz + row * dz_stride + i;
        A* out = dx + row * dx_stride + i;
        if (!x) {
            for (int64_t r = 0; r < group; ++r, g += dz_stride, out += dx_stride) write<kStream>(out, n, va * read(g, n));
            return;
        }
        const Vec<A> c = read(center + i, n), vb = read(b + i, n), vk = read(k + i, n);
        const A* p = x + row * x_stride + i;
        for (int64_t r = 0; r < group; ++r, p += x_stride, g += dz_stride, out += dx_stride) {
            prefetch(p + x_ahead);
            prefetch(g + dz_ahead);
            write<kStream>(out, n, fma(va, read(g, n), fma(vb, read(p, n) - c, vk)));
        }
    });
}

template <class A>
void col_dx(const A* x, const A* dz, int64_t rows, int64_t cols, int64_t x_stride, int64_t dz_stride, int64_t x_ahead,
            int64_t dz_ahead, const A* center, const A* a, const A* b, const A* k, A* dx, int64_t dx_stride, bool stream) {
    const auto form = stream && dx_stride % kLanes<A> == 0 ? col_dx_as<A, true> : col_dx_as<A, false>;
    form(x, dz, rows, cols, x_stride, dz_stride, x_ahead, dz_ahead, center, a, b, k, dx, dx_stride);
}

}  // namespace
}  // namespace rg
