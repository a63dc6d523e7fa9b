#include "linear.h"

#include <algorithm>
#include <cstring>

#include "../base/dispatch.h"
#include "../base/parallel.h"
#include "../base/scratch.h"

namespace rg {
namespace {

// The sums of dy over its rows, computed beside products: a panel of columns at a time.
template <class A>
class RowSums {
public:
    RowSums(const ProductKernels<A>& kernels, const LinearBackward<A>& call) : kernels_(kernels), call_(call) {}

    int64_t blocks() const { return call_.db ? 1 : 0; }
    void begin(int64_t block, int) { panels_ = block < blocks() ? ceil_div(call_.outputs, kPanel<A>) : 0; }
    int64_t packings() const { return 0; }
    void pack(int64_t) const {}
    int64_t pieces() const { return panels_; }
    void multiply(int64_t panel) const {
        const int64_t col = panel * kPanel<A>, units = std::min(kPanel<A>, call_.outputs - col);
        double sums[kPanel<A>] = {};
        A* packed = row_scratch().take<A>(kRowRun * kPanel<A>);
        for (int64_t r = 0; r < call_.rows; r += kRowRun) {
            const int64_t rows = std::min(kRowRun, call_.rows - r);
            kernels_.pack_rows(call_.dy.data + r * call_.dy.row_stride + col * call_.dy.col_stride, call_.dy.row_stride,
                               call_.dy.col_stride, units, rows, packed);
            kernels_.panel_sums(packed, nullptr, 0, rows, sums);
        }
        for (int64_t u = 0; u < units; ++u) {
            A& db = call_.db[col + u];
            db = A(call_.accumulate ? double(db) + sums[u] : sums[u]);
        }
    }

private:
    static constexpr int64_t kRowRun = 128;  // rows that are packed and summed at a time

    const ProductKernels<A>& kernels_;
    const LinearBackward<A>& call_;
    int64_t panels_ = 0;
};

// The panels of products: of y or dx, and of dw.
struct LinearScratch {
    Buffer panels, dw_panels;
};

}  // namespace

template <class A>
void linear_forward(const LinearForward<A>& call) {
    auto y = matrix_product(kernel_table().product.of<A>(), call.rows, call.inputs, call.outputs, call.x,
                            call.w.transposed(), call.b, false, call.y, kept_by_thread<LinearScratch>().panels);
    multiply_blocks(Workers(cost::kFlop * y.flops(), call.threads), y);
}

template <class A>
void linear_backward(const LinearBackward<A>& call) {
    const ProductKernels<A>& kernels = kernel_table().product.of<A>();
    LinearScratch& scratch = kept_by_thread<LinearScratch>();
    auto dx = matrix_product<A>(kernels, call.rows, call.outputs, call.inputs, call.dy, call.w, nullptr,
                                call.accumulate, call.dx, scratch.panels);
    auto dw = matrix_product<A>(kernels, call.outputs, call.rows, call.inputs, call.dy.transposed(), call.x, nullptr,
                                call.accumulate, call.dw, scratch.dw_panels);
    RowSums<A> db(kernels, call);
    multiply_blocks(Workers(cost::kFlop * (dx.flops() + dw.flops()), call.threads), dx, dw, db);
}

template <class A>
void embedding_forward(const EmbeddingForward<A>& call) {
    const int64_t elements = call.positions * call.width;
    if (elements == 0) return;
    const bool straight = call.table.col_stride == 1;
    Workers(cost::kCopy * double(elements), call.threads).each(call.positions, [&](int64_t p) {
        const A* from = call.table.data + call.indices[p] * call.table.row_stride;
        A* to = call.y + p * call.width;
        if (straight) {
            memcpy(to, from, size_t(call.width) * sizeof(A));
        } else {
            for (int64_t j = 0; j < call.width; ++j) to[j] = from[j * call.table.col_stride];
        }
    });
}

// Every thread owns a range of columns and visits all positions, so that each element is accumulated in their order.
template <class A>
void embedding_backward(const EmbeddingBackward<A>& call) {
    if (call.table_rows == 0 || call.width == 0) return;
    const int64_t elements = call.positions * call.width + (call.accumulate ? 0 : call.table_rows * call.width);
    const int64_t panels = ceil_div(call.width, kPanel<A>);
    const Workers workers(cost::kCopy * double(elements), call.threads);
    const int64_t step = ceil_div(panels, std::min<int64_t>(panels, workers.threads())) * kPanel<A>;
    const int64_t col = call.dtable.col_stride;
    workers.each(ceil_div(call.width, step), [&](int64_t piece) {
        const int64_t first = piece * step, count = std::min(step, call.width - first);
        A* const part = call.dtable.data + first * col;
        for (int64_t r = 0; r < call.table_rows && !call.accumulate; ++r) {
            A* to = part + r * call.dtable.row_stride;
            if (col == 1) {
                std::fill(to, to + count, A(0));
            } else {
                for (int64_t j = 0; j < count; ++j) to[j * col] = A(0);
            }
        }
        for (int64_t p = 0; p < call.positions; ++p) {
            A* to = part + call.indices[p] * call.dtable.row_stride;
            const A* from = call.dy + p * call.width + first;
            if (col == 1) {
                for (int64_t j = 0; j < count; ++j) to[j] += from[j];
            } else {
                for (int64_t j = 0; j < count; ++j) to[j * col] += from[j];
            }
        }
    });
}

#define RG_INSTANTIATE(A)                                           \
    template void linear_forward<A>(const LinearForward<A>&);       \
    template void linear_backward<A>(const LinearBackward<A>&);     \
    template void embedding_forward<A>(const EmbeddingForward<A>&); \
    template void embedding_backward<A>(const EmbeddingBackward<A>&);
RG_INSTANTIATE(float)
RG_INSTANTIATE(double)
#undef RG_INSTANTIATE

}  // namespace rg
