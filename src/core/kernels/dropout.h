// Dropout with a counter-based generator: an element's draw depends on the seed, its row and its column alone.
#pragma once

#include "../kernels.h"
#include "vec.h"

namespace rg {
namespace {

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
