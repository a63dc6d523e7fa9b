// Shared by the normalization kernels: norm_planes.h, norm_rows.h, norm_columns.h. Each of them works on one block:
// sums, and the elementwise passes that use them. The contracts are in ../kernels.h.
//
// Sums of float are accumulated in float for at most kFlush terms and then added to doubles. The rounding error of so
// short a sum, averaged over the partial sums, is far below the result's, and it costs a third of converting every
// element.
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

// The length of rows as a compile-time constant: so many whole vectors; 0: any length. The loops over a short row are
// then unrolled, and what is left of it are the additions.
template <int kVectors>
struct Width {
    static constexpr int vectors = kVectors;
};
template <class A, class Body>
RG_INLINE void with_width(int64_t cols, const Body& body) {
    if constexpr (kHasParts<A>) {
        constexpr int vectors = PairSum<A>::kVectors;
        if (cols * 2 == vectors * kLanes<A>) return body(Width<vectors / 2>());
        if (cols == vectors * kLanes<A>) return body(Width<vectors>());
        if (cols == 2 * vectors * kLanes<A>) return body(Width<2 * vectors>());
    }
    body(Width<0>());
}

// What a vector of a row adds to the row's two sums: `first`, and `a` times `b`.
template <class A>
struct PairTerm {
    Vec<A> first, a, b;
};

// The two sums of a row, with the bits of PairSum. term(i, k, n) computes a vector's terms: of whole vectors, n = 0,
// and of the first n lanes, whatever is in the others. k is the vector's place in its group: i - k * lanes is a
// multiple of the group.
struct SumsOfRow {
    ShortSum first, second;

    template <class A>
    explicit RG_INLINE SumsOfRow(PairSum<A>& sum) {
        sum.flush();
        first = shorten(sum.first_total);
        second = shorten(sum.second_total);
    }
    template <class A, class AnyWidth, class Term>
    RG_INLINE SumsOfRow(AnyWidth width, const A*, int64_t cols, const Term& term) {
        constexpr int vectors = PairSum<A>::kVectors, whole = AnyWidth::vectors;
        constexpr int64_t lanes = kLanes<A>, step = vectors * lanes;
        Sum first_total, second_total;
        if constexpr (whole > 0) {
            constexpr int used = whole < vectors ? whole : vectors;
            Vec<A> s[used], q[used];
            unrolled<whole>([&](int k) RG_INLINE_LAMBDA {
                const PairTerm<A> t = term(k * lanes, k % vectors, int64_t(0));
                s[k % used] = k < used ? t.first : s[k % used] + t.first;
                q[k % used] = k < used ? t.a * t.b : fma(t.a, t.b, q[k % used]);
            });
            first_total.add_all<A>(s);
            second_total.add_all<A>(q);
        } else {
            for (int64_t i = 0; i < cols;) {
                Vec<A> s[vectors] = {}, q[vectors] = {};
                const int64_t end = cols - i < kFlush * step ? cols : i + kFlush * step;
                const auto add = [&](const PairTerm<A>& t, int k) RG_INLINE_LAMBDA {
                    s[k] += t.first;
                    q[k] = fma(t.a, t.b, q[k]);
                };
                for (; i + step <= end; i += step) {
                    unrolled<vectors>([&](int k) RG_INLINE_LAMBDA { add(term(i + k * lanes, k, int64_t(0)), k); });
                }
                if (i < end) {
                    for_last_vectors<A, vectors>(i, cols, [&](int64_t at, int64_t n, int k) RG_INLINE_LAMBDA {
                        const Vec<A> old_s = s[k], old_q = q[k];
                        add(term(at, k, n), k);
                        if (n == 0) return;
                        s[k] = first_of(s[k], n, old_s);
                        q[k] = first_of(q[k], n, old_q);
                    });
                    i = end;
                }
                first_total.add_all<A>(s);
                second_total.add_all<A>(q);
            }
        }
        (void)width;
        first = shorten(first_total);
        second = shorten(second_total);
    }
};

// Calls each(row, r) for the rows of a group, r from 0, and then finish(row, n) with n = 0, or the number of rows in a
// group that is not whole.
template <bool kUnrolled, class Each, class Finish>
RG_INLINE void for_row_groups(int64_t rows, const Each& each, const Finish& finish) {
    constexpr int64_t lanes = kLanes<double>;
    int64_t row = 0;
    for (; row + lanes <= rows; row += lanes) {
        if constexpr (kUnrolled) {
            unrolled<lanes>([&](int r) RG_INLINE_LAMBDA { each(row + r, r); });
        } else {
            for (int64_t r = 0; r < lanes; ++r) each(row + r, r);
        }
        finish(row, int64_t(0));
    }
    if (row == rows) return;
    for (int64_t r = 0; r < rows - row; ++r) each(row + r, r);
    finish(row, rows - row);
}

// Two sums of each row: sum(row) returns them.
template <class AnyWidth, class SumRow>
RG_INLINE void sum_rows(AnyWidth, int64_t rows, double* first, double* second, const SumRow& sum) {
    constexpr int64_t lanes = kLanes<double>;
    ShortSum firsts[lanes], seconds[lanes];
    unrolled<lanes>([&](int r) RG_INLINE_LAMBDA { firsts[r] = seconds[r] = ShortSum{}; });  // if there are fewer rows
    for_row_groups<(AnyWidth::vectors > 0)>(
        rows,
        [&](int64_t row, int64_t r) RG_INLINE_LAMBDA {
            const SumsOfRow sums = sum(row);
            firsts[r] = sums.first;
            seconds[r] = sums.second;
        },
        [&](int64_t row, int64_t n) RG_INLINE_LAMBDA {
            write(first + row, n, totals(firsts));
            write(second + row, n, totals(seconds));
        });
}

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

// Adds x - center and its square over a run; each as in PairSum.
template <class A>
struct MomentSum {
    PairSum<A>& sum;
    Vec<A> center;

    RG_INLINE MomentSum(PairSum<A>& to, A c) : sum(to), center(splat(c)) {}
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
};

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

}  // namespace
}  // namespace rg
