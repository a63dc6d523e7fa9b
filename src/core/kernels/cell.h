// What the cells of recurrent layers share: the functions of their gates, and how states and gradients go in and out.
//
// A cell's kernels compute everything in a time step except the products, over a range of rows (samples) and of blocks
// of hidden units. Activations are applied through a policy: StandardCell, with the usual functions compiled in,
// ClippedCell, which clamps their inputs, and CustomCell, with any others through pointers. A policy says what is saved
// of a gate for backward, and how that determines the gate's value and slope.
#pragma once

#include "../kernels.h"
#include "activation.h"
#include "product.h"

namespace rg {
namespace {

// The gates of an LSTM, and of a GRU. The one with index 2 has the functions of an RNN's single gate too.
enum Gate { kInput = 0, kForget = 1, kCandidate = 2, kOutput = 3, kReset = 0, kUpdate = 1, kNew = 2 };

// Sigmoid gates, a tanh candidate and tanh of the cell state: the values are saved, and determine the slopes.
template <class A>
struct StandardCell {
    explicit StandardCell(const CellRule&) {}
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

// 0 where z was clamped, d elsewhere. NaN was not.
template <class A>
RG_INLINE Vec<A> zero_outside(Vec<A> z, Vec<A> bound, Vec<A> d) {
    const Vec<A> zero = splat(A(0));
    const Vec<A> low = z < -bound ? zero : d;
    return z > bound ? zero : low;
}

// The same with clamped inputs. They are saved as they were, because the value does not show whether an input on the
// bound was clamped.
template <class A>
struct ClippedCell : StandardCell<A> {
    Vec<A> bound;
    explicit ClippedCell(const CellRule& rule) : StandardCell<A>(rule), bound(splat(A(rule.clip))) {}
    RG_INLINE Vec<A> clamped(Vec<A> z) const { return clamp_between<A>(z, -bound, bound); }
    RG_INLINE Vec<A> value(Gate gate, Vec<A> z) const { return StandardCell<A>::value(gate, clamped(z)); }
    RG_INLINE Vec<A> kept(Gate, Vec<A> z, Vec<A>) const { return z; }
    RG_INLINE Vec<A> restored(Gate gate, Vec<A> kept) const { return value(gate, kept); }
    RG_INLINE Vec<A> slope(Gate gate, Vec<A> kept) const {
        return zero_outside<A>(kept, bound, StandardCell<A>::slope(gate, value(gate, kept)));
    }
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

// Gates whose slope is cheap to compute from the value save the value, the others and all clamped ones the input.
template <class A>
struct CustomCell {
    struct Function {
        BoundFunction<A> value, slope;
        bool keeps_value;
    };
    Function function[4], psi;
    bool clips;
    Vec<A> bound;

    explicit CustomCell(const CellRule& rule) : clips(rule.clip > 0), bound(splat(A(rule.clip))) {
        for (int k = 0; k < 4; ++k) function[k] = bind(rule.activations.gate[k], !clips);
        psi = bind(rule.activations.hidden, false);
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

    RG_INLINE Vec<A> clamped(Vec<A> z) const { return clips ? clamp_between<A>(z, -bound, bound) : z; }
    RG_INLINE Vec<A> value(Gate gate, Vec<A> z) const { return function[gate].value(clamped(z)); }
    RG_INLINE Vec<A> kept(Gate gate, Vec<A> z, Vec<A> value) const { return function[gate].keeps_value ? value : z; }
    RG_INLINE Vec<A> restored(Gate gate, Vec<A> kept) const {
        return function[gate].keeps_value ? kept : value(gate, kept);
    }
    RG_INLINE Vec<A> slope(Gate gate, Vec<A> kept) const {
        if (!clips) return function[gate].slope(kept);
        return zero_outside<A>(kept, bound, function[gate].slope(clamped(kept)));
    }
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

// The offset of unit u in a row of gates: blocks of kPanel units, each with all gates.
template <class A, int gates>
RG_INLINE int64_t gate_column(int64_t u, Gate gate) {
    return u / kPanel<A> * gates * kPanel<A> + gate * kPanel<A> + u % kPanel<A>;
}

template <class A, class T>
RG_INLINE T* state_at(const StateArray<T>& states, int64_t r, int64_t u) {
    return states.data + u / kPanel<A> * states.panel + r * states.row + u % kPanel<A>;
}

template <class A>
RG_INLINE Vec<A> factor_at(const RowFactor<A>& factor, int64_t r, int64_t u, int64_t valid) {
    return load_valid(factor.data + factor.offset[r] + u, valid);
}

template <class A>
RG_INLINE Vec<A> normalized(const RowNorm<A>& norm, int64_t r, int64_t column, Vec<A> x) {
    const Vec<A> y = (x - splat(norm.center[r])) * splat(norm.rstd[r]) * load(norm.gamma + column);
    return norm.beta ? y + load(norm.beta + column) : y;
}

// A gate's z without the product with the state, at a column of the row of gates.
template <class A>
RG_INLINE Vec<A> input_at(const CellForward<A>& p, int64_t r, int64_t column) {
    if (!p.inputs) return load<A>(p.gates + r * p.gates_row + column);
    return normalized(p.input_norm, r, column, load(p.inputs + r * p.gates_row + column));
}

// A gate's product with the state, normalized if need be. column: of the gate in a row of gates.
template <class A>
RG_INLINE Vec<A> product_at(const GateProducts<A>& p, int64_t r, int64_t u, Gate gate, int64_t column) {
    const int64_t block = u / kPanel<A>, lane = u % kPanel<A>;
    Vec<A> z = load(p.data + r * p.row + p.offset[gate] + block * p.block[gate] + lane);
    return p.norm.gamma ? normalized(p.norm, r, column, z) : z;
}

// h = k h~ + (1 - k) h-, which is exact for k = 0 and 1
template <class A>
RG_INLINE Vec<A> blend(Vec<A> k, Vec<A> fresh, Vec<A> old) {
    return fma(k, fresh, (splat(A(1)) - k) * old);
}

// Writes the new hidden state wherever it is needed. general: there may be zoneout, a mask, or a second copy.
template <class A, bool general>
RG_INLINE void emit(const CellOutput<A>& p, int64_t r, int64_t u, int64_t valid, Vec<A> h) {
    if constexpr (general) {
        if (p.zoneout.data) h = blend<A>(factor_at(p.zoneout, r, u, valid), h, load(state_at<A>(p.h_prev, r, u)));
        if (p.h_own.data) store(state_at<A>(p.h_own, r, u), h);
        for (int copy = 0; copy < p.copies && p.mask.data; ++copy) {
            const A* mask = p.mask.data + p.mask.offset[r] + copy * p.mask_copy + u;
            store(state_at<A>(p.h_next, r, u) + copy * p.h_copy, h * load_valid(mask, valid));
        }
        if (!p.mask.data) store(state_at<A>(p.h_next, r, u), h);
    } else {
        store(state_at<A>(p.h_next, r, u), h);
    }
    if (p.y) store_valid(p.y + p.y_offset[r] + u, valid, h);
    if (p.above.data) store_valid(state_at<A>(p.above, r, u), valid, h);
}

// The gradient of h~. `direct` is set to the part of the gradient of h- that comes straight from that of h.
template <class A, bool general>
RG_INLINE Vec<A> collect(const OutputGradient<A>& p, int64_t r, int64_t u, int64_t valid, Vec<A>& direct) {
    Vec<A> dh = load(state_at<A>(p.dh, r, u));
    direct = splat(A(0));
    if constexpr (general) {
        if (p.mask.data) {
            dh = splat(A(0));
            for (int copy = 0; copy < p.copies; ++copy) {
                const A* mask = p.mask.data + p.mask.offset[r] + copy * p.mask_copy + u;
                dh = fma(load_valid(mask, valid), load(state_at<A>(p.dh, r, u) + copy * p.dh_copy), dh);
            }
        }
    }
    if (p.carry.data) dh = dh + load<A>(state_at<A>(p.carry, r, u));
    if (p.dy) dh = dh + load_valid(p.dy + p.dy_offset[r] + u, valid);
    if constexpr (general) {
        if (p.zoneout.data) {
            const Vec<A> k = factor_at(p.zoneout, r, u, valid);
            direct = (splat(A(1)) - k) * dh;
            dh = k * dh;
        }
    }
    return dh;
}

template <class A>
bool is_general(const CellOutput<A>& p) {
    return p.zoneout.data || p.mask.data || p.h_own.data;
}
template <class A>
bool is_general(const OutputGradient<A>& p) {
    return p.zoneout.data || p.mask.data;
}

template <class A>
void emit_states(const CellEmit<A>& p) {
    for (int64_t r = 0; r < p.rows; ++r) {
        for_each_vector<A>(p.blocks, p.units, [&](int64_t u, int64_t valid) RG_INLINE_LAMBDA {
            emit<A, true>(p.output, r, u, valid, load(state_at<A>(p.h, r, u)));
        });
    }
}

template <class A>
void collect_gradients(const CellCollect<A>& p) {
    for (int64_t r = 0; r < p.rows; ++r) {
        for_each_vector<A>(p.blocks, p.units, [&](int64_t u, int64_t valid) RG_INLINE_LAMBDA {
            Vec<A> direct;
            const Vec<A> dh = collect<A, true>(p.output, r, u, valid, direct);
            store(state_at<A>(p.dh, r, u), dh);
            if (p.output.carry.data) store(state_at<A>(p.output.carry, r, u), direct);
        });
    }
}

}  // namespace
}  // namespace rg
