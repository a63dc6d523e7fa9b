// Linear layers, embeddings and losses: makes views of matrices and flat arrays, calls the drivers.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>

#include <limits>
#include <variant>
#include <vector>

#include "../core/base/scratch.h"
#include "../core/dense/loss.h"
#include "bind.h"
#include "linear_call.h"

namespace rg::bind {

namespace {

// The loss, or why the call was refused.
using LossOutcome = std::variant<double, Refusal>;

// Checks that the indices are contiguous, [count], and all in range; in a program, in every run.
const int64_t* checked_indices(Call& call, const View& view, int64_t count, int64_t limit,
                               const int64_t* ignored = nullptr) {
    view.require().check_contiguous({count});
    const int64_t* indices = static_cast<const int64_t*>(view.data());
    if (call.refused()) return indices;
    const IndexCheck check{indices, count, limit, ignored != nullptr, ignored ? *ignored : 0};
    if (Program* program = recorded_program()) {
        program->add(check, check_indices);
    } else {
        view.check_index(indices_in_range(check));
    }
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
    run_driver<nb::handle>(double(call.positions) * double(call.width), threads, call, rg::embedding_forward<A>);
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
    const double elements = double(call.positions + call.table_rows) * double(call.width);
    run_driver<nb::handle>(elements, threads, call, rg::embedding_backward<A>);
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
// each has its own. In a program the divisor follows from each run's weights and labels.
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

// A call of a loss, its reduction, and where the loss goes.
template <class Losses, class A>
struct LossCall {
    Losses call;
    Reduced reduced;
    double* losses;  // of each row, times the scale; null: not wanted
    double* result;
    A* rounded;  // the result as an element; null: not wanted
    double a;    // of element losses
    int threads;

    void finish(double sum) const {
        const double loss = reduced.loss(sum);
        if (result) *result = loss;
        if (rounded) *rounded = A(loss);
    }
};

// Runs a call that sums the losses of rows. If they are not wanted, they are in scratch.
struct LossScratch {
    Buffer buffer;
};
template <class Losses, class A, class Run>
void run_rows(const LossCall<Losses, A>& loss, Losses& call, const Run& run) {
    double* each = loss.losses ? loss.losses : kept_by_thread<LossScratch>().buffer.take<double>(call.rows);
    call.weight = loss.reduced.factor();
    call.threads = loss.threads;
    call.losses = each;
    const double sum = run(call);
    for (int64_t row = 0; loss.losses && row < call.rows; ++row) each[row] *= loss.reduced.scale * loss.reduced.weight;
    loss.finish(sum);
}

template <class A>
void run_cross_entropy(const LossCall<CrossEntropy<A>, A>& given) {
    LossCall<CrossEntropy<A>, A> loss = given;
    CrossEntropy<A>& call = loss.call;
    loss.reduced.divisor =
        loss_divisor(loss.reduced.reduction, call.rows, call.weights, loss.reduced.weight, call.labels, call.ignored);
    run_rows(loss, call, rg::softmax_cross_entropy<A>);
}

template <class A>
void run_cosine_distance(const LossCall<CosineDistance<A>, A>& given) {
    LossCall<CosineDistance<A>, A> loss = given;
    CosineDistance<A>& call = loss.call;
    loss.reduced.divisor = loss_divisor(loss.reduced.reduction, call.rows, call.weights, loss.reduced.weight);
    run_rows(loss, call, rg::cosine_distance<A>);
}

template <class A>
void run_element_losses(const LossCall<ElementLosses<A>, A>& given) {
    LossCall<ElementLosses<A>, A> loss = given;
    ElementLosses<A>& call = loss.call;
    loss.reduced.divisor = loss_divisor(loss.reduced.reduction, call.count, call.weights, loss.reduced.weight);
    call.threads = loss.threads;
    call.rule.scale = A(loss.reduced.scale * loss.reduced.weight);
    call.rule.slope = A((call.rule.loss == ElementLoss::difference ? 2 * loss.a : 1.0) * loss.reduced.factor());
    loss.finish(rg::element_losses(call));
}

Reduced reduced(int reduction, double weight, double scale) {
    if (reduction < 0 || reduction > int(Reduction::nonzero_mean)) throw nb::value_error("no such reduction");
    return {static_cast<Reduction>(reduction), weight, scale};
}

// The loss; in a program it goes to `rounded`, an element, instead.
template <class Losses, class A>
LossOutcome run_loss(double elements, int threads, const Losses& call, const Reduced& how, const View& losses,
                     const View& rounded, double a, void (*driver)(const LossCall<Losses, A>&)) {
    double result = 0;
    LossCall<Losses, A> loss{call,
                             how,
                             static_cast<double*>(losses.data()),
                             recorded_program() ? nullptr : &result,
                             static_cast<A*>(rounded.data()),
                             a,
                             1};
    run_driver<nb::handle>(elements, threads, loss, driver);
    return result;
}

// Labels are indices, or targets are given. loss: [], for the loss; None: it is only returned.
LossOutcome softmax_cross_entropy(bool f64, nb::handle logits_array, nb::handle labels_array, int64_t ignored,
                                  nb::handle targets_array, nb::handle weights_array, double weight, double smoothing,
                                  int reduction, double scale, nb::handle losses_array, nb::handle gradient_array,
                                  nb::handle loss_array, bool overlap_checked, int threads) {
    Call call;
    const Element element = element_of(f64);
    const View logits(call, logits_array, "logits", element), labels(call, labels_array, "labels", Element::i64),
        targets(call, targets_array, "labels", element), weights(call, weights_array, "weights", element),
        losses(call, losses_array, "losses", Element::f64, Access::write),
        gradient(call, gradient_array, "out", element, Access::write),
        loss(call, loss_array, "loss", element, Access::write);
    const int64_t rows = logits.extent(0), classes = logits.extent(1);
    logits.require();
    for (const View* v : {&logits, &gradient}) {
        v->check_shape({rows, classes});
        v->check_unit_stride(classes);
    }
    targets.check_contiguous({rows, classes});
    weights.check_contiguous({rows});
    losses.check_contiguous({rows});
    loss.check_shape({});
    const int64_t* at = targets.present() ? nullptr : checked_indices(call, labels, rows, classes, &ignored);
    if (!overlap_checked) call.check_overlap({{&gradient, &logits}});
    if (call.refused()) return *call.refusal();
    const auto run = [&](auto zero) {
        using A = decltype(zero);
        CrossEntropy<A> loss_call;
        loss_call.rows = rows;
        loss_call.classes = classes;
        const Matrix<const A> x = matrix<const A>(logits);
        const Matrix<A> dx = matrix<A>(gradient);
        loss_call.logits = x.data;
        loss_call.logits_row = x.row_stride;
        loss_call.labels = at;
        loss_call.ignored = ignored;
        loss_call.targets = static_cast<const A*>(targets.data());
        loss_call.weights = static_cast<const A*>(weights.data());
        loss_call.smoothing = smoothing;
        loss_call.gradient = dx.data;
        loss_call.gradient_row = dx.row_stride;
        return run_loss(double(rows) * double(classes), threads, loss_call, reduced(reduction, weight, scale), losses,
                        loss, 0, run_cross_entropy<A>);
    };
    return f64 ? run(double()) : run(float());
}

LossOutcome cosine_distance(bool f64, nb::handle y_array, nb::handle target_array, nb::handle weights_array,
                            double weight, int reduction, double scale, nb::handle losses_array,
                            nb::handle gradient_array, nb::handle loss_array, bool overlap_checked, int threads) {
    Call call;
    const Element element = element_of(f64);
    const View y(call, y_array, "y", element), target(call, target_array, "target", element),
        weights(call, weights_array, "weights", element),
        losses(call, losses_array, "losses", Element::f64, Access::write),
        gradient(call, gradient_array, "out", element, Access::write),
        loss(call, loss_array, "loss", element, Access::write);
    for (const View* v : {&y, &target}) v->require();
    for (const View* v : {&y, &target, &gradient}) v->check_contiguous({y.extent(0), y.extent(1)});
    for (const View* v : {&weights, &losses}) v->check_contiguous({y.extent(0)});
    loss.check_shape({});
    if (!overlap_checked) call.check_overlap({{&gradient, &y}, {&gradient, &target}});
    if (call.refused()) return *call.refusal();
    const auto run = [&](auto zero) {
        using A = decltype(zero);
        CosineDistance<A> loss_call;
        loss_call.rows = y.extent(0);
        loss_call.width = y.extent(1);
        loss_call.y = static_cast<const A*>(y.data());
        loss_call.target = static_cast<const A*>(target.data());
        loss_call.weights = static_cast<const A*>(weights.data());
        loss_call.gradient = static_cast<A*>(gradient.data());
        return run_loss(double(y.elements()), threads, loss_call, reduced(reduction, weight, scale), losses, loss, 0,
                        run_cosine_distance<A>);
    };
    return f64 ? run(double()) : run(float());
}

LossOutcome element_losses(bool f64, int kind, double a, double b, nb::handle y_array, nb::handle target_array,
                           nb::handle weights_array, double weight, int reduction, double scale,
                           nb::handle values_array, nb::handle gradient_array, nb::handle loss_array,
                           bool overlap_checked, int threads) {
    if (kind < 0 || kind > int(ElementLoss::sigmoid)) throw nb::value_error("no such loss");
    Call call;
    const Element element = element_of(f64);
    const View y(call, y_array, "y", element), target(call, target_array, "target", element),
        weights(call, weights_array, "weights", element), values(call, values_array, "values", element, Access::write),
        gradient(call, gradient_array, "out", element, Access::write),
        loss(call, loss_array, "loss", element, Access::write), no_losses(call, nb::none(), "losses", Element::f64);
    for (const View* v : {&y, &target}) v->require();
    for (const View* v : {&y, &target, &weights, &values, &gradient}) v->check_contiguous({y.extent(0)});
    loss.check_shape({});
    if (!overlap_checked) call.check_overlap({{&gradient, &y}, {&gradient, &target}});
    if (call.refused()) return *call.refusal();
    const auto run = [&](auto zero) {
        using A = decltype(zero);
        ElementLosses<A> loss_call;
        loss_call.count = y.extent(0);
        loss_call.y = static_cast<const A*>(y.data());
        loss_call.target = static_cast<const A*>(target.data());
        loss_call.weights = static_cast<const A*>(weights.data());
        loss_call.values = static_cast<A*>(values.data());
        loss_call.gradient = static_cast<A*>(gradient.data());
        loss_call.rule.loss = static_cast<ElementLoss>(kind);
        loss_call.rule.a = A(a);
        loss_call.rule.b = A(b);
        return run_loss(double(loss_call.count), threads, loss_call, reduced(reduction, weight, scale), no_losses, loss,
                        a, run_element_losses<A>);
    };
    return f64 ? run(double()) : run(float());
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
          nb::arg("gradient").none(), nb::arg("loss").none(), nb::arg("overlap_checked"), nb::arg("threads"),
          "The loss and its gradient.");
    m.def("cosine_distance", &cosine_distance, nb::arg("f64"), nb::arg("y"), nb::arg("target"),
          nb::arg("weights").none(), nb::arg("weight"), nb::arg("reduction"), nb::arg("scale"),
          nb::arg("losses").none(), nb::arg("gradient").none(), nb::arg("loss").none(), nb::arg("overlap_checked"),
          nb::arg("threads"), "1 - the product of rows of unit length, and the gradient.");
    m.def("element_losses", &element_losses, nb::arg("f64"), nb::arg("kind"), nb::arg("a"), nb::arg("b"), nb::arg("y"),
          nb::arg("target"), nb::arg("weights").none(), nb::arg("weight"), nb::arg("reduction"), nb::arg("scale"),
          nb::arg("values").none(), nb::arg("gradient").none(), nb::arg("loss").none(), nb::arg("overlap_checked"),
          nb::arg("threads"), "A loss of every element, and the gradient.");
}

}  // namespace rg::bind
