// Linear layers and embeddings: products of matrices with any strides, gather and scatter-add of rows.
#pragma once

#include "../product/matrix.h"

namespace rg {

// y[rows][outputs] = x[rows][inputs] * w[outputs][inputs]' + b
template <class A>
struct LinearForward {
    int64_t rows = 0, inputs = 0, outputs = 0;
    Matrix<const A> x, w;
    const A* b = nullptr;  // null: 0
    int threads = 1;
    Matrix<A> y;  // rows are contiguous
};

// dx = dy * w, dw = dy' * x, db = the sum of dy's rows. The rows of dx, and the rows or the columns of dw, are
// contiguous.
template <class A>
struct LinearBackward {
    int64_t rows = 0, inputs = 0, outputs = 0;
    Matrix<const A> dy, x, w;  // x is read for dw only, w for dx only
    bool accumulate = false;   // add to the results
    int threads = 1;
    Matrix<A> dx, dw;
    A* db = nullptr;  // null: not wanted
};

template <class A>
void linear_forward(const LinearForward<A>& call);
template <class A>
void linear_backward(const LinearBackward<A>& call);

// y[position] = table[indices[position]]. Indices are in range.
template <class A>
struct EmbeddingForward {
    int64_t positions = 0, width = 0;
    const int64_t* indices = nullptr;
    Matrix<const A> table;
    int threads = 1;
    A* y = nullptr;  // [positions][width]
};

// dtable[indices[position]] += dy[position], in the order of positions.
template <class A>
struct EmbeddingBackward {
    int64_t positions = 0, width = 0, table_rows = 0;
    const int64_t* indices = nullptr;
    const A* dy = nullptr;    // [positions][width]
    bool accumulate = false;  // add to dtable; else it is set to 0 first
    int threads = 1;
    Matrix<A> dtable;
};

template <class A>
void embedding_forward(const EmbeddingForward<A>& call);
template <class A>
void embedding_backward(const EmbeddingBackward<A>& call);

}  // namespace rg
