// Drivers of recurrent layers: cells, layers, directions, time steps, ragged batches, and the cache between forward and
// backward.
//
// With x the input of a step, h- and c- the states before it, and gates z_k = x wx_k' + h- wh_k' + b_k:
//   LSTM        i f o = s(z)   g = tanh(z_g)   c = f c- + i g   h = o tanh(c)
//   GRU after   r z = s(z + bh)   n = tanh(x wx_n' + b_n + r (h- wh_n' + bh_n))   h = (1 - z) n + z h-
//   GRU before  r z = s(z + bh)   n = tanh(x wx_n' + b_n + (r h-) wh_n' + bh_n)   h = (1 - z) n + z h-
//   RNN         h = tanh(z)
// with any activations in place of these, and the options of CellRule and RecurrentShape.
//
// The samples of a ragged batch are assigned to `slots`, longest first; in each time step the first `active` slots are
// active. Rows are the active (step, slot) pairs in the order of time. Every array of rows has exactly these rows.
//
// T is steps, N samples, I inputs, H units, P outputs (H without a projection), D directions, L layers, G gates.
// Elements have the shape's dtype, strides are in elements and may be negative. Unless a field says otherwise, a result
// overlaps no other array of its call.
#pragma once

#include "../base/shape.h"

namespace rg {

enum class Peephole : int32_t { none, diagonal, full };

// Layer normalization of z: gamma_x * norm(x wx') + b + gamma_h * norm(h- wh') + bh, each over all gates of a row; and
// of an LSTM's cell state, either where the output reads it, or itself.
enum class CellNorm : int32_t { none, output, cell };

// What multiplies the state in the recurrent product: nothing, one mask for all gates, or one for each.
enum class MaskKind : int32_t { none, all, each };

// A factor of every unit, [L * D][G][T][N][units], with contiguous units; the other strides may be 0.
struct Factor {
    const void* data = nullptr;  // null: absent
    int64_t cell = 0, gate = 0, step = 0, sample = 0;
};

struct RecurrentShape {
    int64_t steps = 0, samples = 0, inputs = 0;     // any of them may be 0
    int64_t units = 0, layers = 1, directions = 1;  // at least 1; directions 1 or 2
    int64_t projection = 0;                         // LSTM: P, the size of the projected output; 0: it is not projected
    DType dtype = DType::f32;                       // f32 or f64
    CellRule rule;                                  // of all cells
    Peephole peephole = Peephole::none;             // of all cells; a gate may still have none
    CellNorm norm = CellNorm::none;                 // not with peepholes, clips or a projection
    double eps = 0;                                 // of the normalization
    double dropout = 0;                             // of the inputs of all layers but the first: 0 <= dropout < 1
    uint64_t seed = 0;                              // with the shape, it determines what is dropped
    const int64_t* active = nullptr;                // [T], each from 0 to N; null: all samples in every step
    const int64_t* order = nullptr;                 // [N], the sample in each slot, a permutation; null: the identity
    const uint8_t* reset = nullptr;  // [T][N]: where it is not 0, states are 0 before the step. For one direction
    MaskKind mask_kind = MaskKind::none;
    Factor mask;                   // of h-, as mask_kind says. A GRU's own h- has no mask
    bool has_zoneout = false;      // whether there is a zoneout; has_zoneout and mask_kind determine the cache
    Factor zoneout, cell_zoneout;  // h = k h~ + (1 - k) h-, and of an LSTM the same for c

    int64_t outputs() const { return projection ? projection : units; }
};

// [T][N][features], with contiguous features. Nothing is read where a sample is inactive.
struct Sequence {
    void* data = nullptr;  // null: absent
    int64_t step = 0, sample = 0;
};

// [L * D][N][units], with contiguous units.
struct States {
    void* data = nullptr;  // null: absent
    int64_t cell = 0, sample = 0;
};

// One parameter of the gates, in the order of CellKind, all with the same strides. Null: that gate has none.
struct GateArray {
    void* gate[4] = {};
    int64_t row_stride = 0, col_stride = 0;  // a vector has no columns
};

// The parameters of one layer and direction, or their gradients. The rows of a gradient are contiguous; a parameter may
// have any strides. A null vector: 0; the gammas of a norm are present.
struct CellArrays {
    GateArray wx;                // [H][I], or [H][D * P] above the first layer. As a parameter, all gates have it
    GateArray wh;                // [H][P]. As a parameter, all gates have it
    GateArray b;                 // [H]
    GateArray bh;                // [H], GRU
    GateArray peephole;          // LSTM: [H] if diagonal, [H][H] if full, not read if there are none
    GateArray projection;        // [P][H], in place of the first gate; as a parameter of a projected LSTM, present
    GateArray gamma_x, gamma_h;  // [H], read with a norm
    GateArray gamma_c, beta_c;   // [H], in place of the first gate; LSTM, read with a norm
};

// If x is rows of a table, selected by indices: products with x take only as many rows as the table has.
struct Lookup {
    const int64_t* indices = nullptr;  // [T][N], contiguous, in range for active samples; null: x is a sequence
    int64_t rows = 0;                  // of the table
};

struct RecurrentForward {
    RecurrentShape shape;
    Sequence x;  // [T][N][I], or the table [rows][I] with `step` as its row stride
    Lookup lookup;
    const CellArrays* cells = nullptr;  // [L][D]
    States h0, c0;                      // [P], [H] of an LSTM; null: 0
    void* cache = nullptr;              // recurrent_cache_bytes, at any alignment, overwritten; null: nothing is saved
    uint64_t stamp = 0;                 // stored in the cache, and returned by recurrent_check_cache
    int threads = 1;
    Sequence y;  // [T][N][D * P], overwritten, with 0 where a sample is inactive; null: not wanted
    States hn;   // the state after a sample's last active step, or h0; overwritten; may be h0; null: not wanted
    States cn;   // likewise; may be c0
};

// Gradients are overwritten, or with `accumulate` added to; null: not wanted.
struct RecurrentBackward {
    RecurrentShape shape;               // as in forward
    Sequence x;                         // as in forward; read only if there are dcells
    Lookup lookup;                      // as in forward
    const CellArrays* cells = nullptr;  // as in forward; biases are not read
    const void* cache = nullptr;        // filled by forward: recurrent_check_cache returned `good`. Only read
    Sequence dy;                        // [T][N][D * P]; null: 0
    States dhn, dcn;                    // null: 0
    bool accumulate = false;            // add to all results; else dx is 0 where a sample is inactive
    int threads = 1;
    Sequence dx;                         // as x. The gradient of a table is summed in the order of rows
    const CellArrays* dcells = nullptr;  // [L][D], each gate wanted or not; null: none is wanted
    States dh0, dc0;
};

// The slots of a ragged batch, longest sequence first, samples of equal length in their order: active [steps] and order
// [samples] for lengths [samples], each from 0 to steps.
void recurrent_slots(int64_t steps, int64_t samples, const int64_t* lengths, int64_t* active, int64_t* order);

// Whether the sizes of all arrays, the cache and the scratch of a problem fit in 64 bits. The functions below assume
// it.
bool recurrent_fits(const RecurrentShape& shape);

// rows: the number of active samples, summed over all steps. Without it, from `shape.active`.
int64_t recurrent_cache_bytes(const RecurrentShape& shape, int64_t rows);
int64_t recurrent_cache_bytes(const RecurrentShape& shape);

enum class CacheCheck { good, foreign, other_problem };
struct CacheState {
    CacheCheck check;
    uint64_t stamp;
};
// Whether a forward pass of this shape filled `cache` (of at least recurrent_cache_bytes).
CacheState recurrent_check_cache(const RecurrentShape& shape, const void* cache);

void recurrent_forward(const RecurrentForward& call);
void recurrent_backward(const RecurrentBackward& call);

// Extracts the gate values [steps][samples][gates][units] and, of an LSTM, the new cell states [steps][samples][units]
// of one cell from a cache; 0 where a sample is inactive. Contiguous; null: not wanted.
void recurrent_show(const RecurrentShape& shape, const void* cache, int64_t cell, void* gates, void* states);

}  // namespace rg
