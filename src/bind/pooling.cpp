// Pooling: makes views of images, calls the drivers.
#include "../core/pooling/pooling.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "bind.h"
#include "view.h"

namespace rg::bind {
namespace {

constexpr int64_t kMost = int64_t(1) << 31;  // sizes of windows are smaller, so that positions fit in 64 bits
constexpr int kSample = 0, kChannel = 1, kRow = 2, kColumn = 3;

// [N, C, H, W].
template <class T>
Images<T> images(const View& view) {
    return {static_cast<T*>(view.data()), view.stride(kSample), view.stride(kChannel), view.stride(kRow),
            view.stride(kColumn)};
}

// [N, C, P].
template <class T>
Planes<T> planes(const View& view) {
    return {static_cast<T*>(view.data()), view.stride(kSample), view.stride(kChannel), view.stride(2)};
}

// Whether an axis of all of these arrays is contiguous. The stride of an axis of extent 1 is arbitrary.
bool contiguous_along(int axis, std::initializer_list<const View*> views) {
    return std::all_of(views.begin(), views.end(), [&](const View* view) {
        return view->elements() == 0 || view->extent(axis) <= 1 || view->stride(axis) == 1;
    });
}

// How the arrays of a call are stored: by channels, or by columns (`last` axis). Refuses anything else.
bool stored_by_channels(Call& call, int last, std::initializer_list<const View*> views) {
    const View& first = **views.begin();
    const bool channels = contiguous_along(kChannel, views), columns = contiguous_along(last, views);
    if (!channels && !columns) call.refuse(Reason::layout, first.name());
    // Where both are true, one of them has extent 1.
    return channels && (!columns || first.extent(kChannel) > first.extent(last));
}

// `windows`: kernel, stride, dilation and padding before the first element; of each, rows and columns.
PoolShape pool_shape(const View& x, const View& y, const std::vector<int64_t>& windows, bool count_padding) {
    if (windows.size() != 8) throw nb::value_error("windows has 8 numbers");
    PoolShape shape;
    for (int axis = 0; axis < 2; ++axis) {
        shape.inputs[axis] = x.extent(kRow + axis);
        shape.outputs[axis] = y.extent(kRow + axis);
        int64_t* const values[] = {&shape.kernel[axis], &shape.stride[axis], &shape.dilation[axis],
                                   &shape.before[axis]};
        for (int k = 0; k < 4; ++k) {
            *values[k] = windows[size_t(2 * k + axis)];
            if (*values[k] < (k < 3) || *values[k] >= kMost) throw nb::value_error("windows is out of range");
        }
    }
    shape.count_padding = count_padding;
    return shape;
}

// Every window starts inside of the input and its padding; with `nonempty`, every window contains an input.
void check_windows(Call& call, const PoolShape& shape, bool nonempty) {
    for (int axis = 0; axis < 2; ++axis) {
        const int64_t inputs = shape.inputs[axis], outputs = shape.outputs[axis], step = shape.dilation[axis];
        if (outputs > 1 && outputs - 1 > (inputs + 2 * kMost) / shape.stride[axis]) {
            return call.refuse(Reason::shape, "out");
        }
        if (!nonempty) continue;
        for (int64_t o = 0; o < outputs; ++o) {
            const int64_t start = o * shape.stride[axis] - shape.before[axis];
            const int64_t first = start >= 0 ? 0 : (-start + step - 1) / step;
            if (first >= shape.kernel[axis] || start + first * step >= inputs) {
                return call.refuse(Reason::out_of_range, "windows");
            }
        }
    }
}

PoolKind pool_kind(int kind, int least) {
    if (kind < least || kind > int(PoolKind::l2)) throw nb::value_error("kind is out of range");
    return static_cast<PoolKind>(kind);
}

template <class A>
void run_pool_forward(PoolKind kind, const PoolShape& shape, bool by_channels, const View& x, const View& y,
                      const View& indices, int threads) {
    PoolForward<A> call;
    call.kind = kind;
    call.shape = shape;
    call.samples = x.extent(kSample);
    call.channels = x.extent(kChannel);
    call.by_channels = by_channels;
    call.x = images<const A>(x);
    call.y = images<A>(y);
    if (indices.present()) call.indices = images<int32_t>(indices);
    run_driver<nb::handle>(double(x.elements()), threads, call, rg::pool_forward<A>);
}

Outcome pool_forward(int kind_code, bool f64, nb::handle x_array, const std::vector<int64_t>& windows,
                     bool count_padding, nb::handle y_array, nb::handle indices_array, bool overlap_checked,
                     int threads) {
    Call call;
    const PoolKind kind = pool_kind(kind_code, 0);
    const Element element = element_of(f64);
    const View x(call, x_array, "x", element), y(call, y_array, "out", element, Access::write),
        indices(call, indices_array, "indices", Element::i32, Access::write);
    for (const View* v : {&x, &y}) v->require().check_axes(4);
    const PoolShape shape = pool_shape(x, y, windows, count_padding);
    for (const View* v : {&y, &indices}) {
        v->check_shape({x.extent(kSample), x.extent(kChannel), shape.outputs[0], shape.outputs[1]});
    }
    if (kind == PoolKind::max && shape.inputs[0] > 0 && shape.inputs[1] >= kMost / shape.inputs[0]) {
        call.refuse(Reason::shape, "x");
    }
    const bool by_channels = stored_by_channels(call, kColumn, {&x, &y, &indices});
    if (y.elements() > 0) check_windows(call, shape, kind == PoolKind::max);
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    if (y.elements() == 0) return {};
    f64 ? run_pool_forward<double>(kind, shape, by_channels, x, y, indices, threads)
        : run_pool_forward<float>(kind, shape, by_channels, x, y, indices, threads);
    return {};
}

template <class A>
void run_pool_backward(PoolKind kind, const PoolShape& shape, bool by_channels, const View& dy, const View& x,
                       const View& y, const View& dx, bool accumulate, int threads) {
    PoolBackward<A> call;
    call.kind = kind;
    call.shape = shape;
    call.samples = dx.extent(kSample);
    call.channels = dx.extent(kChannel);
    call.by_channels = by_channels;
    call.dy = images<const A>(dy);
    if (kind == PoolKind::l2) {
        call.x = images<const A>(x);
        call.y = images<const A>(y);
    }
    call.accumulate = accumulate;
    call.dx = images<A>(dx);
    run_driver<nb::handle>(double(dx.elements()), threads, call, rg::pool_backward<A>);
}

Outcome pool_backward(int kind_code, bool f64, nb::handle dy_array, nb::handle x_array, nb::handle y_array,
                      const std::vector<int64_t>& windows, bool count_padding, nb::handle dx_array, bool accumulate,
                      bool overlap_checked, int threads) {
    Call call;
    const PoolKind kind = pool_kind(kind_code, 1);
    const Element element = element_of(f64);
    const View dy(call, dy_array, "dy", element), x(call, x_array, "x", element), y(call, y_array, "y", element),
        dx(call, dx_array, "out", element, Access::write);
    for (const View* v : {&dy, &dx}) v->require().check_axes(4);
    if (kind == PoolKind::l2) {
        x.require().check_shape(dx.shape());
        y.require().check_shape(dy.shape());
    }
    const PoolShape shape = pool_shape(dx, dy, windows, count_padding);
    dy.check_shape({dx.extent(kSample), dx.extent(kChannel), shape.outputs[0], shape.outputs[1]});
    const bool by_channels = stored_by_channels(call, kColumn, {&dx, &dy, &x, &y});
    if (dy.elements() > 0) check_windows(call, shape, false);
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    if (dx.elements() == 0) return {};
    f64 ? run_pool_backward<double>(kind, shape, by_channels, dy, x, y, dx, accumulate, threads)
        : run_pool_backward<float>(kind, shape, by_channels, dy, x, y, dx, accumulate, threads);
    return {};
}

template <class A>
void run_indexed_planes(IndexedKind kind, bool by_channels, const View& part, const View& indices, const View& whole,
                        bool accumulate, int threads) {
    IndexedPlanes<A> call;
    call.kind = kind;
    call.samples = part.extent(kSample);
    call.channels = part.extent(kChannel);
    call.parts = part.extent(2);
    call.pixels = whole.extent(2);
    call.by_channels = by_channels;
    call.indices = planes<const int32_t>(indices);
    call.accumulate = accumulate;
    call.part = planes<A>(part);
    call.whole = planes<A>(whole);
    run_driver<nb::handle>(double(part.elements() + whole.elements()), threads, call, rg::indexed_planes<A>);
}

struct PlaneCheck {
    Planes<const int32_t> indices;
    int64_t samples, channels, parts, pixels;
    bool by_channels;
    int threads;
};
bool planes_in_range(const PlaneCheck& c) {
    return rg::indices_in_range(c.indices, c.samples, c.channels, c.parts, c.pixels, c.by_channels, c.threads);
}
void check_planes(const PlaneCheck& c) {
    if (!planes_in_range(c)) throw OutOfRange(-1, c.pixels);
}

Outcome indexed_planes(int kind_code, bool f64, nb::handle part_array, nb::handle indices_array, nb::handle whole_array,
                       bool accumulate, bool overlap_checked, int threads) {
    if (kind_code < 0 || kind_code > int(IndexedKind::pick)) throw nb::value_error("kind is out of range");
    Call call;
    const IndexedKind kind = static_cast<IndexedKind>(kind_code);
    const bool picks = kind == IndexedKind::pick;
    const Element element = element_of(f64);
    const View part(call, part_array, picks ? "out" : "part", element, picks ? Access::write : Access::read),
        indices(call, indices_array, "indices", Element::i32),
        whole(call, whole_array, picks ? "whole" : "out", element, picks ? Access::read : Access::write);
    for (const View* v : {&part, &indices, &whole}) v->require().check_axes(3);
    indices.check_shape(part.shape());
    whole.check_shape({part.extent(kSample), part.extent(kChannel), whole.extent(2)});
    const bool by_channels = stored_by_channels(call, 2, {&part, &whole, &indices});
    if (call.refused()) return call.refusal();
    PlaneCheck check{planes<const int32_t>(indices),
                     part.extent(kSample),
                     part.extent(kChannel),
                     part.extent(2),
                     whole.extent(2),
                     by_channels,
                     threads_of(threads)};
    if (Program* program = recorded_program()) {
        program->add(check, check_planes);
    } else {
        bool good = true;
        without_lock(double(part.elements()), [&] { good = planes_in_range(check); });
        indices.check_index(good);
    }
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    if ((picks ? part : whole).elements() == 0) return {};
    f64 ? run_indexed_planes<double>(kind, by_channels, part, indices, whole, accumulate, threads)
        : run_indexed_planes<float>(kind, by_channels, part, indices, whole, accumulate, threads);
    return {};
}

}  // namespace

void bind_pooling(nb::module_& m) {
    m.def("pool_forward", &pool_forward, nb::arg("kind"), nb::arg("f64"), nb::arg("x"), nb::arg("windows"),
          nb::arg("count_padding"), nb::arg("y"), nb::arg("indices").none(), nb::arg("overlap_checked"),
          nb::arg("threads"), "y = the largest (0), the average (1) or the norm (2) of each window of x [N, C, H, W].");
    m.def("pool_backward", &pool_backward, nb::arg("kind"), nb::arg("f64"), nb::arg("dy"), nb::arg("x").none(),
          nb::arg("y").none(), nb::arg("windows"), nb::arg("count_padding"), nb::arg("dx"), nb::arg("accumulate"),
          nb::arg("overlap_checked"), nb::arg("threads"), "dx of an average (1) or a norm (2), which needs x and y.");
    m.def("indexed_planes", &indexed_planes, nb::arg("kind"), nb::arg("f64"), nb::arg("part"), nb::arg("indices"),
          nb::arg("whole"), nb::arg("accumulate"), nb::arg("overlap_checked"), nb::arg("threads"),
          "Along the last axis: whole[indices] += part (0) or = part (1), 0 elsewhere; or part = whole[indices] (2).");
}

}  // namespace rg::bind
