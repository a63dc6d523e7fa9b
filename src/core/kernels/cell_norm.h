// Layer normalization inside recurrent cells: over all gates of a row, without the padding of its last block.
#pragma once

#include "cell.h"

namespace rg {
namespace {

// Calls visit(column of the row, block, gate, lane in the block, valid lanes) for every vector of a row.
template <class A, class Visit>
RG_INLINE void for_each_gate_vector(int64_t gates, int64_t units, const Visit& visit) {
    for (int64_t block = 0; block * kPanel<A> < units; ++block) {
        for (int64_t k = 0; k < gates; ++k) {
            const int64_t column = (block * gates + k) * kPanel<A>;
            for (int64_t lane = 0; lane < kPanel<A>; lane += kLanes<A>) {
                const int64_t rest = units - block * kPanel<A> - lane;
                visit(column + lane, block, k, lane, rest < kLanes<A> ? (rest < 0 ? 0 : rest) : int64_t(kLanes<A>));
            }
        }
    }
}

// Sums of a row in as many chains as a panel has lanes, so that bits do not depend on the width of a vector.
template <class A>
struct PanelSums {
    LaneSums<A> lanes[kPanelVectors<A>];
    RG_INLINE void add(int64_t lane, Vec<A> v) { lanes[lane / kLanes<A>].add(v); }
    RG_INLINE double total() const {
        double part[kPanel<A>];
        for (int v = 0; v < kPanelVectors<A>; ++v) lanes[v].store(part + v * kLanes<A>);
        double sum = 0;
        for (int64_t u = 0; u < kPanel<A>; ++u) sum += part[u];
        return sum;
    }
};

template <class A>
void norm_rows(const NormRows<A>& p) {
    const double count = double(p.gates * p.units);
    for (int64_t r = 0; r < p.rows; ++r) {
        const A* x = p.x + r * p.x_row;
        PanelSums<A> sum, squares;
        for_each_gate_vector<A>(p.gates, p.units,
                                [&](int64_t column, int64_t, int64_t, int64_t lane, int64_t valid)
                                    RG_INLINE_LAMBDA { sum.add(lane, keep_valid<A>(load(x + column), valid)); });
        const double mean = sum.total() / count;
        const Vec<A> center = splat(A(mean));
        for_each_gate_vector<A>(p.gates, p.units,
                                [&](int64_t column, int64_t, int64_t, int64_t lane, int64_t valid) RG_INLINE_LAMBDA {
                                    const Vec<A> d = keep_valid<A>(load(x + column) - center, valid);
                                    squares.add(lane, d * d);
                                });
        const double shift = double(A(mean)) - mean;
        const double var = squares.total() / count - shift * shift;
        p.center[r] = A(mean);
        p.rstd[r] = A(1 / __builtin_sqrt((var < 0 ? 0 : var) + p.eps));
        if (!p.y) continue;
        const RowNorm<A> norm = {p.center + r, p.rstd + r, p.gamma, p.beta};
        A* y = p.y + r * p.y_row;
        for_each_gate_vector<A>(p.gates, p.units,
                                [&](int64_t column, int64_t, int64_t, int64_t, int64_t valid) RG_INLINE_LAMBDA {
                                    const Vec<A> value = normalized(norm, 0, column, load(x + column));
                                    store(y + column, keep_valid<A>(value, valid));
                                });
    }
}

template <class A>
void norm_rows_gradient(const NormRowsGradient<A>& p) {
    const double count = double(p.gates * p.units);
    for (int64_t r = 0; r < p.rows; ++r) {
        const A* x = p.x + r * p.x_row;
        const Vec<A> center = splat(p.center[r]), rstd = splat(p.rstd[r]);
        const auto place = [&](int64_t block, int64_t k, int64_t lane)
                               RG_INLINE_LAMBDA { return (block * p.block + p.slot[k]) * p.panel + r * p.row + lane; };
        PanelSums<A> sum, products;
        for_each_gate_vector<A>(p.gates, p.units,
                                [&](int64_t column, int64_t block, int64_t k, int64_t lane, int64_t valid)
                                    RG_INLINE_LAMBDA {
                                        const Vec<A> dy = load(p.dy + place(block, k, lane));
                                        const Vec<A> g = keep_valid<A>(dy * load(p.gamma + column), valid);
                                        sum.add(lane, g);
                                        products.add(lane, g * ((load(x + column) - center) * rstd));
                                    });
        const Vec<A> mean = splat(A(sum.total() / count)), slope = splat(A(products.total() / count));
        for_each_gate_vector<A>(p.gates, p.units,
                                [&](int64_t column, int64_t block, int64_t k, int64_t lane, int64_t valid)
                                    RG_INLINE_LAMBDA {
                                        const Vec<A> dy = load(p.dy + place(block, k, lane));
                                        const Vec<A> xhat = (load(x + column) - center) * rstd;
                                        Vec<A> dx = rstd * (dy * load(p.gamma + column) - mean - xhat * slope);
                                        A* to = p.dx + place(block, k, lane);
                                        if (p.add) dx = dx + load<A>(to);
                                        store(to, keep_valid<A>(dx, valid));
                                    });
    }
}

template <class A>
void norm_sums(const A* dy, int64_t dy_row, const A* x, int64_t x_row, const A* center, const A* rstd, int64_t rows,
               double* sums) {
    LaneSums<A> sum[kPanelVectors<A>];
    for (int64_t r = 0; r < rows; ++r) {
        for (int v = 0; v < kPanelVectors<A>; ++v) {
            const int64_t u = v * kLanes<A>;
            const Vec<A> xhat = (load(x + r * x_row + u) - splat(center[r])) * splat(rstd[r]);
            sum[v].add(load(dy + r * dy_row + u) * xhat);
        }
    }
    double part[kPanel<A>];
    for (int v = 0; v < kPanelVectors<A>; ++v) sum[v].store(part + v * kLanes<A>);
    for (int64_t u = 0; u < kPanel<A>; ++u) sums[u] += part[u];
}

}  // namespace
}  // namespace rg
