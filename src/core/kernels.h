// The interface of kernels/: one table of functions per instruction-set level.
//
// Every kernel runs on one thread, allocates nothing, and reads and writes exactly the blocks it is given. A is the
// arithmetic type. Arrays of doubles that hold sums are added to, so that the caller controls the order of summation,
// except for the sums of rows.
#pragma once

#include "base/shape.h"

namespace rg {

// Activations that kernels fuse, with the slope computed from y. All others are applied to a staged block by
// ActivationKernels.
constexpr bool is_fused(ActivationKind kind) {
    return kind == ActivationKind::identity || kind == ActivationKind::relu || kind == ActivationKind::sigmoid ||
           kind == ActivationKind::tanh;
}

// The number of rows of a column that are summed in the arithmetic type before they are added to doubles, counted from
// a block's first row. The tolerances of float sums allow for as many.
constexpr int kColumnRows = 16;

// Two sums for each of `cols` columns: the first sums of a cache line of columns, then their second sums.
template <class A>
constexpr int64_t kChainLine = 64 / int64_t(sizeof(A));
template <class A>
constexpr int64_t chain_elements(int64_t cols) {
    return (cols + kChainLine<A> - 1) / kChainLine<A> * 2 * kChainLine<A>;
}

// Arrays with a value for each row of a block are written in vectors of at most this many.
constexpr int kRowLanes = 8;

// The size of a block: `rows` runs of `cols` contiguous elements.
struct BlockSize {
    int64_t rows, cols;
};

// Where the runs are in an array: `stride` elements from one run to the next. `ahead`: the distance in elements to the
// next block, which is prefetched.
template <class T>
struct Run {
    T* data;
    int64_t stride;
    int64_t ahead;  // 0 for a block that was staged, or if prefetching is not worthwhile
};

// Where a result is written. `stream`: use non-temporal stores, for results too large for the cache; run_parallel ends
// with the fence that makes them visible.
template <class A>
struct Target {
    A* data;
    int64_t stride;
    bool stream;
};

// dz of a block: dy times the slope of a fused activation, computed from y. For the identity, y is not read.
template <class A>
struct Gradient {
    const A *dy, *y;
    int64_t dy_stride, y_stride;
    int64_t ahead;
    ActivationKind activation;
};

// Coefficients of a plane are scalars, T = A; coefficients of rows and columns are arrays, T = const A*.
//
// Statistics in the kernels' form: with center = A(mean) and offset = (center - mean) * rstd,
//   xhat = (x - center) * rstd + offset
// is accurate to one or two roundings even if mean / std is 1e6, because x - center is then exact.
template <class T>
struct Standardization {
    T center, rstd, offset;
};
// z = (x - center) * scale + shift
template <class T>
struct Affine {
    T center, scale, shift;
};
// dx = a * dz + (b * xhat + k). In terms of xhat, not of x, because rstd^2 may overflow float.
template <class T>
struct DxCoefficients {
    T a, b, k;
};

// Parameters of a row's elements; null: 1 and 0.
template <class A>
struct RowParameters {
    const A *gamma, *beta;
};

// Of rows: the coefficients of dx that depend on the row's sums.
template <class T>
struct RowSlopes {
    T b, k;
};

// What a kernel sums over the next block while it writes one of the same size, so that memory reads and writes overlap.
template <class A>
struct NextPlaneMoments {
    const A* x;
    A center;
    double* sums;
};
template <class A>
struct NextPlaneSums {
    const A* x;
    Gradient<A> dz;
    Standardization<A> statistics;
    double* sums;
};
template <class A>
struct NextRowMoments {
    const A* x;
    const double* center;
    double *sum, *sum_sq;
};

// ---- storage -------------------------------------------------------------------------------------------------------

// Conversion from storage to arithmetic and back: `count` elements, `stride` apart in storage, contiguous in A. Storage
// is f32, f16 or bf16 for float, f64 for double.
template <class A>
struct StorageKernels {
    void (*load)(DType dtype, const void* src, int64_t stride, int64_t count, A* dst);
    // accumulate: dst += src, added in A. Only contiguous runs stored as A are streamed.
    void (*store)(DType dtype, const A* src, int64_t count, void* dst, int64_t stride, bool accumulate, bool stream);
};

// ---- normalization -------------------------------------------------------------------------------------------------

template <class A>
struct NormKernels {
    // Planes: the whole block belongs to one channel. sums[0] += sum(x - center), sums[1] += sum((x - center)^2).
    void (*plane_moments)(BlockSize size, Run<const A> x, A center, double* sums);
    // Slower, but safe from overflow and underflow: for data whose squares leave float's range.
    void (*plane_moments_wide)(BlockSize size, Run<const A> x, double center, double* sums);
    // y = f(z). Coefficients of row r at r * step: step 0 for one channel, 1 if each row is a channel.
    void (*plane_apply)(BlockSize size, Run<const A> x, Affine<const A*> z, int64_t step, ActivationKind f,
                        Target<A> y);
    // sums[0] += sum(dz), sums[1] += sum(dz * xhat)
    void (*plane_sums)(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<A> statistics,
                       double* sums);
    // Without x (null): dx = a * dz. Coefficients as of plane_apply.
    void (*plane_dx)(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<const A*> statistics,
                     DxCoefficients<const A*> coefficients, int64_t step, Target<A> dx);
    // plane_apply on one block and plane_moments on the next; y is streamed.
    void (*plane_apply_moments)(BlockSize size, Run<const A> x, Affine<A> z, ActivationKind f, Target<A> y,
                                NextPlaneMoments<A> next);
    // plane_dx and plane_sums likewise.
    void (*plane_dx_sums)(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<A> statistics,
                          DxCoefficients<A> coefficients, Target<A> dx, const NextPlaneSums<A>& next);

    // Rows: each row is one statistics set; its parameters run along the row.
    // center[row] = the mean of the row's first elements, close enough to the mean to take moments about.
    void (*row_centers)(BlockSize size, Run<const A> x, double* center);
    // sum[row] = sum(x - center), sum_sq[row] = sum((x - center)^2)
    void (*row_moments)(BlockSize size, Run<const A> x, const double* center, double* sum, double* sum_sq);
    // mean and var of sets of `count` elements from such sums. Returns false if some must be summed again in double,
    // and their var is -1: the center was so far from the mean that squares cancel, or squares left float's range.
    bool (*settle)(int64_t sets, const double* center, const double* sum, const double* sum_sq, double count,
                   double eps, double* mean, double* var);
    // rstd = 1 / sqrt(var + eps)
    void (*reciprocal_std)(int64_t sets, const double* var, double eps, double* rstd);
    // What the statistics of rows are as the arithmetic type: center = mean, rstd = 1 / sqrt(var + eps), and offset =
    // (center - mean) * rstd. Written in whole vectors: the arrays have room for a multiple of kRowLanes.
    void (*row_standardize)(int64_t rows, const double* mean, const double* var, double eps,
                            Standardization<A*> statistics);
    // y = f(xhat * gamma + beta)
    void (*row_apply)(BlockSize size, Run<const A> x, Standardization<const A*> statistics, RowParameters<A> parameters,
                      ActivationKind f, Target<A> y);
    // row_apply on one block and row_moments on the next; y is streamed.
    void (*row_apply_moments)(BlockSize size, Run<const A> x, Standardization<const A*> statistics,
                              RowParameters<A> parameters, ActivationKind f, Target<A> y, NextRowMoments<A> next);
    // With g = gamma * dz: sum_g[row] = sum(g), sum_g_xhat[row] = sum(g * xhat). Unless chains is null, dz and dz *
    // xhat are added to the columns' sums there, for at most kColumnRows rows before add_chains.
    void (*row_sums)(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<const A*> statistics,
                     const A* gamma, double* sum_g, double* sum_g_xhat, A* chains);
    // The slopes of rows from such sums: b = -rstd * (sum_g_xhat * share), k = -rstd * (sum_g * share). Arrays of A as
    // in row_standardize.
    void (*row_slopes)(int64_t rows, const A* rstd, const double* sum_g, const double* sum_g_xhat, double share,
                       RowSlopes<A*> slopes);
    // dx = rstd * (gamma * dz) + (b * xhat + k). Chains as in row_sums, not streamed, and only one of the two adds to
    // them: here they cost less if rows are at most late_chains long, there if they are longer.
    void (*row_dx)(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<const A*> statistics,
                   const A* gamma, RowSlopes<const A*> slopes, Target<A> dx, A* chains);
    int64_t late_chains;
    // sum_dz and sum_dz_xhat += chains, an array of chain_elements(cols); chains = 0
    void (*add_chains)(int64_t cols, A* chains, double* sum_dz, double* sum_dz_xhat);
    // sums[i] += sums[count + i] + ..., `parts` arrays of `count` in their order
    void (*add_parts)(int64_t parts, int64_t count, double* sums);

    // Columns: each column has its own statistics and parameters, arrays of length cols.
    void (*col_moments)(BlockSize size, Run<const A> x, const A* center, double* sum, double* sum_sq);
    void (*col_moments_wide)(BlockSize size, Run<const A> x, const double* center, double* sum, double* sum_sq);
    void (*col_apply)(BlockSize size, Run<const A> x, Affine<const A*> z, ActivationKind f, Target<A> y);
    void (*col_sums)(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<const A*> statistics,
                     double* sum_dz, double* sum_dz_xhat);
    void (*col_dx)(BlockSize size, Run<const A> x, const Gradient<A>& dz, Standardization<const A*> statistics,
                   DxCoefficients<const A*> coefficients, Target<A> dx);
};

// ---- matrix products -----------------------------------------------------------------------------------------------

// c[rows][cols] = base + a * b, where b is given in panels: columns in groups of kPanel, [cols /
// kPanel][depth][kPanel]. Each element is base + (a[0] b[0] + a[1] b[1] + ...) + (a[256] b[256] + ...) + ...: sums of
// kDepthRun terms, each accumulated in this order and added to the result so far. So its bits do not depend on tiling,
// and a product may be cut in depth at multiples of kDepthRun.
template <class A>
struct Product {
    const A* a;  // a[r * a_row + k / kPanel * a_group + k % kPanel * a_step]
    int64_t a_row, a_step, a_group;
    int64_t rows, depth, cols;
    const A* panels;  // panel j begins at j * panel_stride
    int64_t panel_stride;
    const A* base;  // null: 0. base_row 0: the same for every row. May be c.
    int64_t base_row;
    A* c;
    int64_t c_row;
};

template <class A>
struct ProductKernels {
    void (*product)(const Product<A>& product);
    // The number of panels that a product of `rows` rows processes at a time; widths that are a multiple waste nothing.
    int64_t (*panels_at_once)(int64_t rows);
    // panel[k][u] = from[u * u_stride + k * k_stride] for u < units, 0 for the others. Fast for k_stride 1.
    void (*pack_columns)(const A* from, int64_t u_stride, int64_t k_stride, int64_t units, int64_t depth, A* panel);
    // The same, fast for u_stride 1.
    void (*pack_rows)(const A* from, int64_t k_stride, int64_t u_stride, int64_t units, int64_t depth, A* panel);
    // One panel: sums[u] += sum over rows of a[row][u] * b[row][u]; without b, of a alone.
    void (*panel_sums)(const A* a, const A* b, int64_t b_row, int64_t rows, double* sums);
};

// ---- convolutions --------------------------------------------------------------------------------------------------
//
// A band is a part of one image with its padding, in which the pixels that a kernel's tap reads are contiguous.

// Pixels of a panel that a tap reads from contiguous elements: pixel i from element `from` + i of a channel, if bit i
// of `pixels` is set. The set bits are contiguous.
struct PatchRun {
    int64_t from;
    uint32_t pixels;
};

template <class A>
struct ConvKernels {
    // panel[k - first][i] = channels[k / taps * channel + from + i] for first <= k < first + depth and every pixel i of
    // the runs of tap k % taps, which are runs[k % taps * count] and on; 0 if no run has it. There is at least one run.
    void (*pack_taps)(const A* channels, int64_t channel, const PatchRun* runs, int64_t taps, int64_t count,
                      int64_t first, int64_t depth, A* panel);
    // to[r][before + j] = from[r][j], and 0 around it. Writes up to a vector beyond the last row.
    void (*copy_rows)(const A* from, int64_t from_row, BlockSize size, int64_t before, A* to, int64_t to_row);
    // y[r][j] = (accumulate ? y[r][j] : bias) + sum over t of weights[t] * band[r * band_row + offsets[t] + j]. Reads
    // up to a vector beyond the last element of the band.
    void (*tap_rows)(const A* band, int64_t band_row, const int64_t* offsets, const A* weights, int64_t taps,
                     BlockSize size, bool accumulate, A bias, A* y, int64_t y_row);
    // sums[t][j % kPanel] += sum over rows and j of dy[row][j] * band[row][offsets[t] + j]. There are columns.
    void (*tap_sums)(const A* band, int64_t band_row, const int64_t* offsets, int64_t taps, BlockSize size, const A* dy,
                     int64_t dy_row, double* sums);
};

// ---- recurrent cells ------------------------------------------------------------------------------------------------
//
// Hidden units are in blocks of kPanel<A>, one cache line of elements; the last block is padded with unused units.
// Arrays of rows have two layouts. "Rows": [row][block][kPanel], or for gates [row][block][gate][kPanel]. "Panels":
// [block][row][kPanel], which products take directly as either operand; for gates, a panel per block and gate.

// A time step, or one of its halves: up to the new cell state of an LSTM, or to the reset gate of a GRU, and from it
// on. Full peepholes, and GRUs that reset the state, need a product with the result of the first half.
enum class CellPhase { whole, state, output };

// An array of states: unit u of row r is at data[u / kPanel * panel + r * row + u % kPanel], in rows or in panels.
template <class T>
struct StateArray {
    T* data = nullptr;  // null: not wanted
    int64_t row = 0, panel = 0;
};

// A factor of every unit: data[offset[r] + u] for unit u of row r.
template <class A>
struct RowFactor {
    const A* data = nullptr;  // null: 1
    const int64_t* offset = nullptr;
};

// Layer normalization of the rows of a range: (c - center[r]) * rstd[r] * gamma + beta.
template <class A>
struct RowNorm {
    const A *center = nullptr, *rstd = nullptr, *gamma = nullptr;
    const A* beta = nullptr;  // null: 0
};

// Products with the state that were not added to the gates: gate k of block b and row r is at data[r * row + offset[k]
// + b * block[k]].
template <class A>
struct GateProducts {
    const A* data = nullptr;  // null: the gates include them
    int64_t row = 0;
    int64_t offset[4] = {}, block[4] = {};
    RowNorm<A> norm;  // with parameters as rows of gates; without gamma: none
};

// The new hidden state, h = k h~ + (1 - k) h-, with k = `zoneout`.
template <class A>
struct CellOutput {
    StateArray<const A> h_prev;  // h-; null: not read
    RowFactor<A> zoneout;
    // h * mask, which the next step multiplies, `copies` times with different masks; and h itself if it is read too.
    StateArray<A> h_next, h_own;
    int copies = 1;
    int64_t h_copy = 0, mask_copy = 0;  // from one to the next
    RowFactor<A> mask;
    StateArray<A> above;  // the input of the layer above
    A* y = nullptr;       // y + y_offset[r] + u is row r's output of unit u; null: not wanted
    const int64_t* y_offset = nullptr;
};

// Pointers are to the first row and the first block of the range.
template <class A>
struct CellForward {
    const CellRule* rule;
    CellPhase phase;
    int64_t rows, blocks, units;  // units: the number of units in the blocks that are not padding
    A* gates;                     // in rows. In: z without peepholes; out: what backward needs of the gates
    int64_t gates_row;
    const A* inputs;  // with a norm: in rows, what is normalized by input_norm to z; null: the gates are z
    RowNorm<A> input_norm;
    GateProducts<A> products;
    CellOutput<A> output;
    // LSTM
    StateArray<const A> c_prev;
    const A* peephole;  // diagonals, as one row of gates; null: none
    StateArray<A> c_next;
    StateArray<A> c_new;        // the new cell state before zoneout; null: it is c_next
    RowFactor<A> cell_zoneout;  // as zoneout, for c
    RowNorm<A> cell_norm;  // of what the output reads, c_new, and if norm_carried of what c_next gets; no gamma: none
    bool norm_carried;
    // LSTM: o psi(c), instead of `output`, if it is to be projected. GRU: the product with the state that the reset
    // gate multiplies (after), or the reset state (before).
    StateArray<A> inner;
    StateArray<const A> reset_input;  // GRU, before: what the reset gate multiplies, h * mask
};

// The gradient of the new hidden state: dh + dy, where dh is what the later step propagates back.
template <class A>
struct OutputGradient {
    const A* dy;  // as y above; null: 0
    const int64_t* dy_offset;
    StateArray<const A> dh;  // sum of its copies, each times its mask
    int copies = 1;
    int64_t dh_copy = 0, mask_copy = 0;
    RowFactor<A> mask;
    StateArray<A> carry;  // the part of dh that passes no product. In: of this step; out: of the step before; null: 0
    RowFactor<A> zoneout;
};

template <class A>
struct CellBackward {
    const CellRule* rule;
    CellPhase phase;  // `output` comes first
    int64_t rows, blocks, units;
    const A* gates;
    int64_t gates_row;
    OutputGradient<A> output;
    // In panels: gate k of block b is panel b * dz_block + k * dz_gate, `dz_panel` elements from one to the next. The
    // gates of a GRU with reset after are n, r, z, and the gradient of the product that the reset gate multiplies.
    A* dz;
    int64_t dz_panel, dz_block, dz_gate;
    // LSTM
    StateArray<const A> c_prev;
    const A* peephole;
    StateArray<A> dc;     // in: of the new cell state; out: of the old
    StateArray<A> c_new;  // out
    StateArray<A> dzo;    // out: a second copy of the output gate's dz
    RowFactor<A> cell_zoneout;
    RowNorm<A> cell_norm;
    bool norm_carried;
    StateArray<A> dnormal;    // with a cell norm, in phase `output`: the gradient of what it returns
    StateArray<A> dc_direct;  // with a cell norm: what passes cell_zoneout, from phase `output` to phase `state`
    // GRU
    StateArray<const A> h_prev, inner, reset_input;
    StateArray<const A> dreset;  // before: the gradient of the reset state, in the second half
    RowFactor<A> reset_mask;     // before: the mask in reset_input
};

// Rows of a hidden state that is the result of a product: writes them as a cell does.
template <class A>
struct CellEmit {
    int64_t rows, blocks, units;
    StateArray<const A> h;
    CellOutput<A> output;
};
// Rows of its gradient.
template <class A>
struct CellCollect {
    int64_t rows, blocks, units;
    OutputGradient<A> output;
    StateArray<A> dh;  // out
};

// Statistics of rows [block][gate][kPanel], or [block][kPanel] with one gate, without the padding of the last block.
template <class A>
struct NormRows {
    int64_t rows, gates, units;
    const A* x;
    int64_t x_row;
    double eps;
    A *center, *rstd;  // out: the mean and 1 / sqrt(var + eps) of every row
};

// The gradient of x from that of y, dx = rstd (g - mean(g) - xhat mean(g xhat)) with g = gamma dy. Unit u of block b,
// gate k and row r of dy is at dy + (b * block + slot[k]) * panel + r * row + u; of dx likewise. They may be the same.
template <class A>
struct NormRowsGradient {
    int64_t rows, gates, units;
    const A* x;
    int64_t x_row;
    const A *center, *rstd, *gamma;
    const A* dy;
    A* dx;
    int64_t row, panel, block, slot[4];
    bool add;  // to dx
};

// One row: the gates' values, values_gate apart, and the new cell state; null: not wanted.
template <class A>
struct CellShow {
    const CellRule* rule;
    int64_t units;
    const A* gates;
    StateArray<const A> c_prev;
    A* values;
    int64_t values_gate;
    A* c;
};

struct Dropout {
    uint64_t seed;
    uint32_t layer;
    uint32_t threshold;  // a random draw below it drops the element
    double scale;        // the factor of the kept elements
};

template <class A>
struct CellKernels {
    void (*forward_cells)(const CellForward<A>& cells);
    void (*backward_cells)(const CellBackward<A>& cells);
    void (*emit_states)(const CellEmit<A>& cells);
    void (*collect_gradients)(const CellCollect<A>& cells);
    void (*norm_rows)(const NormRows<A>& rows);
    void (*norm_rows_gradient)(const NormRowsGradient<A>& rows);
    // One panel of the gradient of gamma: sums[u] += sum over rows of dy[r][u] * (x[r][u] - center[r]) * rstd[r]
    void (*norm_sums)(const A* dy, int64_t dy_row, const A* x, int64_t x_row, const A* center, const A* rstd,
                      int64_t rows, double* sums);
    void (*show_cells)(const CellShow<A>& cells);
    // Multiplies a row by the mask of row index `row`; its elements are laid out as in a StateArray.
    void (*dropout_row)(const Dropout& dropout, uint64_t row, A* data, int64_t panel, int64_t width);
};

// Any activation, elementwise, in place or not.
template <class A>
struct ActivationKernels {
    // y = f(z)
    void (*activate)(const Activation& activation, const A* z, int64_t count, A* y);
    // dz = dy * f'(z), with the slope computed from z
    void (*apply_input_slope)(const Activation& activation, const A* z, const A* dy, int64_t count, A* dz);
    // dz = dy * f'(z), with the slope computed from y; only for activations whose output determines it
    void (*apply_output_slope)(const Activation& activation, const A* y, const A* dy, int64_t count, A* dz);
};

// ---- optimizers ----------------------------------------------------------------------------------------------------

// A running average: x' = keep * x + take * new.
template <class A>
struct RunningAverage {
    A keep, take;
};

// With g = clip(scale * gradient) + l2 * p + l1 * sign(p):
//   sgd:      d = g
//   adam:     m' = first(m, g), v' = second(v, g * g), w = v' or its largest so far;  d = m' / (sqrt(w) + eps)
//   rmsprop:  s' = second(s, g * g), a' = second(a, g) or 0;  d = g / (sqrt(s' - a' * a' + eps_inside) + eps)
//   with a velocity:  u' = momentum * u + gain * d, and d is u', or momentum * u' + gain * d (nesterov)
//   p' = p + (rate * d - decay * p)
template <class A>
struct OptimizerRule {
    OptimizerKind kind;
    bool nesterov;
    A scale, low, high;
    A l2, l1;
    RunningAverage<A> first, second;
    A eps, eps_inside;
    A momentum, gain;
    A rate, decay;
};

template <class A>
struct OptimizerKernels {
    // arrays: in the order of OptimizerArray, `count` contiguous elements each; null: an optional array that is absent.
    // The gradient is only read, the others are updated in place.
    void (*step)(const OptimizerRule<A>& rule, A* const* arrays, int64_t count);
    // The sum of squares, in double precision.
    double (*sum_squares)(const A* x, int64_t count);
};

// ---- losses --------------------------------------------------------------------------------------------------------

// Losses of single elements.
enum class ElementLoss : int {
    difference,  // d = y - target: a * d^2 for |d| <= b, else b * (|d| - b / 2); slope: clip(d, -b, b)
    absolute,    // |y - target|; the slope is a at 0
    hinge,       // max(0, 1 - s * y), s = 2 * target - 1; slope: -s for s * y <= 1
    log,         // -target * log(y + a) - (1 - target) * log(1 - y + a)
    sigmoid,     // -t * log(sigmoid(y)) - (1 - t) * log(sigmoid(-y)), t = target * a + b
};

template <class A>
struct ElementLossRule {
    ElementLoss loss = ElementLoss::difference;
    A a = 0, b = 0;
    A scale = 1;  // of the values that are written, not of their sum
    A slope = 1;  // of the gradient
};

// How the gradient of a row is made from its exponentials: factor * (exps * total - (target * keep + share) * sum).
struct SoftTargets {
    double total, keep, share, sum, factor;
};

template <class A>
struct LossKernels {
    // sums[0] = the largest of the row, sums[1] = sum(e^(x - largest)), and if wanted sums[2] = sum(x - largest).
    // With a target, sums[3] = sum(target) and sums[4] = sum(target * (x - largest)), and sums[2] too.
    // exps[i] = e^(x[i] - largest); null: not wanted; may be x.
    void (*softmax_row)(const A* x, const A* target, int64_t count, bool want_total, A* exps, double* sums);
    // y = y * scale + shift
    void (*scale_row)(A* y, int64_t count, A scale, A shift);
    void (*soft_gradient_row)(A* exps, const A* target, int64_t count, const SoftTargets& rule);
    // weights, values and gradient may be null. Returns the sum of the weighted values.
    double (*elements)(const ElementLossRule<A>& rule, const A* y, const A* target, const A* weights, int64_t count,
                       A* values, A* gradient);
    // The sum of products, in double precision.
    double (*dot)(const A* x, const A* y, int64_t count);
    // result = a * x + b * y; may be x or y.
    void (*blend_row)(const A* x, const A* y, int64_t count, A a, A b, A* result);
};

// ---- pooling -------------------------------------------------------------------------------------------------------

// The windows of a pooling, rows first: output o of an axis covers the inputs o * stride - before + k * dilation for
// k < kernel. Those outside of the input are padding.
struct PoolShape {
    int64_t inputs[2], outputs[2];
    int64_t kernel[2], stride[2], dilation[2], before[2];
    bool count_padding;  // an average is divided by the size of the window, not by the number of inputs in it
};

// Elements of images: pixel (h, w) is at data + h * row + w * column.
template <class T>
struct Pixels {
    T* data;
    int64_t row, column;
};

// Either `channels` is 0: there is one channel, and the pixels of a row are contiguous; or it is the number of
// channels, which are contiguous at each pixel.
template <class A>
struct PoolKernels {
    // y of the output rows [first, last). indices[i]: the position h * W + w of the largest input; null: not wanted.
    // The first of several that are equal; the last NaN, if there is one. Every window must contain an input.
    void (*max)(const PoolShape& shape, int64_t channels, int64_t first, int64_t last, Pixels<const A> x, Pixels<A> y,
                Pixels<int32_t> indices);
    void (*average)(const PoolShape& shape, int64_t channels, int64_t first, int64_t last, Pixels<const A> x,
                    Pixels<A> y);
    // y = sqrt(sum of x^2), the sum in double precision
    void (*l2)(const PoolShape& shape, int64_t channels, int64_t first, int64_t last, Pixels<const A> x, Pixels<A> y);
    // Adds the gradients of all inputs to `plane`; no element of it may be -0. The gradient of an input is summed in
    // the order of the outputs. Of one channel, the plane is [H * W], followed by kPoolSlack elements that may be
    // written. `scratch`: PoolGradientRows(shape).scratch(outputs[0]) elements; only for one channel.
    void (*average_gradient)(const PoolShape& shape, int64_t channels, Pixels<const A> dy, Pixels<A> plane, A* scratch);
    void (*l2_gradient)(const PoolShape& shape, int64_t channels, Pixels<const A> dy, Pixels<const A> x,
                        Pixels<const A> y, Pixels<A> plane);
};
constexpr int64_t kPoolSlack = 32;  // two of the widest vectors

// An average's gradient of one channel needs every row of dy divided by the counts, between zeros: as many before it as
// a window has outputs to its left, and after it up to the last output that an input could belong to.
struct PoolGradientRows {
    int64_t before, length;  // zeros before the first output, and elements of a row
    int64_t result;          // elements of a row of gradients, with room before and after it

    // Always inlined, so that kernel objects export no copy of it.
    [[gnu::always_inline]] explicit PoolGradientRows(const PoolShape& shape) {
        const int64_t last = (shape.before[1] + shape.inputs[1]) / shape.stride[1] + 1;
        before = (shape.kernel[1] - 1) / shape.stride[1];
        length = before + (last > shape.outputs[1] ? last : shape.outputs[1]) + kPoolSlack;
        result = shape.inputs[1] + 2 * kPoolSlack;
    }
    [[gnu::always_inline]] int64_t scratch(int64_t rows) const { return rows * length + result; }
};

// ---- maps ----------------------------------------------------------------------------------------------------------

// An argument of an operation: contiguous elements (step 1), or one value that a cache line is filled with (step 0).
template <class A>
struct MapArgument {
    const A* data;
    int64_t step;
};

// A is float, double or int64_t, whose arithmetic wraps around.
template <class A>
struct MapKernels {
    // out[i] = operation(arguments[0][i], ...) for i < count. `out` may be an argument, unless it is
    // streamed. A must have the operation.
    void (*run)(MapOperation operation, const MapArgument<A>* arguments, int64_t count, A* out, bool stream);
    // dst[r * cols + c] = src[r * row_stride + c * col_stride], converted
    void (*load)(MapElement element, const void* src, BlockSize size, int64_t row_stride, int64_t col_stride, A* dst);
    // dst[r * row_stride + c * col_stride] = src[r * cols + c], converted: to integers toward zero, saturated, NaN to 0
    // (from int64 to int32 the low bits); to booleans != 0. Only contiguous rows stored as A are streamed.
    void (*store)(MapElement element, const A* src, BlockSize size, void* dst, int64_t row_stride, int64_t col_stride,
                  bool stream);
};

// ---- reductions ----------------------------------------------------------------------------------------------------

// A row is reduced in kReduceLanes partial results: element i belongs to partial result i % kReduceLanes. They are
// merged pairwise, the upper half with the lower one. Rows of columns are reduced in kReduceChains: row r belongs to
// chain r % kReduceChains. Sums and products are in double precision. The mean is the sum here.
constexpr int64_t kReduceLanes = 32, kReduceChains = 4;

template <class A>
struct ReduceKernels {
    // results[r] = the reduction of row r; there are columns. Rows are contiguous.
    void (*rows)(ReduceKind kind, const A* x, int64_t row, BlockSize size, double* results);
    // results[c] = the reduction of column c; there are rows.
    void (*columns)(ReduceKind kind, const A* x, int64_t row, BlockSize size, double* results);
    // The index of the first element equal to `value`, or of the first NaN if that is NaN; count if there is none.
    int64_t (*find)(const A* x, int64_t count, A value);
    // best[c], index[c] = the largest element of column c, times `sign`, and its first row; NaN is the largest.
    void (*arg_columns)(A sign, const A* x, int64_t row, BlockSize size, A* best, int64_t* index);
};

// ---- softmax and cumulative sums -----------------------------------------------------------------------------------

// Rows of contiguous elements. Results are computed in double precision and rounded once; they may be in place.
template <class A>
struct RowKernels {
    // y = x - shift
    void (*shift)(const A* x, int64_t count, double shift, A* y);
    // dx = y * (dy - sum)
    void (*softmax_gradient)(const A* y, const A* dy, int64_t count, double sum, A* dx);
    // dx = dy - e^y * sum
    void (*log_softmax_gradient)(const A* y, const A* dy, int64_t count, double sum, A* dx);
    // carry += x; y = carry, or with `exclusive` what it was before
    void (*accumulate)(const A* x, int64_t count, bool exclusive, double* carry, A* y);
};

// ---- linear recurrences --------------------------------------------------------------------------------------------

// Steps of a recurrence: step r is a row of contiguous elements at data + r * stride. A stride may be 0 or negative.
template <class T>
struct Steps {
    T* data;
    int64_t stride;
};

// For every step r in order and every column: state = a * state + b, with one rounding; y = state; da = state * before.
template <class A>
struct ScanSteps {
    BlockSize size;
    Steps<const A> a, b, before;  // `before` is read only for da
    A* state;                     // [cols], updated
    Steps<A> y, da;               // y may be b; da may be null: not wanted
    bool far;                     // the inputs come from memory: they are prefetched
    bool stream;                  // the results leave the cache; `far` too
};

// The same where time is contiguous: step r of sequence c is at data + c * stride + r. With `down` from the last step
// to the first.
template <class A>
struct ScanSequences {
    int64_t steps, sequences;
    bool down;
    Steps<const A> a, b, before;
    bool constant;   // a has no time: one factor for each sequence
    A* state;        // [sequences], updated
    Steps<A> y, da;  // both may be null; y may be b
    bool stream;     // the inputs come from memory, and the results go there
};

template <class A>
struct ScanKernels {
    void (*run)(const ScanSteps<A>& steps);
    void (*run_sequences)(const ScanSequences<A>& sequences);
    // x[i] = 0 where reset[i * step] is not 0
    void (*clear)(const uint8_t* reset, int64_t step, int64_t count, A* x);
    // to[c * to_row + r] = from[r * from_row + c]
    void (*transpose)(const A* from, int64_t from_row, BlockSize size, A* to, int64_t to_row);
};

// The kernels of one kind for both types of arithmetic.
template <template <class> class Kernels>
struct ForBoth {
    Kernels<float> f32;
    Kernels<double> f64;

    template <class A>
    const Kernels<A>& of() const {
        if constexpr (sizeof(A) == sizeof(float)) {
            return f32;
        } else {
            return f64;
        }
    }
};

struct KernelTable {
    const char* isa;
    ForBoth<StorageKernels> storage;
    ForBoth<NormKernels> norm;
    ForBoth<ProductKernels> product;
    ForBoth<ConvKernels> conv;
    ForBoth<CellKernels> cell;
    ForBoth<ActivationKernels> activation;
    ForBoth<OptimizerKernels> optimizer;
    ForBoth<LossKernels> loss;
    ForBoth<PoolKernels> pool;
    ForBoth<MapKernels> map;
    MapKernels<int64_t> map_integers;
    ForBoth<ReduceKernels> reduce;
    ForBoth<RowKernels> rows;
    ForBoth<ScanKernels> scan;
    // The largest of `count` indices, as unsigned numbers; 0 if there are none.
    uint32_t (*largest_index)(const int32_t* indices, int64_t count);
    // dst = the sum of 1 to 3 sources: the peak memory bandwidth, for benchmarks.
    void (*add_streams)(const float* const* sources, int count, int64_t elements, float* dst, bool stream);
    // Multiply-adds on registers alone: the peak speed of arithmetic, for benchmarks. Returns the number of
    // floating-point operations; `result` depends on all of them.
    double (*multiply_adds)(int64_t steps, float* result);
};

}  // namespace rg
