// Reductions over any axes of an array, and indices of the largest elements.
#pragma once

#include "../base/shape.h"

namespace rg {

// y = the reduction of x over the axes that are set in `reduced`. Views are kX and kY; the strides of y along reduced
// axes are not used. Sums, means and products are accumulated in double precision and rounded once; the largest and
// smallest are NaN if an element is.
//
// The order of the operations depends on the shape and on `reduced`, not on strides. Axes of extent 1 do not count, and
// adjacent axes that are all reduced, or all kept, are one. If the last of them is reduced, x is cut into rows along
// it, of at most kReduceUnit elements; else into blocks of rows of the axis before it. kernels.h has the order inside;
// the results are merged in the order of x, a fixed number of them at a time.
template <class A>
struct ReduceCall {
    ReduceKind kind = ReduceKind::sum;
    AxisList axes;
    uint64_t reduced = 0;  // bit i: axis i
    const A* x = nullptr;
    int threads = 1;
    A* y = nullptr;
};
template <class A>
void reduce(const ReduceCall<A>& call);

// Whether any, or all, of the elements are not 0.
struct BoolReduceCall {
    bool all = false;
    AxisList axes;
    uint64_t reduced = 0;
    const uint8_t* x = nullptr;
    int threads = 1;
    uint8_t* y = nullptr;
};
void reduce_bool(const BoolReduceCall& call);

// y = the index along the reduced axis, of extent `count` > 0, of the largest or smallest element: the first of several
// that are equal, the first NaN if there is one.
template <class A>
struct ArgReduceCall {
    bool largest = true;
    AxisList kept;
    int64_t count = 0, stride = 0;
    const A* x = nullptr;
    int threads = 1;
    int64_t* y = nullptr;
};
template <class A>
void arg_reduce(const ArgReduceCall<A>& call);

}  // namespace rg
