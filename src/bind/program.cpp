// Programs for Python: builds them by recording calls of the other functions, and runs them.
#include "../core/program/program.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <string.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "bind.h"
#include "view.h"

namespace rg::bind {
namespace {

using Clock = std::chrono::steady_clock;

// Where a run's arguments are copied to, or its results from: an array in the program's memory.
struct Slot {
    char* data;
    int64_t bytes;
    std::vector<int64_t> shape;
    int64_t itemsize;
    PyObject* dtype;
};

enum class Status { done, out_of_range, raised, no_memory, broken };

// Thrown by a record whose function has raised a Python exception, which the program keeps.
struct Raised : std::exception {};

// The memory of a program, as a buffer. Arrays refer to it and not to the PyProgram, which refers to functions that may
// refer to the arrays: Python does not find cycles through arrays.
class Arena {
public:
    explicit Arena(std::shared_ptr<Program> program) : program_(std::move(program)) {}
    static int show(PyObject* self, Py_buffer* view, int flags) {
        const Memory& memory = nb::inst_ptr<Arena>(self)->program_->arena();
        return PyBuffer_FillInfo(view, self, memory.data, Py_ssize_t(memory.bytes), 0, flags);
    }

private:
    std::shared_ptr<Program> program_;
};

class PyProgram {
public:
    explicit PyProgram(size_t bytes) : shared_(std::make_shared<Program>(bytes)), program_(*shared_) {}
    ~PyProgram() {
        for (PyObject* function : functions_) Py_XDECREF(function);
        for (const Slot& slot : inputs_) Py_DECREF(slot.dtype);
        for (const Slot& slot : outputs_) Py_DECREF(slot.dtype);
    }
    PyProgram(const PyProgram&) = delete;
    PyProgram& operator=(const PyProgram&) = delete;

    Arena arena() const { return Arena(shared_); }
    void add_memory(nb::handle array) {
        const ArrayMemory memory = memory_of(array);
        program_.add_memory(memory.low, size_t(memory.high - memory.low));
    }
    void add_input(nb::handle array) { inputs_.push_back(slot_of(array)); }
    void add_output(nb::handle array) { outputs_.push_back(slot_of(array)); }

    void start_recording() {
        if (recorded_program()) throw nb::value_error("another program is being recorded");
        record_into(&program_);
        recorded_here() = this;
    }
    void stop_recording() {
        record_into(nullptr);
        recorded_here() = nullptr;
    }
    // Adds a record that calls function() with the GIL held, and ends the run if it raises an exception. False: this
    // thread records no program.
    static bool record_call(nb::object function) {
        PyProgram* program = recorded_here();
        if (!program) return false;
        std::vector<PyObject*>& functions = program->functions_;
        program->program_.add(std::make_unique<FunctionRecord>(*program, functions.size()));
        functions.push_back(function.release().ptr());
        return true;
    }

    // ---- for the garbage collector: a function may refer to the program that calls it

    static int traverse(PyObject* self, visitproc visit, void* arg) {
        Py_VISIT(Py_TYPE(self));
        if (!nb::inst_ready(self)) return 0;
        for (PyObject* function : nb::inst_ptr<PyProgram>(self)->functions_) Py_VISIT(function);
        return 0;
    }
    static int clear(PyObject* self) {
        if (!nb::inst_ready(self)) return 0;
        for (PyObject*& function : nb::inst_ptr<PyProgram>(self)->functions_) Py_CLEAR(function);
        return 0;
    }

    void commit() { program_.commit(); }
    size_t size() const { return program_.size(); }
    size_t first_commit() const { return program_.first_commit(); }
    bool broken() const { return broken_; }

    // Copies the inputs, runs, copies the outputs: `steps` times, for arrays with one more leading axis if `stacked`.
    // Returns None, or why a run was refused or failed: (what, number). Nothing but variables outlives a failed run.
    nb::object run(nb::handle inputs, nb::handle outputs, int64_t steps, bool stacked, int threads,
                   nb::handle times_array) {
        if (!PyTuple_Check(inputs.ptr()) || !PyTuple_Check(outputs.ptr())) throw nb::type_error("tuples are needed");
        if (size_t(PyTuple_GET_SIZE(inputs.ptr())) != inputs_.size() ||
            size_t(PyTuple_GET_SIZE(outputs.ptr())) != outputs_.size()) {
            throw nb::value_error("the number of arrays is wrong");
        }
        char* from[kMostArrays];
        char* to[kMostArrays];
        if (inputs_.size() > kMostArrays || outputs_.size() > kMostArrays) throw nb::value_error("too many arrays");
        for (size_t i = 0; i < inputs_.size(); ++i) {
            const char* problem =
                take(inputs_[i], PyTuple_GET_ITEM(inputs.ptr(), Py_ssize_t(i)), steps, stacked, false, from[i]);
            if (problem) return nb::make_tuple(problem, i);
        }
        for (size_t i = 0; i < outputs_.size(); ++i) {
            const char* problem =
                take(outputs_[i], PyTuple_GET_ITEM(outputs.ptr(), Py_ssize_t(i)), steps, stacked, true, to[i]);
            if (problem) throw nb::value_error("an output has the wrong form");
        }
        double* times = nullptr;
        if (!times_array.is_none()) {
            const ArrayMemory memory = memory_of(times_array);
            if (memory.elements != int64_t(program_.size()) || memory.itemsize != 8 || !memory.contiguous) {
                throw nb::value_error("times has the wrong form");
            }
            times = reinterpret_cast<double*>(memory.data);
        }
        if (runner_.load() == this_thread()) {
            PyErr_SetString(PyExc_RuntimeError,
                            "the program runs, and is called within that run, by a signal handler or by a function "
                            "that the program calls");
            throw nb::python_error();
        }
        const int used = threads_of(threads);
        Status status = Status::done;
        int64_t step = 0;
        size_t record = 0;
        OutOfRange wrong(0, 0);
        {
            const LockReleased released;
            if (!program_.enter()) broken_ = true;
            runner_.store(this_thread());
            if (broken_) status = Status::broken;
            last_check_ = Clock::now();
            for (; step < steps && status == Status::done; ++step) {
                for (size_t i = 0; i < inputs_.size(); ++i) {
                    if (!from[i]) continue;
                    memcpy(inputs_[i].data, from[i] + (stacked ? step * inputs_[i].bytes : 0),
                           size_t(inputs_[i].bytes));
                }
                status = run_once(used, times, record, wrong);
                if (status != Status::done) break;
                for (size_t i = 0; i < outputs_.size(); ++i) {
                    if (!to[i]) continue;
                    memcpy(to[i] + (stacked ? step * outputs_[i].bytes : 0), outputs_[i].data,
                           size_t(outputs_[i].bytes));
                }
            }
            runner_.store(nullptr);
            program_.leave();
        }
        switch (status) {
            case Status::done:
                return nb::none();
            case Status::out_of_range:
                return nb::make_tuple("out_of_range", step, record, wrong.index, wrong.limit);
            case Status::no_memory:
                return nb::make_tuple("no_memory", step, record);
            case Status::broken:
                return nb::make_tuple("broken", 0);
            case Status::raised:
                break;
        }
        const Failure raised = std::exchange(failure_, {});
        PyErr_Restore(raised.type, raised.value, raised.trace);
        throw nb::python_error();
    }

private:
    static constexpr size_t kMostArrays = 256;

    class FunctionRecord final : public Record {
    public:
        FunctionRecord(PyProgram& program, size_t number) : program_(program), number_(number) {}
        void run(int) override {
            if (!program_.call(number_)) throw Raised();
        }

    private:
        PyProgram& program_;
        size_t number_;
    };

    // Whether a function has returned without an exception. Other threads run meanwhile, whenever it waits.
    bool call(size_t number) {
        const LockTaken taken;
        try {
            PyObject* function = functions_[number];
            if (!function) {
                PyErr_SetString(PyExc_RuntimeError, "the program has been freed");
            } else if (PyObject* result = PyObject_CallNoArgs(function)) {
                Py_DECREF(result);
                return true;
            }
            keep_failure();
            return false;
        } catch (...) {  // Python ends the thread, during shutdown: see LockReleased
            for (;;) pause();
        }
    }

    static Slot slot_of(nb::handle array) {
        const ArrayMemory memory = memory_of(array);
        if (!memory.contiguous) throw nb::value_error("not contiguous");
        PyObject* dtype = reinterpret_cast<ArrayObject*>(array.ptr())->dtype;
        Py_INCREF(dtype);
        return {memory.data, memory.elements * memory.itemsize,
                std::vector<int64_t>(memory.shape, memory.shape + memory.ndim), memory.itemsize, dtype};
    }

    // The address of a caller's array that fits the slot, or what is wrong with it. None: nothing is copied.
    static const char* take(const Slot& slot, PyObject* object, int64_t steps, bool stacked, bool written,
                            char*& data) {
        data = nullptr;
        if (object == Py_None && !stacked) return nullptr;
        if (Py_TYPE(object) != numpy().ndarray) return "type";
        const auto* array = reinterpret_cast<const ArrayObject*>(object);
        if (array->dtype != slot.dtype) return "dtype";
        if (written && !(array->flags & ArrayObject::kWriteable)) return "type";
        ArrayMemory memory;
        if (!memory.read(object, slot.itemsize)) return "shape";
        const int lead = stacked ? 1 : 0;
        if (memory.ndim != int(slot.shape.size()) + lead || (stacked && memory.shape[0] != steps)) return "shape";
        if (!std::equal(slot.shape.begin(), slot.shape.end(), memory.shape + lead)) return "shape";
        if (!memory.contiguous) return "layout";
        data = memory.data;
        return nullptr;
    }

    Status run_once(int threads, double* times, size_t& record, OutOfRange& wrong) {
        const size_t count = program_.size(), commits = program_.first_commit();
        try {
            for (record = 0; record < count; ++record) {
                if (record == commits) program_.set_writing(true);
                if (times) {
                    const Clock::time_point start = Clock::now();
                    program_.run_record(record, threads);
                    times[record] += std::chrono::duration<double>(Clock::now() - start).count();
                } else {
                    program_.run_record(record, threads);
                }
                // Reading the clock takes a fifth of a small record, so only every eighth and the last does.
                if (((record & 7) == 7 || record + 1 == commits) && record < commits && signalled()) {
                    return Status::raised;
                }
            }
        } catch (const OutOfRange& failure) {
            wrong = failure;
            broken_ = record > commits;  // it has written nothing itself
            program_.set_writing(false);
            return Status::out_of_range;
        } catch (const Raised&) {
            broken_ = record >= commits;
            program_.set_writing(false);
            return Status::raised;
        } catch (const std::bad_alloc&) {
            broken_ = record >= commits;
            program_.set_writing(false);
            return Status::no_memory;
        }
        program_.set_writing(false);
        record = 0;
        return signalled() ? Status::raised : Status::done;
    }

    // Whether Python wants to handle a signal, such as Ctrl-C. It is asked ten times a second.
    bool signalled() {
        const Clock::time_point now = Clock::now();
        if (now - last_check_ < std::chrono::milliseconds(100)) return false;
        last_check_ = now;
        const LockTaken taken;
        if (PyErr_CheckSignals() == 0) return false;
        keep_failure();
        return true;
    }

    void keep_failure() { PyErr_Fetch(&failure_.type, &failure_.value, &failure_.trace); }

    static PyProgram*& recorded_here() {
        static thread_local PyProgram* program = nullptr;
        return program;
    }
    static const void* this_thread() {
        static thread_local const char mark = 0;
        return &mark;
    }

    // The exception of a signal handler or a function, until `run` raises it.
    struct Failure {
        PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    };
    std::shared_ptr<Program> shared_;
    Program& program_;
    std::vector<Slot> inputs_, outputs_;
    std::vector<PyObject*> functions_;
    std::atomic<const void*> runner_{nullptr};  // the thread that runs it
    Clock::time_point last_check_;
    Failure failure_;
    bool broken_ = false;
};

}  // namespace

void bind_program(nb::module_& m) {
    PyType_Slot buffer[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(Arena::show)}, {0, nullptr}};
    nb::class_<Arena>(m, "Arena", nb::type_slots(buffer), "The memory of a program, as a buffer.");
    PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(PyProgram::traverse)},
                           {Py_tp_clear, reinterpret_cast<void*>(PyProgram::clear)},
                           {0, nullptr}};
    nb::class_<PyProgram>(m, "Program", nb::type_slots(slots),
                          "Recorded calls, bound to memory that the program knows.")
        .def(nb::init<size_t>(), nb::arg("bytes"))
        .def_prop_ro("arena", &PyProgram::arena)
        .def("add_memory", &PyProgram::add_memory, nb::arg("array"), "Let records use an array's memory.")
        .def("add_input", &PyProgram::add_input, nb::arg("array"))
        .def("add_output", &PyProgram::add_output, nb::arg("array"))
        .def("start_recording", &PyProgram::start_recording,
             "From here on the calls of this thread become records instead of being run.")
        .def("stop_recording", &PyProgram::stop_recording)
        .def("commit", &PyProgram::commit, "All later records write to variables.")
        .def(
            "run", &PyProgram::run, nb::arg("inputs"), nb::arg("outputs"), nb::arg("steps"), nb::arg("stacked"),
            nb::arg("threads"), nb::arg("times").none(),
            nb::sig("def run(self, inputs: tuple[object, ...], outputs: tuple[object, ...], steps: int, stacked: bool, "
                    "threads: int, times: object | None) -> tuple[str | int, ...] | None"),
            "Copy the inputs, run the records, copy the outputs. None, or what is wrong.")
        .def_prop_ro("size", &PyProgram::size, "The number of records.")
        .def_prop_ro("first_commit", &PyProgram::first_commit)
        .def_prop_ro("broken", &PyProgram::broken, "Whether a failure has left variables half updated.");
    m.def("record_call", &PyProgram::record_call, nb::arg("function"),
          "Record a call of function(), whose exception ends the run and is raised by it. False: nothing is recorded.");
}

}  // namespace rg::bind
