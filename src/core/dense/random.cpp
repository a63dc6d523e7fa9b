#include "random.h"

#include <algorithm>

#include "../base/blocks.h"
#include "../base/parallel.h"

namespace rg {
namespace {

constexpr int64_t kTogether = 512;  // blocks of one task

struct State {
    uint32_t counter[4], key[2];

    explicit State(const int32_t* state) {
        for (int i = 0; i < 4; ++i) counter[i] = uint32_t(state[1 + i]);
        for (int i = 0; i < 2; ++i) key[i] = uint32_t(state[5 + i]);
    }
    void advance(uint64_t blocks) {
        uint64_t low = uint64_t(counter[2]) << 32 | counter[3], high = uint64_t(counter[0]) << 32 | counter[1];
        low += blocks;
        high += low < blocks;
        counter[3] = uint32_t(low);
        counter[2] = uint32_t(low >> 32);
        counter[1] = uint32_t(high);
        counter[0] = uint32_t(high >> 32);
    }
    void block(uint32_t (&word)[4]) const {
        uint32_t w0 = counter[0], w1 = counter[1], w2 = counter[2], w3 = counter[3], k0 = key[0], k1 = key[1];
        for (int round = 0; round < 10; ++round) {
            const uint64_t p = uint64_t(0xD2511F53u) * w0, q = uint64_t(0xCD9E8D57u) * w2;
            w0 = uint32_t(q >> 32) ^ w1 ^ k0;
            w1 = uint32_t(q);
            w2 = uint32_t(p >> 32) ^ w3 ^ k1;
            w3 = uint32_t(p);
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        word[0] = w0, word[1] = w1, word[2] = w2, word[3] = w3;
    }
};

}  // namespace

void philox(const PhiloxCall& call) {
    const State start(call.state);
    const int64_t blocks = ceil_div(call.count, 4);
    Workers(4 * cost::kElement * double(call.count), call.threads).each(ceil_div(blocks, kTogether), [&](int64_t task) {
        const int64_t first = task * kTogether, last = std::min(first + kTogether, blocks);
        State state = start;
        state.advance(uint64_t(first));
        uint32_t word[4];
        for (int64_t b = first; b < last; ++b, state.advance(1)) {
            state.block(word);
            const int64_t count = std::min<int64_t>(4, call.count - 4 * b);
            for (int64_t i = 0; i < count; ++i) call.words[4 * b + i] = word[i];
        }
    });
    State after = start;
    after.advance(uint64_t(blocks));
    call.next[0] = call.state[0];
    for (int i = 0; i < 4; ++i) call.next[1 + i] = int32_t(after.counter[i]);
    for (int i = 0; i < 2; ++i) call.next[5 + i] = int32_t(after.key[i]);
}

}  // namespace rg
