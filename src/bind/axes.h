// The axes of arrays that share a shape.
#pragma once

#include "view.h"

namespace rg::bind {

// The arrays of a call that share its shape, in the order of ViewIndex; null if absent.
struct SharedShape {
    const View* view[kViews];
};

inline Axis axis_of(int i, int64_t extent, const SharedShape& arrays) {
    Axis axis;
    axis.extent = extent;
    for (int v = 0; v < kViews; ++v) axis.stride[v] = arrays.view[v] ? arrays.view[v]->stride(i) : 0;
    return axis;
}

}  // namespace rg::bind
