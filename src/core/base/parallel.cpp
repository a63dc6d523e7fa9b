#include "parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rg {
namespace {

std::atomic<int> default_threads{1};

void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Streamed stores are outside the memory model of atomics: without a fence another thread may see "done" before them.
void publish_streamed_stores() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// Long enough to bridge the Python between two calls of a training step, short enough not to be noticed.
constexpr auto kSpinTime = std::chrono::microseconds(60);
constexpr int kPausesPerClockRead = 32;
constexpr int kPausesBeforeYield = 2000;

// One member's share of a job. Members take from their own share first, large pieces before small ones, and then from
// the others': the same member meets the same data from call to call, and nobody waits for one who is late.
struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;

    bool take(int64_t& first, int64_t& last) {
        first = next.load(std::memory_order_relaxed);
        do {
            if (first >= end) return false;
            last = first + std::max<int64_t>(1, (end - first) / 2);
        } while (!next.compare_exchange_weak(first, last, std::memory_order_relaxed));
        return true;
    }
};

// How far a part of a job in phases is. Its own member runs it; where that one has not come, anyone does.
struct Progress {
    alignas(64) std::atomic<int64_t> begun{0};  // phases that someone has taken on
    std::atomic<bool> owned{false};             // its own member has come
    alignas(64) std::atomic<int64_t> done{0};   // phases that are done
};

// Where one member waits for work.
struct alignas(64) Seat {
    std::atomic<uint64_t> job{0};  // the last job that has work for this member
    std::atomic<bool> ready{false}, parked{false};
    std::mutex lock;
    std::condition_variable unpark;
};

struct Job {
    void (*body)(void*, int64_t, int64_t) = nullptr;    // of ranges, or
    void (*phase_body)(void*, int64_t, int) = nullptr;  // of phases
    void* context = nullptr;
    int64_t phases = 0;
    int members = 1;  // including the caller, who is member 0
};

void run_alone(int64_t items, void (*body)(void*, int64_t, int64_t), void* context) {
    if (items > 0) body(context, 0, items);
    publish_streamed_stores();
}

void run_phases_alone(int64_t phases, int parts, void (*body)(void*, int64_t, int), void* context) {
    for (int64_t phase = 0; phase < phases; ++phase) {
        for (int part = 0; part < parts; ++part) body(context, phase, part);
    }
}

// Never destroyed: its threads live as long as the process, and a child of fork leaves the parent's copy behind.
class Team {
public:
    void run(int64_t items, int threads, bool wake, void (*body)(void*, int64_t, int64_t), void* context) {
        if (!turn_.try_lock()) {  // another caller has the team
            run_alone(items, body, context);
            return;
        }
        const std::lock_guard<std::mutex> turn(turn_, std::adopt_lock);
        const int members = int(std::min<int64_t>(threads, items));
        grow(members);
        for (int m = 0; m < members; ++m) {
            shares_[m].next.store(items * m / members, std::memory_order_relaxed);
            shares_[m].end = items * (m + 1) / members;
        }
        job_ = {body, nullptr, context, 0, members};
        run_job(wake);
    }

    void run_phases(int64_t phases, int parts, bool wake, void (*body)(void*, int64_t, int), void* context) {
        if (!turn_.try_lock()) {
            run_phases_alone(phases, parts, body, context);
            return;
        }
        const std::lock_guard<std::mutex> turn(turn_, std::adopt_lock);
        grow(parts);
        for (int m = 0; m < parts; ++m) {
            progress_[m].begun.store(0, std::memory_order_relaxed);
            progress_[m].owned.store(false, std::memory_order_relaxed);
            progress_[m].done.store(0, std::memory_order_relaxed);
        }
        job_ = {nullptr, body, context, phases, parts};
        run_job(wake);
    }

private:
    void run_job(bool wake) {
        // Small work wakes nobody, unless it comes so fast that members woken once will find more before they sleep
        // again.
        wake = wake || std::chrono::steady_clock::now() - last_ < kSpinTime / 2;
        failed_.store(false, std::memory_order_relaxed);
        open_.store(true);
        ++jobs_;
        for (int m = 1; m < std::min(job_.members, size_); ++m) {
            Seat& seat = *seats_[size_t(m - 1)];
            seat.job.store(jobs_);
            if (!wake || !seat.parked.load()) continue;
            { const std::lock_guard<std::mutex> lock(seat.lock); }
            seat.unpark.notify_one();
        }
        work(0);
        open_.store(false);
        for (int pauses = 0; active_.load() != 0; ++pauses) {
            pauses < kPausesBeforeYield ? pause_briefly() : void(sched_yield());
        }
        last_ = std::chrono::steady_clock::now();
        if (failed_.load()) std::rethrow_exception(std::exchange(failure_, nullptr));
    }

    // Runs a piece of the job. An exception stops the job: no further pieces are run, and the caller gets the first
    // one.
    template <class Piece>
    void attempt(const Piece& piece) {
        if (failed_.load(std::memory_order_relaxed)) return;
        try {
            piece();
        } catch (...) {
            if (!failed_.exchange(true)) failure_ = std::current_exception();
        }
    }

    void work(int member) {
        if (job_.phase_body) {
            work_phases(member);
            return;
        }
        int64_t first, last;
        for (int k = 0; k < job_.members; ++k) {
            Share& share = shares_[(member + k) % job_.members];
            while (share.take(first, last)) attempt([&] { job_.body(job_.context, first, last); });
        }
        publish_streamed_stores();
    }

    void work_phases(int member) {
        const int parts = job_.members;
        progress_[member].owned.store(true);
        // Who comes late begins with the first phase that no one has taken on for them.
        for (int64_t phase = progress_[member].begun.load(); phase < job_.phases; ++phase) {
            for (int q = 0; q < parts; ++q) await(progress_[q].done, phase);
            run_part(phase, member);
            for (int q = 0; q < parts; ++q) {
                if (!progress_[q].owned.load(std::memory_order_relaxed)) run_part(phase, q);
            }
        }
        for (int q = 0; q < parts; ++q) await(progress_[q].done, job_.phases);
    }

    void run_part(int64_t phase, int part) {
        Progress& progress = progress_[part];
        int64_t expected = phase;
        if (!progress.begun.compare_exchange_strong(expected, phase + 1, std::memory_order_acq_rel)) return;
        attempt([&] { job_.phase_body(job_.context, phase, part); });
        progress.done.store(phase + 1, std::memory_order_release);
    }

    static void await(const std::atomic<int64_t>& count, int64_t target) {
        for (int pauses = 0; count.load(std::memory_order_acquire) < target; ++pauses) {
            pauses < kPausesBeforeYield ? pause_briefly() : void(sched_yield());
        }
    }

    void grow(int members) {
        if (members > capacity_) {
            progress_ = std::make_unique<Progress[]>(size_t(members));
            shares_ = std::make_unique<Share[]>(size_t(members));
            capacity_ = members;
        }
        while (size_ < members) {
            try {
                seats_.push_back(std::make_unique<Seat>());
                std::thread([this, member = size_, &seat = *seats_.back()] { live(member, seat); }).detach();
            } catch (const std::exception&) {
                // The machine has no more threads to give: the ones there are do the work.
                seats_.resize(size_t(size_ - 1));
                return;
            }
            // Only then is it sure that the thread can throw, even if memory ends before its first piece of work.
            while (!seats_.back()->ready.load()) sched_yield();
            ++size_;
        }
    }

    void live(int member, Seat& seat) {
        prepare_exceptions();
        seat.ready.store(true);
        uint64_t seen = 0;
        for (;;) {
            seen = wait_for_work(seat, seen);
            // Announce first, then look: the caller closes first, then waits for those announced.
            active_.fetch_add(1);
            if (open_.load() && member < job_.members) work(member);
            active_.fetch_sub(1);
        }
    }

    static uint64_t wait_for_work(Seat& seat, uint64_t seen) {
        const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
        do {
            for (int i = 0; i < kPausesPerClockRead; ++i) {
                const uint64_t job = seat.job.load();
                if (job != seen) return job;
                pause_briefly();
            }
        } while (std::chrono::steady_clock::now() < deadline);
        std::unique_lock<std::mutex> lock(seat.lock);
        seat.parked.store(true);
        seat.unpark.wait(lock, [&] { return seat.job.load() != seen; });
        seat.parked.store(false);
        return seat.job.load();
    }

    std::mutex turn_;
    int size_ = 1;  // members there are, the caller included
    int capacity_ = 0;
    std::vector<std::unique_ptr<Seat>> seats_;  // of all members but the caller
    std::unique_ptr<Share[]> shares_;
    std::unique_ptr<Progress[]> progress_;
    std::chrono::steady_clock::time_point last_{};  // when the last job was done
    uint64_t jobs_ = 0;
    Job job_;
    std::exception_ptr failure_;
    alignas(64) std::atomic<int> active_{0};
    std::atomic<bool> open_{false}, failed_{false};
};

std::atomic<Team*> team{nullptr};

Team& current_team() {
    Team* mine = team.load();
    if (mine) return *mine;
    static const int registered = pthread_atfork(nullptr, nullptr, [] { team.store(nullptr); });
    (void)registered;
    Team* fresh = new Team;
    if (team.compare_exchange_strong(mine, fresh)) return *fresh;
    delete fresh;
    return *mine;
}

}  // namespace

void prepare_exceptions() { (void)std::current_exception(); }

void set_num_threads(int threads) { default_threads.store(std::max(threads, 1)); }
int num_threads() { return default_threads.load(); }

void run_parallel(int64_t items, int threads, bool wake, void (*body)(void*, int64_t, int64_t), void* context) {
    if (threads <= 1 || items <= 1) {
        run_alone(items, body, context);
        return;
    }
    current_team().run(items, threads, wake, body, context);
}

void run_phases(int64_t phases, int parts, bool wake, void (*body)(void*, int64_t, int), void* context) {
    if (parts <= 1 || phases == 0) {
        run_phases_alone(phases, parts, body, context);
        return;
    }
    current_team().run_phases(phases, parts, wake, body, context);
}

}  // namespace rg
