// Plain structures that every room of the engine speaks. C++17, no Python, no containers with hidden cost.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace rg {

// How an element is stored. Arithmetic is float for all but f64.
enum class DType : int32_t { f32, f64, f16, bf16 };

// Numbers are Apple's (BNNSActivationFunction): the elementwise functions of floating-point numbers; from 64 on they
// are ours. The slope from the input is there for all, that from the output for those where it follows.
enum class ActivationKind : int32_t {
    identity = 0,
    relu = 1,
    leaky_relu = 2,
    sigmoid = 3,
    tanh = 4,
    scaled_tanh = 5,
    abs = 6,
    linear = 7,
    clamp = 8,
    gelu_tanh = 12,
    hard_sigmoid = 15,
    softplus = 16,
    softsign = 17,
    elu = 18,
    clamped_leaky_relu = 19,
    linear_with_bias = 20,
    log_sigmoid = 22,
    selu = 23,
    celu = 24,
    hard_shrink = 25,
    soft_shrink = 26,
    tanh_shrink = 27,
    threshold = 28,
    hard_swish = 30,
    silu = 31,
    relu6 = 32,
    erf = 33,
    gelu = 34,
    gelu_sigmoid = 35,
    closed_hard_sigmoid = 64,  // ours
};

// Whether the slope follows from the output, for parameters that do not make two inputs share one.
constexpr bool output_tells_slope(ActivationKind kind) {
    using K = ActivationKind;
    return kind != K::abs && kind != K::gelu_tanh && kind != K::hard_swish && kind != K::silu && kind != K::erf &&
           kind != K::gelu && kind != K::gelu_sigmoid && kind != K::closed_hard_sigmoid;
}

struct Activation {
    ActivationKind kind = ActivationKind::identity;
    double alpha = 0;
    double beta = 0;
};

// The four gates i f g o of an LSTM, and the function that makes h of the cell state.
struct LstmActivations {
    Activation gate[4];
    Activation hidden;
    bool standard = false;  // sigmoid, sigmoid, tanh, sigmoid and tanh
};

// Columns of a panel, units of a block: one cache line of numbers, at every instruction-set level.
template <class A>
constexpr int64_t kPanel = 64 / int64_t(sizeof(A));

// A normalization problem is x[N][C][R]: a statistics set is one n, K consecutive channels and all of R; gamma and beta
// are indexed by C. Batch norm: N = 1 (the batch joins R), K = 1. Instance: K = 1. Group: K = C/G. Layer: R = 1, K = C.
enum class AxisRole : int32_t { n, c, r };

// Views of one call: x, the activation's output y (written by forward, read by backward), dy, dx, and the copy of x
// that forward may keep.
enum ViewIndex { kX, kY, kDy, kDx, kKeep, kViews };

constexpr int kMaxAxes = 64;  // NumPy's own limit

struct Axis {
    int64_t extent;
    int64_t stride[kViews];  // in elements; 0 for a view that the call does not have
};

// Only the first `size` entries are ever set or copied: a small problem should not pay for kMaxAxes.
struct AxisList {
    int size = 0;
    Axis axis[kMaxAxes];

    AxisList() {}
    AxisList(const AxisList& other) { *this = other; }
    AxisList& operator=(const AxisList& other) {
        size = other.size;
        for (int i = 0; i < size; ++i) axis[i] = other.axis[i];
        return *this;
    }

    int64_t extent() const {
        int64_t product = 1;
        for (int i = 0; i < size; ++i) product *= axis[i].extent;
        return product;
    }
};

struct NormShape {
    AxisList n, c, r;
    int64_t channels_per_set = 1;  // K
};

// The update that an optimizer makes; kernels.h has the formulas.
enum class OptimizerKind : int32_t { sgd, adam, rmsprop };

// The arrays of one parameter, all of its shape. What the states are is the kind's: velocity (sgd); first moment,
// second moment, largest second moment (adam); square, mean, velocity (rmsprop).
enum OptimizerArray { kParameter, kGradient, kState, kOptimizerArrays = kState + 3 };

}  // namespace rg
