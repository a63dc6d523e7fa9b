// Optimizer steps: a whole list of parameters in one call from Python.
#include "../core/dense/optimizer.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>

#include <algorithm>
#include <array>
#include <deque>
#include <variant>
#include <vector>

#include "bind.h"
#include "view.h"

namespace rg::bind {
namespace {

// The lists of a step, in the order of OptimizerArray.
constexpr const char* kNames[kOptimizerArrays] = {"parameters", "gradients", "states0", "states1", "states2"};

// The element type, float or double, of a parameter's first array.
Element element_of(nb::handle array) {
    static PyObject* const dtype = PyUnicode_InternFromString("dtype");
    static PyObject* const itemsize = PyUnicode_InternFromString("itemsize");
    const nb::object type = nb::steal(PyObject_GetAttr(array.ptr(), dtype));
    const nb::object size = type.is_valid() ? nb::steal(PyObject_GetAttr(type.ptr(), itemsize)) : nb::object();
    if (!size.is_valid()) PyErr_Clear();
    return size.is_valid() && PyLong_AsLong(size.ptr()) == 8 ? Element::f64 : Element::f32;
}

// views: in the order of OptimizerArray, null if absent.
OptimizerParameter parameter_of(const View* const* views, const View& lead, Element element) {
    OptimizerParameter parameter;
    parameter.dtype = element == Element::f64 ? DType::f64 : DType::f32;
    parameter.elements = lead.elements();
    bool contiguous = true;
    for (int k = 0; k < kOptimizerArrays; ++k) {
        if (!views[k]) continue;
        parameter.array[k] = views[k]->data();
        contiguous = contiguous && views[k]->contiguous();
    }
    if (!contiguous && parameter.elements > 0) {
        for (int i = 0; i < lead.axes(); ++i) {
            OptimizerAxis axis{lead.extent(i), {}};
            for (int k = 0; k < kOptimizerArrays; ++k) {
                if (views[k]) axis.stride[k] = views[k]->stride(i);
            }
            parameter.axes.push_back(axis);
        }
    }
    return parameter;
}

int64_t elements_of(const std::vector<OptimizerParameter>& parameters) {
    int64_t elements = 0;
    for (const OptimizerParameter& parameter : parameters) elements += parameter.elements;
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
        : rule_{static_cast<OptimizerKind>(kind),
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
        if (kind < 0 || kind > int(OptimizerKind::rmsprop)) throw nb::value_error("no such kind");
    }

    // Updates in place. The lists are in the order of OptimizerArray; a list of optional states may be empty.
    Outcome step(nb::handle parameters, nb::handle gradients, nb::handle states0, nb::handle states1,
                 nb::handle states2, bool overlap_checked, int threads) const {
        Call call;
        std::deque<View> views;
        std::vector<OptimizerParameter> list =
            read(call, views, {parameters, gradients, states0, states1, states2}, overlap_checked);
        if (call.refused()) return call.refusal();
        without_lock(double(elements_of(list)), [&] { optimizer_step(rule_, clipping_, list, threads_of(threads)); });
        return {};
    }

    // The same with a learning rate (float64) and a step number (int64) in memory, for programs. The rule has the other
    // hyperparameters; `factors`: gain, its factor, rate, its factor, as in ScheduledStep.
    Outcome scheduled_step(nb::handle parameters, nb::handle gradients, nb::handle states0, nb::handle states1,
                           nb::handle states2, nb::handle learning_rate, nb::handle count, double weight_decay,
                           bool epsilon_hat, const std::array<double, 4>& factors, bool overlap_checked,
                           int threads) const {
        Call call;
        std::deque<View> views;
        ScheduledStep step;
        step.rule = rule_;
        step.clipping = clipping_;
        step.parameters = read(call, views, {parameters, gradients, states0, states1, states2}, overlap_checked);
        const View rate(call, learning_rate, "learning_rate", Element::f64), number(call, count, "step", Element::i64);
        for (const View* v : {&rate, &number}) v->require().check_vector(1);
        if (call.refused()) return call.refusal();
        step.learning_rate = static_cast<const double*>(rate.data());
        step.count = static_cast<const int64_t*>(number.data());
        step.eps = rule_.eps;
        step.weight_decay = weight_decay;
        step.epsilon_hat = epsilon_hat;
        step.gain = factors[0];
        step.gain_factor = factors[1];
        step.rate = factors[2];
        step.rate_factor = factors[3];
        run_driver<nb::handle>(double(elements_of(step.parameters)), threads, step, rg::scheduled_step);
        return {};
    }

    // The same with the hyperparameters in memory, of the parameters' type, as in GivenStep; sgd needs only the rate.
    Outcome given_step(nb::handle parameters, nb::handle gradients, nb::handle states0, nb::handle states1,
                       nb::handle states2, nb::handle learning_rate, nb::handle keep_first, nb::handle keep_second,
                       nb::handle eps, bool overlap_checked, int threads) const {
        Call call;
        std::deque<View> views;
        GivenStep step;
        step.rule = rule_;
        step.parameters = read(call, views, {parameters, gradients, states0, states1, states2}, overlap_checked);
        if (call.refused()) return call.refusal();
        if (step.parameters.empty()) return {};
        step.dtype = step.parameters[0].dtype;
        const Element element = step.dtype == DType::f64 ? Element::f64 : Element::f32;
        const View rate(call, learning_rate, "learning_rate", element), first(call, keep_first, "keep_first", element),
            second(call, keep_second, "keep_second", element), small(call, eps, "eps", element);
        for (const View* v : {&rate, &first, &second, &small}) {
            if (v == &rate || rule_.kind == OptimizerKind::adam) v->require();
            v->check_vector(1);
        }
        if (call.refused()) return call.refusal();
        step.learning_rate = rate.data();
        step.keep_first = first.data();
        step.keep_second = second.data();
        step.eps = small.data();
        run_driver<nb::handle>(double(elements_of(step.parameters)), threads, step, rg::given_step);
        return {};
    }

private:
    std::vector<OptimizerParameter> read(Call& call, std::deque<View>& views,
                                         const std::array<nb::handle, kOptimizerArrays>& given,
                                         bool overlap_checked) const {
        const nb::list lists[kOptimizerArrays] = {as_list(given[0]), as_list(given[1]), as_list(given[2]),
                                                  as_list(given[3]), as_list(given[4])};
        const size_t count = lists[kParameter].size();
        for (int k = 0; k < kOptimizerArrays; ++k) {
            const bool may_lack = k >= kState && !needs(k - kState) && lists[k].size() == 0;
            if (lists[k].size() != count && !may_lack) call.refuse(Reason::missing, kNames[k]);
        }
        std::vector<OptimizerParameter> list;
        if (call.refused()) return list;
        list.reserve(count);
        for (size_t i = 0; i < count; ++i) {
            const Element element = element_of(lists[kParameter][i]);
            const View* of[kOptimizerArrays] = {};
            std::vector<int64_t> shape;
            for (int k = 0; k < kOptimizerArrays; ++k) {
                if (lists[k].size() == 0) continue;
                of[k] = &views.emplace_back(call, lists[k][i], kNames[k], element,
                                            k == kGradient ? Access::read : Access::write);
                of[k]->require();
                if (k == kParameter) shape = of[k]->shape();
                of[k]->check_shape(shape);
            }
            if (call.refused()) return list;
            list.push_back(parameter_of(of, *of[kParameter], element));
        }
        if (!overlap_checked) call.check_overlap();
        return list;
    }

    bool needs(int state) const {
        return rule_.kind == OptimizerKind::adam ? state < 2 : rule_.kind == OptimizerKind::rmsprop && state == 0;
    }

    rg::OptimizerRule<double> rule_;
    NormClipping clipping_;
};

std::variant<double, Refusal> global_norm(nb::handle arrays, bool, int threads) {
    Call call;
    std::deque<View> views;
    std::vector<OptimizerParameter> list;
    for (nb::handle array : as_list(arrays)) {
        const Element element = element_of(array);
        const View* of[kOptimizerArrays] = {};
        of[kGradient] = &views.emplace_back(call, array, "arrays", element).require();
        if (call.refused()) return *call.refusal();
        list.push_back(parameter_of(of, *of[kGradient], element));
    }
    double norm = 0;
    without_lock(double(elements_of(list)), [&] { norm = gradient_norm(list, threads_of(threads)); });
    return norm;
}

}  // namespace

void bind_optimizer(nb::module_& m) {
    nb::class_<OptimizerRule>(m, "OptimizerRule", "An optimizer's update rule with its hyperparameters.")
        .def(nb::init<int, bool, double, double, double, double, double, double, double, double, double, double, double,
                      double, double, double, bool, double, bool>(),
             nb::arg("kind"), nb::arg("nesterov"), nb::arg("scale"), nb::arg("low"), nb::arg("high"), nb::arg("l2"),
             nb::arg("l1"), nb::arg("keep_first"), nb::arg("keep_second"), nb::arg("eps"), nb::arg("eps_inside"),
             nb::arg("momentum"), nb::arg("gain"), nb::arg("rate"), nb::arg("decay"), nb::arg("maximum_norm"),
             nb::arg("norm_of_each"), nb::arg("known_norm"), nb::arg("clip_before_scale"))
        .def("step", &OptimizerRule::step, nb::arg("parameters"), nb::arg("gradients"), nb::arg("states0"),
             nb::arg("states1"), nb::arg("states2"), nb::arg("overlap_checked"), nb::arg("threads"),
             "Update the parameters and states in place.")
        .def("scheduled_step", &OptimizerRule::scheduled_step, nb::arg("parameters"), nb::arg("gradients"),
             nb::arg("states0"), nb::arg("states1"), nb::arg("states2"), nb::arg("learning_rate"), nb::arg("count"),
             nb::arg("weight_decay"), nb::arg("epsilon_hat"), nb::arg("factors"), nb::arg("overlap_checked"),
             nb::arg("threads"), "The same with a learning rate and a step number in memory.")
        .def("given_step", &OptimizerRule::given_step, nb::arg("parameters"), nb::arg("gradients"), nb::arg("states0"),
             nb::arg("states1"), nb::arg("states2"), nb::arg("learning_rate"), nb::arg("keep_first").none(),
             nb::arg("keep_second").none(), nb::arg("eps").none(), nb::arg("overlap_checked"), nb::arg("threads"),
             "The same with all hyperparameters that it has in memory.");
    m.def("global_norm", &global_norm, nb::arg("arrays"), nb::arg("overlap_checked"), nb::arg("threads"));
}

}  // namespace rg::bind
