#include "loss.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "../base/dispatch.h"
#include "../base/parallel.h"
#include "../base/scratch.h"
#include "natural_log.h"

namespace rg {
namespace {

constexpr int64_t kBlock = 8192;  // elements per partial sum; a constant, because the bits of the result depend on it

// Soft targets. The gradient is made in place of the exponentials.
template <class A>
double soft_row_loss(const LossKernels<A>& kernels, const CrossEntropy<A>& call, int64_t row, double weight,
                     A* gradient) {
    const A* const target = call.targets + row * call.classes;
    const double keep = 1 - call.smoothing, share = call.smoothing / double(call.classes);
    double sums[5];
    kernels.softmax_row(call.logits + row * call.logits_row, target, call.classes, true, gradient, sums);
    const double sum = sums[1], total = keep * sums[3] + call.smoothing;
    if (gradient) {
        kernels.soft_gradient_row(gradient, target, call.classes, {total, keep, share, sum, weight / sum});
    }
    double loss = natural_log(sum) * total;
    if (keep > 0) loss -= keep * sums[4];
    if (share > 0) loss -= share * sums[2];
    return loss;
}

template <class A>
double label_row_loss(const LossKernels<A>& kernels, const CrossEntropy<A>& call, int64_t row, double weight,
                      A* gradient) {
    const int64_t label = call.labels[row];
    if (label == call.ignored) {
        if (gradient) std::fill(gradient, gradient + call.classes, A(0));
        return 0;
    }
    const A* const x = call.logits + row * call.logits_row;
    const double at_label = double(x[label]), classes = double(call.classes);
    double sums[3];
    kernels.softmax_row(x, nullptr, call.classes, call.smoothing > 0, gradient, sums);
    const double largest = sums[0], sum = sums[1];
    if (gradient) {
        // At the label, p - 1 is computed as -(sum of the others) / sum, to avoid cancellation where p is close to 1.
        const double others = double(gradient[label]) - sum;
        const double share = call.smoothing / classes;
        kernels.scale_row(gradient, call.classes, A(weight / sum), A(-weight * share));
        gradient[label] = A(weight * (others / sum + (call.smoothing - share)));
    }
    double loss = natural_log(sum) - (1 - call.smoothing) * (at_label - largest);
    if (call.smoothing > 0) loss -= call.smoothing * (sums[2] / classes);
    return loss;
}

template <class A>
double cross_entropy_row(const LossKernels<A>& kernels, const CrossEntropy<A>& call, int64_t row) {
    if (call.classes == 0) return 0;
    A* const gradient = call.gradient ? call.gradient + row * call.gradient_row : nullptr;
    const bool ignored = call.labels && call.labels[row] == call.ignored;
    const double of_row = call.weights && !ignored ? double(call.weights[row]) : 1.0, weight = call.weight * of_row;
    return of_row * (call.targets ? soft_row_loss(kernels, call, row, weight, gradient)
                                  : label_row_loss(kernels, call, row, weight, gradient));
}

template <class A>
double cosine_row(const LossKernels<A>& kernels, const CosineDistance<A>& call, int64_t row) {
    const A *const y = call.y + row * call.width, *const target = call.target + row * call.width;
    const double of_row = call.weights ? double(call.weights[row]) : 1.0, weight = call.weight * of_row;
    const double product = kernels.dot(y, target, call.width);
    if (call.gradient) {
        kernels.blend_row(y, target, call.width, A(weight * product), A(-weight), call.gradient + row * call.width);
    }
    return of_row * (1 - product);
}

// Computes the losses of all rows and returns their sum.
template <class Body>
double sum_of_rows(int64_t rows, const Workers& workers, double* losses, const Body& row_loss) {
    workers.each(rows, [&](int64_t row) { losses[row] = row_loss(row); });
    double sum = 0;
    for (int64_t row = 0; row < rows; ++row) sum += losses[row];
    return sum;
}

double element_cost(ElementLoss loss) {
    return loss == ElementLoss::log || loss == ElementLoss::sigmoid ? cost::kExponential : cost::kElement;
}

}  // namespace

template <class A>
double loss_divisor(Reduction reduction, int64_t count, const A* each, double all, const int64_t* labels,
                    int64_t ignored) {
    if (reduction == Reduction::sum) return 1;
    int64_t kept = 0, nonzero = 0;
    double sum = 0;
    if (each || labels) {
        for (int64_t i = 0; i < count; ++i) {
            if (labels && labels[i] == ignored) continue;
            ++kept;
            nonzero += each && each[i] != 0;
            sum += each ? double(each[i]) : 0.0;
        }
    } else {
        kept = count;
    }
    if (!each) {
        nonzero = all != 0 ? kept : 0;
        sum = double(kept) * all;
    }
    return reduction == Reduction::mean ? double(kept) : reduction == Reduction::weighted_mean ? sum : double(nonzero);
}

template <class A>
double softmax_cross_entropy(const CrossEntropy<A>& call) {
    const LossKernels<A>& kernels = kernel_table().loss.of<A>();
    const Workers workers(cost::kExponential * double(call.rows * call.classes), call.threads);
    return sum_of_rows(call.rows, workers, call.losses,
                       [&](int64_t row) { return cross_entropy_row(kernels, call, row); });
}

template <class A>
double cosine_distance(const CosineDistance<A>& call) {
    const LossKernels<A>& kernels = kernel_table().loss.of<A>();
    const Workers workers(cost::kElement * double(call.rows * call.width), call.threads);
    return sum_of_rows(call.rows, workers, call.losses, [&](int64_t row) { return cosine_row(kernels, call, row); });
}

template <class A>
double element_losses(const ElementLosses<A>& call) {
    const LossKernels<A>& kernels = kernel_table().loss.of<A>();
    const int64_t blocks = ceil_div(call.count, kBlock);
    Vector<double> sums(static_cast<size_t>(blocks));
    const auto part = [](auto* array, int64_t first) { return array ? array + first : nullptr; };
    const Workers workers(element_cost(call.rule.loss) * double(call.count), call.threads);
    workers.each(blocks, [&](int64_t block) {
        const int64_t first = block * kBlock, count = std::min(kBlock, call.count - first);
        sums[size_t(block)] =
            kernels.elements(call.rule, call.y + first, call.target + first, part(call.weights, first), count,
                             part(call.values, first), part(call.gradient, first));
    });
    double sum = 0;
    for (const double s : sums) sum += s;
    return sum;
}

#define RG_LOSSES(A)                                                                                \
    template double loss_divisor<A>(Reduction, int64_t, const A*, double, const int64_t*, int64_t); \
    template double softmax_cross_entropy<A>(const CrossEntropy<A>&);                               \
    template double cosine_distance<A>(const CosineDistance<A>&);                                   \
    template double element_losses<A>(const ElementLosses<A>&);
RG_LOSSES(float)
RG_LOSSES(double)
#undef RG_LOSSES

}  // namespace rg
