// Views of arrays [outer, middle, inner].
#pragma once

#include "../core/dense/gather.h"
#include "view.h"

namespace rg::bind {

template <class T>
Cube<T> cube(const View& view) {
    // The stride of an axis of extent 1 is arbitrary; 1 marks it as contiguous.
    return {static_cast<T*>(view.data()), view.stride(0), view.stride(1), view.extent(2) > 1 ? view.stride(2) : 1};
}

}  // namespace rg::bind
