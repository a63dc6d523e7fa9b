// The sizes of the machine's caches, and what follows from them. The order of work and the kind of stores depend on
// them, never the results.
#pragma once

#include <stdint.h>

namespace rg {

// Bytes. A core's first and second level, and the last level, which `last_level_cores` CPUs share.
struct Caches {
    int64_t l1, l2, last_level;
    int last_level_cores;
};

// Read from the system when first called.
const Caches& caches();
// Replaces them for all later calls, so that tests reach every choice on any machine. Null: back to the machine's own.
void override_caches(const Caches* replacement);

// What a thread can expect to keep in its second-level cache: some of it holds other data.
inline int64_t near_cache_bytes() { return caches().l2 * 7 / 8; }

// What it can expect to keep in the last level, if the other CPUs that share it are as busy.
inline int64_t far_cache_bytes() { return caches().last_level / caches().last_level_cores; }

// Whether a call that touches `bytes` bytes writes its results with non-temporal stores. Into data that fits the last
// level, plain stores are several times faster; beyond it, non-temporal stores save reading what is overwritten. On a
// Zen 4 they are equally fast at about three quarters of the last level, on a Zen 3 at more.
inline bool exceeds_caches(int64_t bytes) { return bytes > caches().last_level / 4 * 3; }

}  // namespace rg
