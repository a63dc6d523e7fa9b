#include "batched.h"

#include "../base/dispatch.h"
#include "../base/parallel.h"

namespace rg {
namespace {

// All matrices of a side by side are one matrix if they share b.
template <class A>
BatchedProduct<A> joined(BatchedProduct<A> call) {
    const bool joins = call.batch > 1 && call.b_batch == 0 && call.a_batch == call.rows * call.a.row_stride &&
                       call.y_batch == call.rows * call.y.row_stride;
    if (!joins) return call;
    call.rows *= call.batch;
    call.batch = 1;
    return call;
}

template <class A>
MatrixProduct<A> one_of(const BatchedProduct<A>& call, int64_t i) {
    Matrix<const A> a = call.a, b = call.b;
    Matrix<A> y = call.y;
    a.data += i * call.a_batch;
    b.data += i * call.b_batch;
    y.data += i * call.y_batch;
    return matrix_product<A>(kernel_table().product.of<A>(), call.rows, call.depth, call.cols, a, b, nullptr,
                             call.accumulate, y, panel_scratch());
}

}  // namespace

template <class A>
void batched_product(const BatchedProduct<A>& whole) {
    const BatchedProduct<A> call = joined(whole);
    if (call.batch == 0 || call.rows == 0 || call.cols == 0) return;
    const double each = cost::kFlop * one_of(call, 0).flops();
    // Threads share matrices, unless a matrix is large or there are too few of them.
    if (call.batch > 1 && (each < cost::kWorthSharing || call.batch >= 2 * int64_t(call.threads))) {
        return Workers(each * double(call.batch), call.threads).each(call.batch, [&](int64_t i) {
            MatrixProduct<A> product = one_of(call, i);
            for (int64_t block = 0; block < product.blocks(); ++block) {
                product.begin(block, 1);
                for (int64_t k = 0; k < product.packings(); ++k) product.pack(k);
                for (int64_t k = 0; k < product.pieces(); ++k) product.multiply(k);
            }
        });
    }
    for (int64_t i = 0; i < call.batch; ++i) multiply_blocks(Workers(each, call.threads), one_of(call, i));
}
template void batched_product<float>(const BatchedProduct<float>&);
template void batched_product<double>(const BatchedProduct<double>&);

}  // namespace rg
