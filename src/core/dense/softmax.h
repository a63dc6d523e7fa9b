// Softmax over rows, and its gradient.
#pragma once

#include <stdint.h>

namespace rg {

// y = softmax(x), or its logarithm, of every row. The elements of a row are contiguous.
template <class A>
struct SoftmaxCall {
    bool log = false;
    int64_t rows = 0, count = 0;
    const A* x = nullptr;
    int64_t x_row = 0;
    int threads = 1;
    A* y = nullptr;  // may be x itself
    int64_t y_row = 0;
};
template <class A>
void softmax(const SoftmaxCall<A>& call);

// dx = y * (dy - sum(dy * y)), or of the logarithm, dy - e^y * sum(dy)
template <class A>
struct SoftmaxBackwardCall {
    bool log = false;
    int64_t rows = 0, count = 0;
    const A *dy = nullptr, *y = nullptr;
    int64_t dy_row = 0, y_row = 0;
    int threads = 1;
    A* dx = nullptr;  // may be dy or y itself
    int64_t dx_row = 0;
};
template <class A>
void softmax_backward(const SoftmaxBackwardCall<A>& call);

}  // namespace rg
