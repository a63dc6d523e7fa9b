// The operations of maps, and the conversions between their arrays and the arithmetic type.
#pragma once

#include "../base/shape.h"
#include "stage.h"
#include "vmath_more.h"

namespace rg {
namespace {

// One vector. Every special value is as in NumPy: NaN is true, comparisons with it are false, maximum and minimum
// propagate it.
template <MapOperation operation, class A>
RG_INLINE Vec<A> map_value(Vec<A> a, [[maybe_unused]] Vec<A> b, [[maybe_unused]] Vec<A> c) {
    using K = MapOperation;
    const Vec<A> zero = splat(A(0)), one = splat(A(1));
    if constexpr (operation == K::add) return a + b;
    if constexpr (operation == K::sub) return a - b;
    if constexpr (operation == K::mul) return a * b;
    if constexpr (operation == K::div) return a / b;
    if constexpr (operation == K::floor_div) return vfloor_div<A>(a, b);
    if constexpr (operation == K::mod) return vmod<A>(a, b);
    if constexpr (operation == K::fmod) return vfmod<A>(a, b);
    if constexpr (operation == K::pow) return vpow<A>(a, b);
    if constexpr (operation == K::maximum) return choose(larger_or_nan(a, b), a, b);
    if constexpr (operation == K::minimum) return -choose(larger_or_nan(-a, -b), -a, -b);
    if constexpr (operation == K::atan2) return vatan2<A>(a, b);
    if constexpr (operation == K::equal) return a == b ? one : zero;
    if constexpr (operation == K::not_equal) return a != b ? one : zero;
    if constexpr (operation == K::less) return a < b ? one : zero;
    if constexpr (operation == K::less_equal) return a <= b ? one : zero;
    if constexpr (operation == K::greater) return a > b ? one : zero;
    if constexpr (operation == K::greater_equal) return a >= b ? one : zero;
    if constexpr (operation == K::logical_and) return a == zero ? zero : (b == zero ? zero : one);
    if constexpr (operation == K::logical_or) return a == zero ? (b == zero ? zero : one) : one;
    if constexpr (operation == K::logical_xor) {
        return a == zero ? (b == zero ? zero : one) : (b == zero ? one : zero);
    }
    if constexpr (operation == K::logical_not) return a == zero ? one : zero;
    if constexpr (operation == K::is_nan) return a == a ? zero : one;
    if constexpr (operation == K::is_inf) return vabs<A>(a) == splat(A(__builtin_inf())) ? one : zero;
    if constexpr (operation == K::is_finite) return vabs<A>(a) < splat(A(__builtin_inf())) ? one : zero;
    if constexpr (operation == K::select) return a == zero ? c : b;
    if constexpr (operation == K::fma) return fma(a, b, c);
    if constexpr (operation == K::neg) return -a;
    if constexpr (operation == K::abs) return vabs<A>(a);
    if constexpr (operation == K::sign) return a > zero ? one : (a < zero ? -one : (a == zero ? zero : a));
    if constexpr (operation == K::square) return a * a;
    if constexpr (operation == K::sqrt) return root(a);
    if constexpr (operation == K::rsqrt) return one / root(a);
    if constexpr (operation == K::reciprocal) return one / a;
    if constexpr (operation == K::exp) return vexp<A>(a);
    if constexpr (operation == K::exp2) return vexp2<A>(a);
    if constexpr (operation == K::expm1) return vexpm1_signed<A>(a);
    if constexpr (operation == K::log) return vlog<A>(a);
    if constexpr (operation == K::log2) return vlog2<A>(a);
    if constexpr (operation == K::log10) return vlog10<A>(a);
    if constexpr (operation == K::log1p) return vlog1p<A>(a);
    if constexpr (operation == K::sin) return vsin<A>(a);
    if constexpr (operation == K::cos) return vcos<A>(a);
    if constexpr (operation == K::tan) return vtan<A>(a);
    if constexpr (operation == K::asin) return vasin<A>(a);
    if constexpr (operation == K::acos) return vacos<A>(a);
    if constexpr (operation == K::atan) return vatan<A>(a);
    if constexpr (operation == K::sinh) return vsinh<A>(a);
    if constexpr (operation == K::cosh) return vcosh<A>(a);
    if constexpr (operation == K::tanh) return vtanh<A>(a);
    if constexpr (operation == K::asinh) return vasinh<A>(a);
    if constexpr (operation == K::acosh) return vacosh<A>(a);
    if constexpr (operation == K::atanh) return vatanh<A>(a);
    if constexpr (operation == K::erf) return verf<A>(a);
    if constexpr (operation == K::sigmoid) return vsigmoid<A>(a);
    if constexpr (operation == K::relu) return a < zero ? zero : a;
    if constexpr (operation == K::floor) return vfloor(a);
    if constexpr (operation == K::ceil) return vceil(a);
    if constexpr (operation == K::round) return vround(a);
    if constexpr (operation == K::trunc) return vtrunc(a);
    if constexpr (operation == K::copy_sign) return copy_sign<A>(a, b);
    if constexpr (operation == K::sign_bit) return copy_sign<A>(one, a) < zero ? one : zero;
    return a;
}

template <class A>
using MapFunction = void (*)(const MapArgument<A>* arguments, int64_t count, A* out, bool stream);

// Whole vectors only, at aligned addresses if they are streamed. Arguments that the operation does not have are not
// read.
template <MapOperation operation, class A>
void map_vectors(const MapArgument<A>* arguments, int64_t count, A* out, bool streamed) {
    constexpr int arity = kMapOperations[int(operation)].arity;
    constexpr bool cheap = kMapOperations[int(operation)].cost < 0.2;
    const A *a = arguments[0].data, *b = arguments[1].data, *c = arguments[2].data;
    const int64_t a_step = arguments[0].step, b_step = arguments[1].step, c_step = arguments[2].step;
    const auto at = [&](int64_t i) RG_INLINE_LAMBDA {
        const Vec<A> first = load(a + i * a_step);
        const Vec<A> second = arity > 1 ? load(b + i * b_step) : first;
        const Vec<A> third = arity > 2 ? load(c + i * c_step) : first;
        return map_value<operation, A>(first, second, third);
    };
    int64_t i = 0;
    if constexpr (cheap) {
        if (!streamed) {
            for (; i + 4 * kLanes<A> <= count; i += 4 * kLanes<A>) {
                unrolled<4>([&](int k) RG_INLINE_LAMBDA { store(out + i + k * kLanes<A>, at(i + k * kLanes<A>)); });
            }
        }
    }
    for (; i < count; i += kLanes<A>) {
        const Vec<A> value = at(i);
        if (kCanStream && streamed) {
            stream(out + i, value);
        } else {
            store(out + i, value);
        }
    }
}

// int64. Overflow wraps around; division by zero gives 0, as in NumPy.
template <MapOperation operation>
RG_INLINE int64_t map_integer(int64_t a, [[maybe_unused]] int64_t b, [[maybe_unused]] int64_t c) {
    using K = MapOperation;
    using U = uint64_t;
    if constexpr (operation == K::add) return int64_t(U(a) + U(b));
    if constexpr (operation == K::sub) return int64_t(U(a) - U(b));
    if constexpr (operation == K::mul) return int64_t(U(a) * U(b));
    if constexpr (operation == K::floor_div) {
        if (b == 0) return 0;
        if (b == -1) return int64_t(U(0) - U(a));
        return a / b - (a % b != 0 && (a < 0) != (b < 0));
    }
    if constexpr (operation == K::mod) {
        if (b == 0 || b == -1) return 0;
        const int64_t r = a % b;
        return r != 0 && (r < 0) != (b < 0) ? r + b : r;
    }
    if constexpr (operation == K::maximum) return a > b ? a : b;
    if constexpr (operation == K::minimum) return a < b ? a : b;
    if constexpr (operation == K::equal) return a == b;
    if constexpr (operation == K::not_equal) return a != b;
    if constexpr (operation == K::less) return a < b;
    if constexpr (operation == K::less_equal) return a <= b;
    if constexpr (operation == K::greater) return a > b;
    if constexpr (operation == K::greater_equal) return a >= b;
    if constexpr (operation == K::logical_and) return (a != 0) & (b != 0);
    if constexpr (operation == K::logical_or) return (a != 0) | (b != 0);
    if constexpr (operation == K::logical_xor) return (a != 0) ^ (b != 0);
    if constexpr (operation == K::logical_not) return a == 0;
    if constexpr (operation == K::select) return a != 0 ? b : c;
    if constexpr (operation == K::neg) return int64_t(U(0) - U(a));
    if constexpr (operation == K::abs) return a < 0 ? int64_t(U(0) - U(a)) : a;
    if constexpr (operation == K::sign) return (a > 0) - (a < 0);
    if constexpr (operation == K::square) return int64_t(U(a) * U(a));
    if constexpr (operation == K::relu) return a < 0 ? 0 : a;
    if constexpr (operation == K::bit_and) return a & b;
    if constexpr (operation == K::bit_or) return a | b;
    if constexpr (operation == K::bit_xor) return a ^ b;
    if constexpr (operation == K::bit_not) return ~a;
    // By any count, as if one bit at a time; none is negative.
    if constexpr (operation == K::shift_left) return U(b) > 63 ? 0 : int64_t(U(a) << b);
    if constexpr (operation == K::shift_right) return a >> (U(b) > 63 ? 63 : b);
    if constexpr (operation == K::bit_count) {
        U v = U(a);
        v -= (v >> 1) & 0x5555555555555555u;
        v = (v & 0x3333333333333333u) + ((v >> 2) & 0x3333333333333333u);
        return int64_t((((v + (v >> 4)) & 0x0f0f0f0f0f0f0f0fu) * 0x0101010101010101u) >> 56);
    }
    return a;
}
template <MapOperation operation>
void map_integer_range(const MapArgument<int64_t>* arguments, int64_t count, int64_t* out, bool) {
    constexpr int arity = kMapOperations[int(operation)].arity;
    const int64_t *a = arguments[0].data, *b = arguments[1].data, *c = arguments[2].data;
    const int64_t a_step = arguments[0].step, b_step = arguments[1].step, c_step = arguments[2].step;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t first = a[i * a_step];
        out[i] = map_integer<operation>(first, arity > 1 ? b[i * b_step] : first, arity > 2 ? c[i * c_step] : first);
    }
}

template <MapOperation operation, class A>
constexpr MapFunction<A> map_function() {
    if constexpr (sizeof(A) == sizeof(int64_t) && A(0.5) == 0) {
        if constexpr (kMapOperations[int(operation)].integers) return map_integer_range<operation>;
        return nullptr;
    } else if constexpr (only_integers(operation)) {
        return nullptr;
    } else {
        return map_vectors<operation, A>;
    }
}
template <class A>
constexpr MapFunction<A> kMapFunctions[] = {
#define RG_ENTRY(name, ...) map_function<MapOperation::name, A>(),
    RG_MAP_OPERATIONS(RG_ENTRY)
#undef RG_ENTRY
};

// Less than a whole vector, padded with ones.
template <class A>
void map_part(MapOperation operation, const MapArgument<A>* arguments, int64_t first, int64_t count, A* out) {
    const int arity = kMapOperations[int(operation)].arity;
    A lane[3][kLanes<A>], result[kLanes<A>];
    MapArgument<A> part[3];
    for (int k = 0; k < 3; ++k) {
        part[k] = {k < arity && !arguments[k].step ? arguments[k].data : lane[k < arity ? k : 0], 1};
        if (k < arity && arguments[k].step) {
            store(lane[k], load_part(arguments[k].data + first, count, splat(A(1))));
        }
    }
    kMapFunctions<A>[int(operation)](part, kLanes<A>, result, false);
    store_part(out + first, count, load(result));
}

template <class A>
void map_run(MapOperation operation, const MapArgument<A>* arguments, int64_t count, A* out, bool stream) {
    int64_t head = 0;
    if (kCanStream && stream) {
        constexpr int64_t bytes = kLanes<A> * int64_t(sizeof(A));
        const int64_t misaligned = int64_t(uintptr_t(out) % uintptr_t(bytes));
        head = misaligned ? (bytes - misaligned) / int64_t(sizeof(A)) : 0;
        if (head > count) head = count;
        if (head) map_part(operation, arguments, 0, head, out);
    }
    MapArgument<A> rest[3];
    const int arity = kMapOperations[int(operation)].arity;
    for (int k = 0; k < 3; ++k) {
        const MapArgument<A>& from = arguments[k < arity ? k : 0];
        rest[k] = {from.data + head * from.step, from.step};
    }
    const int64_t whole = (count - head) / kLanes<A> * kLanes<A>, last = head + whole;
    kMapFunctions<A>[int(operation)](rest, whole, out + head, stream);
    if (last < count) map_part(operation, arguments, last, count - last, out);
}
template <>
void map_run<int64_t>(MapOperation operation, const MapArgument<int64_t>* arguments, int64_t count, int64_t* out,
                      bool stream) {
    kMapFunctions<int64_t>[int(operation)](arguments, count, out, stream);
}

// ---- conversions ---------------------------------------------------------------------------------------------------

struct Boolean {
    uint8_t byte;
};

template <class To>
RG_INLINE To saturated(double v) {
    constexpr double limit = sizeof(To) == 8 ? 0x1p63 : 0x1p31;
    constexpr To largest = sizeof(To) == 8 ? To(INT64_MAX) : To(INT32_MAX);
    if (v >= limit) return largest;
    if (v < -limit) return To(-largest - 1);
    return v == v ? To(v) : To(0);
}

template <class To, class From>
RG_INLINE To converted(From v) {
    constexpr bool to_boolean = sizeof(To) == 1, from_boolean = sizeof(From) == 1;
    if constexpr (to_boolean && from_boolean) {
        return {uint8_t(v.byte != 0)};
    } else if constexpr (to_boolean) {
        return {uint8_t(v != 0)};
    } else if constexpr (from_boolean) {
        return To(v.byte != 0);
    } else if constexpr (To(0.5) == 0 && From(0.5) != 0) {
        return saturated<To>(double(v));
    } else {
        return To(v);
    }
}

// Rows of a fixed length inside, which compilers turn into vector code.
template <class From, class To>
void convert_row(const From* __restrict__ src, int64_t count, To* __restrict__ dst) {
    constexpr int64_t chunk = 64;
    int64_t i = 0;
    for (; i + chunk <= count; i += chunk) {
        for (int64_t k = 0; k < chunk; ++k) dst[i + k] = converted<To, From>(src[i + k]);
    }
    for (; i < count; ++i) dst[i] = converted<To, From>(src[i]);
}

#if !defined(RG_ISA_SCALAR)
template <class A>
struct BooleanBytes {
    typedef uint8_t type __attribute__((vector_size(kLanes<A>)));
};
template <class A>
RG_INLINE void booleans_from(const A* src, int64_t count, Boolean* dst) {
    int64_t i = 0;
    for (; i + kLanes<A> <= count; i += kLanes<A>) {
        const BitsVec<A> ones = BitsVec<A>(load(src + i) != splat(A(0))) & 1;
        const auto bytes = __builtin_convertvector(ones, typename BooleanBytes<A>::type);
        __builtin_memcpy(dst + i, &bytes, sizeof bytes);
    }
    for (; i < count; ++i) dst[i] = converted<Boolean, A>(src[i]);
}
void convert_row(const float* src, int64_t count, Boolean* dst) { booleans_from(src, count, dst); }
void convert_row(const double* src, int64_t count, Boolean* dst) { booleans_from(src, count, dst); }
#endif

template <class To>
void fill_row(To value, int64_t count, To* dst) {
    constexpr int64_t chunk = 32;
    int64_t i = 0;
    for (; i + chunk <= count; i += chunk) {
        for (int64_t k = 0; k < chunk; ++k) dst[i + k] = value;
    }
    for (; i < count; ++i) dst[i] = value;
}

template <class From, class To>
void convert_plane(const From* src, BlockSize size, int64_t src_row, int64_t src_col, To* dst, int64_t dst_row,
                   int64_t dst_col) {
    if (src_col == 1 && dst_col == 1) {
        for (int64_t r = 0; r < size.rows; ++r) convert_row(src + r * src_row, size.cols, dst + r * dst_row);
    } else if (src_col == 0 && dst_col == 1) {
        for (int64_t r = 0; r < size.rows; ++r) {
            fill_row(converted<To, From>(src[r * src_row]), size.cols, dst + r * dst_row);
        }
    } else if (size.rows > 1 && (src_row == 1 || src_row == -1)) {
        // Transposed: columns outside, so that source lines are read once.
        for (int64_t c = 0; c < size.cols; ++c) {
            const From* from = src + c * src_col;
            To* to = dst + c * dst_col;
            for (int64_t r = 0; r < size.rows; ++r) to[r * dst_row] = converted<To, From>(from[r * src_row]);
        }
    } else {
        for (int64_t r = 0; r < size.rows; ++r) {
            const From* from = src + r * src_row;
            To* to = dst + r * dst_row;
            for (int64_t c = 0; c < size.cols; ++c) to[c * dst_col] = converted<To, From>(from[c * src_col]);
        }
    }
}

template <class A>
void map_load(MapElement element, const void* src, BlockSize size, int64_t row_stride, int64_t col_stride, A* dst) {
    const auto from = [&](auto* typed) { convert_plane(typed, size, row_stride, col_stride, dst, size.cols, 1); };
    switch (element) {
        case MapElement::f32:
            return from((const float*)src);
        case MapElement::f64:
            return from((const double*)src);
        case MapElement::i32:
            return from((const int32_t*)src);
        case MapElement::i64:
            return from((const int64_t*)src);
        case MapElement::boolean:
            return from((const Boolean*)src);
    }
}

template <class A>
void stream_row(const A* src, int64_t count, A* dst) {
    if constexpr (A(0.5) != 0) {
        stream_elements<A>(src, count, dst);
    } else {
        convert_row<A, A>(src, count, dst);
    }
}

template <class A>
void map_store(MapElement element, const A* src, BlockSize size, void* dst, int64_t row_stride, int64_t col_stride,
               bool stream) {
    constexpr MapElement own = A(0.5) == 0 ? MapElement::i64 : sizeof(A) == 4 ? MapElement::f32 : MapElement::f64;
    if (stream && element == own && col_stride == 1) {
        for (int64_t r = 0; r < size.rows; ++r) stream_row(src + r * size.cols, size.cols, (A*)dst + r * row_stride);
        return;
    }
    const auto to = [&](auto* typed) { convert_plane(src, size, size.cols, 1, typed, row_stride, col_stride); };
    switch (element) {
        case MapElement::f32:
            return to((float*)dst);
        case MapElement::f64:
            return to((double*)dst);
        case MapElement::i32:
            return to((int32_t*)dst);
        case MapElement::i64:
            return to((int64_t*)dst);
        case MapElement::boolean:
            return to((Boolean*)dst);
    }
}

}  // namespace
}  // namespace rg
