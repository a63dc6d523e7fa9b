// Many threads run every driver at once, each call with a team of its own choice, until the time is up. Every result
// must have the bits of a quiet run on one thread. `make tsan` builds it with ThreadSanitizer, which also reports
// races.
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "../../src/core/base/dispatch.h"
#include "../../src/core/base/memory.h"
#include "../../src/core/base/parallel.h"
#include "problems.h"

namespace {

using problems::Output;
using problems::Problem;

std::atomic<int> failures{0};
std::atomic<long> runs{0};

bool same_bits(const std::vector<Output>& a, const std::vector<Output>& b) {
    for (size_t i = 0; i < a.size(); ++i) {
        if (a[i].bytes != b[i].bytes) return false;
    }
    return a.size() == b.size();
}

// Results of one thread, in memory that others have used before.
void use_memory(size_t bytes, unsigned char mark) {
    const rg::Memory memory = rg::take_memory(bytes);
    memset(memory.data, mark, bytes);
    for (size_t i = 0; i < bytes; i += 509) failures += static_cast<unsigned char*>(memory.data)[i] != mark;
    rg::give_memory(memory);
}

// A body that throws in some of its pieces: the caller gets the exception, and the next job is whole.
void fail_and_go_on(int threads) {
    const rg::Workers workers(1e9, threads);
    bool thrown = false;
    try {
        workers.each(64, [](int64_t i) {
            if (i % 16 == 7) throw std::bad_alloc();
        });
    } catch (const std::bad_alloc&) { thrown = true; }
    std::atomic<int64_t> sum{0};
    workers.each(1000, [&](int64_t i) { sum += i; });
    std::atomic<int64_t> phases{0};
    workers.phases(20, threads, [&](int64_t phase, int) { phases += phase; });
    failures += !thrown || sum != 499500 || phases != 190 * threads;
}

}  // namespace

int main(int count, char** arguments) {
    const double seconds = count == 3 && !strcmp(arguments[1], "--seconds") ? atof(arguments[2]) : 10;
    if (!rg::select_isa("scalar")) return 1;
    const std::vector<Problem> list = problems::all(false);
    std::vector<std::vector<Output>> expected;
    for (const Problem& problem : list) expected.push_back(problem.run(rg::DType::f32, 1));

    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    std::vector<std::thread> callers;
    for (size_t caller = 0; caller < 6; ++caller) {
        callers.emplace_back([&, caller] {
            for (size_t turn = caller; std::chrono::steady_clock::now() < end; ++turn) {
                const size_t i = (turn * 7919 + caller * 31) % list.size();
                const int threads = int(1 + (turn + caller) % 4);
                if (!same_bits(list[i].run(rg::DType::f32, threads), expected[i])) {
                    ++failures;
                    fprintf(stderr, "%s: other bits among many threads\n", list[i].name.c_str());
                }
                use_memory(size_t(1) << (10 + turn % 12), static_cast<unsigned char>(turn));
                fail_and_go_on(threads);
                ++runs;
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    printf("%ld runs from 6 threads, %d failures\n", runs.load(), failures.load());
    return failures != 0;
}
