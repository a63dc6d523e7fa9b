#include "scan.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../base/dispatch.h"
#include "../base/parallel.h"
#include "../base/scratch.h"
#include "../kernels.h"

namespace rg {
namespace {

struct SortScratch {
    Buffer items;
};

constexpr int64_t kCarries = 512;  // columns whose sums stay in the first-level cache

// An unsigned key in the order of the numbers: equal for 0 and -0, and the same, the largest, for every NaN.
uint64_t order_key(double v) {
    if (std::isnan(v)) return ~uint64_t(0);
    v += 0.0;  // -0 becomes 0
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits >> 63 ? ~bits : bits | uint64_t(1) << 63;
}
uint32_t order_key(float v) {
    if (std::isnan(v)) return ~uint32_t(0);
    v += 0.0f;
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits >> 31 ? ~bits : bits | uint32_t(1) << 31;
}

// Items in the order of the result; no two are equal, so that the result does not depend on the algorithm.
struct Item {
    uint64_t key;
    int64_t index;
    bool operator<(const Item& other) const { return key < other.key || (key == other.key && index < other.index); }
};

template <class Entry>
void order_first(Entry* items, int64_t n, int64_t k) {
    if (k == n) {
        std::sort(items, items + n);
    } else if (k <= n / 8) {
        std::partial_sort(items, items + k, items + n);
    } else {
        std::nth_element(items, items + k, items + n);
        std::sort(items, items + k);
    }
}

}  // namespace

template <class A>
void cumulative_sum(const CumulativeSumCall<A>& call) {
    if (call.outer == 0 || call.n == 0 || call.inner == 0) return;
    const RowKernels<A>& kernels = kernel_table().rows.of<A>();
    const double elements = double(call.outer) * double(call.n) * double(call.inner);
    const int64_t tiles = ceil_div(call.inner, kCarries);
    const int64_t x_step = call.reverse ? -call.x.middle : call.x.middle;
    const int64_t y_step = call.reverse ? -call.y.middle : call.y.middle, from = call.reverse ? call.n - 1 : 0;
    Workers(cost::kElement * elements, call.threads).each(call.outer * tiles, [&](int64_t task) {
        const int64_t o = task / tiles, first = task % tiles * kCarries, count = std::min(kCarries, call.inner - first);
        const A* const x = call.x.data + o * call.x.outer + from * call.x.middle + first * call.x.inner;
        A* const y = call.y.data + o * call.y.outer + from * call.y.middle + first * call.y.inner;
        if (count > 1 && call.x.inner == 1 && call.y.inner == 1) {
            double carry[kCarries];
            std::fill(carry, carry + count, 0.0);
            for (int64_t j = 0; j < call.n; ++j) {
                kernels.accumulate(x + j * x_step, count, call.exclusive, carry, y + j * y_step);
            }
            return;
        }
        for (int64_t i = 0; i < count; ++i) {
            double sum = 0;
            for (int64_t j = 0; j < call.n; ++j) {
                const double before = sum;
                sum += double(x[j * x_step + i * call.x.inner]);
                y[j * y_step + i * call.y.inner] = A(call.exclusive ? before : sum);
            }
        }
    });
}

template <class A>
void cumulative_extreme(const CumulativeExtremeCall<A>& call) {
    if (call.outer == 0 || call.n == 0 || call.inner == 0) return;
    const double elements = double(call.outer) * double(call.n) * double(call.inner);
    const int64_t tiles = ceil_div(call.inner, kCarries);
    Workers(2 * cost::kElement * elements, call.threads).each(call.outer * tiles, [&](int64_t task) {
        const int64_t o = task / tiles, first = task % tiles * kCarries, end = std::min(first + kCarries, call.inner);
        const A* const x = call.x.data + o * call.x.outer;
        A* const y = call.y.data + o * call.y.outer;
        int64_t* const indices = call.indices.data + o * call.indices.outer;
        int64_t before = 0;
        for (int64_t step = 0; step < call.n; ++step) {
            const int64_t j = call.reverse ? call.n - 1 - step : step;
            for (int64_t i = first; i < end; ++i) {
                const A value = x[j * call.x.middle + i * call.x.inner];
                A best = value;
                int64_t index = j;
                if (step) {
                    const A old = y[before * call.y.middle + i * call.y.inner];
                    const bool wins = call.largest ? value >= old : value <= old;
                    if (old != old || !(wins || value != value)) {
                        best = old;
                        index = indices[before * call.indices.middle + i * call.indices.inner];
                    }
                }
                y[j * call.y.middle + i * call.y.inner] = best;
                indices[j * call.indices.middle + i * call.indices.inner] = index;
            }
            before = j;
        }
    });
}

template <class A>
void top_k(const TopKCall<A>& call) {
    if (call.rows == 0 || call.k == 0) return;
    // A key of 32 bits and an index share one number.
    const bool packed = sizeof(A) == sizeof(float) && call.n <= int64_t(1) << 32;
    const double work = 4 * cost::kElement * double(call.rows) * double(call.n);
    Workers(work, call.threads).each(call.rows, [&](int64_t row) {
        const A* const x = call.x + row * call.x_row;
        int64_t* const indices = call.indices + row * call.k;
        if (packed) {
            uint64_t* const items = kept_by_thread<SortScratch>().items.take<uint64_t>(call.n);
            for (int64_t i = 0; i < call.n; ++i) {
                const uint32_t key = order_key(float(x[i * call.x_col]));
                items[i] = uint64_t(call.largest ? ~key : key) << 32 | uint64_t(i);
            }
            order_first(items, call.n, call.k);
            for (int64_t j = 0; j < call.k; ++j) indices[j] = int64_t(items[j] & 0xffffffffu);
        } else {
            Item* const items = kept_by_thread<SortScratch>().items.take<Item>(call.n);
            for (int64_t i = 0; i < call.n; ++i) {
                const uint64_t key = order_key(double(x[i * call.x_col]));
                items[i] = {call.largest ? ~key : key, i};
            }
            order_first(items, call.n, call.k);
            for (int64_t j = 0; j < call.k; ++j) indices[j] = items[j].index;
        }
        A* const values = call.values + row * call.k;
        for (int64_t j = 0; j < call.k; ++j) values[j] = x[indices[j] * call.x_col];
    });
}

#define RG_INSTANTIATE(A)                                                 \
    template void cumulative_sum<A>(const CumulativeSumCall<A>&);         \
    template void cumulative_extreme<A>(const CumulativeExtremeCall<A>&); \
    template void top_k<A>(const TopKCall<A>&);
RG_INSTANTIATE(float)
RG_INSTANTIATE(double)
#undef RG_INSTANTIATE

}  // namespace rg
