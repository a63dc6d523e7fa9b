#include <algorithm>

#include "rows.h"

namespace rg {
namespace {

// Buffers for the duration of a call, kept by the thread for the next call.
struct ForwardScratch {
    Buffer inputs, outputs, weights, input_weights, peepholes, projection, bias, diagonals, states, saved, c_new, table,
        products, projected, norms;
    void trim() {
        for (Buffer* b : {&inputs, &outputs, &weights, &input_weights, &peepholes, &projection, &bias, &diagonals,
                          &states, &saved, &c_new, &table, &products, &projected, &norms}) {
            b->trim();
        }
    }
};
ForwardScratch& my_scratch() { return kept_by_thread<ForwardScratch>(); }

// One layer of a forward pass. The arrays of the two directions are consecutive.
template <class A>
class ForwardLayer {
public:
    ForwardLayer(const RecurrentForward& call, const Rows<A>& rows, const CellKernels<A>& kernels, int64_t layer,
                 const int64_t* y_offset)
        : call_(call),
          rows_(rows),
          kernels_(kernels),
          shape_(call.shape),
          products_of_(call.shape),
          sizes_(call.shape, rows),
          layer_(layer),
          y_offset_(y_offset),
          mask_(shape_.mask, rows),
          zoneout_(shape_.zoneout, rows),
          cell_zoneout_(shape_.cell_zoneout, rows) {}

    // u: the layer's input. above: where its output goes, or null for the caller's y. base: the cache, or null.
    void run(const StateArray<const A>& u, A* above, A* base) {
        above_ = above;
        keeps_ = base != nullptr;
        const int64_t steps = shape_.steps, directions = shape_.directions;
        // Without a cache, only a segment of the gates is held at a time.
        const int64_t segment =
            keeps_ ? steps : std::max<int64_t>(1, (4 << 20) / (std::max<int64_t>(1, shape_.samples) * rows_.gates_row));
        take_scratch(base, std::min(segment, steps));
        for (int64_t d = 0; d < directions; ++d) prepare(d);
        for (int64_t d = 0; d < directions && looks_up(); ++d) project_rows(u, call_.lookup.rows, d, table(d));
        const Split split = split_sweep(rows_, call_.threads);
        if (projects_by_step(split)) prepare_inputs(u);
        for (int64_t first = 0; first < steps && rows_.rows > 0; first += segment) {
            const int64_t last = std::min(steps, first + segment);
            for (int64_t d = 0; d < directions; ++d) {
                first_row_[d] = rows_.first(d ? steps - last : first);
                const int64_t end = rows_.first(d ? steps - first : last);
                if (looks_up() || input_weights_) continue;
                A* const to = normalizes() ? cell_[d].x_products : cell_[d].gates;
                project_rows({u.data + first_row_[d] * u.row, u.row, u.panel}, end - first_row_[d], d, to);
                if (normalizes()) {
                    const int64_t rows = end - first_row_[d];
                    const Workers workers(cost::kElement * double(rows * rows_.gates_row), call_.threads);
                    workers.ranges(rows, [&](int64_t from, int64_t to) { find_input_statistics(d, from, to); });
                }
            }
            const int64_t halves = two_halves() ? 2 : 1;
            sweep(split, (last - first) * halves, rows_.blocks,
                  [&](int64_t step, const Group& group, int64_t first_block, int64_t last_block) {
                      const int64_t p = first + step / halves;
                      const CellPhase phase = halves == 1     ? CellPhase::whole
                                              : step % 2 == 0 ? CellPhase::state
                                                              : CellPhase::output;
                      run_step(p, phase, group, first_block, last_block);
                  });
        }
        for (int64_t d = 0; d < directions; ++d) finish(d);
    }

private:
    // The states of a step's slots, as the arrays that hold them.
    struct NextStates {
        StateArray<A> h, c, own;
        bool masked;
    };

    // Full peepholes need the whole new cell state before the output gate, a reset state all of its units.
    bool two_halves() const {
        return (shape_.peephole == Peephole::full && !shape_.rule.output_reads_old) ||
               shape_.rule.kind == CellKind::gru_before;
    }
    // Whether products with the state have an array of their own, because something happens before they are added.
    bool apart() const { return is_gru(shape_.rule.kind) || shape_.mask_kind == MaskKind::each || normalizes(); }
    bool normalizes() const { return shape_.norm != CellNorm::none; }
    bool has_cells() const { return shape_.rule.kind == CellKind::lstm; }
    int64_t cell_index(int64_t d) const { return layer_ * shape_.directions + d; }
    const CellArrays& arrays(int64_t d) const { return call_.cells[cell_index(d)]; }
    // Whether the product with the layer's input is also computed step by step, so that gates are written only once.
    // That pays if all weights stay in a thread's cache and a step has enough rows to amortise reading them.
    bool projects_by_step(const Split& split) const {
        const int64_t inputs = rows_.layer_inputs(layer_);
        const int64_t weight_bytes = rows_.gates_row * (inputs + shape_.outputs()) * int64_t(sizeof(A));
        const int64_t ranges = int64_t(split.groups.size()) / shape_.directions;
        const bool enough_rows = rows_.rows > 0 && rows_.rows >= 8 * ranges * shape_.steps;
        return !looks_up() && !normalizes() && inputs > 0 && enough_rows && weight_bytes <= near_cache_bytes() * 3 / 4;
    }
    bool looks_up() const { return layer_ == 0 && call_.lookup.indices && rows_.rows > 0; }
    // The states of a step's slots, in panels; without a cache, two buffers alternate. And the row of its gates.
    int64_t state_panel() const { return keeps_ ? rows_.panel : 2 * saved_panel(); }
    int64_t saved_panel() const { return rows_.padded(shape_.samples) * kPanel<A>; }
    int64_t h_copy() const { return rows_.out_blocks * state_panel(); }
    StateArray<A> states_at(A* states, int64_t d, int64_t p, int64_t slot) const {
        if (!states) return {};
        const int64_t row = keeps_ ? rows_.first(rows_.time(d, p)) : p % 2 * rows_.padded(shape_.samples);
        return {states + (row + slot) * kPanel<A>, kPanel<A>, state_panel()};
    }
    int64_t gates_at(int64_t d, int64_t p) const {
        return rows_.first(rows_.time(d, p)) - (keeps_ ? 0 : first_row_[d]);
    }

    void take_scratch(A* base, int64_t segment) {
        ForwardScratch& scratch = my_scratch();
        const int64_t directions = shape_.directions, samples = shape_.samples;
        if (looks_up()) table_ = scratch.table.take<A>(directions, call_.lookup.rows, rows_.gates_row);
        bias_ = scratch.bias.take<A>(directions * 3 * rows_.gates_row);
        weights_ = scratch.weights.take<A>(directions * rows_.gates_row * shape_.outputs());
        saved_ = scratch.saved.take<A>(directions * (rows_.out_blocks + rows_.blocks) * saved_panel());
        if (apart()) gate_products_ = scratch.products.take<A>(directions * samples * rows_.gates_row);
        if (shape_.peephole == Peephole::diagonal) {
            peephole_ = scratch.diagonals.take<A>(directions * rows_.gates_row);
        } else if (shape_.peephole == Peephole::full) {
            peephole_ = scratch.peepholes.take<A>(directions * rows_.gates_row * shape_.units);
        }
        if (has_cells() && (two_halves() || shape_.cell_zoneout.data || normalizes())) {
            c_new_ = scratch.c_new.take<A>(directions * samples * rows_.state_row);
        }
        if (shape_.projection) {
            projection_ = scratch.projection.take<A>(directions * rows_.out_row * shape_.units);
            projected_ = scratch.projected.take<A>(directions * samples * rows_.out_row);
        }
        if (normalizes()) norms_ = scratch.norms.take<A>(directions * (2 * rows_.gates_row + 2 * rows_.state_row));
        for (int64_t d = 0; d < directions && keeps_; ++d) cell_[d] = cell_cache(rows_, base, cell_index(d));
        if (!keeps_) take_states(scratch, segment);
    }

    // What the cache holds, for two steps, and the gates of a segment.
    void take_states(ForwardScratch& scratch, int64_t segment) {
        const int64_t gates = shape_.samples * segment * rows_.gates_row, outputs = h_copy();
        const int64_t cells = has_cells() ? rows_.blocks * state_panel() : 0;
        const int64_t own = sizes_.h_own ? outputs : 0;
        // A GRU that resets after the product needs the product only for backward.
        const bool inner = sizes_.inner && shape_.rule.kind != CellKind::gru_after;
        // With a norm, the products with x of a segment, and statistics.
        const int64_t segment_rows = shape_.samples * segment;
        const int64_t norms = normalizes() ? gates + sizes_.kStatistics * segment_rows : 0;
        const int64_t inner_size = inner ? rows_.blocks * state_panel() : 0;
        const int64_t each = gates + cells + sizes_.copies * outputs + own + inner_size + norms;
        A* states = scratch.states.take<A>(shape_.directions * each);
        for (int64_t d = 0; d < shape_.directions; ++d, states += each) {
            A* c_prev = states + gates;
            A* h_prev = c_prev + cells;
            A* h_own = h_prev + sizes_.copies * outputs;
            cell_[d].gates = states;
            cell_[d].c_prev = cells ? c_prev : nullptr;
            cell_[d].h_prev = h_prev;
            cell_[d].h_own = own ? h_own : nullptr;
            cell_[d].inner = inner ? h_own + own : nullptr;
            if (!normalizes()) continue;
            cell_[d].x_products = h_own + own + inner_size;
            cell_[d].statistics = cell_[d].x_products + gates;
        }
        statistics_rows_ = segment_rows;
    }

    A* saved_h(int64_t d) const { return saved_ + d * (rows_.out_blocks + rows_.blocks) * saved_panel(); }
    A* saved_c(int64_t d) const { return saved_h(d) + rows_.out_blocks * saved_panel(); }

    void prepare(int64_t d) {
        const int64_t units = shape_.units;
        const GateMatrix<const A> b = matrix<const A>(arrays(d).b, 0, rows_.gates);
        if (normalizes()) {
            // The products have no bias; it is added to what is normalized.
            std::fill_n(bias(d), rows_.gates_row, A(0));
            pack_vector(b, units, norm_bias(d));
            pack_vector(matrix<const A>(arrays(d).gamma_x, 0, rows_.gates), units, gamma_x(d));
            pack_vector(matrix<const A>(arrays(d).gamma_h, 0, rows_.gates), units, gamma_h(d));
            pack_vector(matrix<const A>(arrays(d).gamma_c, 0, 1), units, gamma_c(d));
            pack_vector(matrix<const A>(arrays(d).beta_c, 0, 1), units, gamma_c(d) + rows_.state_row);
        } else {
            pack_vector(b, units, bias(d));
        }
        for (const StateProduct& p : products_of_) {
            pack_forward(products_, matrix<const A>(arrays(d).wh, p.first, p.count), units, shape_.outputs(),
                         weights(d, p), call_.threads);
            if (apart()) {
                pack_vector(matrix<const A>(arrays(d).bh, p.first, p.count), units,
                            state_bias(d) + p.first * rows_.state_row);
            }
        }
        if (shape_.peephole == Peephole::diagonal) {
            pack_vector(matrix<const A>(arrays(d).peephole, 0, rows_.gates), units, peephole_ + d * rows_.gates_row);
        } else if (shape_.peephole == Peephole::full) {
            pack_forward(products_, matrix<const A>(arrays(d).peephole, 0, rows_.gates), units, units, peephole(d),
                         call_.threads);
        }
        if (shape_.projection) {
            pack_forward(products_, matrix<const A>(arrays(d).projection, 0, 1), shape_.projection, units,
                         projection(d), call_.threads);
        }
        for (int64_t slot = 0; slot < shape_.samples; ++slot) {
            load_state(call_.h0, d, slot, shape_.outputs(), saved_h(d));
            if (has_cells()) load_state(call_.c0, d, slot, units, saved_c(d));
        }
        enter(d, 0, 0, shape_.samples, 0, rows_.blocks);
    }
    void prepare_inputs(const StateArray<const A>& u) {
        u_ = u;
        const int64_t inputs = rows_.layer_inputs(layer_);
        input_weights_ = my_scratch().input_weights.take<A>(shape_.directions * rows_.gates_row * inputs);
        for (int64_t d = 0; d < shape_.directions; ++d) {
            pack_forward(products_, matrix<const A>(arrays(d).wx, 0, rows_.gates), shape_.units, inputs,
                         input_weights(d), call_.threads);
        }
    }
    void project_rows(const StateArray<const A>& u, int64_t rows, int64_t d, A* gates) const {
        project(products_, u, rows, rows_.layer_inputs(layer_), shape_.units,
                matrix<const A>(arrays(d).wx, 0, rows_.gates), bias(d), gates, my_scratch().input_weights,
                call_.threads);
    }
    // The table's rows as gates.
    A* table(int64_t d) const { return table_ + d * call_.lookup.rows * rows_.gates_row; }
    A* input_weights(int64_t d) const { return input_weights_ + d * rows_.gates_row * rows_.layer_inputs(layer_); }
    A* bias(int64_t d) const { return bias_ + 2 * d * rows_.gates_row; }
    A* state_bias(int64_t d) const { return bias(d) + rows_.gates_row; }
    A* weights(int64_t d, const StateProduct& p) const {
        return weights_ + (d * rows_.gates_row + p.first * rows_.state_row) * shape_.outputs();
    }
    A* peephole(int64_t d) const { return peephole_ + d * rows_.gates_row * shape_.units; }
    A* projection(int64_t d) const { return projection_ + d * rows_.out_row * shape_.units; }
    // The products of a step, kept for backward if they are normalized.
    A* gate_products(int64_t d, int64_t p, int64_t slot) const {
        if (cell_[d].h_products) return cell_[d].h_products + (gates_at(d, p) + slot) * rows_.gates_row;
        return gate_products_ + (d * shape_.samples + slot) * rows_.gates_row;
    }
    // Parameters of the norms, as rows of gates.
    A* gamma_x(int64_t d) const { return norms_ + d * (2 * rows_.gates_row + 2 * rows_.state_row); }
    A* gamma_h(int64_t d) const { return gamma_x(d) + rows_.gates_row; }
    A* gamma_c(int64_t d) const { return gamma_h(d) + rows_.gates_row; }
    A* norm_bias(int64_t d) const { return bias_ + (2 * shape_.directions + d) * rows_.gates_row; }
    // Statistics of the rows from the first of step p on: 0 of products with x, 2 with h, 4 of cell states.
    A* statistics(int64_t d, int64_t p, int64_t slot, int which) const {
        const int64_t rows = keeps_ ? rows_.rows : statistics_rows_;
        return cell_[d].statistics + which * rows + gates_at(d, p) + slot;
    }

    // The statistics of the products with x, for a range of a segment's rows.
    void find_input_statistics(int64_t d, int64_t first, int64_t last) const {
        NormRows<A> n = {};
        n.rows = last - first;
        n.gates = rows_.gates;
        n.units = shape_.units;
        n.x = cell_[d].x_products + first * rows_.gates_row;
        n.x_row = rows_.gates_row;
        n.eps = shape_.eps;
        n.center = cell_[d].statistics + first;
        n.rstd = n.center + (keeps_ ? rows_.rows : statistics_rows_);
        kernels_.norm_rows(n);
    }
    // The statistics of a step's products with the state, or of its new cell states.
    void find_statistics(int64_t d, int64_t p, int64_t slot, int64_t rows, bool of_cells) const {
        NormRows<A> n = {};
        n.rows = rows;
        n.gates = of_cells ? 1 : rows_.gates;
        n.units = shape_.units;
        n.x = of_cells ? new_states(d, slot).data : gate_products(d, p, slot);
        n.x_row = of_cells ? rows_.state_row : rows_.gates_row;
        n.eps = shape_.eps;
        n.center = statistics(d, p, slot, of_cells ? 4 : 2);
        n.rstd = statistics(d, p, slot, of_cells ? 5 : 3);
        kernels_.norm_rows(n);
    }

    void load_state(const States& states, int64_t d, int64_t slot, int64_t units, A* saved) const {
        const A* from = static_cast<const A*>(states.data);
        if (from) from += cell_index(d) * states.cell + rows_.sample(slot) * states.sample;
        for (int64_t block = 0; block < ceil_div(units, kPanel<A>); ++block) {
            A* to = saved + block * saved_panel() + slot * kPanel<A>;
            for (int64_t u = 0; u < kPanel<A>; ++u) {
                const int64_t unit = block * kPanel<A> + u;
                to[u] = from && unit < units ? from[unit] : A(0);
            }
        }
    }

    // Before step p: slots that are active in it but not in the step before load their state from `saved`, and what is
    // reset becomes 0.
    void enter(int64_t d, int64_t p, int64_t first_slot, int64_t last_slot, int64_t first_block, int64_t last_block) {
        const int64_t first = std::max(first_slot, rows_.active_at(d, p - 1));
        const int64_t last = std::min(last_slot, rows_.active_at(d, p));
        if (first < last) {
            copy_states(saved_h(d), first, last, first_block, last_block, rows_.out_blocks,
                        states_at(cell_[d].h_prev, d, p, first));
            if (shape_.mask_kind != MaskKind::none) mask_states(d, p, first, last, first_block, last_block);
            if (cell_[d].h_own) {
                copy_states(saved_h(d), first, last, first_block, last_block, rows_.out_blocks,
                            states_at(cell_[d].h_own, d, p, first));
            }
            if (has_cells()) {
                copy_states(saved_c(d), first, last, first_block, last_block, rows_.blocks,
                            states_at(cell_[d].c_prev, d, p, first));
            }
        }
        if (!shape_.reset) return;
        const uint8_t* reset = shape_.reset + rows_.time(d, p) * shape_.samples;
        for (int64_t slot = first_slot; slot < last; ++slot) {
            if (!reset[rows_.sample(slot)]) continue;
            for (int copy = 0; copy < sizes_.copies; ++copy) {
                clear(states_at(cell_[d].h_prev + copy * h_copy(), d, p, slot), first_block, last_block,
                      rows_.out_blocks);
            }
            if (cell_[d].h_own) {
                clear(states_at(cell_[d].h_own, d, p, slot), first_block, last_block, rows_.out_blocks);
            }
            if (has_cells()) clear(states_at(cell_[d].c_prev, d, p, slot), first_block, last_block, rows_.blocks);
        }
    }
    // The blocks of a range that an array has: with a projection, threads do not split blocks.
    int64_t end_block(int64_t last_block, int64_t blocks) const {
        return last_block == rows_.blocks ? blocks : last_block;
    }
    void copy_states(const A* saved, int64_t first, int64_t last, int64_t first_block, int64_t last_block,
                     int64_t blocks, const StateArray<A>& to) const {
        for (int64_t block = first_block; block < end_block(last_block, blocks); ++block) {
            const A* source = saved + block * saved_panel() + first * kPanel<A>;
            std::copy(source, source + (last - first) * kPanel<A>, to.data + block * to.panel);
        }
    }
    void clear(const StateArray<A>& row, int64_t first_block, int64_t last_block, int64_t blocks) const {
        for (int64_t block = first_block; block < end_block(last_block, blocks); ++block) {
            std::fill_n(row.data + block * row.panel, kPanel<A>, A(0));
        }
    }
    // The masks of step p times the states that have just been loaded, which the first copy holds.
    void mask_states(int64_t d, int64_t p, int64_t first, int64_t last, int64_t first_block, int64_t last_block) {
        const RowFactor<A> mask = mask_.at(cell_index(d), rows_.time(d, p), 0, first);
        for (int copy = sizes_.copies - 1; copy >= 0; --copy) {
            const StateArray<A> from = states_at(cell_[d].h_prev, d, p, first);
            const StateArray<A> to = states_at(cell_[d].h_prev + copy * h_copy(), d, p, first);
            for (int64_t block = first_block; block < end_block(last_block, rows_.out_blocks); ++block) {
                for (int64_t slot = 0; slot < last - first; ++slot) {
                    const A* factors = mask.data + mask.offset[slot] + copy * shape_.mask.gate;
                    for (int64_t u = 0; u < kPanel<A>; ++u) {
                        const int64_t unit = block * kPanel<A> + u, at = block * from.panel + slot * from.row + u;
                        to.data[at] = unit < shape_.outputs() ? from.data[at] * factors[unit] : A(0);
                    }
                }
            }
        }
    }

    // c[rows][count panels] = base + a * panels, of a row of `width` columns
    void multiply(const StateArray<const A>& a, int64_t rows, int64_t depth, const A* panels, int64_t panel,
                  int64_t count, const A* base, int64_t base_row, A* c, int64_t width) const {
        Product<A> product = {};
        product.a = a.data;
        product.a_row = a.row;
        product.a_step = 1;
        product.a_group = a.panel;
        product.rows = rows;
        product.depth = depth;
        product.cols = count * kPanel<A>;
        product.panel_stride = depth * kPanel<A>;
        product.panels = panels + panel * product.panel_stride;
        product.c = c + panel * kPanel<A>;
        product.c_row = width;
        product.base = base;
        product.base_row = base_row;
        products_.product(product);
    }
    // gates += a * panels, for `count` of the panels
    void add_product(const StateArray<A>& a, int64_t rows, int64_t depth, const A* panels, int64_t panel, int64_t count,
                     A* gates) const {
        multiply({a.data, a.row, a.panel}, rows, depth, panels, panel, count, gates + panel * kPanel<A>,
                 rows_.gates_row, gates, rows_.gates_row);
    }
    // The contribution of the layer's input to the gates, plus the bias.
    void multiply_input(int64_t d, int64_t row, int64_t rows, int64_t block, int64_t count, A* gates) const {
        const int64_t panel = rows_.gates * block;
        multiply({u_.data + row * u_.row, u_.row, u_.panel}, rows, rows_.layer_inputs(layer_), input_weights(d), panel,
                 rows_.gates * count, bias(d) + panel * kPanel<A>, 0, gates, rows_.gates_row);
    }
    // The products with the state. Only the first h_rows rows have one that is not 0.
    void multiply_state(int64_t d, int64_t p, int64_t slot, const StateProduct& product, int64_t rows, int64_t h_rows,
                        int64_t block, int64_t count, A* gates) const {
        A* const source = product.reset ? cell_[d].inner : cell_[d].h_prev + product.copy * h_copy();
        const StateArray<A> a = states_at(source, d, p, slot);
        const int64_t panel = product.count * block, panels = product.count * count;
        if (!apart()) return add_product(a, h_rows, shape_.outputs(), weights(d, product), panel, panels, gates);
        A* const to = gate_products(d, p, slot) + product.first * rows_.state_row;
        // What is normalized has its bias added later; bias() is 0 then.
        const A* base = (normalizes() ? bias(d) : state_bias(d)) + product.first * rows_.state_row + panel * kPanel<A>;
        multiply({a.data, a.row, a.panel}, h_rows, shape_.outputs(), weights(d, product), panel, panels, base, 0, to,
                 rows_.gates_row);
        for (int64_t r = h_rows; r < rows; ++r) {
            std::copy(base, base + panels * kPanel<A>, to + r * rows_.gates_row + panel * kPanel<A>);
        }
    }

    void run_step(int64_t p, CellPhase phase, const Group& group, int64_t first_block, int64_t last_block) {
        const int64_t d = group.direction, slot = group.first_slot;
        const int64_t rows = std::min(rows_.active_at(d, p), group.last_slot) - slot;
        // The number of these rows that continue to the next step; the others save their state to `saved`.
        const int64_t going_on = std::min(rows, std::max<int64_t>(0, rows_.active_at(d, p + 1) - slot));
        // The number with a nonzero state; the others begin with this step and have no initial state.
        const int64_t begun = std::min(rows, std::max<int64_t>(0, rows_.begun(d, p) - slot));
        const int64_t h_rows = call_.h0.data ? rows : begun, c_rows = call_.c0.data ? rows : begun;
        // The rows that go on, and those that do not.
        const auto for_rows = [&](const auto& visit) {
            if (going_on > 0) {
                const NextStates next = {states_at(cell_[d].h_prev, d, p + 1, slot),
                                         states_at(cell_[d].c_prev, d, p + 1, slot),
                                         states_at(cell_[d].h_own, d, p + 1, slot), shape_.mask_kind != MaskKind::none};
                visit(0, going_on, next);
            }
            if (going_on < rows) {
                const NextStates last = {{saved_h(d) + slot * kPanel<A>, kPanel<A>, saved_panel()},
                                         {saved_c(d) + slot * kPanel<A>, kPanel<A>, saved_panel()},
                                         {},
                                         false};
                visit(going_on, rows, last);
            }
        };
        if (rows > 0) {
            A* gates = cell_[d].gates + (gates_at(d, p) + slot) * rows_.gates_row;
            const StateArray<A> c_prev = states_at(cell_[d].c_prev, d, p, slot), c_new = new_states(d, slot);
            const bool full = shape_.peephole == Peephole::full;
            const int64_t units = shape_.units, all = rows_.gates;
            const auto visit = [&](int64_t block, int64_t count) {
                if (phase != CellPhase::output) {
                    if (input_weights_) {
                        A* const to = normalizes() ? cell_[d].x_products + (gates - cell_[d].gates) : gates;
                        multiply_input(d, rows_.first(rows_.time(d, p)) + slot, rows, block, count, to);
                    }
                    if (looks_up()) look_up(d, rows_.time(d, p), slot, rows, block, count, gates);
                }
                for (const StateProduct& product : products_of_) {
                    if (phase == (product.reset ? CellPhase::state : CellPhase::output)) continue;
                    multiply_state(d, p, slot, product, rows, h_rows, block, count, gates);
                }
                if (full && phase == CellPhase::whole) {
                    add_product(c_prev, c_rows, units, peephole(d), all * block, all * count, gates);
                }
                for (int64_t j = block; j < block + count && full && phase == CellPhase::state; ++j) {
                    add_product(c_prev, c_rows, units, peephole(d), all * j, 3, gates);
                }
                for (int64_t j = block; j < block + count && full && phase == CellPhase::output; ++j) {
                    add_product(c_new, rows, units, peephole(d), all * j + 3, 1, gates);
                }
                if (normalizes()) return;
                for_rows([&](int64_t first, int64_t end, const NextStates& states) {
                    cells(p, phase, d, slot, block, count, first, end, states);
                });
            };
            for_block_groups(first_block, last_block, blocks_together(products_, rows), p % 2 == 1, visit);
            if (normalizes()) normalized_cells(p, d, slot, rows, for_rows);
            if (shape_.projection) project_outputs(p, d, slot, rows, for_rows);
        }
        if (phase != CellPhase::state && p + 1 < shape_.steps) {
            enter(d, p + 1, group.first_slot, group.last_slot, first_block, last_block);
        }
    }

    // The cells of a step with norms, whose statistics need all units.
    template <class ForRows>
    void normalized_cells(int64_t p, int64_t d, int64_t slot, int64_t rows, const ForRows& for_rows) const {
        const auto run = [&](CellPhase phase) {
            for_rows([&](int64_t first, int64_t end, const NextStates& states) {
                cells(p, phase, d, slot, 0, rows_.blocks, first, end, states);
            });
        };
        if (input_weights_) find_input_statistics(d, gates_at(d, p) + slot, gates_at(d, p) + slot + rows);
        find_statistics(d, p, slot, rows, false);
        if (!has_cells()) return run(CellPhase::whole);
        run(CellPhase::state);
        find_statistics(d, p, slot, rows, true);
        run(CellPhase::output);
    }

    void look_up(int64_t d, int64_t t, int64_t slot, int64_t rows, int64_t block, int64_t count, A* gates) const {
        const int64_t first = rows_.gates * block * kPanel<A>, size = rows_.gates * count * kPanel<A>;
        for (int64_t r = 0; r < rows; ++r) {
            const int64_t index = call_.lookup.indices[t * shape_.samples + rows_.sample(slot + r)];
            memcpy(gates + r * rows_.gates_row + first, table(d) + index * rows_.gates_row + first,
                   size_t(size) * sizeof(A));
        }
    }

    StateArray<A> new_states(int64_t d, int64_t slot) const {
        if (!c_new_) return {};
        return {c_new_ + (d * shape_.samples + slot) * rows_.state_row, rows_.state_row, kPanel<A>};
    }

    // The outputs of a step, projected.
    template <class ForRows>
    void project_outputs(int64_t p, int64_t d, int64_t slot, int64_t rows, const ForRows& for_rows) const {
        const StateArray<A> inner = states_at(cell_[d].inner, d, p, slot);
        A* const to = projected_ + (d * shape_.samples + slot) * rows_.out_row;
        multiply({inner.data, inner.row, inner.panel}, rows, shape_.units, projection(d), 0, rows_.out_blocks, nullptr,
                 0, to, rows_.out_row);
        for_rows([&](int64_t first, int64_t end, const NextStates& states) {
            CellEmit<A> e = {};
            e.rows = end - first;
            e.blocks = rows_.out_blocks;
            e.units = shape_.projection;
            e.h = {to + first * rows_.out_row, rows_.out_row, kPanel<A>};
            e.output =
                output(p, d, slot + first, 0, part(states.h, first, 0), part(states.own, first, 0), states.masked);
            kernels_.emit_states(e);
        });
    }

    // Rows first to last of the slots from `slot` on; their new states are written to `next`.
    void cells(int64_t p, CellPhase phase, int64_t d, int64_t slot, int64_t block, int64_t count, int64_t first,
               int64_t last, const NextStates& next) const {
        const int64_t t = rows_.time(d, p), unit = block * kPanel<A>, cell = cell_index(d);
        CellForward<A> f = {};
        f.rule = &shape_.rule;
        f.phase = phase;
        f.rows = last - first;
        f.blocks = count;
        f.units = std::min(count * kPanel<A>, shape_.units - unit);
        f.gates_row = rows_.gates_row;
        f.gates = cell_[d].gates + (gates_at(d, p) + slot + first) * rows_.gates_row + rows_.gates * unit;
        if (has_cells()) {
            f.c_prev = as_const(part(states_at(cell_[d].c_prev, d, p, slot), first, block));
            f.c_next = part(next.c, first, block);
            f.cell_zoneout = cell_zoneout_.at(cell, t, unit, slot + first);
            if (c_new_) f.c_new = part(new_states(d, slot), first, block);
        }
        if (shape_.peephole == Peephole::diagonal) f.peephole = peephole_ + d * rows_.gates_row + 4 * unit;
        if (cell_[d].inner) f.inner = part(states_at(cell_[d].inner, d, p, slot), first, block);
        if (apart()) {
            f.products.data = gate_products(d, p, slot + first);
            f.products.row = rows_.gates_row;
            for (const StateProduct& product : products_of_) {
                for (int k = 0; k < product.count; ++k) {
                    const int64_t step = product.count * kPanel<A>;
                    f.products.offset[product.first + k] =
                        product.first * rows_.state_row + k * kPanel<A> + block * step;
                    f.products.block[product.first + k] = step;
                }
            }
        }
        if (normalizes()) {
            const int64_t at = slot + first;
            const A* beta = is_gru(shape_.rule.kind) ? state_bias(d) + rows_.gates * unit : nullptr;
            f.inputs = cell_[d].x_products + (f.gates - cell_[d].gates);
            f.input_norm = {statistics(d, p, at, 0), statistics(d, p, at, 1), gamma_x(d) + rows_.gates * unit,
                            norm_bias(d) + rows_.gates * unit};
            f.products.norm = {statistics(d, p, at, 2), statistics(d, p, at, 3), gamma_h(d) + rows_.gates * unit, beta};
            if (has_cells()) {
                f.cell_norm = {statistics(d, p, at, 4), statistics(d, p, at, 5), gamma_c(d) + unit,
                               gamma_c(d) + rows_.state_row + unit};
                f.norm_carried = shape_.norm == CellNorm::cell;
            }
        }
        if (shape_.rule.kind == CellKind::gru_before) {
            A* const copy = cell_[d].h_prev + (sizes_.copies - 1) * h_copy();
            f.reset_input = as_const(part(states_at(copy, d, p, slot), first, block));
        }
        if (!shape_.projection) {
            f.output = output(p, d, slot + first, block, part(next.h, first, block), part(next.own, first, block),
                              next.masked);
        }
        kernels_.forward_cells(f);
    }

    // Where the new hidden state of the slots from `slot` on goes, from `block` on.
    CellOutput<A> output(int64_t p, int64_t d, int64_t slot, int64_t block, const StateArray<A>& h_next,
                         const StateArray<A>& h_own, bool masked) const {
        const int64_t t = rows_.time(d, p), unit = block * kPanel<A>, cell = cell_index(d);
        const int64_t output_unit = d * shape_.outputs() + unit;
        CellOutput<A> o;
        if (is_gru(shape_.rule.kind) || shape_.has_zoneout) {
            A* const own = cell_[d].h_own ? cell_[d].h_own : cell_[d].h_prev;
            o.h_prev = as_const(part(states_at(own, d, p, slot), 0, block));
        }
        o.zoneout = zoneout_.at(cell, t, unit, slot);
        o.h_next = h_next;
        if (masked) {
            o.h_own = h_own;
            o.copies = sizes_.copies;
            o.h_copy = h_copy();
            o.mask_copy = shape_.mask.gate;
            o.mask = mask_.at(cell, rows_.time(d, p + 1), unit, slot);
        }
        if (above_) {
            const int64_t row = rows_.first(t) + slot;
            // In rows, a direction may begin at any column; in panels, it begins with a panel.
            const int64_t column = rows_.above_panels ? output_unit / kPanel<A> * rows_.above_panel : output_unit;
            o.above = {above_ + column + row * rows_.above_row, rows_.above_row, rows_.above_panel};
        } else if (call_.y.data) {
            o.y = static_cast<A*>(call_.y.data) + t * call_.y.step + output_unit;
            o.y_offset = y_offset_ + slot;
        }
        return o;
    }

    static StateArray<A> part(StateArray<A> states, int64_t row, int64_t block) {
        if (states.data) states.data += row * states.row + block * states.panel;
        return states;
    }
    static StateArray<const A> as_const(const StateArray<A>& states) { return {states.data, states.row, states.panel}; }

    void finish(int64_t d) const {
        store_states(call_.hn, d, shape_.outputs(), saved_h(d));
        if (has_cells()) store_states(call_.cn, d, shape_.units, saved_c(d));
    }
    void store_states(const States& states, int64_t d, int64_t units, const A* saved) const {
        if (!states.data) return;
        for (int64_t slot = 0; slot < shape_.samples; ++slot) {
            const A* from = saved + slot * kPanel<A>;
            A* to = static_cast<A*>(states.data) + cell_index(d) * states.cell + rows_.sample(slot) * states.sample;
            for (int64_t u = 0; u < units; ++u) to[u] = from[u / kPanel<A> * saved_panel() + u % kPanel<A>];
        }
    }

    const RecurrentForward& call_;
    const Rows<A>& rows_;
    const CellKernels<A>& kernels_;
    const ProductKernels<A>& products_ = kernel_table().product.of<A>();
    const RecurrentShape& shape_;
    const StateProducts products_of_;
    const CellSizes<A> sizes_;
    const int64_t layer_;
    const int64_t* y_offset_;
    const SlotFactor<A> mask_, zoneout_, cell_zoneout_;
    bool keeps_ = false;
    A *above_ = nullptr, *bias_ = nullptr, *weights_ = nullptr, *input_weights_ = nullptr, *peephole_ = nullptr,
      *projection_ = nullptr, *projected_ = nullptr, *gate_products_ = nullptr, *saved_ = nullptr, *c_new_ = nullptr,
      *table_ = nullptr, *norms_ = nullptr;
    int64_t statistics_rows_ = 0;  // of a segment, without a cache
    StateArray<const A> u_ = {};
    CellCache<A> cell_[2] = {};
    int64_t first_row_[2] = {};
};

template <class A>
void forward(const RecurrentForward& call, A* base) {
    const RecurrentShape& s = call.shape;
    const Rows<A> rows(s);
    const CellKernels<A>& kernels = kernel_table().cell.of<A>();
    ForwardScratch& scratch = my_scratch();
    const Vector<int64_t> y_offset = rows.offsets(call.y.sample);

    StateArray<const A> u = {static_cast<const A*>(call.x.data), call.x.step, kPanel<A>};
    if (!call.lookup.indices) u = gather_panels(rows, call.x, s.inputs, scratch.inputs, call.threads);
    for (int64_t layer = 0; layer < s.layers; ++layer) {
        A* above = nullptr;
        if (layer + 1 < s.layers) {
            // Without a cache, two buffers alternate.
            above = base ? cached_input(rows, base, layer + 1)
                         : scratch.outputs.take<A>(2 * rows.above_elements) + layer % 2 * rows.above_elements;
        }
        ForwardLayer<A>(call, rows, kernels, layer, y_offset.data()).run(u, above, base);
        if (!above) break;
        if (s.dropout > 0) { drop_rows(rows, kernels, layer, {above, rows.above_row, rows.above_panel}, call.threads); }
        u = {above, rows.above_row, rows.above_panel};
    }
    if (s.active && call.y.data) {
        for (int64_t t = 0; t < s.steps; ++t) {
            for (int64_t slot = s.active[t]; slot < s.samples; ++slot) {
                A* y = static_cast<A*>(call.y.data) + t * call.y.step + y_offset[size_t(slot)];
                std::fill(y, y + rows.output, A(0));
            }
        }
    }
    scratch.trim();
}

}  // namespace

void recurrent_forward(const RecurrentForward& call) {
    void* const base = call.cache ? open_cache(call.cache) : nullptr;
    if (call.shape.dtype == DType::f64) {
        forward(call, static_cast<double*>(base));
    } else {
        forward(call, static_cast<float*>(base));
    }
    if (call.cache) seal_cache(call.shape, call.stamp, call.cache, base);
}

}  // namespace rg
