#include "loss.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../base/dispatch.h"
#include "../base/parallel.h"
#include "../base/scratch.h"

namespace rg {
namespace {

constexpr int64_t kBlock = 8192;  // elements per partial sum; a constant, because the bits of the result depend on it

// log(x) of a positive normal x, within 2 ulp. Not the C library's, whose last bit depends on its version and on the
// machine: with x = m 2^e and m near 1, log(x) = e log(2) + 2 atanh((m - 1) / (m + 1)).
double natural_log(double x) {
    if (!(x >= std::numeric_limits<double>::min() && x < std::numeric_limits<double>::infinity())) return std::log(x);
    int exponent;
    double m = std::frexp(x, &exponent);
    if (m < 0.70710678118654752440) {
        m *= 2;
        --exponent;
    }
    const double s = (m - 1) / (m + 1), s2 = s * s, s4 = s2 * s2, s8 = s4 * s4;
    // The terms s^2k / (2k + 1) up to k = 12, as |s| < 0.172; in four chains, which run in parallel.
    const auto chain = [&](int k) { return 1.0 / (2 * k + 1) + s8 * (1.0 / (2 * k + 9) + s8 * (1.0 / (2 * k + 17))); };
    const double tail = s2 * ((chain(1) + s2 * chain(2)) + s4 * (chain(3) + s2 * chain(4)));
    const double high = exponent * 0x1.62e42fefap-1,
                 low = exponent * 0x1.cf79abc9e3b398p-40;  // of log(2); high is exact
    return high + (2 * s + (2 * s * tail + low));
}

template <class A>
double row_loss(const LossKernels<A>& kernels, const CrossEntropy<A>& call, int64_t row) {
    A* const gradient = call.gradient ? call.gradient + row * call.gradient_row : nullptr;
    const int64_t label = call.labels[row];
    if (label == call.ignored) {
        if (gradient) std::fill(gradient, gradient + call.classes, A(0));
        return 0;
    }
    const A* const x = call.logits + row * call.logits_row;
    const double at_label = double(x[label]), classes = double(call.classes);
    double sums[3];
    kernels.softmax_row(x, call.classes, call.smoothing > 0, gradient, sums);
    const double largest = sums[0], sum = sums[1];
    if (gradient) {
        // At the label, p - 1 is computed as -(sum of the others) / sum, to avoid cancellation where p is close to 1.
        const double others = double(gradient[label]) - sum;
        const double share = call.smoothing / classes;
        kernels.scale_row(gradient, call.classes, A(call.weight / sum), A(-call.weight * share));
        gradient[label] = A(call.weight * (others / sum + (call.smoothing - share)));
    }
    double loss = natural_log(sum) - (1 - call.smoothing) * (at_label - largest);
    if (call.smoothing > 0) loss -= call.smoothing * (sums[2] / classes);
    return loss;
}

}  // namespace

template <class A>
double softmax_cross_entropy(const CrossEntropy<A>& call) {
    const LossKernels<A>& kernels = kernel_table().loss.of<A>();
    const Workers workers(cost::kExponential * double(call.rows * call.classes), call.threads);
    workers.each(call.rows, [&](int64_t row) { call.losses[row] = row_loss(kernels, call, row); });
    double sum = 0;
    for (int64_t row = 0; row < call.rows; ++row) sum += call.losses[row];
    return sum;
}

template <class A>
double difference_loss(const DifferenceLoss<A>& call) {
    const LossKernels<A>& kernels = kernel_table().loss.of<A>();
    const int64_t blocks = ceil_div(call.count, kBlock);
    std::vector<double> sums(static_cast<size_t>(blocks));
    Workers(cost::kElement * double(call.count), call.threads).each(blocks, [&](int64_t block) {
        const int64_t first = block * kBlock, count = std::min(kBlock, call.count - first);
        sums[size_t(block)] = kernels.difference(
            call.y + first, call.target + first, count, A(call.square), A(call.delta), A(call.slope),
            call.values ? call.values + first : nullptr, call.gradient ? call.gradient + first : nullptr);
    });
    double sum = 0;
    for (const double s : sums) sum += s;
    return sum;
}

template double softmax_cross_entropy<float>(const CrossEntropy<float>&);
template double softmax_cross_entropy<double>(const CrossEntropy<double>&);
template double difference_loss<float>(const DifferenceLoss<float>&);
template double difference_loss<double>(const DifferenceLoss<double>&);

}  // namespace rg
