// Linear recurrences: views of their arrays, and the calls of the drivers.
#pragma once

#include "../core/recurrent/scan.h"
#include "view.h"

namespace rg::bind {

// The arrays of a call in the order of ScanView; null if absent.
struct ScanArrays {
    const View* view[kScanViews] = {};
};

inline bool has_time(int view) {
    return view != kScanStart && view != kScanEnd && view != kScanFirst && view != kScanSums;
}

// Checks that every array has the shape of `whole`, without its axis `axis` if it has no time. a and reset may have
// extents of 1 instead, along which they are broadcast.
inline void check_scan(Call& call, const View& whole, int axis, const ScanArrays& arrays) {
    whole.require();
    if (axis < 0 || axis >= whole.axes()) return call.refuse(Reason::shape, whole.name());
    std::vector<int64_t> shape = whole.shape(), without = shape;
    without.erase(without.begin() + axis);
    for (int v = 0; v < kScanViews; ++v) {
        const View* const view = arrays.view[v];
        if (!view || !view->present()) continue;
        if (v != kScanA && v != kScanReset) {
            view->check_shape(has_time(v) ? shape : without);
            continue;
        }
        view->check_axes(whole.axes());
        for (int i = 0; i < whole.axes(); ++i) {
            if (view->extent(i) != 1 && view->extent(i) != shape[size_t(i)]) call.refuse(Reason::shape, view->name());
        }
    }
}

inline ScanSpace scan_space(const View& whole, int axis, const ScanArrays& arrays) {
    ScanSpace space;
    for (int i = 0; i < whole.axes(); ++i) {
        ScanAxis next{};
        next.extent = whole.extent(i);
        for (int v = 0; v < kScanViews; ++v) {
            const View* const view = arrays.view[v];
            if (!view || !view->present() || (i == axis && !has_time(v))) continue;
            const int own = has_time(v) || i < axis ? i : i - 1;
            if (view->extent(own) > 1) next.stride[v] = view->stride(own);
        }
        if (i == axis) {
            space.time = next;
        } else {
            space.add(next);
        }
    }
    return space;
}

template <class A, class T>
void assign(A*& pointer, const T& view) {
    pointer = static_cast<A*>(view.data());
}

template <class Array, class A>
void run_scan_forward(int axis, const View& a, const View& b, const View& h0, const View& reset, const View& y,
                      const View& hn, const ScanArrays& arrays, int threads) {
    ScanForward<A> call;
    call.space = scan_space(b, axis, arrays);
    assign(call.a, a);
    assign(call.b, b);
    assign(call.h0, h0);
    assign(call.reset, reset);
    assign(call.y, y);
    assign(call.hn, hn);
    run_driver<Array>(double(b.elements()), threads, call, rg::scan_forward<A>);
}

template <class Array>
Outcome scan_forward(bool f64, int axis, Array a_array, Array b_array, Array h0_array, Array reset_array, Array y_array,
                     Array hn_array, bool overlap_checked, int threads) {
    Call call;
    const Element element = element_of(f64);
    const View a(call, a_array, "a", element), b(call, b_array, "b", element), h0(call, h0_array, "h0", element),
        reset(call, reset_array, "reset", Element::boolean), y(call, y_array, "out.y", element, Access::write),
        hn(call, hn_array, "out.hn", element, Access::write);
    ScanArrays arrays;
    arrays.view[kScanA] = &a.require();
    arrays.view[kScanReset] = &reset;
    arrays.view[kScanIn] = &b;
    arrays.view[kScanStart] = &h0;
    arrays.view[kScanOut] = &y;
    arrays.view[kScanEnd] = &hn;
    check_scan(call, b, axis, arrays);
    if (!overlap_checked) call.check_overlap({{&y, &b}});
    if (call.refused()) return call.refusal();
    f64 ? run_scan_forward<Array, double>(axis, a, b, h0, reset, y, hn, arrays, threads)
        : run_scan_forward<Array, float>(axis, a, b, h0, reset, y, hn, arrays, threads);
    return {};
}

template <class Array, class A>
void run_scan_backward(int axis, const View& dy, const View& dhn, const View& a, const View& reset, const View& y,
                       const View& h0, const View& da, const View& da_sums, const View& db, const View& dh0,
                       bool accumulate, const ScanArrays& arrays, int threads) {
    ScanBackward<A> call;
    call.space = scan_space(y, axis, arrays);
    assign(call.dy, dy);
    assign(call.dhn, dhn);
    assign(call.a, a);
    assign(call.reset, reset);
    assign(call.y, y);
    assign(call.h0, h0);
    call.accumulate = accumulate;
    assign(call.da, da);
    assign(call.da_sums, da_sums);
    assign(call.db, db);
    assign(call.dh0, dh0);
    run_driver<Array>(2 * double(y.elements()), threads, call, rg::scan_backward<A>);
}

template <class Array>
Outcome scan_backward(bool f64, int axis, Array dy_array, Array dhn_array, Array a_array, Array reset_array,
                      Array y_array, Array h0_array, Array da_array, Array da_sums_array, Array db_array,
                      Array dh0_array, bool accumulate, bool overlap_checked, int threads) {
    Call call;
    const Element element = element_of(f64);
    const View dy(call, dy_array, "dy", element), dhn(call, dhn_array, "dhn", element), a(call, a_array, "a", element),
        reset(call, reset_array, "reset", Element::boolean), y(call, y_array, "y", element),
        h0(call, h0_array, "h0", element), da(call, da_array, "out.da", element, Access::write),
        da_sums(call, da_sums_array, "out.da", Element::f64, Access::write),
        db(call, db_array, "out.db", element, Access::write), dh0(call, dh0_array, "out.dh0", element, Access::write);
    ScanArrays arrays;
    arrays.view[kScanA] = &a.require();
    arrays.view[kScanReset] = &reset;
    arrays.view[kScanIn] = &dy;
    arrays.view[kScanStart] = &dhn;
    arrays.view[kScanOut] = &db;
    arrays.view[kScanEnd] = &dh0;
    arrays.view[kScanStates] = &y;
    arrays.view[kScanFirst] = &h0;
    arrays.view[kScanDa] = &da;
    arrays.view[kScanSums] = &da_sums;
    check_scan(call, y, axis, arrays);
    if (da.present() && da_sums.present()) call.refuse(Reason::shape, da.name());
    if (!overlap_checked) call.check_overlap({{&db, &dy}});
    if (call.refused()) return call.refusal();
    f64 ? run_scan_backward<Array, double>(axis, dy, dhn, a, reset, y, h0, da, da_sums, db, dh0, accumulate, arrays,
                                           threads)
        : run_scan_backward<Array, float>(axis, dy, dhn, a, reset, y, h0, da, da_sums, db, dh0, accumulate, arrays,
                                          threads);
    return {};
}

}  // namespace rg::bind
