// Problems of linear recurrences.
#include <string>
#include <utility>

#include "../../src/core/recurrent/scan.h"
#include "storage.h"

namespace problems {
namespace {

// [outer, steps, inner]; with `turned`, time is the contiguous axis. `shared`: a does not depend on time.
struct ScanSizes {
    int64_t outer, steps, inner;
    bool turned, shared, resets;
};

rg::ScanAxis axis(int64_t extent, int64_t whole, int64_t a, int64_t state) {
    rg::ScanAxis made{};
    made.extent = extent;
    for (int v = 0; v < rg::kScanViews; ++v) made.stride[v] = whole;
    for (const int v : {rg::kScanStart, rg::kScanEnd, rg::kScanFirst, rg::kScanSums}) made.stride[v] = state;
    made.stride[rg::kScanA] = a;
    return made;
}

template <class A>
std::vector<Output> scan(const ScanSizes& s, DType dtype, int threads) {
    const int64_t states = s.outer * s.inner, count = states * s.steps;
    Random random(uint64_t(count + 5 * s.steps + s.inner));
    const Block a(dtype, random.take(count), 1), b(dtype, random.take(count), 2), h0(dtype, random.take(states), 0),
        dy(dtype, random.take(count), 3), dhn(dtype, random.take(states), 1);
    const Block y(dtype, count, 1), hn(dtype, states, 0), da(dtype, Values(size_t(count)), 2),
        db(dtype, Values(size_t(count)), 1), dh0(dtype, Values(size_t(states)), 0),
        sums(dtype, Values(size_t(states)), 1);
    std::vector<uint8_t> reset;
    for (int64_t i = 0; i < count; ++i) reset.push_back(random.below(5) == 0);
    const int64_t time = s.turned ? 1 : s.inner, inner = s.turned ? s.steps : 1;
    rg::ScanSpace space;
    space.time = axis(s.steps, time, s.shared ? 0 : time, 0);
    space.add(axis(s.outer, s.steps * s.inner, s.steps * s.inner, s.inner));
    space.add(axis(s.inner, inner, inner, 1));
    rg::ScanForward<A> forward;
    forward.space = space;
    forward.a = a.as<A>();
    forward.b = b.as<A>();
    forward.reset = s.resets ? reset.data() : nullptr;
    forward.h0 = h0.as<A>();
    forward.threads = threads;
    forward.y = y.as<A>();
    forward.hn = hn.as<A>();
    rg::scan_forward(forward);
    rg::ScanBackward<A> backward;
    backward.space = space;
    backward.dy = dy.as<A>();
    backward.dhn = dhn.as<A>();
    backward.a = a.as<A>();
    backward.reset = forward.reset;
    backward.y = y.as<A>();
    backward.h0 = h0.as<A>();
    backward.threads = threads;
    backward.da = da.as<A>();
    backward.db = db.as<A>();
    backward.dh0 = dh0.as<A>();
    rg::scan_backward(backward);
    std::vector<Output> found = {y.output("y"), hn.output("hn"), da.output("da"), db.output("db"), dh0.output("dh0")};
    if (s.shared) {
        backward.da = nullptr;
        std::vector<double> exact(static_cast<size_t>(states));
        backward.da_sums = exact.data();
        rg::scan_backward(backward);
        for (int64_t i = 0; i < states; ++i) sums.as<A>()[i] = A(exact[size_t(i)]);
        found.push_back(sums.output("da_sums"));
    }
    return found;
}

}  // namespace

void add_recurrent(std::vector<Problem>& problems) {
    const ScanSizes sizes[] = {{1, 7, 33, false, false, false}, {3, 5, 17, false, true, false},
                               {2, 9, 5, false, false, true},   {1, 20, 70, true, false, false},
                               {2, 67, 9, true, true, true},    {1, 40, 1, false, false, false},
                               {1, 1, 19, false, false, false}, {1, 6, 2100, false, false, false}};
    for (const ScanSizes& s : sizes) {
        const std::string name = "scan " + std::to_string(s.outer) + "x" + std::to_string(s.steps) + "x" +
                                 std::to_string(s.inner) + (s.turned ? " along rows" : "") +
                                 (s.shared ? " shared" : "") + (s.resets ? " reset" : "");
        problems.push_back({name, kWideTypes, 64, [=](DType dtype, int threads) {
                                return dtype == DType::f64 ? scan<double>(s, dtype, threads)
                                                           : scan<float>(s, dtype, threads);
                            }});
    }
}

}  // namespace problems
