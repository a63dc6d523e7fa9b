// A whole list of parameters in one crossing. What is plainly right goes to the engine at once; anything else is
// reported as such, nothing written, and Python finds out what is wrong and says it.
#include "optimizer.h"

#include <nanobind/stl/optional.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <vector>

#include "../core/optimizer.h"
#include "../core/parallel.h"
#include "view.h"

namespace rg::bind {

namespace {

struct Range {
    const char *low, *high;
    bool written;
};

// Buffers for the length of a call.
class Buffers {
public:
    ~Buffers() {
        for (Py_buffer& buffer : held_) PyBuffer_Release(&buffer);
    }
    // Null if it is not a plain array of native, aligned floats or doubles, or may not be written.
    const Py_buffer* take(PyObject* array, bool write) {
        if (Py_TYPE(array) != plain_type_) {
            static PyObject* const mask = PyUnicode_InternFromString("mask");
            if (PyObject_HasAttr(array, mask)) return nullptr;  // a masked array: its mask would be lost
            plain_type_ = Py_TYPE(array);
        }
        Py_buffer buffer;
        if (PyObject_GetBuffer(array, &buffer, write ? PyBUF_RECORDS : PyBUF_RECORDS_RO) != 0) {
            PyErr_Clear();
            return nullptr;
        }
        held_.push_back(buffer);
        const Py_buffer& b = held_.back();
        const bool f32 = b.format && b.format[0] == 'f', f64 = b.format && b.format[0] == 'd';
        if (!(f32 || f64) || b.format[1] != 0 || b.ndim > rg::kMaxAxes) return nullptr;
        if (b.len > 0 && reinterpret_cast<uintptr_t>(b.buf) % uintptr_t(b.itemsize) != 0) return nullptr;
        const char *low = static_cast<const char*>(b.buf), *high = low;
        for (int i = 0; i < b.ndim && b.len > 0; ++i) {
            if (b.strides[i] % b.itemsize != 0) return nullptr;
            const Py_ssize_t reach = (b.shape[i] - 1) * b.strides[i];
            (reach < 0 ? low : high) += reach;
        }
        if (write && may_overlap_itself(b)) return nullptr;
        if (b.len > 0) ranges_.push_back({low, high + b.itemsize, write});
        return &b;
    }
    // Whether something written shares its range with anything else. Arrays that interleave are a false alarm.
    bool overlap() {
        std::sort(ranges_.begin(), ranges_.end(), [](const Range& a, const Range& b) { return a.low < b.low; });
        const char *all = nullptr, *written = nullptr;
        for (const Range& range : ranges_) {
            if (range.low < (range.written ? all : written)) return true;
            all = std::max(all, range.high);
            if (range.written) written = std::max(written, range.high);
        }
        return false;
    }

private:
    std::deque<Py_buffer> held_;
    std::vector<Range> ranges_;
    PyTypeObject* plain_type_ = nullptr;  // the last type that was found to have no mask
};

rg::DType dtype_of(const Py_buffer& buffer) { return buffer.format[0] == 'd' ? rg::DType::f64 : rg::DType::f32; }

bool contiguous(const Py_buffer& buffer) {
    Py_ssize_t step = buffer.itemsize;
    for (int i = buffer.ndim - 1; i >= 0; --i) {
        if (buffer.shape[i] > 1 && buffer.strides[i] != step) return false;
        step *= buffer.shape[i];
    }
    return true;
}

bool same_form(const Py_buffer& a, const Py_buffer& b) {
    return a.format[0] == b.format[0] && a.ndim == b.ndim && std::equal(a.shape, a.shape + a.ndim, b.shape);
}

// buffers: as OptimizerArray, null where there is none.
rg::OptimizerParameter parameter_of(const Py_buffer* const* buffers, const Py_buffer& lead) {
    rg::OptimizerParameter parameter;
    parameter.dtype = dtype_of(lead);
    parameter.elements = lead.len / lead.itemsize;
    bool straight = true;
    for (int k = 0; k < rg::kOptimizerArrays; ++k) {
        if (!buffers[k]) continue;
        parameter.array[k] = buffers[k]->buf;
        straight = straight && contiguous(*buffers[k]);
    }
    if (!straight && parameter.elements > 0) {
        for (int i = 0; i < lead.ndim; ++i) {
            rg::OptimizerAxis axis{lead.shape[i], {}};
            for (int k = 0; k < rg::kOptimizerArrays; ++k) {
                if (buffers[k]) axis.stride[k] = buffers[k]->strides[i] / lead.itemsize;
            }
            parameter.axes.push_back(axis);
        }
    }
    return parameter;
}

int64_t elements_of(const std::vector<rg::OptimizerParameter>& parameters) {
    int64_t elements = 0;
    for (const rg::OptimizerParameter& parameter : parameters) elements += parameter.elements;
    return elements;
}

nb::list as_list(nb::handle arrays) {
    if (!nb::isinstance<nb::list>(arrays)) throw nb::type_error("a list is needed");
    return nb::borrow<nb::list>(arrays);
}

class OptimizerRule {
public:
    OptimizerRule(int kind, bool nesterov, double scale, double low, double high, double l2, double l1,
                  double keep_first, double keep_second, double eps, double eps_inside, double momentum, double gain,
                  double rate, double decay, double maximum_norm, bool norm_of_each, double known_norm,
                  bool clip_before_scale)
        : rule_{static_cast<rg::OptimizerKind>(kind),
                nesterov,
                scale,
                low,
                high,
                l2,
                l1,
                {keep_first, 1 - keep_first},
                {keep_second, 1 - keep_second},
                eps,
                eps_inside,
                momentum,
                gain,
                rate,
                decay},
          clipping_{maximum_norm, norm_of_each, known_norm, clip_before_scale} {
        if (kind < 0 || kind > int(rg::OptimizerKind::rmsprop)) throw nb::value_error("no such kind");
    }

    // Lists as OptimizerArray; an empty one of states that the rule can do without is one that is not there.
    bool step(nb::handle parameters, nb::handle gradients, nb::handle states0, nb::handle states1, nb::handle states2,
              bool overlap_checked, int threads) const {
        const nb::list lists[rg::kOptimizerArrays] = {as_list(parameters), as_list(gradients), as_list(states0),
                                                      as_list(states1), as_list(states2)};
        const size_t count = lists[rg::kParameter].size();
        for (int k = 0; k < rg::kOptimizerArrays; ++k) {
            const bool may_lack = k >= rg::kState && !needs(k - rg::kState);
            if (lists[k].size() != count && !(may_lack && lists[k].size() == 0)) return false;
        }
        Buffers buffers;
        std::vector<rg::OptimizerParameter> list;
        list.reserve(count);
        for (size_t i = 0; i < count; ++i) {
            const Py_buffer* taken[rg::kOptimizerArrays] = {};
            for (int k = 0; k < rg::kOptimizerArrays; ++k) {
                if (lists[k].size() == 0) continue;
                taken[k] = buffers.take(lists[k][i].ptr(), k != rg::kGradient);
                if (!taken[k] || !same_form(*taken[k], *taken[rg::kParameter])) return false;
            }
            list.push_back(parameter_of(taken, *taken[rg::kParameter]));
        }
        if (!overlap_checked && buffers.overlap()) return false;
        const int team = threads > 0 ? threads : rg::num_threads();
        without_lock(double(elements_of(list)), [&] { rg::optimizer_step(rule_, clipping_, list, team); });
        return true;
    }

private:
    bool needs(int state) const {
        return rule_.kind == rg::OptimizerKind::adam ? state < 2
                                                     : rule_.kind == rg::OptimizerKind::rmsprop && state == 0;
    }

    rg::OptimizerRule<double> rule_;
    rg::NormClipping clipping_;
};

// None: some are not plainly arrays of floats or doubles.
std::optional<double> global_norm(nb::handle arrays, int threads) {
    Buffers buffers;
    std::vector<rg::OptimizerParameter> list;
    for (nb::handle array : as_list(arrays)) {
        const Py_buffer* taken[rg::kOptimizerArrays] = {};
        taken[rg::kGradient] = buffers.take(array.ptr(), false);
        if (!taken[rg::kGradient]) return std::nullopt;
        list.push_back(parameter_of(taken, *taken[rg::kGradient]));
    }
    const int team = threads > 0 ? threads : rg::num_threads();
    double norm = 0;
    without_lock(double(elements_of(list)), [&] { norm = rg::gradient_norm(list, team); });
    return norm;
}

}  // namespace

void bind_optimizer(nb::module_& m) {
    nb::class_<OptimizerRule>(m, "OptimizerRule", "An optimizer's update with its numbers.")
        .def(nb::init<int, bool, double, double, double, double, double, double, double, double, double, double, double,
                      double, double, double, bool, double, bool>(),
             nb::arg("kind"), nb::arg("nesterov"), nb::arg("scale"), nb::arg("low"), nb::arg("high"), nb::arg("l2"),
             nb::arg("l1"), nb::arg("keep_first"), nb::arg("keep_second"), nb::arg("eps"), nb::arg("eps_inside"),
             nb::arg("momentum"), nb::arg("gain"), nb::arg("rate"), nb::arg("decay"), nb::arg("maximum_norm"),
             nb::arg("norm_of_each"), nb::arg("known_norm"), nb::arg("clip_before_scale"))
        .def("step", &OptimizerRule::step, nb::arg("parameters"), nb::arg("gradients"), nb::arg("states0"),
             nb::arg("states1"), nb::arg("states2"), nb::arg("overlap_checked"), nb::arg("threads"),
             "Updates in place; false if an argument is not plainly right, and then nothing is written.");
    m.def("global_norm", &global_norm, nb::arg("arrays"), nb::arg("threads"));
}

}  // namespace rg::bind
