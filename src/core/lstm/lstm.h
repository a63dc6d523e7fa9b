// LSTM drivers: layers, directions, time steps, ragged batches, and the cache between forward and backward.
//
// The samples of a ragged batch are assigned to `slots`, longest first; in each time step the first `active` slots are
// active. Rows are the active (step, slot) pairs in the order of time. Every array of rows has exactly these rows.
#pragma once

#include "../base/shape.h"

namespace rg {

enum class Peephole : int32_t { none, diagonal, full };

struct LstmShape {
    int64_t steps = 0, samples = 0, inputs = 0, units = 0, layers = 1, directions = 1;
    DType dtype = DType::f32;  // f32 or f64
    LstmActivations activations;
    Peephole peephole = Peephole::none;
    bool output_reads_old = false;  // the output gate's peephole
    double dropout = 0;             // between layers
    uint64_t seed = 0;
    const int64_t* active = nullptr;  // [steps], each from 0 to samples; null: all samples
    const int64_t* order = nullptr;   // [samples], the sample in each slot; null: slots are samples
};

// [steps][samples][features]: strides in elements, features contiguous. Null: absent.
struct Sequence {
    void* data = nullptr;
    int64_t step = 0, sample = 0;
};

// [layers * directions][samples][units], likewise.
struct States {
    void* data = nullptr;
    int64_t cell = 0, sample = 0;
};

// One parameter of the gates i f g o. Null: that gate has none. Strides in elements.
struct GateArray {
    void* gate[4] = {};
    int64_t row_stride = 0, col_stride = 0;
};

// The parameters of one layer and direction, or their gradients: wx [H][inputs], wh [H][H], b [H], peephole [H] or
// [H][H] for each gate. The rows of gradients are contiguous.
struct CellArrays {
    GateArray wx, wh, b, peephole;
};

// x as rows of a table [rows][inputs], selected by indices [steps][samples], which are in range for active samples.
// Then `x` is the table and `dx` its gradient, with `step` as the row stride. Products with x take only as many rows as
// the table has.
struct Lookup {
    const int64_t* indices = nullptr;  // null: x is a sequence
    int64_t rows = 0;
};

struct LstmForward {
    LstmShape shape;
    Sequence x;
    Lookup lookup;
    const CellArrays* cells = nullptr;  // [layers][directions]
    States h0, c0;                      // null: 0
    void* cache = nullptr;              // of lstm_cache_bytes; null: nothing is saved for backward
    uint64_t stamp = 0;                 // stored in the cache, and returned by lstm_check_cache
    int threads = 1;
    Sequence y;     // [steps][samples][directions * units]; 0 where a sample is inactive
    States hn, cn;  // may be h0, c0
};

struct LstmBackward {
    LstmShape shape;
    Sequence x;
    Lookup lookup;
    const CellArrays* cells = nullptr;
    const void* cache = nullptr;
    Sequence dy;  // null: 0
    States dhn, dcn;
    bool accumulate = false;  // add to the results
    int threads = 1;
    Sequence dx;
    const CellArrays* dcells = nullptr;
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
