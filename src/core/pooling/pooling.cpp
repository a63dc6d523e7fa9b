#include "pooling.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "../base/dispatch.h"
#include "../base/machine.h"
#include "../base/parallel.h"
#include "../base/scratch.h"

namespace rg {
namespace {

struct PlaneScratch {
    Buffer buffer;
};

// The contiguous channels that one piece of work covers: all of them, unless there are too few samples to share.
template <class A>
int64_t channels_at_once(int64_t channels, int64_t samples, const Workers& workers) {
    const int64_t shares = ceil_div(workers.threads(), samples);
    return ceil_div(ceil_div(channels, shares), kPanel<A>) * kPanel<A>;
}

// Sets `count` channels of `pixels` pixels, `step` elements apart, to 0.
template <class A>
void clear_pixels(A* data, int64_t pixels, int64_t step, int64_t count) {
    if (step == count) {
        memset(data, 0, size_t(pixels * count) * sizeof(A));
    } else {
        for (int64_t i = 0; i < pixels; ++i) memset(data + i * step, 0, size_t(count) * sizeof(A));
    }
}

// Calls body(n, c, count) for pieces of `step` channels or fewer that cover all samples.
template <class Body>
void for_pieces(const Workers& workers, int64_t samples, int64_t channels, int64_t step, const Body& body) {
    const int64_t pieces = ceil_div(channels, step);
    workers.each(samples * pieces, [&](int64_t i) {
        const int64_t c = i % pieces * step;
        body(i / pieces, c, std::min(step, channels - c));
    });
}

// Writes a plane [pixels][count] from scratch memory to images, or adds it to them.
template <class A>
struct PlaneWriter {
    bool accumulate, stream;

    void write(const A* plane, int64_t runs, int64_t length, A* to, int64_t step) const {
        const auto store = kernel_table().storage.of<A>().store;
        constexpr DType dtype = sizeof(A) == sizeof(double) ? DType::f64 : DType::f32;
        if (step == length) {
            length *= runs;
            runs = 1;
        }
        for (int64_t i = 0; i < runs; ++i) {
            store(dtype, plane + i * length, length, to + i * step, 1, accumulate, stream);
        }
    }
};

}  // namespace

template <class A>
void pool_forward(const PoolForward<A>& call) {
    const PoolKernels<A>& kernels = kernel_table().pool.of<A>();
    const PoolShape& shape = call.shape;
    const int64_t rows = shape.outputs[0];
    const double taps = double(call.samples * call.channels * rows) * double(shape.outputs[1]) *
                        double(shape.kernel[0]) * double(shape.kernel[1]);
    const Workers workers(cost::kElement / 2 * taps, call.threads);
    const auto run = [&](int64_t n, int64_t c, int64_t first, int64_t last) {
        const int64_t channels = call.by_channels ? call.channels : 0;
        const Pixels<const A> x = call.x.at(n, c);
        const Pixels<A> y = call.y.at(n, c);
        if (call.kind == PoolKind::max) {
            kernels.max(shape, channels, first, last, x, y, call.indices.at(n, c));
        } else {
            (call.kind == PoolKind::average ? kernels.average : kernels.l2)(shape, channels, first, last, x, y);
        }
    };
    const int64_t planes = call.samples * (call.by_channels ? 1 : call.channels);
    workers.ranges(planes * rows, [&](int64_t first, int64_t last) {
        while (first < last) {
            const int64_t plane = first / rows, row = first % rows, end = std::min(rows, row + last - first);
            run(call.by_channels ? plane : plane / call.channels, call.by_channels ? 0 : plane % call.channels, row,
                end);
            first += end - row;
        }
    });
}

template <class A>
void pool_backward(const PoolBackward<A>& call) {
    const PoolKernels<A>& kernels = kernel_table().pool.of<A>();
    const PoolShape& shape = call.shape;
    const int64_t pixels = shape.inputs[0] * shape.inputs[1], images = call.samples * call.channels;
    const double taps = double(images) * double(shape.outputs[0]) * double(shape.outputs[1]) * double(shape.kernel[0]) *
                        double(shape.kernel[1]);
    const Workers workers(cost::kElement * (taps / 2 + double(images) * double(pixels)), call.threads);
    const PlaneWriter<A> writer = {call.accumulate, exceeds_caches(2 * images * pixels * int64_t(sizeof(A)))};
    const int64_t height = shape.inputs[0], width = shape.inputs[1];
    const auto add_gradients = [&](int64_t n, int64_t c, int64_t channels, Pixels<A> plane, A* scratch) {
        if (call.kind == PoolKind::average) {
            kernels.average_gradient(shape, channels, call.dy.at(n, c), plane, scratch);
        } else {
            kernels.l2_gradient(shape, channels, call.dy.at(n, c), call.x.at(n, c), call.y.at(n, c), plane);
        }
    };
    if (!call.by_channels) {
        const int64_t room = call.kind == PoolKind::average ? PoolGradientRows(shape).scratch(shape.outputs[0]) : 0;
        for_pieces(workers, call.samples, call.channels, 1, [&](int64_t n, int64_t c, int64_t) {
            A* const plane = kept_by_thread<PlaneScratch>().buffer.template take<A>(pixels + kPoolSlack + room);
            memset(plane, 0, size_t(pixels + kPoolSlack) * sizeof(A));
            add_gradients(n, c, 0, {plane, width, 1}, plane + pixels + kPoolSlack);
            const Pixels<A> dx = call.dx.at(n, c);
            writer.write(plane, height, width, dx.data, dx.row);
        });
        return;
    }
    // Channels go straight to the result, unless they are added to it.
    const int64_t step = channels_at_once<A>(call.channels, call.samples, workers);
    for_pieces(workers, call.samples, call.channels, step, [&](int64_t n, int64_t c, int64_t count) {
        const Pixels<A> dx = call.dx.at(n, c);
        Pixels<A> plane = dx;
        if (call.accumulate) {
            plane = {kept_by_thread<PlaneScratch>().buffer.template take<A>(pixels, count), width * count, count};
        }
        for (int64_t h = 0; h < height; ++h) { clear_pixels(plane.data + h * plane.row, width, plane.column, count); }
        add_gradients(n, c, count, plane, nullptr);
        for (int64_t h = 0; call.accumulate && h < height; ++h) {
            writer.write(plane.data + h * plane.row, width, count, dx.data + h * dx.row, dx.column);
        }
    });
}

namespace {

// Calls body(index, part of that index, its channel in the piece) for all indices in range, in order. kChannels: the
// channels of all arrays are contiguous; else the pixels are.
template <bool kChannels, class A, class Body>
void for_indices(const IndexedPlanes<A>& call, int64_t n, int64_t c, int64_t count, const Body& body) {
    const uint64_t pixels = uint64_t(call.pixels);
    const int32_t* indices = call.indices.at(n, c);
    A* part = call.part.at(n, c);
    if constexpr (kChannels) {
        for (int64_t i = 0; i < call.parts; ++i) {
            for (int64_t k = 0; k < count; ++k) {
                const uint64_t at = uint64_t(int64_t(indices[k]));
                if (at < pixels) body(int64_t(at), part[k], k);
            }
            indices += call.indices.pixel;
            part += call.part.pixel;
        }
    } else {
        for (int64_t i = 0; i < call.parts; ++i) {
            const uint64_t at = uint64_t(int64_t(indices[i]));
            if (at < pixels) body(int64_t(at), part[i], int64_t(0));
        }
    }
}

template <bool kChannels, class A>
void run_indexed_planes(const IndexedPlanes<A>& call) {
    const int64_t images = call.samples * call.channels;
    const Workers workers(cost::kElement * double(images) * double(4 * call.parts + call.pixels), call.threads);
    const int64_t step = kChannels ? channels_at_once<A>(call.channels, call.samples, workers) : 1;
    if (call.kind == IndexedKind::pick) {
        for_pieces(workers, call.samples, call.channels, step, [&](int64_t n, int64_t c, int64_t count) {
            const A* const whole = call.whole.at(n, c);
            const int64_t pixel = kChannels ? call.whole.pixel : 1;
            for_indices<kChannels>(call, n, c, count, [&](int64_t at, A& part, int64_t k) {
                part = call.accumulate ? part + whole[at * pixel + k] : whole[at * pixel + k];
            });
        });
        return;
    }
    // Straight to the result: the pixels of an output's window are near each other, and so in a cache. If the result
    // exceeds the caches, planes of one channel, which are small, are collected first and then written past the caches.
    const PlaneWriter<A> writer = {call.accumulate, exceeds_caches(2 * images * call.pixels * int64_t(sizeof(A)))};
    const bool direct = !call.accumulate && (kChannels || !writer.stream);
    for_pieces(workers, call.samples, call.channels, step, [&](int64_t n, int64_t c, int64_t count) {
        A* const whole = call.whole.at(n, c);
        A* plane = whole;
        int64_t pixel = kChannels ? call.whole.pixel : 1;
        if (direct) {
            clear_pixels(whole, call.pixels, pixel, count);
        } else {
            plane = kept_by_thread<PlaneScratch>().buffer.template take<A>(call.pixels, count);
            pixel = count;
            memset(plane, 0, size_t(call.pixels * count) * sizeof(A));
        }
        if (call.kind == IndexedKind::add) {
            for_indices<kChannels>(call, n, c, count,
                                   [&](int64_t at, A& part, int64_t k) { plane[at * pixel + k] += part; });
        } else {
            for_indices<kChannels>(call, n, c, count,
                                   [&](int64_t at, A& part, int64_t k) { plane[at * pixel + k] = part; });
        }
        if (direct) return;
        if (kChannels) {
            writer.write(plane, call.pixels, count, whole, call.whole.pixel);
        } else {
            writer.write(plane, 1, call.pixels, whole, call.pixels);
        }
    });
}

}  // namespace

template <class A>
void indexed_planes(const IndexedPlanes<A>& call) {
    call.by_channels ? run_indexed_planes<true>(call) : run_indexed_planes<false>(call);
}

bool indices_in_range(const Planes<const int32_t>& indices, int64_t samples, int64_t channels, int64_t parts,
                      int64_t pixels, bool by_channels, int threads) {
    const auto largest_index = kernel_table().largest_index;
    const uint32_t limit = uint32_t(std::min<int64_t>(pixels, int64_t(1) << 31));
    std::atomic<bool> good(true);
    const Workers workers(cost::kCopy * double(samples * channels) * double(parts), threads);
    const int64_t runs = by_channels ? parts : channels, length = by_channels ? channels : parts;
    const int64_t run = by_channels ? indices.pixel : indices.channel;
    workers.each(length > 0 ? samples * runs : 0, [&](int64_t i) {
        // As an unsigned number a negative index is larger than any plane.
        if (largest_index(indices.data + i / runs * indices.sample + i % runs * run, length) >= limit) good = false;
    });
    return good;
}

#define RG_INSTANTIATE(A)                                \
    template void pool_forward(const PoolForward<A>&);   \
    template void pool_backward(const PoolBackward<A>&); \
    template void indexed_planes(const IndexedPlanes<A>&);
RG_INSTANTIATE(float)
RG_INSTANTIATE(double)
#undef RG_INSTANTIATE

}  // namespace rg
