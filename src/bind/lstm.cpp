// LSTM: makes typed views, calls the drivers.
#include "../core/lstm/lstm.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <tuple>
#include <vector>

#include "bind.h"
#include "view.h"

namespace rg::bind {
namespace {

// The views of one call. Their number depends on the number of cells.
class Arrays {
public:
    const View& add(nb::handle array, const char* name, Element element, Access access = Access::read) {
        return views_.emplace_back(call, array, name, element, access);
    }

    Call call;

private:
    std::deque<View> views_;
};

// The inputs of forward: the fields of Inputs in ops/lstm/problem.py.
struct Inputs {
    nb::handle x, indices, cells, h0, c0, active, order;
    uint64_t seed;

    explicit Inputs(nb::handle inputs) {
        if (!PyTuple_Check(inputs.ptr()) || PyTuple_GET_SIZE(inputs.ptr()) != 9) {
            throw nb::type_error("inputs are not Inputs");
        }
        const auto item = [&](Py_ssize_t i) { return nb::handle(PyTuple_GET_ITEM(inputs.ptr(), i)); };
        x = item(1);
        indices = item(2);
        cells = item(3);
        h0 = item(4);
        c0 = item(5);
        active = item(6);
        order = item(7);
        seed = nb::cast<uint64_t>(item(8));
    }
};

using ActivationTuple = std::tuple<int, double, double>;

// An LSTM of one shape and one set of options. Immutable, and reused for many calls. Sequences are
// [steps][samples][features], time first, with any strides but contiguous features.
class LstmProblem {
public:
    LstmProblem(int64_t steps, int64_t samples, int64_t inputs, int64_t units, int64_t layers, int64_t directions,
                int dtype, const std::vector<ActivationTuple>& activations, int peephole, bool output_reads_old,
                double dropout) {
        if (steps < 0 || samples < 0 || inputs < 0 || units < 1 || layers < 1 || directions < 1 || directions > 2) {
            throw nb::value_error("a size is out of range");
        }
        if (activations.size() != 5) throw nb::value_error("there are five activations");
        if (!(dropout >= 0 && dropout < 1)) throw nb::value_error("dropout is out of range");
        if (peephole < 0 || peephole > 2) throw nb::value_error("unknown kind of peephole");
        shape_.steps = steps;
        shape_.samples = samples;
        shape_.inputs = inputs;
        shape_.units = units;
        shape_.layers = layers;
        shape_.directions = directions;
        shape_.dtype = static_cast<DType>(dtype);
        if (shape_.dtype != DType::f32 && shape_.dtype != DType::f64) throw nb::value_error("float32 or float64");
        element_ = element_of(shape_.dtype);
        for (size_t i = 0; i < 5; ++i) {
            const auto& [kind, alpha, beta] = activations[i];
            Activation& to = i < 4 ? shape_.activations.gate[i] : shape_.activations.hidden;
            to = {static_cast<ActivationKind>(kind), alpha, beta};
        }
        using K = ActivationKind;
        const Activation* gate = shape_.activations.gate;
        shape_.activations.standard = gate[0].kind == K::sigmoid && gate[1].kind == K::sigmoid &&
                                      gate[2].kind == K::tanh && gate[3].kind == K::sigmoid &&
                                      shape_.activations.hidden.kind == K::tanh;
        if (!lstm_fits(shape_)) throw nb::value_error("the sizes are too large");
        shape_.peephole = static_cast<Peephole>(peephole);
        shape_.output_reads_old = output_reads_old;
        shape_.dropout = layers > 1 ? dropout : 0;
    }

    // rows: the number of active samples, summed over all steps
    int64_t cache_bytes(int64_t rows) const {
        if (rows < 0 || rows > shape_.steps * shape_.samples) throw nb::value_error("rows are out of range");
        return lstm_cache_bytes(shape_, rows);
    }

    // With indices, [steps][samples], x is a table, and they select its rows.
    Outcome forward(nb::handle inputs, nb::handle cache_array, uint64_t stamp, nb::handle y_array, nb::handle hn_array,
                    nb::handle cn_array, bool overlap_checked, int threads) const {
        Arrays arrays;
        const Inputs in(inputs);
        LstmForward forward;
        forward.shape = ragged(arrays, in);
        const View& x = arrays.add(in.x, "x", element_).require();
        const View& indices = arrays.add(in.indices, "x", Element::i64);
        forward.x = indices.present() ? table(x, x.extent(0)) : sequence(x, shape_.inputs);
        std::vector<CellArrays> cells = parameters(arrays, in.cells, Access::read);
        forward.cells = cells.data();
        const View& h0 = arrays.add(in.h0, "h0", element_);
        const View& c0 = arrays.add(in.c0, "c0", element_);
        forward.h0 = states(h0);
        forward.c0 = states(c0);
        const View& cache = arrays.add(cache_array, "cache", Element::u8, Access::write);
        check_cache_size(arrays.call, cache, forward.shape);
        forward.cache = cache.data();
        forward.stamp = stamp;
        forward.y = sequence(arrays.add(y_array, "out.y", element_, Access::write), shape_.directions * shape_.units);
        const View& hn = arrays.add(hn_array, "out.hn", element_, Access::write);
        const View& cn = arrays.add(cn_array, "out.cn", element_, Access::write);
        forward.hn = states(hn);
        forward.cn = states(cn);
        forward.lookup = lookup(arrays.call, forward.shape, indices, x);
        if (!overlap_checked) arrays.call.check_overlap({{&hn, &h0}, {&cn, &c0}});
        if (arrays.call.refused()) return arrays.call.refusal();
        forward.threads = threads_of(threads);
        without_lock(work(), [&] { lstm_forward(forward); });
        return {};
    }

    // stamp: of the forward pass that filled the cache; none: any.
    Outcome backward(nb::handle dy_array, nb::handle dhn_array, nb::handle dcn_array, nb::handle inputs,
                     nb::handle cache_array, std::optional<uint64_t> stamp, nb::handle dx_array, nb::handle dcells_list,
                     nb::handle dh0_array, nb::handle dc0_array, bool accumulate, bool overlap_checked,
                     int threads) const {
        Arrays arrays;
        const Inputs in(inputs);
        LstmBackward backward;
        backward.shape = ragged(arrays, in);
        const View& x = arrays.add(in.x, "x", element_).require();
        const View& indices = arrays.add(in.indices, "x", Element::i64);
        backward.x = indices.present() ? table(x, x.extent(0)) : sequence(x, shape_.inputs);
        const std::vector<CellArrays> cells = parameters(arrays, in.cells, Access::read);
        backward.cells = cells.data();
        const View& cache = arrays.add(cache_array, "cache", Element::u8);
        check_filled(arrays.call, cache, backward.shape, stamp);
        backward.cache = cache.data();
        backward.dy = sequence(arrays.add(dy_array, "dy", element_), shape_.directions * shape_.units);
        backward.dhn = states(arrays.add(dhn_array, "dhn", element_));
        backward.dcn = states(arrays.add(dcn_array, "dcn", element_));
        const View& dx = arrays.add(dx_array, "out.dx", element_, Access::write);
        backward.dx = indices.present() ? table(dx, x.extent(0)) : sequence(dx, shape_.inputs);
        std::vector<CellArrays> dcells;
        if (!dcells_list.is_none()) {
            dcells = parameters(arrays, dcells_list, Access::write);
            backward.dcells = dcells.data();
        }
        backward.dh0 = states(arrays.add(dh0_array, "out.dh0", element_, Access::write));
        backward.dc0 = states(arrays.add(dc0_array, "out.dc0", element_, Access::write));
        backward.lookup = lookup(arrays.call, backward.shape, indices, x);
        if (!overlap_checked) arrays.call.check_overlap();
        if (arrays.call.refused()) return arrays.call.refusal();
        backward.accumulate = accumulate;
        backward.threads = threads_of(threads);
        without_lock(work(), [&] { lstm_backward(backward); });
        return {};
    }

    // Whether a forward pass with these inputs has filled the cache.
    Outcome check_cache(nb::handle inputs, nb::handle cache_array, std::optional<uint64_t> stamp) const {
        Arrays arrays;
        const LstmShape shape = ragged(arrays, Inputs(inputs));
        check_filled(arrays.call, arrays.add(cache_array, "cache", Element::u8), shape, stamp);
        return arrays.call.refusal();
    }

    Outcome show(nb::handle inputs, nb::handle cache_array, std::optional<uint64_t> stamp, int64_t cell,
                 nb::handle gates_array, nb::handle states_array) const {
        Arrays arrays;
        const LstmShape shape = ragged(arrays, Inputs(inputs));
        if (cell < 0 || cell >= shape.layers * shape.directions) throw nb::value_error("there is no such cell");
        const View& cache = arrays.add(cache_array, "cache", Element::u8);
        check_filled(arrays.call, cache, shape, stamp);
        const View& gates = arrays.add(gates_array, "gates", element_, Access::write);
        const View& cell_states = arrays.add(states_array, "cells", element_, Access::write);
        gates.check_contiguous({shape.steps, shape.samples, 4, shape.units});
        cell_states.check_contiguous({shape.steps, shape.samples, shape.units});
        if (arrays.call.refused()) return arrays.call.refusal();
        lstm_show(shape, cache.data(), cell, gates.data(), cell_states.data());
        return {};
    }

private:
    // Roughly the number of elements that a call touches.
    double work() const { return double(shape_.steps) * double(shape_.samples) * double(shape_.units) * 16; }

    // Python computes active and order from lengths that it has checked.
    LstmShape ragged(Arrays& arrays, const Inputs& in) const {
        LstmShape shape = shape_;
        shape.seed = in.seed;
        const View& active = arrays.add(in.active, "active", Element::i64);
        const View& order = arrays.add(in.order, "order", Element::i64);
        active.check_contiguous({shape.steps});
        order.check_contiguous({shape.samples});
        if (arrays.call.refused()) throw nb::value_error("active or order has the wrong form");
        shape.active = static_cast<const int64_t*>(active.data());
        shape.order = static_cast<const int64_t*>(order.data());
        for (int64_t t = 0; shape.active && t < shape.steps; ++t) {
            if (shape.active[t] < 0 || shape.active[t] > shape.samples) throw nb::value_error("active is out of range");
        }
        if (shape.order) {
            std::vector<bool> seen(size_t(shape.samples), false);
            for (int64_t slot = 0; slot < shape.samples; ++slot) {
                const int64_t sample = shape.order[slot];
                if (sample < 0 || sample >= shape.samples || seen[size_t(sample)]) {
                    throw nb::value_error("order is not a permutation");
                }
                seen[size_t(sample)] = true;
            }
        }
        return shape;
    }

    static void check_cache_size(Call& call, const View& cache, const LstmShape& shape) {
        if (!cache.present()) return;
        cache.check_vector(cache.elements());
        if (cache.elements() < lstm_cache_bytes(shape)) call.refuse(Reason::shape, cache.name());
    }
    static void check_filled(Call& call, const View& cache, const LstmShape& shape, std::optional<uint64_t> stamp) {
        check_cache_size(call, cache.require(), shape);
        if (call.refused()) return;
        const CacheState state = lstm_check_cache(shape, cache.data());
        if (state.check == CacheCheck::foreign) return call.refuse(Reason::foreign_cache, cache.name());
        if (state.check != CacheCheck::good) return call.refuse(Reason::cache_of_another_problem, cache.name());
        if (stamp && *stamp != state.stamp) call.refuse(Reason::stale_cache, cache.name());
    }

    Sequence sequence(const View& view, int64_t features) const {
        view.check_shape({shape_.steps, shape_.samples, features});
        view.check_unit_stride(features);
        return {view.data(), view.stride(0), view.stride(1)};
    }
    Sequence table(const View& view, int64_t rows) const {
        view.check_shape({rows, shape_.inputs});
        view.check_unit_stride(shape_.inputs);
        return {view.data(), view.stride(0), 0};
    }
    States states(const View& view) const {
        view.check_shape({shape_.layers * shape_.directions, shape_.samples, shape_.units});
        view.check_unit_stride(shape_.units);
        return {view.data(), view.stride(0), view.stride(1)};
    }

    Lookup lookup(Call& call, const LstmShape& shape, const View& indices, const View& table) const {
        if (!indices.present()) return {};
        indices.check_contiguous({shape_.steps, shape_.samples});
        const Lookup lookup = {static_cast<const int64_t*>(indices.data()), table.extent(0)};
        if (!call.refused()) indices.check_index(in_range(shape, lookup));
        return lookup;
    }

    // Indices of inactive samples are ignored.
    static bool in_range(const LstmShape& shape, const Lookup& lookup) {
        for (int64_t t = 0; t < shape.steps; ++t) {
            const int64_t* indices = lookup.indices + t * shape.samples;
            for (int64_t slot = 0; slot < (shape.active ? shape.active[t] : shape.samples); ++slot) {
                const int64_t index = indices[shape.order ? shape.order[slot] : slot];
                if (index < 0 || index >= lookup.rows) return false;
            }
        }
        return true;
    }

    // cells: for each layer and direction (wx, wh, b, peephole)
    std::vector<CellArrays> parameters(Arrays& arrays, nb::handle list, Access access) const {
        const nb::sequence cells = nb::cast<nb::sequence>(list);
        const int64_t count = shape_.layers * shape_.directions;
        if (int64_t(nb::len(cells)) != count) throw nb::value_error("weights have the wrong length");
        std::vector<CellArrays> found;
        for (int64_t i = 0; i < count; ++i) {
            const nb::tuple cell = nb::cast<nb::tuple>(cells[size_t(i)]);
            if (nb::len(cell) != 4) throw nb::value_error("a cell has four parameters");
            const int64_t inputs = i < shape_.directions ? shape_.inputs : shape_.directions * shape_.units;
            const int64_t peephole_columns = shape_.peephole == Peephole::full ? shape_.units : 0;
            CellArrays a;
            a.wx = gate_array(arrays, cell[0], "wx", inputs, true, access);
            a.wh = gate_array(arrays, cell[1], "wh", shape_.units, true, access);
            a.b = gate_array(arrays, cell[2], "b", 0, false, access);
            a.peephole =
                gate_array(arrays, cell[3], "peephole", peephole_columns, shape_.peephole == Peephole::full, access);
            for (int k = 0; access == Access::read && k < 4; ++k) {
                if (!a.wx.gate[k]) arrays.call.refuse(Reason::missing, "wx");
                if (!a.wh.gate[k]) arrays.call.refuse(Reason::missing, "wh");
            }
            found.push_back(a);
        }
        return found;
    }

    // One array [4 * units, ...] or [4, units, ...], or a tuple of four [units, ...], any of which may be None.
    GateArray gate_array(Arrays& arrays, nb::handle given, const char* name, int64_t columns, bool is_matrix,
                         Access access) const {
        GateArray found;
        if (given.is_none()) return found;
        const int64_t units = shape_.units;
        const int tail = is_matrix ? 1 : 0;
        const auto with_columns = [&](std::vector<int64_t> shape) {
            if (is_matrix) shape.push_back(columns);
            return shape;
        };
        bool first = true;
        const auto take_strides = [&](const View& view, int row_axis) {
            const int64_t row = view.stride(row_axis);
            const int64_t col = is_matrix ? view.stride(row_axis + 1) : 1;
            const bool alike = first || (row == found.row_stride && col == found.col_stride);
            if (!alike) arrays.call.refuse(Reason::layout, name);  // all gates share their strides
            if (access == Access::write) view.check_unit_stride(is_matrix ? columns : 1);
            first = false;
            found.row_stride = row;
            found.col_stride = col;
        };
        if (nb::isinstance<nb::tuple>(given)) {
            const nb::tuple gates = nb::cast<nb::tuple>(given);
            if (nb::len(gates) != 4) throw nb::value_error("there are four gates");
            for (int k = 0; k < 4; ++k) {
                const View& view = arrays.add(gates[size_t(k)], name, element_, access);
                if (!view.present()) continue;
                view.check_shape(with_columns({units}));
                take_strides(view, 0);
                found.gate[k] = view.data();
            }
            return found;
        }
        const View& view = arrays.add(given, name, element_, access);
        const bool apart = view.axes() == tail + 2;
        view.check_shape(with_columns(apart ? std::vector<int64_t>{4, units} : std::vector<int64_t>{4 * units}));
        take_strides(view, apart ? 1 : 0);
        const int64_t step = apart ? view.stride(0) : units * found.row_stride;
        for (int k = 0; k < 4 && view.present(); ++k)
            found.gate[k] = static_cast<char*>(view.data()) + k * step * item_size(element_);
        return found;
    }

    LstmShape shape_;
    Element element_;
};

}  // namespace

void bind_lstm(nb::module_& m) {
    nb::class_<LstmProblem>(m, "LstmProblem", "An LSTM of one shape with one set of options.")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int, const std::vector<ActivationTuple>&,
                      int, bool, double>(),
             nb::arg("steps"), nb::arg("samples"), nb::arg("inputs"), nb::arg("units"), nb::arg("layers"),
             nb::arg("directions"), nb::arg("dtype"), nb::arg("activations"), nb::arg("peephole"),
             nb::arg("output_reads_old"), nb::arg("dropout"))
        .def("cache_bytes", &LstmProblem::cache_bytes, nb::arg("rows"))
        .def("forward", &LstmProblem::forward, nb::arg("inputs"), nb::arg("cache").none(), nb::arg("stamp"),
             nb::arg("y").none(), nb::arg("hn").none(), nb::arg("cn").none(), nb::arg("overlap_checked"),
             nb::arg("threads"))
        .def("backward", &LstmProblem::backward, nb::arg("dy").none(), nb::arg("dhn").none(), nb::arg("dcn").none(),
             nb::arg("inputs"), nb::arg("cache"), nb::arg("stamp").none(), nb::arg("dx").none(),
             nb::arg("dcells").none(), nb::arg("dh0").none(), nb::arg("dc0").none(), nb::arg("accumulate"),
             nb::arg("overlap_checked"), nb::arg("threads"))
        .def("check_cache", &LstmProblem::check_cache, nb::arg("inputs"), nb::arg("cache"), nb::arg("stamp").none())
        .def("show", &LstmProblem::show, nb::arg("inputs"), nb::arg("cache"), nb::arg("stamp").none(), nb::arg("cell"),
             nb::arg("gates").none(), nb::arg("cells").none());
}

}  // namespace rg::bind
