// Problems for the drivers of the core, without Python: each runs one driver at any data type and number of threads and
// hands back every array that it wrote. Inputs are small multiples of 1/32, which all data types hold exactly, so that
// results at float64 are the reference for the others.
#pragma once

#include <stdint.h>

#include <functional>
#include <string>
#include <vector>

#include "../../src/core/base/shape.h"

namespace problems {

using Bytes = std::vector<unsigned char>;

struct Output {
    std::string name;
    rg::DType dtype;
    Bytes bytes;
};

struct Problem {
    std::string name;
    std::vector<rg::DType> dtypes;
    // The error allowed, in units of the last place of an output's largest value. 0: not compared with float64.
    double units;
    std::function<std::vector<Output>(rg::DType dtype, int threads)> run;
};

// The problems of linear layers, embeddings, losses, dropout and pooling, of convolutions, of linear
// recurrences, and of functions that rearrange and combine arrays.
void add_dense(std::vector<Problem>& problems);
void add_convolutions(std::vector<Problem>& problems);
void add_recurrent(std::vector<Problem>& problems);
void add_arrays(std::vector<Problem>& problems);
// All of them. `large`: those too, whose results do not stay in cache and take other paths.
std::vector<Problem> all(bool large);

std::vector<double> values_of(const Output& output);
double unit_of(rg::DType dtype);  // the distance from 1 to the next number
const char* name_of(rg::DType dtype);

}  // namespace problems
