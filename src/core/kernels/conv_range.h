// Convolutions: packing of patches, and direct sums over taps for few channels.
#pragma once

#include "../kernels.h"
#include "vec.h"

namespace rg {
namespace {

// A run is copied as a whole panel row. What lies beyond its end is overwritten by the next run, and at the end of a
// row by the row below.
template <class A>
void pack_taps(const A* band, const int64_t* offsets, int64_t depth, const PatchRun* runs, int64_t count, A* panel) {
    constexpr int V = int(kPanel<A>) / kLanes<A>;
    for (int64_t k = 0; k < depth; ++k, panel += kPanel<A>) {
        const A* from = band + offsets[k];
        for (int64_t i = 0; i < count; ++i) {
            Vec<A> row[V];
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) row[v] = load(from + runs[i].from + v * kLanes<A>);
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) store(panel + runs[i].to + v * kLanes<A>, row[v]);
        }
    }
}

// One to four vectors of y, side by side to hide the latency of the multiply-add; the last one has `rest` elements.
template <class A, int C>
RG_INLINE void tap_vectors(const A* band, const int64_t* offsets, const A* weights, int64_t taps, const A* base, A bias,
                           int64_t rest, A* y) {
    Vec<A> sum[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
        const bool whole = c + 1 < C || rest == kLanes<A>;
        sum[c] = !base   ? splat(bias)
                 : whole ? load(base + c * kLanes<A>)
                         : load_part(base + c * kLanes<A>, rest, splat(A(0)));
    }
    for (int64_t t = 0; t < taps; ++t) {
        const Vec<A> w = splat(weights[t]);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) sum[c] = fma(w, load(band + offsets[t] + c * kLanes<A>), sum[c]);
    }
#pragma GCC unroll 4
    for (int c = 0; c + 1 < C; ++c) store(y + c * kLanes<A>, sum[c]);
    store_part(y + (C - 1) * kLanes<A>, rest, sum[C - 1]);
}

template <class A>
void tap_row(const A* band, const int64_t* offsets, const A* weights, int64_t taps, int64_t count, const A* base,
             A bias, A* y) {
    for (int64_t j = 0; j < count;) {
        const int64_t left = count - j, vectors = (left + kLanes<A> - 1) / kLanes<A>;
        const A* from = base ? base + j : nullptr;
        const int64_t rest = vectors > 4 ? kLanes<A> : left - (vectors - 1) * kLanes<A>;
        if (vectors == 1) {
            tap_vectors<A, 1>(band + j, offsets, weights, taps, from, bias, rest, y + j);
        } else if (vectors == 2) {
            tap_vectors<A, 2>(band + j, offsets, weights, taps, from, bias, rest, y + j);
        } else if (vectors == 3) {
            tap_vectors<A, 3>(band + j, offsets, weights, taps, from, bias, rest, y + j);
        } else {
            tap_vectors<A, 4>(band + j, offsets, weights, taps, from, bias, rest, y + j);
        }
        j += (vectors > 4 ? 4 : vectors) * kLanes<A>;
    }
}

// The sums of T taps. Products are summed in the arithmetic type, by lanes of a panel, for as many rows as have
// kColumnRows panels, or for one.
template <class A, int T>
RG_INLINE void sum_taps(const A* band, int64_t band_row, const int64_t* offsets, BlockSize size, const A* dy,
                        int64_t dy_row, double* sums) {
    constexpr int V = int(kPanel<A>) / kLanes<A>;
    const int64_t panels = (size.cols + kPanel<A> - 1) / kPanel<A>;
    const int64_t run = panels >= kColumnRows ? 1 : kColumnRows / panels;
    for (int64_t first = 0; first < size.rows; first += run) {
        const int64_t last = first + run < size.rows ? first + run : size.rows;
        Vec<A> part[T][V];
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) part[t][v] = splat(A(0));
        }
        for (int64_t r = first; r < last; ++r) {
            const A *x = band + r * band_row, *row = dy + r * dy_row;
            for (int64_t j = 0; j < size.cols; j += kPanel<A>) {
#pragma GCC unroll 16
                for (int v = 0; v < V; ++v) {
                    const int64_t at = j + v * kLanes<A>, rest = size.cols - at;
                    if (rest <= 0) continue;
                    const Vec<A> zero = splat(A(0));
                    const Vec<A> d = rest >= kLanes<A> ? load(row + at) : load_part(row + at, rest, zero);
#pragma GCC unroll 4
                    for (int t = 0; t < T; ++t) {
                        const A* from = x + offsets[t] + at;
                        const Vec<A> value = rest >= kLanes<A> ? load(from) : load_part(from, rest, zero);
                        part[t][v] = fma(d, value, part[t][v]);
                    }
                }
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) add_to(sums + t * kPanel<A> + v * kLanes<A>, part[t][v]);
        }
    }
}

template <class A>
void tap_sums(const A* band, int64_t band_row, const int64_t* offsets, int64_t taps, BlockSize size, const A* dy,
              int64_t dy_row, double* sums) {
    constexpr int kTogether = 3;
    int64_t t = 0;
    for (; t + kTogether <= taps; t += kTogether) {
        sum_taps<A, kTogether>(band, band_row, offsets + t, size, dy, dy_row, sums + t * kPanel<A>);
    }
    for (; t < taps; ++t) sum_taps<A, 1>(band, band_row, offsets + t, size, dy, dy_row, sums + t * kPanel<A>);
}

}  // namespace
}  // namespace rg
