// Convolutions: makes views of images and weights, calls the drivers.
#include "../core/conv/conv.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>

#include <array>

#include "bind.h"
#include "view.h"

namespace rg::bind {
namespace {

// stride, dilation, padding before: of rows, then of columns; groups.
using Geometry = std::array<int64_t, 7>;

template <class A>
ConvImages<A> images(const View& view) {
    if (!view.present()) return {};
    // The stride of an axis of extent 1 is arbitrary; 1 marks columns as contiguous.
    const int64_t x = view.extent(3) > 1 ? view.stride(3) : 1;
    return {static_cast<A*>(view.data()), view.stride(0), view.stride(1), view.stride(2), x};
}

template <class A>
ConvWeights<A> weights(const View& view) {
    return {static_cast<A*>(view.data()), view.stride(0), view.stride(1), view.stride(2), view.stride(3)};
}

// The problem of `input` [N][groups * inputs][H][W], `w` [groups * outputs][inputs][kernel] and `output`; refuses
// arrays that do not fit. Any size of the output is safe: what it reads beyond the input is 0.
ConvShape checked_shape(Call& call, const View& input, const View& w, const View& output, const Geometry& geometry) {
    for (const View* view : {&input, &w, &output}) view->require().check_axes(4);
    const int64_t groups = geometry[6], inputs = w.extent(1), outputs = w.extent(0) / std::max<int64_t>(1, groups);
    constexpr int64_t kMost = int64_t(1) << 31;  // beyond it, positions might overflow
    for (int i = 0; i < 7; ++i) {
        const bool good = geometry[size_t(i)] <= kMost && geometry[size_t(i)] >= (i == 4 || i == 5 ? -kMost : 1);
        if (!good) throw nb::value_error("the geometry is out of range");
    }
    if (outputs * groups != w.extent(0)) call.refuse(Reason::shape, w.name());
    input.check_shape({input.extent(0), groups * inputs, input.extent(2), input.extent(3)});
    output.check_shape({input.extent(0), groups * outputs, output.extent(2), output.extent(3)});
    ConvShape shape;
    shape.samples = input.extent(0);
    shape.groups = groups;
    shape.inputs = inputs;
    shape.outputs = outputs;
    shape.y = {input.extent(2), output.extent(2), w.extent(2), geometry[0], geometry[2], geometry[4]};
    shape.x = {input.extent(3), output.extent(3), w.extent(3), geometry[1], geometry[3], geometry[5]};
    return shape;
}

double work_of(const ConvShape& shape) {
    // As floating-point numbers: of an empty array, the product of the other sizes may overflow.
    return double(shape.samples) * double(shape.groups) * double(shape.outputs) * double(shape.y.output) *
           double(shape.x.output) * (1 + double(shape.inputs) * double(shape.y.kernel) * double(shape.x.kernel) / 16);
}

template <class A>
ConvEnd<A> end_of(int kind, double alpha, double beta, const View& b, bool accumulate) {
    return {static_cast<const A*>(b.data()), {static_cast<ActivationKind>(kind), alpha, beta}, accumulate};
}

// The arguments of the drivers.
template <class A>
struct ConvCall {
    ConvShape shape;
    ConvImages<const A> from;
    ConvWeights<const A> w;
    ConvEnd<A> end;
    int threads;
    ConvImages<A> to;
};
template <class A>
void run_conv_forward(const ConvCall<A>& c) {
    conv_forward<A>(c.shape, c.from, c.w, c.end, c.threads, c.to);
}
template <class A>
void run_conv_input(const ConvCall<A>& c) {
    conv_input<A>(c.shape, c.from, c.w, c.end, c.threads, c.to);
}
template <class A>
struct ConvWeightsCall {
    ConvShape shape;
    ConvImages<const A> x, dy;
    bool accumulate;
    int threads;
    ConvWeights<A> dw;
};
template <class A>
void run_conv_weights(const ConvWeightsCall<A>& c) {
    rg::conv_weights<A>(c.shape, c.x, c.dy, c.accumulate, c.threads, c.dw);
}
template <class A>
struct ChannelSumsCall {
    ConvImages<const A> images;
    int64_t extent[4];
    int threads;
    A* sums;
    bool accumulate;
};
template <class A>
void run_channel_sums(const ChannelSumsCall<A>& c) {
    rg::channel_sums<A>(c.images, c.extent[0], c.extent[1], c.extent[2], c.extent[3], c.accumulate, c.threads, c.sums);
}

// `transposed`: from the output to the input, which is the gradient of the input, or a transposed convolution.
Outcome convolve(bool f64, bool transposed, int kind, double alpha, double beta, nb::handle from_array,
                 nb::handle w_array, nb::handle b_array, nb::handle to_array, const Geometry& geometry, bool accumulate,
                 bool overlap_checked, int threads) {
    Call call;
    const Element element = element_of(f64);
    const View from(call, from_array, transposed ? "dy" : "x", element), w(call, w_array, "w", element),
        b(call, b_array, "b", element), to(call, to_array, "out", element, Access::write);
    const ConvShape shape = checked_shape(call, transposed ? to : from, w, transposed ? from : to, geometry);
    b.check_contiguous({shape.groups * (transposed ? shape.inputs : shape.outputs)});
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    const auto run = [&](auto zero) {
        using A = decltype(zero);
        ConvCall<A> conv{shape, images<const A>(from), weights<const A>(w), end_of<A>(kind, alpha, beta, b, accumulate),
                         1,     images<A>(to)};
        run_driver<nb::handle>(work_of(shape), threads, conv, transposed ? run_conv_input<A> : run_conv_forward<A>);
    };
    f64 ? run(double()) : run(float());
    return {};
}

Outcome conv_weights(bool f64, nb::handle x_array, nb::handle dy_array, nb::handle dw_array, const Geometry& geometry,
                     bool accumulate, bool overlap_checked, int threads) {
    Call call;
    const Element element = element_of(f64);
    const View x(call, x_array, "x", element), dy(call, dy_array, "dy", element),
        dw(call, dw_array, "dw", element, Access::write);
    const ConvShape shape = checked_shape(call, x, dw, dy, geometry);
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    const auto run = [&](auto zero) {
        using A = decltype(zero);
        ConvWeightsCall<A> conv{shape, images<const A>(x), images<const A>(dy), accumulate, 1, weights<A>(dw)};
        run_driver<nb::handle>(work_of(shape), threads, conv, run_conv_weights<A>);
    };
    f64 ? run(double()) : run(float());
    return {};
}

Outcome channel_sums(bool f64, nb::handle images_array, nb::handle sums_array, bool accumulate, bool overlap_checked,
                     int threads) {
    Call call;
    const Element element = element_of(f64);
    const View from(call, images_array, "dy", element), sums(call, sums_array, "db", element, Access::write);
    from.require().check_axes(4);
    sums.require().check_contiguous({from.extent(1)});
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    const auto run = [&](auto zero) {
        using A = decltype(zero);
        ChannelSumsCall<A> sum{images<const A>(from), {}, 1, static_cast<A*>(sums.data()), accumulate};
        for (int axis = 0; axis < 4; ++axis) sum.extent[axis] = from.extent(axis);
        run_driver<nb::handle>(double(from.elements()), threads, sum, run_channel_sums<A>);
    };
    f64 ? run(double()) : run(float());
    return {};
}

}  // namespace

void bind_conv(nb::module_& m) {
    m.def("convolve", convolve, nb::arg("f64"), nb::arg("transposed"), nb::arg("kind"), nb::arg("alpha"),
          nb::arg("beta"), nb::arg("source"), nb::arg("w"), nb::arg("b").none(), nb::arg("out"), nb::arg("geometry"),
          nb::arg("accumulate"), nb::arg("overlap_checked"), nb::arg("threads"),
          "A convolution of images, or the gradient of its input.");
    m.def("conv_weights", conv_weights, nb::arg("f64"), nb::arg("x"), nb::arg("dy"), nb::arg("dw"), nb::arg("geometry"),
          nb::arg("accumulate"), nb::arg("overlap_checked"), nb::arg("threads"),
          "The gradient of a convolution's weights.");
    m.def("channel_sums", channel_sums, nb::arg("f64"), nb::arg("images"), nb::arg("sums"), nb::arg("accumulate"),
          nb::arg("overlap_checked"), nb::arg("threads"), "The sum of every channel.");
}

}  // namespace rg::bind
