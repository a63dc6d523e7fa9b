// Callers' arrays for the length of a call, and the interpreter lock.
//
// Arrays come through the buffer protocol rather than nanobind's ndarray: it is the one that takes every dtype (NumPy
// exports bfloat16 without a format, DLPack not at all) and costs a tenth of a microsecond per array.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "../core/shape.h"

namespace rg::bind {

namespace nb = nanobind;

enum class Access { read, write };

// Whether elements of an array may share memory. A sufficient test, and cheap: with the axes in the order of their
// strides, each step must reach past all that the axes before it cover. Every view that slicing and transposing make
// passes.
inline bool may_overlap_itself(const Py_buffer& buffer) {
    if (buffer.len == 0) return false;
    std::pair<Py_ssize_t, Py_ssize_t> axes[kMaxAxes];  // stride and extent
    int count = 0;
    for (int i = 0; i < buffer.ndim; ++i) {
        if (buffer.shape[i] > 1) axes[count++] = {std::abs(buffer.strides[i]), buffer.shape[i]};
    }
    std::sort(axes, axes + count);
    Py_ssize_t covered = buffer.itemsize;
    for (int i = 0; i < count; ++i) {
        const auto [stride, extent] = axes[i];
        if (stride < covered) return true;
        covered += (extent - 1) * stride;
    }
    return false;
}

// A caller's array for the length of one call. None is allowed and is a null pointer.
class View {
public:
    View(nb::handle array, const char* name, Access access) : name_(name), access_(access) {
        if (array.is_none()) return;
        const int flags = access == Access::write ? PyBUF_STRIDED : PyBUF_STRIDED_RO;
        if (PyObject_GetBuffer(array.ptr(), &buffer_, flags) != 0) throw nb::python_error();
        held_ = true;
        if (buffer_.ndim > kMaxAxes) fail("has too many axes");
        low_ = high_ = static_cast<const char*>(buffer_.buf);
        for (int i = 0; i < buffer_.ndim; ++i) {
            if (buffer_.shape[i] == 0) {
                high_ = low_ = static_cast<const char*>(buffer_.buf);
                return;
            }
            const Py_ssize_t reach = (buffer_.shape[i] - 1) * buffer_.strides[i];
            (reach < 0 ? low_ : high_) += reach;
        }
        high_ += buffer_.itemsize;
    }
    ~View() {
        if (held_) PyBuffer_Release(&buffer_);
    }
    View(const View&) = delete;
    View& operator=(const View&) = delete;

    bool present() const { return held_; }
    const Py_buffer& buffer() const { return buffer_; }
    void* data() const { return held_ ? buffer_.buf : nullptr; }
    int64_t bytes() const { return held_ ? buffer_.len : 0; }
    int64_t itemsize() const { return held_ ? buffer_.itemsize : 0; }

    bool overlaps(const View& other) const { return low_ < other.high_ && other.low_ < high_; }
    bool same_elements(const View& other) const {
        if (data() != other.data() || buffer_.ndim != other.buffer_.ndim) return false;
        for (int i = 0; i < buffer_.ndim; ++i) {
            if (buffer_.shape[i] > 1 && buffer_.strides[i] != other.buffer_.strides[i]) return false;
        }
        return true;
    }

    // The checks below stand between any caller and memory that is not theirs: sizes are compared with what the buffer
    // says of itself, whatever was believed further up.
    void check_elements(const std::vector<int64_t>& shape, int64_t itemsize) const {
        if (!held_) return;
        if (buffer_.ndim != int(shape.size())) fail("has the wrong number of axes");
        for (int i = 0; i < buffer_.ndim; ++i) {
            if (buffer_.shape[i] != shape[size_t(i)]) fail("has the wrong shape");
            if (buffer_.strides[i] % itemsize != 0) fail("has strides that are not whole elements");
        }
        if (access_ == Access::write && may_overlap_itself(buffer_)) fail("may overlap itself");
        check_item(itemsize);
    }
    // Contiguous as well: its elements are read one after the other.
    void check_contiguous(const std::vector<int64_t>& shape, int64_t itemsize) const {
        if (!held_) return;
        check_elements(shape, itemsize);
        int64_t step = itemsize;
        for (int i = buffer_.ndim - 1; i >= 0; --i) {
            if (buffer_.shape[i] > 1 && buffer_.strides[i] != step) fail("is not contiguous");
            step *= buffer_.shape[i];
        }
    }
    void check_vector(int64_t count, int64_t itemsize) const {
        if (!held_) return;
        if (buffer_.len != count * itemsize) fail("has the wrong size");
        if (count && high_ - low_ != count * itemsize) fail("is not contiguous");
        check_item(itemsize);
    }
    int axes() const { return held_ ? buffer_.ndim : 0; }
    int64_t extent(int axis) const { return buffer_.shape[axis]; }
    int64_t stride(int axis, int64_t itemsize) const { return held_ ? buffer_.strides[axis] / itemsize : 0; }

private:
    void check_item(int64_t itemsize) const {
        if (buffer_.itemsize != itemsize) fail("has the wrong element size");
        if (buffer_.len > 0 && reinterpret_cast<uintptr_t>(buffer_.buf) % uintptr_t(itemsize) != 0) {
            fail("is not aligned to its elements");
        }
    }
    [[noreturn]] void fail(const char* why) const { throw nb::value_error((std::string(name_) + " " + why).c_str()); }

    const char* name_;
    Access access_;
    Py_buffer buffer_{};
    bool held_ = false;
    const char *low_ = nullptr, *high_ = nullptr;
};

// Work this small is done sooner than another thread could take the interpreter lock.
constexpr double kKeepLock = 8192;  // elements

// The interpreter lock is released for the life of this object.
class LockReleased {
public:
    LockReleased() : state_(PyEval_SaveThread()) {}
    ~LockReleased() {
        // When the interpreter is shutting down, Python before 3.14 ends a thread that asks for the lock by unwinding
        // its stack, which aborts the process in the first frame that may not throw. Such a thread waits here for the
        // end.
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

template <class Work>
void without_lock(double elements, const Work& work) {
    if (elements < kKeepLock) {
        work();
    } else {
        const LockReleased released;
        work();
    }
}

// What became of a call. Anything but `done`: nothing was written, and the caller decides what to do about it. Views
// are compared by the ranges they span, so `overlap` may be a false alarm for views that interleave. `out_of_range`: an
// index is.
enum class Outcome { done, in_place, overlap, out_of_range };

}  // namespace rg::bind
