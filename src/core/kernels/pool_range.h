// Pooling of one image plane, or of the channels of an image. The contracts are in ../kernels.h.
//
// A vector holds adjacent columns of one channel, or adjacent channels of one pixel. Either way a lane is one output,
// and its window is walked in the same order, so the bits do not depend on the width or on the layout:
//   for ky, kx: take(x[h + ky * dilation][w + kx * dilation])
#pragma once

#include "../kernels.h"
#include "norm_common.h"
#include "vec.h"

namespace rg {
namespace {

// ---- windows

// The part of a window along one axis that is inside the input: taps first <= k < last, at positions start + k * step.
struct Taps {
    int64_t start, first, last, step;
};

RG_INLINE Taps taps_of(const PoolShape& shape, int axis, int64_t output) {
    const int64_t step = shape.dilation[axis], kernel = shape.kernel[axis], inputs = shape.inputs[axis];
    Taps taps = {output * shape.stride[axis] - shape.before[axis], 0, kernel, step};
    if (taps.start < 0) {
        const int64_t outside = (-taps.start + step - 1) / step;
        taps.first = outside < kernel ? outside : kernel;
    }
    if (taps.start + (kernel - 1) * step >= inputs) {
        const int64_t inside = inputs > taps.start ? (inputs - taps.start + step - 1) / step : 0;
        taps.last = inside < kernel ? inside : kernel;
        if (taps.last < taps.first) taps.last = taps.first;
    }
    return taps;
}

// How many elements an average is divided by.
RG_INLINE int64_t divisor(const PoolShape& shape, const Taps& rows, const Taps& cols) {
    if (shape.count_padding) return shape.kernel[0] * shape.kernel[1];
    return (rows.last - rows.first) * (cols.last - cols.first);
}

// Calls body(row, rows, col, cols, n, whole) for all outputs of rows [first, last): n columns from `col` on, whose taps
// are `cols` and those at as many strides further on. `whole` (a Flag): n is the width of a vector. Columns whose
// window reaches into the padding come one by one. `again`: a column may come twice.
template <class A, bool kAgain, class Body>
RG_INLINE void for_columns(const PoolShape& shape, int64_t first, int64_t last, const Body& body) {
    constexpr int64_t lanes = kLanes<A>;
    const int64_t outputs = shape.outputs[1], stride = shape.stride[1];
    const int64_t reach = shape.inputs[1] + shape.before[1] - 1 - (shape.kernel[1] - 1) * shape.dilation[1];
    int64_t begin = (shape.before[1] + stride - 1) / stride, end = reach < 0 ? 0 : reach / stride + 1;
    if (begin > outputs) begin = outputs;
    if (end > outputs) end = outputs;
    if (end < begin) end = begin;
    for (int64_t row = first; row < last; ++row) {
        const Taps rows = taps_of(shape, 0, row);
        for (int64_t col = 0; col < begin; ++col) {
            body(row, rows, col, taps_of(shape, 1, col), int64_t(1), Flag<lanes == 1>{});
        }
        Taps inside = {begin * stride - shape.before[1], 0, shape.kernel[1], shape.dilation[1]};
        int64_t col = begin;
        for (; col + lanes <= end; col += lanes) {
            body(row, rows, col, inside, lanes, Flag<true>{});
            inside.start += lanes * stride;
        }
        if constexpr (lanes > 1) {
            if (col < end && kAgain && end - begin >= lanes) {
                col = end - lanes;
                inside.start = col * stride - shape.before[1];
                body(row, rows, col, inside, lanes, Flag<true>{});
            } else if (col < end) {
                body(row, rows, col, inside, end - col, Flag<false>{});
            }
        }
        for (col = end; col < outputs; ++col) {
            body(row, rows, col, taps_of(shape, 1, col), int64_t(1), Flag<lanes == 1>{});
        }
    }
}

// Calls body(row, rows, col, cols, channel, n, whole) for n channels of every output pixel.
template <class A, class Body>
RG_INLINE void for_channels(const PoolShape& shape, int64_t channels, int64_t first, int64_t last, const Body& body) {
    constexpr int64_t lanes = kLanes<A>;
    for (int64_t row = first; row < last; ++row) {
        const Taps rows = taps_of(shape, 0, row);
        for (int64_t col = 0; col < shape.outputs[1]; ++col) {
            const Taps cols = taps_of(shape, 1, col);
            int64_t c = 0;
            for (; c + lanes <= channels; c += lanes) body(row, rows, col, cols, c, lanes, Flag<true>{});
            if constexpr (lanes > 1) {
                if (c < channels) body(row, rows, col, cols, c, channels - c, Flag<false>{});
            }
        }
    }
}

// Calls body(h, w) for the taps of a window.
template <class Body>
RG_INLINE void for_taps(const Taps& rows, const Taps& cols, const Body& body) {
    const int64_t left = cols.start + cols.first * cols.step, right = cols.start + cols.last * cols.step;
    for (int64_t ky = rows.first; ky < rows.last; ++ky) {
        const int64_t h = rows.start + ky * rows.step;
        for (int64_t w = left; w < right; w += cols.step) body(h, w);
    }
}

// ---- vectors of columns

// Lane i is p[i * stride]; 0 from n on. kStride is the stride, or 0 for any other.
template <int kStride, bool kWhole, class A>
RG_INLINE Vec<A> load_steps(const A* p, [[maybe_unused]] int64_t stride, [[maybe_unused]] int64_t n) {
    constexpr int64_t lanes = kLanes<A>;
    if constexpr (lanes == 1) {
        return load(p);
    } else if constexpr (kStride == 1) {
        return kWhole ? load(p) : load_part(p, n, Vec<A>{});
    } else if constexpr (kStride == 2 && kWhole) {
        return every_other(load(p), load(p + lanes - 1));
    } else if constexpr (kStride == 2) {
        const int64_t span = 2 * n - 1;
        const Vec<A> none{};
        if (span < lanes) return every_other(load_part(p, span, none), none);
        return every_other(load(p), load_part(p + lanes - 1, span - lanes + 1, none));
    } else {
        A lane[lanes] = {};
        for (int64_t i = 0; i < (kWhole ? lanes : n); ++i) lane[i] = p[i * stride];
        return load(lane);
    }
}

// p[i * stride] += lane i, for lanes up to n; the others must be 0, and are added to other elements after p.
template <int kStride, class A>
RG_INLINE void add_steps(A* p, [[maybe_unused]] int64_t stride, [[maybe_unused]] int64_t n, Vec<A> v) {
    constexpr int64_t lanes = kLanes<A>;
    if constexpr (lanes == 1 || kStride == 1) {
        store(p, load(p) + v);
    } else if constexpr (kStride == 2) {
        const Vec<A> none{};
        store(p, load(p) + interleave_low(v, none));
        store(p + lanes, load(p + lanes) + interleave_high(v, none));
    } else {
        A lane[lanes];
        store(lane, v);
        for (int64_t i = 0; i < n; ++i) p[i * stride] += lane[i];
    }
}

template <bool kWhole, class A>
RG_INLINE Vec<A> load_lanes(const A* p, int64_t n) {
    return load_steps<1, kWhole>(p, 1, n);
}
template <bool kWhole, class A>
RG_INLINE void store_lanes(A* p, [[maybe_unused]] int64_t n, Vec<A> v) {
    if constexpr (kWhole) {
        store(p, v);
    } else {
        store_part(p, n, v);
    }
}

template <int kStride>
struct Stride {
    static constexpr int value = kStride;
};
template <class Body>
RG_INLINE void with_stride(int64_t stride, const Body& body) {
    if (stride == 1) return body(Stride<1>{});
    if (stride == 2) return body(Stride<2>{});
    body(Stride<0>{});
}

// ---- what a window computes

template <class A>
using Bits = typename Format<A>::Bits;

template <class A, bool kIndices>
struct Largest {
    Vec<A> value;
    BitsVec<A> at;

    RG_INLINE Largest(Vec<A> first, Bits<A> position) : value(first), at(BitsVec<A>{} + position) {}
    RG_INLINE void take(Vec<A> v, Bits<A> position) {
        const auto wins = larger_or_nan(v, value);
        value = choose(wins, v, value);
        if constexpr (kIndices) at = choose(wins, BitsVec<A>{} + position, at);
    }
};

// In runs of 16 terms, which are added in order: in float a long sum would lose more than it has to.
template <class A>
struct RunSum {
    Vec<A> total{}, run{};
    int terms = 0;

    RG_INLINE void take(Vec<A> v) {
        run += v;
        if (++terms == 16) {
            total += run;
            run = Vec<A>{};
            terms = 0;
        }
    }
    RG_INLINE Vec<A> sum() const { return total + run; }
};

// The root of the sum of squares. In double precision the squares of floats neither overflow nor underflow.
template <class A>
struct SquareSum {
    Vec<A> sum{};
    RG_INLINE void take(Vec<A> v) { sum = fma(v, v, sum); }
    RG_INLINE Vec<A> norm() const { return root(sum); }
};
template <>
struct SquareSum<float> {
#if defined(RG_ISA_SCALAR)
    double sum = 0;
    RG_INLINE void take(float v) { sum += double(v) * double(v); }  // the product is exact
    RG_INLINE float norm() const { return float(root(sum)); }
#else
    Vec<double> low{}, high{};
    RG_INLINE void take(Vec<float> v) {
        const Vec<double> a = widen_low(v), b = widen_high(v);
        low += a * a;
        high += b * b;
    }
    RG_INLINE Vec<float> norm() const { return narrow(root(low), root(high)); }
#endif
};

// dy * x / y, which is at most dy, and 0 where y is 0.
template <class A>
RG_INLINE Vec<A> l2_term(Vec<A> dy, Vec<A> x, Vec<A> y) {
    const Vec<A> zero{};
    const Vec<A> term = dy * (x / y);
    return y == zero ? zero : term;
}

template <class A, bool kWhole>
RG_INLINE void store_positions(int32_t* p, int64_t n, BitsVec<A> positions) {
    if constexpr (sizeof(A) == sizeof(int32_t)) {
        store_lanes<kWhole>(reinterpret_cast<float*>(p), n, bit_cast<Vec<float>>(positions));
    } else {
        Bits<A> lane[kLanes<A>];
        __builtin_memcpy(lane, &positions, sizeof lane);
        for (int64_t i = 0; i < (kWhole ? int64_t(kLanes<A>) : n); ++i) p[i] = int32_t(lane[i]);
    }
}

// ---- forward

template <class A, bool kIndices, int kStride>
void max_columns(const PoolShape& shape, int64_t first, int64_t last, Pixels<const A> x, Pixels<A> y,
                 Pixels<int32_t> indices) {
    const int64_t width = shape.inputs[1], stride = shape.stride[1];
    Bits<A> lane[kLanes<A>];
    for (int i = 0; i < kLanes<A>; ++i) lane[i] = Bits<A>(i * stride);
    BitsVec<A> steps;
    __builtin_memcpy(&steps, lane, sizeof steps);
    for_columns<A, true>(
        shape, first, last,
        [&](int64_t row, const Taps& rows, int64_t col, const Taps& cols, int64_t n, auto whole) RG_INLINE_LAMBDA {
            constexpr bool kWhole = decltype(whole)::value;
            const int64_t h0 = rows.start + rows.first * rows.step;
            const int64_t w0 = cols.start + cols.first * cols.step;
            // The first tap comes a second time, and changes nothing.
            Largest<A, kIndices> largest(load_steps<kStride, kWhole>(x.data + h0 * x.row + w0, stride, n),
                                         Bits<A>(h0 * width + w0));
            for_taps(rows, cols, [&](int64_t h, int64_t w) RG_INLINE_LAMBDA {
                largest.take(load_steps<kStride, kWhole>(x.data + h * x.row + w, stride, n), Bits<A>(h * width + w));
            });
            store_lanes<kWhole>(y.data + row * y.row + col, n, largest.value);
            if constexpr (kIndices) {
                store_positions<A, kWhole>(indices.data + row * indices.row + col, n, largest.at + steps);
            }
        });
}

template <class A, bool kIndices>
void max_channels(const PoolShape& shape, int64_t channels, int64_t first, int64_t last, Pixels<const A> x, Pixels<A> y,
                  Pixels<int32_t> indices) {
    const int64_t width = shape.inputs[1];
    for_channels<A>(shape, channels, first, last,
                    [&](int64_t row, const Taps& rows, int64_t col, const Taps& cols, int64_t c, int64_t n, auto whole)
                        RG_INLINE_LAMBDA {
                            constexpr bool kWhole = decltype(whole)::value;
                            const int64_t h0 = rows.start + rows.first * rows.step;
                            const int64_t w0 = cols.start + cols.first * cols.step;
                            Largest<A, kIndices> largest(load_lanes<kWhole>(x.data + h0 * x.row + w0 * x.column + c, n),
                                                         Bits<A>(h0 * width + w0));
                            for_taps(rows, cols, [&](int64_t h, int64_t w) RG_INLINE_LAMBDA {
                                largest.take(load_lanes<kWhole>(x.data + h * x.row + w * x.column + c, n),
                                             Bits<A>(h * width + w));
                            });
                            store_lanes<kWhole>(y.data + row * y.row + col * y.column + c, n, largest.value);
                            if constexpr (kIndices) {
                                int32_t* const at = indices.data + row * indices.row + col * indices.column + c;
                                store_positions<A, kWhole>(at, n, largest.at);
                            }
                        });
}

template <class A>
void max_pool(const PoolShape& shape, int64_t channels, int64_t first, int64_t last, Pixels<const A> x, Pixels<A> y,
              Pixels<int32_t> indices) {
    with_flag(indices.data != nullptr, [&](auto wants) {
        constexpr bool kIndices = decltype(wants)::value;
        if (channels) return max_channels<A, kIndices>(shape, channels, first, last, x, y, indices);
        with_stride(shape.stride[1], [&](auto stride) {
            max_columns<A, kIndices, decltype(stride)::value>(shape, first, last, x, y, indices);
        });
    });
}

// y = finish(window, rows, cols) after window.take(x) for every tap.
template <class Window, class A, class Finish>
RG_INLINE void reduce_windows(const PoolShape& shape, int64_t channels, int64_t first, int64_t last, Pixels<const A> x,
                              Pixels<A> y, const Finish& finish) {
    if (channels) {
        for_channels<A>(
            shape, channels, first, last,
            [&](int64_t row, const Taps& rows, int64_t col, const Taps& cols, int64_t c, int64_t n, auto whole)
                RG_INLINE_LAMBDA {
                    constexpr bool kWhole = decltype(whole)::value;
                    Window window;
                    for_taps(rows, cols, [&](int64_t h, int64_t w) RG_INLINE_LAMBDA {
                        window.take(load_lanes<kWhole>(x.data + h * x.row + w * x.column + c, n));
                    });
                    store_lanes<kWhole>(y.data + row * y.row + col * y.column + c, n, finish(window, rows, cols));
                });
        return;
    }
    with_stride(shape.stride[1], [&](auto kind) {
        const int64_t stride = shape.stride[1];
        for_columns<A, true>(
            shape, first, last,
            [&](int64_t row, const Taps& rows, int64_t col, const Taps& cols, int64_t n, auto whole) RG_INLINE_LAMBDA {
                constexpr bool kWhole = decltype(whole)::value;
                Window window;
                for_taps(rows, cols, [&](int64_t h, int64_t w) RG_INLINE_LAMBDA {
                    window.take(load_steps<decltype(kind)::value, kWhole>(x.data + h * x.row + w, stride, n));
                });
                store_lanes<kWhole>(y.data + row * y.row + col, n, finish(window, rows, cols));
            });
    });
}

template <class A>
void average_pool(const PoolShape& shape, int64_t channels, int64_t first, int64_t last, Pixels<const A> x,
                  Pixels<A> y) {
    reduce_windows<RunSum<A>>(shape, channels, first, last, x, y,
                              [&](const RunSum<A>& window, const Taps& rows, const Taps& cols)
                                  RG_INLINE_LAMBDA { return window.sum() / splat(A(divisor(shape, rows, cols))); });
}

template <class A>
void l2_pool(const PoolShape& shape, int64_t channels, int64_t first, int64_t last, Pixels<const A> x, Pixels<A> y) {
    reduce_windows<SquareSum<A>>(shape, channels, first, last, x, y,
                                 [](const SquareSum<A>& window, const Taps&, const Taps&)
                                     RG_INLINE_LAMBDA { return window.norm(); });
}

// ---- backward

// Taps from the last to the first: an input gets the terms of the outputs of a row from the first to the last, whether
// those are in one vector or in several.
template <class Body>
RG_INLINE void for_taps_backwards(const Taps& rows, const Taps& cols, const Body& body) {
    for (int64_t ky = rows.first; ky < rows.last; ++ky) {
        const int64_t h = rows.start + ky * rows.step;
        for (int64_t kx = cols.last - 1; kx >= cols.first; --kx) body(h, cols.start + kx * cols.step);
    }
}

// The gradient of an average, from rows of g = dy / count between zeros. With u = w + before = j * stride + r,
//   dx[h][w] = sum over the output rows of h, and over t from the last to 0 with r + t * stride < kernel, of g[j - t]
// which is the order of the outputs. `result` receives a row of dx; elements around it are overwritten.
template <int kStride, class A>
RG_INLINE void average_gradient_row(const PoolShape& shape, const PoolGradientRows& rows, const A* g, int64_t first,
                                    int64_t last, A* result) {
    constexpr int64_t lanes = kLanes<A>;
    const int64_t stride = shape.stride[1], kernel = shape.kernel[1];
    const int64_t begin = shape.before[1] / stride, end = (shape.before[1] + shape.inputs[1] - 1) / stride + 1;
    [[maybe_unused]] const int64_t reach = shape.before[1] + shape.inputs[1];  // a stride may be longer
    const auto sum = [&](int64_t j, int64_t r) RG_INLINE_LAMBDA {
        Vec<A> total{};
        for (int64_t row = first; row < last; ++row) {
            const A* const p = g + row * rows.length + rows.before + j;
            for (int64_t t = (kernel - 1 - r) / stride; t >= 0; --t) total += load(p - t);
        }
        return total;
    };
    for (int64_t j = begin; j < end; j += lanes) {
        [[maybe_unused]] A* const p =
            result + (j * stride - shape.before[1]);  // one before the row, if it starts with an odd u
        if constexpr (kStride == 1) {
            store(p, sum(j, 0));
        } else if constexpr (kStride == 2 && lanes > 1) {
            const Vec<A> even = sum(j, 0), odd = kernel > 1 ? sum(j, 1) : Vec<A>{};
            store(p, interleave_low(even, odd));
            store(p + lanes, interleave_high(even, odd));
        } else {
            for (int64_t r = 0; r < stride && r < reach; ++r) {
                A lane[lanes] = {};
                if (r < kernel) store(lane, sum(j, r));
                for (int64_t i = 0; i < lanes; ++i) {
                    const int64_t w = (j + i) * stride + r - shape.before[1];
                    if (w >= 0 && w < shape.inputs[1]) result[w] = lane[i];
                }
            }
        }
    }
}

template <class A>
void average_pool_gradient(const PoolShape& shape, int64_t channels, Pixels<const A> dy, Pixels<A> plane, A* scratch) {
    if (channels) {
        for_channels<A>(shape, channels, 0, shape.outputs[0],
                        [&](int64_t row, const Taps& rows, int64_t col, const Taps& cols, int64_t c, int64_t n,
                            auto whole) RG_INLINE_LAMBDA {
                            constexpr bool kWhole = decltype(whole)::value;
                            const Vec<A> share = load_lanes<kWhole>(dy.data + row * dy.row + col * dy.column + c, n) /
                                                 splat(A(divisor(shape, rows, cols)));
                            for_taps(rows, cols, [&](int64_t h, int64_t w) RG_INLINE_LAMBDA {
                                A* const p = plane.data + h * plane.row + w * plane.column + c;
                                store_lanes<kWhole>(p, n, load_lanes<kWhole>(p, n) + share);
                            });
                        });
        return;
    }
    const PoolGradientRows rows(shape);
    const int64_t height = shape.inputs[0], width = shape.inputs[1];
    __builtin_memset(scratch, 0, size_t(rows.scratch(shape.outputs[0])) * sizeof(A));
    for_columns<A, true>(shape, 0, shape.outputs[0],
                         [&](int64_t row, const Taps& taps, int64_t col, const Taps& cols, int64_t n, auto whole)
                             RG_INLINE_LAMBDA {
                                 constexpr bool kWhole = decltype(whole)::value;
                                 store_lanes<kWhole>(scratch + row * rows.length + rows.before + col, n,
                                                     load_lanes<kWhole>(dy.data + row * dy.row + col, n) /
                                                         splat(A(divisor(shape, taps, cols))));
                             });
    A* const result = scratch + shape.outputs[0] * rows.length + kPoolSlack / 2;
    with_stride(shape.stride[1], [&](auto kind) {
        for (int64_t h = 0; h < height; ++h) {
            const int64_t at = h + shape.before[0], past = at - shape.kernel[0] + shape.stride[0];
            const int64_t first = past > 0 ? past / shape.stride[0] : 0, end = at / shape.stride[0] + 1;
            const int64_t last = end < shape.outputs[0] ? end : shape.outputs[0];
            average_gradient_row<decltype(kind)::value>(shape, rows, scratch, first, last, result);
            A* const to = plane.data + h * plane.row;
            int64_t w = 0;
            for (; w + kLanes<A> <= width; w += kLanes<A>) store(to + w, load(to + w) + load(result + w));
            for (; w < width; ++w) to[w] += result[w];
        }
    });
}

template <class A>
void l2_pool_gradient(const PoolShape& shape, int64_t channels, Pixels<const A> dy, Pixels<const A> x,
                      Pixels<const A> y, Pixels<A> plane) {
    const int64_t stride = shape.stride[1];
    if (channels) {
        for_channels<A>(shape, channels, 0, shape.outputs[0],
                        [&](int64_t row, const Taps& rows, int64_t col, const Taps& cols, int64_t c, int64_t n,
                            auto whole) RG_INLINE_LAMBDA {
                            constexpr bool kWhole = decltype(whole)::value;
                            const Vec<A> dz = load_lanes<kWhole>(dy.data + row * dy.row + col * dy.column + c, n);
                            const Vec<A> norm = load_lanes<kWhole>(y.data + row * y.row + col * y.column + c, n);
                            for_taps(rows, cols, [&](int64_t h, int64_t w) RG_INLINE_LAMBDA {
                                A* const p = plane.data + h * plane.row + w * plane.column + c;
                                const Vec<A> v = load_lanes<kWhole>(x.data + h * x.row + w * x.column + c, n);
                                store_lanes<kWhole>(p, n, load_lanes<kWhole>(p, n) + l2_term<A>(dz, v, norm));
                            });
                        });
        return;
    }
    with_stride(stride, [&](auto kind) {
        for_columns<A, false>(
            shape, 0, shape.outputs[0],
            [&](int64_t row, const Taps& rows, int64_t col, const Taps& cols, int64_t n, auto whole) RG_INLINE_LAMBDA {
                constexpr bool kWhole = decltype(whole)::value;
                // Lanes from n on have dy, x and y of 0, and so a term of 0.
                const Vec<A> dz = load_lanes<kWhole>(dy.data + row * dy.row + col, n);
                const Vec<A> norm = load_lanes<kWhole>(y.data + row * y.row + col, n);
                for_taps_backwards(rows, cols, [&](int64_t h, int64_t w) RG_INLINE_LAMBDA {
                    const Vec<A> v = load_steps<decltype(kind)::value, kWhole>(x.data + h * x.row + w, stride, n);
                    add_steps<decltype(kind)::value>(plane.data + h * plane.row + w, stride, n,
                                                     l2_term<A>(dz, v, norm));
                });
            });
    });
}

// ---- indices

uint32_t largest_index(const int32_t* indices, int64_t count) {
    constexpr int64_t lanes = kLanes<float>;
    BitsVec<float> most{};
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes) {
        BitsVec<float> v;
        __builtin_memcpy(&v, indices + i, sizeof v);
        most = v > most ? v : most;
    }
    uint32_t lane[lanes];
    __builtin_memcpy(lane, &most, sizeof lane);
    uint32_t largest = 0;
    for (int k = 0; k < lanes; ++k) largest = lane[k] > largest ? lane[k] : largest;
    for (; i < count; ++i) largest = uint32_t(indices[i]) > largest ? uint32_t(indices[i]) : largest;
    return largest;
}

}  // namespace
}  // namespace rg
