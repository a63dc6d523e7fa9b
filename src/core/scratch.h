// Memory that a thread keeps from call to call, and what it can count on finding in its cache.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>

#include "memory.h"

namespace rg {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of a core's second-level cache that can be counted on. Only the order of work depends on it.
inline int64_t cache_bytes() {
    static const int64_t bytes = [] {
        long found = -1;
#if defined(_SC_LEVEL2_CACHE_SIZE)
        found = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
        return (found > 0 ? int64_t(found) : int64_t(1) << 20) * 7 / 8;
    }();
    return bytes;
}

// A buffer that its thread keeps from call to call. Its contents last until a larger one is taken.
class Buffer {
public:
    Buffer() : next_(first()), link_(&first()) {
        if (next_) next_->link_ = &next_;
        *link_ = this;
    }
    ~Buffer() {
        free(data_);
        *link_ = next_;
        if (next_) next_->link_ = link_;
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    template <class T>
    T* take(int64_t count) {
        const size_t bytes = (size_t(count) * sizeof(T) + 63) / 64 * 64;
        if (bytes > capacity_) {
            release();
            const size_t size = std::max(bytes, kLeast);
            data_ = allocate(size);
            capacity_ = size;
        }
        guard(data_, size_t(count) * sizeof(T), capacity_);  // what an earlier call needed beyond is not this one's
        return static_cast<T*>(data_);
    }
    void trim() {
        if (capacity_ > kKeep) release();
    }
    // Gives back what this thread keeps, between calls, and says how many bytes it was.
    static int64_t release_all() {
        size_t bytes = 0;
        for (Buffer* b = first(); b; b = b->next_) {
            bytes += b->capacity_;
            b->release();
        }
        return int64_t(bytes);
    }

private:
    // The thread's buffers, each with the place of the pointer to it.
    static Buffer*& first() {
        static thread_local Buffer* buffers = nullptr;
        return buffers;
    }
    void release() {
        free(data_);
        data_ = nullptr;
        capacity_ = 0;
    }

    static constexpr size_t kLeast = 4096, kKeep = 256u << 20;
    Buffer *next_, **link_;
    void* data_ = nullptr;
    size_t capacity_ = 0;
};

// Where a thread packs the operands of a product, panels and rows; a quarter of its cache for each, the rest for what
// is written.
inline Buffer& panel_scratch() {
    static thread_local Buffer buffer;
    return buffer;
}
inline Buffer& row_scratch() {
    static thread_local Buffer buffer;
    return buffer;
}
template <class A>
int64_t cached_elements() {
    return cache_bytes() / 4 / int64_t(sizeof(A));
}

}  // namespace rg
