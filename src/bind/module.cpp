// The Python module: makes typed views of the arrays, releases the GIL, calls a driver. No arithmetic, no policy.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "../core/base/dispatch.h"
#include "../core/base/machine.h"
#include "../core/base/memory.h"
#include "../core/base/parallel.h"
#include "../core/base/scratch.h"
#include "bind.h"
#include "view.h"

using namespace rg::bind;

namespace {

// The memory of result arrays.
class ResultMemory {
public:
    explicit ResultMemory(size_t bytes) : memory_(rg::take_memory(bytes)) {}
    ~ResultMemory() { rg::give_memory(memory_); }
    ResultMemory(const ResultMemory&) = delete;
    ResultMemory& operator=(const ResultMemory&) = delete;

    static int show(PyObject* self, Py_buffer* view, int flags) {
        const rg::Memory& memory = nb::inst_ptr<ResultMemory>(self)->memory_;
        return PyBuffer_FillInfo(view, self, memory.data, Py_ssize_t(memory.bytes), 0, flags);
    }

private:
    rg::Memory memory_;
};

bool may_overlap(nb::handle results, nb::handle others) {
    std::vector<ArrayMemory> arrays;
    const auto add = [&](nb::handle list) {
        for (nb::handle array : list) {
            if (!array.is_none()) arrays.push_back(memory_of(array));
        }
    };
    add(results);
    const size_t written = arrays.size();
    add(others);
    for (size_t i = 0; i < written; ++i) {
        for (size_t j = i + 1; j < arrays.size(); ++j) {
            if (arrays[i].overlaps(arrays[j])) return true;
        }
    }
    return false;
}

// A parameter without a default is None.
nb::tuple activation_list() {
    const auto parameter = [](double value) { return value == value ? nb::object(nb::float_(value)) : nb::none(); };
    nb::list entries;
    for (const rg::ActivationEntry& entry : rg::kActivations) {
        entries.append(nb::make_tuple(entry.name, int(entry.kind), parameter(entry.alpha), parameter(entry.beta),
                                      entry.needs_input ? entry.needs_input : ""));
    }
    return nb::tuple(entries);
}

nb::tuple cache_sizes() {
    const rg::Caches& found = rg::caches();
    return nb::make_tuple(found.l1, found.l2, found.last_level, found.last_level_cores);
}
void override_caches(int64_t l1, int64_t l2, int64_t last_level, int last_level_cores) {
    const rg::Caches replacement = {l1, l2, last_level, last_level_cores};
    rg::override_caches(&replacement);
}

}  // namespace

NB_MODULE(_core, m) {
    // Objects that daemon threads hold at exit would be reported as leaks, and users could not fix them.
    nb::set_leak_warnings(false);
    rg::prepare_exceptions();
    check_array_layout();
    m.doc() = "The engine of retrograd. Use the package's functions instead: they check arguments and explain errors.";

    m.def("isa", [] { return std::string(rg::kernel_table().isa); }, "The selected instruction-set level.");
    m.def("isa_levels", &rg::available_isa_levels, "The levels that this machine can run, slowest first.");
    m.def("select_isa", &rg::select_isa, nb::arg("name"),
          "Select a level for all later calls; False if this machine cannot run it.");
    m.def("caches", &cache_sizes, nb::sig("def caches() -> tuple[int, int, int, int]"),
          "The bytes of a core's first and second level of cache and of the last level, and how many CPUs share that.");
    m.def("override_caches", &override_caches, nb::arg("l1"), nb::arg("l2"), nb::arg("last_level"),
          nb::arg("last_level_cores"), "Replace them for all later calls, for tests; a size of 0 is a usual one.");
    m.def("restore_caches", [] { rg::override_caches(nullptr); }, "Undo override_caches.");
    m.def("set_num_threads", &rg::set_num_threads, nb::arg("threads"));
    m.def("num_threads", &rg::num_threads);
    m.def("release_scratch", &rg::Buffer::release_all,
          "Free the scratch memory that this thread keeps between calls; returns the number of bytes.");
    PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(ResultMemory::show)}, {0, nullptr}};
    nb::class_<ResultMemory>(m, "ResultMemory", nb::type_slots(memory_slots),
                             "A buffer of at least `bytes` bytes. When it is deleted, its memory is kept for reuse.")
        .def(nb::init<size_t>(), nb::arg("bytes"));
    m.def(
        "may_overlap_itself", [](nb::handle array) { return memory_of(array).may_overlap_itself(); }, nb::arg("array"),
        "Whether elements of the array may share memory.");
    m.def("may_overlap", &may_overlap, nb::arg("results"), nb::arg("others"),
          "Whether the span of a result overlaps the span of any other array in the lists; entries may be None.");
    m.def("waiting_memory", &rg::waiting_bytes, "The number of bytes kept for later results.");
    m.def("release_memory", &rg::release_memory, "Return them to the system; returns how many there were.");
    m.def("activations", &activation_list,
          nb::sig("def activations() -> tuple[tuple[str, int, float | None, float | None, str], ...]"),
          "Every activation: name, code, default alpha and beta, why the output does not determine the slope.");
    nb::enum_<Reason> reasons(m, "Reason", "Why a call was refused.");
    for (const auto& [name, reason] : kReasons) reasons.value(name, reason);
    nb::class_<Refusal>(m, "Refusal", "The result of a call that was refused. Nothing was written.")
        .def_ro("reason", &Refusal::reason)
        .def_ro("argument", &Refusal::argument);

    bind_bench(m);
    bind_conv(m);
    bind_dense(m);
    bind_elementwise(m);
    bind_recurrent(m);
    bind_map(m);
    bind_norm(m);
    bind_optimizer(m);
    bind_pooling(m);
    bind_program(m);
    bind_batched(m);
    bind_gather(m);
    bind_random(m);
    bind_reduce(m);
    bind_scan(m);
    bind_softmax(m);
    bind_xla(m);
}
