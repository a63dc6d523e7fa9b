// Normalization drivers: cut a problem into blocks by its shape alone, hand the blocks to the thread pool, and add
// partial sums in a fixed order, so that the bits do not depend on the number of threads.
#pragma once

#include "../base/shape.h"

namespace rg {

// Gamma, beta and their gradients are arrays of the arithmetic type (float, or double for f64) of length C.
// Statistics are doubles, one per set, sets in the order [N][C / K].
struct NormForward {
    NormShape shape;
    DType dtype = DType::f32;
    Activation activation;
    double eps = 0;
    const void* x = nullptr;
    const void* gamma = nullptr;  // null: 1
    const void* beta = nullptr;   // null: 0
    bool statistics_given = false;
    int threads = 1;
    double* mean = nullptr;  // read if given, else written
    double* var = nullptr;   // likewise; the biased variance
    void* y = nullptr;       // null: statistics only. May be x itself
    void* keep = nullptr;    // null: no copy of x. Each element is copied by the thread that computes its y
};

struct NormBackward {
    NormShape shape;
    DType dtype = DType::f32;
    Activation activation;
    double eps = 0;
    const void* x = nullptr;
    const void* y = nullptr;  // only read for an activation whose slope is computed from it
    const void* dy = nullptr;
    const void* gamma = nullptr;
    const void* beta = nullptr;     // only read if slope_from_input
    bool slope_from_input = false;  // the activation's slope comes from z, which is recomputed
    const double* mean = nullptr;
    const double* var = nullptr;
    bool statistics_given = false;  // as in forward: they need not be the statistics of x
    bool frozen = false;            // the statistics are constants
    bool accumulate = false;        // add to dx, dgamma, dbeta
    // Sums over all data of a set, if the caller already has them, with their count; N = 1 and K = 1 only.
    const double* given_sum_dz = nullptr;
    const double* given_sum_dz_xhat = nullptr;
    const double* given_count = nullptr;
    int threads = 1;
    // Results; null: not wanted.
    void* dx = nullptr;
    void* dgamma = nullptr;
    void* dbeta = nullptr;
    double* sum_dz = nullptr;       // dbeta in full precision, for N = 1 and K = 1
    double* sum_dz_xhat = nullptr;  // dgamma likewise
};

// A problem without elements writes nothing.
void norm_forward(const NormForward& call);
void norm_backward(const NormBackward& call);

}  // namespace rg
