// Linear layers, embeddings, losses and dropout: views of matrices and of flat arrays in, drivers called.
#include "training.h"

#include <nanobind/stl/pair.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "../core/elementwise.h"
#include "../core/linear.h"
#include "../core/loss.h"
#include "../core/parallel.h"
#include "view.h"

namespace rg::bind {

namespace {

int threads_of(int threads) { return threads > 0 ? threads : rg::num_threads(); }

int64_t item_size(bool f64) { return f64 ? 8 : 4; }

// Elements that would take about as long.
template <class Call>
double product_work(const Call& call) {
    return double(call.rows) * double(call.outputs) * (1 + double(call.inputs) / 16);
}

template <class A>
Matrix<A> matrix(const View& view) {
    if (!view.present()) return {};
    constexpr int64_t size = int64_t(sizeof(A));
    // The stride of an axis without neighbours may be anything; 1 says that nothing is in the way.
    const int64_t col = view.extent(1) > 1 ? view.stride(1, size) : 1;
    const int64_t row = view.extent(0) > 1 ? view.stride(0, size) : col == 1 ? view.extent(1) : 1;
    return {static_cast<A*>(view.data()), row, col};
}

void require_axes(const View& view, int axes) {
    if (view.axes() != axes) throw nb::value_error("an array has the wrong number of axes");
}

// A result whose columns, or with `or_rows` whose rows, are neighbours.
template <class A>
void require_neighbours(const Matrix<A>& m, bool or_rows) {
    if (m.data && m.col_stride != 1 && !(or_rows && m.row_stride == 1)) {
        throw nb::value_error("the elements of a result are not neighbours");
    }
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
    require_neighbours(call.y, false);
    call.threads = threads_of(threads);
    without_lock(product_work(call), [&] { rg::linear_forward(call); });
}

Outcome linear_forward(bool f64, nb::handle x_array, nb::handle w_array, nb::handle b_array, nb::handle y_array,
                       bool overlap_checked, int threads) {
    const View x(x_array, "x", Access::read), w(w_array, "w", Access::read), b(b_array, "b", Access::read),
        y(y_array, "out", Access::write);
    require_axes(x, 2);
    require_axes(w, 2);
    const int64_t size = item_size(f64);
    x.check_elements({x.extent(0), x.extent(1)}, size);
    w.check_elements({w.extent(0), x.extent(1)}, size);
    b.check_contiguous({w.extent(0)}, size);
    y.check_elements({x.extent(0), w.extent(0)}, size);
    if (!y.present()) throw nb::value_error("out is missing");
    if (!overlap_checked && (y.overlaps(x) || y.overlaps(w) || y.overlaps(b))) return Outcome::overlap;
    f64 ? run_linear_forward<double>(x, w, b, y, threads) : run_linear_forward<float>(x, w, b, y, threads);
    return Outcome::done;
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
    require_neighbours(call.dx, false);
    require_neighbours(call.dw, true);
    call.db = static_cast<A*>(db.data());
    call.threads = threads_of(threads);
    without_lock(product_work(call), [&] { rg::linear_backward(call); });
}

Outcome linear_backward(bool f64, nb::handle dy_array, nb::handle x_array, nb::handle w_array, nb::handle dx_array,
                        nb::handle dw_array, nb::handle db_array, bool accumulate, bool overlap_checked, int threads) {
    const View dy(dy_array, "dy", Access::read), x(x_array, "x", Access::read), w(w_array, "w", Access::read),
        dx(dx_array, "dx", Access::write), dw(dw_array, "dw", Access::write), db(db_array, "db", Access::write);
    require_axes(dy, 2);
    require_axes(x, 2);
    require_axes(w, 2);
    const int64_t size = item_size(f64), rows = dy.extent(0), outputs = dy.extent(1), inputs = x.extent(1);
    dy.check_elements({rows, outputs}, size);
    for (const View* v : {&x, &dx}) v->check_elements({rows, inputs}, size);
    for (const View* v : {&w, &dw}) v->check_elements({outputs, inputs}, size);
    db.check_contiguous({outputs}, size);
    if (!overlap_checked) {
        for (const View* out : {&dx, &dw, &db}) {
            for (const View* in : {&dy, &x, &w}) {
                if (out->overlaps(*in)) return Outcome::overlap;
            }
        }
        if (dx.overlaps(dw) || dx.overlaps(db) || dw.overlaps(db)) return Outcome::overlap;
    }
    f64 ? run_linear_backward<double>(dy, x, w, dx, dw, db, accumulate, threads)
        : run_linear_backward<float>(dy, x, w, dx, dw, db, accumulate, threads);
    return Outcome::done;
}

// Whether all of them are in [0, limit), or equal to `ignored` where there is such a number; `kept` counts the others.
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

const int64_t* indices_of(const View& view, int64_t count) {
    view.check_contiguous({count}, sizeof(int64_t));
    return static_cast<const int64_t*>(view.data());
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
    const View indices(indices_array, "indices", Access::read), table(table_array, "table", Access::read),
        y(y_array, "out", Access::write);
    require_axes(indices, 1);
    require_axes(table, 2);
    const int64_t positions = indices.extent(0), rows = table.extent(0), width = table.extent(1);
    table.check_elements({rows, width}, item_size(f64));
    y.check_contiguous({positions, width}, item_size(f64));
    const int64_t* at = indices_of(indices, positions);
    if (!y.present()) throw nb::value_error("out is missing");
    if (!in_range(at, positions, rows, nullptr)) return Outcome::out_of_range;
    if (!overlap_checked && (y.overlaps(table) || y.overlaps(indices))) return Outcome::overlap;
    f64 ? run_embedding_forward<double>(at, positions, table, y, threads)
        : run_embedding_forward<float>(at, positions, table, y, threads);
    return Outcome::done;
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
    const View dy(dy_array, "dy", Access::read), indices(indices_array, "indices", Access::read),
        dtable(dtable_array, "out", Access::write);
    require_axes(dy, 2);
    require_axes(indices, 1);
    require_axes(dtable, 2);
    const int64_t positions = dy.extent(0), rows = dtable.extent(0), width = dy.extent(1);
    dy.check_contiguous({positions, width}, item_size(f64));
    dtable.check_elements({rows, width}, item_size(f64));
    const int64_t* at = indices_of(indices, positions);
    if (!in_range(at, positions, rows, nullptr)) return Outcome::out_of_range;
    if (!overlap_checked && (dtable.overlaps(dy) || dtable.overlaps(indices))) return Outcome::overlap;
    f64 ? run_embedding_backward<double>(dy, at, dtable, accumulate, threads)
        : run_embedding_backward<float>(dy, at, dtable, accumulate, threads);
    return Outcome::done;
}

template <class A>
double run_cross_entropy(const View& logits, const int64_t* labels, int64_t ignored, double smoothing, double weight,
                         double* losses, const View& gradient, int threads) {
    CrossEntropy<A> call;
    call.rows = logits.extent(0);
    call.classes = logits.extent(1);
    const Matrix<const A> x = matrix<const A>(logits);
    const Matrix<A> dx = matrix<A>(gradient);
    if (x.col_stride != 1 || (dx.data && dx.col_stride != 1)) throw nb::value_error("the classes are not neighbours");
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

// The loss is the sum, or with `mean` the mean of those that are not ignored.
std::pair<Outcome, double> softmax_cross_entropy(bool f64, nb::handle logits_array, nb::handle labels_array,
                                                 int64_t ignored, double smoothing, bool mean, nb::handle losses_array,
                                                 nb::handle gradient_array, bool overlap_checked, int threads) {
    const View logits(logits_array, "logits", Access::read), labels(labels_array, "labels", Access::read),
        losses(losses_array, "losses", Access::write), gradient(gradient_array, "out", Access::write);
    require_axes(logits, 2);
    require_axes(labels, 1);
    const int64_t rows = logits.extent(0), classes = logits.extent(1);
    for (const View* v : {&logits, &gradient}) v->check_elements({rows, classes}, item_size(f64));
    losses.check_contiguous({rows}, sizeof(double));
    const int64_t* at = indices_of(labels, rows);
    int64_t kept = 0;
    if (!in_range(at, rows, classes, &ignored, &kept)) return {Outcome::out_of_range, 0.0};
    if (!overlap_checked && gradient.present()) {
        if (gradient.overlaps(labels)) return {Outcome::overlap, 0.0};
        if (gradient.overlaps(logits) && !gradient.same_elements(logits)) return {Outcome::overlap, 0.0};
    }
    std::vector<double> own(losses.present() ? 0 : size_t(rows));
    double* each = losses.present() ? static_cast<double*>(losses.data()) : own.data();
    const double weight = mean && kept > 0 ? 1.0 / double(kept) : 1.0;
    const double sum = f64 ? run_cross_entropy<double>(logits, at, ignored, smoothing, weight, each, gradient, threads)
                           : run_cross_entropy<float>(logits, at, ignored, smoothing, weight, each, gradient, threads);
    if (!mean) return {Outcome::done, sum};
    return {Outcome::done, kept ? sum / double(kept) : std::numeric_limits<double>::quiet_NaN()};
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

std::pair<Outcome, double> difference_loss(bool f64, nb::handle y_array, nb::handle target_array, double square,
                                           double delta, double slope, nb::handle values_array,
                                           nb::handle gradient_array, bool overlap_checked, int threads) {
    const View y(y_array, "y", Access::read), target(target_array, "target", Access::read),
        values(values_array, "values", Access::write), gradient(gradient_array, "out", Access::write);
    require_axes(y, 1);
    for (const View* v : {&y, &target, &values, &gradient}) v->check_contiguous({y.extent(0)}, item_size(f64));
    if (!target.present()) throw nb::value_error("target is missing");
    if (!overlap_checked) {
        for (const View* in : {&y, &target}) {
            if (gradient.overlaps(*in) && !gradient.same_elements(*in)) return {Outcome::overlap, 0.0};
        }
    }
    return {Outcome::done,
            f64 ? run_difference_loss<double>(y, target, square, delta, slope, values, gradient, threads)
                : run_difference_loss<float>(y, target, square, delta, slope, values, gradient, threads)};
}

template <class A>
void run_dropout(const View& x, double rate, uint64_t seed, const View& y, int threads) {
    DropoutCall<A> call;
    call.count = x.extent(0);
    call.x = static_cast<const A*>(x.data());
    call.rate = rate;
    call.seed = seed;
    call.y = static_cast<A*>(y.data());
    call.threads = threads_of(threads);
    without_lock(double(call.count), [&] { rg::dropout(call); });
}

Outcome dropout(bool f64, nb::handle x_array, double rate, uint64_t seed, nb::handle y_array, bool overlap_checked,
                int threads) {
    const View x(x_array, "x", Access::read), y(y_array, "out", Access::write);
    require_axes(x, 1);
    for (const View* v : {&x, &y}) v->check_contiguous({x.extent(0)}, item_size(f64));
    if (!y.present()) throw nb::value_error("out is missing");
    if (!(rate >= 0 && rate < 1)) throw nb::value_error("rate is out of range");
    if (!overlap_checked && y.overlaps(x) && !y.same_elements(x)) return Outcome::overlap;
    f64 ? run_dropout<double>(x, rate, seed, y, threads) : run_dropout<float>(x, rate, seed, y, threads);
    return Outcome::done;
}

}  // namespace

void bind_training(nb::module_& m) {
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
    m.def("dropout", &dropout, nb::arg("f64"), nb::arg("x"), nb::arg("rate"), nb::arg("seed"), nb::arg("y"),
          nb::arg("overlap_checked"), nb::arg("threads"), "y = x * mask / (1 - rate)");
}

}  // namespace rg::bind
