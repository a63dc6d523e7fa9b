// Convolutions: packing of patches, and direct sums over taps for few channels.
#pragma once

#include "../kernels.h"
#include "vec.h"

namespace rg {
namespace {

// Rows of a panel, `step` apart, from channel after channel, through a tap of N runs; if N is 0, of `count`.
template <class A, int N>
RG_INLINE void pack_tap(const A* channels, int64_t channel, const PatchRun* runs, int64_t count, int64_t rows, A* to,
                        int64_t step) {
    constexpr int V = int(kPanel<A>) / kLanes<A>;
    constexpr uint32_t kAll = (uint32_t(1) << kLanes<A>)-1;
    if (N == 1 && runs->pixels == (uint32_t(1) << kPanel<A>)-1) {
        const A* from = channels + runs->from;
        for (int64_t r = 0; r < rows; ++r, from += channel, to += step) {
#pragma GCC unroll 16
            for (int v = 0; v < V; ++v) store(to + v * kLanes<A>, load(from + v * kLanes<A>));
        }
        return;
    }
    const auto lanes_of = [&](int64_t i, int v)
                              RG_INLINE_LAMBDA { return Lanes<A>(runs[i].pixels >> (v * kLanes<A>)&kAll); };
    Lanes<A> lanes[N + 1][V];  // the same for all rows
#pragma GCC unroll 4
    for (int i = 0; i < N; ++i) {
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) lanes[i][v] = lanes_of(i, v);
    }
    for (int64_t r = 0; r < rows; ++r, channels += channel, to += step) {
#pragma GCC unroll 16
        for (int v = 0; v < V; ++v) {
            Vec<A> row = splat(A(0));
#pragma GCC unroll 4
            for (int i = 0; i < N; ++i) { row = load_lanes(channels + runs[i].from + v * kLanes<A>, lanes[i][v], row); }
            for (int64_t i = 0; N == 0 && i < count; ++i) {
                row = load_lanes(channels + runs[i].from + v * kLanes<A>, lanes_of(i, v), row);
            }
            store(to + v * kLanes<A>, row);
        }
    }
}

// Tap by tap for some channels at a time, so that what is the same for all channels is computed once, and the channels
// stay in the first-level cache.
template <class A, int N>
void pack_taps_of(const A* channels, int64_t channel, const PatchRun* runs, int64_t taps, int64_t count, int64_t first,
                  int64_t depth, A* panel) {
    const int64_t together = taps > 1 ? 16 : depth;
    // The channel and the tap of the first row, and of the one after the last.
    const int64_t last = first + depth, last_channel = last / taps, last_tap = last % taps;
    int64_t from = first / taps, from_tap = first % taps;
    for (bool ends = false; !ends;) {
        ends = from + together > last_channel;
        const int64_t to = ends ? last_channel : from + together, to_tap = ends ? last_tap : 0;
        for (int64_t tap = 0; tap < taps; ++tap) {
            const int64_t begin = from + (tap < from_tap), end = to + (tap < to_tap);
            pack_tap<A, N>(channels + begin * channel, channel, runs + tap * count, count, end - begin,
                           panel + (begin * taps + tap - first) * kPanel<A>, taps * kPanel<A>);
        }
        from = to;
        from_tap = to_tap;
    }
}

template <class A>
void pack_taps(const A* channels, int64_t channel, const PatchRun* runs, int64_t taps, int64_t count, int64_t first,
               int64_t depth, A* panel) {
    if (depth == 0) return;
    const auto pack = count == 1   ? pack_taps_of<A, 1>
                      : count == 2 ? pack_taps_of<A, 2>
                      : count == 3 ? pack_taps_of<A, 3>
                                   : pack_taps_of<A, 0>;
    pack(channels, channel, runs, taps, count, first, depth, panel);
}

template <class A>
void copy_rows(const A* from, int64_t from_row, BlockSize size, int64_t before, A* to, int64_t to_row) {
    const Vec<A> zero = splat(A(0));
    for (int64_t r = 0; r < size.rows; ++r, from += from_row, to += to_row) {
        for (int64_t j = 0; j < before; j += kLanes<A>) store(to + j, zero);
        int64_t j = 0;
        for (; j + kLanes<A> <= size.cols; j += kLanes<A>) store(to + before + j, load(from + j));
        if (j < size.cols) store(to + before + j, load_part(from + j, size.cols - j, zero));
        for (j += before + (j < size.cols ? kLanes<A> : 0); j < to_row; j += kLanes<A>) store(to + j, zero);
    }
}

// R rows of C vectors of y, side by side to hide the latency of the multiply-add; the last vector of a row has `rest`
// elements.
template <class A, int R, int C>
RG_INLINE void tap_block(const A* band, int64_t band_row, const int64_t* offsets, const A* weights, int64_t taps,
                         bool accumulate, A bias, int64_t rest, A* y, int64_t y_row) {
    Vec<A> sum[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            const A* from = y + r * y_row + c * kLanes<A>;
            const bool whole = c + 1 < C || rest == kLanes<A>;
            sum[r][c] = !accumulate ? splat(bias) : whole ? load(from) : load_part(from, rest, splat(A(0)));
        }
    }
    for (int64_t t = 0; t < taps; ++t) {
        const Vec<A> w = splat(weights[t]);
        const A* from = band + offsets[t];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
            for (int c = 0; c < C; ++c) sum[r][c] = fma(w, load(from + r * band_row + c * kLanes<A>), sum[r][c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            A* to = y + r * y_row + c * kLanes<A>;
            c + 1 < C || rest == kLanes<A> ? store(to, sum[r][c]) : store_part(to, rest, sum[r][c]);
        }
    }
}

// Columns of C vectors, R rows at a time and then one by one.
template <class A, int R, int C>
void tap_columns(const A* band, int64_t band_row, const int64_t* offsets, const A* weights, int64_t taps, int64_t rows,
                 bool accumulate, A bias, int64_t rest, A* y, int64_t y_row) {
    int64_t r = 0;
    for (; r + R <= rows; r += R) {
        tap_block<A, R, C>(band + r * band_row, band_row, offsets, weights, taps, accumulate, bias, rest, y + r * y_row,
                           y_row);
    }
    for (; r < rows; ++r) {
        tap_block<A, 1, C>(band + r * band_row, band_row, offsets, weights, taps, accumulate, bias, rest, y + r * y_row,
                           y_row);
    }
}

template <class A>
void tap_rows(const A* band, int64_t band_row, const int64_t* offsets, const A* weights, int64_t taps, BlockSize size,
              bool accumulate, A bias, A* y, int64_t y_row) {
    for (int64_t j = 0; j < size.cols;) {
        const int64_t left = size.cols - j, vectors = (left + kLanes<A> - 1) / kLanes<A>;
        const int64_t rest = vectors > 4 ? kLanes<A> : left - (vectors - 1) * kLanes<A>;
        const auto columns = vectors == 1   ? tap_columns<A, 8, 1>
                             : vectors == 2 ? tap_columns<A, 4, 2>
                             : vectors == 3 ? tap_columns<A, 3, 3>
                                            : tap_columns<A, 2, 4>;
        columns(band + j, band_row, offsets, weights, taps, size.rows, accumulate, bias, rest, y + j, y_row);
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
