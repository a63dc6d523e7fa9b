#include "batched.h"

#include "../base/dispatch.h"
#include "../base/parallel.h"

namespace rg {
namespace {

struct BatchedScratch {
    Buffer panels;
};

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
                             call.accumulate, y, kept_by_thread<BatchedScratch>().panels);
}

}  // namespace

template <class A>
void batched_product(const BatchedProduct<A>& whole) {
    const BatchedProduct<A> call = joined(whole);
    if (call.batch == 0 || call.rows == 0 || call.cols == 0) return;
    const double each = cost::kFlop * one_of(call, 0).flops();
    multiply_all(call.batch, each, call.threads, [&](int64_t i) { return one_of(call, i); });
}
template void batched_product<float>(const BatchedProduct<float>&);
template void batched_product<double>(const BatchedProduct<double>&);

}  // namespace rg
