// Softmax's gradients and cumulative sums over one row. The contracts are in ../kernels.h.
#pragma once

#include "../kernels.h"
#include "loss_range.h"
#include "norm_common.h"
#include "vmath.h"

namespace rg {
namespace {

template <class A>
void shift_row(const A* x, int64_t count, double shift, A* y) {
    const Vec<double> by = splat(shift);
    for_vectors(false, y, count, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const Vec<A> v = read(x + i, n);
        write(y + i, n, in_double(v, v, [&](Vec<double> a, Vec<double>) RG_INLINE_LAMBDA { return a - by; }));
    });
}

template <class A>
void softmax_gradient_row(const A* y, const A* dy, int64_t count, double sum, A* dx) {
    const Vec<double> minus = splat(sum);
    for_vectors(false, dx, count, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const auto gradient = [&](Vec<double> p, Vec<double> d) RG_INLINE_LAMBDA { return p * (d - minus); };
        write(dx + i, n, in_double(read(y + i, n), read(dy + i, n), gradient));
    });
}

template <class A>
void log_softmax_gradient_row(const A* y, const A* dy, int64_t count, double sum, A* dx) {
    const Vec<double> by = splat(-sum);
    for_vectors(false, dx, count, [&](int64_t i, int64_t n) RG_INLINE_LAMBDA {
        const auto gradient = [&](Vec<double> p, Vec<double> d) RG_INLINE_LAMBDA { return fma(p, by, d); };
        write(dx + i, n, in_double(vexp<A>(read(y + i, n)), read(dy + i, n), gradient));
    });
}

#if defined(RG_ISA_SCALAR)
template <class A>
RG_INLINE A add_to_carry(A v, bool exclusive, double* carry) {
    const double before = *carry, after = before + double(v);
    *carry = after;
    return A(exclusive ? before : after);
}
#else
RG_INLINE Vec<double> add_to_carry(Vec<double> v, bool exclusive, double* carry) {
    const Vec<double> before = load(carry), after = before + v;
    store(carry, after);
    return exclusive ? before : after;
}
RG_INLINE Vec<float> add_to_carry(Vec<float> v, bool exclusive, double* carry) {
    const Vec<double> low = add_to_carry(widen_low(v), exclusive, carry);
    return narrow(low, add_to_carry(widen_high(v), exclusive, carry + kLanes<double>));
}
#endif

template <class A>
void accumulate_row(const A* x, int64_t count, bool exclusive, double* carry, A* y) {
    constexpr int64_t lanes = kLanes<A>;
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) store(y + i, add_to_carry(load(x + i), exclusive, carry + i));
    for (; i < count; ++i) {
        const double before = carry[i], after = before + double(x[i]);
        carry[i] = after;
        y[i] = A(exclusive ? before : after);
    }
}

}  // namespace
}  // namespace rg
