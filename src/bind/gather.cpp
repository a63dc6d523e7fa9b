// Gather and scatter along the middle axis of arrays [outer, n, inner].
#include "../core/dense/gather.h"

#include <nanobind/stl/optional.h>

#include "bind.h"
#include "cube.h"
#include "view.h"

namespace rg::bind {
namespace {

// The element type of an array by its dtype, if its size is `item`; else one that is refused.
Element element_with(nb::handle array, int64_t item) {
    constexpr Element all[] = {Element::f32, Element::f64,     Element::i64, Element::i32,
                               Element::u8,  Element::boolean, Element::f16, Element::bf16};
    if (Py_TYPE(array.ptr()) != numpy().ndarray) return Element::f32;
    PyObject* const dtype = reinterpret_cast<const ArrayObject*>(array.ptr())->dtype;
    for (const Element element : all) {
        if (item_size(element) == item && is_dtype(dtype, element)) return element;
    }
    return item == 8 ? Element::f64 : item == 4 ? Element::f32 : item == 2 ? Element::f16 : Element::u8;
}

// The one of these that the elements of an array are; the first, which is then refused, if they are none.
Element element_among(nb::handle array, std::initializer_list<Element> all) {
    if (Py_TYPE(array.ptr()) == numpy().ndarray) {
        PyObject* const dtype = reinterpret_cast<const ArrayObject*>(array.ptr())->dtype;
        for (const Element element : all) {
            if (is_dtype(dtype, element)) return element;
        }
    }
    return *all.begin();
}

// Whether all indices are in range; in a program, checked in every run. The last check of a call.
void check_range(const View& view, int64_t limit) {
    const IndexCheck check{static_cast<const int64_t*>(view.data()), view.elements(), limit, false, 0};
    if (Program* program = recorded_program()) {
        program->add(check, check_indices);
    } else {
        view.check_index(indices_in_range(check));
    }
}

// Indices [k], or with `along` one for each element of an array [outer, k, inner].
void check_indices_of(const View& indices, const View& elements, bool along) {
    if (along) {
        indices.require().check_contiguous({elements.extent(0), elements.extent(1), elements.extent(2)});
    } else {
        indices.require().check_contiguous({elements.extent(1)});
    }
}

Outcome gather_any(bool along, int64_t item, nb::handle x_array, nb::handle indices_array, nb::handle y_array,
                   bool overlap_checked, int threads) {
    if (item != 1 && item != 2 && item != 4 && item != 8) throw nb::value_error("no such item size");
    Call call;
    const Element element = element_with(x_array, item);
    const View x(call, x_array, "x", element), indices(call, indices_array, "indices", Element::i64),
        y(call, y_array, "out", element, Access::write);
    for (const View* v : {&x, &y}) v->require().check_axes(3);
    y.check_shape({x.extent(0), y.extent(1), x.extent(2)});
    check_indices_of(indices, y, along);
    if (!overlap_checked) call.check_overlap();
    if (!call.refused()) check_range(indices, x.extent(1));
    if (call.refused()) return call.refusal();
    GatherCall gather;
    gather.item = item;
    gather.outer = y.extent(0);
    gather.count = y.extent(1);
    gather.inner = y.extent(2);
    gather.indices = static_cast<const int64_t*>(indices.data());
    gather.along = along;
    gather.x = cube<const void>(x);
    gather.y = cube<void>(y);
    run_driver<nb::handle>(double(y.elements()), threads, gather, rg::gather);
    return {};
}

template <class A>
void run_scatter_add(bool along, const View& dy, const View& indices, const View& dx, bool accumulate, int threads) {
    ScatterAddCall<A> call;
    call.outer = dy.extent(0);
    call.count = dy.extent(1);
    call.inner = dy.extent(2);
    call.n = dx.extent(1);
    call.indices = static_cast<const int64_t*>(indices.data());
    call.along = along;
    call.dy = cube<const A>(dy);
    call.accumulate = accumulate;
    call.dx = cube<A>(dx);
    run_driver<nb::handle>(double(dy.elements()) + double(dx.elements()), threads, call, rg::scatter_add<A>);
}

Outcome scatter_any(bool along, bool f64, nb::handle dy_array, nb::handle indices_array, nb::handle dx_array,
                    bool accumulate, bool overlap_checked, int threads) {
    Call call;
    const View dy(call, dy_array, "dy", element_of(f64)), indices(call, indices_array, "indices", Element::i64),
        dx(call, dx_array, "out", element_of(f64), Access::write);
    for (const View* v : {&dy, &dx}) v->require().check_axes(3);
    dx.check_shape({dy.extent(0), dx.extent(1), dy.extent(2)});
    check_indices_of(indices, dy, along);
    if (!overlap_checked) call.check_overlap();
    if (!call.refused()) check_range(indices, dx.extent(1));
    if (call.refused()) return call.refusal();
    f64 ? run_scatter_add<double>(along, dy, indices, dx, accumulate, threads)
        : run_scatter_add<float>(along, dy, indices, dx, accumulate, threads);
    return {};
}

Outcome gather(int64_t itemsize, nb::handle x, nb::handle indices, nb::handle y, bool overlap_checked, int threads) {
    return gather_any(false, itemsize, x, indices, y, overlap_checked, threads);
}
Outcome gather_along(int64_t itemsize, nb::handle x, nb::handle indices, nb::handle y, bool overlap_checked,
                     int threads) {
    return gather_any(true, itemsize, x, indices, y, overlap_checked, threads);
}
Outcome scatter_add(bool f64, nb::handle dy, nb::handle indices, nb::handle dx, bool accumulate, bool overlap_checked,
                    int threads) {
    return scatter_any(false, f64, dy, indices, dx, accumulate, overlap_checked, threads);
}
Outcome scatter_along_add(bool f64, nb::handle dy, nb::handle indices, nb::handle dx, bool accumulate,
                          bool overlap_checked, int threads) {
    return scatter_any(true, f64, dy, indices, dx, accumulate, overlap_checked, threads);
}

template <class T>
void run_scatter(ScatterMode mode, bool along, const View& updates, const View& indices, const View& y, int threads) {
    ScatterCall<T> call;
    call.mode = mode;
    call.outer = updates.extent(0);
    call.count = updates.extent(1);
    call.inner = updates.extent(2);
    call.indices = static_cast<const int64_t*>(indices.data());
    call.along = along;
    call.updates = cube<const T>(updates);
    call.y = cube<T>(y);
    run_driver<nb::handle>(double(updates.elements()), threads, call, rg::scatter<T>);
}

Outcome scatter(int mode, bool along, nb::handle updates_array, nb::handle indices_array, nb::handle y_array,
                bool overlap_checked, int threads) {
    if (mode < 0 || mode >= int(std::size(kScatterModes))) throw nb::value_error("no such mode");
    const Element element = element_among(y_array, {Element::f32, Element::f64, Element::i64, Element::i32});
    const bool integers = element == Element::i64 || element == Element::i32;
    if (integers && ScatterMode(mode) == ScatterMode::divide) throw nb::value_error("integers are not divided");
    Call call;
    const View updates(call, updates_array, "updates", element), indices(call, indices_array, "indices", Element::i64),
        y(call, y_array, "out", element, Access::write);
    for (const View* v : {&updates, &y}) v->require().check_axes(3);
    y.check_shape({updates.extent(0), y.extent(1), updates.extent(2)});
    check_indices_of(indices, updates, along);
    if (!overlap_checked) call.check_overlap();
    if (!call.refused()) check_range(indices, y.extent(1));
    if (call.refused()) return call.refusal();
    const auto run = element == Element::f64   ? run_scatter<double>
                     : element == Element::i64 ? run_scatter<int64_t>
                     : element == Element::i32 ? run_scatter<int32_t>
                                               : run_scatter<float>;
    run(ScatterMode(mode), along, updates, indices, y, threads);
    return {};
}

nb::tuple scatter_modes() {
    nb::list names;
    for (const char* name : kScatterModes) names.append(name);
    return nb::tuple(names);
}

}  // namespace

void bind_gather(nb::module_& m) {
    m.def("gather", &gather, nb::arg("itemsize"), nb::arg("x"), nb::arg("indices"), nb::arg("y"),
          nb::arg("overlap_checked"), nb::arg("threads"), "y[o, j, i] = x[o, indices[j], i]");
    m.def("gather_along", &gather_along, nb::arg("itemsize"), nb::arg("x"), nb::arg("indices"), nb::arg("y"),
          nb::arg("overlap_checked"), nb::arg("threads"), "y[o, j, i] = x[o, indices[o, j, i], i]");
    m.def("scatter_add", &scatter_add, nb::arg("f64"), nb::arg("dy"), nb::arg("indices"), nb::arg("dx"),
          nb::arg("accumulate"), nb::arg("overlap_checked"), nb::arg("threads"),
          "dx[o, indices[j], i] += dy[o, j, i], in the order of j.");
    m.def("scatter_along_add", &scatter_along_add, nb::arg("f64"), nb::arg("dy"), nb::arg("indices"), nb::arg("dx"),
          nb::arg("accumulate"), nb::arg("overlap_checked"), nb::arg("threads"),
          "dx[o, indices[o, j, i], i] += dy[o, j, i], in the order of j.");
    m.def("scatter_modes", &scatter_modes, nb::sig("def scatter_modes() -> tuple[str, ...]"),
          "The names of the modes of scatter, in the order of their numbers.");
    m.def("scatter", &scatter, nb::arg("mode"), nb::arg("along"), nb::arg("updates"), nb::arg("indices"), nb::arg("y"),
          nb::arg("overlap_checked"), nb::arg("threads"),
          "y[o, indices[j], i] = f(y, updates[o, j, i]), in the order of j; with `along`, indices[o, j, i].");
}

}  // namespace rg::bind
