#include "program.h"

#include <string.h>
#include <unistd.h>

#include "../base/scratch.h"

namespace rg {
namespace {

std::atomic<int> recording_threads{0};  // almost always 0: a call then need not look for its thread's state

struct Recorded {
    Program* program = nullptr;
};

}  // namespace

Program* recorded_program() {
    if (recording_threads.load(std::memory_order_relaxed) == 0) return nullptr;
    return kept_by_thread<Recorded>().program;
}

void record_into(Program* program) {
    Program*& current = kept_by_thread<Recorded>().program;
    recording_threads.fetch_add(int(program != nullptr) - int(current != nullptr), std::memory_order_relaxed);
    current = program;
}

Program::Program(size_t bytes)
    : taken_(take_memory(std::max<size_t>(bytes, 64))), arena_{taken_.data, std::max<size_t>(bytes, 64)} {
    memset(arena_.data, 0, arena_.bytes);
    add_memory(arena_.data, arena_.bytes);
}

Program::~Program() { give_memory(taken_); }

void Program::add_memory(const void* data, size_t bytes) {
    const char* low = static_cast<const char*>(data);
    spans_.push_back({low, low + bytes});
}

bool Program::contains(const char* low, const char* high) const {
    return std::any_of(spans_.begin(), spans_.end(),
                       [&](const Span& span) { return low >= span.low && high <= span.high; });
}

bool Program::enter() {
    const long self = long(getpid());
    for (;;) {
        long owner = 0;
        if (owner_.compare_exchange_weak(owner, self, std::memory_order_acquire)) return true;
        // A thread that ran it in the parent of this process does not exist here.
        if (owner != 0 && owner != self && owner_.compare_exchange_strong(owner, self))
            return !writing_.exchange(false);
        usleep(50);
    }
}

bool indices_in_range(const IndexCheck& call) {
    int64_t good = 0;
    for (int64_t i = 0; i < call.count; ++i) {
        const int64_t index = call.indices[i];
        good += (call.may_ignore && index == call.ignored) || (index >= 0 && index < call.limit);
    }
    return good == call.count;
}

void check_indices(const IndexCheck& call) {
    if (indices_in_range(call)) return;
    for (int64_t i = 0; i < call.count; ++i) {
        const int64_t index = call.indices[i];
        if (call.may_ignore && index == call.ignored) continue;
        if (index < 0 || index >= call.limit) throw OutOfRange(index, call.limit);
    }
}

}  // namespace rg
