// Normalization of rows: each row is one statistics set; its parameters run along the row.
#pragma once

#include "norm_common.h"

namespace rg {
namespace {

// The mean of a row's first elements, at most this many.
constexpr int64_t kRowCenter = 64;

template <class A>
void row_centers(BlockSize size, Run<const A> x, double* center) {
    const int64_t count = size.cols < kRowCenter ? size.cols : kRowCenter;
    const Vec<double> share = splat(1 / double(count));
    ShortSum sums[kLanes<double>];
    unrolled<kLanes<double>>([&](int r) RG_INLINE_LAMBDA { sums[r] = ShortSum{}; });
    with_width<A>(count, [&](auto width) {
        constexpr int vectors = PairSum<A>::kVectors, whole = width.vectors;
        for_row_groups<(whole > 0)>(
            size.rows,
            [&](int64_t row, int64_t r) RG_INLINE_LAMBDA {
                const A* const from = x.data + row * x.stride;
                Sum total;
                if constexpr (whole > 0) {
                    constexpr int used = whole < vectors ? whole : vectors;
                    Vec<A> sum[used];
                    unrolled<whole>([&](int k) RG_INLINE_LAMBDA {
                        const Vec<A> v = load(from + k * kLanes<A>);
                        sum[k % used] = k < used ? v : sum[k % used] + v;
                    });
                    total.add_all<A>(sum);
                } else {
                    Vec<A> sum[vectors] = {};
                    for_groups_of_vectors<A, vectors>(
                        count, [&](int64_t i, int64_t n, int k) RG_INLINE_LAMBDA { sum[k] += read(from + i, n); });
                    total.add_all<A>(sum);
                }
                sums[r] = shorten(total);
            },
            [&](int64_t row, int64_t n) RG_INLINE_LAMBDA { write(center + row, n, rounded<A>(totals(sums) * share)); });
    });
}

template <class A>
void row_moments(BlockSize size, Run<const A> x, const double* center, double* sum, double* sum_sq) {
    with_width<A>(size.cols, [&](auto width) {
        sum_rows(width, size.rows, sum, sum_sq, [&](int64_t row) RG_INLINE_LAMBDA {
            const A* const from = x.data + row * x.stride;
            const Vec<A> c = splat(A(center[row]));
            return SumsOfRow(width, from, size.cols, [&](int64_t i, int, int64_t n) RG_INLINE_LAMBDA {
                const Vec<A> d = (n ? load_part(from + i, n, c) : load(from + i)) - c;
                return PairTerm<A>{d, d, d};
            });
        });
    });
}

// The error of m2 grows with 1 + distance^2 / var, which must be at most 5, and squares must have stayed in float's
// range: one lost to underflow is below 1e-38, negligible beside any usual eps.
template <class A>
bool settle(int64_t sets, const double* center, const double* sum, const double* sum_sq, double count, double eps,
            double* mean, double* var) {
    constexpr bool narrow = sizeof(A) == sizeof(float);
    const Vec<double> share = splat(1 / count), size = splat(count), rejected = splat(-1.0);
    const Vec<double> least = splat(!narrow || eps > 1e-25 ? -1 : count * 1e-30), most = splat(1e36);
    Vec<double> lowest = splat(0.0);
    for_vectors<double>(false, nullptr, sets, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const Vec<double> s = read(sum + i, n), shift = s * share, square = s * shift;
        const Vec<double> m2 = read(sum_sq + i, n) - square;
        Vec<double> v = choose(larger_or_nan(square, splat(4.0) * m2), rejected, m2 / size);
        v = choose(larger_or_nan(least, m2), rejected, v);
        if (narrow) v = choose(larger_or_nan(m2, most), rejected, v);
        lowest = at_most(v, lowest);
        write(mean + i, n, read(center + i, n) + shift);
        write(var + i, n, v);
    });
    double lanes[kLanes<double>];
    store(lanes, lowest);
    bool all = true;
    for (const double lane : lanes) all = all && lane >= 0;
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
    for_vectors<double>(false, nullptr, rows, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const Vec<double> m = read(mean + i, n), rstd = splat(1.0) / root(read(var + i, n) + splat(eps));
        store_rounded(statistics.center + i, m);
        store_rounded(statistics.rstd + i, rstd);
        store_rounded(statistics.offset + i, (rounded<A>(m) - m) * rstd);
    });
}

template <class A>
void row_slopes(int64_t rows, const A* rstd, const double* sum_g, const double* sum_g_xhat, double share,
                RowSlopes<A*> slopes) {
    for_vectors<double>(false, nullptr, rows, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const Vec<double> negative = -load_wide(rstd + i);
        store_rounded(slopes.b + i, negative * (read(sum_g_xhat + i, n) * splat(share)));
        store_rounded(slopes.k + i, negative * (read(sum_g + i, n) * splat(share)));
    });
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

// Runs an elementwise pass over rows that are written to `out`: pass(row, two, over) calls over(put), and put(i, n)
// does a vector of the row, with `two` also of the next. What runs along a row, such as gamma, is then read half as
// often. Vectors are aligned in `out` as by for_vectors.
template <class AnyWidth, class A, class Pass>
RG_INLINE void for_row_pairs(AnyWidth, bool aligned, BlockSize size, const Target<A>& out, const Pass& pass) {
    constexpr int64_t lanes = kLanes<A>;
    int64_t row = 0;
    const auto over = [&](const auto& put) RG_INLINE_LAMBDA {
        if constexpr (AnyWidth::vectors > 0) {
            unrolled<AnyWidth::vectors>([&](int k) RG_INLINE_LAMBDA { put(k * lanes, int64_t(0)); });
        } else {
            for_vectors(aligned, out.data + row * out.stride, size.cols, put);
        }
    };
    if (AnyWidth::vectors > 0 || !aligned || out.stride % lanes == 0) {
        for (; row + 2 <= size.rows; row += 2) pass(row, Flag<true>(), over);
    }
    for (; row < size.rows; ++row) pass(row, Flag<false>(), over);
}
// The same with the width as a constant, where that is worth another copy of the pass.
template <ActivationKind kAct, class A, class Body>
RG_INLINE void with_width_if_cheap(bool streamed, int64_t cols, const Body& body) {
    if constexpr (kAct == ActivationKind::identity) {
        if (!streamed) return with_width<A>(cols, body);
    }
    body(Width<0>());
}

// Calls body(r) for the rows of a pair.
template <bool kTwo, class Body>
RG_INLINE void for_pair(const Body& body) {
    body(0);
    if constexpr (kTwo) body(1);
}
template <bool kTwo, class A>
struct RowValues {
    Vec<A> at[kTwo ? 2 : 1];
    RG_INLINE RowValues(const A* values, int64_t row) {
        for_pair<kTwo>([&](int r) RG_INLINE_LAMBDA { at[r] = splat(values[row + r]); });
    }
};

template <ActivationKind kAct, class Streamed, class Flags, class A>
void row_apply_as(Streamed streamed, Flags flags, BlockSize size, Run<const A> of_x,
                  Standardization<const A*> statistics, RowParameters<A> of_row, Target<A> to_y) {
    const auto run = [&](auto width) {
        const Run<const A> x = of_x;  // copies, as in row_sums_as
        const Target<A> y = to_y;
        const RowParameters<A> parameters = of_row;
        for_row_pairs(width, true, size, y, [&](int64_t row, auto two, const auto& over) RG_INLINE_LAMBDA {
            constexpr bool both = two.value;
            const RowValues<both, A> c(statistics.center, row), m(statistics.rstd, row), o(statistics.offset, row);
            const A* const from = x.data + row * x.stride;
            A* const to = y.data + row * y.stride;
            over([&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
                const Vec<A> gamma = flags.has_gamma.value ? read(parameters.gamma + i, n) : Vec<A>{};
                const Vec<A> beta = flags.has_beta.value ? read(parameters.beta + i, n) : Vec<A>{};
                for_pair<both>([&](int r) RG_INLINE_LAMBDA {
                    const A* const at = from + r * x.stride + i;
                    if (width.vectors == 0 && x.ahead) prefetch(at + x.ahead);
                    const Vec<A> xhat = fma(read(at, n) - c.at[r], m.at[r], o.at[r]);
                    const Vec<A> z = flags.has_gamma.value ? fma(xhat, gamma, beta) : xhat + beta;
                    write(streamed.value, to + r * y.stride + i, n, value_of<kAct, A>(z));
                });
            });
        });
    };
    with_width_if_cheap<kAct, A>(streamed.value, size.cols, run);
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
void row_sums_as(BlockSize size, Run<const A> of_x, Gradient<A> of_dz, Standardization<const A*> statistics,
                 const A* of_gamma, double* sum_g, double* sum_g_xhat, A* to_chains) {
    const auto run = [&](auto width) {
        // Copies, because a store may change what is captured by reference, as far as the compiler can tell.
        Run<const A> x = of_x;
        Gradient<A> g = of_dz;
        const A* const gamma = of_gamma;
        A* const chains = to_chains;
        sum_rows(width, size.rows, sum_g, sum_g_xhat, [&](int64_t row) RG_INLINE_LAMBDA {
            const Vec<A> c = splat(statistics.center[row]), m = splat(statistics.rstd[row]);
            const Vec<A> o = splat(statistics.offset[row]);
            if constexpr (width.vectors > 0) {
                const A *const from = x.data + row * x.stride, *const dy = g.dy + row * g.dy_stride;
                return SumsOfRow(width, from, size.cols, [&](int64_t i, int, int64_t) RG_INLINE_LAMBDA {
                    const Vec<A> dz = load(dy + i), xhat = fma(load(from + i) - c, m, o);
                    const Vec<A> gradient = kGamma ? dz * load(gamma + i) : dz;
                    return PairTerm<A>{gradient, gradient, xhat};
                });
            } else {
                PairSum<A> sum;
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
                    [&](int64_t i, Vec<A>& s, Vec<A>& q)
                        RG_INLINE_LAMBDA { add(i, int64_t(0), load(x.data + i), s, q); },
                    [](int64_t, int) {},
                    [&](int64_t i, int64_t n, Vec<A>& s, Vec<A>& q)
                        RG_INLINE_LAMBDA { add(i, n, load_part(x.data + i, n, c), s, q); });
                x.data += x.stride, g.dy += g.dy_stride, g.y += g.y_stride;
                return SumsOfRow(sum);
            }
        });
    };
    if constexpr (kAct == ActivationKind::identity && !kChains) return with_width<A>(size.cols, run);
    run(Width<0>());
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
               const A* gamma, RowSlopes<const A*> slopes, Target<A> dx) {
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

// The same with chains: two rows at a time, so that the chains are read and written half as often. With the longest
// vectors that pays only for rows that fit in a few registers: there the stores are the limit, and dx adds its own.
constexpr int64_t kLateChains = sizeof(Vec<float>) < 64 ? INT64_MAX : 64;

template <ActivationKind kAct, bool kGamma, class A>
void row_dx_chains(BlockSize size, Run<const A> of_x, Gradient<A> of_dz, Standardization<const A*> statistics,
                   const A* of_gamma, RowSlopes<const A*> slopes, Target<A> to_dx, A* to_chains) {
    const auto run = [&](auto width) {
        const Run<const A> x = of_x;  // copies, as in row_sums_as
        const Gradient<A> g = of_dz;
        const Target<A> dx = to_dx;
        const A* const gamma = of_gamma;
        A* const chains = to_chains;
        for_row_pairs(width, false, size, dx, [&](int64_t row, auto two, const auto& over) RG_INLINE_LAMBDA {
            constexpr bool both = two.value;
            const RowValues<both, A> c(statistics.center, row), m(statistics.rstd, row), o(statistics.offset, row);
            const RowValues<both, A> b(slopes.b, row), k(slopes.k, row);
            const A *const from = x.data + row * x.stride, *const dy = g.dy + row * g.dy_stride;
            const A* const y = g.y + row * g.y_stride;
            A* const to = dx.data + row * dx.stride;
            over([&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
                const Vec<A> factor = kGamma ? read(gamma + i, n) : Vec<A>{};
                A *const first = chain_of(chains, i), *const second = first + kChainLine<A>;
                Vec<A> sum = read(first, n), sum_xhat = read(second, n);
                for_pair<both>([&](int r) RG_INLINE_LAMBDA {
                    const A *const dy_at = dy + r * g.dy_stride + i, *const y_at = y + r * g.y_stride + i;
                    const Vec<A> xhat = fma(read(from + r * x.stride + i, n) - c.at[r], m.at[r], o.at[r]);
                    const Vec<A> dz = read_dz<kAct>(dy_at, y_at, n), gradient = kGamma ? dz * factor : dz;
                    sum += dz;
                    sum_xhat = fma(dz, xhat, sum_xhat);
                    write(to + r * dx.stride + i, n, fma(m.at[r], gradient, fma(b.at[r], xhat, k.at[r])));
                });
                write(first, n, sum);
                write(second, n, sum_xhat);
            });
        });
    };
    with_width_if_cheap<kAct, A>(false, size.cols, run);
}

template <class A>
void row_dx(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<const A*> statistics, const A* gamma,
            RowSlopes<const A*> slopes, Target<A> dx, A* chains) {
    with_fused(dz.activation, [&](auto fused) {
        with_flag(gamma, [&](auto scaled) {
            if (chains) {
                return row_dx_chains<fused.kind, scaled.value>(size, x, dz, statistics, gamma, slopes, dx, chains);
            }
            with_stream<fused.kind>(dx.stream, [&](auto streamed) {
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
