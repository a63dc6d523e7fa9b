// Random bits of the Philox generator, which has a state and no hidden memory.
#pragma once

#include <stdint.h>

namespace rg {

// Philox4x32-10. The state is {1, counter[4], key[2]}, with the counter's most significant word first. Word i is word
// i % 4 of the counter plus i / 4. `next` is the state after ceil(count / 4) blocks.
struct PhiloxCall {
    int64_t count = 0;
    const int32_t* state = nullptr;
    int threads = 1;
    int64_t* words = nullptr;  // from 0 to below 2^32
    int32_t* next = nullptr;
};
void philox(const PhiloxCall& call);

}  // namespace rg
