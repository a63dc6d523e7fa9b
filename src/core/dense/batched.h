// Products of many pairs of matrices.
#pragma once

#include "../product/matrix.h"

namespace rg {

// y[i] (+)= a[i][rows][depth] * b[i][depth][cols]. Every element has the bits that linear_forward gives it.
template <class A>
struct BatchedProduct {
    int64_t batch = 0, rows = 0, depth = 0, cols = 0;
    Matrix<const A> a, b;              // the first of each
    int64_t a_batch = 0, b_batch = 0;  // elements from one matrix to the next; 0: the same for all
    bool accumulate = false;
    int threads = 1;
    Matrix<A> y;  // rows are contiguous
    int64_t y_batch = 0;
};
template <class A>
void batched_product(const BatchedProduct<A>& call);

}  // namespace rg
