// Scratch memory that a thread keeps from call to call.
#pragma once

#include <stdint.h>
#include <stdlib.h>

#include <algorithm>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "memory.h"

namespace rg {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The state that a thread keeps from call to call, freed when the thread ends. Not thread_local variables: the C
// library allocates those on first use and aborts the process when it is out of memory. This throws std::bad_alloc.
struct ThreadState {
    struct Object {
        virtual ~Object() = default;
    };
    static constexpr int kSlots = 32;

    class Buffer* buffers = nullptr;        // all of the thread's buffers; declared first, so it outlives `slots`
    std::unique_ptr<Object> slots[kSlots];  // one for each type
};
ThreadState& thread_state();
int new_thread_slot();

// The calling thread's T.
template <class T>
T& kept_by_thread() {
    struct Holder final : ThreadState::Object {
        T value;
    };
    static const int slot = new_thread_slot();
    std::unique_ptr<ThreadState::Object>& object = thread_state().slots[slot];
    if (!object) object = std::make_unique<Holder>();
    return static_cast<Holder&>(*object).value;
}

// A buffer that its thread keeps from call to call. Its contents are valid until a larger size is taken.
class Buffer {
public:
    Buffer() : link_(&thread_state().buffers) {
        next_ = *link_;
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
        if (count < 0 || size_t(count) > kMost / sizeof(T)) throw std::bad_alloc();
        // Never null, even for 0 elements: to drivers null means "not wanted".
        const size_t bytes = std::max<size_t>(64, (size_t(count) * sizeof(T) + 63) / 64 * 64);
        if (bytes > capacity_) {
            release();
            const size_t size = std::max(bytes, kLeast);
            data_ = allocate(size);
            capacity_ = size;
        }
        guard(data_, size_t(count) * sizeof(T), capacity_);
        return static_cast<T*>(data_);
    }
    // Takes as many elements as the product of these sizes; throws if the product overflows.
    template <class T, class... Factors>
    T* take(int64_t first, int64_t second, Factors... more) {
        int64_t product = 0;
        if (__builtin_mul_overflow(first, second, &product)) throw std::bad_alloc();
        return take<T>(product, more...);
    }
    void trim() {
        if (capacity_ > kKeep) release();
    }
    // Frees all of this thread's buffers; returns the number of bytes. Not during a call.
    static int64_t release_all() {
        size_t bytes = 0;
        for (Buffer* b = thread_state().buffers; b; b = b->next_) {
            bytes += b->capacity_;
            b->release();
        }
        return int64_t(bytes);
    }

private:
    void release() {
        free(data_);
        data_ = nullptr;
        capacity_ = 0;
    }

    static constexpr size_t kLeast = 4096, kKeep = 256u << 20, kMost = SIZE_MAX / 4;
    Buffer *next_ = nullptr, **link_;  // a linked list; link_ points to the pointer to this buffer
    void* data_ = nullptr;
    size_t capacity_ = 0;
};

// Memory that vectors have given back, kept by its thread: a call like an earlier one allocates nothing.
class SpareBlocks {
public:
    SpareBlocks() = default;
    ~SpareBlocks() {
        for (Block*& first : spare_) {
            while (first) free(std::exchange(first, first->next));
        }
    }
    SpareBlocks(const SpareBlocks&) = delete;
    SpareBlocks& operator=(const SpareBlocks&) = delete;

    void* take(size_t bytes) {
        const int size = size_class(bytes);
        if (Block* const block = size < kSizes ? spare_[size] : nullptr) {
            spare_[size] = block->next;
            return block;
        }
        void* const memory = malloc(size < kSizes ? kLeast << size : bytes);
        if (!memory) throw std::bad_alloc();
        return memory;
    }
    void give(void* memory, size_t bytes) {
        const int size = size_class(bytes);
        if (size >= kSizes) return free(memory);
        spare_[size] = new (memory) Block{spare_[size]};
    }

private:
    struct Block {
        Block* next;
    };
    static constexpr size_t kLeast = 64;
#if defined(__SANITIZE_ADDRESS__)
    static constexpr int kSizes = 0;  // so that every access out of bounds is seen
    Block* spare_[1] = {};
#else
    static constexpr int kSizes = 15;  // up to 1 MiB
    Block* spare_[kSizes] = {};
#endif
    static int size_class(size_t bytes) {
        int size = 0;
        while (size < kSizes && (kLeast << size) < bytes) ++size;
        return size;
    }
};

template <class T>
struct SpareAllocator {
    using value_type = T;
    SpareAllocator() = default;
    template <class U>
    SpareAllocator(const SpareAllocator<U>&) {}
    T* allocate(size_t count) {
        if (count > SIZE_MAX / 4 / sizeof(T)) throw std::bad_alloc();
        return static_cast<T*>(kept_by_thread<SpareBlocks>().take(count * sizeof(T)));
    }
    void deallocate(T* memory, size_t count) { kept_by_thread<SpareBlocks>().give(memory, count * sizeof(T)); }
    friend bool operator==(const SpareAllocator&, const SpareAllocator&) { return true; }
    friend bool operator!=(const SpareAllocator&, const SpareAllocator&) { return false; }
};
// For what a driver needs during a call.
template <class T>
using Vector = std::vector<T, SpareAllocator<T>>;

}  // namespace rg
