#include <cmath>

#include "rows.h"

namespace rg {
namespace {

struct BackwardScratch {
    Buffer inputs, dinputs, outputs, dz, weights, peepholes, output_peepholes, projection, diagonals, states, c_new,
        dzo, dreset, sums, dnormal, norms;
    void trim() {
        for (Buffer* b : {&inputs, &dinputs, &outputs, &dz, &weights, &peepholes, &output_peepholes, &projection,
                          &diagonals, &states, &c_new, &dzo, &dreset, &sums, &dnormal, &norms}) {
            b->trim();
        }
    }
};
BackwardScratch& my_scratch() { return kept_by_thread<BackwardScratch>(); }

// Where the gradient of a layer's output is: for (step, slot) at data + step_offset + slot_offset[slot].
template <class A>
struct LayerGradient {
    const A* data = nullptr;  // null: 0
    bool packed = false;      // only active rows, one after the other; else the caller's sequence
    int64_t step = 0;         // from one row, or one step, to the next
    Vector<int64_t> slot_offset;
};

// The gates of dz. Products with x take the gradients of all gates; of a GRU that resets after its product, products
// with the state take those of r, z and that product instead of n. The order n, r, z, product makes both contiguous.
struct DzGates {
    explicit DzGates(CellKind kind)
        : count(kind == CellKind::gru_after ? 4 : gate_count(kind)),
          by_gate(is_gru(kind)),
          after(kind == CellKind::gru_after) {}

    int count;
    bool by_gate;  // panels are ordered by gate, then block
    bool after;

    int64_t x_slot(int gate) const { return after ? (gate + 1) % 3 : gate; }
    int64_t h_slot(int gate) const { return after ? gate + 1 : gate; }
    int64_t panel(int64_t blocks, int64_t block, int64_t slot) const {
        return by_gate ? slot * blocks + block : block * count + slot;
    }
};

// One layer of a backward pass. The arrays of the two directions are consecutive.
template <class A>
class BackwardLayer {
public:
    BackwardLayer(const RecurrentBackward& call, const Rows<A>& rows, const CellKernels<A>& kernels, int64_t layer,
                  const A* base)
        : call_(call),
          rows_(rows),
          kernels_(kernels),
          shape_(call.shape),
          products_of_(call.shape),
          sizes_(call.shape, rows),
          dz_gates_(call.shape.rule.kind),
          layer_(layer),
          mask_(shape_.mask, rows),
          zoneout_(shape_.zoneout, rows),
          cell_zoneout_(shape_.cell_zoneout, rows) {
        for (int64_t d = 0; d < shape_.directions; ++d) cell_[d] = cell_cache(rows, base, cell_index(d));
    }

    // u: the layer's input, needed for its weights' gradients.
    void run(const LayerGradient<A>& dy, const StateArray<const A>& u) {
        dy_ = &dy;
        take_scratch();
        for (int64_t d = 0; d < shape_.directions; ++d) prepare(d);
        const Split split = split_sweep(rows_, call_.threads);
        const int64_t halves = two_halves() ? 2 : 1;
        // One extra step at the end propagates the gradient to the initial states. Without rows there is nothing to do,
        // however many steps there are.
        sweep(split, rows_.rows > 0 ? (shape_.steps + 1) * halves : 0, rows_.blocks,
              [&](int64_t step, const Group& group, int64_t first_block, int64_t last_block) {
                  const CellPhase phase = halves == 1     ? CellPhase::whole
                                          : step % 2 == 0 ? CellPhase::output
                                                          : CellPhase::state;
                  run_step(shape_.steps - 1 - step / halves, phase, group, first_block, last_block);
              });
        if (looks_up()) add_up();
        for (int64_t d = 0; d < shape_.directions && normalizes(); ++d) finish_norms(d);
        for (int64_t d = 0; d < shape_.directions; ++d) finish(d, u);
    }

    // du (+)= the gradient of the layer's input. After the sweep, so the buffer of its packed weights is reused.
    void input_gradients(bool accumulate, A* du, int64_t du_row) const {
        for (int64_t d = 0; d < shape_.directions; ++d) {
            const DzRows dz_rows = dz_for_input(d);
            input_gradient(products_, dz_rows.dz, dz_rows.panel, dz_rows.rows, shape_.units, rows_.layer_inputs(layer_),
                           input_matrix<const A>(arrays(d).wx), accumulate || d > 0, du, du_row, my_scratch().weights,
                           call_.threads);
        }
    }

private:
    bool has_cells() const { return shape_.rule.kind == CellKind::lstm; }
    bool full_halves() const { return shape_.peephole == Peephole::full && !shape_.rule.output_reads_old; }
    bool two_halves() const { return full_halves() || shape_.rule.kind == CellKind::gru_before; }
    bool normalizes() const { return shape_.norm != CellNorm::none; }
    bool normalizes_cells() const { return normalizes() && has_cells(); }
    bool wants_c_new() const {
        return (shape_.peephole != Peephole::none && !shape_.rule.output_reads_old) || normalizes_cells();
    }
    // Whether a part of the gradient of h passes no product, or not in full.
    bool carries() const {
        return is_gru(shape_.rule.kind) || shape_.has_zoneout || shape_.mask_kind != MaskKind::none;
    }
    // Whether products are needed for the gradients of the initial states. The gradient of c0 needs one only with full
    // peepholes.
    bool wants_initial() const { return call_.dh0.data || (call_.dc0.data && shape_.peephole == Peephole::full); }
    int64_t cell_index(int64_t d) const { return layer_ * shape_.directions + d; }
    const CellArrays& arrays(int64_t d) const { return call_.cells[cell_index(d)]; }
    bool looks_up() const { return layer_ == 0 && call_.lookup.indices; }
    int64_t cell_elements() const { return shape_.samples * rows_.state_row; }
    int64_t state_elements() const { return shape_.samples * rows_.out_row; }

    // The gates of a parameter in the order of dz, for products with x and with the state.
    template <class T>
    GateMatrix<T> input_matrix(const GateArray& array) const {
        GateMatrix<T> m = matrix<T>(array, 0, rows_.gates);
        for (int k = 0; k < rows_.gates; ++k) m.gate[dz_gates_.x_slot(k)] = static_cast<T*>(array.gate[k]);
        m.by_gate = dz_gates_.by_gate;
        return m;
    }
    template <class T>
    GateMatrix<T> state_matrix(const GateArray& array, const StateProduct& product) const {
        GateMatrix<T> m = matrix<T>(array, product.first, product.count);
        m.by_gate = dz_gates_.by_gate;
        return m;
    }

    A* dz(int64_t d) const { return dz_ + d * dz_gates_.count * rows_.blocks * rows_.panel; }
    // The gradients of the products with the state: dz, or with a norm what passes it.
    A* dz_h(int64_t d) const { return normalizes() ? dz(shape_.directions + d) : dz(d); }
    // The first panel of a product's gates, and the step to the next one in its depth.
    const A* dz_of(int64_t d, const StateProduct& product) const {
        return dz_h(d) + dz_gates_.panel(rows_.blocks, 0, dz_gates_.h_slot(product.first)) * rows_.panel;
    }
    int64_t dz_step(const StateProduct& product) const {
        const bool strided = !dz_gates_.by_gate && product.count < dz_gates_.count;
        return strided ? dz_gates_.count * rows_.panel : rows_.panel;
    }
    A* weights(int64_t d, const StateProduct& product) const {
        return weights_ + (d * rows_.gates_row + product.first * rows_.state_row) * rows_.out_row;
    }
    A* peephole(int64_t d) const { return peephole_ + d * rows_.gates_row * rows_.state_row; }
    A* output_peephole(int64_t d) const { return output_peephole_ + d * rows_.state_row * rows_.state_row; }
    A* projection(int64_t d) const { return projection_ + d * rows_.state_row * rows_.out_row; }
    // The states of one direction: dh, carry, dc, dinner, dc_direct.
    int64_t direction_elements() const { return (sizes_.copies + 1) * state_elements() + 3 * cell_elements(); }
    A* dh(int64_t d) const { return states_ + d * direction_elements(); }
    A* carry(int64_t d) const { return carries() ? dh(d) + sizes_.copies * state_elements() : nullptr; }
    A* dc(int64_t d) const { return dh(d) + (sizes_.copies + 1) * state_elements(); }
    // The gradient of the output before its projection.
    A* dinner(int64_t d) const { return dc(d) + cell_elements(); }
    A* dc_direct(int64_t d) const { return dinner(d) + cell_elements(); }
    A* dnormal(int64_t d) const { return dnormal_ + d * rows_.rows * rows_.state_row; }
    A* gamma_x(int64_t d) const { return norms_ + d * (2 * rows_.gates_row + 2 * rows_.state_row); }
    A* gamma_h(int64_t d) const { return gamma_x(d) + rows_.gates_row; }
    A* gamma_c(int64_t d) const { return gamma_h(d) + rows_.gates_row; }
    const A* statistics(int64_t d, int which) const { return cell_[d].statistics + which * rows_.rows; }
    A* c_new(int64_t d) const { return c_new_ + d * rows_.rows * rows_.state_row; }
    A* dzo(int64_t d) const { return dzo_ + d * cell_elements(); }
    A* dreset(int64_t d) const { return dreset_ + d * cell_elements(); }
    A* dprojected(int64_t d) const { return dprojected_ + d * rows_.out_blocks * rows_.panel; }

    // The dz of the products with the layer's input: all rows, or with a table their sums for each row of the table.
    struct DzRows {
        const A* dz;
        int64_t panel, rows;
    };
    DzRows dz_for_input(int64_t d) const {
        if (!looks_up()) return {dz(d), rows_.panel, rows_.rows};
        return {sums_ + d * rows_.gates * rows_.blocks * sums_panel(), sums_panel(), call_.lookup.rows};
    }
    int64_t sums_panel() const { return Rows<A>::padded(call_.lookup.rows) * kPanel<A>; }

    void add_up() {
        Vector<int64_t> indices(static_cast<size_t>(rows_.rows));
        rows_.for_each_row(0, rows_.rows, [&](int64_t row, int64_t t, int64_t sample) {
            indices[size_t(row)] = call_.lookup.indices[t * shape_.samples + sample];
        });
        const int64_t panels = rows_.gates * rows_.blocks;
        sums_ = my_scratch().sums.take<A>(shape_.directions, panels, kPanel<A>, Rows<A>::padded(call_.lookup.rows));
        for (int64_t d = 0; d < shape_.directions; ++d) {
            sum_by_index(dz(d), rows_.panel, rows_.rows, panels, indices.data(), call_.lookup.rows,
                         sums_ + d * panels * sums_panel(), sums_panel(), call_.threads);
        }
    }

    void take_scratch() {
        BackwardScratch& scratch = my_scratch();
        const int64_t directions = shape_.directions;
        const int64_t projected = shape_.projection ? rows_.out_blocks * rows_.panel : 0;
        const int64_t all_dz = (normalizes() ? 2 : 1) * dz_gates_.count * rows_.blocks * rows_.panel;
        dz_ = scratch.dz.take<A>(directions * (all_dz + projected));
        dprojected_ = dz_ + directions * all_dz;
        if (normalizes()) norms_ = scratch.norms.take<A>(directions * (2 * rows_.gates_row + 2 * rows_.state_row));
        if (normalizes_cells()) dnormal_ = scratch.dnormal.take<A>(directions * rows_.rows * rows_.state_row);
        weights_ = scratch.weights.take<A>(directions * rows_.gates_row * rows_.out_row);
        states_ = scratch.states.take<A>(directions * direction_elements());
        if (wants_c_new()) c_new_ = scratch.c_new.take<A>(directions * rows_.rows * rows_.state_row);
        if (shape_.peephole == Peephole::diagonal) {
            peephole_ = scratch.diagonals.take<A>(directions * rows_.gates_row);
        } else if (shape_.peephole == Peephole::full) {
            peephole_ = scratch.peepholes.take<A>(directions * rows_.gates_row * rows_.state_row);
        }
        if (full_halves()) {
            output_peephole_ = scratch.output_peepholes.take<A>(directions * rows_.state_row * rows_.state_row);
            dzo_ = scratch.dzo.take<A>(directions * cell_elements());
        }
        if (shape_.rule.kind == CellKind::gru_before) dreset_ = scratch.dreset.take<A>(directions * cell_elements());
        if (shape_.projection) {
            projection_ = scratch.projection.take<A>(directions * rows_.state_row * rows_.out_row);
        }
    }

    void prepare(int64_t d) {
        const int64_t units = shape_.units;
        for (const StateProduct& product : products_of_) {
            pack_backward(products_, state_matrix<const A>(arrays(d).wh, product), units, shape_.outputs(),
                          weights(d, product), product.count * rows_.state_row * kPanel<A>, call_.threads);
        }
        if (shape_.peephole == Peephole::diagonal) {
            pack_vector(matrix<const A>(arrays(d).peephole, 0, 4), units, peephole_ + d * rows_.gates_row);
        } else if (shape_.peephole == Peephole::full) {
            GateMatrix<const A> all = matrix<const A>(arrays(d).peephole, 0, 4);
            if (full_halves()) {
                all.gate[3] = nullptr;
                // The output gate alone, packed as if it were the only gate.
                pack_backward(products_, matrix<const A>(arrays(d).peephole, 3, 1), units, units, output_peephole(d),
                              rows_.state_row * kPanel<A>, call_.threads);
            }
            pack_backward(products_, all, units, units, peephole(d), rows_.gates_row * kPanel<A>, call_.threads);
        }
        if (shape_.projection) {
            pack_backward(products_, matrix<const A>(arrays(d).projection, 0, 1), shape_.projection, units,
                          projection(d), rows_.out_row * kPanel<A>, call_.threads);
        }
        if (normalizes()) {
            pack_vector(matrix<const A>(arrays(d).gamma_x, 0, rows_.gates), units, gamma_x(d));
            pack_vector(matrix<const A>(arrays(d).gamma_h, 0, rows_.gates), units, gamma_h(d));
            pack_vector(matrix<const A>(arrays(d).gamma_c, 0, 1), units, gamma_c(d));
            pack_vector(matrix<const A>(arrays(d).beta_c, 0, 1), units, gamma_c(d) + rows_.state_row);
        }
        if (carries()) std::fill(dh(d), carry(d), A(0));
        for (int64_t slot = 0; slot < shape_.samples; ++slot) {
            load_state(call_.dhn, d, slot, shape_.outputs(), rows_.out_row, carries() ? carry(d) : dh(d));
            if (has_cells()) load_state(call_.dcn, d, slot, units, rows_.state_row, dc(d));
        }
    }

    void load_state(const States& states, int64_t d, int64_t slot, int64_t units, int64_t width, A* to) const {
        to += slot * width;
        std::fill(to, to + width, A(0));
        if (!states.data) return;
        const A* from =
            static_cast<const A*>(states.data) + cell_index(d) * states.cell + rows_.sample(slot) * states.sample;
        std::copy(from, from + units, to);
    }

    // c[rows][count blocks] = a * the panels from `block` on, added to c if `add`; c has rows of `width` columns
    void multiply(const StateArray<const A>& a, int64_t depth, int64_t rows, const A* panels, int64_t block,
                  int64_t count, bool add, A* c, int64_t width) const {
        Product<A> product = {};
        product.a = a.data;
        product.a_row = a.row;
        product.a_step = 1;
        product.a_group = a.panel;
        product.rows = rows;
        product.depth = depth;
        product.cols = count * kPanel<A>;
        product.panel_stride = depth * kPanel<A>;
        product.panels = panels + block * product.panel_stride;
        product.c = c + block * kPanel<A>;
        product.c_row = width;
        product.base = add ? product.c : nullptr;
        product.base_row = width;
        products_.product(product);
    }

    // Step p of the forward pass, after the gradients that step p + 1 propagates back to it.
    void run_step(int64_t p, CellPhase phase, const Group& group, int64_t first_block, int64_t last_block) {
        const int64_t d = group.direction, slot = group.first_slot;
        const auto rows_at = [&](int64_t step) {
            return std::max<int64_t>(0, std::min(rows_.active_at(d, step), group.last_slot) - slot);
        };
        const int64_t rows = rows_at(p);
        // For slots that begin with step p + 1, these are the gradients of their initial states.
        const int64_t begun = wants_initial() ? shape_.samples : rows_.begun(d, p + 1);
        const int64_t later_rows = std::min(rows_at(p + 1), std::max<int64_t>(0, begun - slot));
        const int64_t together = blocks_together(products_, std::max(rows, later_rows));
        const auto visit = [&](int64_t block, int64_t count) {
            if (phase != CellPhase::state && later_rows > 0) { propagate(p + 1, d, slot, later_rows, block, count); }
            if (phase != CellPhase::state) clear_reset(p + 1, d, slot, rows_at(p + 1), block, count);
            if (rows == 0) return;
            if (phase == CellPhase::state && has_cells()) {
                multiply({dzo(d) + slot * rows_.state_row, rows_.state_row, kPanel<A>}, rows_.state_row, rows,
                         output_peephole(d), block, count, true, dc(d) + slot * rows_.state_row, rows_.state_row);
            } else if (phase == CellPhase::state) {
                const StateProduct& product = products_of_.product[products_of_.count - 1];
                const A* from = dz_of(d, product) + (rows_.first(rows_.time(d, p)) + slot) * kPanel<A>;
                multiply({from, kPanel<A>, rows_.panel}, rows_.state_row, rows, weights(d, product), block, count,
                         false, dreset(d) + slot * rows_.state_row, rows_.state_row);
            }
            if (!shape_.projection && !normalizes()) cells(p, phase, d, slot, rows, later_rows, block, count);
        };
        for_block_groups(first_block, last_block, together, p % 2 == 1, visit);
        if (normalizes() && rows > 0) normalized_cells(p, d, slot, rows, later_rows);
        if (!shape_.projection || rows == 0) return;
        collect(p, d, slot, rows, later_rows);
        for_block_groups(first_block, last_block, together, p % 2 == 1,
                         [&](int64_t block, int64_t count) { cells(p, phase, d, slot, rows, 0, block, count); });
    }

    // The products of step p's dz with the weights, for the gradients of the states before it.
    void propagate(int64_t p, int64_t d, int64_t slot, int64_t rows, int64_t block, int64_t count) {
        const int64_t row = rows_.first(rows_.time(d, p)) + slot;
        // With a projection, the state has fewer blocks than the cells; the first group of blocks takes them all.
        const int64_t first = block, blocks = shape_.projection ? (block == 0 ? rows_.out_blocks : 0) : count;
        for (const StateProduct& product : products_of_) {
            if (product.reset || blocks == 0) continue;
            const StateArray<const A> a = {dz_of(d, product) + row * kPanel<A>, kPanel<A>, dz_step(product)};
            multiply(a, product.count * rows_.state_row, rows, weights(d, product), first, blocks, false,
                     dh(d) + product.copy * state_elements() + slot * rows_.out_row, rows_.out_row);
        }
        if (shape_.peephole == Peephole::full) {
            multiply({dz(d) + row * kPanel<A>, kPanel<A>, rows_.panel}, rows_.gates_row, rows, peephole(d), block,
                     count, true, dc(d) + slot * rows_.state_row, rows_.state_row);
        }
    }

    // No gradient passes a reset before step p.
    void clear_reset(int64_t p, int64_t d, int64_t slot, int64_t rows, int64_t block, int64_t count) {
        if (!shape_.reset || rows == 0) return;
        const uint8_t* reset = shape_.reset + rows_.time(d, p) * shape_.samples;
        const auto clear = [&](A* states, int64_t width, int64_t row) {
            const int64_t first = shape_.projection && width == rows_.out_row ? 0 : block * kPanel<A>;
            const int64_t size = shape_.projection && width == rows_.out_row ? width : count * kPanel<A>;
            std::fill_n(states + (slot + row) * width + first, size, A(0));
        };
        for (int64_t r = 0; r < rows; ++r) {
            if (!reset[rows_.sample(slot + r)]) continue;
            for (int copy = 0; copy < sizes_.copies; ++copy) clear(dh(d) + copy * state_elements(), rows_.out_row, r);
            if (carries()) clear(carry(d), rows_.out_row, r);
            if (has_cells()) clear(dc(d), rows_.state_row, r);
        }
    }

    // The gradient of a step's hidden state, from `block` on. later_rows: those that the later step has propagated to.
    OutputGradient<A> output_gradient(int64_t p, int64_t d, int64_t slot, int64_t later_rows, int64_t block) const {
        const int64_t t = rows_.time(d, p), unit = block * kPanel<A>, cell = cell_index(d);
        const int64_t state = slot * rows_.out_row + unit;
        OutputGradient<A> o = {};
        if (dy_->data) {
            o.dy = dy_->data + (dy_->packed ? rows_.first(t) : t) * dy_->step + d * shape_.outputs() + unit;
            o.dy_offset = dy_->slot_offset.data() + slot;
        }
        o.dh = {dh(d) + state, rows_.out_row, kPanel<A>};
        // The others have dh = 0, so their mask does not matter; without a later step there is none.
        if (shape_.mask_kind != MaskKind::none && later_rows > 0) {
            o.copies = sizes_.copies;
            o.dh_copy = state_elements();
            o.mask_copy = shape_.mask.gate;
            o.mask = mask_.at(cell, rows_.time(d, p + 1), unit, slot);
        }
        if (carries()) o.carry = {carry(d) + state, rows_.out_row, kPanel<A>};
        o.zoneout = zoneout_.at(cell, t, unit, slot);
        return o;
    }

    // The cells of a step with norms, and the gradients that pass these.
    void normalized_cells(int64_t p, int64_t d, int64_t slot, int64_t rows, int64_t later_rows) const {
        const int64_t row = rows_.first(rows_.time(d, p)) + slot;
        if (has_cells()) {
            cells(p, CellPhase::output, d, slot, rows, later_rows, 0, rows_.blocks);
            NormRowsGradient<A> g = {};
            g.rows = rows;
            g.gates = 1;
            g.units = shape_.units;
            g.x = c_new(d) + row * rows_.state_row;
            g.x_row = g.row = rows_.state_row;
            g.center = statistics(d, 4) + row;
            g.rstd = statistics(d, 5) + row;
            g.gamma = gamma_c(d);
            // The rows of all steps are kept, for the gradients of the parameters; dc has those of one.
            g.dy = dnormal(d) + row * rows_.state_row;
            g.dx = dc(d) + slot * rows_.state_row;
            g.panel = kPanel<A>;
            g.block = 1;
            g.add = true;
            kernels_.norm_rows_gradient(g);
            cells(p, CellPhase::state, d, slot, rows, later_rows, 0, rows_.blocks);
        } else {
            cells(p, CellPhase::whole, d, slot, rows, later_rows, 0, rows_.blocks);
        }
        norm_gradient(d, row, rows, true);
    }

    // The gradients of the products with the state or with x, for a range of rows; those with x overwrite dz.
    void norm_gradient(int64_t d, int64_t row, int64_t rows, bool of_state) const {
        NormRowsGradient<A> g = {};
        g.rows = rows;
        g.gates = rows_.gates;
        g.units = shape_.units;
        g.x = (of_state ? cell_[d].h_products : cell_[d].x_products) + row * rows_.gates_row;
        g.x_row = rows_.gates_row;
        g.center = statistics(d, of_state ? 2 : 0) + row;
        g.rstd = statistics(d, of_state ? 3 : 1) + row;
        g.gamma = of_state ? gamma_h(d) : gamma_x(d);
        g.dy = dz(d) + row * kPanel<A>;
        g.dx = (of_state ? dz_h(d) : dz(d)) + row * kPanel<A>;
        g.row = kPanel<A>;
        g.panel = rows_.panel;
        g.block = dz_gates_.panel(rows_.blocks, 1, 0);
        for (int k = 0; k < rows_.gates; ++k) {
            g.slot[k] = dz_gates_.panel(rows_.blocks, 0, of_state ? dz_gates_.h_slot(k) : dz_gates_.x_slot(k));
        }
        kernels_.norm_rows_gradient(g);
    }

    // After the sweep: the gradients of biases and norms, from dz, which then becomes that of the products with x.
    void finish_norms(int64_t d) const {
        if (call_.dcells) {
            const CellArrays& gradients = call_.dcells[cell_index(d)];
            vector_gradient(d, gradients.b, false, nullptr);
            vector_gradient(d, gradients.bh, true, nullptr);
            gamma_gradient(d, gradients.gamma_x, false);
            gamma_gradient(d, gradients.gamma_h, true);
            if (has_cells()) cell_norm_gradients(d, gradients);
        }
        const Workers workers(cost::kElement * double(rows_.rows * rows_.gates_row), call_.threads);
        workers.ranges(rows_.rows, [&](int64_t first, int64_t last) { norm_gradient(d, first, last - first, false); });
    }
    void gamma_gradient(int64_t d, const GateArray& gradient, bool of_state) const {
        const GateMatrix<A> to = matrix<A>(gradient, 0, rows_.gates);
        const A* products = of_state ? cell_[d].h_products : cell_[d].x_products;
        const A *center = statistics(d, of_state ? 2 : 0), *rstd = statistics(d, of_state ? 3 : 1);
        reduce_rows(to, [&](int64_t block, int k, double* sums) {
            const int64_t slot = of_state ? dz_gates_.h_slot(k) : dz_gates_.x_slot(k);
            const int64_t column = (block * rows_.gates + k) * kPanel<A>;
            kernels_.norm_sums(dz(d) + dz_gates_.panel(rows_.blocks, block, slot) * rows_.panel, kPanel<A>,
                               products + column, rows_.gates_row, center, rstd, rows_.rows, sums);
        });
    }
    void cell_norm_gradients(int64_t d, const CellArrays& gradients) const {
        const auto column = [&](int64_t block) { return dnormal(d) + block * kPanel<A>; };
        reduce_rows(matrix<A>(gradients.gamma_c, 0, 1), [&](int64_t block, int, double* sums) {
            kernels_.norm_sums(column(block), rows_.state_row, c_new(d) + block * kPanel<A>, rows_.state_row,
                               statistics(d, 4), statistics(d, 5), rows_.rows, sums);
        });
        reduce_rows(matrix<A>(gradients.beta_c, 0, 1), [&](int64_t block, int, double* sums) {
            for (int64_t r = 0; r < rows_.rows; ++r) {
                for (int64_t u = 0; u < kPanel<A>; ++u) sums[u] += double(column(block)[r * rows_.state_row + u]);
            }
        });
    }
    // The gradient of a vector of units of every gate: sum(block, gate, sums) adds up a panel of it.
    template <class Sum>
    void reduce_rows(const GateMatrix<A>& to, const Sum& sum) const {
        if (to.empty()) return;
        const Workers workers(cost::kCopy * double(rows_.rows * to.count * rows_.state_row), call_.threads);
        workers.each(rows_.blocks, [&](int64_t block) {
            const int64_t unit = block * kPanel<A>;
            for (int k = 0; k < to.count; ++k) {
                if (!to.gate[k]) continue;
                double sums[kPanel<A>] = {};
                sum(block, k, sums);
                for (int64_t u = unit; u < std::min(unit + kPanel<A>, shape_.units); ++u) {
                    A& place = to.gate[k][u * to.row_stride];
                    place = A((call_.accumulate ? double(place) : 0.0) + sums[u - unit]);
                }
            }
        });
    }

    // Projected: the gradient of the hidden state, and from it the gradient of what was projected.
    void collect(int64_t p, int64_t d, int64_t slot, int64_t rows, int64_t later_rows) const {
        const int64_t row = rows_.first(rows_.time(d, p)) + slot;
        CellCollect<A> c = {};
        c.rows = rows;
        c.blocks = rows_.out_blocks;
        c.units = shape_.projection;
        c.output = output_gradient(p, d, slot, later_rows, 0);
        c.dh = {dprojected(d) + row * kPanel<A>, kPanel<A>, rows_.panel};
        kernels_.collect_gradients(c);
        multiply({c.dh.data, c.dh.row, c.dh.panel}, rows_.out_row, rows, projection(d), 0, rows_.blocks, false,
                 dinner(d) + slot * rows_.state_row, rows_.state_row);
    }

    void cells(int64_t p, CellPhase phase, int64_t d, int64_t slot, int64_t rows, int64_t later_rows, int64_t block,
               int64_t count) const {
        const int64_t t = rows_.time(d, p), row = rows_.first(t) + slot, unit = block * kPanel<A>;
        const int64_t state = slot * rows_.state_row + unit;
        const auto cached = [&](const A* array) -> StateArray<const A> {
            if (!array) return {};
            return {array + block * rows_.panel + row * kPanel<A>, kPanel<A>, rows_.panel};
        };
        CellBackward<A> b = {};
        b.rule = &shape_.rule;
        b.phase = phase;
        b.rows = rows;
        b.blocks = count;
        b.units = std::min(count * kPanel<A>, shape_.units - unit);
        b.gates_row = rows_.gates_row;
        b.gates = cell_[d].gates + row * rows_.gates_row + rows_.gates * unit;
        if (shape_.projection) {
            b.output.dh = {dinner(d) + state, rows_.state_row, kPanel<A>};
        } else {
            b.output = output_gradient(p, d, slot, later_rows, block);
        }
        b.dz = dz(d) + dz_gates_.panel(rows_.blocks, block, 0) * rows_.panel + row * kPanel<A>;
        b.dz_panel = rows_.panel;
        b.dz_block = dz_gates_.panel(rows_.blocks, 1, 0);
        b.dz_gate = dz_gates_.panel(rows_.blocks, 0, 1);
        if (has_cells()) {
            b.c_prev = cached(cell_[d].c_prev);
            b.dc = {dc(d) + state, rows_.state_row, kPanel<A>};
            b.cell_zoneout = cell_zoneout_.at(cell_index(d), t, unit, slot);
        }
        if (shape_.peephole == Peephole::diagonal) b.peephole = peephole_ + d * rows_.gates_row + 4 * unit;
        if (c_new_) b.c_new = {c_new(d) + row * rows_.state_row + unit, rows_.state_row, kPanel<A>};
        if (dzo_) b.dzo = {dzo(d) + state, rows_.state_row, kPanel<A>};
        if (normalizes_cells()) {
            b.cell_norm = {statistics(d, 4) + row, statistics(d, 5) + row, gamma_c(d) + unit,
                           gamma_c(d) + rows_.state_row + unit};
            b.norm_carried = shape_.norm == CellNorm::cell;
            b.dnormal = {dnormal(d) + row * rows_.state_row + unit, rows_.state_row, kPanel<A>};
            if (shape_.cell_zoneout.data) b.dc_direct = {dc_direct(d) + state, rows_.state_row, kPanel<A>};
        }
        if (is_gru(shape_.rule.kind)) {
            b.h_prev = cached(cell_[d].h_own ? cell_[d].h_own : cell_[d].h_prev);
            b.inner = cached(cell_[d].inner);
        }
        if (dreset_) {
            const int last = sizes_.copies - 1;
            b.reset_input = cached(cell_[d].h_prev + last * rows_.out_blocks * rows_.panel);
            b.dreset = {dreset(d) + state, rows_.state_row, kPanel<A>};
            b.reset_mask = mask_.at(cell_index(d), t, unit, slot);
            if (b.reset_mask.data) b.reset_mask.data += last * shape_.mask.gate;
        }
        kernels_.backward_cells(b);
    }

    void finish(int64_t d, const StateArray<const A>& u) const {
        store_hidden(d);
        if (has_cells() && call_.dc0.data) store_states(call_.dc0, d, shape_.units, rows_.state_row, dc(d));
        if (!call_.dcells) return;
        const CellArrays& gradients = call_.dcells[cell_index(d)];
        const auto cached = [&](const A* array) -> StateArray<const A> { return {array, kPanel<A>, rows_.panel}; };
        weights_gradient(dz_for_input(d), input_matrix<A>(gradients.wx), u, shape_.units, rows_.layer_inputs(layer_));
        for (const StateProduct& product : products_of_) {
            const A* states =
                product.reset ? cell_[d].inner : cell_[d].h_prev + product.copy * rows_.out_blocks * rows_.panel;
            state_gradient(d, dz_of(d, product), dz_step(product), state_matrix<A>(gradients.wh, product),
                           cached(states), shape_.outputs());
        }
        if (!normalizes()) {
            vector_gradient(d, gradients.b, false, nullptr);
            vector_gradient(d, gradients.bh, true, nullptr);
        }
        if (shape_.projection) {
            weights_gradient({dprojected(d), rows_.panel, rows_.rows}, matrix<A>(gradients.projection, 0, 1),
                             cached(cell_[d].inner), shape_.projection, shape_.units);
        }
        const StateArray<const A> c_new_rows = {c_new_ ? c_new(d) : nullptr, rows_.state_row, kPanel<A>};
        const StateArray<const A> c_prev = cached(cell_[d].c_prev), output_state = wants_c_new() ? c_new_rows : c_prev;
        if (shape_.peephole == Peephole::diagonal) {
            const StateArray<const A> states[4] = {c_prev, c_prev, c_prev, output_state};
            vector_gradient(d, gradients.peephole, false, states);
        } else if (shape_.peephole == Peephole::full) {
            GateMatrix<A> first = matrix<A>(gradients.peephole, 0, 4), last = first;
            first.gate[3] = nullptr;
            for (int k = 0; k < 3; ++k) last.gate[k] = nullptr;
            state_gradient(d, dz(d), rows_.panel, first, c_prev, shape_.units);
            state_gradient(d, dz(d), rows_.panel, last, output_state, shape_.units);
        }
    }

    void weights_gradient(const DzRows& dz_rows, const GateMatrix<A>& dw, const StateArray<const A>& u, int64_t units,
                          int64_t inputs) const {
        if (dw.empty()) return;
        weight_gradient(products_, dz_rows.dz, dz_rows.panel, dz_rows.rows, units, u, inputs, call_.accumulate, dw,
                        call_.threads);
    }

    // The same for weights that multiply states. If all states of the first step are 0, as is common, its rows are
    // skipped.
    void state_gradient(int64_t d, const A* dz, int64_t dz_panel, const GateMatrix<A>& gradient,
                        const StateArray<const A>& states, int64_t width) const {
        if (gradient.empty()) return;
        const int64_t count = rows_.active_at(d, 0), first = d ? rows_.rows - count : 0;
        bool zero = true;
        for (int64_t block = 0; block < ceil_div(width, kPanel<A>) && zero; ++block) {
            for (int64_t row = first; row < first + count && zero; ++row) {
                const A* state = states.data + block * states.panel + row * states.row;
                zero = std::all_of(state, state + kPanel<A>, [](A value) { return value == 0; });
            }
        }
        const int64_t left_out = zero ? count : 0, from = d ? 0 : left_out;
        weights_gradient({dz + from * kPanel<A>, dz_panel, rows_.rows - left_out}, gradient,
                         {states.data + from * states.row, states.row, states.panel}, shape_.units, width);
    }

    // Sums over all rows of dz, or of dz times a state for each gate.
    void vector_gradient(int64_t d, const GateArray& gradient, bool of_state, const StateArray<const A>* states) const {
        reduce_rows(matrix<A>(gradient, 0, rows_.gates), [&](int64_t block, int k, double* sums) {
            const StateArray<const A> state = states ? states[k] : StateArray<const A>();
            const int64_t slot = of_state ? dz_gates_.h_slot(k) : dz_gates_.x_slot(k);
            products_.panel_sums(dz(d) + dz_gates_.panel(rows_.blocks, block, slot) * rows_.panel,
                                 states ? state.data + block * state.panel : nullptr, state.row, rows_.rows, sums);
        });
    }

    void store_hidden(int64_t d) const {
        if (!call_.dh0.data) return;
        for (int64_t slot = 0; slot < shape_.samples && carries(); ++slot) {
            A* const sum = dh(d) + slot * rows_.out_row;
            const A* const direct = carry(d) + slot * rows_.out_row;
            // The mask of the slot's first step. Without a step dh is 0.
            const int64_t p = shape_.mask_kind == MaskKind::none ? -1 : first_step(d, slot);
            const RowFactor<A> mask = p < 0 ? RowFactor<A>() : mask_.at(cell_index(d), rows_.time(d, p), 0, slot);
            for (int64_t u = 0; u < shape_.outputs(); ++u) {
                A total = mask.data ? A(0) : sum[u];
                for (int copy = 0; copy < sizes_.copies && mask.data; ++copy) {
                    const A factor = mask.data[mask.offset[0] + copy * shape_.mask.gate + u];
                    total = std::fma(factor, sum[copy * state_elements() + u], total);  // as the kernels do
                }
                sum[u] = total + direct[u];
            }
        }
        store_states(call_.dh0, d, shape_.outputs(), rows_.out_row, dh(d));
    }
    // A slot's first active step of a direction; -1: none.
    int64_t first_step(int64_t d, int64_t slot) const {
        for (int64_t p = 0; p < shape_.steps; ++p) {
            if (rows_.active_at(d, p) > slot) return p;
        }
        return -1;
    }

    void store_states(const States& states, int64_t d, int64_t units, int64_t width, const A* from) const {
        for (int64_t slot = 0; slot < shape_.samples; ++slot) {
            A* to = static_cast<A*>(states.data) + cell_index(d) * states.cell + rows_.sample(slot) * states.sample;
            add_or_copy(from + slot * width, units, call_.accumulate, to);
        }
    }

    const RecurrentBackward& call_;
    const Rows<A>& rows_;
    const CellKernels<A>& kernels_;
    const ProductKernels<A>& products_ = kernel_table().product.of<A>();
    const RecurrentShape& shape_;
    const StateProducts products_of_;
    const CellSizes<A> sizes_;
    const DzGates dz_gates_;
    const int64_t layer_;
    const SlotFactor<A> mask_, zoneout_, cell_zoneout_;
    const LayerGradient<A>* dy_ = nullptr;
    A *dz_ = nullptr, *weights_ = nullptr, *peephole_ = nullptr, *output_peephole_ = nullptr, *projection_ = nullptr,
      *states_ = nullptr, *c_new_ = nullptr, *dzo_ = nullptr, *dreset_ = nullptr, *dprojected_ = nullptr,
      *sums_ = nullptr, *dnormal_ = nullptr, *norms_ = nullptr;
    CellCache<const A> cell_[2] = {};
};

// Writes dx for active rows, and 0 for the others.
template <class A>
void scatter_rows(const Rows<A>& rows, const A* from, const RecurrentBackward& call) {
    const RecurrentShape& s = rows.shape;
    A* dx = static_cast<A*>(call.dx.data);
    rows.parallel_rows(s.inputs, call.threads, [&](int64_t row, int64_t t, int64_t sample) {
        add_or_copy(from + row * s.inputs, s.inputs, call.accumulate, dx + t * call.dx.step + sample * call.dx.sample);
    });
    for (int64_t t = 0; s.active && !call.accumulate && t < s.steps; ++t) {
        for (int64_t slot = s.active[t]; slot < s.samples; ++slot) {
            A* to = dx + t * call.dx.step + rows.sample(slot) * call.dx.sample;
            std::fill(to, to + s.inputs, A(0));
        }
    }
}

template <class A>
void backward(const RecurrentBackward& call) {
    const RecurrentShape& s = call.shape;
    const Rows<A> rows(s);
    const CellKernels<A>& kernels = kernel_table().cell.of<A>();
    Buffer buffer;
    const A* base = cache_data<A>(s, call.cache, buffer);
    BackwardScratch& scratch = my_scratch();

    LayerGradient<A> dy;
    dy.data = static_cast<const A*>(call.dy.data);
    dy.step = call.dy.step;
    dy.slot_offset = rows.offsets(call.dy.sample);
    for (int64_t layer = s.layers - 1; layer >= 0; --layer) {
        BackwardLayer<A> pass(call, rows, kernels, layer, base);
        if (layer > 0) {
            pass.run(dy, {cached_input(rows, base, layer), rows.above_row, rows.above_panel});
            // The gradient of this layer's input overwrites the gradient of its output, which is no longer needed.
            const int64_t below_row = ceil_div(rows.output, kPanel<A>) * kPanel<A>;
            A* below = scratch.outputs.take<A>(rows.rows * below_row);
            pass.input_gradients(false, below, below_row);
            if (s.dropout > 0) drop_rows(rows, kernels, layer - 1, {below, below_row, kPanel<A>}, call.threads);
            dy.data = below;
            dy.packed = true;
            dy.step = below_row;
            for (int64_t slot = 0; slot < s.samples; ++slot) dy.slot_offset[size_t(slot)] = slot * below_row;
            continue;
        }
        StateArray<const A> x = {static_cast<const A*>(call.x.data), call.x.step, kPanel<A>};
        if (call.dcells && !call.lookup.indices) {
            x = gather_panels(rows, call.x, s.inputs, scratch.inputs, call.threads);
        }
        pass.run(dy, x);
        if (!call.dx.data) continue;
        const std::optional<int64_t> dx_row = call.lookup.indices ? call.dx.step : even_row_stride(rows, call.dx);
        if (dx_row) {
            pass.input_gradients(call.accumulate, static_cast<A*>(call.dx.data), *dx_row);
        } else {
            A* dx = scratch.dinputs.take<A>(rows.rows * s.inputs);
            pass.input_gradients(false, dx, s.inputs);
            scatter_rows(rows, dx, call);
        }
    }
    scratch.trim();
}

}  // namespace

void recurrent_backward(const RecurrentBackward& call) {
    if (call.shape.dtype == DType::f64) {
        backward<double>(call);
    } else {
        backward<float>(call);
    }
}

}  // namespace rg
