// Memory from the system, and memory of results that are gone, kept for those to come: fresh pages cost more than most
// of what is done in them.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace rg {

// Aligned to a cache line or better, for free(). Throws std::bad_alloc.
void* allocate(size_t bytes);

// Under AddressSanitizer all of it but the first `used` bytes is out of bounds from now on.
void guard(void* data, size_t used, size_t bytes);

struct Memory {
    void* data = nullptr;
    size_t bytes = 0;
};

// Memory for a result of so many bytes, or a few more. When the result is gone it is given back, and waits. No more is
// held than results once needed at the same time, and only so much waits. For any thread.
Memory take_memory(size_t bytes);
void give_memory(Memory memory);

int64_t waiting_bytes();
// Gives all that waits back to the system, and says how many bytes it was.
int64_t release_memory();

}  // namespace rg
