// Reads NumPy arrays without calling into NumPy.
//
// The buffer protocol and DLPack take a fifth of a microsecond per array, as long as a small problem takes to compute,
// and the buffer protocol has no format for bfloat16.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "../core/base/shape.h"

namespace rg::bind {

namespace nb = nanobind;

enum class Element { f32, f64, f16, bf16, i64, u8, i32, boolean };

inline int64_t item_size(Element element) {
    switch (element) {
        case Element::f64:
        case Element::i64:
            return 8;
        case Element::f32:
        case Element::i32:
            return 4;
        case Element::f16:
        case Element::bf16:
            return 2;
        case Element::u8:
        case Element::boolean:
            return 1;
    }
    return 1;
}

// The first fields of every array object. This is NumPy's C ABI: extensions built with NumPy's headers have these
// offsets compiled in. check_array_layout compares them with an actual array.
struct ArrayObject {
    PyObject_HEAD char* data;
    int ndim;
    Py_ssize_t *shape, *strides;
    PyObject *base, *dtype;
    int flags;

    static constexpr int kWriteable = 0x400;
};

// NumPy objects, looked up when the module is imported.
struct Numpy {
    PyTypeObject* ndarray;
    std::atomic<PyObject*> dtype[8];  // by Element; bfloat16, which is not part of NumPy, is set when first seen
};
inline Numpy& numpy() {
    static Numpy found = [] {
        const nb::module_ module = nb::module_::import_("numpy");
        const auto dtype = [&](const char* name) { return module.attr("dtype")(module.attr(name)).release().ptr(); };
        return Numpy{reinterpret_cast<PyTypeObject*>(nb::object(module.attr("ndarray")).release().ptr()),
                     {dtype("float32"), dtype("float64"), dtype("float16"), nullptr, dtype("int64"), dtype("uint8"),
                      dtype("int32"), dtype("bool_")}};
    }();
    return found;
}

// Whether a dtype is the dtype of the element type, in native byte order.
inline bool is_dtype(PyObject* dtype, Element element) {
    std::atomic<PyObject*>& found = numpy().dtype[int(element)];
    PyObject* const known = found.load(std::memory_order_acquire);
    if (dtype == known) return true;
    if (known) {
        const int equal = PyObject_RichCompareBool(dtype, known, Py_EQ);
        if (equal < 0) throw nb::python_error();
        return equal;
    }
    const nb::object name = nb::handle(dtype).attr("name");
    if (!PyUnicode_Check(name.ptr()) || PyUnicode_CompareWithASCIIString(name.ptr(), "bfloat16") != 0) return false;
    found.store(nb::handle(dtype).inc_ref().ptr(), std::memory_order_release);
    return true;
}

// Where the elements of an array are. A copy, because another thread may reshape the array during the call.
struct ArrayMemory {
    char* data = nullptr;
    int ndim = 0;
    int64_t itemsize = 0, elements = 0;
    int64_t shape[kMaxAxes], strides[kMaxAxes];  // strides in bytes; only the first ndim are set
    const char *low = nullptr, *high = nullptr;  // the span of its elements
    bool contiguous = true;

    ArrayMemory() {}
    // False for an array with too many axes.
    bool read(PyObject* object, int64_t item_bytes) {
        const auto* array = reinterpret_cast<const ArrayObject*>(object);
        return read(array->data, array->ndim, array->shape, array->strides, item_bytes);
    }
    template <class Extent>
    bool read(char* first, int axes, const Extent* extents, const Extent* steps, int64_t item_bytes) {
        if (axes > kMaxAxes) return false;
        data = first;
        ndim = axes;
        itemsize = item_bytes;
        elements = 1;
        for (int i = 0; i < ndim; ++i) {
            shape[i] = extents[i];
            strides[i] = steps[i];
            elements *= shape[i];
        }
        settle_strides();
        low = high = data;
        if (elements == 0) return true;
        for (int i = 0; i < ndim; ++i) {
            const int64_t reach = (shape[i] - 1) * strides[i];
            (reach < 0 ? low : high) += reach;
        }
        high += itemsize;
        return true;
    }

    // The strides of an axis of extent 1, and of an empty array, are arbitrary. In a contiguous array they are replaced
    // by the usual ones.
    void settle_strides() {
        contiguous = true;
        int64_t step = itemsize;
        for (int i = ndim - 1; i >= 0 && elements > 0; --i) {
            contiguous = contiguous && (shape[i] == 1 || strides[i] == step);
            step *= shape[i];
        }
        step = itemsize;
        for (int i = ndim - 1; i >= 0 && contiguous; --i) {
            strides[i] = step;
            step *= shape[i];
        }
    }
    bool overlaps(const ArrayMemory& other) const { return low < other.high && other.low < high; }
    bool aligned() const {
        bool multiples = elements == 0 || reinterpret_cast<uintptr_t>(data) % uintptr_t(itemsize) == 0;
        for (int i = 0; i < ndim; ++i) multiples = multiples && (shape[i] == 1 || strides[i] % itemsize == 0);
        return multiples;
    }
    // Whether elements may share memory. A cheap, conservative test: with the axes sorted by stride, each stride must
    // reach past everything that the smaller axes cover. Every view made by slicing and transposing passes.
    bool may_overlap_itself() const {
        if (elements == 0) return false;
        std::pair<int64_t, int64_t> axes[kMaxAxes];  // stride and extent
        int count = 0;
        for (int i = 0; i < ndim; ++i) {
            if (shape[i] > 1) axes[count++] = {strides[i] < 0 ? -strides[i] : strides[i], shape[i]};
        }
        std::sort(axes, axes + count);
        int64_t covered = itemsize;
        for (int i = 0; i < count; ++i) {
            const auto [stride, extent] = axes[i];
            if (stride < covered) return true;
            covered += (extent - 1) * stride;
        }
        return false;
    }
};

// An array that is not a Python object. Strides are in bytes. The caller keeps shape and strides.
struct RawArray {
    Element element;
    char* data;
    int ndim;
    const int64_t *shape, *strides;
};

// Any array, subclasses included.
inline ArrayMemory memory_of(nb::handle array) {
    if (!PyObject_TypeCheck(array.ptr(), numpy().ndarray)) throw nb::type_error("not a NumPy array");
    ArrayMemory memory;
    if (!memory.read(array.ptr(), nb::cast<int64_t>(array.attr("itemsize")))) throw nb::value_error("too many axes");
    return memory;
}

// Raises unless arrays are laid out as above. Every known version of NumPy passes.
inline void check_array_layout() {
    const nb::module_ module = nb::module_::import_("numpy");
    const nb::object whole = module.attr("zeros")(nb::make_tuple(7, 5), module.attr("float32"));
    const nb::object view = whole.attr("T");
    const auto* array = reinterpret_cast<const ArrayObject*>(view.ptr());
    view.attr("setflags")(nb::arg("write") = false);
    const bool same =
        array->ndim == 2 && array->shape[0] == 5 && array->shape[1] == 7 && array->strides[0] == 4 &&
        array->strides[1] == 20 && array->base == whole.ptr() && array->dtype == numpy().dtype[int(Element::f32)] &&
        nb::cast<uintptr_t>(view.attr("ctypes").attr("data")) == reinterpret_cast<uintptr_t>(array->data) &&
        !(array->flags & ArrayObject::kWriteable) &&
        reinterpret_cast<const ArrayObject*>(whole.ptr())->flags & ArrayObject::kWriteable;
    if (!same) throw nb::import_error("arrays of this version of NumPy are laid out differently");
}

}  // namespace rg::bind
