// Losses and their gradients in one pass.
#pragma once

#include <stdint.h>

namespace rg {

// loss[row] = log(sum of e^x) - (1 - smoothing) x[label] - smoothing * mean of x, and weight times its gradient.
template <class A>
struct CrossEntropy {
    int64_t rows = 0, classes = 0;
    const A* logits = nullptr;  // the classes of a row are contiguous
    int64_t logits_row = 0;
    const int64_t* labels = nullptr;  // in range, or `ignored`
    int64_t ignored = 0;
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

// With d = y - target:  value = square * d^2 within delta, delta * (|d| - delta / 2) beyond;  gradient = slope *
// clip(d).
template <class A>
struct DifferenceLoss {
    int64_t count = 0;
    const A *y = nullptr, *target = nullptr;
    double square = 1, delta = 0, slope = 0;  // an infinite delta gives the squared error
    int threads = 1;
    A* values = nullptr;    // null: not wanted
    A* gradient = nullptr;  // null: not wanted. May be y or target itself
};

// Returns the sum of the values, accumulated in order over blocks of a fixed size.
template <class A>
double difference_loss(const DifferenceLoss<A>& call);

}  // namespace rg
