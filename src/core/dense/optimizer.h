// Optimizer driver: a list of parameters is one parallel job, cut into blocks by shape alone.
#pragma once

#include <vector>

#include "../kernels.h"

namespace rg {

struct OptimizerAxis {
    int64_t extent;
    int64_t stride[kOptimizerArrays];  // in elements; 0 for an absent array
};

// One parameter with its gradient and states. Arrays that are written overlap no other array.
struct OptimizerParameter {
    DType dtype = DType::f32;  // or f64
    int64_t elements = 0;
    void* array[kOptimizerArrays] = {};  // null: absent
    std::vector<OptimizerAxis> axes;     // empty: all arrays are contiguous in one order
};

struct NormClipping {
    double maximum = 0;         // 0: none
    bool each = false;          // by the norm of each gradient, not of all together
    double known = 0;           // the norm of all gradients, if the caller knows it; 0: compute it
    bool before_scale = false;  // norms and bounds apply to the gradient before scaling
};

// g is scaled down, if needed, so that its norm is at most the maximum. A NaN norm makes every result NaN.
void optimizer_step(const OptimizerRule<double>& rule, const NormClipping& clipping,
                    std::vector<OptimizerParameter>& parameters, int threads);

// A step of a program: its learning rate and its number, from 1, are in memory.
struct ScheduledStep {
    OptimizerRule<double> rule{};  // without what depends on the two
    NormClipping clipping;
    std::vector<OptimizerParameter> parameters;
    const double* learning_rate = nullptr;
    const int64_t* count = nullptr;
    // Of adam: eps, added to the corrected second moment unless `epsilon_hat`, and decoupled weight decay.
    double eps = 0, weight_decay = 0;
    bool epsilon_hat = false;
    // Of the other kinds: gain and rate are these constants plus these factors times the learning rate.
    double gain = 1, gain_factor = 0, rate = 0, rate_factor = -1;
    int threads = 1;
};
void scheduled_step(const ScheduledStep& call);

// A step of a program whose hyperparameters are in memory, as elements of the parameters' type. Without corrections:
// of adam, w -= rate * m / (sqrt(v) + eps); of sgd, which reads no other one, w -= rate * g.
struct GivenStep {
    OptimizerRule<double> rule{};  // without them
    std::vector<OptimizerParameter> parameters;
    DType dtype = DType::f32;  // f32 or f64
    const void *learning_rate = nullptr, *keep_first = nullptr, *keep_second = nullptr, *eps = nullptr;
    int threads = 1;
};
void given_step(const GivenStep& call);

// The square root of the sum of squares of all gradients. The order of the sum depends on shapes and strides alone.
double gradient_norm(std::vector<OptimizerParameter>& parameters, int threads);

}  // namespace rg
