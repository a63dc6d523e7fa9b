// Elementwise activations and dropout: arrays are cut into blocks, which are shared among threads.
#pragma once

#include "../base/shape.h"

namespace rg {

// Views are kX and kY.
struct ActivationForward {
    AxisList axes;
    DType dtype = DType::f32;
    Activation activation;
    const void* x = nullptr;
    int threads = 1;
    void* y = nullptr;  // may be x itself
};

// dx = dy * f'. Views are kX, kDy and kDx.
struct ActivationBackward {
    AxisList axes;
    DType dtype = DType::f32;
    Activation activation;
    const void* from = nullptr;  // x or y, with the strides of kX
    bool slope_from_input = true;
    const void* dy = nullptr;
    bool accumulate = false;  // add to dx
    int threads = 1;
    void* dx = nullptr;  // may be dy or `from` itself
};

// y = x * mask / (1 - rate). The mask depends on the seed and the element's index.
template <class A>
struct DropoutCall {
    int64_t count = 0;
    const A* x = nullptr;
    double rate = 0;
    uint64_t seed = 0;
    int threads = 1;
    A* y = nullptr;  // may be x itself
};

void activation_forward(const ActivationForward& call);
void activation_backward(const ActivationBackward& call);
template <class A>
void dropout(const DropoutCall<A>& call);

}  // namespace rg
