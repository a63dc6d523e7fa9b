// Softmax over rows, cumulative sums, the largest elements of rows.
#include "../core/dense/softmax.h"

#include <nanobind/stl/optional.h>

#include "../core/dense/scan.h"
#include "bind.h"
#include "cube.h"
#include "view.h"

namespace rg::bind {
namespace {

// Arrays [rows, n] whose rows are contiguous.
void check_rows(const View& like, std::initializer_list<const View*> views) {
    for (const View* v : views) {
        v->require().check_axes(2);
        v->check_shape({like.extent(0), like.extent(1)});
        v->check_unit_stride(like.extent(1));
    }
}

template <class A>
void run_softmax(bool log, const View& x, const View& y, int threads) {
    SoftmaxCall<A> call;
    call.log = log;
    call.rows = x.extent(0);
    call.count = x.extent(1);
    call.x = static_cast<const A*>(x.data());
    call.x_row = x.stride(0);
    call.y = static_cast<A*>(y.data());
    call.y_row = y.stride(0);
    run_driver<nb::handle>(4 * double(x.elements()), threads, call, rg::softmax<A>);
}

Outcome softmax(bool log, bool f64, nb::handle x_array, nb::handle y_array, bool overlap_checked, int threads) {
    Call call;
    const View x(call, x_array, "x", element_of(f64)), y(call, y_array, "out", element_of(f64), Access::write);
    check_rows(x, {&x, &y});
    if (!overlap_checked) call.check_overlap({{&y, &x}});
    if (call.refused()) return call.refusal();
    f64 ? run_softmax<double>(log, x, y, threads) : run_softmax<float>(log, x, y, threads);
    return {};
}

template <class A>
void run_softmax_backward(bool log, const View& dy, const View& y, const View& dx, int threads) {
    SoftmaxBackwardCall<A> call;
    call.log = log;
    call.rows = dy.extent(0);
    call.count = dy.extent(1);
    call.dy = static_cast<const A*>(dy.data());
    call.dy_row = dy.stride(0);
    call.y = static_cast<const A*>(y.data());
    call.y_row = y.stride(0);
    call.dx = static_cast<A*>(dx.data());
    call.dx_row = dx.stride(0);
    run_driver<nb::handle>(double(dy.elements()), threads, call, rg::softmax_backward<A>);
}

Outcome softmax_backward(bool log, bool f64, nb::handle dy_array, nb::handle y_array, nb::handle dx_array,
                         bool overlap_checked, int threads) {
    Call call;
    const View dy(call, dy_array, "dy", element_of(f64)), y(call, y_array, "y", element_of(f64)),
        dx(call, dx_array, "out", element_of(f64), Access::write);
    check_rows(dy, {&dy, &y, &dx});
    if (!overlap_checked) call.check_overlap({{&dx, &dy}, {&dx, &y}});
    if (call.refused()) return call.refusal();
    f64 ? run_softmax_backward<double>(log, dy, y, dx, threads) : run_softmax_backward<float>(log, dy, y, dx, threads);
    return {};
}

template <class A>
void run_cumulative_sum(const View& x, const View& y, bool exclusive, bool reverse, int threads) {
    CumulativeSumCall<A> call;
    call.outer = x.extent(0);
    call.n = x.extent(1);
    call.inner = x.extent(2);
    call.exclusive = exclusive;
    call.reverse = reverse;
    call.x = cube<const A>(x);
    call.y = cube<A>(y);
    run_driver<nb::handle>(double(x.elements()), threads, call, rg::cumulative_sum<A>);
}

Outcome cumulative_sum(bool f64, nb::handle x_array, nb::handle y_array, bool exclusive, bool reverse,
                       bool overlap_checked, int threads) {
    Call call;
    const View x(call, x_array, "x", element_of(f64)), y(call, y_array, "out", element_of(f64), Access::write);
    for (const View* v : {&x, &y}) {
        v->require().check_axes(3);
        v->check_shape({x.extent(0), x.extent(1), x.extent(2)});
    }
    if (!overlap_checked) call.check_overlap({{&y, &x}});
    if (call.refused()) return call.refusal();
    f64 ? run_cumulative_sum<double>(x, y, exclusive, reverse, threads)
        : run_cumulative_sum<float>(x, y, exclusive, reverse, threads);
    return {};
}

template <class A>
void run_cumulative_extreme(bool largest, bool reverse, const View& x, const View& y, const View& indices,
                            int threads) {
    CumulativeExtremeCall<A> call;
    call.largest = largest;
    call.reverse = reverse;
    call.outer = x.extent(0);
    call.n = x.extent(1);
    call.inner = x.extent(2);
    call.x = cube<const A>(x);
    call.y = cube<A>(y);
    call.indices = cube<int64_t>(indices);
    run_driver<nb::handle>(2 * double(x.elements()), threads, call, rg::cumulative_extreme<A>);
}

Outcome cumulative_extreme(bool f64, nb::handle x_array, nb::handle y_array, nb::handle indices_array, bool largest,
                           bool reverse, bool overlap_checked, int threads) {
    Call call;
    const View x(call, x_array, "x", element_of(f64)), y(call, y_array, "out", element_of(f64), Access::write),
        indices(call, indices_array, "indices", Element::i64, Access::write);
    for (const View* v : {&x, &y, &indices}) {
        v->require().check_axes(3);
        v->check_shape({x.extent(0), x.extent(1), x.extent(2)});
    }
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    f64 ? run_cumulative_extreme<double>(largest, reverse, x, y, indices, threads)
        : run_cumulative_extreme<float>(largest, reverse, x, y, indices, threads);
    return {};
}

template <class A>
void run_top_k(bool largest, const View& x, const View& values, const View& indices, int threads) {
    TopKCall<A> call;
    call.largest = largest;
    call.rows = x.extent(0);
    call.n = x.extent(1);
    call.k = values.extent(1);
    call.x = static_cast<const A*>(x.data());
    call.x_row = x.stride(0);
    call.x_col = x.stride(1);
    call.values = static_cast<A*>(values.data());
    call.indices = static_cast<int64_t*>(indices.data());
    run_driver<nb::handle>(8 * double(x.elements()), threads, call, rg::top_k<A>);
}

Outcome top_k(bool f64, nb::handle x_array, nb::handle values_array, nb::handle indices_array, bool largest,
              bool overlap_checked, int threads) {
    Call call;
    const View x(call, x_array, "x", element_of(f64)),
        values(call, values_array, "values", element_of(f64), Access::write),
        indices(call, indices_array, "indices", Element::i64, Access::write);
    x.require().check_axes(2);
    values.require().check_axes(2);
    const int64_t k = values.extent(1);
    values.check_contiguous({x.extent(0), k});
    indices.require().check_contiguous({x.extent(0), k});
    if (k > x.extent(1)) call.refuse(Reason::shape, values.name());
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    f64 ? run_top_k<double>(largest, x, values, indices, threads)
        : run_top_k<float>(largest, x, values, indices, threads);
    return {};
}

}  // namespace

void bind_softmax(nb::module_& m) {
    m.def("softmax", &softmax, nb::arg("log"), nb::arg("f64"), nb::arg("x"), nb::arg("y"), nb::arg("overlap_checked"),
          nb::arg("threads"), "y = softmax(x), or its logarithm, of every row.");
    m.def("softmax_backward", &softmax_backward, nb::arg("log"), nb::arg("f64"), nb::arg("dy"), nb::arg("y"),
          nb::arg("dx"), nb::arg("overlap_checked"), nb::arg("threads"), "dx from dy and y.");
    m.def("cumulative_sum", &cumulative_sum, nb::arg("f64"), nb::arg("x"), nb::arg("y"), nb::arg("exclusive"),
          nb::arg("reverse"), nb::arg("overlap_checked"), nb::arg("threads"),
          "y = the cumulative sums of x [outer, n, inner] along n.");
    m.def("cumulative_extreme", &cumulative_extreme, nb::arg("f64"), nb::arg("x"), nb::arg("y"), nb::arg("indices"),
          nb::arg("largest"), nb::arg("reverse"), nb::arg("overlap_checked"), nb::arg("threads"),
          "y = the largest or smallest elements so far of x [outer, n, inner] along n, and their indices.");
    m.def("top_k", &top_k, nb::arg("f64"), nb::arg("x"), nb::arg("values"), nb::arg("indices"), nb::arg("largest"),
          nb::arg("overlap_checked"), nb::arg("threads"),
          "The k largest or smallest elements of each row, in order, and their indices.");
}

}  // namespace rg::bind
