// A product of matrices with any strides.
#pragma once

#include "blocked.h"

namespace rg {

// A matrix in a caller's memory. Strides in elements.
template <class T>
struct Matrix {
    T* data = nullptr;  // null: not wanted
    int64_t row_stride = 0, col_stride = 0;

    Matrix transposed() const { return {data, col_stride, row_stride}; }
};

template <class A>
struct MatrixRows {
    Matrix<const A> a;

    StateArray<const A> near(const ProductKernels<A>& kernels, int64_t row, int64_t rows, int64_t k, int64_t depth,
                             int64_t cols) const {
        const A* from = a.data + row * a.row_stride + k * a.col_stride;
        // With few columns, packing would not pay.
        if (a.col_stride == 1 && cols <= 4 * kPanel<A>) return {from, a.row_stride, kPanel<A>};
        const int64_t group = (rows + 1) * kPanel<A>;  // one row of padding, to avoid cache-set conflicts
        A* packed = row_scratch().take<A>(ceil_div(depth, kPanel<A>) * group);
        // The same square of the next rows, or columns, is prefetched: what is read of each is too short for the
        // hardware.
        const int64_t line = a.col_stride == 1 ? a.row_stride : a.col_stride;
        const auto pack = [&](int64_t r, int64_t d) {
            const A* next = from + r * a.row_stride + d * a.col_stride + kPanel<A> * line;
            for (int64_t i = 0; i < kPanel<A>; ++i) __builtin_prefetch(next + i * line);
            kernels.pack_rows(from + r * a.row_stride + d * a.col_stride, a.row_stride, a.col_stride,
                              std::min(kPanel<A>, depth - d), std::min(kPanel<A>, rows - r),
                              packed + d / kPanel<A> * group + r * kPanel<A>);
        };
        if (a.col_stride == 1) {  // along what is contiguous
            for (int64_t r = 0; r < rows; r += kPanel<A>) {
                for (int64_t d = 0; d < depth; d += kPanel<A>) pack(r, d);
            }
        } else {
            for (int64_t d = 0; d < depth; d += kPanel<A>) {
                for (int64_t r = 0; r < rows; r += kPanel<A>) pack(r, d);
            }
        }
        return {packed, kPanel<A>, group};
    }
};

template <class A>
struct MatrixPanels {
    Matrix<const A> b;
    int64_t cols;

    bool by_rows() const { return b.col_stride == 1; }
    void pack(const ProductKernels<A>& kernels, int64_t panel, int64_t k, int64_t depth, A* to) const {
        const int64_t column = panel * kPanel<A>;
        kernels.pack_rows(b.data + k * b.row_stride + column * b.col_stride, b.row_stride, b.col_stride,
                          std::min(kPanel<A>, cols - column), depth, to);
    }
};

template <class A>
using MatrixProduct = BlockedProduct<A, MatrixRows<A>, MatrixPanels<A>>;

// c[rows][cols] (+)= a[rows][depth] * b[depth][cols] + bias[cols]; nothing if c is null. The rows or the columns of c
// are contiguous; if only the columns are, there is no bias.
template <class A>
MatrixProduct<A> matrix_product(const ProductKernels<A>& kernels, int64_t rows, int64_t depth, int64_t cols,
                                Matrix<const A> a, Matrix<const A> b, const A* bias, bool accumulate, Matrix<A> c,
                                Buffer& buffer) {
    if (c.col_stride != 1) {  // compute the transpose
        std::swap(rows, cols);
        std::swap(a, b);
        a = a.transposed();
        b = b.transposed();
        c = c.transposed();
    }
    Product<A> whole = {};
    whole.rows = c.data ? rows : 0;
    whole.depth = depth;
    whole.cols = cols;
    whole.base = accumulate ? c.data : bias;
    whole.base_row = accumulate ? c.row_stride : 0;
    whole.c = c.data;
    whole.c_row = c.row_stride;
    return {kernels, whole, {a}, {b, cols}, buffer};
}

}  // namespace rg
