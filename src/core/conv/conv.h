// Convolutions of images (cross-correlations, as everywhere in neural networks), forward and backward.
#pragma once

#include "../base/shape.h"

namespace rg {

// Arrays are a caller's, with any strides, in elements. The elements of a result are distinct, and it overlaps no other
// array of its call. A size may be 0; the product of the others may then overflow.

// Images [N][C][H][W].
template <class T>
struct ConvImages {
    T* data = nullptr;                   // never null in the functions below
    int64_t n = 0, c = 0, y = 0, x = 0;  // of one column, x should be 1: columns are then contiguous
};

// Weights [groups * outputs][inputs][kernel height][kernel width].
template <class T>
struct ConvWeights {
    T* data = nullptr;
    int64_t o = 0, i = 0, y = 0, x = 0;
};

// Output pixel p reads input pixels p * stride + k * dilation - before, for k < kernel; those outside are 0.
struct ConvAxis {
    int64_t input = 0, output = 0, kernel = 0;  // sizes; any output is in bounds
    int64_t stride = 1, dilation = 1;           // from 1 to 2^31
    int64_t before = 0;                         // padding, at most 2^31 either way; negative: input pixels left out
};

struct ConvShape {
    int64_t samples = 0, groups = 1;
    int64_t inputs = 0, outputs = 0;  // channels of one group
    ConvAxis y, x;
};

// What is done to a result: it is added to, or gets a bias for each channel and an activation.
template <class A>
struct ConvEnd {
    const A* bias = nullptr;  // [all channels of the result], contiguous; null: 0
    Activation activation;    // the identity: none
    bool accumulate = false;  // add to the result instead of overwriting it; without bias and activation
};

// y = f(w * x + b), where x is [samples][groups * inputs] and y [samples][groups * outputs].
template <class A>
void conv_forward(const ConvShape& shape, const ConvImages<const A>& x, const ConvWeights<const A>& w,
                  const ConvEnd<A>& end, int threads, const ConvImages<A>& y);
// dx, the gradient of x, from dy, which is stored as y; as a layer of its own, a transposed convolution of dy. Input
// pixels that no output reads get f(bias).
template <class A>
void conv_input(const ConvShape& shape, const ConvImages<const A>& dy, const ConvWeights<const A>& w,
                const ConvEnd<A>& end, int threads, const ConvImages<A>& dx);
// dw, the gradient of w, overwritten or added to. The order of its sums depends on the shape alone.
template <class A>
void conv_weights(const ConvShape& shape, const ConvImages<const A>& x, const ConvImages<const A>& dy, bool accumulate,
                  int threads, const ConvWeights<A>& dw);
// sums[channel] (+)= the sum of a channel over samples and pixels, in double precision; contiguous.
template <class A>
void channel_sums(const ConvImages<const A>& images, int64_t samples, int64_t channels, int64_t height, int64_t width,
                  bool accumulate, int threads, A* sums);

}  // namespace rg
