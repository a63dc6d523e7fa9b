#include "scratch.h"

#include <pthread.h>

#include <atomic>

#include "parallel.h"

namespace rg {
namespace {

pthread_key_t thread_key() {
    static const pthread_key_t key = [] {
        pthread_key_t made;
        const auto destroy = [](void* state) { delete static_cast<ThreadState*>(state); };
        if (pthread_key_create(&made, destroy) != 0) throw std::bad_alloc();
        return made;
    }();
    return key;
}

}  // namespace

ThreadState& thread_state() {
    const pthread_key_t key = thread_key();
    if (void* state = pthread_getspecific(key)) return *static_cast<ThreadState*>(state);
    prepare_exceptions();
    auto fresh = std::make_unique<ThreadState>();
    if (pthread_setspecific(key, fresh.get()) != 0) throw std::bad_alloc();
    return *fresh.release();
}

int new_thread_slot() {
    static std::atomic<int> next{0};
    const int slot = next.fetch_add(1);
    if (slot >= ThreadState::kSlots) throw std::bad_alloc();
    return slot;
}

}  // namespace rg
