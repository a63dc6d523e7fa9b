// Maps: a chain of elementwise operations over arrays of one shape, in one pass, block by block in the cache.
#pragma once

#include "../base/shape.h"

namespace rg {

constexpr int kMapInputs = 24;  // operands and constants
constexpr int kMapSteps = 32;
constexpr int kMapResults = 8;
constexpr int kMapViews = kMapInputs + kMapResults;
constexpr int kMapRegisters = kMapInputs + kMapSteps;
constexpr int kMapAxes = 16;  // after merging

enum class MapArithmetic : int32_t { f32, f64, i64 };

struct MapView {
    char* data;
    MapElement element;
    int64_t stride[kMapAxes];  // in elements; 0 for a broadcast axis
};

union MapConstant {
    double real;
    int64_t integer;
};

struct MapStep {
    MapOperation operation;
    int argument[3];  // registers before the step's own; unused ones are 0
};

// Registers are numbered: the operands, the constants, then the results of the steps. A result may be the same elements
// as an operand; other arrays must not overlap results.
struct MapCall {
    MapArithmetic arithmetic = MapArithmetic::f32;
    int axes = 0;
    int64_t extent[kMapAxes];
    int operands = 0, constants = 0, steps = 0, results = 0;
    MapView operand[kMapInputs], result[kMapResults];
    MapConstant constant[kMapInputs];
    MapStep step[kMapSteps];
    int source[kMapResults];  // the register that is written to each result
    int threads = 1;

    MapCall() {}
};

// Adds an axis inside those that the call has, merged with the last one if that is the same loop. The strides are of
// all operands, then of all results. False: there are too many axes.
bool add_axis(MapCall& call, int64_t extent, const int64_t* strides);
// Sorts the axes by the strides of the first result, so that it is written in order of memory, and merges them.
void sort_axes(MapCall& call);
void run_map(const MapCall& call);

}  // namespace rg
