// The large products of a recurrent layer, over all time steps at once, cut into pieces for the thread pool. An operand
// that only one piece needs is packed by its thread; one that many pieces need is packed once. Rows are (step, sample)
// pairs; gates are in rows, dz is in panels (kernels.h).
#pragma once

#include "../base/scratch.h"
#include "../kernels.h"

namespace rg {

// A parameter of some gates in the caller's memory, [H][columns] each. Null: that gate has none.
// Strides in elements; a vector has no columns.
template <class A>
struct GateMatrix {
    A* gate[4] = {};
    int64_t row_stride = 0, col_stride = 0;
    int count = 4;
    bool by_gate = false;  // the order of panels: all blocks of a gate in turn, not all gates of a block

    bool empty() const { return !gate[0] && !gate[1] && !gate[2] && !gate[3]; }
    int64_t panel(int64_t blocks, int64_t block, int64_t k) const {
        return by_gate ? k * blocks + block : block * count + k;
    }
    int64_t gate_of(int64_t blocks, int64_t panel) const { return by_gate ? panel / blocks : panel % count; }
    int64_t block_of(int64_t blocks, int64_t panel) const { return by_gate ? panel % blocks : panel / count; }
};

// gates[rows][count * blocks] = u[rows][inputs] * w' + bias, where bias is a row of gates. u in rows or in panels; w is
// packed in `buffer`.
template <class A>
void project(const ProductKernels<A>& kernels, const StateArray<const A>& u, int64_t rows, int64_t inputs,
             int64_t units, const GateMatrix<const A>& w, const A* bias, A* gates, Buffer& buffer, int threads);

// du[rows][inputs] (+)= dz * w, with w packed in `buffer`
template <class A>
void input_gradient(const ProductKernels<A>& kernels, const A* dz, int64_t dz_panel, int64_t rows, int64_t units,
                    int64_t inputs, const GateMatrix<const A>& w, bool accumulate, A* du, int64_t du_row,
                    Buffer& buffer, int threads);

// dw[units][inputs] (+)= dz' * u, for the gates that dw has. The rows of dw are contiguous.
template <class A>
void weight_gradient(const ProductKernels<A>& kernels, const A* dz, int64_t dz_panel, int64_t rows, int64_t units,
                     const StateArray<const A>& u, int64_t inputs, bool accumulate, const GateMatrix<A>& dw,
                     int threads);

// sums[panels][count][kPanel]: the sum of the rows of dz with each index, accumulated in the order of rows.
template <class A>
void sum_by_index(const A* dz, int64_t dz_panel, int64_t rows, int64_t panels, const int64_t* indices, int64_t count,
                  A* sums, int64_t sums_panel, int threads);

// Panels for a[rows][depth] * w', of all gates: [count * blocks][depth][kPanel].
template <class A>
void pack_forward(const ProductKernels<A>& kernels, const GateMatrix<const A>& w, int64_t units, int64_t depth,
                  A* panels, int threads);
// Panels for dz * w: [count * kPanel * blocks][kPanel] for every kPanel columns, `panel` elements from one to the next.
// Gates that w lacks are 0.
template <class A>
void pack_backward(const ProductKernels<A>& kernels, const GateMatrix<const A>& w, int64_t units, int64_t columns,
                   A* panels, int64_t panel, int threads);

}  // namespace rg
