// Optimizer driver: a list of parameters is one job, cut into blocks by shape alone.
#pragma once

#include <vector>

#include "../kernels.h"

namespace rg {

struct OptimizerAxis {
    int64_t extent;
    int64_t stride[kOptimizerArrays];  // in elements; 0 for an array that is not there
};

// One parameter with its gradient and states. Arrays written to share memory with no other.
struct OptimizerParameter {
    DType dtype = DType::f32;  // or f64
    int64_t elements = 0;
    void* array[kOptimizerArrays] = {};  // null: not there
    std::vector<OptimizerAxis> axes;     // empty: all arrays are contiguous in one order
};

struct NormClipping {
    double maximum = 0;         // 0: none
    bool each = false;          // by the norm of each gradient, not of all together
    double known = 0;           // the norm of all, where the caller knows it; 0: to be computed
    bool before_scale = false;  // norms and bounds are of the gradient as it comes, not of scale * gradient
};

// g is multiplied by at most 1 so that its norm is not above the maximum. A norm that is NaN makes everything NaN.
void optimizer_step(const OptimizerRule<double>& rule, const NormClipping& clipping,
                    std::vector<OptimizerParameter>& parameters, int threads);

// The square root of the sum of squares of all gradients. The order of the sum depends on shapes and strides alone.
double gradient_norm(std::vector<OptimizerParameter>& parameters, int threads);

}  // namespace rg
