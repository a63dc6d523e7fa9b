// GRU cells of both kinds, and RNN cells.
#pragma once

#include "lstm_cell.h"

namespace rg {
namespace {

constexpr int kGruGates = 3;

//   r = phi_r(z_r)   z = phi_z(z_z), and the input of the new state's activation:
//   after:  z_n + r m, where m is the product with the state     before:  q = r h-, and the product with q follows
template <class A, class Cell, bool after>
void gru_states(const CellForward<A>& p, const Cell& cell) {
    for (int64_t r = 0; r < p.rows; ++r) {
        A* gates = p.gates + r * p.gates_row;
        for_each_vector<A>(p.blocks, p.units, [&](int64_t u, int64_t) RG_INLINE_LAMBDA {
            int64_t column[3];
            Vec<A> z[2];
#pragma GCC unroll 4
            for (int k = 0; k < 3; ++k) column[k] = gate_column<A, kGruGates>(u, Gate(k));
#pragma GCC unroll 4
            for (int k = 0; k < 2; ++k) {
                z[k] = input_at(p, r, column[k]) + product_at(p.products, r, u, Gate(k), column[k]);
                const Vec<A> value = cell.value(Gate(k), z[k]);
                store(gates + column[k], cell.kept(Gate(k), z[k], value));
                if (k == kReset && after) {
                    const Vec<A> m = product_at(p.products, r, u, kNew, column[kNew]);
                    store(gates + column[kNew], fma(value, m, input_at(p, r, column[kNew])));
                    if (p.inner.data) store(state_at<A>(p.inner, r, u), m);
                } else if (k == kReset) {
                    store(state_at<A>(p.inner, r, u), value * load(state_at<A>(p.reset_input, r, u)));
                }
            }
        });
    }
}

//   n = phi_n(z_n)   h = (1 - z) n + z h-
template <class A, class Cell, bool after, bool general>
void gru_outputs(const CellForward<A>& p, const Cell& cell) {
    for (int64_t r = 0; r < p.rows; ++r) {
        A* gates = p.gates + r * p.gates_row;
        for_each_vector<A>(p.blocks, p.units, [&](int64_t u, int64_t valid) RG_INLINE_LAMBDA {
            A* place = gates + gate_column<A, kGruGates>(u, kNew);
            Vec<A> zn = load<A>(place);
            if constexpr (!after) zn = zn + product_at(p.products, r, u, kNew, gate_column<A, kGruGates>(u, kNew));
            const Vec<A> n = cell.value(kNew, zn), h_prev = load(state_at<A>(p.output.h_prev, r, u));
            const Vec<A> z = cell.restored(kUpdate, load<A>(gates + gate_column<A, kGruGates>(u, kUpdate)));
            store(place, cell.kept(kNew, zn, n));
            const Vec<A> h = p.rule->flip ? fma(z, n - h_prev, h_prev) : fma(z, h_prev - n, n);
            emit<A, general>(p.output, r, u, valid, h);
        });
    }
}

template <class A, class Cell, bool general>
void gru_forward_cells(const CellForward<A>& p) {
    const Cell cell(*p.rule);
    if (p.rule->kind == CellKind::gru_after) {
        gru_states<A, Cell, true>(p, cell);
        gru_outputs<A, Cell, true, general>(p, cell);
    } else if (p.phase == CellPhase::state) {
        gru_states<A, Cell, false>(p, cell);
    } else {
        gru_outputs<A, Cell, false, general>(p, cell);
    }
}

//   dn = dh (1 - z) phi_n'   dz = dh (h- - n) phi_z'   dh- = dh z   after:  dm = dn r   dr = dn m phi_r'
template <class A, class Cell, bool after, bool general>
void gru_output_gradients(const CellBackward<A>& p, const Cell& cell) {
    // The order of the gates in dz: n r z m, or r z n.
    constexpr int kDn = after ? 0 : 2, kDz = after ? 2 : 1;
    const Vec<A> one = splat(A(1));
    for (int64_t r = 0; r < p.rows; ++r) {
        if (r + kRowsAhead < p.rows) prefetch_row<A, kGruGates>(p, p.h_prev, r + kRowsAhead);
        const A* gates = p.gates + r * p.gates_row;
        for_each_vector<A>(p.blocks, p.units, [&](int64_t u, int64_t valid) RG_INLINE_LAMBDA {
            Vec<A> kept[3];
#pragma GCC unroll 4
            for (int k = 0; k < 3; ++k) kept[k] = load(gates + gate_column<A, kGruGates>(u, Gate(k)));
            const Vec<A> z = cell.restored(kUpdate, kept[kUpdate]), n = cell.restored(kNew, kept[kNew]);
            const Vec<A> h_prev = load(state_at<A>(p.h_prev, r, u));
            const Vec<A> keep = p.rule->flip ? one - z : z, take = p.rule->flip ? z : one - z;
            const Vec<A> change = p.rule->flip ? n - h_prev : h_prev - n;
            Vec<A> direct;
            const Vec<A> dh = collect<A, general>(p.output, r, u, valid, direct);
            const Vec<A> dzn = keep_valid<A>(dh * take * cell.slope(kNew, kept[kNew]), valid);
            store(dz_at(p, r, u, kDn), dzn);
            store(dz_at(p, r, u, kDz), keep_valid<A>(dh * change * cell.slope(kUpdate, kept[kUpdate]), valid));
            store(state_at<A>(p.output.carry, r, u), general ? fma(dh, keep, direct) : dh * keep);
            if constexpr (after) {
                const Vec<A> reset = cell.restored(kReset, kept[kReset]), m = load(state_at<A>(p.inner, r, u));
                store(dz_at(p, r, u, 3), keep_valid<A>(dzn * reset, valid));
                store(dz_at(p, r, u, 1), keep_valid<A>(dzn * m * cell.slope(kReset, kept[kReset]), valid));
            }
        });
    }
}

// With dq, the gradient of the reset state:  dr = dq h- phi_r'   dh- += dq r
template <class A, class Cell, bool general>
void gru_reset_gradients(const CellBackward<A>& p, const Cell& cell) {
    for (int64_t r = 0; r < p.rows; ++r) {
        const A* gates = p.gates + r * p.gates_row;
        for_each_vector<A>(p.blocks, p.units, [&](int64_t u, int64_t valid) RG_INLINE_LAMBDA {
            const Vec<A> kept = load(gates + gate_column<A, kGruGates>(u, kReset));
            const Vec<A> dq = load(state_at<A>(p.dreset, r, u)), h = load(state_at<A>(p.reset_input, r, u));
            store(dz_at(p, r, u, 0), keep_valid<A>(dq * h * cell.slope(kReset, kept), valid));
            Vec<A> dh = dq * cell.restored(kReset, kept);
            if constexpr (general) {
                if (p.reset_mask.data) dh = dh * factor_at(p.reset_mask, r, u, valid);
            }
            A* carry = state_at<A>(p.output.carry, r, u);
            store(carry, keep_valid<A>(load<A>(carry) + dh, valid));
        });
    }
}

template <class A, class Cell, bool general>
void gru_backward_cells(const CellBackward<A>& p) {
    const Cell cell(*p.rule);
    if (p.rule->kind == CellKind::gru_after) {
        gru_output_gradients<A, Cell, true, general>(p, cell);
    } else if (p.phase == CellPhase::output) {
        gru_output_gradients<A, Cell, false, general>(p, cell);
    } else {
        gru_reset_gradients<A, Cell, general>(p, cell);
    }
}

// ---- RNN -----------------------------------------------------------------------------------------------------------

//   h = phi(z)
template <class A, class Cell, bool general>
void rnn_forward_cells(const CellForward<A>& p) {
    const Cell cell(*p.rule);
    for (int64_t r = 0; r < p.rows; ++r) {
        A* gates = p.gates + r * p.gates_row;
        for_each_vector<A>(p.blocks, p.units, [&](int64_t u, int64_t valid) RG_INLINE_LAMBDA {
            Vec<A> z = load<A>(gates + u);
            if constexpr (general) {
                if (p.products.data) z = input_at(p, r, u) + product_at(p.products, r, u, kReset, u);
            }
            const Vec<A> h = cell.value(kCandidate, z);
            store(gates + u, cell.kept(kCandidate, z, h));
            emit<A, general>(p.output, r, u, valid, h);
        });
    }
}

//   dz = dh phi'
template <class A, class Cell, bool general>
void rnn_backward_cells(const CellBackward<A>& p) {
    const Cell cell(*p.rule);
    for (int64_t r = 0; r < p.rows; ++r) {
        if (r + kRowsAhead < p.rows) prefetch_row<A, 1>(p, {}, r + kRowsAhead);
        const A* gates = p.gates + r * p.gates_row;
        for_each_vector<A>(p.blocks, p.units, [&](int64_t u, int64_t valid) RG_INLINE_LAMBDA {
            Vec<A> direct;
            const Vec<A> dh = collect<A, general>(p.output, r, u, valid, direct);
            if constexpr (general) {
                if (p.output.carry.data) store(state_at<A>(p.output.carry, r, u), direct);
            }
            store(dz_at(p, r, u, 0), keep_valid<A>(dh * cell.slope(kCandidate, load(gates + u)), valid));
        });
    }
}

// ---- the choice of a cell ------------------------------------------------------------------------------------------

template <class A, class Cell, bool general>
void forward_cells_of(const CellForward<A>& p) {
    if (p.rule->kind == CellKind::lstm) return lstm_forward_cells<A, Cell, general>(p);
    if (p.rule->kind == CellKind::rnn) return rnn_forward_cells<A, Cell, general>(p);
    gru_forward_cells<A, Cell, general>(p);
}

template <class A, class Cell, bool general>
void backward_cells_of(const CellBackward<A>& p) {
    if (p.rule->kind == CellKind::lstm) return lstm_backward_cells<A, Cell, general>(p);
    if (p.rule->kind == CellKind::rnn) return rnn_backward_cells<A, Cell, general>(p);
    gru_backward_cells<A, Cell, general>(p);
}

template <class A>
void forward_cells(const CellForward<A>& p) {
    const CellRule& rule = *p.rule;
    const bool products = p.products.data && (!is_gru(rule.kind));
    const bool general = is_general(p.output) || products || rule.coupled || rule.cell_clip > 0 ||
                         p.cell_zoneout.data || p.cell_norm.gamma || (p.inner.data && rule.kind == CellKind::lstm);
    if (!rule.activations.standard) return forward_cells_of<A, CustomCell<A>, true>(p);
    if (rule.clip > 0) return forward_cells_of<A, ClippedCell<A>, true>(p);
    general ? forward_cells_of<A, StandardCell<A>, true>(p) : forward_cells_of<A, StandardCell<A>, false>(p);
}

template <class A>
void backward_cells(const CellBackward<A>& p) {
    const CellRule& rule = *p.rule;
    const bool general = is_general(p.output) || rule.coupled || rule.cell_clip > 0 || p.cell_zoneout.data ||
                         p.cell_norm.gamma || p.reset_mask.data || (p.output.carry.data && !is_gru(rule.kind));
    if (!rule.activations.standard) return backward_cells_of<A, CustomCell<A>, true>(p);
    if (rule.clip > 0) return backward_cells_of<A, ClippedCell<A>, true>(p);
    general ? backward_cells_of<A, StandardCell<A>, true>(p) : backward_cells_of<A, StandardCell<A>, false>(p);
}

// Recovers gate values from what was saved, for callers who inspect gates: one row into an array per gate, and c.
template <class A, int gates>
void show_gates(const CellShow<A>& p, const CustomCell<A>& cell) {
    for_each_vector<A>((p.units + kPanel<A> - 1) / kPanel<A>, p.units, [&](int64_t u, int64_t valid) {
        Vec<A> value[gates];
#pragma GCC unroll 4
        for (int k = 0; k < gates; ++k) {
            const Gate functions = gates == 1 ? kCandidate : Gate(k);
            value[k] = cell.restored(functions, load(p.gates + gate_column<A, gates>(u, Gate(k))));
            if constexpr (gates == kLstmGates) {
                if (k == kForget && p.rule->coupled) value[k] = splat(A(1)) - value[kInput];
            }
            if (p.values) store_valid(p.values + k * p.values_gate + u, valid, value[k]);
        }
        if constexpr (gates == kLstmGates) {
            Vec<A> c = fma(value[kForget], load(state_at<A>(p.c_prev, 0, u)), value[kInput] * value[kCandidate]);
            const Vec<A> bound = splat(A(p.rule->cell_clip));
            if (p.rule->cell_clip > 0) c = clamp_between<A>(c, -bound, bound);
            if (p.c) store_valid(p.c + u, valid, c);
        }
    });
}

template <class A>
void show_cells(const CellShow<A>& p) {
    const CustomCell<A> cell(*p.rule);
    if (p.rule->kind == CellKind::lstm) return show_gates<A, kLstmGates>(p, cell);
    if (p.rule->kind == CellKind::rnn) return show_gates<A, 1>(p, cell);
    show_gates<A, kGruGates>(p, cell);
}

}  // namespace
}  // namespace rg
