// Linear layers, embeddings and losses: makes views of matrices and flat arrays, calls the drivers.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>

#include <limits>
#include <variant>
#include <vector>

#include "../core/dense/linear.h"
#include "../core/dense/loss.h"
#include "bind.h"
#include "view.h"

namespace rg::bind {

namespace {

// The loss, or why the call was refused.
using LossOutcome = std::variant<double, Refusal>;

// The work in terms of elements, for without_lock.
template <class Call>
double product_work(const Call& call) {
    return double(call.rows) * double(call.outputs) * (1 + double(call.inputs) / 16);
}

template <class A>
Matrix<A> matrix(const View& view) {
    if (!view.present()) return {};
    // The stride of an axis of extent 1 is arbitrary; 1 marks it as contiguous.
    const int64_t col = view.extent(1) > 1 ? view.stride(1) : 1;
    const int64_t row = view.extent(0) > 1 ? view.stride(0) : col == 1 ? view.extent(1) : 1;
    return {static_cast<A*>(view.data()), row, col};
}

// Whether the engine can write to a matrix: its rows, or with `or_columns` its columns, are contiguous.
void check_writable(Call& call, const View& view, bool or_columns = false) {
    const bool rows = view.extent(1) <= 1 || view.stride(1) == 1;
    const bool columns = or_columns && (view.extent(0) <= 1 || view.stride(0) == 1);
    if (view.present() && !rows && !columns) call.refuse(Reason::layout, view.name());
}

template <class A>
void run_linear_forward(const View& x, const View& w, const View& b, const View& y, int threads) {
    LinearForward<A> call;
    call.rows = x.extent(0);
    call.inputs = x.extent(1);
    call.outputs = w.extent(0);
    call.x = matrix<const A>(x);
    call.w = matrix<const A>(w);
    call.b = static_cast<const A*>(b.data());
    call.y = matrix<A>(y);
    call.threads = threads_of(threads);
    without_lock(product_work(call), [&] { rg::linear_forward(call); });
}

Outcome linear_forward(bool f64, nb::handle x_array, nb::handle w_array, nb::handle b_array, nb::handle y_array,
                       bool overlap_checked, int threads) {
    Call call;
    const Element element = element_of(f64);
    const View x(call, x_array, "x", element), w(call, w_array, "w", element), b(call, b_array, "b", element),
        y(call, y_array, "out", element, Access::write);
    for (const View* v : {&x, &w, &y}) v->require().check_axes(2);
    w.check_shape({w.extent(0), x.extent(1)});
    b.check_contiguous({w.extent(0)});
    y.check_shape({x.extent(0), w.extent(0)});
    check_writable(call, y);
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    f64 ? run_linear_forward<double>(x, w, b, y, threads) : run_linear_forward<float>(x, w, b, y, threads);
    return {};
}

template <class A>
void run_linear_backward(const View& dy, const View& x, const View& w, const View& dx, const View& dw, const View& db,
                         bool accumulate, int threads) {
    LinearBackward<A> call;
    call.rows = dy.extent(0);
    call.inputs = x.extent(1);
    call.outputs = dy.extent(1);
    call.dy = matrix<const A>(dy);
    call.x = matrix<const A>(x);
    call.w = matrix<const A>(w);
    call.accumulate = accumulate;
    call.dx = matrix<A>(dx);
    call.dw = matrix<A>(dw);
    call.db = static_cast<A*>(db.data());
    call.threads = threads_of(threads);
    without_lock(product_work(call), [&] { rg::linear_backward(call); });
}

Outcome linear_backward(bool f64, nb::handle dy_array, nb::handle x_array, nb::handle w_array, nb::handle dx_array,
                        nb::handle dw_array, nb::handle db_array, bool accumulate, bool overlap_checked, int threads) {
    Call call;
    const Element element = element_of(f64);
    const View dy(call, dy_array, "dy", element), x(call, x_array, "x", element), w(call, w_array, "w", element),
        dx(call, dx_array, "dx", element, Access::write), dw(call, dw_array, "dw", element, Access::write),
        db(call, db_array, "db", element, Access::write);
    const int64_t rows = dy.extent(0), outputs = dy.extent(1), inputs = x.extent(1);
    for (const View* v : {&dy, &x, &w}) v->require().check_axes(2);
    for (const View* v : {&x, &dx}) v->check_shape({rows, inputs});
    for (const View* v : {&w, &dw}) v->check_shape({outputs, inputs});
    db.check_contiguous({outputs});
    check_writable(call, dx);
    check_writable(call, dw, true);
    if (!overlap_checked) call.check_overlap();
    if (call.refused()) return call.refusal();
    f64 ? run_linear_backward<double>(dy, x, w, dx, dw, db, accumulate, threads)
        : run_linear_backward<float>(dy, x, w, dx, dw, db, accumulate, threads);
    return {};
}

// Whether all indices are in [0, limit) or equal to `ignored` (if given). `kept` counts those that are not ignored.
bool in_range(const int64_t* indices, int64_t count, int64_t limit, const int64_t* ignored, int64_t* kept = nullptr) {
    int64_t good = 0, skipped = 0;
    for (int64_t i = 0; i < count; ++i) {
        const bool skip = ignored && indices[i] == *ignored;
        skipped += skip;
        good += skip || (indices[i] >= 0 && indices[i] < limit);
    }
    if (kept) *kept = count - skipped;
    return good == count;
}

// Checks that the indices are contiguous, [count], and all in range.
const int64_t* checked_indices(Call& call, const View& view, int64_t count, int64_t limit,
                               const int64_t* ignored = nullptr, int64_t* kept = nullptr) {
    view.require().check_contiguous({count});
    const int64_t* indices = static_cast<const int64_t*>(view.data());
    if (!call.refused()) view.check_index(in_range(indices, count, limit, ignored, kept));
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

template <class A>
double run_cross_entropy(const View& logits, const int64_t* labels, int64_t ignored, double smoothing, double weight,
                         double* losses, const View& gradient, int threads) {
    CrossEntropy<A> call;
    call.rows = logits.extent(0);
    call.classes = logits.extent(1);
    const Matrix<const A> x = matrix<const A>(logits);
    const Matrix<A> dx = matrix<A>(gradient);
    call.logits = x.data;
    call.logits_row = x.row_stride;
    call.labels = labels;
    call.ignored = ignored;
    call.smoothing = smoothing;
    call.weight = weight;
    call.losses = losses;
    call.gradient = dx.data;
    call.gradient_row = dx.row_stride;
    call.threads = threads_of(threads);
    double sum = 0;
    without_lock(double(call.rows) * double(call.classes), [&] { sum = rg::softmax_cross_entropy(call); });
    return sum;
}

// The loss is the sum, or with `mean` the mean over the rows that are not ignored.
LossOutcome softmax_cross_entropy(bool f64, nb::handle logits_array, nb::handle labels_array, int64_t ignored,
                                  double smoothing, bool mean, nb::handle losses_array, nb::handle gradient_array,
                                  bool overlap_checked, int threads) {
    Call call;
    const View logits(call, logits_array, "logits", element_of(f64)),
        labels(call, labels_array, "labels", Element::i64),
        losses(call, losses_array, "losses", Element::f64, Access::write),
        gradient(call, gradient_array, "out", element_of(f64), Access::write);
    const int64_t rows = logits.extent(0), classes = logits.extent(1);
    logits.require();
    for (const View* v : {&logits, &gradient}) {
        v->check_shape({rows, classes});
        v->check_unit_stride(classes);
    }
    losses.check_contiguous({rows});
    int64_t kept = 0;
    const int64_t* at = checked_indices(call, labels, rows, classes, &ignored, &kept);
    if (!overlap_checked) call.check_overlap({{&gradient, &logits}});
    if (call.refused()) return *call.refusal();
    std::vector<double> own(losses.present() ? 0 : size_t(rows));
    double* each = losses.present() ? static_cast<double*>(losses.data()) : own.data();
    const double weight = mean && kept > 0 ? 1.0 / double(kept) : 1.0;
    const double sum = f64 ? run_cross_entropy<double>(logits, at, ignored, smoothing, weight, each, gradient, threads)
                           : run_cross_entropy<float>(logits, at, ignored, smoothing, weight, each, gradient, threads);
    if (!mean) return sum;
    return kept ? sum / double(kept) : std::numeric_limits<double>::quiet_NaN();
}

template <class A>
double run_difference_loss(const View& y, const View& target, double square, double delta, double slope,
                           const View& values, const View& gradient, int threads) {
    DifferenceLoss<A> call;
    call.count = y.extent(0);
    call.y = static_cast<const A*>(y.data());
    call.target = static_cast<const A*>(target.data());
    call.square = square;
    call.delta = delta;
    call.slope = slope;
    call.values = static_cast<A*>(values.data());
    call.gradient = static_cast<A*>(gradient.data());
    call.threads = threads_of(threads);
    double sum = 0;
    without_lock(double(call.count), [&] { sum = rg::difference_loss(call); });
    return sum;
}

LossOutcome difference_loss(bool f64, nb::handle y_array, nb::handle target_array, double square, double delta,
                            double slope, nb::handle values_array, nb::handle gradient_array, bool overlap_checked,
                            int threads) {
    Call call;
    const Element element = element_of(f64);
    const View y(call, y_array, "y", element), target(call, target_array, "target", element),
        values(call, values_array, "values", element, Access::write),
        gradient(call, gradient_array, "out", element, Access::write);
    for (const View* v : {&y, &target}) v->require();
    for (const View* v : {&y, &target, &values, &gradient}) v->check_contiguous({y.extent(0)});
    if (!overlap_checked) call.check_overlap({{&gradient, &y}, {&gradient, &target}});
    if (call.refused()) return *call.refusal();
    return f64 ? run_difference_loss<double>(y, target, square, delta, slope, values, gradient, threads)
               : run_difference_loss<float>(y, target, square, delta, slope, values, gradient, threads);
}

}  // namespace

void bind_dense(nb::module_& m) {
    m.def("linear_forward", &linear_forward, nb::arg("f64"), nb::arg("x"), nb::arg("w"), nb::arg("b").none(),
          nb::arg("y"), nb::arg("overlap_checked"), nb::arg("threads"), "y = x w' + b");
    m.def("linear_backward", &linear_backward, nb::arg("f64"), nb::arg("dy"), nb::arg("x"), nb::arg("w"),
          nb::arg("dx").none(), nb::arg("dw").none(), nb::arg("db").none(), nb::arg("accumulate"),
          nb::arg("overlap_checked"), nb::arg("threads"), "dx = dy w, dw = dy' x, db = the sum of dy's rows.");
    m.def("embedding_forward", &embedding_forward, nb::arg("f64"), nb::arg("indices"), nb::arg("table"), nb::arg("y"),
          nb::arg("overlap_checked"), nb::arg("threads"), "y[p] = table[indices[p]]");
    m.def("embedding_backward", &embedding_backward, nb::arg("f64"), nb::arg("dy"), nb::arg("indices"),
          nb::arg("dtable"), nb::arg("accumulate"), nb::arg("overlap_checked"), nb::arg("threads"),
          "dtable[indices[p]] += dy[p], in the order of p.");
    m.def("softmax_cross_entropy", &softmax_cross_entropy, nb::arg("f64"), nb::arg("logits"), nb::arg("labels"),
          nb::arg("ignored"), nb::arg("smoothing"), nb::arg("mean"), nb::arg("losses").none(),
          nb::arg("gradient").none(), nb::arg("overlap_checked"), nb::arg("threads"), "The loss and its gradient.");
    m.def("difference_loss", &difference_loss, nb::arg("f64"), nb::arg("y"), nb::arg("target"), nb::arg("square"),
          nb::arg("delta"), nb::arg("slope"), nb::arg("values").none(), nb::arg("gradient").none(),
          nb::arg("overlap_checked"), nb::arg("threads"), "The sum of the losses of y - target, and the gradient.");
}

}  // namespace rg::bind
