// The cache of a forward pass: its size, its header, and what callers may see of it.
#include <algorithm>
#include <initializer_list>
#include <numeric>

#include "rows.h"

namespace rg {
namespace {

constexpr uint64_t kMagic = 0x314e4e5254455230;  // "0RETRNN1"

// A hash of everything that the layout and meaning of a cache depend on: FNV-1a of words, whose upper bits are mixed
// in, because a multiplication carries only upwards.
class Fingerprint {
public:
    template <class T>
    void add(T value) {
        uint64_t word = 0;
        memcpy(&word, &value, sizeof value);
        hash_ = (hash_ ^ word) * 0x100000001b3u;
        hash_ ^= hash_ >> 32;
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

uint64_t fingerprint(const RecurrentShape& s) {
    Fingerprint f;
    for (const int64_t v : {s.steps, s.samples, s.inputs, s.units, s.layers, s.directions, s.projection}) f.add(v);
    f.add(s.dtype);
    f.add(s.rule.kind);
    for (const Activation& a : s.rule.activations.gate) f.add(a);
    f.add(s.rule.activations.hidden);
    for (const bool v : {s.rule.output_reads_old, s.rule.coupled, s.rule.flip, s.has_zoneout}) f.add(v);
    for (const double v : {s.rule.clip, s.rule.cell_clip, s.dropout, s.eps}) f.add(v);
    f.add(s.peephole);
    f.add(s.norm);
    f.add(s.mask_kind);
    f.add(s.seed);
    for (int64_t t = 0; s.active && t < s.steps; ++t) f.add(s.active[t]);
    for (int64_t n = 0; s.order && n < s.samples; ++n) f.add(s.order[n]);
    for (int64_t i = 0; s.reset && i < s.steps * s.samples; ++i) f.add(s.reset[i] != 0);
    return f.value();
}

template <class A>
int64_t cache_elements(const RecurrentShape& shape, int64_t rows) {
    const RowSizes<A> sizes(shape, rows);
    return shape.layers * shape.directions * CellSizes<A>(shape, sizes).total() +
           (shape.layers - 1) * sizes.above_elements;
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

template <class A>
void show(const RecurrentShape& s, const void* cache, int64_t cell, A* gates, A* states) {
    const Rows<A> rows(s);
    const CellKernels<A>& kernels = kernel_table().cell.of<A>();
    Buffer buffer;
    const CellCache<const A> kept = cell_cache(rows, cache_data<A>(s, cache, buffer), cell);
    const int64_t all = s.steps * s.samples;
    if (gates) std::fill(gates, gates + all * rows.gates * s.units, A(0));
    if (states) std::fill(states, states + all * s.units, A(0));
    rows.for_each_row(0, rows.rows, [&](int64_t row, int64_t t, int64_t sample) {
        const int64_t place = t * s.samples + sample;
        CellShow<A> c = {};
        c.rule = &s.rule;
        c.units = s.units;
        c.gates = kept.gates + row * rows.gates_row;
        if (kept.c_prev) c.c_prev = {kept.c_prev + row * kPanel<A>, kPanel<A>, rows.panel};
        c.values = gates ? gates + place * rows.gates * s.units : nullptr;
        c.values_gate = s.units;
        c.c = states ? states + place * s.units : nullptr;
        kernels.show_cells(c);
    });
}

}  // namespace

void recurrent_slots(int64_t steps, int64_t samples, const int64_t* lengths, int64_t* active, int64_t* order) {
    std::iota(order, order + samples, int64_t(0));
    std::sort(order, order + samples,
              [&](int64_t a, int64_t b) { return lengths[a] != lengths[b] ? lengths[a] > lengths[b] : a < b; });
    int64_t slots = samples;
    for (int64_t t = 0; t < steps; ++t) {
        while (slots > 0 && lengths[order[slots - 1]] <= t) --slots;
        active[t] = slots;
    }
}

bool recurrent_fits(const RecurrentShape& s) {
    constexpr int64_t kMost = int64_t(1) << 58, kWidest = 32;  // elements; a panel plus the padding of rows
    for (const int64_t size : {s.steps, s.samples, s.inputs, s.units, s.layers}) {
        if (size > kMost) return false;
    }
    const int64_t rows = capped_product({s.steps + 1, s.samples + 1}) + 64, units = s.units + kWidest;
    const int64_t widest = std::max(s.inputs, s.directions * units) + kWidest, cells = s.layers * s.directions;
    // Per row, a cell has at most four gates, three states and its output; with a norm the gates three times, with
    // masks of each gate three more states. Weights have four gates.
    const int64_t most = s.norm != CellNorm::none || s.mask_kind == MaskKind::each ? 16 : 8;
    return capped_product({rows, std::max(most * units, widest), cells + 1}) < kMost &&
           capped_product({8 * units, widest, cells + 1}) < kMost;
}

int64_t recurrent_cache_bytes(const RecurrentShape& shape) {
    return recurrent_cache_bytes(shape, Rows<float>::count(shape));
}

int64_t recurrent_cache_bytes(const RecurrentShape& shape, int64_t rows) {
    const int64_t elements =
        shape.dtype == DType::f64 ? cache_elements<double>(shape, rows) : cache_elements<float>(shape, rows);
    return int64_t(sizeof(CacheHeader)) + kCacheAlign + elements * size_of(shape.dtype);
}

CacheState recurrent_check_cache(const RecurrentShape& shape, const void* cache) {
    CacheHeader header;
    memcpy(&header, cache, sizeof header);
    if (header.magic != kMagic || header.offset - sizeof header >= kCacheAlign) return {CacheCheck::foreign, 0};
    const bool same = header.fingerprint == fingerprint(shape);
    return {same ? CacheCheck::good : CacheCheck::other_problem, header.stamp};
}

void* open_cache(void* cache) {
    const CacheHeader header = {};
    memcpy(cache, &header, sizeof header);
    char* const base = static_cast<char*>(cache) + sizeof header;
    return base + -reinterpret_cast<uintptr_t>(base) % kCacheAlign;
}

void seal_cache(const RecurrentShape& shape, uint64_t stamp, void* cache, const void* base) {
    const uint64_t offset = uint64_t(static_cast<const char*>(base) - static_cast<char*>(cache));
    const CacheHeader header = {kMagic, fingerprint(shape), stamp, offset};
    memcpy(cache, &header, sizeof header);
}

void recurrent_show(const RecurrentShape& shape, const void* cache, int64_t cell, void* gates, void* states) {
    if (shape.dtype == DType::f64) {
        show(shape, cache, cell, static_cast<double*>(gates), static_cast<double*>(states));
    } else {
        show(shape, cache, cell, static_cast<float*>(gates), static_cast<float*>(states));
    }
}

}  // namespace rg
