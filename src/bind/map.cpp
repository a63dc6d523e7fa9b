// Maps: chains of elementwise operations over arrays of one shape.
#include "../core/dense/map.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <vector>

#include "bind.h"
#include "view.h"

namespace rg::bind {
namespace {

constexpr std::pair<Element, MapElement> kMapElements[] = {{Element::f32, MapElement::f32},
                                                           {Element::f64, MapElement::f64},
                                                           {Element::boolean, MapElement::boolean},
                                                           {Element::i64, MapElement::i64},
                                                           {Element::i32, MapElement::i32}};

// The elements of a map's array; without a value if maps do not have them. An integer map has no floats.
std::optional<std::pair<Element, MapElement>> map_element(nb::handle array, bool integers) {
    if (Py_TYPE(array.ptr()) != numpy().ndarray) return kMapElements[0];  // which the view refuses
    PyObject* const dtype = reinterpret_cast<const ArrayObject*>(array.ptr())->dtype;
    const auto defined = [&](const std::pair<Element, MapElement>& entry) {
        return !integers || (entry.second != MapElement::f32 && entry.second != MapElement::f64);
    };
    // By identity first: comparing dtypes takes longer than everything else here.
    for (const auto& entry : kMapElements) {
        if (defined(entry) && dtype == numpy().dtype[int(entry.first)].load(std::memory_order_acquire)) return entry;
    }
    for (const auto& entry : kMapElements) {
        if (defined(entry) && is_dtype(dtype, entry.first)) return entry;
    }
    return {};
}

using Step = std::tuple<int, int, int, int>;

void read_steps(const std::vector<Step>& steps, bool integers, MapCall& map) {
    if (steps.size() > kMapSteps) throw nb::value_error("a map has too many steps");
    map.steps = int(steps.size());
    const int base = map.operands + map.constants;
    for (int s = 0; s < map.steps; ++s) {
        const auto [code, a, b, c] = steps[size_t(s)];
        if (code < 0 || code >= kMapOperationCount) throw nb::value_error("an operation of a map does not exist");
        const MapOperationEntry& entry = kMapOperations[code];
        if (integers && !entry.integers) throw nb::value_error("an operation of a map is not one of integers");
        if (!integers && only_integers(MapOperation(code))) {
            throw nb::value_error("an operation of a map is one of integers");
        }
        map.step[s] = {static_cast<MapOperation>(code), {0, 0, 0}};
        const int argument[3] = {a, b, c};
        for (int k = 0; k < entry.arity; ++k) {
            if (argument[k] < 0 || argument[k] >= base + s) throw nb::value_error("a step reads a later register");
            map.step[s].argument[k] = argument[k];
        }
    }
}

// Everything but the constants, which the caller has set.
Outcome run(MapArithmetic arithmetic, const std::vector<Step>& steps, nb::list operands, nb::list results,
            const std::vector<int>& registers, bool overlap_checked, int threads, MapCall& map) {
    const bool integers = arithmetic == MapArithmetic::i64;
    if (operands.size() + size_t(map.constants) > kMapInputs) throw nb::value_error("a map has too many operands");
    if (results.size() > kMapResults) throw nb::value_error("a map has too many results");
    if (results.size() == 0 || registers.size() != results.size()) {
        throw nb::value_error("a map needs results, and a register for each");
    }
    map.arithmetic = arithmetic;
    map.operands = int(operands.size());
    map.results = int(results.size());
    read_steps(steps, integers, map);
    for (int r = 0; r < map.results; ++r) {
        map.source[r] = registers[size_t(r)];
        if (map.source[r] < 0 || map.source[r] >= map.operands + map.constants + map.steps) {
            throw nb::value_error("a result's register does not exist");
        }
    }

    Call call;
    std::optional<View> views[kMapViews];
    const int count = map.operands + map.results;
    for (int v = 0; v < count; ++v) {
        const bool result = v >= map.operands;
        const nb::handle array = result ? results[size_t(v - map.operands)] : operands[size_t(v)];
        const char* const name = result ? "results" : "operands";
        const auto element = map_element(array, integers);
        if (!element) {
            call.refuse(Reason::dtype, name);
            return call.refusal();
        }
        const View& view = views[v].emplace(call, array, name, element->first, result ? Access::write : Access::read);
        view.require();
        if (call.refused()) return call.refusal();
        const View& first = *views[0];
        bool same_shape = view.axes() == first.axes();
        for (int i = 0; i < view.axes() && same_shape; ++i) same_shape = view.extent(i) == first.extent(i);
        if (!same_shape) call.refuse(Reason::shape, name);
        MapView& to = result ? map.result[v - map.operands] : map.operand[v];
        to.data = static_cast<char*>(view.data());
        to.element = element->second;
        for (int w = 0; w < v && result && !overlap_checked; ++w) {
            const MapView& other = w < map.operands ? map.operand[w] : map.result[w - map.operands];
            const bool in_place = w < map.operands && other.element == to.element && view.same_elements(*views[w]);
            if (view.overlaps(*views[w]) && !in_place) call.refuse(Reason::overlap, name);
        }
    }
    if (call.refused()) return call.refusal();
    const View& first = *views[0];
    for (int i = 0; i < first.axes(); ++i) {
        int64_t strides[kMapViews];
        for (int v = 0; v < count; ++v) strides[v] = views[v]->stride(i);
        if (!add_axis(map, first.extent(i), strides)) throw nb::value_error("a map has too many axes");
    }
    sort_axes(map);
    run_driver<nb::handle>(double(first.elements()) * count, threads, map, run_map);
    return {};
}

Outcome map_floats(bool f64, const std::vector<Step>& steps, nb::list operands, const std::vector<double>& constants,
                   nb::list results, const std::vector<int>& registers, bool overlap_checked, int threads) {
    if (constants.size() > kMapInputs) throw nb::value_error("a map has too many constants");
    MapCall map;
    map.constants = int(constants.size());
    for (size_t k = 0; k < constants.size(); ++k) map.constant[k].real = constants[k];
    return run(f64 ? MapArithmetic::f64 : MapArithmetic::f32, steps, operands, results, registers, overlap_checked,
               threads, map);
}

Outcome map_integers(const std::vector<Step>& steps, nb::list operands, const std::vector<int64_t>& constants,
                     nb::list results, const std::vector<int>& registers, bool overlap_checked, int threads) {
    if (constants.size() > kMapInputs) throw nb::value_error("a map has too many constants");
    MapCall map;
    map.constants = int(constants.size());
    for (size_t k = 0; k < constants.size(); ++k) map.constant[k].integer = constants[k];
    return run(MapArithmetic::i64, steps, operands, results, registers, overlap_checked, threads, map);
}

nb::tuple operation_list() {
    nb::list entries;
    for (int code = 0; code < kMapOperationCount; ++code) {
        entries.append(nb::make_tuple(kMapOperations[code].name, code, kMapOperations[code].arity));
    }
    return nb::tuple(entries);
}

}  // namespace

void bind_map(nb::module_& m) {
    m.def("map", &map_floats, nb::arg("f64"), nb::arg("steps"), nb::arg("operands"), nb::arg("constants"),
          nb::arg("results"), nb::arg("registers"), nb::arg("overlap_checked"), nb::arg("threads"),
          nb::sig(
              "def map(f64: bool, steps: Sequence[tuple[int, int, int, int]], operands: list[object], constants: "
              "Sequence[float], results: list[object], registers: Sequence[int], overlap_checked: bool, threads: int) "
              "-> Refusal | None"),
          "Compute a chain of elementwise steps over arrays of one shape, in float or double.");
    m.def(
        "map_integers", &map_integers, nb::arg("steps"), nb::arg("operands"), nb::arg("constants"), nb::arg("results"),
        nb::arg("registers"), nb::arg("overlap_checked"), nb::arg("threads"),
        nb::sig("def map_integers(steps: Sequence[tuple[int, int, int, int]], operands: list[object], constants: "
                "Sequence[int], results: list[object], registers: Sequence[int], overlap_checked: bool, threads: int) "
                "-> Refusal | None"),
        "The same in int64, which wraps around, over arrays of integers and booleans.");
    m.def("map_operations", &operation_list, nb::sig("def map_operations() -> tuple[tuple[str, int, int], ...]"),
          "Every operation of a map: name, code, number of arguments.");
}

}  // namespace rg::bind
