// For benchmarks: the machine's limits, and the large products of an LSTM on their own. float32.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <numeric>
#include <vector>

#include "../core/base/dispatch.h"
#include "../core/product/gates.h"
#include "bind.h"
#include "view.h"

namespace rg::bind {
namespace {

// dst = sum(sources), as fast as memory allows: the baseline for the speed of a normalization.
Outcome add_streams(nb::handle dst_array, const std::vector<nb::object>& source_arrays, bool non_temporal, int passes,
                    int threads) {
    if (source_arrays.empty() || source_arrays.size() > 3) throw nb::value_error("sources: give 1 to 3 arrays");
    Call call;
    const View dst(call, dst_array, "dst", Element::f32, Access::write);
    std::deque<View> sources;
    const float* data[3] = {};
    dst.require().check_vector(dst.elements());
    for (const nb::object& array : source_arrays) {
        const View& source = sources.emplace_back(call, array, "sources", Element::f32);
        source.require().check_vector(dst.elements());
        data[sources.size() - 1] = static_cast<const float*>(source.data());
    }
    float* out = static_cast<float*>(dst.data());
    if (non_temporal && reinterpret_cast<uintptr_t>(out) % 64 != 0) call.refuse(Reason::layout, "dst");
    if (call.refused()) return call.refusal();
    const int count = int(sources.size());
    const int64_t lines = dst.elements() / 16;
    const LockReleased released;
    for (int pass = 0; pass < passes; ++pass) {
        Workers(cost::kWorthWaking, threads).each(threads, [&](int64_t part) {
            const int64_t first = lines * part / threads * 16, last = lines * (part + 1) / threads * 16;
            const float* from[3] = {data[0] + first, data[1] ? data[1] + first : nullptr,
                                    data[2] ? data[2] + first : nullptr};
            kernel_table().add_streams(from, count, last - first, out + first, non_temporal);
        });
    }
    return {};
}

// Multiply-adds on registers alone, as many as the processor can execute: the upper limit of a product's speed.
double multiply_adds(int64_t steps, int threads) {
    if (steps < 1 || threads < 1) throw nb::value_error("steps and threads: at least 1");
    // Many pieces, so that a thread that starts late does not determine the time.
    const int64_t pieces = 16 * int64_t(threads);
    std::vector<double> flops(size_t(pieces), 0.0);
    const LockReleased released;
    Workers(cost::kWorthWaking, threads).each(pieces, [&](int64_t piece) {
        float result;
        const int64_t first = steps * piece / pieces, last = steps * (piece + 1) / pieces;
        flops[size_t(piece)] = kernel_table().multiply_adds(last - first, &result);
    });
    return std::accumulate(flops.begin(), flops.end(), 0.0);
}

// A matrix in panels: [columns / kPanel][rows][kPanel], the panels any distance apart.
struct Panels {
    const float* data;
    int64_t rows, panels, stride;

    explicit Panels(const View& view, Call& call)
        : data(static_cast<const float*>(view.data())),
          rows(view.extent(1)),
          panels(view.extent(0)),
          stride(panels > 1 ? view.stride(0) : rows * kPanel<float>) {
        view.check_shape({panels, rows, kPanel<float>});
        if ((rows > 1 && view.stride(1) != kPanel<float>) || view.stride(2) != 1) {
            call.refuse(Reason::layout, view.name());
        }
    }
};

// Weights of the four gates, or their gradients: [4][units][inputs], contiguous.
template <class A>
GateMatrix<A> gate_matrix(const View& view) {
    GateMatrix<A> w;
    for (int k = 0; k < 4; ++k) w.gate[k] = static_cast<A*>(view.data()) + k * view.extent(1) * view.extent(2);
    w.row_stride = view.extent(2);
    w.col_stride = 1;
    return w;
}

struct PackedWeights {
    Buffer buffer;
};
Buffer& packed_weights() { return kept_by_thread<PackedWeights>().buffer; }

int64_t gate_panels(const View& w) { return 4 * ceil_div(w.extent(1), kPanel<float>); }

Outcome gate_projection(nb::handle u_array, nb::handle w_array, nb::handle bias_array, nb::handle gates_array,
                        int threads) {
    Call call;
    const View u_view(call, u_array, "u", Element::f32), w(call, w_array, "w", Element::f32),
        bias(call, bias_array, "bias", Element::f32), gates(call, gates_array, "gates", Element::f32, Access::write);
    const Panels u(u_view, call);
    const int64_t units = w.extent(1), inputs = w.extent(2), row = gate_panels(w) * kPanel<float>;
    w.check_contiguous({4, units, inputs});
    bias.check_contiguous({row});
    gates.check_contiguous({u.rows, row});
    if (u.panels != ceil_div(inputs, kPanel<float>)) call.refuse(Reason::shape, "u");
    call.check_overlap();
    if (call.refused()) return call.refusal();
    const LockReleased released;
    project<float>(kernel_table().product.f32, {u.data, kPanel<float>, u.stride}, u.rows, inputs, units,
                   gate_matrix<const float>(w), static_cast<const float*>(bias.data()),
                   static_cast<float*>(gates.data()), packed_weights(), threads_of(threads));
    return {};
}

Outcome gate_input_gradient(nb::handle dz_array, nb::handle w_array, nb::handle du_array, int threads) {
    Call call;
    const View dz_view(call, dz_array, "dz", Element::f32), w(call, w_array, "w", Element::f32),
        du(call, du_array, "du", Element::f32, Access::write);
    const Panels dz(dz_view, call);
    const int64_t units = w.extent(1), inputs = w.extent(2);
    w.check_contiguous({4, units, inputs});
    du.check_contiguous({dz.rows, inputs});
    if (dz.panels != gate_panels(w)) call.refuse(Reason::shape, "dz");
    call.check_overlap();
    if (call.refused()) return call.refusal();
    const LockReleased released;
    input_gradient<float>(kernel_table().product.f32, dz.data, dz.stride, dz.rows, units, inputs,
                          gate_matrix<const float>(w), false, static_cast<float*>(du.data()), inputs, packed_weights(),
                          threads_of(threads));
    return {};
}

Outcome gate_weight_gradient(nb::handle dz_array, nb::handle u_array, nb::handle dw_array, int threads) {
    Call call;
    const View dz_view(call, dz_array, "dz", Element::f32), u_view(call, u_array, "u", Element::f32),
        dw(call, dw_array, "dw", Element::f32, Access::write);
    const Panels dz(dz_view, call), u(u_view, call);
    const int64_t units = dw.extent(1), inputs = dw.extent(2);
    dw.check_contiguous({4, units, inputs});
    if (dz.panels != gate_panels(dw)) call.refuse(Reason::shape, "dz");
    if (u.panels != ceil_div(inputs, kPanel<float>) || u.rows != dz.rows) call.refuse(Reason::shape, "u");
    call.check_overlap();
    if (call.refused()) return call.refusal();
    const LockReleased released;
    weight_gradient<float>(kernel_table().product.f32, dz.data, dz.stride, dz.rows, units,
                           {u.data, kPanel<float>, u.stride}, inputs, false, gate_matrix<float>(dw),
                           threads_of(threads));
    return {};
}

}  // namespace

void bind_bench(nb::module_& m) {
    m.def("add_streams", &add_streams, nb::arg("dst"), nb::arg("sources"), nb::arg("non_temporal"), nb::arg("passes"),
          nb::arg("threads"), "dst = sum(sources) of contiguous float32 arrays, `passes` times.");
    m.def("multiply_adds", &multiply_adds, nb::arg("steps"), nb::arg("threads"),
          "Execute multiply-adds on registers, a few per step; returns how many floating-point operations those were.");
    m.def("gate_projection", &gate_projection, nb::arg("u"), nb::arg("w"), nb::arg("bias"), nb::arg("gates"),
          nb::arg("threads"), "gates = u w' + bias: an LSTM's gates, of all steps, without the recurrent part.");
    m.def("gate_input_gradient", &gate_input_gradient, nb::arg("dz"), nb::arg("w"), nb::arg("du"), nb::arg("threads"),
          "du = dz w");
    m.def("gate_weight_gradient", &gate_weight_gradient, nb::arg("dz"), nb::arg("u"), nb::arg("dw"), nb::arg("threads"),
          "dw = dz' u");
}

}  // namespace rg::bind
