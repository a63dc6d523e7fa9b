// Problems of functions that rearrange and combine arrays: scatter, cumulative extremes, random bits, integer maps.
#include <cmath>

#include "../../src/core/dense/gather.h"
#include "../../src/core/dense/map.h"
#include "../../src/core/dense/random.h"
#include "../../src/core/dense/scan.h"
#include "storage.h"

namespace problems {
namespace {

// An array of integers as doubles, each of its lower and its upper half: their bits would be NaN in part.
template <class T>
Output halves(const Block& block, const std::string& name) {
    const Bytes bytes = block.output(name).bytes;
    Values values;
    for (size_t i = 0; i < bytes.size(); i += sizeof(T)) {
        T v;
        memcpy(&v, &bytes[i], sizeof v);
        values.push_back(double(uint32_t(int64_t(v))));
        values.push_back(double(int64_t(v) >> 32));
    }
    return Block(DType::f64, values, 0).output(name);
}

struct Sizes {
    int64_t outer, n, inner, count;
    bool along;
};

std::vector<int64_t> indices_of(const Sizes& s, Random& random) {
    std::vector<int64_t> indices;
    for (int64_t i = 0; i < (s.along ? s.outer * s.count * s.inner : s.count); ++i)
        indices.push_back(random.below(s.n));
    return indices;
}

template <class T>
void scatter(const Sizes& s, rg::ScatterMode mode, const std::vector<int64_t>& indices, const Block& updates,
             int threads, const Block& y) {
    rg::ScatterCall<T> call;
    call.mode = mode;
    call.outer = s.outer;
    call.count = s.count;
    call.inner = s.inner;
    call.indices = indices.data();
    call.along = s.along;
    call.updates = {updates.as<T>(), s.count * s.inner, s.inner, 1};
    call.threads = threads;
    call.y = {y.as<T>(), s.n * s.inner, s.inner, 1};
    rg::scatter(call);
}

constexpr rg::ScatterMode kModes[] = {rg::ScatterMode::add,    rg::ScatterMode::subtract, rg::ScatterMode::multiply,
                                      rg::ScatterMode::divide, rg::ScatterMode::minimum,  rg::ScatterMode::maximum,
                                      rg::ScatterMode::set};

// Of floats in every mode, and of integers of the same size.
template <class A, class T>
std::vector<Output> scatters(const Sizes& s, DType dtype, int threads) {
    Random random(uint64_t(s.outer * 5 + s.n * 3 + s.inner + s.count));
    const std::vector<int64_t> indices = indices_of(s, random);
    const int64_t elements = s.outer * s.n * s.inner, changes = s.outer * s.count * s.inner;
    const Values before = random.take(elements);
    const Block updates(dtype, random.take(changes), 1), whole(dtype, changes, 3);
    for (int64_t i = 0; i < changes; ++i) whole.as<T>()[i] = T(random.bits() * 0x9E3779B97F4A7C15u);
    std::vector<Output> found;
    for (const rg::ScatterMode mode : kModes) {
        const std::string name = rg::kScatterModes[int(mode)];
        const Block y(dtype, before, 2);
        scatter<A>(s, mode, indices, updates, threads, y);
        found.push_back(y.output(name));
        if (mode == rg::ScatterMode::divide) continue;
        const Block z(dtype, elements, 1);
        for (int64_t i = 0; i < elements; ++i) z.as<T>()[i] = T(before[size_t(i)] * 0x1p20);
        scatter<T>(s, mode, indices, whole, threads, z);
        found.push_back(halves<T>(z, name + " of integers"));
    }
    return found;
}

template <class A>
std::vector<Output> extremes(const Sizes& s, DType dtype, int threads) {
    Random random(uint64_t(s.outer * 5 + s.n * 3 + s.inner));
    const int64_t elements = s.outer * s.n * s.inner;
    Values values = random.take(elements);
    for (size_t i = 36; i < values.size(); i += 37) values[i] = NAN;
    const Block x(dtype, values, 1);
    std::vector<Output> found;
    for (const bool largest : {true, false}) {
        for (const bool reverse : {false, true}) {
            const Block y(dtype, elements, 2), at(DType::f64, elements, 1);
            rg::CumulativeExtremeCall<A> call;
            call.largest = largest;
            call.reverse = reverse;
            call.outer = s.outer;
            call.n = s.n;
            call.inner = s.inner;
            call.x = {x.as<A>(), s.n * s.inner, s.inner, 1};
            call.threads = threads;
            call.y = {y.as<A>(), s.n * s.inner, s.inner, 1};
            call.indices = {at.as<int64_t>(), s.n * s.inner, s.inner, 1};
            rg::cumulative_extreme(call);
            found.push_back(y.output("y"));
            found.push_back(halves<int64_t>(at, "indices"));
        }
    }
    return found;
}

std::vector<Output> philox(int64_t count, int threads) {
    const int32_t state[7] = {1, 2, 3, -1, -int32_t(count / 8) - 1, 5, -7};  // the counter carries on the way
    const Block words(DType::f64, count, 1), next(DType::f32, 7, 2);
    rg::PhiloxCall call;
    call.count = count;
    call.state = state;
    call.threads = threads;
    call.words = words.as<int64_t>();
    call.next = next.as<int32_t>();
    rg::philox(call);
    return {halves<int64_t>(words, "words"), halves<int32_t>(next, "next")};
}

// Every operation that maps of integers have, of columns of a matrix in order or in reverse.
template <class T>
std::vector<Output> integer_maps(int64_t rows, int64_t columns, bool reverse, DType dtype, int threads) {
    Random random(uint64_t(rows * 3 + columns));
    const int64_t count = rows * columns;
    const Block a(dtype, count, 1), b(dtype, count, 2), c(dtype, count, 3);
    for (int64_t i = 0; i < count; ++i) {
        a.as<T>()[i] = T(random.bits() * 0x9E3779B97F4A7C15u);
        b.as<T>()[i] = T(random.below(2) ? random.below(70) - 3 : int64_t(random.bits() * 0x9E3779B97F4A7C15u));
        c.as<T>()[i] = T(random.below(9) - 4);
    }
    std::vector<Output> found;
    for (int code = 0; code < rg::kMapOperationCount; ++code) {
        if (!rg::kMapOperations[code].integers) continue;
        const Block y(dtype, count, 1);
        rg::MapCall call;
        call.arithmetic = rg::MapArithmetic::i64;
        call.operands = 3;
        call.results = call.steps = 1;
        const int64_t along = reverse ? -1 : 1, first = reverse ? columns - 1 : 0;
        const auto view = [&](const Block& block, int64_t start) {
            return rg::MapView{reinterpret_cast<char*>(block.as<T>() + start),
                               sizeof(T) == 8 ? rg::MapElement::i64 : rg::MapElement::i32,
                               {}};
        };
        call.operand[0] = view(a, first);
        call.operand[1] = view(b, first);
        call.operand[2] = view(c, first);
        call.result[0] = view(y, 0);
        call.step[0] = {rg::MapOperation(code), {0, 1, 2}};
        call.source[0] = 3;
        call.threads = threads;
        const int64_t outer[] = {columns, columns, columns, columns}, inner[] = {along, along, along, 1};
        rg::add_axis(call, rows, outer);
        rg::add_axis(call, columns, inner);
        rg::run_map(call);
        found.push_back(halves<T>(y, rg::kMapOperations[code].name));
    }
    return found;
}

}  // namespace

void add_arrays(std::vector<Problem>& problems) {
    const auto both = [&](const std::string& name, double units, auto run) {
        problems.push_back({name, kWideTypes, units, run});
    };
    const Sizes sizes[] = {{1, 5, 1, 7, false},    {3, 7, 17, 20, false}, {2, 13, 33, 40, true},
                           {1, 3, 1031, 8, false}, {9, 4, 70, 6, true},   {40, 6, 5, 11, true}};
    for (const Sizes& s : sizes) {
        const std::string shape = std::to_string(s.outer) + "x" + std::to_string(s.n) + "x" + std::to_string(s.inner);
        // Integers are as wide as the floats, so that they are not compared with those of float64.
        both("scatter " + shape + (s.along ? " along" : ""), 0, [=](DType dtype, int threads) {
            return dtype == DType::f64 ? scatters<double, int64_t>(s, dtype, threads)
                                       : scatters<float, int32_t>(s, dtype, threads);
        });
        both("cumulative extremes " + shape, 1, [=](DType dtype, int threads) {
            return dtype == DType::f64 ? extremes<double>(s, dtype, threads) : extremes<float>(s, dtype, threads);
        });
    }
    for (const int64_t count : {0, 1, 4, 7, 33, 10007}) {
        problems.push_back({"philox of " + std::to_string(count), {DType::f64}, 0, [=](DType, int threads) {
                                return philox(count, threads);
                            }});
    }
    for (const int64_t columns : {1, 7, 16, 33, 1031}) {
        for (const bool reverse : {false, true}) {
            both("integers 5x" + std::to_string(columns) + (reverse ? " in reverse" : ""), 0,
                 [=](DType dtype, int threads) {
                     return dtype == DType::f64 ? integer_maps<int64_t>(5, columns, reverse, dtype, threads)
                                                : integer_maps<int32_t>(5, columns, reverse, dtype, threads);
                 });
        }
    }
}

}  // namespace problems
