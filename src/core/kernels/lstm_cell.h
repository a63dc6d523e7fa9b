// LSTM cells.
#pragma once

#include "cell.h"

namespace rg {
namespace {

constexpr int kLstmGates = 4;

//   i = phi_i(z_i + p_i c-)   f = phi_f(z_f + p_f c-)   g = phi_g(z_g + p_g c-)   c = f c- + i g
template <class A, class Cell, bool general>
void lstm_states(const CellForward<A>& p, const Cell& cell) {
    const Vec<A> one = splat(A(1)), bound = splat(A(p.rule->cell_clip));
    for (int64_t r = 0; r < p.rows; ++r) {
        A* gates = p.gates + r * p.gates_row;
        for_each_vector<A>(p.blocks, p.units, [&](int64_t u, [[maybe_unused]] int64_t valid) RG_INLINE_LAMBDA {
            A* place[3];
#pragma GCC unroll 4
            for (int k = 0; k < 3; ++k) place[k] = gates + gate_column<A, kLstmGates>(u, Gate(k));
            const Vec<A> c_prev = load(state_at<A>(p.c_prev, r, u));
            Vec<A> zi = load(place[kInput]), zf = load(place[kForget]), zg = load(place[kCandidate]);
            if constexpr (general) {
                if (p.products.data) {
                    const auto whole = [&](Gate gate) RG_INLINE_LAMBDA {
                        const int64_t column = gate_column<A, kLstmGates>(u, gate);
                        return input_at(p, r, column) + product_at(p.products, r, u, gate, column);
                    };
                    zi = whole(kInput);
                    zf = whole(kForget);
                    zg = whole(kCandidate);
                }
            }
            if (p.peephole) {
                zi = fma(load(p.peephole + gate_column<A, kLstmGates>(u, kInput)), c_prev, zi);
                zf = fma(load(p.peephole + gate_column<A, kLstmGates>(u, kForget)), c_prev, zf);
                zg = fma(load(p.peephole + gate_column<A, kLstmGates>(u, kCandidate)), c_prev, zg);
            }
            const Vec<A> i = cell.value(kInput, zi), g = cell.value(kCandidate, zg);
            Vec<A> f = cell.value(kForget, zf);
            if constexpr (general) {
                if (p.rule->coupled) f = one - i;
            }
            Vec<A> c = fma(f, c_prev, i * g);
            store(place[kInput], cell.kept(kInput, zi, i));
            store(place[kForget], cell.kept(kForget, zf, f));
            store(place[kCandidate], cell.kept(kCandidate, zg, g));
            if constexpr (general) {
                if (p.rule->cell_clip > 0) c = clamp_between<A>(c, -bound, bound);
                if (p.c_new.data) store(state_at<A>(p.c_new, r, u), c);
                if (p.norm_carried) return;
                if (p.cell_zoneout.data) c = blend<A>(factor_at(p.cell_zoneout, r, u, valid), c, c_prev);
                store(state_at<A>(p.c_next, r, u), c);
            } else {
                store(state_at<A>(p.c_next, r, u), c);
                if (p.c_new.data) store(state_at<A>(p.c_new, r, u), c);
            }
        });
    }
}

//   o = phi_o(z_o + p_o c)    h = o psi(c)
template <class A, class Cell, bool general>
void lstm_outputs(const CellForward<A>& p, const Cell& cell) {
    const StateArray<A> c_new = general && p.c_new.data ? p.c_new : p.c_next;
    const StateArray<const A> read_by_peephole =
        p.rule->output_reads_old ? p.c_prev : StateArray<const A>{c_new.data, c_new.row, c_new.panel};
    for (int64_t r = 0; r < p.rows; ++r) {
        A* gates = p.gates + r * p.gates_row;
        for_each_vector<A>(p.blocks, p.units, [&](int64_t u, int64_t valid) RG_INLINE_LAMBDA {
            A* place = gates + gate_column<A, kLstmGates>(u, kOutput);
            Vec<A> z = load(place);
            if constexpr (general) {
                if (p.products.data) {
                    const int64_t column = gate_column<A, kLstmGates>(u, kOutput);
                    z = input_at(p, r, column) + product_at(p.products, r, u, kOutput, column);
                }
            }
            if (p.peephole) {
                const Vec<A> state = load(state_at<A>(read_by_peephole, r, u));
                z = fma(load(p.peephole + gate_column<A, kLstmGates>(u, kOutput)), state, z);
            }
            Vec<A> c = load<A>(state_at<A>(c_new, r, u));
            if constexpr (general) {
                if (p.cell_norm.gamma) c = normalized(p.cell_norm, r, u, c);
                if (p.norm_carried) {
                    Vec<A> carried = c;
                    if (p.cell_zoneout.data) {
                        const Vec<A> c_prev = load(state_at<A>(p.c_prev, r, u));
                        carried = blend<A>(factor_at(p.cell_zoneout, r, u, valid), c, c_prev);
                    }
                    store(state_at<A>(p.c_next, r, u), carried);
                }
            }
            const Vec<A> o = cell.value(kOutput, z), h = o * cell.hidden(c);
            store(place, cell.kept(kOutput, z, o));
            if constexpr (general) {
                if (p.inner.data) {
                    store(state_at<A>(p.inner, r, u), h);
                    return;
                }
            }
            emit<A, general>(p.output, r, u, valid, h);
        });
    }
}

// In two passes, the states of all cells first: a processor can overlap the latency of several functions only if they
// do not depend on each other.
template <class A, class Cell, bool general>
void lstm_forward_cells(const CellForward<A>& p) {
    const Cell cell(*p.rule);
    if (p.phase != CellPhase::output) lstm_states<A, Cell, general>(p, cell);
    if (p.phase != CellPhase::state) lstm_outputs<A, Cell, general>(p, cell);
}

// Prefetches what backward_cells reads of a row. Rows are far apart, so the hardware prefetcher misses them.
template <class A, int gates>
RG_INLINE void prefetch_row(const CellBackward<A>& p, const StateArray<const A>& state, int64_t r) {
    for (int64_t block = 0; block < p.blocks; ++block) {
#pragma GCC unroll 4
        for (int k = 0; k < gates; ++k) prefetch_near(p.gates + r * p.gates_row + (gates * block + k) * kPanel<A>);
        if (state.data) prefetch_near(state_at<A>(state, r, block * kPanel<A>));
        if (p.output.dy) prefetch_near(p.output.dy + p.output.dy_offset[r] + block * kPanel<A>);
    }
}
constexpr int64_t kRowsAhead = 2;

template <class A>
RG_INLINE A* dz_at(const CellBackward<A>& p, int64_t r, int64_t u, int64_t gate) {
    return p.dz + (u / kPanel<A> * p.dz_block + gate * p.dz_gate) * p.dz_panel + r * kPanel<A> + u % kPanel<A>;
}

//   dh = dh + dy   dzo = dh psi(c) phi_o'   dc = dc + dh o psi'(c) + p_o dzo
//   dzi = dc g phi_i'   dzf = dc c- phi_f'   dzg = dc i phi_g'   dc- = dc f + p_i dzi + p_f dzf + p_g dzg
template <class A, class Cell, bool general>
void lstm_backward_cells(const CellBackward<A>& p) {
    const Cell cell(*p.rule);
    const Vec<A> one = splat(A(1)), zero = splat(A(0)), bound = splat(A(p.rule->cell_clip));
    for (int64_t r = 0; r < p.rows; ++r) {
        if (r + kRowsAhead < p.rows) prefetch_row<A, kLstmGates>(p, p.c_prev, r + kRowsAhead);
        const A* gates = p.gates + r * p.gates_row;
        for_each_vector<A>(p.blocks, p.units, [&](int64_t u, int64_t valid) RG_INLINE_LAMBDA {
            int64_t column[4];
            Vec<A> kept[4];
            A* dz[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) {
                column[k] = gate_column<A, kLstmGates>(u, Gate(k));
                kept[k] = load(gates + column[k]);
                dz[k] = p.dz + (u / kPanel<A> * 4 + k) * p.dz_panel + r * kPanel<A> + u % kPanel<A>;
            }
            const Vec<A> c_prev = load(state_at<A>(p.c_prev, r, u));
            const Vec<A> i = cell.restored(kInput, kept[kInput]), g = cell.restored(kCandidate, kept[kCandidate]);
            Vec<A> f = cell.restored(kForget, kept[kForget]);
            [[maybe_unused]] bool coupled = false;
            if constexpr (general) {
                coupled = p.rule->coupled;
                if (coupled) f = one - i;
            }
            Vec<A> dc = load<A>(state_at<A>(p.dc, r, u)), dzo = zero;
            [[maybe_unused]] Vec<A> dc_direct = zero;
            if constexpr (general) {
                // The output reads the new cell state before zoneout.
                if (p.cell_zoneout.data && p.phase != CellPhase::state) {
                    const Vec<A> k = factor_at(p.cell_zoneout, r, u, valid);
                    dc_direct = (one - k) * dc;
                    dc = k * dc;
                }
            }
            if (p.phase != CellPhase::state) {
                const Vec<A> o = cell.restored(kOutput, kept[kOutput]);
                Vec<A> c = fma(f, c_prev, i * g);
                [[maybe_unused]] Vec<A> unclamped = c;
                if constexpr (general) {
                    if (p.rule->cell_clip > 0) c = clamp_between<A>(c, -bound, bound);
                    if (p.cell_norm.gamma) {
                        if (p.c_new.data) store(state_at<A>(p.c_new, r, u), c);
                        c = normalized(p.cell_norm, r, u, c);
                    }
                }
                const Vec<A> a = cell.hidden(c);
                Vec<A> direct;
                const Vec<A> dh = collect<A, general>(p.output, r, u, valid, direct);
                if constexpr (general) {
                    if (p.output.carry.data) store(state_at<A>(p.output.carry, r, u), direct);
                }
                dzo = keep_valid<A>(dh * a * cell.slope(kOutput, kept[kOutput]), valid);
                if constexpr (general) {
                    if (p.cell_norm.gamma) {
                        // Where the norm is carried, all of dc passes it.
                        const Vec<A> dnormal = fma(dh * o, cell.hidden_slope(c, a), p.norm_carried ? dc : zero);
                        store(dz[kOutput], dzo);
                        store(state_at<A>(p.dnormal, r, u), keep_valid<A>(dnormal, valid));
                        store(state_at<A>(p.dc, r, u), p.norm_carried ? zero : dc);
                        if (p.cell_zoneout.data) store(state_at<A>(p.dc_direct, r, u), dc_direct);
                        return;
                    }
                }
                dc = fma(dh * o, cell.hidden_slope(c, a), dc);
                if (p.peephole && !p.rule->output_reads_old) dc = fma(load(p.peephole + column[kOutput]), dzo, dc);
                store(dz[kOutput], dzo);
                if (p.c_new.data) store(state_at<A>(p.c_new, r, u), c);
                if (p.dzo.data) store(state_at<A>(p.dzo, r, u), dzo);
                if constexpr (general) {
                    if (p.rule->cell_clip > 0) dc = zero_outside<A>(unclamped, bound, dc);
                }
            }
            if (p.phase == CellPhase::output) {
                store(state_at<A>(p.dc, r, u), dc);
                return;
            }
            const Vec<A> from_input = general && coupled ? g - c_prev : g;
            const Vec<A> dzi = keep_valid<A>(dc * from_input * cell.slope(kInput, kept[kInput]), valid);
            Vec<A> dzf = keep_valid<A>(dc * c_prev * cell.slope(kForget, kept[kForget]), valid);
            if constexpr (general) {
                if (coupled) dzf = zero;
            }
            const Vec<A> dzg = keep_valid<A>(dc * i * cell.slope(kCandidate, kept[kCandidate]), valid);
            dc = dc * f;
            if constexpr (general) {
                if (p.dc_direct.data) dc_direct = load<A>(state_at<A>(p.dc_direct, r, u));
                if (p.cell_zoneout.data) dc = dc + dc_direct;
            }
            if (p.peephole) {
                dc = fma(load(p.peephole + column[kInput]), dzi, dc);
                dc = fma(load(p.peephole + column[kForget]), dzf, dc);
                dc = fma(load(p.peephole + column[kCandidate]), dzg, dc);
                if (p.rule->output_reads_old) dc = fma(load(p.peephole + column[kOutput]), dzo, dc);
            }
            store(dz[kInput], dzi);
            store(dz[kForget], dzf);
            store(dz[kCandidate], dzg);
            store(state_at<A>(p.dc, r, u), dc);
        });
    }
}

}  // namespace
}  // namespace rg
