// A program: a list of the drivers' call structures, bound to memory that the program knows, run one after the other.
//
// A run has two parts. The records of the first compute; the records of the second, from `commit` on, write to
// variables. A failure in the first part leaves every variable as it was.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "../base/memory.h"

namespace rg {

class Record {
public:
    virtual ~Record() = default;
    virtual void run(int threads) = 0;
};

// A driver with its call structure, which has a field `threads`.
template <class Call>
class CallRecord final : public Record {
public:
    CallRecord(const Call& call, void (*driver)(const Call&)) : call_(call), driver_(driver) {}
    void run(int threads) override {
        call_.threads = threads;
        driver_(call_);
    }

private:
    Call call_;
    void (*driver_)(const Call&);
};

// Thrown by a record that has found an index out of range, before it has written anything.
struct OutOfRange : std::exception {
    int64_t index = 0;  // the first wrong one
    int64_t limit = 0;  // indices are from 0 to below it
    explicit OutOfRange(int64_t wrong, int64_t above) : index(wrong), limit(above) {}
    const char* what() const noexcept override { return "an index is out of range"; }
};

// Throws OutOfRange unless all indices are in [0, limit), or equal to `ignored` if that is used.
struct IndexCheck {
    const int64_t* indices = nullptr;
    int64_t count = 0, limit = 0;
    bool may_ignore = false;
    int64_t ignored = 0;
    int threads = 1;
};
void check_indices(const IndexCheck& call);
bool indices_in_range(const IndexCheck& call);

class Program {
public:
    // bytes: of the arena, which is aligned to 64 bytes and starts as zeros
    explicit Program(size_t bytes);
    ~Program();
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    const Memory& arena() const { return arena_; }
    // Memory outside the arena that records may use; the caller keeps it alive.
    void add_memory(const void* data, size_t bytes);
    bool contains(const char* low, const char* high) const;

    template <class Call>
    void add(const Call& call, void (*driver)(const Call&)) {
        records_.push_back(std::make_unique<CallRecord<Call>>(call, driver));
    }
    void add(std::unique_ptr<Record> record) { records_.push_back(std::move(record)); }
    // All later records write to variables.
    void commit() { commit_ = records_.size(); }

    size_t size() const { return records_.size(); }
    size_t first_commit() const { return commit_; }
    void run_record(size_t i, int threads) { records_[i]->run(threads); }

    // ---- one run at a time, also across fork

    // Waits for its turn. False: the process was forked while another thread wrote the variables, so that some of their
    // copies here are new and some old.
    bool enter();
    void leave() { owner_.store(0, std::memory_order_release); }
    // Around the records from `commit` on.
    void set_writing(bool writing) { writing_.store(writing, std::memory_order_release); }

private:
    struct Span {
        const char *low, *high;
    };
    Memory taken_, arena_;  // the arena is the first part of what was taken
    std::vector<Span> spans_;
    std::vector<std::unique_ptr<Record>> records_;
    size_t commit_ = 0;
    std::atomic<long> owner_{0};  // the process whose thread runs the program; 0: none
    std::atomic<bool> writing_{false};
};

// The program that the calling thread records: its calls become records instead of being run. Null: none.
Program* recorded_program();
void record_into(Program* program);

}  // namespace rg
