// Losses and their gradients in one pass.
#pragma once

#include <stdint.h>

#include "../kernels.h"

namespace rg {

// What the sum of the weighted losses is divided by.
enum class Reduction : int {
    sum,            // 1
    mean,           // the number of losses
    weighted_mean,  // the sum of the weights
    nonzero_mean,   // the number of weights that are not 0
};

// The weights of losses: `each` has one for every loss; null: all are `all`. With labels, only rows whose label is not
// `ignored` count.
template <class A>
double loss_divisor(Reduction reduction, int64_t count, const A* each, double all, const int64_t* labels = nullptr,
                    int64_t ignored = 0);

// The cross entropy of softmax(logits) with targets t: loss[row] = -sum(t * log(softmax(x))), and weight times its
// gradient. t = (1 - smoothing) * target + smoothing / classes. A label is a target of 1 at one class, 0 elsewhere.
template <class A>
struct CrossEntropy {
    int64_t rows = 0, classes = 0;
    const A* logits = nullptr;  // the classes of a row are contiguous
    int64_t logits_row = 0;
    const int64_t* labels = nullptr;  // in range, or `ignored`
    int64_t ignored = 0;
    const A* targets = nullptr;  // [rows, classes], contiguous, instead of labels
    const A* weights = nullptr;  // [rows], a factor of each loss and its gradient; null: 1
    double smoothing = 0;
    double weight = 1;
    int threads = 1;
    double* losses = nullptr;  // [rows]
    A* gradient = nullptr;     // null: not wanted. May be logits itself
    int64_t gradient_row = 0;
};

// Returns the sum of the losses, accumulated from the first row to the last.
template <class A>
double softmax_cross_entropy(const CrossEntropy<A>& call);

// loss[row] = 1 - sum(y * target), and weight times its gradient for rows y that stay of unit length, which has no part
// along y:  sum(y * target) * y - target.
template <class A>
struct CosineDistance {
    int64_t rows = 0, width = 0;
    const A *y = nullptr, *target = nullptr;  // [rows, width], contiguous
    const A* weights = nullptr;               // [rows], as above
    double weight = 1;
    int threads = 1;
    double* losses = nullptr;  // [rows]
    A* gradient = nullptr;     // null: not wanted. [rows, width], contiguous; may be y or target itself
};

// Returns the sum of the losses, accumulated from the first row to the last.
template <class A>
double cosine_distance(const CosineDistance<A>& call);

// A loss for every element: see ElementLoss.
template <class A>
struct ElementLosses {
    int64_t count = 0;
    ElementLossRule<A> rule;
    const A *y = nullptr, *target = nullptr;
    const A* weights = nullptr;  // a factor of each value and its gradient; null: 1
    int threads = 1;
    A* values = nullptr;    // null: not wanted
    A* gradient = nullptr;  // null: not wanted. May be y or target itself
};

// Returns the sum of the weighted values, accumulated in order over blocks of a fixed size.
template <class A>
double element_losses(const ElementLosses<A>& call);

}  // namespace rg
