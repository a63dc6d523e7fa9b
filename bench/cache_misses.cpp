// Runs one product or normalization some number of times, without Python, for a cache simulator (cache_misses.py).
//
//   cache_misses --list                         the rows: name, unit, units of work in one run
//   cache_misses ROW REPEATS L1 L2 LAST_LEVEL   at the level AVX2, on one thread, with caches of these sizes in bytes
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../src/core/base/dispatch.h"
#include "../src/core/base/machine.h"
#include "../src/core/base/memory.h"
#include "../src/core/base/scratch.h"
#include "../src/core/dense/linear.h"
#include "../src/core/norm/norm.h"
#include "../src/core/product/gates.h"

namespace {

using rg::ceil_div;
constexpr int64_t kPanel = rg::kPanel<float>;

struct Row {
    std::string name;
    const char* unit;
    double work;  // units of work in one run
    std::function<std::function<void()>()> prepare;
};

// An array on a cache line, filled with values of both signs.
class Array {
public:
    explicit Array(int64_t count) : memory_(rg::take_memory(size_t(count) * sizeof(float))) {
        uint32_t state = 12345;
        for (int64_t i = 0; i < count; ++i) {
            state = state * 1664525 + 1013904223;
            data()[i] = float(int32_t(state)) * 0x1p-31f;
        }
    }
    ~Array() { rg::give_memory(memory_); }
    Array(const Array&) = delete;
    Array& operator=(const Array&) = delete;
    float* data() const { return static_cast<float*>(memory_.data); }

private:
    rg::Memory memory_;
};
using Shared = std::shared_ptr<Array>;
Shared array(int64_t count) { return std::make_shared<Array>(count); }

const rg::ProductKernels<float>& kernels() { return rg::kernel_table().product.f32; }

// ---- the products of an LSTM, in the layouts that it has them in

template <class A>
rg::GateMatrix<A> gates_of(A* weights, int64_t units, int64_t inputs) {
    rg::GateMatrix<A> w;
    for (int k = 0; k < 4; ++k) w.gate[k] = weights + k * units * inputs;
    w.row_stride = inputs;
    w.col_stride = 1;
    return w;
}

// From one panel to the next, with padding against conflicts of cache sets.
int64_t panel_stride(int64_t rows) { return (rows + (16 - rows % 64 + 64) % 64) * kPanel; }

void add_lstm_products(std::vector<Row>& list, int64_t rows, int64_t units) {
    const int64_t panels = ceil_div(units, kPanel), gates = 4 * panels, stride = panel_stride(rows);
    const double flops = 8.0 * double(rows) * double(units) * double(units);
    const std::string shape = "lstm_products_n" + std::to_string(rows) + "h" + std::to_string(units);
    list.push_back({shape + " projection", "flop", flops, [=] {
                        const Shared u = array(panels * stride), w = array(4 * units * units);
                        const Shared bias = array(gates * kPanel), z = array(rows * gates * kPanel);
                        const auto packed = std::make_shared<rg::Buffer>();
                        return [=] {
                            rg::project<float>(kernels(), {u->data(), kPanel, stride}, rows, units, units,
                                               gates_of<const float>(w->data(), units, units), bias->data(), z->data(),
                                               *packed, 1);
                        };
                    }});
    list.push_back({shape + " dx", "flop", flops, [=] {
                        const Shared dz = array(gates * stride), w = array(4 * units * units), dx = array(rows * units);
                        const auto packed = std::make_shared<rg::Buffer>();
                        return [=] {
                            rg::input_gradient<float>(kernels(), dz->data(), stride, rows, units, units,
                                                      gates_of<const float>(w->data(), units, units), false, dx->data(),
                                                      units, *packed, 1);
                        };
                    }});
    list.push_back({shape + " dwx", "flop", flops, [=] {
                        const Shared dz = array(gates * stride), u = array(panels * stride);
                        const Shared dw = array(4 * units * units);
                        return [=] {
                            rg::weight_gradient<float>(kernels(), dz->data(), stride, rows, units,
                                                       {u->data(), kPanel, stride}, units, false,
                                                       gates_of<float>(dw->data(), units, units), 1);
                        };
                    }});
}

// ---- linear layers

void add_linear_products(std::vector<Row>& list, int64_t rows, int64_t units) {
    const double flops = 2.0 * double(rows) * double(units) * double(units);
    const std::string shape = "linear_products_n" + std::to_string(rows) + "h" + std::to_string(units);
    list.push_back({shape + " forward", "flop", flops, [=] {
                        const Shared x = array(rows * units), w = array(units * units), b = array(units);
                        const Shared y = array(rows * units);
                        return [=] {
                            rg::LinearForward<float> call;
                            call.rows = rows;
                            call.inputs = call.outputs = units;
                            call.x = {x->data(), units, 1};
                            call.w = {w->data(), units, 1};
                            call.b = b->data();
                            call.y = {y->data(), units, 1};
                            rg::linear_forward(call);
                        };
                    }});
    for (const bool of_weights : {false, true}) {
        list.push_back({shape + (of_weights ? " dw" : " dx"), "flop", flops, [=] {
                            const Shared dy = array(rows * units), x = array(rows * units), w = array(units * units);
                            const Shared to = array(of_weights ? units * units : rows * units);
                            return [=] {
                                rg::LinearBackward<float> call;
                                call.rows = rows;
                                call.inputs = call.outputs = units;
                                call.dy = {dy->data(), units, 1};
                                call.x = {x->data(), units, 1};
                                call.w = {w->data(), units, 1};
                                (of_weights ? call.dw : call.dx) = {to->data(), units, 1};
                                rg::linear_backward(call);
                            };
                        }});
    }
}

// ---- normalization

struct Norm {
    const char* kind;  // batch, layer, group, instance
    int64_t samples, channels, pixels;
    bool last;  // channels last; for a matrix, true
    int64_t groups;
    rg::ActivationKind activation;
    const char* suffix;
};

rg::NormShape shape_of(const Norm& n) {
    const auto add = [](rg::AxisList& list, int64_t extent, int64_t stride) {
        if (extent > 1) list.axis[list.size++] = {extent, {stride, stride, stride, stride, stride}};
    };
    rg::NormShape shape;
    const std::string kind = n.kind;
    const int64_t sample = n.channels * n.pixels;
    add(kind == "batch" ? shape.r : shape.n, n.samples, sample);
    add(shape.c, n.channels, n.last ? 1 : n.pixels);
    add(shape.r, n.pixels, n.last ? n.channels : 1);
    shape.channels_per_set = kind == "layer" ? n.channels : kind == "group" ? n.channels / n.groups : 1;
    if (kind == "batch" && n.last) {  // samples and pixels are one axis
        shape.r = {};
        add(shape.r, n.samples * n.pixels, n.channels);
    }
    return shape;
}

void add_norm(std::vector<Row>& list, const Norm& n) {
    const int64_t count = n.samples * n.channels * n.pixels;
    const int64_t sets = strcmp(n.kind, "batch") == 0   ? n.channels
                         : strcmp(n.kind, "layer") == 0 ? n.samples
                                                        : n.samples * (n.groups ? n.groups : n.channels);
    const std::string name = std::string(n.kind) + "_norm_n" + std::to_string(n.samples) + "c" +
                             std::to_string(n.channels) + (n.pixels > 1 ? "s" + std::to_string(n.pixels) : "") +
                             (n.last && n.pixels > 1 ? "_last" : "") + n.suffix;
    const auto forward = [=](float* x, float* gamma, float* beta, double* statistics, float* y) {
        rg::NormForward call;
        call.shape = shape_of(n);
        call.activation.kind = n.activation;
        call.eps = 1e-5;
        call.x = x;
        call.gamma = gamma;
        call.beta = beta;
        call.mean = statistics;
        call.var = statistics + sets;
        call.y = y;
        rg::norm_forward(call);
    };
    list.push_back({name + " forward", "element", double(count), [=] {
                        const Shared x = array(count), gamma = array(n.channels), beta = array(n.channels);
                        const Shared y = array(count);
                        const auto statistics = std::make_shared<std::vector<double>>(size_t(2 * sets));
                        return [=] { forward(x->data(), gamma->data(), beta->data(), statistics->data(), y->data()); };
                    }});
    list.push_back({name + " backward", "element", double(count), [=] {
                        const Shared x = array(count), gamma = array(n.channels), beta = array(n.channels);
                        const Shared y = array(count), dy = array(count), dx = array(count);
                        const Shared dgamma = array(n.channels), dbeta = array(n.channels);
                        const auto statistics = std::make_shared<std::vector<double>>(size_t(2 * sets));
                        forward(x->data(), gamma->data(), beta->data(), statistics->data(), y->data());
                        return [=] {
                            rg::NormBackward call;
                            call.shape = shape_of(n);
                            call.activation.kind = n.activation;
                            call.eps = 1e-5;
                            call.x = x->data();
                            call.y = y->data();
                            call.dy = dy->data();
                            call.gamma = gamma->data();
                            call.beta = beta->data();
                            call.mean = statistics->data();
                            call.var = statistics->data() + sets;
                            call.dx = dx->data();
                            call.dgamma = dgamma->data();
                            call.dbeta = dbeta->data();
                            rg::norm_backward(call);
                        };
                    }});
}

std::vector<Row> all_rows() {
    using Kind = rg::ActivationKind;
    std::vector<Row> list;
    // One size only: the simulator takes a minute for 2 GFLOP of multiply-adds.
    add_lstm_products(list, 700, 512);
    add_linear_products(list, 700, 512);
    for (const bool last : {false, true}) {
        add_norm(list, {"batch", 32, 64, 56 * 56, last, 0, Kind::identity, ""});
        add_norm(list, {"batch", 16, 256, 28 * 28, last, 0, Kind::identity, ""});
        add_norm(list, {"batch", 16, 256, 28 * 28, last, 0, Kind::relu, "_relu"});
        add_norm(list, {"group", 32, 64, 56 * 56, last, 8, Kind::identity, "_g8"});
        add_norm(list, {"instance", 32, 64, 56 * 56, last, 0, Kind::identity, ""});
    }
    add_norm(list, {"batch", 4096, 1024, 1, true, 0, Kind::identity, ""});
    add_norm(list, {"batch", 4096, 1024, 1, true, 0, Kind::sigmoid, "_sigmoid"});
    add_norm(list, {"batch", 65536, 64, 1, true, 0, Kind::identity, ""});
    add_norm(list, {"layer", 8192, 768, 1, true, 0, Kind::identity, ""});
    add_norm(list, {"layer", 512, 1024, 1, true, 0, Kind::identity, ""});
    return list;
}

}  // namespace

int main(int count, char** arguments) {
    const std::vector<Row> list = all_rows();
    if (count == 2 && !strcmp(arguments[1], "--list")) {
        for (const Row& row : list) printf("%s\t%s\t%.0f\n", row.name.c_str(), row.unit, row.work);
        return 0;
    }
    if (count != 6) return fprintf(stderr, "usage: %s ROW REPEATS L1 L2 LAST_LEVEL, or --list\n", arguments[0]), 2;
    if (!rg::select_isa("avx2")) return fprintf(stderr, "the simulated machine cannot run AVX2\n"), 1;
    const rg::Caches caches = {atoll(arguments[3]), atoll(arguments[4]), atoll(arguments[5]), 1};
    rg::override_caches(&caches);
    for (const Row& row : list) {
        if (row.name != arguments[1]) continue;
        const std::function<void()> run = row.prepare();
        for (int i = atoi(arguments[2]); i > 0; --i) run();
        return 0;
    }
    return fprintf(stderr, "no row %s\n", arguments[1]), 2;
}
