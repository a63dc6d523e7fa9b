// Gather and scatter along the middle axis of arrays [outer, n, inner].
#pragma once

#include <stdint.h>

namespace rg {

// Where the elements of an array [outer, middle, inner] are. Strides in elements.
template <class T>
struct Cube {
    T* data = nullptr;
    int64_t outer = 0, middle = 0, inner = 0;
};

// y[o][j][i] = x[o][indices[j]][i], or with `along`, x[o][indices[o][j][i]][i]. Indices are contiguous and in range.
struct GatherCall {
    int64_t item = 1;  // bytes of an element: 1, 2, 4 or 8
    int64_t outer = 0, count = 0, inner = 0;
    const int64_t* indices = nullptr;
    bool along = false;
    Cube<const void> x;
    int threads = 1;
    Cube<void> y;
};
void gather(const GatherCall& call);

// dx[o][indices[j]][i] += dy[o][j][i], or with `along`, dx[o][indices[o][j][i]][i] += ...: in the order of j.
template <class A>
struct ScatterAddCall {
    int64_t outer = 0, count = 0, inner = 0, n = 0;
    const int64_t* indices = nullptr;
    bool along = false;
    Cube<const A> dy;
    bool accumulate = false;  // add to dx; else it is set to 0 first
    int threads = 1;
    Cube<A> dx;
};
template <class A>
void scatter_add(const ScatterAddCall<A>& call);

enum class ScatterMode : int { add, subtract, multiply, divide, minimum, maximum, set };
constexpr const char* kScatterModes[] = {"add", "subtract", "multiply", "divide", "minimum", "maximum", "set"};

// y[o][indices[j]][i] = f(y[...], updates[o][j][i]), or with `along`, y[o][indices[o][j][i]][i]: in the order of j.
// NaN is smaller and larger than any number. T: float, double, int32_t or int64_t; integers wrap around, and are not
// divided.
template <class T>
struct ScatterCall {
    ScatterMode mode = ScatterMode::add;
    int64_t outer = 0, count = 0, inner = 0;
    const int64_t* indices = nullptr;
    bool along = false;
    Cube<const T> updates;
    int threads = 1;
    Cube<T> y;
};
template <class T>
void scatter(const ScatterCall<T>& call);

}  // namespace rg
