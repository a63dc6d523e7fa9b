// Products of many pairs of matrices.
#include "../core/dense/batched.h"

#include <nanobind/stl/optional.h>

#include "bind.h"
#include "view.h"

namespace rg::bind {
namespace {

// The matrices of an array [batch, rows, cols].
template <class A>
Matrix<A> first_matrix(const View& view) {
    // The stride of an axis of extent 1 is arbitrary; 1 marks it as contiguous.
    const int64_t col = view.extent(2) > 1 ? view.stride(2) : 1;
    const int64_t row = view.extent(1) > 1 ? view.stride(1) : col == 1 ? view.extent(2) : 1;
    return {static_cast<A*>(view.data()), row, col};
}

template <class A>
void run_batched_product(const View& a, const View& b, const View& y, bool accumulate, int threads) {
    BatchedProduct<A> call;
    call.batch = a.extent(0);
    call.rows = a.extent(1);
    call.depth = a.extent(2);
    call.cols = b.extent(2);
    call.a = first_matrix<const A>(a);
    call.b = first_matrix<const A>(b);
    call.a_batch = a.stride(0);
    call.b_batch = b.stride(0);
    call.accumulate = accumulate;
    call.y = first_matrix<A>(y);
    call.y_batch = y.stride(0);
    run_driver<nb::handle>(double(y.elements()) * (1 + double(call.depth) / 16), threads, call, rg::batched_product<A>);
}

Outcome batched_product(bool f64, nb::handle a_array, nb::handle b_array, nb::handle y_array, bool accumulate,
                        bool overlap_checked, int threads) {
    Call call;
    const Element element = element_of(f64);
    const View a(call, a_array, "a", element), b(call, b_array, "b", element),
        y(call, y_array, "out", element, Access::write);
    a.require().check_axes(3);
    b.require().check_axes(3);
    b.check_shape({a.extent(0), a.extent(2), b.extent(2)});
    y.require().check_axes(3);
    y.check_shape({a.extent(0), a.extent(1), b.extent(2)});
    y.check_unit_stride(y.extent(2));
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    f64 ? run_batched_product<double>(a, b, y, accumulate, threads)
        : run_batched_product<float>(a, b, y, accumulate, threads);
    return {};
}

}  // namespace

void bind_batched(nb::module_& m) {
    m.def("batched_product", &batched_product, nb::arg("f64"), nb::arg("a"), nb::arg("b"), nb::arg("y"),
          nb::arg("accumulate"), nb::arg("overlap_checked"), nb::arg("threads"),
          "y = a b, or y += a b, for every pair of matrices of [batch, rows, depth] and [batch, depth, cols].");
}

}  // namespace rg::bind
