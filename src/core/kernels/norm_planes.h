// Normalization of planes: the whole block belongs to one channel.
#pragma once

#include "norm_common.h"

namespace rg {
namespace {

template <class A>
void plane_moments(BlockSize size, Run<const A> x, A center, double* sums) {
    PairSum<A> sum;
    MomentSum<A> moments(sum, center);
    for (int64_t row = 0; row < size.rows; ++row, x.data += x.stride) {
        moments.run(x.data, size.cols, [&](int64_t i, int vectors) RG_INLINE_LAMBDA {
            repeat_unrolled<A>(i, vectors, [&](int64_t j) RG_INLINE_LAMBDA { prefetch(x.data + j + x.ahead); });
        });
    }
    sum.total(sums);
}

// Converts every element to double. Eight independent sums let the compiler use vectors of any width.
template <class A>
void plane_moments_wide(BlockSize size, Run<const A> x, double center, double* sums) {
    double s[8] = {}, q[8] = {};
    for (int64_t row = 0; row < size.rows; ++row, x.data += x.stride) {
        int64_t i = 0;
        for (; i + 8 <= size.cols; i += 8) {
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k) {
                const double d = double(x.data[i + k]) - center;
                s[k] += d;
                q[k] += d * d;
            }
        }
        for (int k = 0; i < size.cols; ++i, ++k) {
            const double d = double(x.data[i]) - center;
            s[k] += d;
            q[k] += d * d;
        }
    }
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
        sums[0] += s[k];
        sums[1] += q[k];
    }
}

template <ActivationKind kAct, class Streamed, class A>
void plane_apply_as(Streamed streamed, BlockSize size, Run<const A> x, Affine<const A*> z, int64_t step, Target<A> y) {
    for (int64_t row = 0; row < size.rows; ++row, x.data += x.stride, y.data += y.stride) {
        const int64_t at = row * step;
        const Vec<A> c = splat(z.center[at]), m = splat(z.scale[at]), b = splat(z.shift[at]);
        for_vectors(true, y.data, size.cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
            write(streamed.value, y.data + i, n, value_of<kAct, A>(fma(read(x.data + i, n) - c, m, b)));
        });
    }
}

template <class A>
void plane_apply(BlockSize size, Run<const A> x, Affine<const A*> z, int64_t step, ActivationKind f, Target<A> y) {
    with_fused(f, [&](auto fused) {
        with_stream<fused.kind>(y.stream,
                                [&](auto streamed) { plane_apply_as<fused.kind>(streamed, size, x, z, step, y); });
    });
}

template <ActivationKind kAct, class A>
void plane_sums_as(BlockSize size, Run<const A> x, Gradient<A> g, Standardization<A> statistics, double* sums) {
    const Vec<A> c = splat(statistics.center), m = splat(statistics.rstd), o = splat(statistics.offset);
    PairSum<A> sum;
    for (int64_t row = 0; row < size.rows; ++row, x.data += x.stride, g.dy += g.dy_stride, g.y += g.y_stride) {
        const auto add = [&](Vec<A> v, Vec<A> dz, Vec<A>& s, Vec<A>& q) {
            s += dz;
            q = fma(dz, fma(v - c, m, o), q);
        };
        sum.run(
            size.cols,
            [&](int64_t i, Vec<A>& s, Vec<A>& q) {
                prefetch(x.data + i + x.ahead);
                prefetch(g.dy + i + g.ahead);
                if (kAct != ActivationKind::identity) prefetch(g.y + i + g.ahead);
                add(load(x.data + i), read_dz<kAct>(g, i, 0), s, q);
            },
            [](int64_t, int) {},
            [&](int64_t i, int64_t n, Vec<A>& s, Vec<A>& q) {
                add(load_part(x.data + i, n, c), read_dz<kAct>(g, i, n), s, q);
            });
    }
    sum.total(sums);
}

template <class A>
void plane_sums(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<A> statistics, double* sums) {
    with_fused(dz.activation, [&](auto fused) { plane_sums_as<fused.kind>(size, x, dz, statistics, sums); });
}

template <ActivationKind kAct, class Streamed, class A>
void plane_dx_as(Streamed streamed, BlockSize size, Run<const A> x, Gradient<A> g, Standardization<const A*> statistics,
                 DxCoefficients<const A*> coefficients, int64_t step, Target<A> dx) {
    for (int64_t row = 0; row < size.rows; ++row, g.dy += g.dy_stride, g.y += g.y_stride, dx.data += dx.stride) {
        const int64_t at = row * step;
        const Vec<A> c = splat(statistics.center[at]), m = splat(statistics.rstd[at]), o = splat(statistics.offset[at]);
        const Vec<A> va = splat(coefficients.a[at]), vb = splat(coefficients.b[at]), vk = splat(coefficients.k[at]);
        if (x.data) {
            for_vectors(true, dx.data, size.cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
                const Vec<A> rest = fma(vb, fma(read(x.data + i, n) - c, m, o), vk);
                write(streamed.value, dx.data + i, n, fma(va, read_dz<kAct>(g, i, n), rest));
            });
            x.data += x.stride;
        } else {
            for_vectors(true, dx.data, size.cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
                write(streamed.value, dx.data + i, n, va * read_dz<kAct>(g, i, n));
            });
        }
    }
}

template <class A>
void plane_dx(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<const A*> statistics,
              DxCoefficients<const A*> coefficients, int64_t step, Target<A> dx) {
    with_fused(dz.activation, [&](auto fused) {
        with_stream<fused.kind>(dx.stream, [&](auto streamed) {
            plane_dx_as<fused.kind>(streamed, size, x, dz, statistics, coefficients, step, dx);
        });
    });
}

template <ActivationKind kAct, class A>
void plane_apply_moments_as(BlockSize size, Run<const A> x, Affine<A> z, Target<A> y, NextPlaneMoments<A> next) {
    const Vec<A> c = splat(z.center), m = splat(z.scale), b = splat(z.shift);
    PairSum<A> sum;
    MomentSum<A> moments(sum, next.center);
    for (int64_t row = 0; row < size.rows; ++row, x.data += x.stride, next.x += x.stride, y.data += y.stride) {
        put_beside(
            y.data, size.cols, [&](auto each) RG_INLINE_LAMBDA { moments.run(next.x, size.cols, each); },
            [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
                write(true, y.data + i, n, value_of<kAct, A>(fma(read(x.data + i, n) - c, m, b)));
            });
    }
    sum.total(next.sums);
}

template <class A>
void plane_apply_moments(BlockSize size, Run<const A> x, Affine<A> z, ActivationKind f, Target<A> y,
                         NextPlaneMoments<A> next) {
    with_fused(f, [&](auto fused) { plane_apply_moments_as<fused.kind>(size, x, z, y, next); });
}

template <ActivationKind kAct, class A>
void plane_dx_sums_as(BlockSize size, Run<const A> x, Gradient<A> g, Standardization<A> statistics,
                      DxCoefficients<A> coefficients, Target<A> dx, NextPlaneSums<A> next) {
    const Vec<A> c = splat(statistics.center), m = splat(statistics.rstd), o = splat(statistics.offset);
    const Vec<A> va = splat(coefficients.a), vb = splat(coefficients.b), vk = splat(coefficients.k);
    const Vec<A> next_c = splat(next.statistics.center), next_m = splat(next.statistics.rstd);
    const Vec<A> next_o = splat(next.statistics.offset);
    PairSum<A> sum;
    const auto add = [&](Vec<A> v, Vec<A> dz, Vec<A>& s, Vec<A>& q) RG_INLINE_LAMBDA {
        s += dz;
        q = fma(dz, fma(v - next_c, next_m, next_o), q);
    };
    for (int64_t row = 0; row < size.rows; ++row) {
        put_beside(
            dx.data, size.cols,
            [&](auto each) RG_INLINE_LAMBDA {
                sum.run(
                    size.cols,
                    [&](int64_t i, Vec<A>& s, Vec<A>& q)
                        RG_INLINE_LAMBDA { add(load(next.x + i), read_dz<kAct>(next.dz, i, 0), s, q); },
                    each,
                    [&](int64_t i, int64_t n, Vec<A>& s, Vec<A>& q) RG_INLINE_LAMBDA {
                        add(load_part(next.x + i, n, next_c), read_dz<kAct>(next.dz, i, n), s, q);
                    });
            },
            [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
                const Vec<A> rest = fma(vb, fma(read(x.data + i, n) - c, m, o), vk);
                write(true, dx.data + i, n, fma(va, read_dz<kAct>(g, i, n), rest));
            });
        x.data += x.stride, next.x += x.stride, dx.data += dx.stride;
        g.dy += g.dy_stride, g.y += g.y_stride;
        next.dz.dy += g.dy_stride, next.dz.y += g.y_stride;
    }
    sum.total(next.sums);
}

template <class A>
void plane_dx_sums(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<A> statistics,
                   DxCoefficients<A> coefficients, Target<A> dx, const NextPlaneSums<A>& next) {
    with_fused(dz.activation,
               [&](auto fused) { plane_dx_sums_as<fused.kind>(size, x, dz, statistics, coefficients, dx, next); });
}

}  // namespace
}  // namespace rg
