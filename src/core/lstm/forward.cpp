#include <algorithm>
#include <initializer_list>
#include <numeric>

#include "rows.h"

namespace rg {
namespace {

constexpr uint64_t kMagic = 0x314d54534c475230;  // "0RGLSTM1"

// FNV-1a hash of everything that the layout and meaning of a cache depend on.
class Fingerprint {
public:
    template <class T>
    void add(T value) {
        unsigned char bytes[sizeof(T)];
        memcpy(bytes, &value, sizeof value);
        for (const unsigned char byte : bytes) hash_ = (hash_ ^ byte) * 0x100000001b3u;
    }
    void add(const Activation& a) {
        add(a.kind);
        add(a.alpha);
        add(a.beta);
    }
    uint64_t value() const { return hash_; }

private:
    uint64_t hash_ = 0xcbf29ce484222325u;
};

uint64_t fingerprint(const LstmShape& s) {
    Fingerprint f;
    for (const int64_t v : {s.steps, s.samples, s.inputs, s.units, s.layers, s.directions}) f.add(v);
    f.add(s.dtype);
    for (const Activation& a : s.activations.gate) f.add(a);
    f.add(s.activations.hidden);
    f.add(s.peephole);
    f.add(s.output_reads_old);
    f.add(s.dropout);
    f.add(s.seed);
    for (int64_t t = 0; s.active && t < s.steps; ++t) f.add(s.active[t]);
    for (int64_t n = 0; s.order && n < s.samples; ++n) f.add(s.order[n]);
    return f.value();
}

// Buffers for the duration of a call, kept by the thread for the next call.
struct ForwardScratch {
    Buffer inputs, outputs, weights, input_weights, peepholes, bias, diagonals, states, saved, c_new, table;
    void trim() {
        for (Buffer* b : {&inputs, &outputs, &weights, &input_weights, &peepholes, &bias, &diagonals, &states, &saved,
                          &c_new, &table}) {
            b->trim();
        }
    }
};
ForwardScratch& my_scratch() { return kept_by_thread<ForwardScratch>(); }

// One layer of a forward pass. The arrays of the two directions are consecutive.
template <class A>
class ForwardLayer {
public:
    ForwardLayer(const LstmForward& call, const Rows<A>& rows, const LstmKernels<A>& kernels, int64_t layer,
                 const int64_t* y_offset)
        : call_(call), rows_(rows), kernels_(kernels), shape_(call.shape), layer_(layer), y_offset_(y_offset) {}

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
                project_rows({u.data + first_row_[d] * u.row, u.row, u.panel}, end - first_row_[d], d, cell_[d].gates);
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
    // Full peepholes need the whole new cell state before the output gate.
    bool two_halves() const { return shape_.peephole == Peephole::full && !shape_.output_reads_old; }
    int64_t cell_index(int64_t d) const { return layer_ * shape_.directions + d; }
    const CellArrays& arrays(int64_t d) const { return call_.cells[cell_index(d)]; }
    // Whether the product with the layer's input is also computed step by step, so that gates are written only once.
    // That pays if all weights stay in a thread's cache and a step has enough rows to amortise reading them.
    bool projects_by_step(const Split& split) const {
        const int64_t inputs = rows_.layer_inputs(layer_);
        const int64_t weight_bytes = rows_.gates_row * (inputs + shape_.units) * int64_t(sizeof(A));
        const int64_t ranges = int64_t(split.groups.size()) / shape_.directions;
        const bool enough_rows = rows_.rows > 0 && rows_.rows >= 8 * ranges * shape_.steps;
        return !looks_up() && inputs > 0 && enough_rows && weight_bytes <= near_cache_bytes() * 3 / 4;
    }
    bool looks_up() const { return layer_ == 0 && call_.lookup.indices && rows_.rows > 0; }
    // The states of a step's slots, in panels; without a cache, two buffers alternate. And the row of its gates.
    int64_t state_panel() const { return keeps_ ? rows_.panel : 2 * saved_panel(); }
    int64_t saved_panel() const { return rows_.padded(shape_.samples) * kPanel<A>; }
    StateArray<A> states_at(A* states, int64_t d, int64_t p, int64_t slot) const {
        const int64_t row = keeps_ ? rows_.first(rows_.time(d, p)) : p % 2 * rows_.padded(shape_.samples);
        return {states + (row + slot) * kPanel<A>, kPanel<A>, state_panel()};
    }
    int64_t gates_at(int64_t d, int64_t p) const {
        return rows_.first(rows_.time(d, p)) - (keeps_ ? 0 : first_row_[d]);
    }

    void take_scratch(A* base, int64_t segment) {
        ForwardScratch& scratch = my_scratch();
        const int64_t directions = shape_.directions, samples = shape_.samples;
        const int64_t state = rows_.blocks * saved_panel();
        if (looks_up()) table_ = scratch.table.take<A>(directions, call_.lookup.rows, rows_.gates_row);
        bias_ = scratch.bias.take<A>(directions * rows_.gates_row);
        weights_ = scratch.weights.take<A>(directions * rows_.gates_row * shape_.units);
        saved_ = scratch.saved.take<A>(directions * 2 * state);
        if (shape_.peephole == Peephole::diagonal) {
            peephole_ = scratch.diagonals.take<A>(directions * rows_.gates_row);
        } else if (shape_.peephole == Peephole::full) {
            peephole_ = scratch.peepholes.take<A>(directions * rows_.gates_row * shape_.units);
            if (two_halves()) c_new_ = scratch.c_new.take<A>(directions * samples * rows_.state_row);
        }
        const int64_t each = samples * segment * rows_.gates_row + 4 * state;
        A* states = keeps_ ? nullptr : scratch.states.take<A>(directions * each);
        for (int64_t d = 0; d < directions; ++d) {
            if (keeps_) {
                cell_[d] = cell_cache(rows_, base, cell_index(d));
            } else {
                A* gates = states + d * each;
                A* c_prev = gates + samples * segment * rows_.gates_row;
                cell_[d] = {gates, c_prev, c_prev + 2 * state};
            }
        }
    }

    A* saved_h(int64_t d) const { return saved_ + d * 2 * rows_.blocks * saved_panel(); }
    A* saved_c(int64_t d) const { return saved_h(d) + rows_.blocks * saved_panel(); }

    void prepare(int64_t d) {
        pack_vector(arrays(d).b, shape_.units, bias_ + d * rows_.gates_row);
        pack_forward(products_, matrix<const A>(arrays(d).wh), shape_.units, shape_.units, weights(d), call_.threads);
        if (shape_.peephole == Peephole::diagonal) {
            pack_vector(arrays(d).peephole, shape_.units, peephole_ + d * rows_.gates_row);
        } else if (shape_.peephole == Peephole::full) {
            pack_forward(products_, matrix<const A>(arrays(d).peephole), shape_.units, shape_.units, peephole(d),
                         call_.threads);
        }
        for (int64_t slot = 0; slot < shape_.samples; ++slot) {
            load_state(call_.h0, d, slot, saved_h(d));
            load_state(call_.c0, d, slot, saved_c(d));
        }
        enter(d, 0, 0, shape_.samples, 0, rows_.blocks);
    }
    void prepare_inputs(const StateArray<const A>& u) {
        u_ = u;
        const int64_t inputs = rows_.layer_inputs(layer_);
        input_weights_ = my_scratch().input_weights.take<A>(shape_.directions * rows_.gates_row * inputs);
        for (int64_t d = 0; d < shape_.directions; ++d) {
            pack_forward(products_, matrix<const A>(arrays(d).wx), shape_.units, inputs, input_weights(d),
                         call_.threads);
        }
    }
    void project_rows(const StateArray<const A>& u, int64_t rows, int64_t d, A* gates) const {
        project(products_, u, rows, rows_.layer_inputs(layer_), shape_.units, matrix<const A>(arrays(d).wx),
                bias_ + d * rows_.gates_row, gates, my_scratch().input_weights, call_.threads);
    }
    // The table's rows as gates.
    A* table(int64_t d) const { return table_ + d * call_.lookup.rows * rows_.gates_row; }
    A* input_weights(int64_t d) const { return input_weights_ + d * rows_.gates_row * rows_.layer_inputs(layer_); }
    A* weights(int64_t d) const { return weights_ + d * rows_.gates_row * shape_.units; }
    A* peephole(int64_t d) const { return peephole_ + d * rows_.gates_row * shape_.units; }

    void load_state(const States& states, int64_t d, int64_t slot, A* saved) const {
        const A* from = static_cast<const A*>(states.data);
        if (from) from += cell_index(d) * states.cell + rows_.sample(slot) * states.sample;
        for (int64_t block = 0; block < rows_.blocks; ++block) {
            A* to = saved + block * saved_panel() + slot * kPanel<A>;
            for (int64_t u = 0; u < kPanel<A>; ++u) {
                const int64_t unit = block * kPanel<A> + u;
                to[u] = from && unit < shape_.units ? from[unit] : A(0);
            }
        }
    }

    // Slots that are active in step p but not in the step before load their state from `saved`.
    void enter(int64_t d, int64_t p, int64_t first_slot, int64_t last_slot, int64_t first_block, int64_t last_block) {
        const int64_t first = std::max(first_slot, rows_.active_at(d, p - 1));
        const int64_t last = std::min(last_slot, rows_.active_at(d, p));
        if (first >= last) return;
        A* const to[2] = {states_at(cell_[d].h_prev, d, p, first).data, states_at(cell_[d].c_prev, d, p, first).data};
        const A* const from[2] = {saved_h(d) + first * kPanel<A>, saved_c(d) + first * kPanel<A>};
        for (int64_t block = first_block; block < last_block; ++block) {
            for (int i = 0; i < 2; ++i) {
                const A* source = from[i] + block * saved_panel();
                std::copy(source, source + (last - first) * kPanel<A>, to[i] + block * state_panel());
            }
        }
    }

    // gates += a * panels, for `count` of the panels
    void multiply(const StateArray<A>& a, int64_t rows, const A* panels, int64_t panel, int64_t count, A* gates) const {
        const A* base = gates + panel * kPanel<A>;
        multiply({a.data, a.row, a.panel}, rows, shape_.units, panels, panel, count, base, rows_.gates_row, gates);
    }
    void multiply(const StateArray<const A>& a, int64_t rows, int64_t depth, const A* panels, int64_t panel,
                  int64_t count, const A* base, int64_t base_row, A* gates) const {
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
        product.c = gates + panel * kPanel<A>;
        product.c_row = rows_.gates_row;
        product.base = base;
        product.base_row = base_row;
        products_.product(product);
    }
    // The contribution of the layer's input to the gates, plus the bias.
    void multiply_input(int64_t d, int64_t row, int64_t rows, int64_t block, int64_t count, A* gates) const {
        const int64_t panel = 4 * block;
        multiply({u_.data + row * u_.row, u_.row, u_.panel}, rows, rows_.layer_inputs(layer_), input_weights(d), panel,
                 4 * count, bias_ + d * rows_.gates_row + panel * kPanel<A>, 0, gates);
    }

    void run_step(int64_t p, CellPhase phase, const Group& group, int64_t first_block, int64_t last_block) {
        const int64_t d = group.direction, slot = group.first_slot;
        const int64_t rows = std::min(rows_.active_at(d, p), group.last_slot) - slot;
        // The number of these rows that continue to the next step; the others save their state to `saved`.
        const int64_t going_on = std::min(rows, std::max<int64_t>(0, rows_.active_at(d, p + 1) - slot));
        // The number with a nonzero state; the others begin with this step and have no initial state.
        const int64_t begun = std::min(rows, std::max<int64_t>(0, rows_.begun(d, p) - slot));
        const int64_t h_rows = call_.h0.data ? rows : begun, c_rows = call_.c0.data ? rows : begun;
        if (rows > 0) {
            A* gates = cell_[d].gates + (gates_at(d, p) + slot) * rows_.gates_row;
            const StateArray<A> h_prev = states_at(cell_[d].h_prev, d, p, slot);
            const StateArray<A> c_prev = states_at(cell_[d].c_prev, d, p, slot), c_new = new_states(d, slot);
            const bool full = shape_.peephole == Peephole::full;
            const auto visit = [&](int64_t block, int64_t count) {
                if (phase != CellPhase::output) {
                    if (input_weights_)
                        multiply_input(d, rows_.first(rows_.time(d, p)) + slot, rows, block, count, gates);
                    if (looks_up()) look_up(d, rows_.time(d, p), slot, rows, block, count, gates);
                    multiply(h_prev, h_rows, weights(d), 4 * block, 4 * count, gates);
                    if (full && shape_.output_reads_old)
                        multiply(c_prev, c_rows, peephole(d), 4 * block, 4 * count, gates);
                    for (int64_t j = block; j < block + count && phase == CellPhase::state; ++j) {
                        multiply(c_prev, c_rows, peephole(d), 4 * j, 3, gates);
                    }
                } else {
                    for (int64_t j = block; j < block + count; ++j)
                        multiply(c_new, rows, peephole(d), 4 * j + 3, 1, gates);
                }
                if (going_on > 0) {
                    cells(p, phase, d, slot, block, count, 0, going_on, states_at(cell_[d].h_prev, d, p + 1, slot),
                          states_at(cell_[d].c_prev, d, p + 1, slot));
                }
                if (going_on < rows) {
                    cells(p, phase, d, slot, block, count, going_on, rows,
                          {saved_h(d) + slot * kPanel<A>, kPanel<A>, saved_panel()},
                          {saved_c(d) + slot * kPanel<A>, kPanel<A>, saved_panel()});
                }
            };
            for_block_groups(first_block, last_block, blocks_together(products_, rows), p % 2 == 1, visit);
        }
        if (phase != CellPhase::state && p + 1 < shape_.steps) {
            enter(d, p + 1, group.first_slot, group.last_slot, first_block, last_block);
        }
    }

    void look_up(int64_t d, int64_t t, int64_t slot, int64_t rows, int64_t block, int64_t count, A* gates) const {
        const int64_t first = 4 * block * kPanel<A>, size = 4 * count * kPanel<A>;
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

    // Rows first to last of the slots from `slot` on; their new states are written to h_next and c_next.
    void cells(int64_t p, CellPhase phase, int64_t d, int64_t slot, int64_t block, int64_t count, int64_t first,
               int64_t last, const StateArray<A>& h_next, const StateArray<A>& c_next) const {
        const int64_t t = rows_.time(d, p), unit = block * kPanel<A>;
        const int64_t output_unit = d * shape_.units + unit;
        CellForward<A> f = {};
        f.activations = &shape_.activations;
        f.phase = phase;
        f.rows = last - first;
        f.blocks = count;
        f.units = std::min(count * kPanel<A>, shape_.units - unit);
        f.gates_row = rows_.gates_row;
        f.gates = cell_[d].gates + (gates_at(d, p) + slot + first) * rows_.gates_row + 4 * unit;
        const StateArray<A> c_prev = part(states_at(cell_[d].c_prev, d, p, slot), first, block);
        f.c_prev = {c_prev.data, c_prev.row, c_prev.panel};
        f.peephole = shape_.peephole == Peephole::diagonal ? peephole_ + d * rows_.gates_row + 4 * unit : nullptr;
        f.output_reads_old = shape_.output_reads_old;
        f.c_next = part(c_next, first, block);
        f.h_next = part(h_next, first, block);
        if (c_new_) f.c_new = part(new_states(d, slot), first, block);
        if (above_) {
            const int64_t row = rows_.first(t) + slot + first;
            // In rows, a direction may begin at any column; in panels, it begins with a panel.
            const int64_t column = rows_.above_panels ? output_unit / kPanel<A> * rows_.above_panel : output_unit;
            f.above = {above_ + column + row * rows_.above_row, rows_.above_row, rows_.above_panel};
        } else if (call_.y.data) {
            f.y = static_cast<A*>(call_.y.data) + t * call_.y.step + output_unit;
            f.y_offset = y_offset_ + slot + first;
        }
        kernels_.forward_cells(f);
    }

    static StateArray<A> part(StateArray<A> states, int64_t row, int64_t block) {
        states.data += row * states.row + block * states.panel;
        return states;
    }

    void finish(int64_t d) const {
        for (const auto& [states, saved] : {std::pair(&call_.hn, saved_h(d)), std::pair(&call_.cn, saved_c(d))}) {
            if (!states->data) continue;
            for (int64_t slot = 0; slot < shape_.samples; ++slot) {
                const A* from = saved + slot * kPanel<A>;
                A* to =
                    static_cast<A*>(states->data) + cell_index(d) * states->cell + rows_.sample(slot) * states->sample;
                for (int64_t u = 0; u < shape_.units; ++u) to[u] = from[u / kPanel<A> * saved_panel() + u % kPanel<A>];
            }
        }
    }

    const LstmForward& call_;
    const Rows<A>& rows_;
    const LstmKernels<A>& kernels_;
    const ProductKernels<A>& products_ = kernel_table().product.of<A>();
    const LstmShape& shape_;
    const int64_t layer_;
    const int64_t* y_offset_;
    bool keeps_ = false;
    A *above_ = nullptr, *bias_ = nullptr, *weights_ = nullptr, *input_weights_ = nullptr, *peephole_ = nullptr,
      *saved_ = nullptr, *c_new_ = nullptr, *table_ = nullptr;
    StateArray<const A> u_ = {};
    CellCache<A> cell_[2] = {};
    int64_t first_row_[2] = {};
};

template <class A>
void forward(const LstmForward& call, A* base) {
    const LstmShape& s = call.shape;
    const Rows<A> rows(s);
    const LstmKernels<A>& kernels = kernel_table().lstm.of<A>();
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

template <class A>
int64_t cache_elements(const LstmShape& shape, int64_t rows) {
    const RowSizes<A> sizes(shape, rows);
    return shape.layers * shape.directions * cell_elements(sizes) + (shape.layers - 1) * sizes.above_elements;
}

// The product of non-negative sizes, capped so that it cannot overflow. 2^58 of the largest elements are 2^61 bytes.
int64_t capped_product(std::initializer_list<int64_t> factors) {
    constexpr int64_t kCap = int64_t(1) << 61;
    int64_t product = 1;
    for (const int64_t factor : factors) {
        if (factor == 0) return 0;
        product = product > kCap / factor ? kCap : product * factor;
    }
    return product;
}

int64_t size_of(DType dtype) { return dtype == DType::f64 ? 8 : 4; }

}  // namespace

void lstm_slots(int64_t steps, int64_t samples, const int64_t* lengths, int64_t* active, int64_t* order) {
    std::iota(order, order + samples, int64_t(0));
    std::sort(order, order + samples,
              [&](int64_t a, int64_t b) { return lengths[a] != lengths[b] ? lengths[a] > lengths[b] : a < b; });
    int64_t slots = samples;
    for (int64_t t = 0; t < steps; ++t) {
        while (slots > 0 && lengths[order[slots - 1]] <= t) --slots;
        active[t] = slots;
    }
}

bool lstm_fits(const LstmShape& s) {
    constexpr int64_t kMost = int64_t(1) << 58, kWidest = 32;  // elements; a panel plus the padding of rows
    for (const int64_t size : {s.steps, s.samples, s.inputs, s.units, s.layers}) {
        if (size > kMost) return false;
    }
    const int64_t rows = capped_product({s.steps + 1, s.samples + 1}) + 64, units = s.units + kWidest;
    const int64_t widest = std::max(s.inputs, s.directions * units) + kWidest, cells = s.layers * s.directions;
    // Per row, a cell has four gates, two states and its output; weights have four gates.
    return capped_product({rows, std::max(8 * units, widest), cells + 1}) < kMost &&
           capped_product({8 * units, widest, cells + 1}) < kMost;
}

int64_t lstm_cache_bytes(const LstmShape& shape) { return lstm_cache_bytes(shape, Rows<float>::count(shape)); }

int64_t lstm_cache_bytes(const LstmShape& shape, int64_t rows) {
    const int64_t elements =
        shape.dtype == DType::f64 ? cache_elements<double>(shape, rows) : cache_elements<float>(shape, rows);
    return int64_t(sizeof(CacheHeader)) + kCacheAlign + elements * size_of(shape.dtype);
}

CacheState lstm_check_cache(const LstmShape& shape, const void* cache) {
    CacheHeader header;
    memcpy(&header, cache, sizeof header);
    if (header.magic != kMagic || header.offset - sizeof header >= kCacheAlign) return {CacheCheck::foreign, 0};
    const bool same = header.fingerprint == fingerprint(shape);
    return {same ? CacheCheck::good : CacheCheck::other_problem, header.stamp};
}

void lstm_forward(const LstmForward& call) {
    CacheHeader header = {};
    char* base = nullptr;
    if (call.cache) {
        base = static_cast<char*>(call.cache) + sizeof header;
        base += -reinterpret_cast<uintptr_t>(base) % kCacheAlign;
        memcpy(call.cache, &header, sizeof header);  // invalid until the pass is complete
    }
    if (call.shape.dtype == DType::f64) {
        forward(call, reinterpret_cast<double*>(base));
    } else {
        forward(call, reinterpret_cast<float*>(base));
    }
    if (call.cache) {
        header = {kMagic, fingerprint(call.shape), call.stamp, uint64_t(base - static_cast<char*>(call.cache))};
        memcpy(call.cache, &header, sizeof header);
    }
}

namespace {

template <class A>
void show(const LstmShape& s, const void* cache, int64_t cell, A* gates, A* states) {
    const Rows<A> rows(s);
    const LstmKernels<A>& kernels = kernel_table().lstm.of<A>();
    Buffer buffer;
    const CellCache<const A> kept = cell_cache(rows, cache_data<A>(s, cache, buffer), cell);
    const int64_t all = s.steps * s.samples;
    if (gates) std::fill(gates, gates + all * 4 * s.units, A(0));
    if (states) std::fill(states, states + all * s.units, A(0));
    rows.for_each_row(0, rows.rows, [&](int64_t row, int64_t t, int64_t sample) {
        const int64_t place = t * s.samples + sample;
        CellShow<A> c = {};
        c.activations = &s.activations;
        c.units = s.units;
        c.gates = kept.gates + row * rows.gates_row;
        c.c_prev = {kept.c_prev + row * kPanel<A>, kPanel<A>, rows.panel};
        c.values = gates ? gates + place * 4 * s.units : nullptr;
        c.values_gate = s.units;
        c.c = states ? states + place * s.units : nullptr;
        kernels.show_cells(c);
    });
}

}  // namespace

void lstm_show(const LstmShape& shape, const void* cache, int64_t cell, void* gates, void* states) {
    if (shape.dtype == DType::f64) {
        show(shape, cache, cell, static_cast<double*>(gates), static_cast<double*>(states));
    } else {
        show(shape, cache, cell, static_cast<float*>(gates), static_cast<float*>(states));
    }
}

}  // namespace rg
