// Cumulative sums and extremes, and the largest elements of rows in order.
#pragma once

#include "gather.h"

namespace rg {

// y[o][j][i] = the sum of x[o][0..j][i], without x[o][j][i] itself if `exclusive`; from the end if `reverse`. Sums are
// carried in double precision, one chain for each (o, i).
template <class A>
struct CumulativeSumCall {
    int64_t outer = 0, n = 0, inner = 0;
    bool exclusive = false, reverse = false;
    Cube<const A> x;
    int threads = 1;
    Cube<A> y;  // may be x itself
};
template <class A>
void cumulative_sum(const CumulativeSumCall<A>& call);

// y[o][j][i] = the largest, or smallest, of x[o][0..j][i], and its index along j: of equal elements the last, of
// several NaN, which exceed all numbers, the first. From the end if `reverse`.
template <class A>
struct CumulativeExtremeCall {
    bool largest = true, reverse = false;
    int64_t outer = 0, n = 0, inner = 0;
    Cube<const A> x;
    int threads = 1;
    Cube<A> y;
    Cube<int64_t> indices;
};
template <class A>
void cumulative_extreme(const CumulativeExtremeCall<A>& call);

// The k largest or smallest elements of each row in order, and their indices. Of equal elements (0 and -0 are) the one
// with the lower index is first; NaN is larger than any number.
template <class A>
struct TopKCall {
    bool largest = true;
    int64_t rows = 0, n = 0, k = 0;
    const A* x = nullptr;
    int64_t x_row = 0, x_col = 1;
    int threads = 1;
    A* values = nullptr;         // [rows, k]
    int64_t* indices = nullptr;  // [rows, k]
};
template <class A>
void top_k(const TopKCall<A>& call);

}  // namespace rg
