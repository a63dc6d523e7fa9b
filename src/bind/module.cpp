// Python's door to the engine: typed views in, interpreter lock released, driver called. No arithmetic, no policy.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <string>
#include <vector>

#include "../core/base/dispatch.h"
#include "../core/base/memory.h"
#include "../core/base/parallel.h"
#include "../core/base/scratch.h"
#include "bind.h"
#include "view.h"

using namespace rg::bind;

namespace {

// What arrays of results lie in.
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

// A parameter that the caller must give is None.
nb::tuple activation_list() {
    const auto parameter = [](double value) { return value == value ? nb::object(nb::float_(value)) : nb::none(); };
    nb::list entries;
    for (const rg::ActivationEntry& entry : rg::kActivations) {
        entries.append(nb::make_tuple(entry.name, int(entry.kind), parameter(entry.alpha), parameter(entry.beta),
                                      entry.needs_input ? entry.needs_input : ""));
    }
    return nb::tuple(entries);
}

// dst = sum(sources), as fast as memory allows: what the speed of a normalization is compared with.
Outcome add_streams(nb::handle dst_array, const std::vector<nb::object>& source_arrays, bool non_temporal, int passes,
                    int threads) {
    if (source_arrays.empty() || source_arrays.size() > 3) throw nb::value_error("sources: give 1 to 3 arrays");
    Call call;
    const View dst(call, dst_array, "dst", Element::f32, Access::write);
    std::deque<View> sources;
    const float* data[3] = {};
    dst.require().check_vector(dst.elements());
    for (const nb::object& array : source_arrays) {
        const View& source = sources.emplace_back(call, array, "sources", Element::f32);
        source.require().check_vector(dst.elements());
        data[sources.size() - 1] = static_cast<const float*>(source.data());
    }
    float* out = static_cast<float*>(dst.data());
    if (non_temporal && reinterpret_cast<uintptr_t>(out) % 64 != 0) call.refuse(Reason::layout, "dst");
    if (call.refused()) return call.refusal();
    const int count = int(sources.size());
    const int64_t lines = dst.elements() / 16;
    const LockReleased released;
    for (int pass = 0; pass < passes; ++pass) {
        rg::Crew(rg::cost::kWorthWaking, threads).each(threads, [&](int64_t part) {
            const int64_t first = lines * part / threads * 16, last = lines * (part + 1) / threads * 16;
            const float* from[3] = {data[0] + first, data[1] ? data[1] + first : nullptr,
                                    data[2] ? data[2] + first : nullptr};
            rg::kernel_table().add_streams(from, count, last - first, out + first, non_temporal);
        });
    }
    return {};
}

}  // namespace

NB_MODULE(_core, m) {
    // Objects that daemon threads hold at exit are not leaks that a user could do anything about.
    nb::set_leak_warnings(false);
    rg::prepare_exceptions();
    check_array_layout();
    m.doc() = "The engine of retrograd. Use the functions of the package instead: they check and explain.";

    m.def("isa", [] { return std::string(rg::kernel_table().isa); }, "The instruction-set level in force.");
    m.def("isa_levels", &rg::available_isa_levels, "The levels this machine can run, slowest first.");
    m.def("select_isa", &rg::select_isa, nb::arg("name"),
          "Put a level in force for all later calls; false if this machine cannot run it.");
    m.def("set_num_threads", &rg::set_num_threads, nb::arg("threads"));
    m.def("num_threads", &rg::num_threads);
    m.def("release_scratch", &rg::Buffer::release_all,
          "Give back the scratch memory that this thread keeps from call to call; returns its bytes.");
    PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(ResultMemory::show)}, {0, nullptr}};
    nb::class_<ResultMemory>(m, "ResultMemory", nb::type_slots(memory_slots),
                             "A buffer of at least so many bytes. Its memory is kept for later ones when it is gone.")
        .def(nb::init<size_t>(), nb::arg("bytes"));
    m.def(
        "may_overlap_itself", [](nb::handle array) { return memory_of(array).may_overlap_itself(); }, nb::arg("array"),
        "Whether elements of the array may share memory.");
    m.def("may_overlap", &may_overlap, nb::arg("results"), nb::arg("others"),
          "Whether the span of a result meets that of another array of either list; entries may be None.");
    m.def("waiting_memory", &rg::waiting_bytes, "Bytes that wait for later results.");
    m.def("release_memory", &rg::release_memory, "Give them back to the system; returns how many there were.");
    m.def("add_streams", &add_streams, nb::arg("dst"), nb::arg("sources"), nb::arg("non_temporal"), nb::arg("passes"),
          nb::arg("threads"), "dst = sum(sources) of contiguous float32 arrays, so many times.");

    m.def("activations", &activation_list,
          nb::sig("def activations() -> tuple[tuple[str, int, float | None, float | None, str], ...]"),
          "Every activation: name, code, usual alpha and beta, why the output does not determine the slope.");
    nb::enum_<Reason>(m, "Reason", "Why a call was refused.")
        .value("type", Reason::type)
        .value("dtype", Reason::dtype)
        .value("shape", Reason::shape)
        .value("layout", Reason::layout)
        .value("self_overlap", Reason::self_overlap)
        .value("overlap", Reason::overlap)
        .value("in_place", Reason::in_place)
        .value("missing", Reason::missing)
        .value("out_of_range", Reason::out_of_range)
        .value("foreign_cache", Reason::foreign_cache)
        .value("cache_of_another_problem", Reason::cache_of_another_problem)
        .value("stale_cache", Reason::stale_cache);
    nb::class_<Refusal>(m, "Refusal", "What a call returns that was refused: nothing was written.")
        .def_ro("reason", &Refusal::reason)
        .def_ro("argument", &Refusal::argument);

    bind_dense(m);
    bind_elementwise(m);
    bind_lstm(m);
    bind_norm(m);
    bind_optimizer(m);
}
