// The linear recurrence h[t] = a[t] * h[t-1] + b[t], elementwise over all axes but time, and its gradients.
//
// Every element is one chain of multiply-adds in the order of time. So the bits do not depend on the threads, the
// blocks, the strides or the instruction-set level.
#pragma once

#include <stdint.h>

#include "../base/shape.h"

namespace rg {

// The arrays of a call, by role: forward's name, then backward's.
enum ScanView {
    kScanA,
    kScanReset,
    kScanIn,      // b, dy
    kScanStart,   // h0, dhn: no time
    kScanOut,     // y, db
    kScanEnd,     // hn, dh0: no time
    kScanStates,  // -, y
    kScanFirst,   // -, h0: no time
    kScanDa,      // -, da
    kScanSums,    // -, da_sums: no time
    kScanViews
};

struct ScanAxis {
    int64_t extent;
    int64_t stride[kScanViews];  // in elements; 0 for an absent array, or one that is broadcast along the axis
};

// Time, and the other axes, merged where they form one axis in every array.
struct ScanSpace {
    ScanAxis time{};
    int size = 0;
    ScanAxis axis[kMaxAxes];

    ScanSpace() {}
    ScanSpace(const ScanSpace& other) { *this = other; }
    ScanSpace& operator=(const ScanSpace& other) {
        time = other.time;
        size = other.size;
        for (int i = 0; i < size; ++i) axis[i] = other.axis[i];
        return *this;
    }

    // Adds an axis, the outermost first.
    void add(const ScanAxis& next) {
        if (next.extent == 1) return;
        bool joins = size > 0;
        for (int v = 0; v < kScanViews && joins; ++v) {
            joins = axis[size - 1].stride[v] == next.stride[v] * next.extent;
        }
        const int64_t extent = joins ? axis[size - 1].extent * next.extent : next.extent;
        if (!joins) ++size;
        axis[size - 1] = next;
        axis[size - 1].extent = extent;
    }
    int64_t columns() const {
        int64_t product = 1;
        for (int i = 0; i < size; ++i) product *= axis[i].extent;
        return product;
    }
};

// y[t] = a[t] * y[t-1] + b[t] with y[-1] = h0; hn is the last. a[t] counts as 0 where reset.
template <class A>
struct ScanForward {
    ScanSpace space;
    const A *a = nullptr, *b = nullptr;
    const uint8_t* reset = nullptr;  // null: nowhere
    const A* h0 = nullptr;           // null: zeros
    int threads = 1;
    A *y = nullptr, *hn = nullptr;  // null: not wanted; y may be b
};
template <class A>
void scan_forward(const ScanForward<A>& call);

// With l[t] = dy[t] + a[t+1] * l[t+1], and dhn added to the last: db = l, da[t] = l[t] * y[t-1], dh0 = a[0] * l[0].
// da is 0 where reset.
template <class A>
struct ScanBackward {
    ScanSpace space;
    const A *dy = nullptr, *dhn = nullptr;  // null: zeros
    const A* a = nullptr;
    const uint8_t* reset = nullptr;
    const A *y = nullptr, *h0 = nullptr;  // of forward; read only for da
    bool accumulate = false;              // add to da, db and dh0
    int threads = 1;
    A *da = nullptr, *db = nullptr, *dh0 = nullptr;  // null: not wanted; db may be dy
    double* da_sums = nullptr;                       // instead of da: its sums over time, never added to
};
template <class A>
void scan_backward(const ScanBackward<A>& call);

}  // namespace rg
