// Layer normalization inside recurrent cells: over all gates of a row, without the padding of its last block.
#pragma once

#include "cell.h"

namespace rg {
namespace {

template <int index>
struct Chain {
    static constexpr int value = index;
};

// Calls visit(chain, column of the row, block, gate, lane in the block, valid lanes) for every vector of a row. Sums
// over a row have two chains, for panels in turn, so that an addition need not wait for the one before.
template <class A, class Visit>
RG_INLINE void for_each_gate_vector(int64_t gates, int64_t units, const Visit& visit) {
    const auto panel = [&](auto chain, int64_t index, int64_t valid) RG_INLINE_LAMBDA {
        const int64_t block = index / gates, gate = index % gates;
#pragma GCC unroll 16
        for (int64_t lane = 0; lane < kPanel<A>; lane += kLanes<A>) {
            const int64_t rest = valid - lane;
            visit(chain, index * kPanel<A> + lane, block, gate, lane,
                  rest < kLanes<A> ? (rest < 0 ? 0 : rest) : int64_t(kLanes<A>));
        }
    };
    const int64_t full = units / kPanel<A> * gates, rest = units % kPanel<A>;
    int64_t i = 0;
    for (; i + 2 <= full; i += 2) {
        panel(Chain<0>(), i, kPanel<A>);
        panel(Chain<1>(), i + 1, kPanel<A>);
    }
    if (i < full) panel(Chain<0>(), i, kPanel<A>);
    for (int64_t k = 0; k < (rest ? gates : 0); ++k) panel(Chain<0>(), full + k, rest);
}

// Sums of a row, for each lane of a panel, so that bits do not depend on the width of a vector; added as a tree.
template <class A>
struct RowSum {
    LaneSums<A> lanes[2][kPanelVectors<A>];

    template <class Chain>
    RG_INLINE void add(Chain, int64_t lane, Vec<A> v) {
        lanes[Chain::value][lane / kLanes<A>].add(v);
    }
    RG_INLINE double total() const {
        constexpr int kEach = LaneSums<A>::kRegisters, kRegisters = kEach * kPanelVectors<A>;
        Vec<double> part[2][kRegisters];
        unrolled<kPanelVectors<A>>([&](int v) RG_INLINE_LAMBDA {
            lanes[0][v].take(part[0] + v * kEach);
            lanes[1][v].take(part[1] + v * kEach);
        });
        unrolled<kRegisters>([&](int k) RG_INLINE_LAMBDA { part[0][k] += part[1][k]; });
        add_halves<kRegisters, 1>(part[0]);
        return add_lanes(part[0][0]);
    }
};

template <class A>
void norm_rows(const NormRows<A>& p) {
    const double share = 1 / double(p.gates * p.units);
    for (int64_t r = 0; r < p.rows; ++r) {
        const A* x = p.x + r * p.x_row;
        RowSum<A> sum, squares;
        for_each_gate_vector<A>(p.gates, p.units,
                                [&](auto chain, int64_t column, int64_t, int64_t, int64_t lane, int64_t valid)
                                    RG_INLINE_LAMBDA { sum.add(chain, lane, keep_valid<A>(load(x + column), valid)); });
        const double mean = sum.total() * share;
        const Vec<A> center = splat(A(mean));
        for_each_gate_vector<A>(p.gates, p.units,
                                [&](auto chain, int64_t column, int64_t, int64_t, int64_t lane, int64_t valid)
                                    RG_INLINE_LAMBDA {
                                        const Vec<A> d = keep_valid<A>(load(x + column) - center, valid);
                                        squares.add(chain, lane, d * d);
                                    });
        const double shift = double(A(mean)) - mean;
        const double var = squares.total() * share - shift * shift;
        p.center[r] = A(mean);
        p.rstd[r] = A(1 / __builtin_sqrt((var < 0 ? 0 : var) + p.eps));
    }
}

template <class A, bool add>
void norm_rows_gradient_as(const NormRowsGradient<A>& call) {
    const NormRowsGradient<A> p = call;  // a copy, whose fields stay in registers: stores could change the caller's
    const double share = 1 / double(p.gates * p.units);
    for (int64_t r = 0; r < p.rows; ++r) {
        const A* x = p.x + r * p.x_row;
        const Vec<A> center = splat(p.center[r]), rstd = splat(p.rstd[r]);
        const auto place = [&](int64_t block, int64_t k, int64_t lane)
                               RG_INLINE_LAMBDA { return (block * p.block + p.slot[k]) * p.panel + r * p.row + lane; };
        RowSum<A> sum, products;
        for_each_gate_vector<A>(p.gates, p.units,
                                [&](auto chain, int64_t column, int64_t block, int64_t k, int64_t lane, int64_t valid)
                                    RG_INLINE_LAMBDA {
                                        const Vec<A> dy = load(p.dy + place(block, k, lane));
                                        const Vec<A> g = keep_valid<A>(dy * load(p.gamma + column), valid);
                                        sum.add(chain, lane, g);
                                        products.add(chain, lane, g * ((load(x + column) - center) * rstd));
                                    });
        const Vec<A> mean = splat(A(sum.total() * share)), slope = splat(A(products.total() * share));
        for_each_gate_vector<A>(p.gates, p.units,
                                [&](auto, int64_t column, int64_t block, int64_t k, int64_t lane, int64_t valid)
                                    RG_INLINE_LAMBDA {
                                        const Vec<A> dy = load(p.dy + place(block, k, lane));
                                        const Vec<A> xhat = (load(x + column) - center) * rstd;
                                        Vec<A> dx = rstd * (dy * load(p.gamma + column) - mean - xhat * slope);
                                        A* to = p.dx + place(block, k, lane);
                                        if constexpr (add) dx = dx + load<A>(to);
                                        store(to, keep_valid<A>(dx, valid));
                                    });
    }
}

template <class A>
void norm_rows_gradient(const NormRowsGradient<A>& p) {
    p.add ? norm_rows_gradient_as<A, true>(p) : norm_rows_gradient_as<A, false>(p);
}

template <class A>
void norm_sums(const A* dy, int64_t dy_row, const A* x, int64_t x_row, const A* center, const A* rstd, int64_t rows,
               double* sums) {
    constexpr int kChains = 4;  // independent sums, to hide the latency of addition
    LaneSums<A> sum[kChains][kPanelVectors<A>];
    const auto add = [&](int64_t r, int chain) RG_INLINE_LAMBDA {
#pragma GCC unroll 16
        for (int v = 0; v < kPanelVectors<A>; ++v) {
            const int64_t u = v * kLanes<A>;
            const Vec<A> xhat = (load(x + r * x_row + u) - splat(center[r])) * splat(rstd[r]);
            sum[chain][v].add(load(dy + r * dy_row + u) * xhat);
        }
    };
    int64_t r = 0;
    for (; r + kChains <= rows; r += kChains) {
#pragma GCC unroll 4
        for (int chain = 0; chain < kChains; ++chain) add(r + chain, chain);
    }
    for (; r < rows; ++r) add(r, 0);
    double part[kChains][kPanel<A>];
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; ++chain) {
#pragma GCC unroll 16
        for (int v = 0; v < kPanelVectors<A>; ++v) sum[chain][v].store(part[chain] + v * kLanes<A>);
    }
    for (int64_t u = 0; u < kPanel<A>; ++u) sums[u] += (part[0][u] + part[1][u]) + (part[2][u] + part[3][u]);
}

}  // namespace
}  // namespace rg
