// Reductions over any axes, indices of the largest elements, softmax.
#include "../core/dense/reduce.h"

#include <nanobind/stl/optional.h>

#include "bind.h"
#include "view.h"

namespace rg::bind {
namespace {

constexpr std::pair<const char*, ReduceKind> kReductions[] = {
    {"sum", ReduceKind::sum}, {"mean", ReduceKind::mean}, {"sum_of_squares", ReduceKind::sum_of_squares},
    {"max", ReduceKind::max}, {"min", ReduceKind::min},   {"product", ReduceKind::product},
};

nb::tuple reductions() {
    nb::list list;
    for (const auto& [name, kind] : kReductions) list.append(nb::make_tuple(name, int(kind)));
    return nb::tuple(list);
}

// The axes of x, and which of them are reduced: y has extent 1 there, and as many axes.
struct ReducedAxes {
    AxisList axes;
    uint64_t reduced = 0;
    int64_t terms = 1, outputs = 1;

    ReducedAxes(Call& call, const View& x, const View& y) {
        for (const View* v : {&x, &y}) v->require();
        if (call.refused()) return;
        y.check_axes(x.axes());
        if (call.refused()) return;
        axes.size = x.axes();
        for (int i = 0; i < axes.size; ++i) {
            const bool kept = x.extent(i) == y.extent(i);
            if (!kept && y.extent(i) != 1) call.refuse(Reason::shape, y.name());
            axes.axis[i] = {x.extent(i), {x.stride(i), kept ? y.stride(i) : 0, 0, 0, 0}};
            if (!kept) reduced |= uint64_t(1) << i;
            (kept ? outputs : terms) *= x.extent(i);
        }
    }
};

template <class A>
void run_reduce(ReduceKind kind, const View& x, const ReducedAxes& axes, const View& y, int threads) {
    ReduceCall<A> call;
    call.kind = kind;
    call.axes = axes.axes;
    call.reduced = axes.reduced;
    call.x = static_cast<const A*>(x.data());
    call.y = static_cast<A*>(y.data());
    run_driver<nb::handle>(double(x.elements()), threads, call, rg::reduce<A>);
}

Outcome reduce(int kind, bool f64, nb::handle x_array, nb::handle y_array, bool overlap_checked, int threads) {
    if (kind < 0 || kind > int(ReduceKind::product)) throw nb::value_error("no such reduction");
    const ReduceKind which = static_cast<ReduceKind>(kind);
    Call call;
    const View x(call, x_array, "x", element_of(f64)), y(call, y_array, "out", element_of(f64), Access::write);
    const ReducedAxes axes(call, x, y);
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    if (axes.terms == 0 && axes.outputs > 0 && (which == ReduceKind::max || which == ReduceKind::min)) {
        throw nb::value_error("the largest of no elements");
    }
    f64 ? run_reduce<double>(which, x, axes, y, threads) : run_reduce<float>(which, x, axes, y, threads);
    return {};
}

Outcome reduce_bool(bool all, nb::handle x_array, nb::handle y_array, bool overlap_checked, int threads) {
    Call call;
    const View x(call, x_array, "x", Element::boolean), y(call, y_array, "out", Element::boolean, Access::write);
    const ReducedAxes axes(call, x, y);
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    BoolReduceCall reduce;
    reduce.all = all;
    reduce.axes = axes.axes;
    reduce.reduced = axes.reduced;
    reduce.x = static_cast<const uint8_t*>(x.data());
    reduce.y = static_cast<uint8_t*>(y.data());
    run_driver<nb::handle>(double(x.elements()), threads, reduce, rg::reduce_bool);
    return {};
}

template <class A>
void run_arg_reduce(bool largest, const View& x, const AxisList& kept, int64_t count, int64_t stride, const View& y,
                    int threads) {
    ArgReduceCall<A> call;
    call.largest = largest;
    call.kept = kept;
    call.count = count;
    call.stride = stride;
    call.x = static_cast<const A*>(x.data());
    call.y = static_cast<int64_t*>(y.data());
    run_driver<nb::handle>(double(x.elements()), threads, call, rg::arg_reduce<A>);
}

Outcome arg_reduce(bool largest, bool f64, nb::handle x_array, nb::handle y_array, bool overlap_checked, int threads) {
    Call call;
    const View x(call, x_array, "x", element_of(f64)), y(call, y_array, "out", Element::i64, Access::write);
    const ReducedAxes axes(call, x, y);
    AxisList kept;
    int64_t count = 1, stride = 1, reduced = 0;
    for (int i = 0; i < axes.axes.size; ++i) {
        const Axis& axis = axes.axes.axis[i];
        if (axes.reduced >> i & 1) {
            ++reduced;
            count = axis.extent;
            stride = axis.stride[kX];
        } else {
            kept.axis[kept.size++] = axis;
        }
    }
    if (reduced > 1) call.refuse(Reason::shape, y.name());
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    if (axes.terms == 0 && axes.outputs > 0) throw nb::value_error("the index of the largest of no elements");
    f64 ? run_arg_reduce<double>(largest, x, kept, count, stride, y, threads)
        : run_arg_reduce<float>(largest, x, kept, count, stride, y, threads);
    return {};
}

}  // namespace

void bind_reduce(nb::module_& m) {
    m.def("reductions", &reductions, nb::sig("def reductions() -> tuple[tuple[str, int], ...]"),
          "Every reduction: name and code.");
    m.def("reduce", &reduce, nb::arg("kind"), nb::arg("f64"), nb::arg("x"), nb::arg("y"), nb::arg("overlap_checked"),
          nb::arg("threads"), "y = the reduction of x over the axes along which y has extent 1.");
    m.def("reduce_bool", &reduce_bool, nb::arg("all"), nb::arg("x"), nb::arg("y"), nb::arg("overlap_checked"),
          nb::arg("threads"), "Whether any, or all, elements are true.");
    m.def("arg_reduce", &arg_reduce, nb::arg("max"), nb::arg("f64"), nb::arg("x"), nb::arg("y"),
          nb::arg("overlap_checked"), nb::arg("threads"),
          "y = the index of the first largest, or smallest, element along the axis along which y has extent 1.");
}

}  // namespace rg::bind
