// Elementwise activations and dropout.
#include "../core/dense/elementwise.h"

#include <nanobind/stl/optional.h>

#include <vector>

#include "axes.h"
#include "bind.h"
#include "view.h"

namespace rg::bind {
namespace {

// The axes of arrays that must all have the shape of x.
AxisList shared_axes(const View& x, const SharedShape& arrays) {
    std::vector<int64_t> shape;
    for (int i = 0; i < x.axes(); ++i) shape.push_back(x.extent(i));
    AxisList list;
    list.size = x.axes();
    for (const View* view : arrays.view) {
        if (view) view->require().check_shape(shape);
    }
    for (int i = 0; i < list.size; ++i) list.axis[i] = axis_of(i, shape[size_t(i)], arrays);
    return list;
}

Outcome activation_forward(int kind, double alpha, double beta, int dtype, nb::handle x_array, nb::handle y_array,
                           bool overlap_checked, int threads) {
    Call call;
    ActivationForward forward;
    forward.dtype = static_cast<DType>(dtype);
    const Element element = element_of(forward.dtype);
    const View x(call, x_array, "x", element), y(call, y_array, "out", element, Access::write);
    forward.axes = shared_axes(x, {&x, &y, nullptr, nullptr, nullptr});
    if (!overlap_checked) call.check_overlap({{&y, &x}});
    if (call.refused()) return call.refusal();
    forward.activation = {static_cast<ActivationKind>(kind), alpha, beta};
    forward.x = x.data();
    forward.y = y.data();
    run_driver<nb::handle>(double(x.elements()), threads, forward, rg::activation_forward);
    return {};
}

Outcome activation_backward(int kind, double alpha, double beta, int dtype, nb::handle dy_array, nb::handle from_array,
                            bool slope_from_input, nb::handle dx_array, bool accumulate, bool overlap_checked,
                            int threads) {
    Call call;
    ActivationBackward backward;
    backward.activation = {static_cast<ActivationKind>(kind), alpha, beta};
    if (!slope_from_input && !output_tells_slope(backward.activation.kind)) {
        throw nb::value_error("the output does not determine the slope");
    }
    backward.dtype = static_cast<DType>(dtype);
    const Element element = element_of(backward.dtype);
    const View dy(call, dy_array, "dy", element), from(call, from_array, slope_from_input ? "x" : "y", element),
        dx(call, dx_array, "out", element, Access::write);
    backward.axes = shared_axes(dy, {&from, nullptr, &dy, &dx, nullptr});
    if (!overlap_checked) call.check_overlap({{&dx, &from}, {&dx, &dy}});
    if (call.refused()) return call.refusal();
    backward.from = from.data();
    backward.slope_from_input = slope_from_input;
    backward.dy = dy.data();
    backward.accumulate = accumulate;
    backward.dx = dx.data();
    run_driver<nb::handle>(double(dy.elements()), threads, backward, rg::activation_backward);
    return {};
}

template <class A>
struct SeededDropout {
    DropoutCall<A> call;
    const int64_t* seed;  // null: the call's seed
    int threads;
};
template <class A>
void seeded_dropout(const SeededDropout<A>& seeded) {
    DropoutCall<A> call = seeded.call;
    call.threads = seeded.threads;
    if (seeded.seed) call.seed = uint64_t(*seeded.seed);
    rg::dropout(call);
}

template <class A>
void run_dropout(const View& x, double rate, uint64_t seed, const View& seed_at, const View& y, int threads) {
    DropoutCall<A> call;
    call.count = x.extent(0);
    call.x = static_cast<const A*>(x.data());
    call.rate = rate;
    call.seed = seed;
    call.y = static_cast<A*>(y.data());
    SeededDropout<A> seeded{call, static_cast<const int64_t*>(seed_at.data()), 1};
    run_driver<nb::handle>(double(call.count), threads, seeded, seeded_dropout<A>);
}

// seed: an integer, or an array with one.
Outcome dropout(bool f64, nb::handle x_array, double rate, nb::handle seed, nb::handle y_array, bool overlap_checked,
                int threads) {
    if (!(rate >= 0 && rate < 1)) throw nb::value_error("rate is out of range");
    Call call;
    const bool in_memory = Py_TYPE(seed.ptr()) == numpy().ndarray;
    const View x(call, x_array, "x", element_of(f64)), y(call, y_array, "out", element_of(f64), Access::write),
        seed_at(call, in_memory ? seed : nb::handle(Py_None), "seed", Element::i64);
    const uint64_t value = in_memory ? 0 : nb::cast<uint64_t>(seed);
    seed_at.check_vector(1);
    x.check_axes(1);
    for (const View* v : {&x, &y}) v->require().check_contiguous({x.extent(0)});
    if (!overlap_checked) call.check_overlap({{&y, &x}});
    if (call.refused()) return call.refusal();
    f64 ? run_dropout<double>(x, rate, value, seed_at, y, threads)
        : run_dropout<float>(x, rate, value, seed_at, y, threads);
    return {};
}

}  // namespace

void bind_elementwise(nb::module_& m) {
    m.def("activation_forward", &activation_forward, nb::arg("kind"), nb::arg("alpha"), nb::arg("beta"),
          nb::arg("dtype"), nb::arg("x"), nb::arg("y"), nb::arg("overlap_checked"), nb::arg("threads"), "y = f(x)");
    m.def("activation_backward", &activation_backward, nb::arg("kind"), nb::arg("alpha"), nb::arg("beta"),
          nb::arg("dtype"), nb::arg("dy"), nb::arg("slope_from"), nb::arg("slope_from_input"), nb::arg("dx"),
          nb::arg("accumulate"), nb::arg("overlap_checked"), nb::arg("threads"),
          "dx = dy * f', with the slope computed from x or from y.");
    m.def("dropout", &dropout, nb::arg("f64"), nb::arg("x"), nb::arg("rate"), nb::arg("seed"), nb::arg("y"),
          nb::arg("overlap_checked"), nb::arg("threads"), "y = x * mask / (1 - rate)");
}

}  // namespace rg::bind
