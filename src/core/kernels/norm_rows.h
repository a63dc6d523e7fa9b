// Normalization of rows: each row is one statistics set; its parameters run along the row.
#pragma once

#include "norm_common.h"

namespace rg {
namespace {

template <class A>
void row_centers(BlockSize size, Run<const A> x, double* center) {
    constexpr int64_t enough = 64;
    const int64_t count = size.cols < enough ? size.cols : enough;
    const double share = 1 / double(count);
    constexpr int64_t lanes = kLanes<double>;
    for (int64_t row = 0; row < size.rows; row += lanes) {
        const bool whole = size.rows - row >= lanes;
        const int64_t last = whole ? row + lanes : size.rows;
        ShortSum sums[lanes] = {};
        for (int64_t r = row; r < last; ++r, x.data += x.stride) {
            constexpr int vectors = PairSum<A>::kVectors;
            Vec<A> sum[vectors] = {};
            for_groups_of_vectors<A, vectors>(
                count, [&](int64_t i, int64_t n, int k) RG_INLINE_LAMBDA { sum[k] += read(x.data + i, n); });
            Sum total;
            total.add_all<A>(sum);
            if (whole) {
                sums[r - row] = shorten(total);
            } else {
                center[r] = total.total() * share;
            }
        }
        if (whole) store(center + row, totals(sums) * splat(share));
        for (int64_t r = row; r < last; ++r) center[r] = double(A(center[r]));
    }
}

template <class A>
void row_moments(BlockSize size, Run<const A> x, const double* center, double* sum, double* sum_sq) {
    sum_rows<A>(size.rows, sum, sum_sq, [&](int64_t row, PairSum<A>& to) RG_INLINE_LAMBDA {
        MomentSum<A>(to, A(center[row])).run(x.data + row * x.stride, size.cols, [](int64_t, int) {});
    });
}

// The error of m2 grows with 1 + distance^2 / var, which must be at most 5, and squares must have stayed in float's
// range: one lost to underflow is below 1e-38, negligible beside any usual eps.
template <class A>
bool settle(int64_t sets, const double* center, const double* sum, const double* sum_sq, double count, double eps,
            double* mean, double* var) {
    constexpr int64_t lanes = kLanes<double>;
    constexpr bool narrow = sizeof(A) == sizeof(float);
    const Vec<double> share = splat(1 / count), size = splat(count);
    const double least = !narrow || eps > 1e-25 ? -1 : count * 1e-30, most = narrow ? 1e36 : HUGE_VAL;
    bool all = true;
    for (int64_t i = 0; i < sets; i += lanes) {
        const int64_t n = sets - i < lanes ? sets - i : 0, last = n ? n : lanes;
        const Vec<double> s = read(sum + i, n), shift = s * share, square = s * shift;
        const Vec<double> m2 = read(sum_sq + i, n) - square;
        double squares[lanes], m2s[lanes], variances[lanes];
        store(squares, square);
        store(m2s, m2);
        store(variances, m2 / size);
        write(mean + i, n, read(center + i, n) + shift);
        for (int64_t k = 0; k < last; ++k) {
            const bool accepted = squares[k] <= 4 * m2s[k] && (m2s[k] < most || !narrow) && m2s[k] > least;
            all = all && accepted;
            var[i + k] = accepted ? variances[k] : -1;
        }
    }
    return all;
}

// Square roots and divisions of several sets at once: one after the other they take as long as a short row.
inline void reciprocal_std(int64_t sets, const double* var, double eps, double* rstd) {
    for_vectors<double>(false, nullptr, sets, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
        write(rstd + i, n, splat(1.0) / root(read(var + i, n) + splat(eps)));
    });
}

template <class A>
void row_standardize(int64_t rows, const double* mean, const double* var, double eps, Standardization<A*> statistics) {
    constexpr int64_t lanes = kLanes<double>;
    for (int64_t first = 0; first < rows; first += lanes) {
        const int64_t n = rows - first < lanes ? rows - first : 0, last = n ? rows : first + lanes;
        double rstd[lanes];
        store(rstd, splat(1.0) / root(read(var + first, n) + splat(eps)));
        for (int64_t row = first; row < last; ++row) {
            const A center = A(mean[row]);
            statistics.center[row] = center;
            statistics.rstd[row] = A(rstd[row - first]);
            statistics.offset[row] = A((double(center) - mean[row]) * rstd[row - first]);
        }
    }
}

// Which parameters there are, as compile-time constants where that is worth a copy of the kernel.
template <class Scaled, class Shifted>
struct ParameterFlags {
    Scaled has_gamma;
    Shifted has_beta;
};
template <ActivationKind kAct, class A, class Body>
RG_INLINE void with_parameters(RowParameters<A> parameters, Body body) {
    with_flag_if_cheap<kAct>(parameters.gamma, [&](auto scaled) {
        with_flag_if_cheap<kAct>(parameters.beta, [&](auto shifted) {
            body(ParameterFlags<decltype(scaled), decltype(shifted)>{scaled, shifted});
        });
    });
}
// Without gamma the product is skipped; without beta a zero is added, as one that is given would be.
template <ActivationKind kAct, class Flags, class A>
RG_INLINE Vec<A> row_value(Flags flags, Vec<A> xhat, RowParameters<A> parameters, int64_t i, int64_t n) {
    const Vec<A> b = flags.has_beta.value ? read(parameters.beta + i, n) : Vec<A>{};
    return value_of<kAct, A>(flags.has_gamma.value ? fma(xhat, read(parameters.gamma + i, n), b) : xhat + b);
}

template <ActivationKind kAct, class Streamed, class Flags, class A>
void row_apply_as(Streamed streamed, Flags flags, BlockSize size, Run<const A> x, Standardization<const A*> statistics,
                  RowParameters<A> parameters, Target<A> y) {
    for (int64_t row = 0; row < size.rows; ++row, x.data += x.stride, y.data += y.stride) {
        const Vec<A> c = splat(statistics.center[row]), m = splat(statistics.rstd[row]);
        const Vec<A> o = splat(statistics.offset[row]);
        for_vectors(true, y.data, size.cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
            if (x.ahead) prefetch(x.data + i + x.ahead);
            const Vec<A> xhat = fma(read(x.data + i, n) - c, m, o);
            write(streamed.value, y.data + i, n, row_value<kAct>(flags, xhat, parameters, i, n));
        });
    }
}

template <class A>
void row_apply(BlockSize size, Run<const A> x, Standardization<const A*> statistics, RowParameters<A> parameters,
               ActivationKind f, Target<A> y) {
    with_fused(f, [&](auto fused) {
        with_stream<fused.kind>(y.stream, [&](auto streamed) {
            with_parameters<fused.kind>(parameters, [&](auto flags) {
                row_apply_as<fused.kind>(streamed, flags, size, x, statistics, parameters, y);
            });
        });
    });
}

template <ActivationKind kAct, class Flags, class A>
void row_apply_moments_as(Flags flags, BlockSize size, Run<const A> x, Standardization<const A*> statistics,
                          RowParameters<A> parameters, Target<A> y, NextRowMoments<A> next) {
    for (int64_t row = 0; row < size.rows; ++row) {
        const Vec<A> c = splat(statistics.center[row]), m = splat(statistics.rstd[row]);
        const Vec<A> o = splat(statistics.offset[row]);
        PairSum<A> sum;
        MomentSum<A> moments(sum, A(next.center[row]));
        put_beside(
            y.data, size.cols, [&](auto each) RG_INLINE_LAMBDA { moments.run(next.x, size.cols, each); },
            [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
                const Vec<A> xhat = fma(read(x.data + i, n) - c, m, o);
                write(true, y.data + i, n, row_value<kAct>(flags, xhat, parameters, i, n));
            });
        double sums[2] = {};
        sum.total(sums);
        next.sum[row] = sums[0];
        next.sum_sq[row] = sums[1];
        x.data += x.stride, next.x += x.stride, y.data += y.stride;
    }
}

template <class A>
void row_apply_moments(BlockSize size, Run<const A> x, Standardization<const A*> statistics,
                       RowParameters<A> parameters, ActivationKind f, Target<A> y, NextRowMoments<A> next) {
    with_fused(f, [&](auto fused) {
        with_parameters<fused.kind>(parameters, [&](auto flags) {
            row_apply_moments_as<fused.kind>(flags, size, x, statistics, parameters, y, next);
        });
    });
}

// The first sums of the columns from i on. The sums of dz and of dz * xhat alternate, because a load waits for an
// earlier store with the same lowest twelve bits of the address: so the chains move through a page at twice the speed
// of the data, and cannot stay ahead of it by a constant distance.
template <class A>
RG_INLINE A* chain_of(A* chains, int64_t i) {
    return chains + 2 * i - i % kChainLine<A>;
}

template <ActivationKind kAct, bool kGamma, bool kChains, class A>
void row_sums_as(BlockSize size, Run<const A> x, Gradient<A> g, Standardization<const A*> statistics, const A* gamma,
                 double* sum_g, double* sum_g_xhat, A* chains) {
    sum_rows<A>(size.rows, sum_g, sum_g_xhat, [&](int64_t row, PairSum<A>& sum) RG_INLINE_LAMBDA {
        const Vec<A> c = splat(statistics.center[row]), m = splat(statistics.rstd[row]);
        const Vec<A> o = splat(statistics.offset[row]);
        const auto add = [&](int64_t i, int64_t n, Vec<A> v, Vec<A>& s, Vec<A>& q) RG_INLINE_LAMBDA {
            const Vec<A> dz = read_dz<kAct>(g, i, n), xhat = fma(v - c, m, o);
            const Vec<A> gradient = kGamma ? dz * read(gamma + i, n) : dz;
            s += gradient;
            q = fma(gradient, xhat, q);
            if (kChains) {
                A *first = chain_of(chains, i), *second = first + kChainLine<A>;
                write(first, n, read(first, n) + dz);
                write(second, n, fma(dz, xhat, read(second, n)));
            }
        };
        sum.run(
            size.cols,
            [&](int64_t i, Vec<A>& s, Vec<A>& q) RG_INLINE_LAMBDA { add(i, int64_t(0), load(x.data + i), s, q); },
            [](int64_t, int) {},
            [&](int64_t i, int64_t n, Vec<A>& s, Vec<A>& q)
                RG_INLINE_LAMBDA { add(i, n, load_part(x.data + i, n, c), s, q); });
        x.data += x.stride, g.dy += g.dy_stride, g.y += g.y_stride;
    });
}

template <class A>
void row_sums(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<const A*> statistics,
              const A* gamma, double* sum_g, double* sum_g_xhat, A* chains) {
    with_fused(dz.activation, [&](auto fused) {
        with_flag(gamma, [&](auto scaled) {
            with_flag(chains, [&](auto chained) {
                row_sums_as<fused.kind, scaled.value, chained.value>(size, x, dz, statistics, gamma, sum_g, sum_g_xhat,
                                                                     chains);
            });
        });
    });
}

template <ActivationKind kAct, bool kGamma, class Streamed, class A>
void row_dx_as(Streamed streamed, BlockSize size, Run<const A> x, Gradient<A> g, Standardization<const A*> statistics,
               const A* gamma, RowSlopes<A> slopes, Target<A> dx) {
    for (int64_t row = 0; row < size.rows; ++row) {
        const Vec<A> c = splat(statistics.center[row]), m = splat(statistics.rstd[row]);
        const Vec<A> o = splat(statistics.offset[row]), b = splat(slopes.b[row]), k = splat(slopes.k[row]);
        for_vectors(streamed.value, dx.data, size.cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
            if (x.ahead) {
                prefetch(x.data + i + x.ahead);
                prefetch(g.dy + i + g.ahead);
                if (kAct != ActivationKind::identity) prefetch(g.y + i + g.ahead);
            }
            const Vec<A> xhat = fma(read(x.data + i, n) - c, m, o), dz = read_dz<kAct>(g, i, n);
            const Vec<A> gradient = kGamma ? dz * read(gamma + i, n) : dz;
            write(streamed.value, dx.data + i, n, fma(m, gradient, fma(b, xhat, k)));
        });
        x.data += x.stride, g.dy += g.dy_stride, g.y += g.y_stride, dx.data += dx.stride;
    }
}

template <class A>
void row_dx(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<const A*> statistics, const A* gamma,
            RowSlopes<A> slopes, Target<A> dx) {
    with_fused(dz.activation, [&](auto fused) {
        with_stream<fused.kind>(dx.stream, [&](auto streamed) {
            with_flag(gamma, [&](auto scaled) {
                row_dx_as<fused.kind, scaled.value>(streamed, size, x, dz, statistics, gamma, slopes, dx);
            });
        });
    });
}

template <class A>
void add_chains(int64_t cols, A* chains, double* sum_dz, double* sum_dz_xhat) {
    for_vectors<A>(false, nullptr, cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
        A *first = chain_of(chains, i), *second = first + kChainLine<A>;
        add<A>(sum_dz + i, n, read(first, n));
        add<A>(sum_dz_xhat + i, n, read(second, n));
        write(first, n, Vec<A>{});
        write(second, n, Vec<A>{});
    });
}

inline void add_parts(int64_t parts, int64_t count, double* sums) {
    for (const double* more = sums + count; --parts > 0; more += count) {
        for_vectors<double>(false, nullptr, count, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
            add<double>(sums + i, n, read(more + i, n));
        });
    }
}

}  // namespace
}  // namespace rg
