// A general product of matrices with any strides, in pieces that threads can share.
#pragma once

#include <algorithm>

#include "../base/scratch.h"
#include "../kernels.h"

namespace rg {

// A matrix in a caller's memory. Strides in elements.
template <class T>
struct Matrix {
    T* data = nullptr;  // null: not wanted
    int64_t row_stride = 0, col_stride = 0;

    Matrix transposed() const { return {data, col_stride, row_stride}; }
};

// c[rows][cols] (+)= a[rows][depth] * b[depth][cols] + bias[cols], cut into pieces that can be computed in any order.
template <class A>
class MatrixProduct {
public:
    MatrixProduct() = default;
    MatrixProduct(int64_t rows, int64_t depth, int64_t cols, Matrix<const A> a, Matrix<const A> b, const A* bias,
                  bool accumulate, Matrix<A> c)
        : rows_(rows),
          depth_(depth),
          cols_(cols),
          longest_(std::max<int64_t>(1, std::min(kDepthRun, depth))),
          a_(a),
          b_(b),
          bias_(bias),
          accumulate_(accumulate),
          c_(c) {
        if (c_.col_stride != 1) {  // then its columns are contiguous: compute the transpose
            std::swap(rows_, cols_);
            std::swap(a_, b_);
            a_ = a_.transposed();
            b_ = b_.transposed();
            c_ = c_.transposed();
        }
    }

    double flops() const { return 2.0 * double(rows_) * double(cols_) * double(std::max<int64_t>(depth_, 1)); }

    // Cuts the result into about `wanted` pieces; returns their number.
    int64_t cut(const ProductKernels<A>& kernels, int64_t wanted) {
        if (rows_ == 0 || cols_ == 0) return 0;
        // Both operands are packed again for every piece, so pieces should be large in both directions. The panels of a
        // piece stay in the thread's share of the last level.
        constexpr int64_t kLeastRows = 128, kLeastPanels = 4;
        const int64_t panels = ceil_div(cols_, kPanel<A>);
        const int64_t most = std::max<int64_t>(2, far_cache_bytes() / 4 / int64_t(sizeof(A)) / (longest_ * kPanel<A>));
        const int64_t row_pieces = std::max<int64_t>(1, std::min(wanted, rows_ / kLeastRows));
        const int64_t col_pieces =
            std::max(ceil_div(panels, most),
                     std::min(ceil_div(wanted, row_pieces), std::max<int64_t>(1, panels / kLeastPanels)));
        row_step_ = ceil_div(rows_, row_pieces);
        const int64_t wide = kernels.panels_at_once(row_step_);
        col_step_ = ceil_div(ceil_div(panels, col_pieces), wide) * wide * kPanel<A>;
        across_ = ceil_div(cols_, col_step_);
        return ceil_div(rows_, row_step_) * across_;
    }

    void run(const ProductKernels<A>& kernels, int64_t piece) const {
        const int64_t row = piece / across_ * row_step_, col = piece % across_ * col_step_;
        const int64_t rows = std::min(row_step_, rows_ - row), cols = std::min(col_step_, cols_ - col);
        // With few columns, rows are read in place: packing would not pay.
        const bool in_place = a_.col_stride == 1 && cols <= 4 * kPanel<A>;
        const int64_t near_rows = in_place ? rows : std::min(rows, rows_in_cache<A>(longest_));
        A* panels = panel_scratch().take<A>(ceil_div(cols, kPanel<A>) * kPanel<A> * longest_);
        A* packed = row_scratch().take<A>(in_place ? 1 : ceil_div(longest_, kPanel<A>) * kPanel<A> * (near_rows + 1));
        for (int64_t k = 0; k == 0 || k < depth_; k += kDepthRun) {  // once even if the depth is 0: 0 must be written
            Product<A> p = {};
            p.depth = std::min(kDepthRun, depth_ - k);
            p.cols = cols;
            p.panels = panels;
            p.panel_stride = p.depth * kPanel<A>;
            p.c_row = c_.row_stride;
            pack_panels(kernels, k, p.depth, col, cols, panels);
            for (int64_t r = row; r < row + rows; r += near_rows) {
                p.rows = std::min(near_rows, row + rows - r);
                p.c = c_.data + r * c_.row_stride + col;
                p.base = k > 0 || accumulate_ ? p.c : bias_ ? bias_ + col : nullptr;
                p.base_row = k > 0 || accumulate_ ? p.c_row : 0;
                const A* from = a_.data + r * a_.row_stride + k * a_.col_stride;
                if (!in_place) pack_as_rows(kernels, from, p.rows, p.depth, packed);
                p.a = in_place ? from : packed;
                p.a_row = in_place ? a_.row_stride : kPanel<A>;
                p.a_step = 1;
                p.a_group = in_place ? kPanel<A> : (p.rows + 1) * kPanel<A>;
                kernels.product(p);
            }
        }
    }

private:
    void pack_panels(const ProductKernels<A>& kernels, int64_t k, int64_t depth, int64_t col, int64_t cols,
                     A* panels) const {
        for (int64_t j = 0; j < cols; j += kPanel<A>) {
            const A* from = b_.data + k * b_.row_stride + (col + j) * b_.col_stride;
            const int64_t units = std::min(kPanel<A>, cols - j);
            if (b_.col_stride == 1) {
                kernels.pack_rows(from, b_.row_stride, 1, units, depth, panels + j * depth);
            } else {
                kernels.pack_columns(from, b_.col_stride, b_.row_stride, units, depth, panels + j * depth);
            }
        }
    }
    // [group of depth][row][kPanel], with one row of padding per group to avoid cache-set conflicts.
    void pack_as_rows(const ProductKernels<A>& kernels, const A* from, int64_t rows, int64_t depth, A* packed) const {
        constexpr int64_t kFew = 16;  // rows at a time: their lines stay in cache whatever the row stride
        for (int64_t r = 0; r < rows; r += kFew) {
            const int64_t few = std::min(kFew, rows - r);
            for (int64_t k = 0; k < depth; k += kPanel<A>) {
                const A* source = from + r * a_.row_stride + k * a_.col_stride;
                const int64_t units = std::min(kPanel<A>, depth - k);
                A* to = packed + k * (rows + 1) + r * kPanel<A>;
                a_.col_stride == 1 ? kernels.pack_rows(source, a_.row_stride, 1, units, few, to)
                                   : kernels.pack_columns(source, a_.col_stride, a_.row_stride, units, few, to);
            }
        }
    }

    int64_t rows_ = 0, depth_ = 0, cols_ = 0, longest_ = 1;
    Matrix<const A> a_, b_;
    const A* bias_ = nullptr;
    bool accumulate_ = false;
    Matrix<A> c_;
    int64_t row_step_ = 0, col_step_ = 0, across_ = 0;
};

}  // namespace rg
