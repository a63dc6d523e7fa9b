// Linear layers, embeddings and losses: makes views of matrices and flat arrays, calls the drivers.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>

#include <limits>
#include <variant>
#include <vector>

#include "../core/dense/loss.h"
#include "bind.h"
#include "linear_call.h"

namespace rg::bind {

namespace {

// The loss, or why the call was refused.
using LossOutcome = std::variant<double, Refusal>;

// Whether all indices are in [0, limit) or equal to `ignored` (if given).
bool in_range(const int64_t* indices, int64_t count, int64_t limit, const int64_t* ignored) {
    int64_t good = 0;
    for (int64_t i = 0; i < count; ++i) {
        good += (ignored && indices[i] == *ignored) || (indices[i] >= 0 && indices[i] < limit);
    }
    return good == count;
}

// Checks that the indices are contiguous, [count], and all in range.
const int64_t* checked_indices(Call& call, const View& view, int64_t count, int64_t limit,
                               const int64_t* ignored = nullptr) {
    view.require().check_contiguous({count});
    const int64_t* indices = static_cast<const int64_t*>(view.data());
    if (!call.refused()) view.check_index(in_range(indices, count, limit, ignored));
    return indices;
}

template <class A>
void run_embedding_forward(const int64_t* indices, int64_t positions, const View& table, const View& y, int threads) {
    EmbeddingForward<A> call;
    call.positions = positions;
    call.width = table.extent(1);
    call.indices = indices;
    call.table = matrix<const A>(table);
    call.y = static_cast<A*>(y.data());
    call.threads = threads_of(threads);
    without_lock(double(call.positions) * double(call.width), [&] { rg::embedding_forward(call); });
}

Outcome embedding_forward(bool f64, nb::handle indices_array, nb::handle table_array, nb::handle y_array,
                          bool overlap_checked, int threads) {
    Call call;
    const View indices(call, indices_array, "indices", Element::i64),
        table(call, table_array, "table", element_of(f64)), y(call, y_array, "out", element_of(f64), Access::write);
    table.require().check_axes(2);
    const int64_t positions = indices.extent(0);
    y.require().check_contiguous({positions, table.extent(1)});
    const int64_t* at = checked_indices(call, indices, positions, table.extent(0));
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    f64 ? run_embedding_forward<double>(at, positions, table, y, threads)
        : run_embedding_forward<float>(at, positions, table, y, threads);
    return {};
}

template <class A>
void run_embedding_backward(const View& dy, const int64_t* indices, const View& dtable, bool accumulate, int threads) {
    EmbeddingBackward<A> call;
    call.positions = dy.extent(0);
    call.width = dy.extent(1);
    call.table_rows = dtable.extent(0);
    call.indices = indices;
    call.dy = static_cast<const A*>(dy.data());
    call.accumulate = accumulate;
    call.dtable = matrix<A>(dtable);
    call.threads = threads_of(threads);
    without_lock(double(call.positions + call.table_rows) * double(call.width), [&] { rg::embedding_backward(call); });
}

Outcome embedding_backward(bool f64, nb::handle dy_array, nb::handle indices_array, nb::handle dtable_array,
                           bool accumulate, bool overlap_checked, int threads) {
    Call call;
    const View dy(call, dy_array, "dy", element_of(f64)), indices(call, indices_array, "indices", Element::i64),
        dtable(call, dtable_array, "out", element_of(f64), Access::write);
    const int64_t positions = dy.extent(0), rows = dtable.extent(0), width = dy.extent(1);
    dy.require().check_contiguous({positions, width});
    dtable.require().check_shape({rows, width});
    const int64_t* at = checked_indices(call, indices, positions, rows);
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    f64 ? run_embedding_backward<double>(dy, at, dtable, accumulate, threads)
        : run_embedding_backward<float>(dy, at, dtable, accumulate, threads);
    return {};
}

// How losses become one number: by a Reduction, times `scale`. All weights are `weight`, or with `weights`, a view,
// each has its own.
struct Reduced {
    Reduction reduction;
    double weight, scale;
    double divisor = 1;

    // The factor of the gradient of every loss. A mean over no losses has none, whatever the factor; a mean over
    // weights that are all 0 is 0.
    double factor() const {
        const double share = divisor != 0 ? 1.0 / divisor : reduction == Reduction::mean ? 1.0 : 0.0;
        return share * (scale * weight);
    }
    double loss(double sum) const {
        if (divisor == 0) return reduction == Reduction::mean ? std::numeric_limits<double>::quiet_NaN() : 0.0;
        return sum / divisor * (scale * weight);
    }
};

template <class A>
Reduced reduced(int reduction, double weight, double scale, const View& weights, int64_t count,
                const int64_t* labels = nullptr, int64_t ignored = 0) {
    if (reduction < 0 || reduction > int(Reduction::nonzero_mean)) throw nb::value_error("no such reduction");
    Reduced r{static_cast<Reduction>(reduction), weight, scale};
    r.divisor = loss_divisor(r.reduction, count, static_cast<const A*>(weights.data()), weight, labels, ignored);
    return r;
}

// Runs a call that sums the losses of rows into `losses`, which may be absent: then they are not kept.
template <class Run>
double sum_of_rows(const View& losses, int64_t rows, double scale, const Run& run) {
    std::vector<double> own(losses.present() ? 0 : size_t(rows));
    double* each = losses.present() ? static_cast<double*>(losses.data()) : own.data();
    const double sum = run(each);
    if (losses.present()) {
        for (int64_t row = 0; row < rows; ++row) each[row] *= scale;
    }
    return sum;
}

template <class A>
double run_cross_entropy(const View& logits, const int64_t* labels, int64_t ignored, const View& targets,
                         const View& weights, double weight, double smoothing, int reduction, double scale,
                         const View& losses, const View& gradient, int threads) {
    CrossEntropy<A> call;
    call.rows = logits.extent(0);
    call.classes = logits.extent(1);
    const Matrix<const A> x = matrix<const A>(logits);
    const Matrix<A> dx = matrix<A>(gradient);
    call.logits = x.data;
    call.logits_row = x.row_stride;
    call.labels = labels;
    call.ignored = ignored;
    call.targets = static_cast<const A*>(targets.data());
    call.weights = static_cast<const A*>(weights.data());
    call.smoothing = smoothing;
    call.gradient = dx.data;
    call.gradient_row = dx.row_stride;
    call.threads = threads_of(threads);
    const Reduced r = reduced<A>(reduction, weight, scale, weights, call.rows, labels, ignored);
    call.weight = r.factor();
    return r.loss(sum_of_rows(losses, call.rows, scale * weight, [&](double* each) {
        call.losses = each;
        double sum = 0;
        without_lock(double(call.rows) * double(call.classes), [&] { sum = rg::softmax_cross_entropy(call); });
        return sum;
    }));
}

// Labels are indices, or targets are given.
LossOutcome softmax_cross_entropy(bool f64, nb::handle logits_array, nb::handle labels_array, int64_t ignored,
                                  nb::handle targets_array, nb::handle weights_array, double weight, double smoothing,
                                  int reduction, double scale, nb::handle losses_array, nb::handle gradient_array,
                                  bool overlap_checked, int threads) {
    Call call;
    const Element element = element_of(f64);
    const View logits(call, logits_array, "logits", element), labels(call, labels_array, "labels", Element::i64),
        targets(call, targets_array, "labels", element), weights(call, weights_array, "weights", element),
        losses(call, losses_array, "losses", Element::f64, Access::write),
        gradient(call, gradient_array, "out", element, Access::write);
    const int64_t rows = logits.extent(0), classes = logits.extent(1);
    logits.require();
    for (const View* v : {&logits, &gradient}) {
        v->check_shape({rows, classes});
        v->check_unit_stride(classes);
    }
    targets.check_contiguous({rows, classes});
    weights.check_contiguous({rows});
    losses.check_contiguous({rows});
    const int64_t* at = targets.present() ? nullptr : checked_indices(call, labels, rows, classes, &ignored);
    if (!overlap_checked) call.check_overlap({{&gradient, &logits}});
    if (call.refused()) return *call.refusal();
    const auto run = f64 ? run_cross_entropy<double> : run_cross_entropy<float>;
    return run(logits, at, ignored, targets, weights, weight, smoothing, reduction, scale, losses, gradient, threads);
}

template <class A>
double run_cosine_distance(const View& y, const View& target, const View& weights, double weight, int reduction,
                           double scale, const View& losses, const View& gradient, int threads) {
    CosineDistance<A> call;
    call.rows = y.extent(0);
    call.width = y.extent(1);
    call.y = static_cast<const A*>(y.data());
    call.target = static_cast<const A*>(target.data());
    call.weights = static_cast<const A*>(weights.data());
    call.gradient = static_cast<A*>(gradient.data());
    call.threads = threads_of(threads);
    const Reduced r = reduced<A>(reduction, weight, scale, weights, call.rows);
    call.weight = r.factor();
    return r.loss(sum_of_rows(losses, call.rows, scale * weight, [&](double* each) {
        call.losses = each;
        double sum = 0;
        without_lock(double(call.rows) * double(call.width), [&] { sum = rg::cosine_distance(call); });
        return sum;
    }));
}

LossOutcome cosine_distance(bool f64, nb::handle y_array, nb::handle target_array, nb::handle weights_array,
                            double weight, int reduction, double scale, nb::handle losses_array,
                            nb::handle gradient_array, bool overlap_checked, int threads) {
    Call call;
    const Element element = element_of(f64);
    const View y(call, y_array, "y", element), target(call, target_array, "target", element),
        weights(call, weights_array, "weights", element),
        losses(call, losses_array, "losses", Element::f64, Access::write),
        gradient(call, gradient_array, "out", element, Access::write);
    for (const View* v : {&y, &target}) v->require();
    for (const View* v : {&y, &target, &gradient}) v->check_contiguous({y.extent(0), y.extent(1)});
    for (const View* v : {&weights, &losses}) v->check_contiguous({y.extent(0)});
    if (!overlap_checked) call.check_overlap({{&gradient, &y}, {&gradient, &target}});
    if (call.refused()) return *call.refusal();
    const auto run = f64 ? run_cosine_distance<double> : run_cosine_distance<float>;
    return run(y, target, weights, weight, reduction, scale, losses, gradient, threads);
}

template <class A>
double run_element_losses(int loss, double a, double b, const View& y, const View& target, const View& weights,
                          double weight, int reduction, double scale, const View& values, const View& gradient,
                          int threads) {
    ElementLosses<A> call;
    call.count = y.extent(0);
    call.y = static_cast<const A*>(y.data());
    call.target = static_cast<const A*>(target.data());
    call.weights = static_cast<const A*>(weights.data());
    call.values = static_cast<A*>(values.data());
    call.gradient = static_cast<A*>(gradient.data());
    call.threads = threads_of(threads);
    const Reduced r = reduced<A>(reduction, weight, scale, weights, call.count);
    if (loss < 0 || loss > int(ElementLoss::sigmoid)) throw nb::value_error("no such loss");
    call.rule.loss = static_cast<ElementLoss>(loss);
    call.rule.a = A(a);
    call.rule.b = A(b);
    call.rule.scale = A(scale * weight);
    call.rule.slope = A((call.rule.loss == ElementLoss::difference ? 2 * a : 1.0) * r.factor());
    double sum = 0;
    without_lock(double(call.count), [&] { sum = rg::element_losses(call); });
    return r.loss(sum);
}

LossOutcome element_losses(bool f64, int loss, double a, double b, nb::handle y_array, nb::handle target_array,
                           nb::handle weights_array, double weight, int reduction, double scale,
                           nb::handle values_array, nb::handle gradient_array, bool overlap_checked, int threads) {
    Call call;
    const Element element = element_of(f64);
    const View y(call, y_array, "y", element), target(call, target_array, "target", element),
        weights(call, weights_array, "weights", element), values(call, values_array, "values", element, Access::write),
        gradient(call, gradient_array, "out", element, Access::write);
    for (const View* v : {&y, &target}) v->require();
    for (const View* v : {&y, &target, &weights, &values, &gradient}) v->check_contiguous({y.extent(0)});
    if (!overlap_checked) call.check_overlap({{&gradient, &y}, {&gradient, &target}});
    if (call.refused()) return *call.refusal();
    const auto run = f64 ? run_element_losses<double> : run_element_losses<float>;
    return run(loss, a, b, y, target, weights, weight, reduction, scale, values, gradient, threads);
}

}  // namespace

void bind_dense(nb::module_& m) {
    m.def("linear_forward", &linear_forward<nb::handle>, nb::arg("f64"), nb::arg("x"), nb::arg("w"),
          nb::arg("b").none(), nb::arg("y"), nb::arg("overlap_checked"), nb::arg("threads"), "y = x w' + b");
    m.def("linear_backward", &linear_backward<nb::handle>, nb::arg("f64"), nb::arg("dy"), nb::arg("x"), nb::arg("w"),
          nb::arg("dx").none(), nb::arg("dw").none(), nb::arg("db").none(), nb::arg("accumulate"),
          nb::arg("overlap_checked"), nb::arg("threads"), "dx = dy w, dw = dy' x, db = the sum of dy's rows.");
    m.def("embedding_forward", &embedding_forward, nb::arg("f64"), nb::arg("indices"), nb::arg("table"), nb::arg("y"),
          nb::arg("overlap_checked"), nb::arg("threads"), "y[p] = table[indices[p]]");
    m.def("embedding_backward", &embedding_backward, nb::arg("f64"), nb::arg("dy"), nb::arg("indices"),
          nb::arg("dtable"), nb::arg("accumulate"), nb::arg("overlap_checked"), nb::arg("threads"),
          "dtable[indices[p]] += dy[p], in the order of p.");
    m.def("softmax_cross_entropy", &softmax_cross_entropy, nb::arg("f64"), nb::arg("logits"), nb::arg("labels").none(),
          nb::arg("ignored"), nb::arg("targets").none(), nb::arg("weights").none(), nb::arg("weight"),
          nb::arg("smoothing"), nb::arg("reduction"), nb::arg("scale"), nb::arg("losses").none(),
          nb::arg("gradient").none(), nb::arg("overlap_checked"), nb::arg("threads"), "The loss and its gradient.");
    m.def("cosine_distance", &cosine_distance, nb::arg("f64"), nb::arg("y"), nb::arg("target"),
          nb::arg("weights").none(), nb::arg("weight"), nb::arg("reduction"), nb::arg("scale"),
          nb::arg("losses").none(), nb::arg("gradient").none(), nb::arg("overlap_checked"), nb::arg("threads"),
          "1 - the product of rows of unit length, and the gradient.");
    m.def("element_losses", &element_losses, nb::arg("f64"), nb::arg("loss"), nb::arg("a"), nb::arg("b"), nb::arg("y"),
          nb::arg("target"), nb::arg("weights").none(), nb::arg("weight"), nb::arg("reduction"), nb::arg("scale"),
          nb::arg("values").none(), nb::arg("gradient").none(), nb::arg("overlap_checked"), nb::arg("threads"),
          "A loss of every element, and the gradient.");
}

}  // namespace rg::bind
