// LSTM drivers: layers, directions, time steps, ragged batches, and the cache between forward and backward.
//
// The samples of a ragged batch are assigned to `slots`, longest first; in each time step the first `active` slots are
// active. Rows are the active (step, slot) pairs in the order of time. Every array of rows has exactly these rows.
//
// T is steps, N samples, I inputs, H units, D directions, L layers. Elements have the shape's dtype, strides are in
// elements and may be negative. Unless a field says otherwise, a result overlaps no other array of its call.
#pragma once

#include "../base/shape.h"

namespace rg {

enum class Peephole : int32_t { none, diagonal, full };

struct LstmShape {
    int64_t steps = 0, samples = 0, inputs = 0;     // any of them may be 0
    int64_t units = 0, layers = 1, directions = 1;  // at least 1; directions 1 or 2
    DType dtype = DType::f32;                       // f32 or f64
    LstmActivations activations;                    // of all cells
    Peephole peephole = Peephole::none;             // of all cells; a gate may still have none
    bool output_reads_old = false;                  // the output gate's peephole reads the old cell state
    double dropout = 0;                             // of the inputs of all layers but the first: 0 <= dropout < 1
    uint64_t seed = 0;                              // with the shape, it determines what is dropped
    const int64_t* active = nullptr;                // [T], each from 0 to N; null: all samples in every step
    const int64_t* order = nullptr;                 // [N], the sample in each slot, a permutation; null: the identity
};

// [T][N][features], with contiguous features. Nothing is read where a sample is inactive.
struct Sequence {
    void* data = nullptr;  // null: absent
    int64_t step = 0, sample = 0;
};

// [L * D][N][H], with contiguous units.
struct States {
    void* data = nullptr;  // null: absent
    int64_t cell = 0, sample = 0;
};

// One parameter of the gates i f g o, all with the same strides. Null: that gate has none.
struct GateArray {
    void* gate[4] = {};
    int64_t row_stride = 0, col_stride = 0;  // a vector has no columns
};

// The parameters of one layer and direction, or their gradients. The rows of a gradient are contiguous; a parameter may
// have any strides.
struct CellArrays {
    GateArray wx;        // [H][I], or [H][D * H] above the first layer. As a parameter, all gates have it
    GateArray wh;        // [H][H]. As a parameter, all gates have it
    GateArray b;         // [H]; null: 0
    GateArray peephole;  // [H] if diagonal, [H][H] if full, not read if there are none; null: 0
};

// If x is rows of a table, selected by indices: products with x take only as many rows as the table has.
struct Lookup {
    const int64_t* indices = nullptr;  // [T][N], contiguous, in range for active samples; null: x is a sequence
    int64_t rows = 0;                  // of the table
};

struct LstmForward {
    LstmShape shape;
    Sequence x;  // [T][N][I], or the table [rows][I] with `step` as its row stride
    Lookup lookup;
    const CellArrays* cells = nullptr;  // [L][D]
    States h0, c0;                      // null: 0
    void* cache = nullptr;              // lstm_cache_bytes, at any alignment, overwritten; null: nothing is saved
    uint64_t stamp = 0;                 // stored in the cache, and returned by lstm_check_cache
    int threads = 1;
    Sequence y;  // [T][N][D * H], overwritten, with 0 where a sample is inactive; null: not wanted
    States hn;   // the state after a sample's last active step, or h0; overwritten; may be h0; null: not wanted
    States cn;   // likewise; may be c0
};

// Gradients are overwritten, or with `accumulate` added to; null: not wanted.
struct LstmBackward {
    LstmShape shape;                    // as in forward
    Sequence x;                         // as in forward; read only if there are dcells
    Lookup lookup;                      // as in forward
    const CellArrays* cells = nullptr;  // as in forward; biases are not read
    const void* cache = nullptr;        // filled by forward: lstm_check_cache returned `good`. Only read
    Sequence dy;                        // [T][N][D * H]; null: 0
    States dhn, dcn;                    // null: 0
    bool accumulate = false;            // add to all results; else dx is 0 where a sample is inactive
    int threads = 1;
    Sequence dx;                         // as x. The gradient of a table is summed in the order of rows
    const CellArrays* dcells = nullptr;  // [L][D], each gate wanted or not; null: none is wanted
    States dh0, dc0;
};

// The slots of a ragged batch, longest sequence first, samples of equal length in their order: active [steps] and order
// [samples] for lengths [samples], each from 0 to steps.
void lstm_slots(int64_t steps, int64_t samples, const int64_t* lengths, int64_t* active, int64_t* order);

// Whether the sizes of all arrays, the cache and the scratch of a problem fit in 64 bits. The functions below assume
// it.
bool lstm_fits(const LstmShape& shape);

// rows: the number of active samples, summed over all steps. Without it, from `shape.active`.
int64_t lstm_cache_bytes(const LstmShape& shape, int64_t rows);
int64_t lstm_cache_bytes(const LstmShape& shape);

enum class CacheCheck { good, foreign, other_problem };
struct CacheState {
    CacheCheck check;
    uint64_t stamp;
};
// Whether a forward pass of this shape filled `cache` (of at least lstm_cache_bytes).
CacheState lstm_check_cache(const LstmShape& shape, const void* cache);

void lstm_forward(const LstmForward& call);
void lstm_backward(const LstmBackward& call);

// Extracts the gate values [steps][samples][4][units] and cell states [steps][samples][units] of one cell from a cache;
// 0 where a sample is inactive. Contiguous; null: not wanted.
void lstm_show(const LstmShape& shape, const void* cache, int64_t cell, void* gates, void* states);

}  // namespace rg
