// Linear layers: views of their arrays, and the calls of the drivers.
#pragma once

#include "../core/dense/linear.h"
#include "view.h"

namespace rg::bind {

// The work in terms of elements, for run_driver.
template <class Call>
double product_work(const Call& call) {
    return double(call.rows) * double(call.outputs) * (1 + double(call.inputs) / 16);
}

template <class A>
Matrix<A> matrix(const View& view) {
    if (!view.present()) return {};
    // The stride of an axis of extent 1 is arbitrary; 1 marks it as contiguous.
    const int64_t col = view.extent(1) > 1 ? view.stride(1) : 1;
    const int64_t row = view.extent(0) > 1 ? view.stride(0) : col == 1 ? view.extent(1) : 1;
    return {static_cast<A*>(view.data()), row, col};
}

// Whether the engine can write to a matrix: its rows, or with `or_columns` its columns, are contiguous.
inline void check_writable(Call& call, const View& view, bool or_columns = false) {
    const bool rows = view.extent(1) <= 1 || view.stride(1) == 1;
    const bool columns = or_columns && (view.extent(0) <= 1 || view.stride(0) == 1);
    if (view.present() && !rows && !columns) call.refuse(Reason::layout, view.name());
}

template <class Array, class A>
void run_linear_forward(const View& x, const View& w, const View& b, const View& y, int threads) {
    LinearForward<A> call;
    call.rows = x.extent(0);
    call.inputs = x.extent(1);
    call.outputs = w.extent(0);
    call.x = matrix<const A>(x);
    call.w = matrix<const A>(w);
    call.b = static_cast<const A*>(b.data());
    call.y = matrix<A>(y);
    run_driver<Array>(product_work(call), threads, call, rg::linear_forward<A>);
}

template <class Array>
Outcome linear_forward(bool f64, Array x_array, Array w_array, Array b_array, Array y_array, bool overlap_checked,
                       int threads) {
    Call call;
    const Element element = element_of(f64);
    const View x(call, x_array, "x", element), w(call, w_array, "w", element), b(call, b_array, "b", element),
        y(call, y_array, "out", element, Access::write);
    for (const View* v : {&x, &w, &y}) v->require().check_axes(2);
    w.check_shape({w.extent(0), x.extent(1)});
    b.check_contiguous({w.extent(0)});
    y.check_shape({x.extent(0), w.extent(0)});
    check_writable(call, y);
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    f64 ? run_linear_forward<Array, double>(x, w, b, y, threads)
        : run_linear_forward<Array, float>(x, w, b, y, threads);
    return {};
}

template <class Array, class A>
void run_linear_backward(const View& dy, const View& x, const View& w, const View& dx, const View& dw, const View& db,
                         bool accumulate, int threads) {
    LinearBackward<A> call;
    call.rows = dy.extent(0);
    call.inputs = (x.present() ? x : w).extent(1);
    call.outputs = dy.extent(1);
    call.dy = matrix<const A>(dy);
    call.x = matrix<const A>(x);
    call.w = matrix<const A>(w);
    call.accumulate = accumulate;
    call.dx = matrix<A>(dx);
    call.dw = matrix<A>(dw);
    call.db = static_cast<A*>(db.data());
    run_driver<Array>(product_work(call), threads, call, rg::linear_backward<A>);
}

// x may be absent without dw, and w without dx.
template <class Array>
Outcome linear_backward(bool f64, Array dy_array, Array x_array, Array w_array, Array dx_array, Array dw_array,
                        Array db_array, bool accumulate, bool overlap_checked, int threads) {
    Call call;
    const Element element = element_of(f64);
    const View dy(call, dy_array, "dy", element), x(call, x_array, "x", element), w(call, w_array, "w", element),
        dx(call, dx_array, "dx", element, Access::write), dw(call, dw_array, "dw", element, Access::write),
        db(call, db_array, "db", element, Access::write);
    if (dx.present()) w.require();
    if (dw.present()) x.require();
    dy.require();
    for (const View* v : {&dy, &x, &w}) v->check_axes(2);
    const int64_t rows = dy.extent(0), outputs = dy.extent(1), inputs = (x.present() ? x : w).extent(1);
    for (const View* v : {&x, &dx}) v->check_shape({rows, inputs});
    for (const View* v : {&w, &dw}) v->check_shape({outputs, inputs});
    db.check_contiguous({outputs});
    check_writable(call, dx);
    check_writable(call, dw, true);
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    f64 ? run_linear_backward<Array, double>(dy, x, w, dx, dw, db, accumulate, threads)
        : run_linear_backward<Array, float>(dy, x, w, dx, dw, db, accumulate, threads);
    return {};
}

}  // namespace rg::bind
