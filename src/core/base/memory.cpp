#include "memory.h"

#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <mutex>
#include <new>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace rg {
namespace {

constexpr size_t kLine = 64, kHugePage = 2u << 20, kHuge = 2 * kHugePage;
constexpr size_t kMostWaiting = 512u << 20;

// Rounds to size classes about an eighth apart, so that results of similar size can reuse each other's memory.
size_t rounded(size_t bytes) {
    size_t step = kLine;
    while (bytes / step >= 16) step *= 2;
    return (bytes + step - 1) / step * step;
}

// Never destroyed: results may outlive everything else in a process.
class Pool {
public:
    Pool() {
        // Otherwise a child could inherit a lock held by a thread that does not exist in it.
        pthread_atfork([] { pool().lock_.lock(); }, [] { pool().lock_.unlock(); }, [] { pool().lock_.unlock(); });
    }
    static Pool& pool() {
        static Pool& only = *new Pool;
        return only;
    }

    Memory take(size_t bytes) {
        bytes = rounded(bytes);
        const std::lock_guard<std::mutex> lock(lock_);
        // The block returned last is the most likely to be still in cache.
        for (size_t i = waiting_.size(); i-- > 0;) {
            if (waiting_[i].bytes != bytes) continue;
            const Memory memory = waiting_[i];
            waiting_.erase(waiting_.begin() + ptrdiff_t(i));
            waiting_bytes_ -= bytes;
            return memory;
        }
        release(bytes);  // as much as is added, so that the total does not grow
        try {
            return {allocate(bytes), bytes};
        } catch (const std::bad_alloc&) {
            release(waiting_bytes_);
            return {allocate(bytes), bytes};
        }
    }

    void give(const Memory& memory) {
        const std::lock_guard<std::mutex> lock(lock_);
        if (memory.bytes > kMostWaiting) {
            free(memory.data);
            return;
        }
        try {
            waiting_.push_back(memory);
        } catch (const std::bad_alloc&) {
            free(memory.data);
            return;
        }
        waiting_bytes_ += memory.bytes;
        if (waiting_bytes_ > kMostWaiting) release(waiting_bytes_ - kMostWaiting);
    }

    size_t release_all() {
        const std::lock_guard<std::mutex> lock(lock_);
        return release(waiting_bytes_);
    }

    size_t waiting_bytes() {
        const std::lock_guard<std::mutex> lock(lock_);
        return waiting_bytes_;
    }

private:
    // Frees the oldest blocks until at least `bytes` are freed or none are left. Returns the number of bytes freed.
    size_t release(size_t bytes) {
        size_t released = 0, count = 0;
        for (; released < bytes && count < waiting_.size(); ++count) {
            released += waiting_[count].bytes;
            free(waiting_[count].data);
        }
        waiting_.erase(waiting_.begin(), waiting_.begin() + ptrdiff_t(count));
        waiting_bytes_ -= released;
        return released;
    }

    std::mutex lock_;
    std::vector<Memory> waiting_;  // oldest first
    size_t waiting_bytes_ = 0;
};

}  // namespace

void* allocate(size_t bytes) {
    void* data = nullptr;
    if (posix_memalign(&data, bytes >= kHuge ? kHugePage : kLine, bytes) != 0) throw std::bad_alloc();
    // With small pages, strided access to operands causes more time in TLB misses than in reads.
    if (bytes >= kHuge) prefer_huge_pages(data, bytes);
    return data;
}

void prefer_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t first = reinterpret_cast<uintptr_t>(data), skipped = -first % kHugePage;
    if (bytes < skipped + kHugePage) return;
    madvise(static_cast<char*>(data) + skipped, (bytes - skipped) / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
}

void guard([[maybe_unused]] void* data, [[maybe_unused]] size_t used, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(data, used);
    ASAN_POISON_MEMORY_REGION(static_cast<char*>(data) + used, bytes - used);
#endif
}

Memory take_memory(size_t bytes) {
    const Memory memory = Pool::pool().take(bytes);
    guard(memory.data, bytes, memory.bytes);
    return memory;
}
void give_memory(Memory memory) {
    guard(memory.data, 0, memory.bytes);
    Pool::pool().give(memory);
}
int64_t waiting_bytes() { return int64_t(Pool::pool().waiting_bytes()); }
int64_t release_memory() { return int64_t(Pool::pool().release_all()); }

}  // namespace rg
