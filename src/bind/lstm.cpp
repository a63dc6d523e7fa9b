// Python's door to the LSTM drivers.
#include "lstm.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <deque>
#include <tuple>

#include "../core/lstm.h"
#include "../core/parallel.h"
#include "view.h"

namespace rg::bind {
namespace {

// All arrays of one call, so that results can be compared with everything else.
class Arrays {
public:
    const View& add(nb::handle array, const char* name, Access access) {
        views_.emplace_back(array, name, access);
        (access == Access::write ? results_ : inputs_).push_back(&views_.back());
        return views_.back();
    }
    // Whether a result shares its span with another array, except for the pairs that may be the same elements.
    bool overlap(const std::vector<std::pair<const View*, const View*>>& same) const {
        for (size_t i = 0; i < results_.size(); ++i) {
            for (const View* in : inputs_) {
                if (!results_[i]->overlaps(*in)) continue;
                bool allowed = false;
                for (const auto& [a, b] : same)
                    allowed = allowed || (results_[i] == a && in == b && a->same_elements(*b));
                if (!allowed) return true;
            }
            for (size_t j = 0; j < i; ++j) {
                if (results_[i]->overlaps(*results_[j])) return true;
            }
        }
        return false;
    }

private:
    std::deque<View> views_;
    std::vector<const View*> inputs_, results_;
};

using ActivationTuple = std::tuple<int, double, double>;

// An LSTM of one shape and one set of options; made once, called many times, never changed. Sequences are
// [steps][samples][features], time first, whatever their strides; their features are neighbours.
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
        itemsize_ = shape_.dtype == DType::f64 ? 8 : 4;
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

    // rows: the samples that take part in a step, of all steps
    int64_t cache_bytes(int64_t rows) const {
        if (rows < 0 || rows > shape_.steps * shape_.samples) throw nb::value_error("rows are out of range");
        return lstm_cache_bytes(shape_, rows);
    }

    // With numbers, [steps][samples], x is a table whose rows they choose.
    Outcome forward(nb::handle x_array, nb::handle numbers_array, nb::handle cells_list, nb::handle h0_array,
                    nb::handle c0_array, nb::handle active, nb::handle order, uint64_t seed, nb::handle cache_array,
                    uint64_t stamp, nb::handle y_array, nb::handle hn_array, nb::handle cn_array, bool overlap_checked,
                    int threads) const {
        Arrays arrays;
        LstmForward call;
        call.shape = ragged(arrays, active, order, seed);
        const View& x = arrays.add(x_array, "x", Access::read);
        const View& numbers = arrays.add(numbers_array, "x", Access::read);
        call.x = numbers.present() ? table(x, x.present() ? x.extent(0) : 0) : sequence(x, shape_.inputs);
        call.lookup = lookup(numbers, x);
        std::vector<CellArrays> cells = parameters(arrays, cells_list, Access::read);
        call.cells = cells.data();
        const View& h0 = arrays.add(h0_array, "h0", Access::read);
        const View& c0 = arrays.add(c0_array, "c0", Access::read);
        call.h0 = states(h0);
        call.c0 = states(c0);
        const View& cache = arrays.add(cache_array, "cache", Access::write);
        if (cache.present() && cache.bytes() < lstm_cache_bytes(call.shape))
            throw nb::value_error("cache is too small");
        cache.check_vector(cache.bytes(), 1);
        call.cache = cache.data();
        call.stamp = stamp;
        call.y = sequence(arrays.add(y_array, "out.y", Access::write), shape_.directions * shape_.units);
        const View& hn = arrays.add(hn_array, "out.hn", Access::write);
        const View& cn = arrays.add(cn_array, "out.cn", Access::write);
        call.hn = states(hn);
        call.cn = states(cn);
        if (!x.present()) throw nb::value_error("x is missing");
        if (!in_range(call.shape, call.lookup)) return Outcome::out_of_range;
        if (!overlap_checked && arrays.overlap({{&hn, &h0}, {&cn, &c0}})) return Outcome::overlap;
        call.threads = threads > 0 ? threads : num_threads();
        without_lock(work(), [&] { lstm_forward(call); });
        return Outcome::done;
    }

    Outcome backward(nb::handle dy_array, nb::handle dhn_array, nb::handle dcn_array, nb::handle x_array,
                     nb::handle numbers_array, nb::handle cells_list, nb::handle active, nb::handle order,
                     uint64_t seed, nb::handle cache_array, nb::handle dx_array, nb::handle dcells_list,
                     nb::handle dh0_array, nb::handle dc0_array, bool accumulate, bool overlap_checked,
                     int threads) const {
        Arrays arrays;
        LstmBackward call;
        call.shape = ragged(arrays, active, order, seed);
        const View& x = arrays.add(x_array, "x", Access::read);
        const View& numbers = arrays.add(numbers_array, "x", Access::read);
        call.x = numbers.present() ? table(x, x.present() ? x.extent(0) : 0) : sequence(x, shape_.inputs);
        call.lookup = lookup(numbers, x);
        const std::vector<CellArrays> cells = parameters(arrays, cells_list, Access::read);
        call.cells = cells.data();
        const View& cache = checked_cache(arrays, cache_array, call.shape);
        call.cache = cache.data();
        call.dy = sequence(arrays.add(dy_array, "dy", Access::read), shape_.directions * shape_.units);
        call.dhn = states(arrays.add(dhn_array, "dhn", Access::read));
        call.dcn = states(arrays.add(dcn_array, "dcn", Access::read));
        const View& dx = arrays.add(dx_array, "out.dx", Access::write);
        call.dx = numbers.present() ? table(dx, call.lookup.rows) : sequence(dx, shape_.inputs);
        std::vector<CellArrays> dcells;
        if (!dcells_list.is_none()) {
            dcells = parameters(arrays, dcells_list, Access::write);
            call.dcells = dcells.data();
        }
        call.dh0 = states(arrays.add(dh0_array, "out.dh0", Access::write));
        call.dc0 = states(arrays.add(dc0_array, "out.dc0", Access::write));
        if (!x.present()) throw nb::value_error("x is missing");
        if (!in_range(call.shape, call.lookup)) return Outcome::out_of_range;
        if (!overlap_checked && arrays.overlap({})) return Outcome::overlap;
        call.accumulate = accumulate;
        call.threads = threads > 0 ? threads : num_threads();
        without_lock(work(), [&] { lstm_backward(call); });
        return Outcome::done;
    }

    // 'good', 'foreign' or 'other problem', and the stamp of the forward pass that filled it.
    std::tuple<std::string, uint64_t> check_cache(nb::handle active, nb::handle order, uint64_t seed,
                                                  nb::handle cache_array) const {
        Arrays arrays;
        const LstmShape shape = ragged(arrays, active, order, seed);
        const View& cache = arrays.add(cache_array, "cache", Access::read);
        cache.check_vector(cache.bytes(), 1);
        if (cache.bytes() < lstm_cache_bytes(shape)) throw nb::value_error("cache is too small");
        const CacheState state = lstm_check_cache(shape, cache.data());
        return {state.check == CacheCheck::good      ? "good"
                : state.check == CacheCheck::foreign ? "foreign"
                                                     : "other problem",
                state.stamp};
    }

    void show(nb::handle active, nb::handle order, uint64_t seed, nb::handle cache_array, int64_t cell,
              nb::handle gates_array, nb::handle states_array) const {
        Arrays arrays;
        const LstmShape shape = ragged(arrays, active, order, seed);
        if (cell < 0 || cell >= shape.layers * shape.directions) throw nb::value_error("there is no such cell");
        const View& cache = checked_cache(arrays, cache_array, shape);
        const View& gates = arrays.add(gates_array, "gates", Access::write);
        const View& cell_states = arrays.add(states_array, "cells", Access::write);
        gates.check_contiguous({shape.steps, shape.samples, 4, shape.units}, itemsize_);
        cell_states.check_contiguous({shape.steps, shape.samples, shape.units}, itemsize_);
        lstm_show(shape, cache.data(), cell, gates.data(), cell_states.data());
    }

private:
    // Elements, roughly, that a call touches.
    double work() const { return double(shape_.steps) * double(shape_.samples) * double(shape_.units) * 16; }

    LstmShape ragged(Arrays& arrays, nb::handle active_array, nb::handle order_array, uint64_t seed) const {
        LstmShape shape = shape_;
        shape.seed = seed;
        const View& active = arrays.add(active_array, "active", Access::read);
        const View& order = arrays.add(order_array, "order", Access::read);
        active.check_contiguous({shape.steps}, sizeof(int64_t));
        order.check_contiguous({shape.samples}, sizeof(int64_t));
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

    const View& checked_cache(Arrays& arrays, nb::handle array, const LstmShape& shape) const {
        const View& cache = arrays.add(array, "cache", Access::read);
        if (!cache.present() || cache.bytes() < lstm_cache_bytes(shape)) throw nb::value_error("cache is too small");
        cache.check_vector(cache.bytes(), 1);
        if (lstm_check_cache(shape, cache.data()).check != CacheCheck::good) {
            throw nb::value_error("cache is not of this problem");
        }
        return cache;
    }

    Sequence sequence(const View& view, int64_t features) const {
        view.check_elements({shape_.steps, shape_.samples, features}, itemsize_);
        if (view.present() && features > 1 && view.stride(2, itemsize_) != 1) {
            throw nb::value_error("the last axis of a sequence is not contiguous");
        }
        return {view.data(), view.stride(0, itemsize_), view.stride(1, itemsize_)};
    }

    Sequence table(const View& view, int64_t rows) const {
        view.check_elements({rows, shape_.inputs}, itemsize_);
        if (view.present() && shape_.inputs > 1 && view.stride(1, itemsize_) != 1) {
            throw nb::value_error("the last axis of a table is not contiguous");
        }
        return {view.data(), view.stride(0, itemsize_), 0};
    }

    Lookup lookup(const View& numbers, const View& table) const {
        if (!numbers.present()) return {};
        numbers.check_contiguous({shape_.steps, shape_.samples}, sizeof(int64_t));
        return {static_cast<const int64_t*>(numbers.data()), table.present() ? table.extent(0) : 0};
    }

    // Numbers of samples that do not take part are not looked at.
    static bool in_range(const LstmShape& shape, const Lookup& lookup) {
        for (int64_t t = 0; lookup.numbers && t < shape.steps; ++t) {
            const int64_t* numbers = lookup.numbers + t * shape.samples;
            for (int64_t slot = 0; slot < (shape.active ? shape.active[t] : shape.samples); ++slot) {
                const int64_t number = numbers[shape.order ? shape.order[slot] : slot];
                if (number < 0 || number >= lookup.rows) return false;
            }
        }
        return true;
    }

    States states(const View& view) const {
        view.check_elements({shape_.layers * shape_.directions, shape_.samples, shape_.units}, itemsize_);
        if (view.present() && shape_.units > 1 && view.stride(2, itemsize_) != 1) {
            throw nb::value_error("the last axis of a state is not contiguous");
        }
        return {view.data(), view.stride(0, itemsize_), view.stride(1, itemsize_)};
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
            if (access == Access::read) {
                for (int k = 0; k < 4; ++k) {
                    if (!a.wx.gate[k] || !a.wh.gate[k]) throw nb::value_error("a cell needs wx and wh of every gate");
                }
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
            const int64_t row = view.stride(row_axis, itemsize_);
            const int64_t col = is_matrix ? view.stride(row_axis + 1, itemsize_) : 1;
            if (!first && (row != found.row_stride || col != found.col_stride)) {
                throw nb::value_error("the gates of a parameter have different strides");
            }
            if (access == Access::write && col != 1 && columns > 1) {
                throw nb::value_error("the last axis of a gradient is not contiguous");
            }
            first = false;
            found.row_stride = row;
            found.col_stride = col;
        };
        if (nb::isinstance<nb::tuple>(given)) {
            const nb::tuple gates = nb::cast<nb::tuple>(given);
            if (nb::len(gates) != 4) throw nb::value_error("there are four gates");
            for (int k = 0; k < 4; ++k) {
                const View& view = arrays.add(gates[size_t(k)], name, access);
                if (!view.present()) continue;
                view.check_elements(with_columns({units}), itemsize_);
                take_strides(view, 0);
                found.gate[k] = view.data();
            }
            return found;
        }
        const View& view = arrays.add(given, name, access);
        const bool apart = view.axes() == tail + 2;
        view.check_elements(with_columns(apart ? std::vector<int64_t>{4, units} : std::vector<int64_t>{4 * units}),
                            itemsize_);
        take_strides(view, apart ? 1 : 0);
        const int64_t step = apart ? view.stride(0, itemsize_) : units * found.row_stride;
        for (int k = 0; k < 4; ++k) found.gate[k] = static_cast<char*>(view.data()) + k * step * itemsize_;
        return found;
    }

    LstmShape shape_;
    int64_t itemsize_;
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
        .def("forward", &LstmProblem::forward, nb::arg("x"), nb::arg("numbers").none(), nb::arg("cells"),
             nb::arg("h0").none(), nb::arg("c0").none(), nb::arg("active").none(), nb::arg("order").none(),
             nb::arg("seed"), nb::arg("cache").none(), nb::arg("stamp"), nb::arg("y").none(), nb::arg("hn").none(),
             nb::arg("cn").none(), nb::arg("overlap_checked"), nb::arg("threads"))
        .def("backward", &LstmProblem::backward, nb::arg("dy").none(), nb::arg("dhn").none(), nb::arg("dcn").none(),
             nb::arg("x"), nb::arg("numbers").none(), nb::arg("cells"), nb::arg("active").none(),
             nb::arg("order").none(), nb::arg("seed"), nb::arg("cache"), nb::arg("dx").none(), nb::arg("dcells").none(),
             nb::arg("dh0").none(), nb::arg("dc0").none(), nb::arg("accumulate"), nb::arg("overlap_checked"),
             nb::arg("threads"))
        .def("check_cache", &LstmProblem::check_cache, nb::arg("active").none(), nb::arg("order").none(),
             nb::arg("seed"), nb::arg("cache"))
        .def("show", &LstmProblem::show, nb::arg("active").none(), nb::arg("order").none(), nb::arg("seed"),
             nb::arg("cache"), nb::arg("cell"), nb::arg("gates").none(), nb::arg("cells").none());
}

}  // namespace rg::bind
