#include "linear.h"

#include <algorithm>
#include <cstring>

#include "../base/dispatch.h"
#include "../base/parallel.h"
#include "../base/scratch.h"

namespace rg {
namespace {

constexpr int64_t kRowRun = 128;  // rows that are packed and summed at a time

// The sums of one panel of columns over all rows.
template <class A>
void sum_rows(const ProductKernels<A>& kernels, const LinearBackward<A>& call, int64_t col) {
    const int64_t units = std::min(kPanel<A>, call.outputs - col);
    double sums[kPanel<A>] = {};
    A* packed = row_scratch().take<A>(kRowRun * kPanel<A>);
    for (int64_t r = 0; r < call.rows; r += kRowRun) {
        const int64_t rows = std::min(kRowRun, call.rows - r);
        kernels.pack_rows(call.dy.data + r * call.dy.row_stride + col * call.dy.col_stride, call.dy.row_stride,
                          call.dy.col_stride, units, rows, packed);
        kernels.panel_sums(packed, nullptr, 0, rows, sums);
    }
    for (int64_t u = 0; u < units; ++u) {
        A& db = call.db[col + u];
        db = A(call.accumulate ? double(db) + sums[u] : sums[u]);
    }
}

// More pieces balance better, fewer need less packing.
int64_t pieces_wanted(double flops, const Workers& workers) {
    return workers.threads() == 1 ? 1 : (flops < 1e8 ? 2 : 4) * workers.threads();
}

}  // namespace

template <class A>
void linear_forward(const LinearForward<A>& call) {
    const ProductKernels<A>& kernels = kernel_table().product.of<A>();
    MatrixProduct<A> y(call.rows, call.inputs, call.outputs, call.x, call.w.transposed(), call.b, false, call.y);
    const double flops = y.flops();
    const Workers workers(cost::kFlop * flops, call.threads);
    workers.each(y.cut(kernels, pieces_wanted(flops, workers)), [&](int64_t piece) { y.run(kernels, piece); });
}

template <class A>
void linear_backward(const LinearBackward<A>& call) {
    const ProductKernels<A>& kernels = kernel_table().product.of<A>();
    MatrixProduct<A> dx, dw;
    if (call.dx.data) {
        dx = {call.rows, call.outputs, call.inputs, call.dy, call.w, nullptr, call.accumulate, call.dx};
    }
    if (call.dw.data) {
        dw = {call.outputs, call.rows, call.inputs, call.dy.transposed(), call.x, nullptr, call.accumulate, call.dw};
    }
    const double flops = dx.flops() + dw.flops();
    const Workers workers(cost::kFlop * flops, call.threads);
    const int64_t wanted = pieces_wanted(flops, workers);
    const int64_t dx_pieces = dx.cut(kernels, wanted), dw_pieces = dw.cut(kernels, wanted);
    const int64_t db_pieces = call.db ? ceil_div(call.outputs, kPanel<A>) : 0;
    workers.each(dx_pieces + dw_pieces + db_pieces, [&](int64_t piece) {
        if (piece < dx_pieces) return dx.run(kernels, piece);
        if (piece < dx_pieces + dw_pieces) return dw.run(kernels, piece - dx_pieces);
        sum_rows(kernels, call, (piece - dx_pieces - dw_pieces) * kPanel<A>);
    });
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
