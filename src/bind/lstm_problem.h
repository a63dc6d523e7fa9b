// An LSTM: views of its arrays, and the calls of the drivers.
#pragma once

#include <deque>
#include <optional>
#include <tuple>
#include <vector>

#include "../core/lstm/lstm.h"
#include "view.h"

namespace rg::bind {

// The views of one call. Their number depends on the number of cells.
class Arrays {
public:
    template <class Array>
    const View& add(Array array, const char* name, Element element, Access access = Access::read) {
        return views_.emplace_back(call, array, name, element, access);
    }

    Call call;

private:
    std::deque<View> views_;
};

// A call with the parameters that it points to. In a program the seed of a run may be in memory.
template <class Call>
struct LstmRun {
    Call call;
    std::vector<CellArrays> cells, dcells;
    const int64_t* seed = nullptr;  // null: the call's seed
    int threads = 1;

    Call ready() const {
        Call ready = call;
        ready.cells = cells.data();
        ready.threads = threads;
        if (seed) ready.shape.seed = uint64_t(*seed);
        return ready;
    }
};
inline void run_lstm_forward(const LstmRun<LstmForward>& run) { lstm_forward(run.ready()); }
inline void run_lstm_backward(const LstmRun<LstmBackward>& run) {
    LstmBackward call = run.ready();
    if (!run.dcells.empty()) call.dcells = run.dcells.data();
    lstm_backward(call);
}

// The inputs of forward. `cells` has size() and [i], which is (wx, wh, b, peephole) of a layer and direction.
template <class Array, class Cells>
struct LstmInputs {
    Array x, indices;
    Cells cells;
    Array h0, c0, active, order;
    uint64_t seed;
    Array seed_at;  // an integer in memory instead; in programs only
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
    template <class Array, class Cells>
    Outcome forward(const LstmInputs<Array, Cells>& in, Array cache_array, uint64_t stamp, Array y_array,
                    Array hn_array, Array cn_array, bool overlap_checked, int threads) const {
        Arrays arrays;
        LstmForward forward;
        forward.shape = ragged(arrays, in);
        const int64_t* seed = seed_of(arrays, in);
        if (seed && !recorded_program()) forward.shape.seed = uint64_t(*seed);
        const View& x = arrays.add(in.x, "x", element_).require();
        const View& indices = arrays.add(in.indices, "x", Element::i64);
        forward.x = indices.present() ? table(x, x.extent(0)) : sequence(x, shape_.inputs);
        std::vector<CellArrays> cells = parameters(arrays, in.cells, Access::read);
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
        LstmRun<LstmForward> run{forward, std::move(cells), {}, seed, 1};
        run_driver<Array>(work(), threads, run, run_lstm_forward);
        return {};
    }

    // stamp: of the forward pass that filled the cache; none: any.
    template <class Array, class Cells>
    Outcome backward(Array dy_array, Array dhn_array, Array dcn_array, const LstmInputs<Array, Cells>& in,
                     Array cache_array, std::optional<uint64_t> stamp, Array dx_array,
                     const std::optional<Cells>& dcells_list, Array dh0_array, Array dc0_array, bool accumulate,
                     bool overlap_checked, int threads) const {
        Arrays arrays;
        LstmBackward backward;
        backward.shape = ragged(arrays, in);
        const int64_t* seed = seed_of(arrays, in);
        if (seed && !recorded_program()) backward.shape.seed = uint64_t(*seed);
        const View& x = arrays.add(in.x, "x", element_).require();
        const View& indices = arrays.add(in.indices, "x", Element::i64);
        backward.x = indices.present() ? table(x, x.extent(0)) : sequence(x, shape_.inputs);
        std::vector<CellArrays> cells = parameters(arrays, in.cells, Access::read);
        const View& cache = arrays.add(cache_array, "cache", Element::u8);
        check_filled(arrays.call, cache, backward.shape, stamp);
        backward.cache = cache.data();
        backward.dy = sequence(arrays.add(dy_array, "dy", element_), shape_.directions * shape_.units);
        backward.dhn = states(arrays.add(dhn_array, "dhn", element_));
        backward.dcn = states(arrays.add(dcn_array, "dcn", element_));
        const View& dx = arrays.add(dx_array, "out.dx", element_, Access::write);
        backward.dx = indices.present() ? table(dx, x.extent(0)) : sequence(dx, shape_.inputs);
        std::vector<CellArrays> dcells;
        if (dcells_list) { dcells = parameters(arrays, *dcells_list, Access::write); }
        backward.dh0 = states(arrays.add(dh0_array, "out.dh0", element_, Access::write));
        backward.dc0 = states(arrays.add(dc0_array, "out.dc0", element_, Access::write));
        backward.lookup = lookup(arrays.call, backward.shape, indices, x);
        if (!overlap_checked) arrays.call.check_overlap();
        if (arrays.call.refused()) return arrays.call.refusal();
        backward.accumulate = accumulate;
        LstmRun<LstmBackward> run{backward, std::move(cells), std::move(dcells), seed, 1};
        run_driver<Array>(work(), threads, run, run_lstm_backward);
        return {};
    }

    // Whether a forward pass with these inputs has filled the cache.
    template <class Array, class Cells>
    Outcome check_cache(const LstmInputs<Array, Cells>& in, Array cache_array, std::optional<uint64_t> stamp) const {
        Arrays arrays;
        const LstmShape shape = ragged(arrays, in);
        check_filled(arrays.call, arrays.add(cache_array, "cache", Element::u8), shape, stamp);
        return arrays.call.refusal();
    }

    template <class Array, class Cells>
    Outcome show(const LstmInputs<Array, Cells>& in, Array cache_array, std::optional<uint64_t> stamp, int64_t cell,
                 Array gates_array, Array states_array) const {
        Arrays arrays;
        const LstmShape shape = ragged(arrays, in);
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

    // The caller computes active and order from lengths that it has checked.
    template <class Array, class Cells>
    LstmShape ragged(Arrays& arrays, const LstmInputs<Array, Cells>& in) const {
        LstmShape shape = shape_;
        shape.seed = in.seed;
        const View& active = arrays.add(in.active, "active", Element::i64);
        const View& order = arrays.add(in.order, "order", Element::i64);
        active.check_contiguous({shape.steps});
        order.check_contiguous({shape.samples});
        if (arrays.call.refused()) throw nb::value_error("active or order has the wrong form");
        shape.active = static_cast<const int64_t*>(active.data());
        shape.order = static_cast<const int64_t*>(order.data());
        if (recorded_program()) return shape;  // the program computes them, from lengths that it checks
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

    template <class Array, class Cells>
    static const int64_t* seed_of(Arrays& arrays, const LstmInputs<Array, Cells>& in) {
        const View& seed = arrays.add(in.seed_at, "seed", Element::i64);
        seed.check_vector(1);
        return static_cast<const int64_t*>(seed.data());
    }

    static void check_cache_size(Call& call, const View& cache, const LstmShape& shape) {
        if (!cache.present()) return;
        cache.check_vector(cache.elements());
        const int64_t bytes =
            recorded_program() ? lstm_cache_bytes(shape, shape.steps * shape.samples) : lstm_cache_bytes(shape);
        if (cache.elements() < bytes) call.refuse(Reason::shape, cache.name());
    }
    static void check_filled(Call& call, const View& cache, const LstmShape& shape, std::optional<uint64_t> stamp) {
        check_cache_size(call, cache.require(), shape);
        if (call.refused() || recorded_program()) return;  // a program fills it before
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
        if (call.refused()) return lookup;
        if (Program* program = recorded_program()) {
            program->add(LookupCheck{shape, lookup, 1}, check_lookup);
        } else {
            indices.check_index(in_range(shape, lookup));
        }
        return lookup;
    }

    struct LookupCheck {
        LstmShape shape;
        Lookup lookup;
        int threads;
    };
    static void check_lookup(const LookupCheck& call) {
        if (!in_range(call.shape, call.lookup)) throw OutOfRange(-1, call.lookup.rows);
    }

    // Indices of inactive samples are ignored.
    static bool in_range(const LstmShape& shape, const Lookup& lookup) {
        for (int64_t t = 0; t < shape.steps && shape.samples > 0; ++t) {
            const int64_t* indices = lookup.indices + t * shape.samples;
            for (int64_t slot = 0; slot < (shape.active ? shape.active[t] : shape.samples); ++slot) {
                const int64_t index = indices[shape.order ? shape.order[slot] : slot];
                if (index < 0 || index >= lookup.rows) return false;
            }
        }
        return true;
    }

    template <class Cells>
    std::vector<CellArrays> parameters(Arrays& arrays, const Cells& cells, Access access) const {
        const size_t count = size_t(shape_.layers * shape_.directions);
        if (cells.size() != count) throw nb::value_error("weights have the wrong length");
        std::vector<CellArrays> found;
        for (size_t i = 0; i < count; ++i) {
            const auto cell = cells[i];
            const int64_t inputs = int64_t(i) < shape_.directions ? shape_.inputs : shape_.directions * shape_.units;
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

    // One array [4 * units, ...] or [4, units, ...]; from Python also a tuple of four [units, ...], any of which may be
    // None.
    template <class Array>
    GateArray gate_array(Arrays& arrays, Array given, const char* name, int64_t columns, bool is_matrix,
                         Access access) const {
        GateArray found;
        if (is_absent(given)) return found;
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
        if constexpr (kFromPython<Array>) {
            if (PyTuple_Check(given.ptr())) {
                if (PyTuple_GET_SIZE(given.ptr()) != 4) throw nb::value_error("there are four gates");
                for (int k = 0; k < 4; ++k) {
                    const nb::handle gate = PyTuple_GET_ITEM(given.ptr(), k);
                    const View& view = arrays.add(gate, name, element_, access);
                    if (!view.present()) continue;
                    view.check_shape(with_columns({units}));
                    take_strides(view, 0);
                    found.gate[k] = view.data();
                }
                return found;
            }
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

}  // namespace rg::bind
