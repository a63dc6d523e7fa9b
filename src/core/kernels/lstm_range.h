// LSTM cells over a range of rows (samples) and of blocks of hidden units: everything in a time step except the
// products.
//
// Activations are applied through one of two policies: StandardCell, with the usual functions compiled in, and
// CustomCell, with any others through pointers. Both save for backward what determines a gate's value and slope.
#pragma once

#include "../kernels.h"
#include "activation.h"
#include "product.h"

namespace rg {
namespace {

enum Gate { kInput, kForget, kCandidate, kOutput };

// Sigmoid gates, a tanh candidate and tanh of the cell state: the values are saved, and determine the slopes.
template <class A>
struct StandardCell {
    RG_INLINE Vec<A> value(Gate gate, Vec<A> z) const { return gate == kCandidate ? vtanh<A>(z) : vsigmoid<A>(z); }
    RG_INLINE Vec<A> kept(Gate, Vec<A>, Vec<A> value) const { return value; }
    RG_INLINE Vec<A> restored(Gate, Vec<A> kept) const { return kept; }
    RG_INLINE Vec<A> slope(Gate gate, Vec<A> kept) const {
        const Vec<A> rest = splat(A(1)) - kept;
        return gate == kCandidate ? rest * (splat(A(1)) + kept) : rest * kept;
    }
    RG_INLINE Vec<A> hidden(Vec<A> c) const { return vtanh<A>(c); }
    RG_INLINE Vec<A> hidden_slope(Vec<A>, Vec<A> value) const { return (splat(A(1)) - value) * (splat(A(1)) + value); }
};

// One function of an activation: value or slope, with the parameters it takes.
template <class A>
struct BoundFunction {
    ActivationFunction<A> function;
    Vec<A> alpha, beta;
    RG_INLINE Vec<A> operator()(Vec<A> z) const { return function(z, alpha, beta); }
};

template <ActivationKind kind, class A>
Vec<A> slope_from_value(Vec<A> y, Vec<A> a, Vec<A> b) {
    return activation_slope_times<kind, A>(y, splat(A(1)), a, b);
}

// Gates whose slope is cheap to compute from the value save the value, the others the pre-activation.
template <class A>
struct CustomCell {
    struct Function {
        BoundFunction<A> value, slope;
        bool keeps_value;
    };
    Function function[4], psi;

    explicit CustomCell(const LstmActivations& activations) {
        for (int k = 0; k < 4; ++k) function[k] = bind(activations.gate[k], true);
        psi = bind(activations.hidden, false);
    }
    static Function bind(const Activation& activation, bool may_keep_value) {
        using K = ActivationKind;
        const Vec<A> a = splat(A(activation.alpha)), b = splat(A(activation.beta));
        const VectorActivation<A> found = vector_activation<A>(activation.kind);
        Function f = {{found.value, a, b}, {found.input_slope, a, b}, false};
        if (!may_keep_value) return f;
        f.keeps_value = true;
        if (activation.kind == K::sigmoid)
            f.slope.function = slope_from_value<K::sigmoid, A>;
        else if (activation.kind == K::tanh)
            f.slope.function = slope_from_value<K::tanh, A>;
        else if (activation.kind == K::relu)
            f.slope.function = slope_from_value<K::relu, A>;
        else
            f.keeps_value = false;
        return f;
    }

    RG_INLINE Vec<A> value(Gate gate, Vec<A> z) const { return function[gate].value(z); }
    RG_INLINE Vec<A> kept(Gate gate, Vec<A> z, Vec<A> value) const { return function[gate].keeps_value ? value : z; }
    RG_INLINE Vec<A> restored(Gate gate, Vec<A> kept) const {
        return function[gate].keeps_value ? kept : function[gate].value(kept);
    }
    RG_INLINE Vec<A> slope(Gate gate, Vec<A> kept) const { return function[gate].slope(kept); }
    RG_INLINE Vec<A> hidden(Vec<A> c) const { return psi.value(c); }
    RG_INLINE Vec<A> hidden_slope(Vec<A> c, Vec<A>) const { return psi.slope(c); }
};

// Calls visit(first unit, valid lanes) for every vector of units; only the last may have invalid lanes.
template <class A, class Visit>
RG_INLINE void for_each_vector(int64_t blocks, int64_t units, const Visit& visit) {
    for (int64_t u = 0; u < blocks * kPanel<A>; u += kLanes<A>) {
        const int64_t rest = units - u;
        visit(u, rest < kLanes<A> ? (rest < 0 ? 0 : rest) : int64_t(kLanes<A>));
    }
}

template <class A>
RG_INLINE void store_valid(A* p, int64_t valid, Vec<A> v) {
    if (valid == kLanes<A>)
        store(p, v);
    else if (valid > 0)
        store_part(p, valid, v);
}
template <class A>
RG_INLINE Vec<A> load_valid(const A* p, int64_t valid) {
    if (valid == kLanes<A>) return load(p);
    return valid > 0 ? load_part(p, valid, splat(A(0))) : splat(A(0));
}
// Sets lanes beyond the last unit to 0; there activations may have any value.
template <class A>
RG_INLINE Vec<A> keep_valid(Vec<A> v, int64_t valid) {
    if (valid == kLanes<A>) return v;
    A lane[kLanes<A>];
    store(lane, v);
    return load_valid(lane, valid);
}

// The offset of unit u in a row of gates: blocks of kPanel units, each with i f g o.
template <class A>
RG_INLINE int64_t gate_column(int64_t u, Gate gate) {
    return u / kPanel<A> * 4 * kPanel<A> + gate * kPanel<A> + u % kPanel<A>;
}

template <class A, class T>
RG_INLINE T* state_at(const StateArray<T>& states, int64_t r, int64_t u) {
    return states.data + u / kPanel<A> * states.panel + r * states.row + u % kPanel<A>;
}

//   i = phi_i(z_i + p_i c-)   f = phi_f(z_f + p_f c-)   g = phi_g(z_g + p_g c-)   c = f c- + i g
template <class A, class Cell>
void forward_states(const CellForward<A>& p, const Cell& cell) {
    for (int64_t r = 0; r < p.rows; ++r) {
        A* gates = p.gates + r * p.gates_row;
        for_each_vector<A>(p.blocks, p.units, [&](int64_t u, int64_t) RG_INLINE_LAMBDA {
            A* place[3];
#pragma GCC unroll 4
            for (int k = 0; k < 3; ++k) place[k] = gates + gate_column<A>(u, Gate(k));
            const Vec<A> c_prev = load(state_at<A>(p.c_prev, r, u));
            Vec<A> zi = load(place[kInput]), zf = load(place[kForget]), zg = load(place[kCandidate]);
            if (p.peephole) {
                zi = fma(load(p.peephole + gate_column<A>(u, kInput)), c_prev, zi);
                zf = fma(load(p.peephole + gate_column<A>(u, kForget)), c_prev, zf);
                zg = fma(load(p.peephole + gate_column<A>(u, kCandidate)), c_prev, zg);
            }
            const Vec<A> i = cell.value(kInput, zi), f = cell.value(kForget, zf), g = cell.value(kCandidate, zg);
            const Vec<A> c = fma(f, c_prev, i * g);
            store(place[kInput], cell.kept(kInput, zi, i));
            store(place[kForget], cell.kept(kForget, zf, f));
            store(place[kCandidate], cell.kept(kCandidate, zg, g));
            store(state_at<A>(p.c_next, r, u), c);
            if (p.c_new.data) store(state_at<A>(p.c_new, r, u), c);
        });
    }
}

//   o = phi_o(z_o + p_o c)    h = o psi(c)
template <class A, class Cell>
void forward_outputs(const CellForward<A>& p, const Cell& cell) {
    const StateArray<const A> read_by_peephole =
        p.output_reads_old ? p.c_prev : StateArray<const A>{p.c_next.data, p.c_next.row, p.c_next.panel};
    for (int64_t r = 0; r < p.rows; ++r) {
        A* gates = p.gates + r * p.gates_row;
        for_each_vector<A>(p.blocks, p.units, [&](int64_t u, int64_t valid) RG_INLINE_LAMBDA {
            A* place = gates + gate_column<A>(u, kOutput);
            Vec<A> z = load(place);
            if (p.peephole) {
                z = fma(load(p.peephole + gate_column<A>(u, kOutput)), load(state_at<A>(read_by_peephole, r, u)), z);
            }
            const Vec<A> c = load<A>(state_at<A>(p.c_next, r, u));
            const Vec<A> o = cell.value(kOutput, z), h = o * cell.hidden(c);
            store(place, cell.kept(kOutput, z, o));
            store(state_at<A>(p.h_next, r, u), h);
            if (p.y) store_valid(p.y + p.y_offset[r] + u, valid, h);
            if (p.above.data) store_valid(state_at<A>(p.above, r, u), valid, h);
        });
    }
}

// In two passes, the states of all cells first: a processor can overlap the latency of several functions only if they
// do not depend on each other.
template <class A, class Cell>
void forward_cells(const CellForward<A>& p, const Cell& cell) {
    if (p.phase != CellPhase::output) forward_states(p, cell);
    if (p.phase != CellPhase::state) forward_outputs(p, cell);
}

// Prefetches what backward_cells reads of a row. Rows are far apart, so the hardware prefetcher misses them.
template <class A>
RG_INLINE void prefetch_row(const CellBackward<A>& p, int64_t r) {
    for (int64_t block = 0; block < p.blocks; ++block) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) prefetch_near(p.gates + r * p.gates_row + (4 * block + k) * kPanel<A>);
        prefetch_near(state_at<A>(p.c_prev, r, block * kPanel<A>));
        if (p.dy) prefetch_near(p.dy + p.dy_offset[r] + block * kPanel<A>);
    }
}

//   dh = dh + dy   dzo = dh psi(c) phi_o'   dc = dc + dh o psi'(c) + p_o dzo
//   dzi = dc g phi_i'   dzf = dc c- phi_f'   dzg = dc i phi_g'   dc- = dc f + p_i dzi + p_f dzf + p_g dzg
template <class A, class Cell>
void backward_cells(const CellBackward<A>& p, const Cell& cell) {
    constexpr int64_t kRowsAhead = 2;
    for (int64_t r = 0; r < p.rows; ++r) {
        if (r + kRowsAhead < p.rows) prefetch_row(p, r + kRowsAhead);
        const A* gates = p.gates + r * p.gates_row;
        for_each_vector<A>(p.blocks, p.units, [&](int64_t u, int64_t valid) RG_INLINE_LAMBDA {
            int64_t column[4];
            Vec<A> kept[4];
            A* dz[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                column[k] = gate_column<A>(u, Gate(k));
                kept[k] = load(gates + column[k]);
                dz[k] = p.dz + (u / kPanel<A> * 4 + k) * p.dz_panel + r * kPanel<A> + u % kPanel<A>;
            }
            const Vec<A> c_prev = load(state_at<A>(p.c_prev, r, u));
            const Vec<A> i = cell.restored(kInput, kept[kInput]), f = cell.restored(kForget, kept[kForget]),
                         g = cell.restored(kCandidate, kept[kCandidate]);
            Vec<A> dc = load<A>(state_at<A>(p.dc, r, u)), dzo = splat(A(0));
            if (p.phase != CellPhase::state) {
                const Vec<A> o = cell.restored(kOutput, kept[kOutput]), c = fma(f, c_prev, i * g);
                const Vec<A> a = cell.hidden(c);
                Vec<A> dh = load(state_at<A>(p.dh, r, u));
                if (p.dy) dh = dh + load_valid(p.dy + p.dy_offset[r] + u, valid);
                dzo = keep_valid<A>(dh * a * cell.slope(kOutput, kept[kOutput]), valid);
                dc = fma(dh * o, cell.hidden_slope(c, a), dc);
                if (p.peephole && !p.output_reads_old) dc = fma(load(p.peephole + column[kOutput]), dzo, dc);
                store(dz[kOutput], dzo);
                if (p.c_new.data) store(state_at<A>(p.c_new, r, u), c);
                if (p.dzo.data) store(state_at<A>(p.dzo, r, u), dzo);
            }
            if (p.phase == CellPhase::output) {
                store(state_at<A>(p.dc, r, u), dc);
                return;
            }
            const Vec<A> dzi = keep_valid<A>(dc * g * cell.slope(kInput, kept[kInput]), valid);
            const Vec<A> dzf = keep_valid<A>(dc * c_prev * cell.slope(kForget, kept[kForget]), valid);
            const Vec<A> dzg = keep_valid<A>(dc * i * cell.slope(kCandidate, kept[kCandidate]), valid);
            dc = dc * f;
            if (p.peephole) {
                dc = fma(load(p.peephole + column[kInput]), dzi, dc);
                dc = fma(load(p.peephole + column[kForget]), dzf, dc);
                dc = fma(load(p.peephole + column[kCandidate]), dzg, dc);
                if (p.output_reads_old) dc = fma(load(p.peephole + column[kOutput]), dzo, dc);
            }
            store(dz[kInput], dzi);
            store(dz[kForget], dzf);
            store(dz[kCandidate], dzg);
            store(state_at<A>(p.dc, r, u), dc);
        });
    }
}

template <class A>
void lstm_forward_cells(const CellForward<A>& p) {
    if (p.activations->standard)
        forward_cells(p, StandardCell<A>());
    else
        forward_cells(p, CustomCell<A>(*p.activations));
}

template <class A>
void lstm_backward_cells(const CellBackward<A>& p) {
    if (p.activations->standard)
        backward_cells(p, StandardCell<A>());
    else
        backward_cells(p, CustomCell<A>(*p.activations));
}

// Recovers gate values from what was saved, for callers who inspect gates: i f g o of one row into four arrays, and c.
template <class A>
void lstm_show_cells(const CellShow<A>& p) {
    const CustomCell<A> cell(*p.activations);
    for_each_vector<A>((p.units + kPanel<A> - 1) / kPanel<A>, p.units, [&](int64_t u, int64_t valid) {
        Vec<A> value[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; ++k) {
            value[k] = cell.restored(Gate(k), load(p.gates + gate_column<A>(u, Gate(k))));
            if (p.values) store_valid(p.values + k * p.values_gate + u, valid, value[k]);
        }
        const Vec<A> c = fma(value[kForget], load(state_at<A>(p.c_prev, 0, u)), value[kInput] * value[kCandidate]);
        if (p.c) store_valid(p.c + u, valid, c);
    });
}

// ---- dropout -------------------------------------------------------------------------------------------------------

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011) for 16 counters that differ in their third word.
RG_INLINE void philox(uint64_t row, uint32_t first, uint32_t layer, uint64_t seed, uint32_t (&word)[64]) {
    uint32_t *const w0 = word, *const w1 = word + 16, *const w2 = word + 32, *const w3 = word + 48;
    for (uint32_t lane = 0; lane < 16; ++lane) {
        w0[lane] = uint32_t(row);
        w1[lane] = uint32_t(row >> 32);
        w2[lane] = first + lane;
        w3[lane] = layer;
    }
    uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        for (int lane = 0; lane < 16; ++lane) {
            const uint64_t p = uint64_t(0xD2511F53u) * w0[lane], q = uint64_t(0xCD9E8D57u) * w2[lane];
            w0[lane] = uint32_t(q >> 32) ^ w1[lane] ^ key0;
            w2[lane] = uint32_t(p >> 32) ^ w3[lane] ^ key1;
            w1[lane] = uint32_t(q);
            w3[lane] = uint32_t(p);
        }
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

// Element j of the row uses word (j % 64) / 16 of counter j % 16 in group j / 64.
template <class A>
void dropout_row(const Dropout& dropout, uint64_t row, A* data, int64_t panel, int64_t width) {
    const A scale = A(dropout.scale);
    uint32_t word[64];
    for (int64_t group = 0; group < width; group += 64) {
        philox(row, uint32_t(group / 4), dropout.layer, dropout.seed, word);
        for (int64_t first = group; first < group + 64 && first < width; first += kPanel<A>) {
            A* at = data + first / kPanel<A> * panel;
            const int64_t end = width - first < kPanel<A> ? width - first : kPanel<A>;
            for (int64_t j = 0; j < end; ++j) {
                const A value = at[j] * scale;
                at[j] = word[first - group + j] < dropout.threshold ? A(0) : value;
            }
        }
    }
}

}  // namespace
}  // namespace rg
