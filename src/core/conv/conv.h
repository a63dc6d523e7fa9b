// Convolutions of images (cross-correlations, as everywhere in neural networks), forward and backward.
#pragma once

#include "../base/shape.h"

namespace rg {

// An array of images in a caller's memory, [N][C][H][W]. Strides in elements, so any layout.
template <class T>
struct ConvImages {
    T* data = nullptr;  // null: not wanted
    int64_t n = 0, c = 0, y = 0, x = 0;
};

// Weights in a caller's memory, [outputs][inputs of a group][kernel height][kernel width].
template <class T>
struct ConvWeights {
    T* data = nullptr;
    int64_t o = 0, i = 0, y = 0, x = 0;
};

// Output pixel p reads input pixels p * stride + k * dilation - before, for k < kernel; those outside are 0.
struct ConvAxis {
    int64_t input = 0, output = 0, kernel = 0, stride = 1, dilation = 1, before = 0;
};

struct ConvShape {
    int64_t samples = 0, groups = 1;
    int64_t inputs = 0, outputs = 0;  // channels of one group
    ConvAxis y, x;
};

// What is done to a result: it is added to, or gets a bias for each channel and an activation.
template <class A>
struct ConvEnd {
    const A* bias = nullptr;  // null: 0
    Activation activation;
    bool accumulate = false;  // without bias and activation
};

// y = f(w * x + b)
template <class A>
void conv_forward(const ConvShape& shape, const ConvImages<const A>& x, const ConvWeights<const A>& w,
                  const ConvEnd<A>& end, int threads, const ConvImages<A>& y);
// dx, the gradient of x; as a layer of its own, a transposed convolution of dy.
template <class A>
void conv_input(const ConvShape& shape, const ConvImages<const A>& dy, const ConvWeights<const A>& w,
                const ConvEnd<A>& end, int threads, const ConvImages<A>& dx);
// dw. The order of its sums depends on the shape alone.
template <class A>
void conv_weights(const ConvShape& shape, const ConvImages<const A>& x, const ConvImages<const A>& dy, bool accumulate,
                  int threads, const ConvWeights<A>& dw);
// sums[channel] (+)= the sum of a channel over samples and pixels, in double precision.
template <class A>
void channel_sums(const ConvImages<const A>& images, int64_t samples, int64_t channels, int64_t height, int64_t width,
                  bool accumulate, int threads, A* sums);

}  // namespace rg
