// The only file that creates threads: one thread pool, its size, and its handling of fork.
#pragma once

#include <stdint.h>

namespace rg {

// The default number of threads of a call. At least 1.
void set_num_threads(int threads);
int num_threads();

// Another library's team of threads, through GNU OpenMP's entry points: parallel(body, context, threads, flags) calls
// body(context) on every thread of its team, the caller's included, and returns when all have returned; thread_index()
// is a thread's number in that team, 0 for the caller's.
struct Team {
    void (*parallel)(void (*body)(void* context), void* context, unsigned threads, unsigned flags) = nullptr;
    int (*thread_index)() = nullptr;
};

// Runs later jobs on this team instead of the pool's own threads, so that no two teams spin on the same cores. Without
// functions, returns to the pool's own. A forked child always has its own: a team does not survive a fork.
void borrow_team(const Team& team);
bool has_borrowed_team();

// The C++ runtime allocates a thread's exception state on first use, and aborts if it cannot. This call allocates it,
// so that a later std::bad_alloc can be thrown.
void prepare_exceptions();

// Runs body(context, first, last) on ranges that cover [0, items), on at most `threads` threads including the caller's,
// and returns when all are done. Ranges are handed out in order but finish in any order, and their boundaries depend on
// timing, so results must not depend on them. Several threads may call this at once: the pool serves one of them, the
// others run their work on their own thread. An exception from a body, such as std::bad_alloc for its scratch, ends the
// job early and is rethrown to the caller; part of the work is done by then.
//
// `wake`: whether the work is worth waking sleeping workers, which takes tens of microseconds. Workers that are still
// spinning after the last call join in either case.
void run_parallel(int64_t items, int threads, bool wake, void (*body)(void* context, int64_t first, int64_t last),
                  void* context);

// Runs body(context, phase, part) for every part of every phase, on at most `parts` threads including the caller's.
// There is a barrier between phases. The same thread runs a part in every phase, so that the part's data stay in its
// cache; until that thread has started, others run the part.
void run_phases(int64_t phases, int parts, bool wake, void (*body)(void* context, int64_t phase, int part),
                void* context);

// ---- how much work is worth a thread

// The time that one thread takes for a unit of work, in nanoseconds: a rough best case. Only the ratios matter.
namespace cost {
constexpr double kFlop = 0.005;        // of a matrix product
constexpr double kCopy = 0.05;         // an element copied
constexpr double kElement = 0.25;      // an element read, processed and written
constexpr double kExponential = 1;     // the same with an exponential
constexpr double kWorthSharing = 2e3;  // below this, another thread would start too late to help
constexpr double kWorthWaking = 5e4;   // below this, sleeping threads are not woken
}  // namespace cost

// The threads that share some work: all that the caller allows, or only the calling thread if the work is small.
class Workers {
public:
    Workers(double nanoseconds, int allowed)
        : threads_(nanoseconds < cost::kWorthSharing ? 1 : allowed), wake_(nanoseconds >= cost::kWorthWaking) {}

    int threads() const { return threads_; }
    // Calls body(i) for every item, body(first, last) for ranges of items, or body(phase, part) as in run_phases.
    template <class Body>
    void each(int64_t items, const Body& body) const {
        ranges(items, [&](int64_t first, int64_t last) {
            for (int64_t i = first; i < last; ++i) body(i);
        });
    }
    template <class Body>
    void ranges(int64_t items, const Body& body) const {
        run_parallel(
            items, threads_, wake_,
            [](void* context, int64_t first, int64_t last) { (*static_cast<const Body*>(context))(first, last); },
            const_cast<Body*>(&body));
    }
    template <class Body>
    void phases(int64_t phases, int parts, const Body& body) const {
        run_phases(
            phases, parts, wake_,
            [](void* context, int64_t phase, int part) { (*static_cast<const Body*>(context))(phase, part); },
            const_cast<Body*>(&body));
    }

private:
    int threads_;
    bool wake_;
};

}  // namespace rg
