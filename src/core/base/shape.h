// Plain structures shared by all parts of the engine. C++17, no Python, no containers with hidden cost.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace rg {

// How an element is stored. Arithmetic is float for all but f64.
enum class DType : int32_t { f32, f64, f16, bf16 };

// All activations: ENTRY(name, code, alpha, beta, reason). Codes are Apple's (BNNSActivationFunction), and retrograd's
// from 64 on. alpha and beta are the defaults; 0: no such parameter; kRequired: no default. The input always determines
// the slope; the output does too, unless `reason` says why not. The formulas are in kernels/activation.h; the binding
// passes this list to Python.
#define RG_ACTIVATIONS(ENTRY)                                                    \
    ENTRY(identity, 0, 0, 0, nullptr)                                            \
    ENTRY(relu, 1, 0, 0, nullptr)                                                \
    ENTRY(leaky_relu, 2, 0.01, 0, nullptr)                                       \
    ENTRY(sigmoid, 3, 0, 0, nullptr)                                             \
    ENTRY(tanh, 4, 0, 0, nullptr)                                                \
    ENTRY(scaled_tanh, 5, 1, 1, nullptr)                                         \
    ENTRY(abs, 6, 0, 0, "the sign of its input is lost")                         \
    ENTRY(linear, 7, kRequired, 0, nullptr)                                      \
    ENTRY(clamp, 8, kRequired, kRequired, nullptr)                               \
    ENTRY(gelu_tanh, 12, 0.79788456080286535588, 0.044715, "it is not monotone") \
    ENTRY(hard_sigmoid, 15, 1.0 / 6, 0.5, nullptr)                               \
    ENTRY(softplus, 16, 1, 1, nullptr)                                           \
    ENTRY(softsign, 17, 0, 0, nullptr)                                           \
    ENTRY(elu, 18, 1, 0, nullptr)                                                \
    ENTRY(clamped_leaky_relu, 19, 0.01, kRequired, nullptr)                      \
    ENTRY(linear_with_bias, 20, kRequired, kRequired, nullptr)                   \
    ENTRY(log_sigmoid, 22, 0, 0, nullptr)                                        \
    ENTRY(selu, 23, 0, 0, nullptr)                                               \
    ENTRY(celu, 24, 1, 0, nullptr)                                               \
    ENTRY(hard_shrink, 25, 0.5, 0, nullptr)                                      \
    ENTRY(soft_shrink, 26, 0.5, 0, nullptr)                                      \
    ENTRY(tanh_shrink, 27, 0, 0, nullptr)                                        \
    ENTRY(threshold, 28, kRequired, kRequired, nullptr)                          \
    ENTRY(hard_swish, 30, 0, 0, "it is not monotone")                            \
    ENTRY(silu, 31, 0, 0, "it is not monotone")                                  \
    ENTRY(relu6, 32, 0, 0, nullptr)                                              \
    ENTRY(erf, 33, 0, 0, "near 1 and -1 the output is rounded too coarsely")     \
    ENTRY(gelu, 34, 0, 0, "it is not monotone")                                  \
    ENTRY(gelu_sigmoid, 35, 0, 0, "it is not monotone")                          \
    ENTRY(closed_hard_sigmoid, 64, 1.0 / 6, 0.5,                                 \
          "at outputs 0 and 1 it is alpha if the input is on a bound, and 0 if it is beyond")

enum class ActivationKind : int32_t {
#define RG_ENTRY(name, code, alpha, beta, reason) name = code,
    RG_ACTIVATIONS(RG_ENTRY)
#undef RG_ENTRY
};

struct ActivationEntry {
    const char* name;
    ActivationKind kind;
    double alpha, beta;
    const char* needs_input;  // why the output does not determine the slope; null: it does
};
constexpr double kRequired = __builtin_nan("");
constexpr ActivationEntry kActivations[] = {
#define RG_ENTRY(name, code, alpha, beta, reason) {#name, ActivationKind::name, alpha, beta, reason},
    RG_ACTIVATIONS(RG_ENTRY)
#undef RG_ENTRY
};

// Whether the output determines the slope, for parameters with which no two inputs share an output.
constexpr bool output_tells_slope(ActivationKind kind) {
    for (const ActivationEntry& entry : kActivations) {
        if (entry.kind == kind) return !entry.needs_input;
    }
    return false;
}

struct Activation {
    ActivationKind kind = ActivationKind::identity;
    double alpha = 0;
    double beta = 0;
};

// The cells of a recurrent layer, with their gates in order. core/recurrent/recurrent.h has the formulas.
enum class CellKind : int32_t {
    lstm,        // i f g o
    gru_after,   // r z n, with the reset gate applied to the product with the state
    gru_before,  // r z n, with the reset gate applied to the state
    rnn,         // h
};
// Static, because a function that kernels share may not be exported.
static constexpr int gate_count(CellKind kind) { return kind == CellKind::lstm ? 4 : kind == CellKind::rnn ? 1 : 3; }
static constexpr bool is_gru(CellKind kind) { return kind == CellKind::gru_after || kind == CellKind::gru_before; }

// The activations of the gates, and of an LSTM the one applied to the cell state. `standard`: the usual ones, sigmoid
// but tanh for g, n, h and the cell state.
struct CellActivations {
    Activation gate[4];
    Activation hidden;
    bool standard = false;
};

// What a cell computes.
struct CellRule {
    CellKind kind = CellKind::lstm;
    CellActivations activations;
    bool output_reads_old = false;  // LSTM: the output gate's peephole reads the old cell state
    bool coupled = false;           // LSTM: f = 1 - i
    bool flip = false;              // GRU: z weighs the new state, not the old
    double clip = 0;       // the inputs of the gates' activations are clamped to [-clip, clip]; 0: they are not
    double cell_clip = 0;  // LSTM: the same for the new cell state
};

// Columns of a panel, or units of a block: one cache line of elements, at every instruction-set level.
template <class A>
constexpr int64_t kPanel = 64 / int64_t(sizeof(A));

// The terms of a product are summed in runs of this length, and the runs are added in order: the bits of every product
// depend on it. A run of a panel takes 16 KiB, half of a small first-level cache.
constexpr int64_t kDepthRun = 256;

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

// Only the first `size` entries are set or copied, so that a small problem does not pay for kMaxAxes.
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

// An optimizer's update rule; kernels.h has the formulas.
enum class OptimizerKind : int32_t { sgd, adam, rmsprop };

// Reductions; kernels/reduce_range.h has the order of their operations.
enum class ReduceKind : int32_t { sum, mean, sum_of_squares, max, min, product };

// The arrays of one parameter, all of its shape. The states depend on the kind: velocity (sgd); first moment, second
// moment, largest second moment (adam); square, mean, velocity (rmsprop).
enum OptimizerArray { kParameter, kGradient, kState, kOptimizerArrays = kState + 3 };

// ---- maps: chains of elementwise operations ------------------------------------------------------------------------

// All operations: ENTRY(name, arity, cost, integers). cost: nanoseconds for an element in cache, roughly; only the
// ratios matter. integers: whether it is also defined for int64. The formulas are in kernels/map_range.h; the binding
// passes this list to Python.
#define RG_MAP_OPERATIONS(ENTRY)        \
    ENTRY(add, 2, 0.05, true)           \
    ENTRY(sub, 2, 0.05, true)           \
    ENTRY(mul, 2, 0.05, true)           \
    ENTRY(div, 2, 0.2, false)           \
    ENTRY(floor_div, 2, 1, true)        \
    ENTRY(mod, 2, 1, true)              \
    ENTRY(fmod, 2, 1, false)            \
    ENTRY(pow, 2, 4, false)             \
    ENTRY(maximum, 2, 0.05, true)       \
    ENTRY(minimum, 2, 0.05, true)       \
    ENTRY(atan2, 2, 2, false)           \
    ENTRY(equal, 2, 0.05, true)         \
    ENTRY(not_equal, 2, 0.05, true)     \
    ENTRY(less, 2, 0.05, true)          \
    ENTRY(less_equal, 2, 0.05, true)    \
    ENTRY(greater, 2, 0.05, true)       \
    ENTRY(greater_equal, 2, 0.05, true) \
    ENTRY(logical_and, 2, 0.05, true)   \
    ENTRY(logical_or, 2, 0.05, true)    \
    ENTRY(logical_xor, 2, 0.05, true)   \
    ENTRY(logical_not, 1, 0.05, true)   \
    ENTRY(is_nan, 1, 0.05, false)       \
    ENTRY(is_inf, 1, 0.05, false)       \
    ENTRY(is_finite, 1, 0.05, false)    \
    ENTRY(select, 3, 0.1, true)         \
    ENTRY(fma, 3, 0.1, false)           \
    ENTRY(neg, 1, 0.05, true)           \
    ENTRY(abs, 1, 0.05, true)           \
    ENTRY(sign, 1, 0.05, true)          \
    ENTRY(square, 1, 0.05, true)        \
    ENTRY(sqrt, 1, 0.3, false)          \
    ENTRY(rsqrt, 1, 0.5, false)         \
    ENTRY(reciprocal, 1, 0.2, false)    \
    ENTRY(exp, 1, 0.5, false)           \
    ENTRY(exp2, 1, 0.5, false)          \
    ENTRY(expm1, 1, 0.5, false)         \
    ENTRY(log, 1, 0.7, false)           \
    ENTRY(log2, 1, 2, false)            \
    ENTRY(log10, 1, 2, false)           \
    ENTRY(log1p, 1, 2, false)           \
    ENTRY(sin, 1, 1, false)             \
    ENTRY(cos, 1, 1, false)             \
    ENTRY(tan, 1, 2, false)             \
    ENTRY(asin, 1, 2, false)            \
    ENTRY(acos, 1, 2, false)            \
    ENTRY(atan, 1, 2, false)            \
    ENTRY(sinh, 1, 1, false)            \
    ENTRY(cosh, 1, 1, false)            \
    ENTRY(tanh, 1, 0.7, false)          \
    ENTRY(asinh, 1, 3, false)           \
    ENTRY(acosh, 1, 3, false)           \
    ENTRY(atanh, 1, 3, false)           \
    ENTRY(erf, 1, 1, false)             \
    ENTRY(sigmoid, 1, 0.7, false)       \
    ENTRY(relu, 1, 0.05, true)          \
    ENTRY(floor, 1, 0.05, false)        \
    ENTRY(ceil, 1, 0.05, false)         \
    ENTRY(round, 1, 0.05, false)        \
    ENTRY(trunc, 1, 0.05, false)        \
    ENTRY(copy_sign, 2, 0.05, false)    \
    ENTRY(sign_bit, 1, 0.05, false)     \
    ENTRY(bit_and, 2, 0.05, true)       \
    ENTRY(bit_or, 2, 0.05, true)        \
    ENTRY(bit_xor, 2, 0.05, true)       \
    ENTRY(bit_not, 1, 0.05, true)       \
    ENTRY(shift_left, 2, 0.1, true)     \
    ENTRY(shift_right, 2, 0.1, true)    \
    ENTRY(bit_count, 1, 0.5, true)

enum class MapOperation : int32_t {
#define RG_ENTRY(name, arity, cost, integers) name,
    RG_MAP_OPERATIONS(RG_ENTRY)
#undef RG_ENTRY
};

struct MapOperationEntry {
    const char* name;
    int arity;
    double cost;
    bool integers;
};
constexpr MapOperationEntry kMapOperations[] = {
#define RG_ENTRY(name, arity, cost, integers) {#name, arity, cost, integers},
    RG_MAP_OPERATIONS(RG_ENTRY)
#undef RG_ENTRY
};
constexpr int kMapOperationCount = int(sizeof kMapOperations / sizeof kMapOperations[0]);
constexpr bool only_integers(MapOperation operation) { return operation >= MapOperation::bit_and; }

// How the arrays of a map store an element. Booleans are bytes, 0 or 1.
enum class MapElement : int32_t { f32, f64, i32, i64, boolean };

}  // namespace rg
