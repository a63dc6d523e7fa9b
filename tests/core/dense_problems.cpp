// Problems of dense layers, losses, pooling and convolutions.
#include <cmath>
#include <utility>

#include "../../src/core/conv/conv.h"
#include "../../src/core/dense/elementwise.h"
#include "../../src/core/dense/linear.h"
#include "../../src/core/dense/loss.h"
#include "../../src/core/pooling/pooling.h"
#include "storage.h"

namespace problems {
namespace {

// ---- linear layers, embeddings, losses, dropout
// ----------------------------------------------------------------------

template <class A>
std::vector<Output> linear(int64_t rows, int64_t inputs, int64_t outputs, bool transposed, DType dtype, int threads) {
    Random random(uint64_t(rows * 7 + inputs * 3 + outputs));
    const Block x(dtype, random.take(rows * inputs), 1), w(dtype, random.take(outputs * inputs), 2),
        b(dtype, random.take(outputs), 0), dy(dtype, random.take(rows * outputs), 3);
    const Block y(dtype, rows * outputs, 1), dx(dtype, Values(size_t(rows * inputs)), 2),
        dw(dtype, Values(size_t(outputs * inputs)), 1), db(dtype, Values(size_t(outputs)), 0);
    rg::LinearForward<A> forward;
    forward.rows = rows;
    forward.inputs = inputs;
    forward.outputs = outputs;
    forward.x = transposed ? rg::Matrix<const A>{x.as<A>(), 1, rows} : rg::Matrix<const A>{x.as<A>(), inputs, 1};
    forward.w = transposed ? rg::Matrix<const A>{w.as<A>(), 1, outputs} : rg::Matrix<const A>{w.as<A>(), inputs, 1};
    forward.b = b.as<A>();
    forward.threads = threads;
    forward.y = {y.as<A>(), outputs, 1};
    rg::linear_forward(forward);
    rg::LinearBackward<A> backward;
    backward.rows = rows;
    backward.inputs = inputs;
    backward.outputs = outputs;
    backward.dy = {dy.as<A>(), outputs, 1};
    backward.x = forward.x;
    backward.w = forward.w;
    backward.threads = threads;
    backward.dx = {dx.as<A>(), inputs, 1};
    backward.dw = transposed ? rg::Matrix<A>{dw.as<A>(), 1, outputs} : rg::Matrix<A>{dw.as<A>(), inputs, 1};
    backward.db = db.as<A>();
    rg::linear_backward(backward);
    return {y.output("y"), dx.output("dx"), dw.output("dw"), db.output("db")};
}

template <class A>
std::vector<Output> embedding(int64_t positions, int64_t width, DType dtype, int threads) {
    Random random(uint64_t(positions + width));
    const int64_t rows = 13;
    std::vector<int64_t> indices;
    for (int64_t i = 0; i < positions; ++i) indices.push_back(random.below(rows));
    const Block table(dtype, random.take(rows * width), 1), dy(dtype, random.take(positions * width), 0);
    const Block y(dtype, positions * width, 1), dtable(dtype, Values(size_t(rows * width)), 2);
    rg::EmbeddingForward<A> forward;
    forward.positions = positions;
    forward.width = width;
    forward.indices = indices.data();
    forward.table = {table.as<A>(), width, 1};
    forward.threads = threads;
    forward.y = y.as<A>();
    rg::embedding_forward(forward);
    rg::EmbeddingBackward<A> backward;
    backward.positions = positions;
    backward.width = width;
    backward.table_rows = rows;
    backward.indices = indices.data();
    backward.dy = dy.as<A>();
    backward.threads = threads;
    backward.dtable = {dtable.as<A>(), width, 1};
    rg::embedding_backward(backward);
    return {y.output("y"), dtable.output("dtable")};
}

template <class A>
std::vector<Output> cross_entropy(int64_t rows, int64_t classes, double smoothing, DType dtype, int threads) {
    Random random(uint64_t(rows + classes));
    std::vector<int64_t> labels;
    for (int64_t i = 0; i < rows; ++i) labels.push_back(i % 5 == 4 ? -100 : random.below(classes));
    const Block logits(dtype, random.take(rows * classes), 1), gradient(dtype, rows * classes, 2);
    const Block losses(DType::f64, rows, 0), total(DType::f64, 1, 0);
    rg::CrossEntropy<A> call;
    call.rows = rows;
    call.classes = classes;
    call.logits = logits.as<A>();
    call.logits_row = classes;
    call.labels = labels.data();
    call.ignored = -100;
    call.smoothing = smoothing;
    call.weight = 0.75;
    call.threads = threads;
    call.losses = losses.as<double>();
    call.gradient = gradient.as<A>();
    call.gradient_row = classes;
    *total.as<double>() = rg::softmax_cross_entropy(call);
    return {gradient.output("gradient"), losses.output("losses"), total.output("total")};
}

template <class A>
std::vector<Output> difference(int64_t count, double delta, DType dtype, int threads) {
    Random random(static_cast<uint64_t>(count));
    const Block y(dtype, random.take(count), 1), target(dtype, random.take(count), 3);
    const Block values(dtype, count, 2), gradient(dtype, count, 1), total(DType::f64, 1, 0);
    rg::ElementLosses<A> call;
    call.count = count;
    call.rule.a = A(0.5);
    call.rule.b = A(delta);
    call.rule.slope = A(0.3);
    call.y = y.as<A>();
    call.target = target.as<A>();
    call.threads = threads;
    call.values = values.as<A>();
    call.gradient = gradient.as<A>();
    *total.as<double>() = rg::element_losses(call);
    return {values.output("values"), gradient.output("gradient"), total.output("total")};
}

// Weighted; y and target are from 0 to 1, as the losses of probabilities need them.
template <class A>
std::vector<Output> element_losses(int64_t count, rg::ElementLoss loss, DType dtype, int threads) {
    Random random(static_cast<uint64_t>(count) + 1);
    Values between[2];
    for (Values& values : between) {
        for (const double v : random.take(count)) values.push_back(std::fmin(std::fabs(v), 1.0));
    }
    const Block y(dtype, between[0], 1), target(dtype, between[1], 3), weights(dtype, random.take(count), 2);
    const Block values(dtype, count, 2), gradient(dtype, count, 1), total(DType::f64, 1, 0);
    rg::ElementLosses<A> call;
    call.count = count;
    call.rule.loss = loss;
    call.rule.a = loss == rg::ElementLoss::sigmoid ? A(0.9) : A(1e-7);
    call.rule.b = A(0.05);
    call.rule.scale = A(0.7);
    call.rule.slope = A(0.3);
    call.y = y.as<A>();
    call.target = target.as<A>();
    call.weights = weights.as<A>();
    call.threads = threads;
    call.values = values.as<A>();
    call.gradient = gradient.as<A>();
    *total.as<double>() = rg::element_losses(call);
    return {values.output("values"), gradient.output("gradient"), total.output("total")};
}

template <class A>
std::vector<Output> soft_cross_entropy(int64_t rows, int64_t classes, double smoothing, DType dtype, int threads) {
    Random random(uint64_t(rows + classes) + 2);
    const Block logits(dtype, random.take(rows * classes), 1), targets(dtype, random.take(rows * classes), 3),
        weights(dtype, random.take(rows), 1), gradient(dtype, rows * classes, 2);
    const Block losses(DType::f64, rows, 0), total(DType::f64, 1, 0);
    rg::CrossEntropy<A> call;
    call.rows = rows;
    call.classes = classes;
    call.logits = logits.as<A>();
    call.logits_row = classes;
    call.targets = targets.as<A>();
    call.weights = weights.as<A>();
    call.smoothing = smoothing;
    call.threads = threads;
    call.losses = losses.as<double>();
    call.gradient = gradient.as<A>();
    call.gradient_row = classes;
    *total.as<double>() = rg::softmax_cross_entropy(call);
    return {gradient.output("gradient"), losses.output("losses"), total.output("total")};
}

template <class A>
std::vector<Output> cosine(int64_t rows, int64_t width, DType dtype, int threads) {
    Random random(uint64_t(rows + width) + 3);
    const Block y(dtype, random.take(rows * width), 1), target(dtype, random.take(rows * width), 3),
        gradient(dtype, rows * width, 2);
    const Block losses(DType::f64, rows, 0), total(DType::f64, 1, 0);
    rg::CosineDistance<A> call;
    call.rows = rows;
    call.width = width;
    call.y = y.as<A>();
    call.target = target.as<A>();
    call.weight = 0.75;
    call.threads = threads;
    call.losses = losses.as<double>();
    call.gradient = gradient.as<A>();
    *total.as<double>() = rg::cosine_distance(call);
    return {gradient.output("gradient"), losses.output("losses"), total.output("total")};
}

template <class A>
std::vector<Output> dropout(int64_t count, DType dtype, int threads) {
    Random random(static_cast<uint64_t>(count));
    const Block x(dtype, random.take(count), 1), y(dtype, count, 2);
    rg::DropoutCall<A> call;
    call.count = count;
    call.x = x.as<A>();
    call.rate = 0.5;
    call.seed = 5;
    call.threads = threads;
    call.y = y.as<A>();
    rg::dropout(call);
    return {y.output("y")};
}

// Every pooling and its gradient, of 2 samples with windows of 3 x 3.
template <class A>
std::vector<Output> pooling(int64_t channels, int64_t width, int64_t stride, bool by_channels, DType dtype,
                            int threads) {
    const int64_t samples = 2, height = 5, rows = (height + 1) / 2, cols = (width - 1) / stride + 1;
    const int64_t inputs = samples * channels * height * width, outputs = samples * channels * rows * cols;
    Random random(uint64_t(channels * 11 + width * 3 + stride));
    const Block x(dtype, random.take(inputs), 1), dy(dtype, random.take(outputs), 2), positions(DType::f64, outputs, 0);
    std::vector<int32_t> at(static_cast<size_t>(outputs));
    rg::PoolShape shape = {{height, width}, {rows, cols}, {3, 3}, {2, stride}, {1, 1}, {1, 1}, false};
    const auto images = [&](auto* data, int64_t h, int64_t w) {
        using T = std::remove_pointer_t<decltype(data)>;
        return by_channels ? rg::Images<T>{data, channels * h * w, 1, w * channels, channels}
                           : rg::Images<T>{data, channels * h * w, h * w, w, 1};
    };
    const auto planes = [&](auto* data, int64_t pixels) {
        using T = std::remove_pointer_t<decltype(data)>;
        return by_channels ? rg::Planes<T>{data, channels * pixels, 1, channels}
                           : rg::Planes<T>{data, channels * pixels, pixels, 1};
    };
    std::vector<Output> found;
    for (const rg::PoolKind kind : {rg::PoolKind::max, rg::PoolKind::average, rg::PoolKind::l2}) {
        const Block y(dtype, outputs, 1), dx(dtype, Values(size_t(inputs), 0.5), 3);
        rg::PoolForward<A> forward;
        forward.kind = kind;
        forward.shape = shape;
        forward.samples = samples;
        forward.channels = channels;
        forward.by_channels = by_channels;
        forward.x = images(static_cast<const A*>(x.as<A>()), height, width);
        forward.threads = threads;
        forward.y = images(y.as<A>(), rows, cols);
        if (kind == rg::PoolKind::max) forward.indices = images(at.data(), rows, cols);
        rg::pool_forward(forward);
        if (kind == rg::PoolKind::max) {
            for (const rg::IndexedKind direction :
                 {rg::IndexedKind::add, rg::IndexedKind::assign, rg::IndexedKind::pick}) {
                const Block whole(dtype, inputs, 1), part(dtype, random.take(outputs), 2);
                const bool picks = direction == rg::IndexedKind::pick;
                rg::IndexedPlanes<A> indexed;
                indexed.kind = direction;
                indexed.samples = samples;
                indexed.channels = channels;
                indexed.parts = rows * cols;
                indexed.pixels = height * width;
                indexed.by_channels = by_channels;
                indexed.indices = planes(static_cast<const int32_t*>(at.data()), rows * cols);
                indexed.threads = threads;
                indexed.part = planes(part.template as<A>(), rows * cols);
                indexed.whole = planes(picks ? x.as<A>() : whole.template as<A>(), height * width);
                rg::indexed_planes(indexed);
                found.push_back(picks ? part.output("picked") : whole.output("placed"));
            }
            for (int64_t i = 0; i < outputs; ++i) positions.as<double>()[i] = at[size_t(i)];
        } else {
            rg::PoolBackward<A> backward;
            backward.kind = kind;
            backward.shape = shape;
            backward.samples = samples;
            backward.channels = channels;
            backward.by_channels = by_channels;
            backward.dy = images(static_cast<const A*>(dy.as<A>()), rows, cols);
            backward.x = forward.x;
            backward.y = images(static_cast<const A*>(y.as<A>()), rows, cols);
            backward.accumulate = kind == rg::PoolKind::l2;
            backward.threads = threads;
            backward.dx = images(dx.as<A>(), height, width);
            rg::pool_backward(backward);
            found.push_back(dx.output("dx"));
        }
        found.push_back(y.output("y"));
    }
    found.push_back(positions.output("positions"));
    return found;
}

#define RG_EITHER(function, ...) \
    (dtype == DType::f64 ? function<double>(__VA_ARGS__, dtype, threads) : function<float>(__VA_ARGS__, dtype, threads))

}  // namespace

void add_dense(std::vector<Problem>& problems) {
    for (const int64_t rows : {1, 2, 3, 5, 6, 7, 13, 15, 64}) {
        for (const int64_t outputs : {1, 7, 16, 33, 80}) {
            for (const bool transposed : {false, true}) {
                const int64_t inputs = rows + outputs / 2;
                problems.push_back({"linear " + std::to_string(rows) + "x" + std::to_string(inputs) + "x" +
                                        std::to_string(outputs) + (transposed ? " transposed" : ""),
                                    kWideTypes, 32, [=](DType dtype, int threads) {
                                        return RG_EITHER(linear, rows, inputs, outputs, transposed);
                                    }});
            }
        }
    }
    problems.push_back({"linear 300x130x200", kWideTypes, 64,
                        [](DType dtype, int threads) { return RG_EITHER(linear, 300, 130, 200, false); }});
    for (const int64_t width : {1, 3, 8, 17, 100}) {
        problems.push_back({"embedding of width " + std::to_string(width), kWideTypes, 0,
                            [=](DType dtype, int threads) { return RG_EITHER(embedding, 300, width); }});
    }
    for (const int64_t width : {1, 2, 3, 7, 15, 16, 17, 31, 33, 34, 67}) {
        for (const int64_t stride : {1, 2, 3}) {
            for (const bool by_channels : {false, true}) {
                const int64_t channels = by_channels ? width : 3, columns = by_channels ? 7 : width;
                problems.push_back({"pooling " + std::to_string(channels) + "x" + std::to_string(columns) + " stride " +
                                        std::to_string(stride) + (by_channels ? " by channels" : ""),
                                    kWideTypes, 16, [=](DType dtype, int threads) {
                                        return RG_EITHER(pooling, channels, columns, stride, by_channels);
                                    }});
            }
        }
    }
    for (const int64_t classes : {1, 2, 3, 7, 8, 9, 17, 100, 1031}) {
        problems.push_back({"cross entropy of " + std::to_string(classes), kWideTypes, 16,
                            [=](DType dtype, int threads) { return RG_EITHER(cross_entropy, 23, classes, 0.1); }});
        problems.push_back({"soft cross entropy of " + std::to_string(classes), kWideTypes, 64,
                            [=](DType dtype, int threads) { return RG_EITHER(soft_cross_entropy, 23, classes, 0.1); }});
        problems.push_back({"cosine distance of " + std::to_string(classes), kWideTypes, 64,
                            [=](DType dtype, int threads) { return RG_EITHER(cosine, 23, classes); }});
    }
    const std::pair<const char*, rg::ElementLoss> weighted[] = {{"absolute errors", rg::ElementLoss::absolute},
                                                                {"hinges", rg::ElementLoss::hinge},
                                                                {"log losses", rg::ElementLoss::log},
                                                                {"sigmoid cross entropies", rg::ElementLoss::sigmoid}};
    for (const auto& [name, loss] : weighted) {
        for (const int64_t count : {1, 7, 16, 33, 10007}) {
            const double units = 64 + double(count) / 32;
            problems.push_back(
                {std::string(name) + " of " + std::to_string(count), kWideTypes, units,
                 [=, which = loss](DType dtype, int threads) { return RG_EITHER(element_losses, count, which); }});
        }
    }
    for (const int64_t count : {1, 7, 16, 33, 10007}) {
        const double units = 16 + double(count) / 32;  // the sum of the values is one chain
        problems.push_back({"squares of " + std::to_string(count), kWideTypes, units,
                            [=](DType dtype, int threads) { return RG_EITHER(difference, count, INFINITY); }});
        problems.push_back({"huber of " + std::to_string(count), kWideTypes, units,
                            [=](DType dtype, int threads) { return RG_EITHER(difference, count, 0.7); }});
        problems.push_back({"dropout of " + std::to_string(count), kWideTypes, 0,
                            [=](DType dtype, int threads) { return RG_EITHER(dropout, count); }});
    }
}

namespace {

// ---- convolutions ---------------------------------------------------------------------------------------------------

struct ConvSizes {
    int64_t samples, groups, inputs, outputs;  // channels of one group
    int64_t height, width, kernel, stride, dilation, padding;
    bool channels_last;
};

template <class A>
rg::ConvImages<A> images(A* data, int64_t channels, int64_t height, int64_t width, bool channels_last) {
    if (channels_last) return {data, channels * height * width, 1, width * channels, channels};
    return {data, channels * height * width, height * width, width, 1};
}

template <class A>
std::vector<Output> convolution(const ConvSizes& s, DType dtype, int threads) {
    const auto pixels = [&](int64_t size) {
        return (size + 2 * s.padding - (s.kernel - 1) * s.dilation - 1) / s.stride + 1;
    };
    rg::ConvShape shape;
    shape.samples = s.samples;
    shape.groups = s.groups;
    shape.inputs = s.inputs;
    shape.outputs = s.outputs;
    shape.y = {s.height, pixels(s.height), s.kernel, s.stride, s.dilation, s.padding};
    shape.x = {s.width, pixels(s.width), s.kernel, s.stride, s.dilation, s.padding};
    const int64_t channels = s.groups * s.inputs, outputs = s.groups * s.outputs;
    const int64_t x_count = s.samples * channels * s.height * s.width;
    const int64_t y_count = s.samples * outputs * shape.y.output * shape.x.output;
    const int64_t taps = s.kernel * s.kernel, w_count = outputs * s.inputs * taps;
    Random random(uint64_t(x_count + 3 * y_count + w_count));
    const Block x(dtype, random.take(x_count), 1), w(dtype, random.take(w_count), 2), b(dtype, random.take(outputs), 0),
        dy(dtype, random.take(y_count), 3);
    const Block y(dtype, y_count, 1), dx(dtype, Values(size_t(x_count)), 2), dw(dtype, Values(size_t(w_count)), 1),
        db(dtype, Values(size_t(outputs)), 0);
    const auto input = [&](A* data) { return images(data, channels, s.height, s.width, s.channels_last); };
    const auto output = [&](A* data) { return images(data, outputs, shape.y.output, shape.x.output, s.channels_last); };
    const auto read = [](const rg::ConvImages<A>& from) {
        return rg::ConvImages<const A>{from.data, from.n, from.c, from.y, from.x};
    };
    const rg::ConvWeights<const A> weights = {w.as<A>(), s.inputs * taps, taps, s.kernel, 1};
    rg::ConvEnd<A> end;
    end.bias = b.as<A>();
    rg::conv_forward<A>(shape, read(input(x.as<A>())), weights, end, threads, output(y.as<A>()));
    rg::conv_input<A>(shape, read(output(dy.as<A>())), weights, {}, threads, input(dx.as<A>()));
    rg::conv_weights<A>(shape, read(input(x.as<A>())), read(output(dy.as<A>())), false, threads,
                        {dw.as<A>(), s.inputs * taps, taps, s.kernel, 1});
    rg::channel_sums<A>(read(output(dy.as<A>())), s.samples, outputs, shape.y.output, shape.x.output, false, threads,
                        db.as<A>());
    return {y.output("y"), dx.output("dx"), dw.output("dw"), db.output("db")};
}

}  // namespace

void add_convolutions(std::vector<Problem>& problems) {
    const ConvSizes sizes[] = {{2, 1, 3, 7, 7, 9, 3, 1, 1, 1, false},   {2, 1, 5, 17, 8, 17, 3, 2, 1, 1, false},
                               {1, 1, 40, 20, 5, 5, 1, 1, 1, 0, false}, {2, 1, 9, 2, 9, 33, 3, 1, 2, 2, false},
                               {2, 6, 1, 1, 8, 15, 3, 1, 1, 1, false},  {2, 2, 3, 6, 6, 7, 2, 3, 1, 1, true},
                               {3, 1, 20, 33, 7, 6, 3, 1, 1, 1, true},  {2, 1, 4, 3, 9, 8, 5, 1, 1, 2, true},
                               {19, 1, 5, 7, 3, 3, 3, 1, 1, 1, false},  {19, 2, 3, 20, 5, 5, 5, 1, 1, 0, false}};
    for (const ConvSizes& s : sizes) {
        problems.push_back({"convolution " + std::to_string(s.inputs) + "x" + std::to_string(s.outputs) + "x" +
                                std::to_string(s.kernel) + " of " + std::to_string(s.height) + "x" +
                                std::to_string(s.width) + (s.channels_last ? " channels last" : ""),
                            kWideTypes, 64, [=](DType dtype, int threads) { return RG_EITHER(convolution, s); }});
    }
}

}  // namespace problems
