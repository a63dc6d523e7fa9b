// Views of the caller's arrays during a call, the checks on them, and the release of the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/base/parallel.h"
#include "../core/program/program.h"
#include "array.h"

namespace rg::bind {

// Why a call was refused. Nothing has been written. Python finds the exact cause and raises an error, or converts the
// argument and calls again.
enum class Reason {
    type,          // not exactly a NumPy array (the elements of a subclass may have another meaning, as in masked
                   // arrays), or a read-only result
    dtype,         // elements of another type
    shape,         // another number of axes, or other extents
    layout,        // strides that the engine cannot use, or elements that are not aligned
    self_overlap,  // elements of a result may share memory, according to a conservative test
    overlap,       // the span of a result overlaps another array's; interleaved views may still be disjoint
    in_place,      // forward in place, without an array to keep the input in
    missing,       // a required array is None, or a list has the wrong length
    out_of_range,  // an index is out of range
    foreign_cache,
    cache_of_another_problem,
    stale_cache,
    outside,  // while a program is recorded: memory that is not the program's
};

constexpr std::pair<const char*, Reason> kReasons[] = {
    {"type", Reason::type},
    {"dtype", Reason::dtype},
    {"shape", Reason::shape},
    {"layout", Reason::layout},
    {"self_overlap", Reason::self_overlap},
    {"overlap", Reason::overlap},
    {"in_place", Reason::in_place},
    {"missing", Reason::missing},
    {"out_of_range", Reason::out_of_range},
    {"foreign_cache", Reason::foreign_cache},
    {"cache_of_another_problem", Reason::cache_of_another_problem},
    {"stale_cache", Reason::stale_cache},
    {"outside", Reason::outside},
};

struct Refusal {
    Reason reason;
    const char* argument;
};

// The outcome of a call without a result. No value: it succeeded.
using Outcome = std::optional<Refusal>;

enum class Access { read, write };

inline Element element_of(DType dtype) {
    return dtype == DType::f64   ? Element::f64
           : dtype == DType::f16 ? Element::f16
           : dtype == DType::f32 ? Element::f32
                                 : Element::bf16;
}
// The arithmetic type for a dtype.
inline Element arithmetic_of(DType dtype) { return dtype == DType::f64 ? Element::f64 : Element::f32; }
inline Element element_of(bool f64) { return f64 ? Element::f64 : Element::f32; }
class View;

// One call: its views, and the first check that failed.
class Call {
public:
    Call() = default;
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    void refuse(Reason reason, const char* argument) {
        if (!refusal_) refusal_ = Refusal{reason, argument};
    }
    bool refused() const { return refusal_.has_value(); }
    const Outcome& refusal() const { return refusal_; }

    void add(const View& view) {
        if (few_ < kFew) {
            first_[few_++] = &view;
        } else {
            more_.push_back(&view);
        }
    }
    using Pair = std::pair<const View*, const View*>;
    // Refuses if the span of a result overlaps another array's. The pairs of a result and an input in `in_place`
    // may be the same elements.
    void check_overlap(std::initializer_list<Pair> in_place = {});

private:
    bool sorted_spans_overlap() const;
    size_t size() const { return few_ + more_.size(); }
    const View& view(size_t i) const { return i < kFew ? *first_[i] : *more_[i - kFew]; }

    static constexpr size_t kFew = 16;  // stored without an allocation
    const View* first_[kFew];
    size_t few_ = 0;
    std::vector<const View*> more_;
    Outcome refusal_;
};

// A view of a caller's array during one call. None, or a null pointer, is allowed and gives a null pointer. These
// checks ensure memory safety: they use the array's actual bounds and do not rely on checks made in Python. After a
// check has failed, extents and strides can still be read, but nothing may be computed.
class View {
public:
    View(Call& call, nb::handle array, const char* name, Element element, Access access = Access::read)
        : call_(call), name_(name), access_(access) {
        if (!array.is_none()) open(array, element);
    }
    View(Call& call, const RawArray* array, const char* name, Element element, Access access = Access::read)
        : call_(call), name_(name), access_(access) {
        if (array) open(*array, element);
    }
    View(const View&) = delete;
    View& operator=(const View&) = delete;

    bool present() const { return held_; }
    const char* name() const { return name_; }
    bool is_result() const { return access_ == Access::write; }
    void* data() const { return memory_.data; }
    int64_t elements() const { return memory_.elements; }
    int axes() const { return memory_.ndim; }
    std::vector<int64_t> shape() const { return {memory_.shape, memory_.shape + memory_.ndim}; }
    int64_t extent(int axis) const { return axis >= 0 && axis < axes() ? memory_.shape[axis] : 0; }
    int64_t stride(int axis) const { return axis >= 0 && axis < axes() ? memory_.strides[axis] / memory_.itemsize : 0; }
    const char* low() const { return memory_.low; }
    const char* high() const { return memory_.high; }

    bool overlaps(const View& other) const { return memory_.overlaps(other.memory_); }
    bool same_elements(const View& other) const {
        if (data() != other.data() || axes() != other.axes()) return false;
        for (int i = 0; i < axes(); ++i) {
            if (memory_.shape[i] > 1 && memory_.strides[i] != other.memory_.strides[i]) return false;
        }
        return true;
    }

    bool contiguous() const { return memory_.contiguous; }

    const View& require() const {
        if (!held_) call_.refuse(Reason::missing, name_);
        return *this;
    }
    void check_axes(int axes) const {
        if (held_ && memory_.ndim != axes) call_.refuse(Reason::shape, name_);
    }
    void check_shape(const int64_t* first, const int64_t* last) const {
        if (held_ && !std::equal(first, last, memory_.shape, memory_.shape + memory_.ndim)) {
            call_.refuse(Reason::shape, name_);
        }
    }
    void check_shape(std::initializer_list<int64_t> shape) const { check_shape(shape.begin(), shape.end()); }
    void check_shape(const std::vector<int64_t>& shape) const {
        check_shape(shape.data(), shape.data() + shape.size());
    }
    // The shape, and that the array is contiguous.
    template <class Shape = std::initializer_list<int64_t>>
    void check_contiguous(const Shape& shape) const {
        check_shape(shape);
        if (held_ && !contiguous()) call_.refuse(Reason::layout, name_);
    }
    // `count` elements, contiguous, of any shape.
    void check_vector(int64_t count) const {
        if (held_ && elements() != count) call_.refuse(Reason::shape, name_);
        if (held_ && !contiguous()) call_.refuse(Reason::layout, name_);
    }
    // The last axis, of the given extent, is contiguous.
    void check_unit_stride(int64_t extent) const {
        if (held_ && extent > 1 && stride(axes() - 1) != 1) call_.refuse(Reason::layout, name_);
    }
    void check_index(bool good) const {
        if (!good) call_.refuse(Reason::out_of_range, name_);
    }

private:
    void open(nb::handle array, Element element) {
        if (Py_TYPE(array.ptr()) != numpy().ndarray) return call_.refuse(Reason::type, name_);
        const auto* object = reinterpret_cast<const ArrayObject*>(array.ptr());
        if (is_result() && !(object->flags & ArrayObject::kWriteable)) return call_.refuse(Reason::type, name_);
        if (!is_dtype(object->dtype, element)) return call_.refuse(Reason::dtype, name_);
        enter(memory_.read(array.ptr(), item_size(element)));
    }
    void open(const RawArray& array, Element element) {
        if (array.element != element) return call_.refuse(Reason::dtype, name_);
        enter(memory_.read(array.data, array.ndim, array.shape, array.strides, item_size(element)));
    }
    void enter(bool read) {
        held_ = read;
        if (!held_) return call_.refuse(Reason::shape, name_);
        if (!memory_.aligned()) call_.refuse(Reason::layout, name_);
        if (is_result() && !contiguous() && memory_.may_overlap_itself()) { call_.refuse(Reason::self_overlap, name_); }
        // A temporary copy that Python made would be read once, when the program is built.
        if (const Program* program = recorded_program()) {
            if (!program->contains(low(), high())) call_.refuse(Reason::outside, name_);
        }
        call_.add(*this);
    }

    Call& call_;
    const char* name_;
    Access access_;
    bool held_ = false;
    ArrayMemory memory_;
};

inline void Call::check_overlap(std::initializer_list<Pair> in_place) {
    if (refused()) return;
    constexpr size_t kMany = 64;  // above this, sorting is faster than comparing every pair
    if (size() > kMany && in_place.size() == 0) {
        if (sorted_spans_overlap()) refuse(Reason::overlap, "");
        return;
    }
    for (size_t i = 0; i < size(); ++i) {
        const View& result = view(i);
        if (!result.is_result()) continue;
        for (size_t j = 0; j < size(); ++j) {
            const View& other = view(j);
            if (j == i || (j < i && other.is_result()) || !result.overlaps(other)) continue;
            const bool allowed = std::any_of(in_place.begin(), in_place.end(), [&](const Pair& pair) {
                return pair.first == &result && pair.second == &other && result.same_elements(other);
            });
            if (!allowed) return refuse(Reason::overlap, result.name());
        }
    }
}

inline bool Call::sorted_spans_overlap() const {
    std::vector<const View*> sorted;
    for (size_t i = 0; i < size(); ++i) {
        if (view(i).low() < view(i).high()) sorted.push_back(&view(i));
    }
    std::sort(sorted.begin(), sorted.end(), [](const View* a, const View* b) { return a->low() < b->low(); });
    const char *all = nullptr, *written = nullptr;
    for (const View* view : sorted) {
        if (view->low() < (view->is_result() ? all : written)) return true;
        all = std::max(all, view->high());
        if (view->is_result()) written = std::max(written, view->high());
    }
    return false;
}

inline int threads_of(int threads) { return threads > 0 ? threads : num_threads(); }

// Work below this finishes before another thread could acquire the GIL.
constexpr double kKeepLock = 8192;  // elements

// Releases the GIL for the lifetime of this object.
class LockReleased {
public:
    LockReleased() : state_(PyEval_SaveThread()) {}
    ~LockReleased() {
        // During shutdown, Python before 3.14 ends a thread that acquires the GIL by unwinding its stack, which aborts
        // the process at the first noexcept frame. So the thread waits here until the process exits.
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;) pause();
        }
    }
    LockReleased(const LockReleased&) = delete;
    LockReleased& operator=(const LockReleased&) = delete;

private:
    PyThreadState* state_;
};

// Acquires the GIL for the lifetime of this object.
class LockTaken {
public:
    LockTaken() {
        try {
            state_ = PyGILState_Ensure();
        } catch (...) {  // as above
            for (;;) pause();
        }
    }
    ~LockTaken() { PyGILState_Release(state_); }
    LockTaken(const LockTaken&) = delete;
    LockTaken& operator=(const LockTaken&) = delete;

private:
    PyGILState_STATE state_;
};

template <class Work>
void without_lock(double elements, const Work& work) {
    if (elements < kKeepLock) {
        work();
    } else {
        const LockReleased released;
        work();
    }
}

// Code that takes NumPy arrays (`Array` is nb::handle) and raw ones (const RawArray*) alike. Callers with raw arrays do
// not hold the GIL.
template <class Array>
constexpr bool kFromPython = std::is_same_v<Array, nb::handle>;
inline bool is_absent(nb::handle array) { return array.is_none(); }
inline bool is_absent(const RawArray* array) { return !array; }
template <class Array>
Array absent() {
    if constexpr (kFromPython<Array>) {
        return nb::handle(Py_None);
    } else {
        return nullptr;
    }
}
// Runs a driver, or while the thread records a program, adds the call to it. `elements`: roughly how many it touches.
template <class Array, class Call>
void run_driver(double elements, int threads, Call& call, void (*driver)(const Call&)) {
    call.threads = threads_of(threads);
    if constexpr (kFromPython<Array>) {
        if (Program* program = recorded_program()) return program->add(call, driver);
        without_lock(elements, [&] { driver(call); });
    } else {
        driver(call);
    }
}

}  // namespace rg::bind
