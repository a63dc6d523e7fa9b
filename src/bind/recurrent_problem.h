// A recurrent layer: views of its arrays, and the calls of the drivers.
#pragma once

#include <array>
#include <list>
#include <optional>
#include <tuple>
#include <vector>

#include "../core/recurrent/recurrent.h"
#include "view.h"

namespace rg::bind {

// The views of one call. Their number depends on the number of cells.
class Arrays {
public:
    template <class Array>
    const View& add(Array array, const char* name, Element element, Access access = Access::read) {
        if (few_ < kFew) return first_[few_++].emplace(call, array, name, element, access);
        return more_.emplace_back(call, array, name, element, access);
    }

    Call call;

private:
    static constexpr size_t kFew = 32;  // stored without an allocation: those of one cell
    std::optional<View> first_[kFew];
    size_t few_ = 0;
    std::list<View> more_;
};

// A call with the parameters that it points to. In a program the seed of a run may be in memory.
template <class Call>
struct RecurrentRun {
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
inline void run_forward(const RecurrentRun<RecurrentForward>& run) { recurrent_forward(run.ready()); }
inline void run_backward(const RecurrentRun<RecurrentBackward>& run) {
    RecurrentBackward call = run.ready();
    if (!run.dcells.empty()) call.dcells = run.dcells.data();
    recurrent_backward(call);
}

// The parameters of a cell in the order of LstmWeights, GruWeights or RnnWeights in ops/recurrent/types.py.
struct CellField {
    const char* name;
    GateArray CellArrays::* array;
    enum Form { by_inputs, by_outputs, vector, peephole, projection, unit_vector } form;
};
using Cell = CellArrays;
constexpr CellField kWx = {"wx", &Cell::wx, CellField::by_inputs}, kWh = {"wh", &Cell::wh, CellField::by_outputs},
                    kB = {"b", &Cell::b, CellField::vector}, kBh = {"bh", &Cell::bh, CellField::vector},
                    kPeephole = {"peephole", &Cell::peephole, CellField::peephole},
                    kProjection = {"projection", &Cell::projection, CellField::projection},
                    kGammaX = {"gamma_x", &Cell::gamma_x, CellField::vector},
                    kGammaH = {"gamma_h", &Cell::gamma_h, CellField::vector},
                    kGammaC = {"gamma_c", &Cell::gamma_c, CellField::unit_vector},
                    kBetaC = {"beta_c", &Cell::beta_c, CellField::unit_vector};
inline const std::vector<CellField>& fields_of(CellKind kind) {
    static const std::vector<CellField> lstm = {kWx,     kWh,     kB,      kPeephole, kProjection,
                                                kGammaX, kGammaH, kGammaC, kBetaC},
                                        gru = {kWx, kWh, kB, kBh, kGammaX, kGammaH},
                                        rnn = {kWx, kWh, kB, kGammaX, kGammaH};
    return kind == CellKind::lstm ? lstm : kind == CellKind::rnn ? rnn : gru;
}

// The inputs of forward. `cells` has size(), and [i][k], the k-th field of cell i or what is_absent.
template <class Array, class Cells>
struct RecurrentInputs {
    Array x, indices;
    Cells cells;
    Array h0, c0, active, order;
    uint64_t seed;
    Array seed_at;  // an integer in memory instead; in programs only
    Array reset, mask, zoneout, cell_zoneout;
};

using ActivationTuple = std::tuple<int, double, double>;

// A recurrent layer of one shape and one set of options. Immutable, and reused for many calls. Sequences are
// [steps][samples][features], time first, with any strides but contiguous features.
class RecurrentProblem {
public:
    RecurrentProblem(int kind, int64_t steps, int64_t samples, int64_t inputs, int64_t units, int64_t projection,
                     int64_t layers, int64_t directions, int dtype, const std::vector<ActivationTuple>& activations,
                     int peephole, bool output_reads_old, bool coupled, bool flip, double clip, double cell_clip,
                     int norm, double eps, int mask, bool zoneout, double dropout) {
        if (steps < 0 || samples < 0 || inputs < 0 || units < 1 || layers < 1 || directions < 1 || directions > 2 ||
            projection < 0 || projection > units) {
            throw nb::value_error("a size is out of range");
        }
        if (!(dropout >= 0 && dropout < 1)) throw nb::value_error("dropout is out of range");
        if (kind < 0 || kind > int(CellKind::rnn)) throw nb::value_error("unknown kind of cell");
        if (peephole < 0 || peephole > 2) throw nb::value_error("unknown kind of peephole");
        if (norm < 0 || norm > 2) throw nb::value_error("unknown kind of norm");
        if (mask < 0 || mask > 2) throw nb::value_error("unknown kind of mask");
        if (!(clip >= 0 && cell_clip >= 0 && eps >= 0)) throw nb::value_error("a number is out of range");
        shape_.steps = steps;
        shape_.samples = samples;
        shape_.inputs = inputs;
        shape_.units = units;
        shape_.projection = projection;
        shape_.layers = layers;
        shape_.directions = directions;
        shape_.dtype = static_cast<DType>(dtype);
        if (shape_.dtype != DType::f32 && shape_.dtype != DType::f64) throw nb::value_error("float32 or float64");
        element_ = element_of(shape_.dtype);
        CellRule& rule = shape_.rule;
        rule.kind = static_cast<CellKind>(kind);
        set_activations(activations);
        rule.output_reads_old = output_reads_old;
        rule.coupled = coupled;
        rule.flip = flip;
        rule.clip = clip;
        rule.cell_clip = cell_clip;
        shape_.peephole = static_cast<Peephole>(peephole);
        shape_.norm = static_cast<CellNorm>(norm);
        shape_.eps = eps;
        shape_.mask_kind = static_cast<MaskKind>(mask);
        shape_.has_zoneout = zoneout;
        shape_.dropout = layers > 1 ? dropout : 0;
        check_combination();
        if (!recurrent_fits(shape_)) throw nb::value_error("the sizes are too large");
    }

    // rows: the number of active samples, summed over all steps
    int64_t cache_bytes(int64_t rows) const {
        if (rows < 0 || rows > shape_.steps * shape_.samples) throw nb::value_error("rows are out of range");
        return recurrent_cache_bytes(shape_, rows);
    }

    // With indices, [steps][samples], x is a table, and they select its rows.
    template <class Array, class Cells>
    Outcome forward(const RecurrentInputs<Array, Cells>& in, Array cache_array, uint64_t stamp, Array y_array,
                    Array hn_array, Array cn_array, bool overlap_checked, int threads) const {
        Arrays arrays;
        RecurrentForward forward;
        forward.shape = ragged(arrays, in);
        const int64_t* seed = seed_of(arrays, in);
        if (seed && !recorded_program()) forward.shape.seed = uint64_t(*seed);
        const View& x = arrays.add(in.x, "x", element_).require();
        const View& indices = arrays.add(in.indices, "x", Element::i64);
        forward.x = indices.present() ? table(x, x.extent(0)) : sequence(x, shape_.inputs);
        std::vector<CellArrays> cells = parameters(arrays, in.cells, Access::read);
        const View& h0 = arrays.add(in.h0, "h0", element_);
        const View& c0 = arrays.add(in.c0, "c0", element_);
        forward.h0 = states(h0, shape_.outputs());
        forward.c0 = states(c0, shape_.units);
        if (c0.present() && !has_cells()) throw nb::value_error("only an LSTM has cell states");
        const View& cache = arrays.add(cache_array, "cache", Element::u8, Access::write);
        check_cache_size(arrays.call, cache, forward.shape);
        forward.cache = cache.data();
        forward.stamp = stamp;
        forward.y = sequence(arrays.add(y_array, "out.y", element_, Access::write), width());
        const View& hn = arrays.add(hn_array, "out.hn", element_, Access::write);
        const View& cn = arrays.add(cn_array, "out.cn", element_, Access::write);
        forward.hn = states(hn, shape_.outputs());
        forward.cn = states(cn, shape_.units);
        forward.lookup = lookup(arrays.call, forward.shape, indices, x);
        if (!overlap_checked) arrays.call.check_overlap({{&hn, &h0}, {&cn, &c0}});
        if (arrays.call.refused()) return arrays.call.refusal();
        RecurrentRun<RecurrentForward> run{forward, std::move(cells), {}, seed, 1};
        run_driver<Array>(work(), threads, run, run_forward);
        return {};
    }

    // stamp: of the forward pass that filled the cache; none: any.
    template <class Array, class Cells>
    Outcome backward(Array dy_array, Array dhn_array, Array dcn_array, const RecurrentInputs<Array, Cells>& in,
                     Array cache_array, std::optional<uint64_t> stamp, Array dx_array,
                     const std::optional<Cells>& dcells_list, Array dh0_array, Array dc0_array, bool accumulate,
                     bool overlap_checked, int threads) const {
        Arrays arrays;
        RecurrentBackward backward;
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
        backward.dy = sequence(arrays.add(dy_array, "dy", element_), width());
        backward.dhn = states(arrays.add(dhn_array, "dhn", element_), shape_.outputs());
        backward.dcn = states(arrays.add(dcn_array, "dcn", element_), shape_.units);
        const View& dx = arrays.add(dx_array, "out.dx", element_, Access::write);
        backward.dx = indices.present() ? table(dx, x.extent(0)) : sequence(dx, shape_.inputs);
        std::vector<CellArrays> dcells;
        if (dcells_list) { dcells = parameters(arrays, *dcells_list, Access::write); }
        backward.dh0 = states(arrays.add(dh0_array, "out.dh0", element_, Access::write), shape_.outputs());
        backward.dc0 = states(arrays.add(dc0_array, "out.dc0", element_, Access::write), shape_.units);
        backward.lookup = lookup(arrays.call, backward.shape, indices, x);
        if (!overlap_checked) arrays.call.check_overlap();
        if (arrays.call.refused()) return arrays.call.refusal();
        backward.accumulate = accumulate;
        RecurrentRun<RecurrentBackward> run{backward, std::move(cells), std::move(dcells), seed, 1};
        run_driver<Array>(work(), threads, run, run_backward);
        return {};
    }

    // Whether a forward pass with these inputs has filled the cache.
    template <class Array, class Cells>
    Outcome check_cache(const RecurrentInputs<Array, Cells>& in, Array cache_array,
                        std::optional<uint64_t> stamp) const {
        Arrays arrays;
        const RecurrentShape shape = ragged(arrays, in);
        check_filled(arrays.call, arrays.add(cache_array, "cache", Element::u8), shape, stamp);
        return arrays.call.refusal();
    }

    template <class Array, class Cells>
    Outcome show(const RecurrentInputs<Array, Cells>& in, Array cache_array, std::optional<uint64_t> stamp,
                 int64_t cell, Array gates_array, Array states_array) const {
        Arrays arrays;
        const RecurrentShape shape = ragged(arrays, in);
        if (cell < 0 || cell >= shape.layers * shape.directions) throw nb::value_error("there is no such cell");
        const View& cache = arrays.add(cache_array, "cache", Element::u8);
        check_filled(arrays.call, cache, shape, stamp);
        const View& gates = arrays.add(gates_array, "gates", element_, Access::write);
        const View& cell_states = arrays.add(states_array, "cells", element_, Access::write);
        gates.check_contiguous({shape.steps, shape.samples, gate_count(shape.rule.kind), shape.units});
        cell_states.check_contiguous({shape.steps, shape.samples, shape.units});
        if (arrays.call.refused()) return arrays.call.refusal();
        recurrent_show(shape, cache.data(), cell, gates.data(), cell_states.data());
        return {};
    }

private:
    // Of all gates and, of an LSTM, the cell state.
    void set_activations(const std::vector<ActivationTuple>& given) {
        using K = ActivationKind;
        const CellKind kind = shape_.rule.kind;
        const bool lstm = kind == CellKind::lstm;
        const size_t gates = size_t(gate_count(kind));
        if (given.size() != gates + lstm) throw nb::value_error("wrong number of activations");
        CellActivations& to = shape_.rule.activations;
        for (size_t i = 0; i < given.size(); ++i) {
            const auto& [code, alpha, beta] = given[i];
            // The kernels have the function of an RNN's gate where other cells have that of their candidate.
            Activation& place = i == gates ? to.hidden : to.gate[kind == CellKind::rnn ? 2 : i];
            place = {static_cast<K>(code), alpha, beta};
        }
        to.standard = to.gate[2].kind == K::tanh && (!lstm || to.hidden.kind == K::tanh);
        for (const size_t i : {0, 1, 3}) {
            const bool present = kind != CellKind::rnn && i < gates;
            to.standard = to.standard && (!present || to.gate[i].kind == K::sigmoid);
        }
    }

    // What the drivers cannot combine. Python refuses it with a reason.
    void check_combination() const {
        const RecurrentShape& s = shape_;
        const bool lstm = s.rule.kind == CellKind::lstm, full = s.peephole == Peephole::full;
        const bool norm = s.norm != CellNorm::none;
        if (!lstm && (s.peephole != Peephole::none || s.projection || s.rule.coupled || s.rule.cell_clip > 0 ||
                      s.norm == CellNorm::cell)) {
            throw nb::value_error("an option of an LSTM");
        }
        if (norm && (s.peephole != Peephole::none || s.projection || s.rule.clip > 0 || s.rule.cell_clip > 0 ||
                     s.rule.kind == CellKind::gru_before || s.mask_kind == MaskKind::each)) {
            throw nb::value_error("an option that excludes a norm");
        }
        if (full && (s.projection || s.rule.cell_clip > 0)) throw nb::value_error("full peepholes exclude an option");
    }

    // Roughly the number of elements that a call touches.
    double work() const { return double(shape_.steps) * double(shape_.samples) * double(shape_.units) * 16; }

    int64_t cells() const { return shape_.layers * shape_.directions; }
    bool has_cells() const { return shape_.rule.kind == CellKind::lstm; }
    int64_t width() const { return shape_.directions * shape_.outputs(); }
    int64_t copies() const { return shape_.mask_kind == MaskKind::each ? gate_count(shape_.rule.kind) : 1; }

    // The arrays that act inside the recurrence.
    template <class Array, class Cells>
    void set_factors(Arrays& arrays, const RecurrentInputs<Array, Cells>& in, RecurrentShape& shape) const {
        const bool masked = shape.mask_kind != MaskKind::none;
        if (is_absent(in.reset) && is_absent(in.mask) && is_absent(in.zoneout) && is_absent(in.cell_zoneout) &&
            !masked && !shape.has_zoneout) {
            return;
        }
        const View& reset = arrays.add(in.reset, "reset", Element::u8);
        reset.check_contiguous({shape.steps, shape.samples});
        if (reset.present() && shape.directions == 2) throw nb::value_error("reset in two directions");
        shape.reset = static_cast<const uint8_t*>(reset.data());
        const View& mask = arrays.add(in.mask, "mask", element_);
        if (is_absent(in.mask) == masked) { throw nb::value_error("a mask, or none, is expected"); }
        const std::array<int64_t, 5> extents = {cells(), copies(), shape.steps, shape.samples, shape.outputs()};
        const std::array<int64_t, 5> of_mask = broadcast_strides(arrays.call, mask, extents);
        if (mask.present()) shape.mask = {mask.data(), of_mask[0], of_mask[1], of_mask[2], of_mask[3]};
        const View& zoneout = arrays.add(in.zoneout, "zoneout", element_);
        if (is_absent(in.zoneout) == shape.has_zoneout) throw nb::value_error("a zoneout, or none, is expected");
        shape.zoneout = zoneout_factor(arrays.call, zoneout, shape.outputs());
        const View& cell_zoneout = arrays.add(in.cell_zoneout, "zoneout", element_);
        if (!is_absent(in.cell_zoneout) && (!has_cells() || shape_.peephole == Peephole::full)) {
            throw nb::value_error("a zoneout of cell states that cannot be");
        }
        shape.cell_zoneout = zoneout_factor(arrays.call, cell_zoneout, shape.units);
    }
    Factor zoneout_factor(Call& call, const View& view, int64_t units) const {
        if (!view.present()) return {};
        const std::array<int64_t, 4> extents = {cells(), shape_.steps, shape_.samples, units};
        const std::array<int64_t, 4> strides = broadcast_strides(call, view, extents);
        return {view.data(), strides[0], 0, strides[1], strides[2]};
    }
    // The strides of an array that is broadcast to these extents as in NumPy. Its last axis is whole and contiguous.
    template <size_t n>
    static std::array<int64_t, n> broadcast_strides(Call& call, const View& view,
                                                    const std::array<int64_t, n>& extents) {
        std::array<int64_t, n> strides = {};
        if (!view.present()) return strides;
        const int lead = int(n) - view.axes();
        if (lead < 0 || view.axes() == 0) {
            call.refuse(Reason::shape, view.name());
            return strides;
        }
        for (int i = 0; i < view.axes(); ++i) {
            const size_t axis = size_t(lead + i);
            const bool whole = view.extent(i) == extents[axis];
            if (!whole && (view.extent(i) != 1 || axis == n - 1)) call.refuse(Reason::shape, view.name());
            strides[axis] = whole && view.extent(i) > 1 ? view.stride(i) : 0;
        }
        view.check_unit_stride(extents[n - 1]);
        return strides;
    }

    // The caller computes active and order from lengths that it has checked.
    template <class Array, class Cells>
    RecurrentShape ragged(Arrays& arrays, const RecurrentInputs<Array, Cells>& in) const {
        RecurrentShape shape = shape_;
        shape.seed = in.seed;
        const View& active = arrays.add(in.active, "active", Element::i64);
        const View& order = arrays.add(in.order, "order", Element::i64);
        active.check_contiguous({shape.steps});
        order.check_contiguous({shape.samples});
        if (arrays.call.refused()) throw nb::value_error("active or order has the wrong form");
        shape.active = static_cast<const int64_t*>(active.data());
        shape.order = static_cast<const int64_t*>(order.data());
        set_factors(arrays, in, shape);
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
    static const int64_t* seed_of(Arrays& arrays, const RecurrentInputs<Array, Cells>& in) {
        const View& seed = arrays.add(in.seed_at, "seed", Element::i64);
        seed.check_vector(1);
        return static_cast<const int64_t*>(seed.data());
    }

    static void check_cache_size(Call& call, const View& cache, const RecurrentShape& shape) {
        if (!cache.present()) return;
        cache.check_vector(cache.elements());
        const int64_t bytes = recorded_program() ? recurrent_cache_bytes(shape, shape.steps * shape.samples)
                                                 : recurrent_cache_bytes(shape);
        if (cache.elements() < bytes) call.refuse(Reason::shape, cache.name());
    }
    static void check_filled(Call& call, const View& cache, const RecurrentShape& shape,
                             std::optional<uint64_t> stamp) {
        check_cache_size(call, cache.require(), shape);
        if (call.refused() || recorded_program()) return;  // a program fills it before
        const CacheState state = recurrent_check_cache(shape, cache.data());
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
    States states(const View& view, int64_t units) const {
        view.check_shape({cells(), shape_.samples, units});
        view.check_unit_stride(units);
        return {view.data(), view.stride(0), view.stride(1)};
    }

    Lookup lookup(Call& call, const RecurrentShape& shape, const View& indices, const View& table) const {
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
        RecurrentShape shape;
        Lookup lookup;
        int threads;
    };
    static void check_lookup(const LookupCheck& call) {
        if (!in_range(call.shape, call.lookup)) throw OutOfRange(-1, call.lookup.rows);
    }

    // Indices of inactive samples are ignored.
    static bool in_range(const RecurrentShape& shape, const Lookup& lookup) {
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
    std::vector<CellArrays> parameters(Arrays& arrays, const Cells& given, Access access) const {
        if (given.size() != size_t(cells())) throw nb::value_error("weights have the wrong length");
        const std::vector<CellField>& fields = fields_of(shape_.rule.kind);
        std::vector<CellArrays> found;
        for (size_t i = 0; i < given.size(); ++i) {
            const int64_t inputs = int64_t(i) < shape_.directions ? shape_.inputs : width();
            CellArrays a;
            const auto& cell = given[i];
            for (size_t k = 0; k < fields.size(); ++k) {
                if (!is_absent(cell[k])) a.*fields[k].array = parameter(arrays, cell[k], fields[k], inputs, access);
            }
            if (access == Access::read) {
                for (int k = 0; k < gate_count(shape_.rule.kind); ++k) {
                    if (!a.wx.gate[k]) arrays.call.refuse(Reason::missing, "wx");
                    if (!a.wh.gate[k]) arrays.call.refuse(Reason::missing, "wh");
                }
                if (shape_.projection && !a.projection.gate[0]) arrays.call.refuse(Reason::missing, "projection");
                check_norm(arrays.call, a);
            }
            found.push_back(a);
        }
        return found;
    }

    void check_norm(Call& call, const CellArrays& a) const {
        if (shape_.norm == CellNorm::none) return;
        for (int k = 0; k < gate_count(shape_.rule.kind); ++k) {
            if (!a.gamma_x.gate[k]) call.refuse(Reason::missing, "gamma_x");
            if (!a.gamma_h.gate[k]) call.refuse(Reason::missing, "gamma_h");
        }
        if (has_cells() && !a.gamma_c.gate[0]) call.refuse(Reason::missing, "gamma_c");
    }

    template <class Array>
    GateArray parameter(Arrays& arrays, Array given, const CellField& field, int64_t inputs, Access access) const {
        const int64_t units = shape_.units, outputs = shape_.outputs();
        switch (field.form) {
            case CellField::by_inputs:
                return gate_array(arrays, given, field.name, inputs, true, access);
            case CellField::by_outputs:
                return gate_array(arrays, given, field.name, outputs, true, access);
            case CellField::vector:
                return gate_array(arrays, given, field.name, 0, false, access);
            case CellField::peephole: {
                const bool full = shape_.peephole == Peephole::full;
                return gate_array(arrays, given, field.name, full ? units : 0, full, access);
            }
            case CellField::projection:
                return one_array(arrays, given, field.name, {shape_.projection, units}, access);
            case CellField::unit_vector:
                return one_array(arrays, given, field.name, {units}, access);
        }
        return {};
    }

    // A parameter that all gates share, as if it were that of the first gate.
    template <class Array>
    GateArray one_array(Arrays& arrays, Array given, const char* name, std::initializer_list<int64_t> shape,
                        Access access) const {
        GateArray found;
        const View& view = arrays.add(given, name, element_, access);
        view.check_shape(shape);
        if (access == Access::write && shape.size() > 1) view.check_unit_stride(*(shape.end() - 1));
        found.gate[0] = view.data();
        found.row_stride = view.stride(0);
        found.col_stride = shape.size() > 1 ? view.stride(1) : 1;
        return found;
    }

    // One array [G * units, ...] or [G, units, ...]; from Python also a tuple of G [units, ...], any of which may be
    // None.
    template <class Array>
    GateArray gate_array(Arrays& arrays, Array given, const char* name, int64_t columns, bool is_matrix,
                         Access access) const {
        GateArray found;
        if (is_absent(given)) return found;
        const int64_t units = shape_.units;
        const int gates = gate_count(shape_.rule.kind);
        const int tail = is_matrix ? 1 : 0;
        const auto check_shape = [&](const View& view, std::initializer_list<int64_t> lead) {
            int64_t shape[3] = {}, axes = 0;
            for (const int64_t extent : lead) shape[axes++] = extent;
            if (is_matrix) shape[axes++] = columns;
            view.check_shape(shape, shape + axes);
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
                if (PyTuple_GET_SIZE(given.ptr()) != gates) throw nb::value_error("a tuple has not one array per gate");
                for (int k = 0; k < gates; ++k) {
                    const nb::handle gate = PyTuple_GET_ITEM(given.ptr(), k);
                    const View& view = arrays.add(gate, name, element_, access);
                    if (!view.present()) continue;
                    check_shape(view, {units});
                    take_strides(view, 0);
                    found.gate[k] = view.data();
                }
                return found;
            }
        }
        const View& view = arrays.add(given, name, element_, access);
        const bool apart = view.axes() == tail + 2;
        if (apart) {
            check_shape(view, {gates, units});
        } else {
            check_shape(view, {gates * units});
        }
        take_strides(view, apart ? 1 : 0);
        const int64_t step = apart ? view.stride(0) : units * found.row_stride;
        for (int k = 0; k < gates && view.present(); ++k)
            found.gate[k] = static_cast<char*>(view.data()) + k * step * item_size(element_);
        return found;
    }

    RecurrentShape shape_;
    Element element_;
};

}  // namespace rg::bind
