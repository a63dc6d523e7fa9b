// Normalization over one block: sums, and the elementwise passes that use them. The contracts are in ../kernels.h.
//
// Sums of float are accumulated in float for at most kFlush terms and then added to doubles. The rounding error of so
// short a sum, averaged over the partial sums, is far below that of the result, and it costs a third of converting
// every element.
#pragma once

#include "../kernels.h"
#include "activation.h"

namespace rg {
namespace {

constexpr int kFlush = 16;

// The first n lanes, or all of them for n = 0. A vector of one lane cannot be split.
template <class A>
constexpr bool kHasParts = kLanes<A> > 1;
template <class A>
RG_INLINE Vec<A> read(const A* p, int64_t n) {
    return kHasParts<A> && n ? load_part(p, n, splat(A(0))) : load(p);
}
template <class A>
RG_INLINE void write(A* p, int64_t n, Vec<A> v) {
    kHasParts<A>&& n ? store_part(p, n, v) : store(p, v);
}
// A non-temporal store bypasses the cache and must be aligned, which for_vectors ensures.
template <class A>
RG_INLINE void write(bool streamed, A* p, int64_t n, Vec<A> v) {
    streamed && !(kHasParts<A> && n) ? stream(p, v) : write(p, n, v);
}
template <class A>
RG_INLINE void add(double* p, int64_t n, Vec<A> v) {
    kHasParts<A>&& n ? add_to_part<A>(p, n, v) : add_to(p, v);
}

// f(z) of a fused activation, and its dz. Fused activations have no parameters.
template <ActivationKind kAct, class A>
RG_INLINE Vec<A> value_of(Vec<A> z) {
    return activation_value<kAct, A>(z, z, z);
}
template <ActivationKind kAct, class A>
RG_INLINE Vec<A> read_dz(const A* dy, const A* y, int64_t n) {
    if constexpr (kAct == ActivationKind::identity) return read(dy, n);
    return activation_slope_times<kAct, A>(read(y, n), read(dy, n), Vec<A>{}, Vec<A>{});
}
template <ActivationKind kAct, class A>
RG_INLINE Vec<A> read_dz(const Gradient<A>& g, int64_t i, int64_t n) {
    return read_dz<kAct>(g.dy + i, g.y + i, n);
}

// Calls body with the activation as a compile-time constant.
template <ActivationKind kAct>
struct Fused {
    static constexpr ActivationKind kind = kAct;
};
template <class Body>
RG_INLINE void with_fused(ActivationKind kind, Body body) {
    using K = ActivationKind;
    if (kind == K::relu) return body(Fused<K::relu>{});
    if (kind == K::sigmoid) return body(Fused<K::sigmoid>{});
    if (kind == K::tanh) return body(Fused<K::tanh>{});
    body(Fused<K::identity>{});
}
template <bool kValue>
struct Flag {
    static constexpr bool value = kValue;
};
template <class Body>
RG_INLINE void with_flag(bool value, Body body) {
    value ? body(Flag<true>{}) : body(Flag<false>{});
}
// The same with the flag as a constant, only where that is worth a second copy of the kernel: not for sigmoid and tanh,
// which take longer than a branch and are most of a kernel's code.
struct RuntimeFlag {
    bool value;
};
template <ActivationKind kAct, class Body>
RG_INLINE void with_flag_if_cheap(bool value, Body body) {
    if constexpr (kAct == ActivationKind::sigmoid || kAct == ActivationKind::tanh) {
        body(RuntimeFlag{value});
    } else {
        with_flag(value, body);
    }
}
// Whether to stream, if the instruction-set level supports it.
template <ActivationKind kAct, class Body>
RG_INLINE void with_stream(bool stream, Body body) {
    if constexpr (kCanStream) {
        with_flag_if_cheap<kAct>(stream, body);
    } else {
        body(Flag<false>{});
    }
}

// Elements before the first whole vector that is aligned in `out`, at most `cols`.
template <class A>
RG_INLINE int64_t aligned_head(const A* out, int64_t cols) {
    constexpr int64_t lanes = kLanes<A>;
    const int64_t misaligned = int64_t(uintptr_t(out) / sizeof(A)) % lanes;
    const int64_t head = misaligned ? lanes - misaligned : 0;
    return head < cols ? head : cols;
}

// Calls body(i, n) for every vector of a run that is written to `out`, n = 0 for whole ones. With `aligned`, whole ones
// are aligned in `out`: streams must be, and in long runs a store across two cache lines costs more than the partial
// vectors at both ends. Only elementwise passes may use this: how a sum is cut must not depend on an address.
//
// The body is inlined twice, for partial and for whole vectors: the outer loop handles both the head and the tail.
template <class A, class Body>
RG_INLINE void for_vectors(bool aligned, const A* out, int64_t cols, Body body) {
    constexpr int64_t lanes = kLanes<A>;
    int64_t i = 0, n = aligned ? aligned_head(out, cols) : 0;
    do {
        if (kHasParts<A> && n) body(i, n);
        for (i += n; i + lanes <= cols; i += lanes) body(i, int64_t(0));
        n = cols - i;
    } while (kHasParts<A> && n > 0);
}

// Calls body(i, n, k) for the vectors of a run from i on, fewer than kVectors: n = 0 for whole ones, k counts from 0.
template <class A, int kVectors, int k = 0, class Body>
RG_INLINE void for_last_vectors(int64_t i, int64_t cols, const Body& body) {
    if constexpr (!kHasParts<A>) {
        for (int at = 0; i < cols; ++i, ++at) body(i, int64_t(0), at);
    } else if (i < cols) {
        const bool partial = k + 1 == kVectors || cols - i < kLanes<A>;
        body(i, partial ? cols - i : int64_t(0), k);
        if constexpr (k + 1 < kVectors) for_last_vectors<A, kVectors, k + 1>(i + kLanes<A>, cols, body);
    }
}
// The same for a whole run that is summed: k is the vector's place in its group of kVectors.
template <class A, int kVectors, class Body>
RG_INLINE void for_groups_of_vectors(int64_t cols, const Body& body) {
    constexpr int64_t lanes = kLanes<A>;
    int64_t i = 0;
    for (; i + kVectors * lanes <= cols; i += kVectors * lanes) {
        unrolled<kVectors>([&](int k) RG_INLINE_LAMBDA { body(i + k * lanes, int64_t(0), k); });
    }
    for_last_vectors<A, kVectors>(i, cols, body);
}

// Two running sums over elements of A, each in 128 bytes of partial sums: element i of a run is added to partial sum
// i % 32 (of double: 16). That is two AVX-512 registers or four of AVX2, enough to hide the latency of addition.
template <class A>
struct PairSum {
    static constexpr int kVectors = 128 / int(sizeof(A)) / kLanes<A>;
    Vec<A> first[kVectors] = {}, second[kVectors] = {};
    Sum first_total, second_total;
    int pending = 0;

    RG_INLINE void flush() {
        first_total.add_all<A>(first);
        second_total.add_all<A>(second);
        unrolled<kVectors>([&](int k) RG_INLINE_LAMBDA { first[k] = second[k] = Vec<A>{}; });
        pending = 0;
    }
    // Sums `cols` elements: term(i, s, q) adds a whole vector at i to the sums, last(i, n, s, q) one of n elements
    // (what it adds to other lanes is ignored); each(i, vectors) is called after that many whole vectors from i on were
    // added.
    template <class Term, class Each, class Last>
    RG_INLINE void run(int64_t cols, Term term, Each each, Last last) {
        constexpr int64_t lanes = kLanes<A>, step = kVectors * lanes;
        int64_t i = 0;
        while (cols - i >= step) {
            const int64_t steps = (cols - i) / step;
            const int64_t now = steps < kFlush - pending ? steps : kFlush - pending;
            for (const int64_t end = i + now * step; i < end; i += step) {
                unrolled<kVectors>([&](int k) RG_INLINE_LAMBDA { term(i + k * lanes, first[k], second[k]); });
                each(i, kVectors);
            }
            pending += int(now);
            if (pending >= kFlush) flush();
        }
        if (i == cols) return;
        for_last_vectors<A, kVectors>(i, cols, [&](int64_t at, int64_t n, int k) RG_INLINE_LAMBDA {
            if (n == 0) return term(at, first[k], second[k]);
            Vec<A> s = first[k], q = second[k];
            last(at, n, s, q);
            first[k] = first_of(s, n, first[k]);
            second[k] = first_of(q, n, second[k]);
        });
        each(i, int((cols - i) / lanes));
        if (++pending >= kFlush) flush();
    }
    RG_INLINE void total(double* sums) {
        flush();
        sums[0] += first_total.total();
        sums[1] += second_total.total();
    }
};

// Calls body(i) for `vectors` vectors from i on: unrolled if the number is a constant, else inlined once.
template <class A, class Body>
RG_INLINE void repeat(int64_t i, int vectors, Body body) {
#pragma GCC unroll 1
    for (int k = 0; k < vectors; ++k) body(i + k * kLanes<A>);
}
template <class A, class Body>
RG_INLINE void repeat_unrolled(int64_t i, int vectors, Body body) {
#pragma GCC unroll 4
    for (int k = 0; k < vectors; ++k) body(i + k * kLanes<A>);
}

// The sums of x - center and of its square over runs; each as in PairSum.
template <class A>
struct MomentSum {
    PairSum<A> sum;
    Vec<A> center;

    explicit MomentSum(A c) : center(splat(c)) {}
    template <class Each>
    RG_INLINE void run(const A* x, int64_t cols, Each each) {
        const auto add = [&](Vec<A> v, Vec<A>& s, Vec<A>& q) RG_INLINE_LAMBDA {
            const Vec<A> d = v - center;
            s += d;
            q = fma(d, d, q);
        };
        sum.run(
            cols, [&](int64_t i, Vec<A>& s, Vec<A>& q) RG_INLINE_LAMBDA { add(load(x + i), s, q); }, each,
            [&](int64_t i, int64_t n, Vec<A>& s, Vec<A>& q)
                RG_INLINE_LAMBDA { add(load_part(x + i, n, center), s, q); });
    }
    RG_INLINE void total(double* sums) { sum.total(sums); }
};

template <class A>
void plane_moments(BlockSize size, Run<const A> x, A center, double* sums) {
    MomentSum<A> sum(center);
    for (int64_t row = 0; row < size.rows; ++row, x.data += x.stride) {
        sum.run(x.data, size.cols, [&](int64_t i, int vectors) RG_INLINE_LAMBDA {
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
void plane_apply_as(Streamed streamed, BlockSize size, Run<const A> x, Affine<A> z, Target<A> y) {
    const Vec<A> c = splat(z.center), m = splat(z.scale), b = splat(z.shift);
    for (int64_t row = 0; row < size.rows; ++row, x.data += x.stride, y.data += y.stride) {
        for_vectors(true, y.data, size.cols, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
            write(streamed.value, y.data + i, n, value_of<kAct, A>(fma(read(x.data + i, n) - c, m, b)));
        });
    }
}

template <class A>
void plane_apply(BlockSize size, Run<const A> x, Affine<A> z, ActivationKind f, Target<A> y) {
    with_fused(f, [&](auto fused) {
        with_stream<fused.kind>(y.stream, [&](auto streamed) { plane_apply_as<fused.kind>(streamed, size, x, z, y); });
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
void plane_dx_as(Streamed streamed, BlockSize size, Run<const A> x, Gradient<A> g, Standardization<A> statistics,
                 DxCoefficients<A> coefficients, Target<A> dx) {
    const Vec<A> c = splat(statistics.center), m = splat(statistics.rstd), o = splat(statistics.offset);
    const Vec<A> va = splat(coefficients.a), vb = splat(coefficients.b), vk = splat(coefficients.k);
    for (int64_t row = 0; row < size.rows; ++row, g.dy += g.dy_stride, g.y += g.y_stride, dx.data += dx.stride) {
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
void plane_dx(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<A> statistics,
              DxCoefficients<A> coefficients, Target<A> dx) {
    with_fused(dz.activation, [&](auto fused) {
        with_stream<fused.kind>(dx.stream, [&](auto streamed) {
            plane_dx_as<fused.kind>(streamed, size, x, dz, statistics, coefficients, dx);
        });
    });
}

// Computes and streams one run while another of the same length is summed. sum(each) sums and calls each(i, vectors) as
// PairSum does; put(i, n) computes and writes vectors of the other, aligned in `out`. Head and tail come last, in one
// loop, so that put is inlined once for partial vectors.
template <class A, class Sum, class Put>
RG_INLINE void put_beside(const A* out, int64_t cols, Sum sum, Put put) {
    constexpr int64_t lanes = kLanes<A>;
    const int64_t head = aligned_head(out, cols);
    const int64_t whole = (cols - head) / lanes * lanes;  // elements in aligned vectors
    sum([&](int64_t first, int vectors) RG_INLINE_LAMBDA {
        repeat<A>(first, vectors, [&](int64_t i) RG_INLINE_LAMBDA {
            if (i < whole) put(head + i, int64_t(0));
        });
    });
    if constexpr (kHasParts<A>) {
        int64_t i = 0, n = head;
#pragma GCC unroll 1
        for (int end = 0; end < 2; ++end, i = head + whole, n = cols - i) {
            if (n) put(i, n);
        }
    }
}

template <ActivationKind kAct, class A>
void plane_apply_moments_as(BlockSize size, Run<const A> x, Affine<A> z, Target<A> y, NextPlaneMoments<A> next) {
    const Vec<A> c = splat(z.center), m = splat(z.scale), b = splat(z.shift);
    MomentSum<A> sum(next.center);
    for (int64_t row = 0; row < size.rows; ++row, x.data += x.stride, next.x += x.stride, y.data += y.stride) {
        put_beside(
            y.data, size.cols, [&](auto each) RG_INLINE_LAMBDA { sum.run(next.x, size.cols, each); },
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

// ---- rows ----------------------------------------------------------------------------------------------------------

template <class A>
void row_centers(BlockSize size, Run<const A> x, double* center) {
    constexpr int64_t enough = 64;
    const int64_t count = size.cols < enough ? size.cols : enough;
    const double share = 1 / double(count);
    for (int64_t row = 0; row < size.rows; ++row, x.data += x.stride) {
        constexpr int vectors = PairSum<A>::kVectors;
        Vec<A> sum[vectors] = {};
        for_groups_of_vectors<A, vectors>(
            count, [&](int64_t i, int64_t n, int k) RG_INLINE_LAMBDA { sum[k] += read(x.data + i, n); });
        Sum total;
        total.add_all<A>(sum);
        center[row] = double(A(total.total() * share));
    }
}

template <class A>
void row_moments(BlockSize size, Run<const A> x, const double* center, double* sums) {
    for (int64_t row = 0; row < size.rows; ++row, x.data += x.stride, sums += 2) {
        MomentSum<A> sum{A(center[row])};  // braces: parentheses would declare a function
        sum.run(x.data, size.cols, [](int64_t, int) {});
        sum.total(sums);
    }
}

// Square roots and divisions of several rows at once: one after the other they take as long as a short row.
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
        MomentSum<A> sum{A(next.center[row])};  // braces: parentheses would declare a function
        put_beside(
            y.data, size.cols, [&](auto each) RG_INLINE_LAMBDA { sum.run(next.x, size.cols, each); },
            [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
                const Vec<A> xhat = fma(read(x.data + i, n) - c, m, o);
                write(true, y.data + i, n, row_value<kAct>(flags, xhat, parameters, i, n));
            });
        sum.total(next.sums);
        x.data += x.stride, next.x += x.stride, y.data += y.stride, next.sums += 2;
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

// The first sums of the columns from i on. The sums of dz and those of dz * xhat alternate, because a load waits for an
// earlier store with the same lowest twelve bits of the address: so the chains move through a page at twice the speed
// of the data, and cannot stay ahead of it by a constant distance.
template <class A>
RG_INLINE A* chain_of(A* chains, int64_t i) {
    return chains + 2 * i - i % kChainLine<A>;
}

template <ActivationKind kAct, bool kGamma, bool kChains, class A>
void row_sums_as(BlockSize size, Run<const A> x, Gradient<A> g, Standardization<const A*> statistics, const A* gamma,
                 double* sums, A* chains) {
    for (int64_t row = 0; row < size.rows; ++row) {
        const Vec<A> c = splat(statistics.center[row]), m = splat(statistics.rstd[row]);
        const Vec<A> o = splat(statistics.offset[row]);
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
            [&](int64_t i, Vec<A>& s, Vec<A>& q) RG_INLINE_LAMBDA { add(i, int64_t(0), load(x.data + i), s, q); },
            [](int64_t, int) {},
            [&](int64_t i, int64_t n, Vec<A>& s, Vec<A>& q)
                RG_INLINE_LAMBDA { add(i, n, load_part(x.data + i, n, c), s, q); });
        sum.total(sums);
        x.data += x.stride, g.dy += g.dy_stride, g.y += g.y_stride, sums += 2;
    }
}

template <class A>
void row_sums(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<const A*> statistics,
              const A* gamma, double* sums, A* chains) {
    with_fused(dz.activation, [&](auto fused) {
        with_flag(gamma, [&](auto scaled) {
            with_flag(chains, [&](auto chained) {
                row_sums_as<fused.kind, scaled.value, chained.value>(size, x, dz, statistics, gamma, sums, chains);
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

// ---- columns -------------------------------------------------------------------------------------------------------
//
// Sums over a column are chains over kColumnChain of its rows in the arithmetic type. Two of them are added, which
// makes kColumnRows rows, and the result is added to a double. The width of vectors does not matter.

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
        return [=, stride = x.stride](int v, Vec<A>& s, Vec<A>& q) mutable RG_INLINE_LAMBDA {
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
        return [=, stride = x.stride](int v, Vec<A>& s, Vec<A>& q) mutable RG_INLINE_LAMBDA {
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
