#include "softmax.h"

#include "../base/dispatch.h"
#include "../base/parallel.h"
#include "natural_log.h"

namespace rg {
namespace {

// Below it, a float's error in largest + log(sum), in double precision, is far below the result's rounding. Beyond it,
// and for double, the sum would lose bits of the logarithm.
constexpr double kExact = 0x1p20;

}  // namespace

template <class A>
void softmax(const SoftmaxCall<A>& call) {
    if (call.count == 0) return;
    const LossKernels<A>& losses = kernel_table().loss.of<A>();
    const RowKernels<A>& rows = kernel_table().rows.of<A>();
    const double work = cost::kExponential * double(call.rows) * double(call.count);
    Workers(work, call.threads).each(call.rows, [&](int64_t row) {
        const A* const x = call.x + row * call.x_row;
        A* const y = call.y + row * call.y_row;
        double sums[3];
        losses.softmax_row(x, nullptr, call.count, false, call.log ? nullptr : y, sums);
        if (call.log) {
            const double log_sum = natural_log(sums[1]);
            if (sizeof(A) == sizeof(float) && sums[0] > -kExact && sums[0] < kExact) {
                rows.shift(x, call.count, sums[0] + log_sum, y);
            } else {
                rows.shift(x, call.count, sums[0], y);
                rows.shift(y, call.count, log_sum, y);
            }
        } else {
            losses.scale_row(y, call.count, A(1 / sums[1]), A(0));
        }
    });
}

template <class A>
void softmax_backward(const SoftmaxBackwardCall<A>& call) {
    if (call.count == 0) return;
    const KernelTable& table = kernel_table();
    const RowKernels<A>& rows = table.rows.of<A>();
    const double work = (call.log ? cost::kExponential : cost::kElement) * double(call.rows) * double(call.count);
    Workers(work, call.threads).each(call.rows, [&](int64_t row) {
        const A *const dy = call.dy + row * call.dy_row, *const y = call.y + row * call.y_row;
        A* const dx = call.dx + row * call.dx_row;
        if (call.log) {
            double sum;
            table.reduce.of<A>().rows(ReduceKind::sum, dy, call.count, {1, call.count}, &sum);
            rows.log_softmax_gradient(y, dy, call.count, sum, dx);
        } else {
            rows.softmax_gradient(y, dy, call.count, table.loss.of<A>().dot(dy, y, call.count), dx);
        }
    });
}

#define RG_INSTANTIATE(A)                            \
    template void softmax<A>(const SoftmaxCall<A>&); \
    template void softmax_backward<A>(const SoftmaxBackwardCall<A>&);
RG_INSTANTIATE(float)
RG_INSTANTIATE(double)
#undef RG_INSTANTIATE

}  // namespace rg
