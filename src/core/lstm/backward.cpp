#include "rows.h"

namespace rg {
namespace {

struct BackwardScratch {
    Buffer inputs, dinputs, outputs, dz, weights, peepholes, output_peepholes, diagonals, states, c_new, dzo, sums;
    void trim() {
        for (Buffer* b : {&inputs, &dinputs, &outputs, &dz, &weights, &peepholes, &output_peepholes, &diagonals,
                          &states, &c_new, &dzo, &sums}) {
            b->trim();
        }
    }
};
BackwardScratch& my_scratch() { return kept_by_thread<BackwardScratch>(); }

// Where the gradient of a layer's output is: for (step, slot) at data + step_offset + slot_offset[slot].
template <class A>
struct OutputGradient {
    const A* data = nullptr;  // null: 0
    bool packed = false;      // only active rows, one after the other; else the caller's sequence
    int64_t step = 0;         // from one row, or one step, to the next
    Vector<int64_t> slot_offset;
};

// One layer of a backward pass. The arrays of the two directions are consecutive.
template <class A>
class BackwardLayer {
public:
    BackwardLayer(const LstmBackward& call, const Rows<A>& rows, const LstmKernels<A>& kernels, int64_t layer,
                  const A* base)
        : call_(call), rows_(rows), kernels_(kernels), shape_(call.shape), layer_(layer) {
        for (int64_t d = 0; d < shape_.directions; ++d) cell_[d] = cell_cache(rows, base, cell_index(d));
    }

    // u: the layer's input, needed for its weights' gradients.
    void run(const OutputGradient<A>& dy, const StateArray<const A>& u) {
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
        for (int64_t d = 0; d < shape_.directions; ++d) finish(d, u);
    }

    // du (+)= the gradient of the layer's input. After the sweep, so the buffer of its packed weights is reused.
    void input_gradients(bool accumulate, A* du, int64_t du_row) const {
        for (int64_t d = 0; d < shape_.directions; ++d) {
            const DzRows dz_rows = dz_for_input(d);
            input_gradient(products_, dz_rows.dz, dz_rows.panel, dz_rows.rows, shape_.units, rows_.layer_inputs(layer_),
                           matrix<const A>(arrays(d).wx), accumulate || d > 0, du, du_row, my_scratch().weights,
                           call_.threads);
        }
    }

private:
    bool two_halves() const { return shape_.peephole == Peephole::full && !shape_.output_reads_old; }
    bool wants_c_new() const { return shape_.peephole != Peephole::none && !shape_.output_reads_old; }
    // Whether products are needed for the gradients of the initial states. The gradient of c0 needs one only with full
    // peepholes.
    bool wants_initial() const { return call_.dh0.data || (call_.dc0.data && shape_.peephole == Peephole::full); }
    int64_t cell_index(int64_t d) const { return layer_ * shape_.directions + d; }
    const CellArrays& arrays(int64_t d) const { return call_.cells[cell_index(d)]; }
    bool looks_up() const { return layer_ == 0 && call_.lookup.indices; }
    int64_t state_elements() const { return shape_.samples * rows_.state_row; }

    A* dz(int64_t d) const { return dz_ + d * 4 * rows_.blocks * rows_.panel; }
    A* weights(int64_t d) const { return weights_ + d * rows_.gates_row * rows_.state_row; }
    A* peephole(int64_t d) const { return peephole_ + d * rows_.gates_row * rows_.state_row; }
    A* output_peephole(int64_t d) const { return output_peephole_ + d * rows_.state_row * rows_.state_row; }
    A* dh(int64_t d) const { return states_ + 2 * d * state_elements(); }
    A* dc(int64_t d) const { return dh(d) + state_elements(); }
    A* c_new(int64_t d) const { return c_new_ + d * rows_.rows * rows_.state_row; }
    A* dzo(int64_t d) const { return dzo_ + d * state_elements(); }

    // The dz of the products with the layer's input: all rows, or with a table their sums for each row of the table.
    struct DzRows {
        const A* dz;
        int64_t panel, rows;
    };
    DzRows dz_for_input(int64_t d) const {
        if (!looks_up()) return {dz(d), rows_.panel, rows_.rows};
        return {sums_ + d * 4 * rows_.blocks * sums_panel(), sums_panel(), call_.lookup.rows};
    }
    int64_t sums_panel() const { return Rows<A>::padded(call_.lookup.rows) * kPanel<A>; }

    void add_up() {
        Vector<int64_t> indices(static_cast<size_t>(rows_.rows));
        rows_.for_each_row(0, rows_.rows, [&](int64_t row, int64_t t, int64_t sample) {
            indices[size_t(row)] = call_.lookup.indices[t * shape_.samples + sample];
        });
        const int64_t panels = 4 * rows_.blocks;
        sums_ = my_scratch().sums.take<A>(shape_.directions, panels, kPanel<A>, Rows<A>::padded(call_.lookup.rows));
        for (int64_t d = 0; d < shape_.directions; ++d) {
            sum_by_index(dz(d), rows_.panel, rows_.rows, panels, indices.data(), call_.lookup.rows,
                         sums_ + d * panels * sums_panel(), sums_panel(), call_.threads);
        }
    }

    void take_scratch() {
        BackwardScratch& scratch = my_scratch();
        const int64_t directions = shape_.directions;
        dz_ = scratch.dz.take<A>(directions * 4 * rows_.blocks * rows_.panel);
        weights_ = scratch.weights.take<A>(directions * rows_.gates_row * rows_.state_row);
        states_ = scratch.states.take<A>(directions * 2 * state_elements());
        if (wants_c_new()) c_new_ = scratch.c_new.take<A>(directions * rows_.rows * rows_.state_row);
        if (shape_.peephole == Peephole::diagonal) {
            peephole_ = scratch.diagonals.take<A>(directions * rows_.gates_row);
        } else if (shape_.peephole == Peephole::full) {
            peephole_ = scratch.peepholes.take<A>(directions * rows_.gates_row * rows_.state_row);
        }
        if (two_halves()) {
            output_peephole_ = scratch.output_peepholes.take<A>(directions * rows_.state_row * rows_.state_row);
            dzo_ = scratch.dzo.take<A>(directions * state_elements());
        }
    }

    void prepare(int64_t d) {
        const int64_t units = shape_.units;
        const int64_t panel = rows_.gates_row * kPanel<A>;
        pack_backward(products_, matrix<const A>(arrays(d).wh), units, units, weights(d), panel, call_.threads);
        if (shape_.peephole == Peephole::diagonal) {
            pack_vector(arrays(d).peephole, units, peephole_ + d * rows_.gates_row);
        } else if (shape_.peephole == Peephole::full) {
            GateMatrix<const A> all = matrix<const A>(arrays(d).peephole), output = all;
            if (two_halves()) {
                all.gate[3] = nullptr;
                // The output gate alone, packed as if it were the only gate.
                const A* w = output.gate[3];
                for (int64_t column = 0; column < rows_.blocks; ++column) {
                    A* to = output_peephole(d) + column * rows_.state_row * kPanel<A>;
                    const int64_t first = column * kPanel<A>, there = w ? units : 0;
                    if (w) {
                        products_.pack_rows(w + first * output.col_stride, output.row_stride, output.col_stride,
                                            std::min(kPanel<A>, units - first), units, to);
                    }
                    std::fill(to + there * kPanel<A>, to + rows_.state_row * kPanel<A>, A(0));
                }
            }
            pack_backward(products_, all, units, units, peephole(d), panel, call_.threads);
        }
        for (int64_t slot = 0; slot < shape_.samples; ++slot) {
            load_state(call_.dhn, d, slot, dh(d));
            load_state(call_.dcn, d, slot, dc(d));
        }
    }

    void load_state(const States& states, int64_t d, int64_t slot, A* to) const {
        to += slot * rows_.state_row;
        std::fill(to, to + rows_.state_row, A(0));
        if (!states.data) return;
        const A* from =
            static_cast<const A*>(states.data) + cell_index(d) * states.cell + rows_.sample(slot) * states.sample;
        std::copy(from, from + shape_.units, to);
    }

    // c[rows][count blocks] = a * the panels from `block` on, added to c if `add`
    void multiply(const A* a, int64_t a_row, int64_t a_group, int64_t depth, int64_t rows, const A* panels,
                  int64_t block, int64_t count, bool add, A* c) const {
        Product<A> product = {};
        product.a = a;
        product.a_row = a_row;
        product.a_step = 1;
        product.a_group = a_group;
        product.rows = rows;
        product.depth = depth;
        product.cols = count * kPanel<A>;
        product.panel_stride = depth * kPanel<A>;
        product.panels = panels + block * product.panel_stride;
        product.c = c + block * kPanel<A>;
        product.c_row = rows_.state_row;
        product.base = add ? product.c : nullptr;
        product.base_row = rows_.state_row;
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
        const A* later = later_rows ? dz(d) + (rows_.first(rows_.time(d, p + 1)) + slot) * kPanel<A> : nullptr;
        A* dh_rows = dh(d) + slot * rows_.state_row;
        A* dc_rows = dc(d) + slot * rows_.state_row;
        const auto visit = [&](int64_t block, int64_t count) {
            if (phase != CellPhase::state && later) {
                const auto multiply_later = [&](const A* panels, bool add, A* to) {
                    multiply(later, kPanel<A>, rows_.panel, rows_.gates_row, later_rows, panels, block, count, add, to);
                };
                multiply_later(weights(d), false, dh_rows);
                if (shape_.peephole == Peephole::full) multiply_later(peephole(d), true, dc_rows);
            }
            if (rows == 0) return;
            if (phase == CellPhase::state) {
                multiply(dzo(d) + slot * rows_.state_row, rows_.state_row, kPanel<A>, rows_.state_row, rows,
                         output_peephole(d), block, count, true, dc_rows);
            }
            cells(p, phase, d, slot, rows, block, count);
        };
        for_block_groups(first_block, last_block, blocks_together(products_, std::max(rows, later_rows)), p % 2 == 1,
                         visit);
    }

    void cells(int64_t p, CellPhase phase, int64_t d, int64_t slot, int64_t rows, int64_t block, int64_t count) const {
        const int64_t t = rows_.time(d, p), row = rows_.first(t) + slot, unit = block * kPanel<A>;
        const int64_t state = slot * rows_.state_row + unit;
        CellBackward<A> b = {};
        b.activations = &shape_.activations;
        b.phase = phase;
        b.rows = rows;
        b.blocks = count;
        b.units = std::min(count * kPanel<A>, shape_.units - unit);
        b.gates_row = rows_.gates_row;
        b.gates = cell_[d].gates + row * rows_.gates_row + 4 * unit;
        b.c_prev = {cell_[d].c_prev + block * rows_.panel + row * kPanel<A>, kPanel<A>, rows_.panel};
        b.peephole = shape_.peephole == Peephole::diagonal ? peephole_ + d * rows_.gates_row + 4 * unit : nullptr;
        b.output_reads_old = shape_.output_reads_old;
        if (dy_->data) {
            b.dy = dy_->data + (dy_->packed ? rows_.first(t) : t) * dy_->step + d * shape_.units + unit;
            b.dy_offset = dy_->slot_offset.data() + slot;
        }
        b.dh = {dh(d) + state, rows_.state_row, kPanel<A>};
        b.dc = {dc(d) + state, rows_.state_row, kPanel<A>};
        b.dz = dz(d) + 4 * block * rows_.panel + row * kPanel<A>;
        b.dz_panel = rows_.panel;
        if (c_new_) b.c_new = {c_new(d) + row * rows_.state_row + unit, rows_.state_row, kPanel<A>};
        if (dzo_) b.dzo = {dzo(d) + state, rows_.state_row, kPanel<A>};
        kernels_.backward_cells(b);
    }

    void finish(int64_t d, const StateArray<const A>& u) const {
        store_states(call_.dh0, d, dh(d));
        store_states(call_.dc0, d, dc(d));
        if (!call_.dcells) return;
        const CellArrays& gradients = call_.dcells[cell_index(d)];
        const StateArray<const A> h_prev = {cell_[d].h_prev, kPanel<A>, rows_.panel};
        const StateArray<const A> c_prev = {cell_[d].c_prev, kPanel<A>, rows_.panel};
        weights_gradient(dz_for_input(d), gradients.wx, u, rows_.layer_inputs(layer_));
        state_gradient(d, gradients.wh, h_prev);
        vector_gradient(d, gradients.b, nullptr);
        const StateArray<const A> c_new_rows = {c_new_ ? c_new(d) : nullptr, rows_.state_row, kPanel<A>};
        const StateArray<const A> output_state = wants_c_new() ? c_new_rows : c_prev;
        if (shape_.peephole == Peephole::diagonal) {
            const StateArray<const A> states[4] = {c_prev, c_prev, c_prev, output_state};
            vector_gradient(d, gradients.peephole, states);
        } else if (shape_.peephole == Peephole::full) {
            GateArray first = gradients.peephole, last = gradients.peephole;
            first.gate[3] = nullptr;
            for (int k = 0; k < 3; ++k) last.gate[k] = nullptr;
            state_gradient(d, first, c_prev);
            state_gradient(d, last, output_state);
        }
    }

    void weights_gradient(const DzRows& dz_rows, const GateArray& gradient, const StateArray<const A>& u,
                          int64_t inputs) const {
        const GateMatrix<A> dw = matrix<A>(gradient);
        if (dw.empty()) return;
        weight_gradient(products_, dz_rows.dz, dz_rows.panel, dz_rows.rows, shape_.units, u, inputs, call_.accumulate,
                        dw, call_.threads);
    }

    // The same for weights that multiply states. If all states of the first step are 0, as is common, its rows are
    // skipped.
    void state_gradient(int64_t d, const GateArray& gradient, const StateArray<const A>& states) const {
        if (matrix<A>(gradient).empty()) return;
        const int64_t count = rows_.active_at(d, 0), first = d ? rows_.rows - count : 0;
        bool zero = true;
        for (int64_t block = 0; block < rows_.blocks && zero; ++block) {
            for (int64_t row = first; row < first + count && zero; ++row) {
                const A* state = states.data + block * states.panel + row * states.row;
                zero = std::all_of(state, state + kPanel<A>, [](A value) { return value == 0; });
            }
        }
        const int64_t left_out = zero ? count : 0, from = d ? 0 : left_out;
        const DzRows dz_rows = {dz(d) + from * kPanel<A>, rows_.panel, rows_.rows - left_out};
        weights_gradient(dz_rows, gradient, {states.data + from * states.row, states.row, states.panel}, shape_.units);
    }

    // Sums over all rows of dz, or of dz times a state for each gate.
    void vector_gradient(int64_t d, const GateArray& gradient, const StateArray<const A>* states) const {
        const GateMatrix<A> to = matrix<A>(gradient);
        if (to.empty()) return;
        const Workers workers(cost::kCopy * double(rows_.rows * rows_.gates_row), call_.threads);
        workers.each(rows_.blocks, [&](int64_t block) {
            const int64_t unit = block * kPanel<A>;
            for (int k = 0; k < 4; ++k) {
                if (!to.gate[k]) continue;
                double sums[kPanel<A>] = {};
                const StateArray<const A> state = states ? states[k] : StateArray<const A>();
                products_.panel_sums(dz(d) + (4 * block + k) * rows_.panel,
                                     states ? state.data + block * state.panel : nullptr, state.row, rows_.rows, sums);
                for (int64_t u = unit; u < std::min(unit + kPanel<A>, shape_.units); ++u) {
                    A& place = to.gate[k][u * to.row_stride];
                    place = A((call_.accumulate ? double(place) : 0.0) + sums[u - unit]);
                }
            }
        });
    }

    void store_states(const States& states, int64_t d, const A* from) const {
        if (!states.data) return;
        for (int64_t slot = 0; slot < shape_.samples; ++slot) {
            A* to = static_cast<A*>(states.data) + cell_index(d) * states.cell + rows_.sample(slot) * states.sample;
            add_or_copy(from + slot * rows_.state_row, shape_.units, call_.accumulate, to);
        }
    }

    const LstmBackward& call_;
    const Rows<A>& rows_;
    const LstmKernels<A>& kernels_;
    const ProductKernels<A>& products_ = kernel_table().product.of<A>();
    const LstmShape& shape_;
    const int64_t layer_;
    const OutputGradient<A>* dy_ = nullptr;
    A *dz_ = nullptr, *weights_ = nullptr, *peephole_ = nullptr, *output_peephole_ = nullptr, *states_ = nullptr,
      *c_new_ = nullptr, *dzo_ = nullptr, *sums_ = nullptr;
    CellCache<const A> cell_[2] = {};
};

// Writes dx for active rows, and 0 for the others.
template <class A>
void scatter_rows(const Rows<A>& rows, const A* from, const LstmBackward& call) {
    const LstmShape& s = rows.shape;
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
void backward(const LstmBackward& call) {
    const LstmShape& s = call.shape;
    const Rows<A> rows(s);
    const LstmKernels<A>& kernels = kernel_table().lstm.of<A>();
    Buffer buffer;
    const A* base = cache_data<A>(s, call.cache, buffer);
    BackwardScratch& scratch = my_scratch();

    OutputGradient<A> dy;
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

void lstm_backward(const LstmBackward& call) {
    if (call.shape.dtype == DType::f64) {
        backward<double>(call);
    } else {
        backward<float>(call);
    }
}

}  // namespace rg
