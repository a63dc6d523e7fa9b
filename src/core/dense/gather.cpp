#include "gather.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../base/blocks.h"
#include "../base/dispatch.h"
#include "../base/parallel.h"

namespace rg {
namespace {

template <class T>
void gather_as(const GatherCall& call) {
    const T* const x = static_cast<const T*>(call.x.data);
    T* const y = static_cast<T*>(call.y.data);
    const bool straight = call.inner == 1 || (call.x.inner == 1 && call.y.inner == 1);
    // Rows that are contiguous in both arrays are copied as one.
    const Workers workers(cost::kCopy * double(call.outer) * double(call.count) * double(call.inner + 8), call.threads);
    workers.each(call.outer * call.count, [&](int64_t row) {
        const int64_t o = row / call.count, j = row % call.count;
        const T* const from = x + o * call.x.outer;
        T* const to = y + o * call.y.outer + j * call.y.middle;
        if (call.along) {
            const int64_t* const at = call.indices + row * call.inner;
            for (int64_t i = 0; i < call.inner; ++i) {
                to[i * call.y.inner] = from[at[i] * call.x.middle + i * call.x.inner];
            }
            return;
        }
        const T* const source = from + call.indices[j] * call.x.middle;
        if (call.inner == 1) {
            *to = *source;
        } else if (straight) {
            memcpy(to, source, size_t(call.inner) * sizeof(T));
        } else {
            for (int64_t i = 0; i < call.inner; ++i) to[i * call.y.inner] = source[i * call.x.inner];
        }
    });
}

}  // namespace

void gather(const GatherCall& call) {
    if (call.outer == 0 || call.count == 0 || call.inner == 0) return;
    call.item == 8   ? gather_as<uint64_t>(call)
    : call.item == 4 ? gather_as<uint32_t>(call)
    : call.item == 2 ? gather_as<uint16_t>(call)
                     : gather_as<uint8_t>(call);
}

// Every thread owns a range of (outer, inner) and visits all positions, so that each element is accumulated in order.
template <class A>
void scatter_add(const ScatterAddCall<A>& call) {
    if (call.outer == 0 || call.n == 0 || call.inner == 0) return;
    const auto store = kernel_table().storage.of<A>().store;
    const double elements =
        double(call.outer) * double(call.inner) * double(call.count + (call.accumulate ? 0 : call.n));
    const Workers workers(cost::kElement * elements, call.threads);
    const int64_t panels = ceil_div(call.inner, kPanel<A>);
    const int64_t wanted = call.outer >= 4 * workers.threads() ? 1 : workers.threads();
    const int64_t step = ceil_div(panels, std::min(panels, wanted)) * kPanel<A>, across = ceil_div(call.inner, step);
    const bool straight = call.dx.inner == 1 && call.dy.inner == 1 && !call.along;
    workers.each(call.outer * across, [&](int64_t task) {
        const int64_t o = task / across, first = task % across * step, count = std::min(step, call.inner - first);
        A* const dx = call.dx.data + o * call.dx.outer + first * call.dx.inner;
        const A* const dy = call.dy.data + o * call.dy.outer + first * call.dy.inner;
        for (int64_t r = 0; r < call.n && !call.accumulate; ++r) {
            A* const to = dx + r * call.dx.middle;
            for (int64_t i = 0; i < count; ++i) to[i * call.dx.inner] = A(0);
        }
        for (int64_t j = 0; j < call.count; ++j) {
            const A* const from = dy + j * call.dy.middle;
            if (call.along) {
                const int64_t* const at = call.indices + (o * call.count + j) * call.inner + first;
                for (int64_t i = 0; i < count; ++i) {
                    dx[at[i] * call.dx.middle + i * call.dx.inner] += from[i * call.dy.inner];
                }
                continue;
            }
            A* const to = dx + call.indices[j] * call.dx.middle;
            if (straight && count >= kPanel<A>) {
                store(kOwnType<A>, from, count, to, 1, true, false);
            } else {
                for (int64_t i = 0; i < count; ++i) to[i * call.dx.inner] += from[i * call.dy.inner];
            }
        }
    });
}
template void scatter_add<float>(const ScatterAddCall<float>&);
template void scatter_add<double>(const ScatterAddCall<double>&);

namespace {

template <ScatterMode mode, class T>
T scattered(T y, T update) {
    using M = ScatterMode;
    // Unsigned, because overflow of signed integers is undefined.
    using U = std::conditional_t<std::is_same_v<T, int32_t>, uint32_t,
                                 std::conditional_t<std::is_same_v<T, int64_t>, uint64_t, T>>;
    if constexpr (mode == M::add) return T(U(y) + U(update));
    if constexpr (mode == M::subtract) return T(U(y) - U(update));
    if constexpr (mode == M::multiply) return T(U(y) * U(update));
    if constexpr (mode == M::divide && std::is_floating_point_v<T>) return y / update;
    if constexpr (mode == M::minimum) return update < y || update != update ? update : y;
    if constexpr (mode == M::maximum) return update > y || update != update ? update : y;
    return update;
}

// As scatter_add: a thread owns a range of (outer, inner).
template <ScatterMode mode, class T>
void scatter_by(const ScatterCall<T>& call) {
    constexpr int64_t unit = 64 / int64_t(sizeof(T));
    const Workers workers(cost::kElement * double(call.outer) * double(call.inner) * double(call.count), call.threads);
    const int64_t lines = ceil_div(call.inner, unit);
    const int64_t wanted = call.outer >= 4 * workers.threads() ? 1 : workers.threads();
    const int64_t step = ceil_div(lines, std::min(lines, wanted)) * unit, across = ceil_div(call.inner, step);
    workers.each(call.outer * across, [&](int64_t task) {
        const int64_t o = task / across, first = task % across * step, count = std::min(step, call.inner - first);
        T* const y = call.y.data + o * call.y.outer + first * call.y.inner;
        const T* const updates = call.updates.data + o * call.updates.outer + first * call.updates.inner;
        for (int64_t j = 0; j < call.count; ++j) {
            const T* const from = updates + j * call.updates.middle;
            const int64_t* const at =
                call.along ? call.indices + (o * call.count + j) * call.inner + first : call.indices + j;
            for (int64_t i = 0; i < count; ++i) {
                T& to = y[at[call.along ? i : 0] * call.y.middle + i * call.y.inner];
                to = scattered<mode, T>(to, from[i * call.updates.inner]);
            }
        }
    });
}

}  // namespace

template <class T>
void scatter(const ScatterCall<T>& call) {
    using M = ScatterMode;
    if (call.outer == 0 || call.inner == 0) return;
    switch (call.mode) {
        case M::add:
            return scatter_by<M::add>(call);
        case M::subtract:
            return scatter_by<M::subtract>(call);
        case M::multiply:
            return scatter_by<M::multiply>(call);
        case M::divide:
            return scatter_by<M::divide>(call);
        case M::minimum:
            return scatter_by<M::minimum>(call);
        case M::maximum:
            return scatter_by<M::maximum>(call);
        case M::set:
            return scatter_by<M::set>(call);
    }
}
template void scatter<float>(const ScatterCall<float>&);
template void scatter<double>(const ScatterCall<double>&);
template void scatter<int32_t>(const ScatterCall<int32_t>&);
template void scatter<int64_t>(const ScatterCall<int64_t>&);

}  // namespace rg
