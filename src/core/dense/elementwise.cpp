#include "elementwise.h"

#include <cstring>

#include "../base/blocks.h"
#include "../base/dispatch.h"
#include "../base/machine.h"
#include "../base/parallel.h"

namespace rg {
namespace {

// Calls body(block) for blocks of at most kTile elements that cover an array.
template <class Body>
void for_blocks(AxisList axes, int threads, const Body& body) {
    const int64_t elements = axes.extent();
    if (elements == 0) return;
    sort_by_stride(axes, kX);
    simplify(axes);
    const PlaneGrid grid(axes);
    Workers(cost::kElement * double(elements), threads).each(grid.blocks, [&](int64_t i) {
        Block b;
        grid.place(i, b);
        body(b);
    });
}

// Whether a pass over `arrays` arrays writes its result with non-temporal stores: not if it has just read those lines.
bool streams(const AxisList& axes, DType dtype, int arrays, bool reads_result) {
    return !reads_result && exceeds_caches(axes.extent() * element_size(dtype) * arrays);
}

template <class A>
void forward(const ActivationForward& call) {
    const Storage<A> storage(kernel_table(), call.dtype, call.activation);
    const ActivationKernels<A>& activations = kernel_table().activation.of<A>();
    const bool stream = streams(call.axes, call.dtype, 2, call.x == call.y);
    for_blocks(call.axes, call.threads, [&](const Block& b) {
        Tile<A>& tile = my_tile<A>();
        const Run<const A> x = storage.read(call.x, kX, b, tile.x);
        const Run<A> y = storage.target(call.y, kY, b, tile, !stream, false);
        for (int64_t row = 0; row < b.rows; ++row) {
            activations.activate(call.activation, x.data + row * x.stride, b.cols, y.data + row * y.stride);
        }
        storage.finish(call.y, kY, b, y, tile, false, stream);
    });
}

template <class A>
void backward(const ActivationBackward& call) {
    const Storage<A> storage(kernel_table(), call.dtype, call.activation);
    const ActivationKernels<A>& activations = kernel_table().activation.of<A>();
    const auto apply = call.slope_from_input ? activations.apply_input_slope : activations.apply_output_slope;
    const bool reads_result = call.accumulate || call.dx == call.dy || call.dx == call.from;
    const bool stream = streams(call.axes, call.dtype, 3, reads_result);
    for_blocks(call.axes, call.threads, [&](const Block& b) {
        Tile<A>& tile = my_tile<A>();
        const Run<const A> from = storage.read(call.from, kX, b, tile.x), dy = storage.read(call.dy, kDy, b, tile.dz);
        const Run<A> dx = storage.target(call.dx, kDx, b, tile, !stream && !call.accumulate, false);
        for (int64_t row = 0; row < b.rows; ++row) {
            apply(call.activation, from.data + row * from.stride, dy.data + row * dy.stride, b.cols,
                  dx.data + row * dx.stride);
        }
        storage.finish(call.dx, kDx, b, dx, tile, call.accumulate, stream);
    });
}

// The random generator takes a row index and a layer. Dropout uses rows of one length, and a layer index that no LSTM
// has. Masks depend on both constants, so they must not change.
constexpr int64_t kDropoutRow = 4096;
constexpr uint32_t kDropoutLayer = 0xffffffffu;

}  // namespace

template <class A>
void dropout(const DropoutCall<A>& call) {
    const CellKernels<A>& kernels = kernel_table().cell.of<A>();
    const Dropout mask = {call.seed, kDropoutLayer, uint32_t(call.rate * 0x1p32), 1 / (1 - call.rate)};
    Workers(cost::kElement * double(call.count), call.threads)
        .each(ceil_div(call.count, kDropoutRow), [&](int64_t row) {
            const int64_t first = row * kDropoutRow, count = std::min(kDropoutRow, call.count - first);
            A* y = call.y + first;
            if (call.y != call.x) memcpy(y, call.x + first, size_t(count) * sizeof(A));
            kernels.dropout_row(mask, uint64_t(row), y, kPanel<A>, count);
        });
}
template void dropout<float>(const DropoutCall<float>&);
template void dropout<double>(const DropoutCall<double>&);

void activation_forward(const ActivationForward& call) {
    call.dtype == DType::f64 ? forward<double>(call) : forward<float>(call);
}

void activation_backward(const ActivationBackward& call) {
    call.dtype == DType::f64 ? backward<double>(call) : backward<float>(call);
}

}  // namespace rg
