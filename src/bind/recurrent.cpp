// Recurrent layers for Python: reads the arguments of RecurrentProblem's calls.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>

#include "bind.h"
#include "recurrent_problem.h"

namespace rg::bind {
namespace {

// A sequence with a tuple of parameters for each cell, in the order of fields_of. Each is an array, a tuple of one per
// gate, or None; None at the end may be left out.
class Cells {
public:
    explicit Cells(nb::handle list) : list_(nb::cast<nb::sequence>(list)), size_(nb::len(list_)) {}

    size_t size() const { return size_; }
    // One cell, whose tuple the list keeps.
    struct Fields {
        PyObject* tuple;
        nb::handle operator[](size_t k) const {
            return Py_ssize_t(k) < PyTuple_GET_SIZE(tuple) ? PyTuple_GET_ITEM(tuple, Py_ssize_t(k)) : Py_None;
        }
    };
    Fields operator[](size_t i) const { return {nb::cast<nb::tuple>(list_[i]).ptr()}; }

private:
    nb::sequence list_;
    size_t size_;
};

// The fields of Inputs in ops/recurrent/problem.py. The first field is the problem.
RecurrentInputs<nb::handle, Cells> inputs_of(nb::handle inputs) {
    if (!PyTuple_Check(inputs.ptr()) || PyTuple_GET_SIZE(inputs.ptr()) != 13) {
        throw nb::type_error("inputs are not Inputs");
    }
    const auto item = [&](Py_ssize_t i) { return nb::handle(PyTuple_GET_ITEM(inputs.ptr(), i)); };
    const bool in_memory = Py_TYPE(item(8).ptr()) == numpy().ndarray;
    return {item(1),
            item(2),
            Cells(item(3)),
            item(4),
            item(5),
            item(6),
            item(7),
            in_memory ? 0 : nb::cast<uint64_t>(item(8)),
            in_memory ? item(8) : nb::handle(Py_None),
            item(9),
            item(10),
            item(11),
            item(12)};
}

Outcome forward(const RecurrentProblem& problem, nb::handle inputs, nb::handle cache, uint64_t stamp, nb::handle y,
                nb::handle hn, nb::handle cn, bool overlap_checked, int threads) {
    return problem.forward(inputs_of(inputs), cache, stamp, y, hn, cn, overlap_checked, threads);
}

Outcome backward(const RecurrentProblem& problem, nb::handle dy, nb::handle dhn, nb::handle dcn, nb::handle inputs,
                 nb::handle cache, std::optional<uint64_t> stamp, nb::handle dx, nb::handle dcells, nb::handle dh0,
                 nb::handle dc0, bool accumulate, bool overlap_checked, int threads) {
    std::optional<Cells> gradients;
    if (!dcells.is_none()) gradients.emplace(dcells);
    return problem.backward(dy, dhn, dcn, inputs_of(inputs), cache, stamp, dx, gradients, dh0, dc0, accumulate,
                            overlap_checked, threads);
}

Outcome check_cache(const RecurrentProblem& problem, nb::handle inputs, nb::handle cache,
                    std::optional<uint64_t> stamp) {
    return problem.check_cache(inputs_of(inputs), cache, stamp);
}

Outcome show(const RecurrentProblem& problem, nb::handle inputs, nb::handle cache, std::optional<uint64_t> stamp,
             int64_t cell, nb::handle gates, nb::handle states) {
    return problem.show(inputs_of(inputs), cache, stamp, cell, gates, states);
}

struct Slots {
    int64_t steps, samples;
    const int64_t* lengths;
    int threads;
    int64_t *active, *order;
};
void run_slots(const Slots& s) { recurrent_slots(s.steps, s.samples, s.lengths, s.active, s.order); }

// Python has checked the lengths; a program checks them in each run.
void slots(nb::handle lengths_array, nb::handle active_array, nb::handle order_array) {
    Call call;
    const View lengths(call, lengths_array, "lengths", Element::i64),
        active(call, active_array, "active", Element::i64, Access::write),
        order(call, order_array, "order", Element::i64, Access::write);
    for (const View* v : {&lengths, &order}) v->require().check_contiguous({lengths.extent(0)});
    active.require().check_contiguous({active.extent(0)});
    call.check_overlap();
    if (call.refused()) throw nb::value_error("lengths, active or order has the wrong form");
    Slots slots{active.extent(0),
                lengths.extent(0),
                static_cast<const int64_t*>(lengths.data()),
                1,
                static_cast<int64_t*>(active.data()),
                static_cast<int64_t*>(order.data())};
    if (Program* program = recorded_program()) {
        program->add(IndexCheck{slots.lengths, slots.samples, slots.steps + 1}, check_indices);
    }
    run_driver<nb::handle>(0, 1, slots, run_slots);
}

}  // namespace

void bind_recurrent(nb::module_& m) {
    m.def("recurrent_slots", &slots, nb::arg("lengths"), nb::arg("active"), nb::arg("order"),
          "The number of active slots in each step, and the sample in each slot.");
    nb::class_<RecurrentProblem>(m, "RecurrentProblem", "A recurrent layer of one shape with one set of options.")
        .def(nb::init<int, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int,
                      const std::vector<ActivationTuple>&, int, bool, bool, bool, double, double, int, double, int,
                      bool, double>(),
             nb::arg("kind"), nb::arg("steps"), nb::arg("samples"), nb::arg("inputs"), nb::arg("units"),
             nb::arg("projection"), nb::arg("layers"), nb::arg("directions"), nb::arg("dtype"), nb::arg("activations"),
             nb::arg("peephole"), nb::arg("output_reads_old"), nb::arg("coupled"), nb::arg("flip"), nb::arg("clip"),
             nb::arg("cell_clip"), nb::arg("norm"), nb::arg("eps"), nb::arg("mask"), nb::arg("zoneout"),
             nb::arg("dropout"))
        .def("cache_bytes", &RecurrentProblem::cache_bytes, nb::arg("rows"))
        .def("forward", &forward, nb::arg("inputs"), nb::arg("cache").none(), nb::arg("stamp"), nb::arg("y").none(),
             nb::arg("hn").none(), nb::arg("cn").none(), nb::arg("overlap_checked"), nb::arg("threads"))
        .def("backward", &backward, nb::arg("dy").none(), nb::arg("dhn").none(), nb::arg("dcn").none(),
             nb::arg("inputs"), nb::arg("cache"), nb::arg("stamp").none(), nb::arg("dx").none(),
             nb::arg("dcells").none(), nb::arg("dh0").none(), nb::arg("dc0").none(), nb::arg("accumulate"),
             nb::arg("overlap_checked"), nb::arg("threads"))
        .def("check_cache", &check_cache, nb::arg("inputs"), nb::arg("cache"), nb::arg("stamp").none())
        .def("show", &show, nb::arg("inputs"), nb::arg("cache"), nb::arg("stamp").none(), nb::arg("cell"),
             nb::arg("gates").none(), nb::arg("cells").none());
}

}  // namespace rg::bind
