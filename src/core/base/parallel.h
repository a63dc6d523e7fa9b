// The only file that sees threads: one team, its size, its life across fork.
#pragma once

#include <stdint.h>

namespace rg {

// How many threads a call uses that does not say. At least 1.
void set_num_threads(int threads);
int num_threads();

// The C++ runtime allocates a thread's exception state when it first needs it, and aborts if it cannot. After this call
// it is there, so that a later std::bad_alloc can be thrown.
void prepare_exceptions();

// Runs body(context, first, last) on ranges that cover [0, items), on at most `threads` threads including the caller's,
// and returns when all are done. Ranges are handed out in order but finish in any, and where they are cut depends on
// who comes first, so results must not depend on it. Calls from several threads at once are fine: the team serves one,
// the others run alone. An exception from a body, such as std::bad_alloc for its scratch, ends the job early and is
// thrown to the caller; part of the work is done by then.
//
// `wake`: whether the work is worth waking sleeping members for (it costs them tens of microseconds). Members that are
// still awake from the last call join in either case.
void run_parallel(int64_t items, int threads, bool wake, void (*body)(void* context, int64_t first, int64_t last),
                  void* context);

// Runs body(context, phase, part) for every part of every phase, on at most `parts` threads including the caller's; no
// part of a phase begins before every part of the phase before is done. A part is run by the same thread in every
// phase, so that it finds its data in that thread's cache; parts whose thread is not there are run by those who are.
void run_phases(int64_t phases, int parts, bool wake, void (*body)(void* context, int64_t phase, int part),
                void* context);

// ---- how much work is worth a thread

// What one thread takes for a unit of work, in nanoseconds: roughly, at its best. What matters is their proportion.
namespace cost {
constexpr double kFlop = 0.005;        // of a matrix product
constexpr double kCopy = 0.05;         // an element moved
constexpr double kElement = 0.25;      // an element read, computed with and written
constexpr double kExponential = 1;     // the same with an exponential
constexpr double kWorthSharing = 2e3;  // below, another thread would come too late to help
constexpr double kWorthWaking = 5e4;   // below, threads that sleep are left asleep
}  // namespace cost

// The threads that take part in some work: all that the caller allows, if it is worth it.
class Crew {
public:
    Crew(double nanoseconds, int allowed)
        : threads_(nanoseconds < cost::kWorthSharing ? 1 : allowed), wake_(nanoseconds >= cost::kWorthWaking) {}

    int threads() const { return threads_; }
    // body(i) for every item, body(first, last) for ranges of them, body(phase, part) as run_phases does.
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
