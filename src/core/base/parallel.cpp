#include "parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
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

// Non-temporal stores are not ordered by atomics: without a fence another thread may see "done" before the data.
void fence_streamed_stores() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// Long enough to span the Python code between two calls of a training step, short enough to waste little CPU time.
constexpr auto kSpinTime = std::chrono::microseconds(60);
// How long the threads of a borrowed team surely spin: GNU OpenMP's default is a few milliseconds.
constexpr auto kBorrowedSpinTime = std::chrono::milliseconds(1);
constexpr int kPausesPerClockRead = 32;
constexpr int kPausesBeforeYield = 2000;

// The floating-point environment of a thread that computes for another one: the default, whatever the thread that
// created it had, which may flush small numbers to zero, as XLA's threads do.
class DefaultRounding {
public:
    DefaultRounding() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultRounding() { std::fesetenv(&before_); }
    DefaultRounding(const DefaultRounding&) = delete;
    DefaultRounding& operator=(const DefaultRounding&) = delete;

private:
    std::fenv_t before_;
};

std::atomic<const Team*> borrowed{nullptr};  // never deleted: a job may still use it

// One worker's share of a job. A worker takes from its own share first, large pieces before small ones, then steals
// from the others. So each worker gets the same data from call to call, and none waits for one that starts late.
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

// The progress of one part of a job in phases. The worker with the part's index runs it; until that worker has started,
// any other may.
struct Progress {
    alignas(64) std::atomic<int64_t> begun{0};  // phases claimed by some worker
    std::atomic<bool> owned{false};             // the part's worker has started
    alignas(64) std::atomic<int64_t> done{0};   // phases completed
};

// Where one worker waits for jobs.
struct alignas(64) Mailbox {
    std::atomic<uint64_t> job{0};  // the latest job with work for this worker
    std::atomic<bool> ready{false}, parked{false};
    std::mutex lock;
    std::condition_variable unpark;
};

struct Job {
    void (*body)(void*, int64_t, int64_t) = nullptr;    // for ranges, or
    void (*phase_body)(void*, int64_t, int) = nullptr;  // for phases
    void* context = nullptr;
    int64_t phases = 0;
    int workers = 1;  // including the caller, which is worker 0
};

void run_alone(int64_t items, void (*body)(void*, int64_t, int64_t), void* context) {
    if (items > 0) body(context, 0, items);
    fence_streamed_stores();
}

void run_phases_alone(int64_t phases, int parts, void (*body)(void*, int64_t, int), void* context) {
    for (int64_t phase = 0; phase < phases; ++phase) {
        for (int part = 0; part < parts; ++part) body(context, phase, part);
    }
}

// Never destroyed: its threads live as long as the process. A forked child abandons its copy and creates a new pool.
class ThreadPool {
public:
    void run(int64_t items, int threads, bool wake, void (*body)(void*, int64_t, int64_t), void* context) {
        if (!turn_.try_lock()) {  // another caller is using the pool
            run_alone(items, body, context);
            return;
        }
        const std::lock_guard<std::mutex> turn(turn_, std::adopt_lock);
        const int workers = int(std::min<int64_t>(threads, items));
        grow(workers);
        for (int m = 0; m < workers; ++m) {
            shares_[m].next.store(items * m / workers, std::memory_order_relaxed);
            shares_[m].end = items * (m + 1) / workers;
        }
        job_ = {body, nullptr, context, 0, workers};
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
        failed_.store(false, std::memory_order_relaxed);
        team_ = borrowed.load();
        if (team_) {
            run_on_borrowed_team(wake);
        } else {
            run_on_own_threads(wake);
        }
        last_ = std::chrono::steady_clock::now();
        if (failed_.load()) std::rethrow_exception(std::exchange(failure_, nullptr));
    }

    // The team's own number of threads: to ask for another one would end threads or create them. Threads that are not
    // there leave their share to the others.
    void run_on_borrowed_team(bool wake) {
        if (!wake && std::chrono::steady_clock::now() - last_ >= kBorrowedSpinTime) {
            work(0);  // the team may be asleep, and it returns only when all of it has woken
            return;
        }
        team_->parallel(
            [](void* context) {
                auto* self = static_cast<ThreadPool*>(context);
                const int worker = self->team_->thread_index();
                if (worker == 0) {
                    self->work(0);
                } else if (worker < self->job_.workers) {
                    prepare_exceptions();
                    const DefaultRounding rounding;
                    self->work(worker);
                }
            },
            this, 0, 0);
    }

    void run_on_own_threads(bool wake) {
        // Small jobs wake no workers, unless they come so fast that a woken worker gets the next one before it sleeps.
        wake = wake || std::chrono::steady_clock::now() - last_ < kSpinTime / 2;
        open_.store(true);
        ++jobs_;
        for (int m = 1; m < std::min(job_.workers, size_); ++m) {
            Mailbox& mailbox = *mailboxes_[size_t(m - 1)];
            mailbox.job.store(jobs_);
            if (!wake || !mailbox.parked.load()) continue;
            { const std::lock_guard<std::mutex> lock(mailbox.lock); }
            mailbox.unpark.notify_one();
        }
        work(0);
        open_.store(false);
        for (int pauses = 0; active_.load() != 0; ++pauses) {
            pauses < kPausesBeforeYield ? pause_briefly() : void(sched_yield());
        }
    }

    // Runs a piece of the job. An exception stops the job: no further pieces are run, and the first exception is
    // rethrown to the caller.
    template <class Piece>
    void attempt(const Piece& piece) {
        if (failed_.load(std::memory_order_relaxed)) return;
        try {
            piece();
        } catch (...) {
            if (!failed_.exchange(true)) failure_ = std::current_exception();
        }
    }

    void work(int worker) {
        if (job_.phase_body) {
            work_phases(worker);
            return;
        }
        int64_t first, last;
        for (int k = 0; k < job_.workers; ++k) {
            Share& share = shares_[(worker + k) % job_.workers];
            while (share.take(first, last)) attempt([&] { job_.body(job_.context, first, last); });
        }
        fence_streamed_stores();
    }

    void work_phases(int worker) {
        const int parts = job_.workers;
        progress_[worker].owned.store(true);
        // A late worker begins with the first phase that no other worker has claimed for it.
        for (int64_t phase = progress_[worker].begun.load(); phase < job_.phases; ++phase) {
            for (int q = 0; q < parts; ++q) await(progress_[q].done, phase);
            run_part(phase, worker);
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

    void grow(int workers) {
        if (workers > capacity_) {
            progress_ = std::make_unique<Progress[]>(size_t(workers));
            shares_ = std::make_unique<Share[]>(size_t(workers));
            capacity_ = workers;
        }
        if (borrowed.load()) return;
        while (size_ < workers) {
            try {
                mailboxes_.push_back(std::make_unique<Mailbox>());
                std::thread([this, worker = size_, &mailbox = *mailboxes_.back()] { serve(worker, mailbox); }).detach();
            } catch (const std::exception&) {
                // The system cannot create more threads: the existing ones do the work.
                mailboxes_.resize(size_t(size_ - 1));
                return;
            }
            // Wait until the thread can throw, even if memory runs out before its first piece of work.
            while (!mailboxes_.back()->ready.load()) sched_yield();
            ++size_;
        }
    }

    void serve(int worker, Mailbox& mailbox) {
        prepare_exceptions();
        const DefaultRounding rounding;
        mailbox.ready.store(true);
        uint64_t seen = 0;
        for (;;) {
            seen = wait_for_work(mailbox, seen);
            // The order matters: the caller first closes the job, then waits until no worker is active.
            active_.fetch_add(1);
            if (open_.load() && worker < job_.workers) work(worker);
            active_.fetch_sub(1);
        }
    }

    static uint64_t wait_for_work(Mailbox& mailbox, uint64_t seen) {
        const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
        do {
            for (int i = 0; i < kPausesPerClockRead; ++i) {
                const uint64_t job = mailbox.job.load();
                if (job != seen) return job;
                pause_briefly();
            }
        } while (std::chrono::steady_clock::now() < deadline);
        std::unique_lock<std::mutex> lock(mailbox.lock);
        mailbox.parked.store(true);
        mailbox.unpark.wait(lock, [&] { return mailbox.job.load() != seen; });
        mailbox.parked.store(false);
        return mailbox.job.load();
    }

    std::mutex turn_;
    int size_ = 1;  // number of workers, including the caller
    int capacity_ = 0;
    std::vector<std::unique_ptr<Mailbox>> mailboxes_;  // of all workers but the caller
    std::unique_ptr<Share[]> shares_;
    std::unique_ptr<Progress[]> progress_;
    std::chrono::steady_clock::time_point last_{};  // when the last job was done
    uint64_t jobs_ = 0;
    Job job_;
    const Team* team_ = nullptr;  // that runs the job; null: the pool's own threads
    std::exception_ptr failure_;
    alignas(64) std::atomic<int> active_{0};
    std::atomic<bool> open_{false}, failed_{false};
};

std::atomic<ThreadPool*> pool{nullptr};

void prepare_for_fork() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] {
        pool.store(nullptr);
        borrowed.store(nullptr);
    });
    (void)registered;
}

ThreadPool& current_pool() {
    ThreadPool* mine = pool.load();
    if (mine) return *mine;
    prepare_for_fork();
    ThreadPool* fresh = new ThreadPool;
    if (pool.compare_exchange_strong(mine, fresh)) return *fresh;
    delete fresh;
    return *mine;
}

}  // namespace

void prepare_exceptions() { (void)std::current_exception(); }

void set_num_threads(int threads) { default_threads.store(std::max(threads, 1)); }
int num_threads() { return default_threads.load(); }

void borrow_team(const Team& team) {
    prepare_for_fork();
    borrowed.store(team.parallel ? new Team(team) : nullptr);
}
bool has_borrowed_team() { return borrowed.load() != nullptr; }

void run_parallel(int64_t items, int threads, bool wake, void (*body)(void*, int64_t, int64_t), void* context) {
    if (threads <= 1 || items <= 1) {
        run_alone(items, body, context);
        return;
    }
    current_pool().run(items, threads, wake, body, context);
}

void run_phases(int64_t phases, int parts, bool wake, void (*body)(void*, int64_t, int), void* context) {
    if (parts <= 1 || phases == 0) {
        run_phases_alone(phases, parts, body, context);
        return;
    }
    current_pool().run_phases(phases, parts, wake, body, context);
}

}  // namespace rg
