// Allocation, and a pool that keeps the memory of deleted results for later ones: fresh pages cost more than most of
// the work done in them.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace rg {

// Aligned to a cache line or better, for free(). Throws std::bad_alloc.
void* allocate(size_t bytes);

// Asks the system for huge pages, as far as they fit into this memory. That is worth a system call for fresh memory of
// many megabytes.
void prefer_huge_pages(void* data, size_t bytes);

// Under AddressSanitizer, poisons all but the first `used` bytes.
void guard(void* data, size_t used, size_t bytes);

struct Memory {
    void* data = nullptr;
    size_t bytes = 0;
};

// Takes memory for a result of at least `bytes` bytes; give_memory returns it to the pool when the result is deleted.
// The total never exceeds what results once needed at the same time, and the unused part is capped. Thread-safe.
Memory take_memory(size_t bytes);
void give_memory(Memory memory);

int64_t waiting_bytes();
// Returns all unused memory to the system; returns the number of bytes.
int64_t release_memory();

}  // namespace rg
