// Pooling of images and its gradients: planes, or rows of images, are shared among threads.
#pragma once

#include "../kernels.h"

namespace rg {

// Images [N][C][H][W] with any strides, in elements. The images of one call are stored alike: in all of them the
// columns are contiguous, or in all of them the channels are (by_channels).
template <class T>
struct Images {
    T* data = nullptr;
    int64_t sample = 0, channel = 0, row = 0, column = 0;

    Pixels<T> at(int64_t n, int64_t c) const { return {data ? data + n * sample + c * channel : nullptr, row, column}; }
};

enum class PoolKind { max, average, l2 };

template <class A>
struct PoolForward {
    PoolKind kind = PoolKind::max;
    PoolShape shape;
    int64_t samples = 0, channels = 0;
    bool by_channels = false;
    Images<const A> x;
    int threads = 1;
    Images<A> y;
    Images<int32_t> indices;  // of max, where it was; null: not wanted
};

// dx of an average or of an l2 norm.
template <class A>
struct PoolBackward {
    PoolKind kind = PoolKind::average;
    PoolShape shape;
    int64_t samples = 0, channels = 0;
    bool by_channels = false;
    Images<const A> dy;
    Images<const A> x, y;  // of l2
    bool accumulate = false;
    int threads = 1;
    Images<A> dx;
};

// Planes [N][C][P], stored as images are.
template <class T>
struct Planes {
    T* data = nullptr;
    int64_t sample = 0, channel = 0, pixel = 0;

    T* at(int64_t n, int64_t c) const { return data + n * sample + c * channel; }
};

// What goes between the pixels of a plane and the outputs of a pooling, one for each index. An index outside of the
// plane is skipped: the caller has checked them, but another thread may have written to them since.
enum class IndexedKind {
    add,     // whole[index] += part, starting from 0: the gradient of max pooling
    assign,  // whole[index] = part, 0 elsewhere; the last one stays: unpooling
    pick,    // part = whole[index]: the gradient of unpooling
};

template <class A>
struct IndexedPlanes {
    IndexedKind kind = IndexedKind::add;
    int64_t samples = 0, channels = 0, parts = 0, pixels = 0;
    bool by_channels = false;
    Planes<const int32_t> indices;  // [N][C][parts]
    bool accumulate = false;        // add to the result
    int threads = 1;
    Planes<A> part;   // [N][C][parts]; written only by `pick`
    Planes<A> whole;  // [N][C][pixels]; written by the others
};

template <class A>
void pool_forward(const PoolForward<A>& call);
template <class A>
void pool_backward(const PoolBackward<A>& call);
template <class A>
void indexed_planes(const IndexedPlanes<A>& call);
// Whether all indices are in [0, pixels).
bool indices_in_range(const Planes<const int32_t>& indices, int64_t samples, int64_t channels, int64_t parts,
                      int64_t pixels, bool by_channels, int threads);

}  // namespace rg
