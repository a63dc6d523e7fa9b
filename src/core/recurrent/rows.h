// Shared by the drivers of recurrent layers: the rows of a ragged batch, the layout of the cache, and how the sweep
// through time is split among threads.
#pragma once

#include <string.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "../base/dispatch.h"
#include "../base/machine.h"
#include "../base/parallel.h"
#include "../base/scratch.h"
#include "../product/gates.h"
#include "recurrent.h"

namespace rg {

// The parameter of `count` gates from `first` on.
template <class A>
GateMatrix<A> matrix(const GateArray& array, int first, int count) {
    GateMatrix<A> m;
    for (int k = 0; k < count; ++k) m.gate[k] = static_cast<A*>(array.gate[first + k]);
    m.row_stride = array.row_stride;
    m.col_stride = array.col_stride;
    m.count = count;
    return m;
}

// A product of a step with the state, for some of the gates. Masks that differ between gates, and a GRU that resets the
// state first, need several.
struct StateProduct {
    int first, count;  // gates
    int copy;          // of the state
    bool reset;        // the operand is the reset state of a GRU instead, in the second half of a step
};

struct StateProducts {
    StateProduct product[4];
    int count = 0;

    explicit StateProducts(const RecurrentShape& s) {
        const int gates = gate_count(s.rule.kind);
        const bool before = s.rule.kind == CellKind::gru_before;
        if (s.mask_kind == MaskKind::each) {
            for (int k = 0; k < gates; ++k) product[count++] = {k, 1, k, before && k == gates - 1};
        } else {
            const int first = before ? gates - 1 : gates;
            product[count++] = {0, first, 0, false};
            if (before) product[count++] = {first, 1, 0, true};
        }
    }
    const StateProduct* begin() const { return product; }
    const StateProduct* end() const { return product + count; }
};

// Sizes of arrays for a number of rows.
template <class A>
struct RowSizes {
    RowSizes(const RecurrentShape& s, int64_t row_count)
        : gates(gate_count(s.rule.kind)),
          blocks(ceil_div(s.units, kPanel<A>)),
          state_row(blocks * kPanel<A>),
          gates_row(gates * state_row),
          out_blocks(ceil_div(s.outputs(), kPanel<A>)),
          out_row(out_blocks * kPanel<A>),
          output(s.directions * s.outputs()),
          above_panels(s.directions == 1 || s.outputs() % kPanel<A> == 0),
          rows(row_count),
          panel(padded(rows) * kPanel<A>) {
        const int64_t output_panels = ceil_div(output, kPanel<A>);
        above_row = above_panels ? kPanel<A> : output_panels * kPanel<A>;
        above_panel = above_panels ? panel : kPanel<A>;
        above_elements = above_panels ? output_panels * panel : rows * above_row;
    }

    // Panels a multiple of 4096 bytes apart would conflict in the same few cache sets.
    static int64_t padded(int64_t rows) { return rows + (16 - rows % 64 + 64) % 64; }

    int gates;
    int64_t blocks, state_row, gates_row;
    int64_t out_blocks, out_row;  // of the hidden state, which a projection makes smaller
    int64_t output;               // features of a layer's output
    // A layer's output where it is the input of the next: in panels, unless a direction ends within one.
    bool above_panels;
    int64_t above_row = 0, above_panel = 0, above_elements = 0;
    int64_t rows;
    int64_t panel;  // from one panel to the next, of arrays of all rows in panels
};

// The rows of one call.
template <class A>
struct Rows : RowSizes<A> {
    using RowSizes<A>::output, RowSizes<A>::rows;

    explicit Rows(const RecurrentShape& s) : RowSizes<A>(s, count(s)), shape(s) {
        if (s.active) {
            first_row.resize(size_t(s.steps) + 1);
            for (int64_t t = 0; t < s.steps; ++t) first_row[size_t(t) + 1] = first_row[size_t(t)] + s.active[t];
            for (int64_t d = 0; d < s.directions; ++d) {
                begun_slots[d].resize(size_t(s.steps) + 1);
                for (int64_t p = 0; p < s.steps; ++p)
                    begun_slots[d][size_t(p) + 1] = std::max(begun(d, p), active_at(d, p));
            }
        }
    }

    static int64_t count(const RecurrentShape& s) {
        return s.active ? std::accumulate(s.active, s.active + s.steps, int64_t(0)) : s.steps * s.samples;
    }
    int64_t first(int64_t t) const { return shape.active ? first_row[size_t(t)] : t * shape.samples; }
    int64_t active(int64_t t) const { return shape.active ? shape.active[t] : shape.samples; }
    int64_t sample(int64_t slot) const { return shape.order ? shape.order[slot] : slot; }
    // The time of a direction's step p, and the number of active slots; 0 before the first step and after the last.
    int64_t time(int64_t direction, int64_t p) const { return direction ? shape.steps - 1 - p : p; }
    int64_t active_at(int64_t direction, int64_t p) const {
        return p < 0 || p >= shape.steps ? 0 : active(time(direction, p));
    }
    // The number of slots that were active in any step before p, for p from 0 to `steps`.
    int64_t begun(int64_t direction, int64_t p) const {
        if (shape.active) return begun_slots[direction][size_t(p)];
        return p == 0 ? 0 : shape.samples;
    }
    int64_t layer_inputs(int64_t layer) const { return layer == 0 ? shape.inputs : output; }

    // The sample of each slot, times its stride.
    Vector<int64_t> offsets(int64_t stride) const {
        Vector<int64_t> found(static_cast<size_t>(shape.samples));
        for (int64_t slot = 0; slot < shape.samples; ++slot) found[size_t(slot)] = sample(slot) * stride;
        return found;
    }

    // Calls visit(row, step, sample) for the rows from first to last.
    template <class Visit>
    void for_each_row(int64_t first, int64_t last, const Visit& visit) const {
        if (!shape.active) {
            for (int64_t r = first; r < last; ++r) visit(r, r / shape.samples, sample(r % shape.samples));
            return;
        }
        int64_t t = std::upper_bound(first_row.begin(), first_row.end(), first) - first_row.begin() - 1;
        for (int64_t r = first; r < last; ++r) {
            while (first_row[size_t(t) + 1] <= r) ++t;
            visit(r, t, sample(r - first_row[size_t(t)]));
        }
    }
    template <class Visit>
    void parallel_rows(int64_t width, int threads, const Visit& visit) const {
        const Workers workers(cost::kCopy * double(rows * width), threads);
        workers.ranges(rows, [&](int64_t first, int64_t last) { for_each_row(first, last, visit); });
    }

    const RecurrentShape& shape;
    Vector<int64_t> first_row, begun_slots[2];
};

// The row stride of a sequence as one matrix, if its rows are evenly spaced.
template <class A>
std::optional<int64_t> even_row_stride(const Rows<A>& rows, const Sequence& sequence) {
    const RecurrentShape& s = rows.shape;
    if (s.active || s.order) return std::nullopt;
    if (s.samples == 1) return sequence.step;
    if (s.steps == 1 || sequence.step == s.samples * sequence.sample) return sequence.sample;
    return std::nullopt;
}

// A factor with the offset of every slot's sample.
template <class A>
class SlotFactor {
public:
    SlotFactor(const Factor& factor, const Rows<A>& rows) : factor_(factor) {
        if (factor.data) offsets_ = rows.offsets(factor.sample);
    }
    // The factor of the units from `unit` on, of the slots from `slot` on.
    RowFactor<A> at(int64_t cell, int64_t t, int64_t unit, int64_t slot) const {
        if (!factor_.data) return {};
        return {static_cast<const A*>(factor_.data) + cell * factor_.cell + t * factor_.step + unit,
                offsets_.data() + slot};
    }

private:
    const Factor& factor_;
    Vector<int64_t> offsets_;
};

// ---- cache ---------------------------------------------------------------------------------------------------------

// The cache of one cell: arrays of `rows` rows. The states are those before each step, because the products need them;
// the new ones are recomputed from them and the gates. Null: the cell has no such array.
template <class A>
struct CellCache {
    A* gates = nullptr;  // in rows
    // In panels. h_prev is the operand of products, with masks, in `copies`; h_own the state itself where it is also
    // read and differs. inner: see CellForward.
    A *c_prev = nullptr, *h_prev = nullptr, *h_own = nullptr, *inner = nullptr;
    // With a norm: the products with x and with h, and their statistics, (center, rstd) of both for every row, and of
    // the cell state.
    A *x_products = nullptr, *h_products = nullptr, *statistics = nullptr;
};

// The sizes of these arrays, in elements.
template <class A>
struct CellSizes {
    CellSizes(const RecurrentShape& s, const RowSizes<A>& rows) {
        const bool gru = is_gru(s.rule.kind), masked = s.mask_kind != MaskKind::none;
        copies = s.mask_kind == MaskKind::each ? rows.gates : 1;
        gates = rows.rows * rows.gates_row;
        c_prev = s.rule.kind == CellKind::lstm ? rows.blocks * rows.panel : 0;
        h_prev = copies * rows.out_blocks * rows.panel;
        h_own = masked && (gru || s.has_zoneout) ? rows.out_blocks * rows.panel : 0;
        inner = gru || s.projection ? rows.blocks * rows.panel : 0;
        if (s.norm != CellNorm::none) {
            products = gates;
            statistics = kStatistics * rows.rows;
        }
    }
    int64_t total() const { return gates + c_prev + h_prev + h_own + inner + 2 * products + statistics; }

    static constexpr int kStatistics = 6;  // center and rstd of the products with x, with h, and of the cell state
    int copies;
    int64_t gates, c_prev, h_prev, h_own, inner, products = 0, statistics = 0;
};

struct CacheHeader {
    uint64_t magic, fingerprint, stamp, offset;  // offset: from the header to the first element
};
constexpr int64_t kCacheAlign = 64;

// Where the elements of a cache begin. It is invalid until seal_cache(), when the pass is complete.
void* open_cache(void* cache);
void seal_cache(const RecurrentShape& shape, uint64_t stamp, void* cache, const void* base);

// T: A or const A.
template <class A, class T>
CellCache<T> cell_cache(const Rows<A>& rows, T* base, int64_t cell) {
    const CellSizes<A> sizes(rows.shape, rows);
    T* next = base + cell * sizes.total();
    const auto take = [&](int64_t elements) {
        T* array = elements > 0 ? next : nullptr;
        next += elements;
        return array;
    };
    CellCache<T> found;
    found.gates = next;
    next += sizes.gates;
    found.c_prev = take(sizes.c_prev);
    found.h_prev = next;
    next += sizes.h_prev;
    found.h_own = take(sizes.h_own);
    found.inner = take(sizes.inner);
    found.x_products = take(sizes.products);
    found.h_products = take(sizes.products);
    found.statistics = take(sizes.statistics);
    return found;
}
// The input of layer 1, 2, ...: the output of the layer below, dropout applied.
template <class A, class T>
T* cached_input(const Rows<A>& rows, T* base, int64_t layer) {
    const RecurrentShape& s = rows.shape;
    return base + s.layers * s.directions * CellSizes<A>(s, rows).total() + (layer - 1) * rows.above_elements;
}

// The elements of a cache that recurrent_forward filled. A cache that was moved in memory may no longer be aligned;
// then they are copied to `buffer`.
template <class A>
const A* cache_data(const RecurrentShape& shape, const void* cache, Buffer& buffer) {
    CacheHeader header;
    memcpy(&header, cache, sizeof header);
    // recurrent_check_cache has seen this header, but another thread may have written to it since.
    const uint64_t offset = std::min<uint64_t>(header.offset, sizeof header + kCacheAlign);
    const char* numbers = static_cast<const char*>(cache) + offset;
    if (reinterpret_cast<uintptr_t>(numbers) % sizeof(A) == 0) return reinterpret_cast<const A*>(numbers);
    const int64_t elements = (recurrent_cache_bytes(shape) - int64_t(sizeof header) - kCacheAlign) / int64_t(sizeof(A));
    A* copy = buffer.take<A>(elements);
    memcpy(copy, numbers, size_t(elements) * sizeof(A));
    return copy;
}

// ---- rows in and out -----------------------------------------------------------------------------------------------

// Packs one vector per gate as a row of panels in the order of a GateMatrix; `absent` for an absent gate.
template <class A>
void pack_vector(const GateMatrix<const A>& vector, int64_t units, A* row, A absent = A(0)) {
    const int64_t blocks = ceil_div(units, kPanel<A>);
    for (int64_t u = 0; u < blocks * kPanel<A>; ++u) {
        for (int k = 0; k < vector.count; ++k) {
            const A* gate = vector.gate[k];
            const int64_t panel = vector.panel(blocks, u / kPanel<A>, k);
            row[panel * kPanel<A> + u % kPanel<A>] = u >= units ? A(0) : gate ? gate[u * vector.row_stride] : absent;
        }
    }
}

template <class A>
void add_or_copy(const A* from, int64_t count, bool add, A* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = add ? to[i] + from[i] : from[i];
}

// Packs the rows of a sequence in panels, padded with 0.
template <class A>
StateArray<const A> gather_panels(const Rows<A>& rows, const Sequence& from, int64_t width, Buffer& buffer,
                                  int threads) {
    A* to = buffer.take<A>(ceil_div(width, kPanel<A>) * rows.panel);
    rows.parallel_rows(width, threads, [&](int64_t row, int64_t t, int64_t sample) {
        const A* source = static_cast<const A*>(from.data) + t * from.step + sample * from.sample;
        A* target = to + row * kPanel<A>;
        int64_t column = 0;
        for (; column + kPanel<A> <= width; column += kPanel<A>, target += rows.panel) {
            memcpy(target, source + column, kPanel<A> * sizeof(A));
        }
        if (column < width) {
            std::copy(source + column, source + width, target);
            std::fill(target + width - column, target + kPanel<A>, A(0));
        }
    });
    return {to, kPanel<A>, rows.panel};
}

// Multiplies the output of a layer, or its gradient, by the dropout mask between it and the layer above.
template <class A>
void drop_rows(const Rows<A>& rows, const CellKernels<A>& kernels, int64_t layer, const StateArray<A>& data,
               int threads) {
    const RecurrentShape& s = rows.shape;
    const Dropout dropout = {s.seed, uint32_t(layer), uint32_t(s.dropout * 0x1p32), 1 / (1 - s.dropout)};
    rows.parallel_rows(4 * rows.output, threads, [&](int64_t row, int64_t t, int64_t sample) {
        kernels.dropout_row(dropout, uint64_t(t * s.samples + sample), data.data + row * data.row, data.panel,
                            rows.output);
    });
}

// ---- threads -------------------------------------------------------------------------------------------------------

// How the sweep through time is split: into groups of one direction and a range of slots, which are independent, and
// each group into `parts` ranges of units, with a barrier after every step.
struct Group {
    int64_t direction, first_slot, last_slot;
};
struct Split {
    Workers workers;
    Vector<Group> groups;
    int parts = 1;
};

template <class A>
Split split_sweep(const Rows<A>& rows, int threads) {
    const RecurrentShape& s = rows.shape;
    const double flops = 2.0 * double(rows.gates * rows.rows) * double(rows.state_row) * double(rows.out_row);
    Split split{Workers(cost::kFlop * flops * double(s.directions), threads), {}, 1};
    int64_t ranges = 1;
    const int64_t each = std::max<int64_t>(1, split.workers.threads() / s.directions);
    if (each > 1 && s.steps > 0) {
        const int64_t weight_bytes = rows.gates_row * rows.out_row * int64_t(sizeof(A));
        const double step_flops = flops / double(s.steps);
        // Splitting slots needs no barrier, but every thread reads all weights. It pays if they stay in its cache, or
        // if there are enough rows to amortise reading them.
        const bool near = weight_bytes <= near_cache_bytes() * 3 / 4;
        if (near || s.samples >= 10 * each) ranges = std::min(each, s.samples);
        // A projection and a norm need whole rows, so only slots are split.
        const bool whole_rows = s.projection || s.norm != CellNorm::none;
        if (whole_rows) ranges = std::min(each, s.samples);
        // Splitting units also splits the weights. A barrier takes about as long as this many flops.
        if (ranges == 1 && step_flops >= 1e5 && !whole_rows) split.parts = int(std::min(each, rows.blocks));
    }
    for (int64_t d = 0; d < s.directions; ++d) {
        // Choose boundaries so that ranges have about the same number of rows.
        int64_t slot = 0, taken = 0;
        for (int64_t r = 0; r < ranges; ++r) {
            const int64_t first = slot, target = rows.rows * (r + 1) / ranges;
            if (!s.active) {
                slot = s.samples * (r + 1) / ranges;
            } else {
                while (slot < s.samples && (taken < target || r + 1 == ranges)) {
                    for (int64_t t = 0; t < s.steps; ++t) taken += s.active[t] > slot;
                    ++slot;
                }
            }
            split.groups.push_back({d, first, slot});
        }
    }
    return split;
}

// Runs body(step, group, first block, last block) for every step. The steps of a part run in order, with a barrier
// between the parts of a group after each step.
template <class Body>
void sweep(const Split& split, int64_t steps, int64_t blocks, const Body& body) {
    const int64_t groups = int64_t(split.groups.size());
    if (split.parts == 1) {
        split.workers.each(groups, [&](int64_t g) {
            for (int64_t p = 0; p < steps; ++p) body(p, split.groups[size_t(g)], 0, blocks);
        });
        return;
    }
    split.workers.phases(steps, int(groups) * split.parts, [&](int64_t p, int part) {
        const int64_t i = part % split.parts;
        body(p, split.groups[size_t(part / split.parts)], blocks * i / split.parts, blocks * (i + 1) / split.parts);
    });
}

// The number of unit blocks whose gates are computed together: as many as fit in the first-level cache.
template <class A>
int64_t blocks_together(const ProductKernels<A>& kernels, int64_t rows) {
    const int64_t wide = kernels.panels_at_once(rows);
    return std::max(wide, 48 / std::max<int64_t>(rows, 1) / wide * wide);
}

// Calls visit(first block, count), forwards in even steps and backwards in odd ones: what a step read last may still be
// in cache when the next step begins.
template <class Visit>
void for_block_groups(int64_t first, int64_t last, int64_t together, bool backwards, const Visit& visit) {
    const int64_t groups = ceil_div(last - first, together);
    for (int64_t g = 0; g < groups; ++g) {
        const int64_t block = first + (backwards ? groups - 1 - g : g) * together;
        visit(block, std::min(together, last - block));
    }
}

}  // namespace rg
