#include "problems.h"

#include <cmath>
#include <memory>
#include <type_traits>
#include <utility>

#include "../../src/core/conv/conv.h"
#include "../../src/core/dense/elementwise.h"
#include "../../src/core/dense/linear.h"
#include "../../src/core/dense/loss.h"
#include "../../src/core/dense/optimizer.h"
#include "../../src/core/dense/pooling.h"
#include "../../src/core/lstm/lstm.h"
#include "../../src/core/norm/norm.h"
#include "storage.h"

namespace problems {
namespace {

using rg::Activation;
using Kind = rg::ActivationKind;

const std::vector<DType> kAllTypes = {DType::f32, DType::f64, DType::f16, DType::bf16};
const std::vector<DType> kWideTypes = {DType::f32, DType::f64};

DType arithmetic(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

// ---- normalization
// ---------------------------------------------------------------------------------------------------

enum class Layout { channels_first, channels_last, layer, group, instance };

struct NormSizes {
    Layout layout;
    int64_t samples, channels, pixels, groups;
    int64_t gap;    // unused elements at the end of every row of x
    int64_t shift;  // of all arrays, in elements, from an aligned address
};

struct NormArrays {
    rg::NormShape shape;
    int64_t x_count = 0, count = 0, sets = 0, channels = 0;
    std::vector<int64_t> x_at;  // where in x an element is, in the order of the others
};

void add_axis(rg::AxisList& list, int64_t extent, int64_t x_stride, int64_t stride) {
    list.axis[list.size++] = {extent, {x_stride, stride, stride, stride, stride}};
}

NormArrays arrange(const NormSizes& s) {
    NormArrays a;
    const bool last = s.layout == Layout::channels_last, rows = s.layout == Layout::layer;
    const int64_t pixels = rows ? 1 : s.pixels, C = s.channels;
    const int64_t run = last || rows ? C : pixels, outer = s.samples * (last ? pixels : rows ? 1 : C);
    const int64_t x_run = run + s.gap;
    for (int64_t r = 0; r < outer; ++r) {
        for (int64_t i = 0; i < run; ++i) a.x_at.push_back(r * x_run + i);
    }
    a.x_count = outer * x_run;
    a.count = outer * run;
    a.channels = C;
    rg::NormShape& shape = a.shape;
    if (last) {
        add_axis(shape.r, s.samples * pixels, x_run, run);
        add_axis(shape.c, C, 1, 1);
        a.sets = C;
    } else if (rows) {
        add_axis(shape.n, s.samples, x_run, run);
        add_axis(shape.c, C, 1, 1);
        shape.channels_per_set = C;
        a.sets = s.samples;
    } else {
        const bool batch = s.layout == Layout::channels_first;
        add_axis(batch ? shape.r : shape.n, s.samples, C * x_run, C * run);
        add_axis(shape.c, C, x_run, run);
        add_axis(shape.r, pixels, 1, 1);
        shape.channels_per_set = s.layout == Layout::group ? C / s.groups : 1;
        a.sets = batch ? C : s.samples * (C / shape.channels_per_set);
    }
    return a;
}

struct NormOptions {
    Activation activation;
    bool gamma, beta, slope_from_input, accumulate;
};

std::vector<Output> norm_forward(const NormSizes& sizes, const NormOptions& o, DType dtype, int threads) {
    const NormArrays a = arrange(sizes);
    Random random(uint64_t(a.count + a.channels));
    const Values data = random.take(a.count);
    Block x(dtype, a.x_count, sizes.shift), y(dtype, a.count, sizes.shift + 1);
    for (int64_t i = 0; i < a.count; ++i) x.set(a.x_at[size_t(i)], data[size_t(i)]);
    const Block gamma(arithmetic(dtype), random.take(a.channels), 0),
        beta(arithmetic(dtype), random.take(a.channels), 0);
    Block mean(DType::f64, a.sets, 0), var(DType::f64, a.sets, 0);
    rg::NormForward call;
    call.shape = a.shape;
    call.dtype = dtype;
    call.activation = o.activation;
    call.eps = 1e-3;
    call.x = x.data();
    call.gamma = o.gamma ? gamma.data() : nullptr;
    call.beta = o.beta ? beta.data() : nullptr;
    call.threads = threads;
    call.mean = mean.as<double>();
    call.var = var.as<double>();
    call.y = y.data();
    rg::norm_forward(call);
    return {y.output("y"), mean.output("mean"), var.output("var")};
}

std::vector<Output> norm_backward(const NormSizes& sizes, const NormOptions& o, DType dtype, int threads) {
    const NormArrays a = arrange(sizes);
    const DType own = arithmetic(dtype);
    Random random(uint64_t(a.count + 7 * a.channels));
    const Values data = random.take(a.count);
    Block x(dtype, a.x_count, sizes.shift);
    for (int64_t i = 0; i < a.count; ++i) x.set(a.x_at[size_t(i)], data[size_t(i)]);
    Values out = random.take(a.count);
    for (double& v : out) {
        if (o.activation.kind == Kind::sigmoid) v = std::fabs(v) / 4;
        if (o.activation.kind == Kind::tanh) v = v / 4;
    }
    const Block y(dtype, out, sizes.shift + 1), dy(dtype, random.take(a.count), sizes.shift + 2);
    const Block gamma(own, random.take(a.channels), 0), beta(own, random.take(a.channels), 0);
    // Any statistics near those of the data: the driver takes them as they are.
    const Block mean(DType::f64, random.take(a.sets, 1.0 / 32), 0);
    Values spread = random.take(a.sets, 1.0 / 8);
    for (double& v : spread) v = 5 + v;
    const Block var(DType::f64, spread, 0);
    Block dx(dtype, o.accumulate ? random.take(a.count) : Values(size_t(a.count)), sizes.shift + 3);
    Block dgamma(own, o.accumulate ? random.take(a.channels) : Values(size_t(a.channels)), 0);
    Block dbeta(own, o.accumulate ? random.take(a.channels) : Values(size_t(a.channels)), 1);
    rg::NormBackward call;
    call.shape = a.shape;
    call.dtype = dtype;
    call.activation = o.activation;
    call.eps = 1e-3;
    call.x = x.data();
    call.y = y.data();
    call.dy = dy.data();
    call.gamma = o.gamma ? gamma.data() : nullptr;
    call.beta = o.beta ? beta.data() : nullptr;
    call.slope_from_input = o.slope_from_input;
    call.mean = mean.as<double>();
    call.var = var.as<double>();
    call.accumulate = o.accumulate;
    call.threads = threads;
    call.dx = dx.data();
    call.dgamma = dgamma.data();
    call.dbeta = dbeta.data();
    rg::norm_backward(call);
    return {dx.output("dx"), dgamma.output("dgamma"), dbeta.output("dbeta")};
}

void add_norms(std::vector<Problem>& problems, bool large) {
    const auto add = [&](const NormSizes& s, const NormOptions& o, const std::vector<DType>& dtypes) {
        static const char* const layouts[] = {"first", "last", "layer", "group", "instance"};
        const std::string name = std::string(layouts[int(s.layout)]) + " n" + std::to_string(s.samples) + "c" +
                                 std::to_string(s.channels) + "s" + std::to_string(s.pixels) + " gap " +
                                 std::to_string(s.gap) + " activation " + std::to_string(int(o.activation.kind)) +
                                 (o.gamma ? " gamma" : "") + (o.beta ? " beta" : "");
        problems.push_back({"norm forward, " + name, dtypes, 32,
                            [=](DType dtype, int threads) { return norm_forward(s, o, dtype, threads); }});
        problems.push_back({"norm backward, " + name, dtypes, 64,
                            [=](DType dtype, int threads) { return norm_backward(s, o, dtype, threads); }});
    };
    const Activation activations[] = {
        {}, {Kind::relu, 0, 0}, {Kind::sigmoid, 0, 0}, {Kind::tanh, 0, 0}, {Kind::gelu, 0, 0}};
    int turn = 0;
    for (const Activation& activation : activations) {
        const bool from_input = activation.kind == Kind::gelu;
        const NormOptions plain{activation, true, true, from_input, false},
            bare{activation, false, false, from_input, false}, adding{activation, true, false, from_input, true};
        for (const int64_t size : {1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 67, 131}) {
            const int64_t shift = size % 4;
            for (const NormOptions& o : {plain, bare, adding}) {
                const std::vector<DType>& types = turn++ % 3 ? kWideTypes : kAllTypes;
                add({Layout::channels_first, 5, 3, size, 1, size % 3, shift}, o, types);
                add({Layout::channels_last, 7, size, 3, 1, size % 3, shift}, o, types);
                add({Layout::layer, 9, size, 1, 1, size % 3, shift}, o, types);
                add({Layout::group, 3, 6, size, 2, 0, shift}, o, types);
                add({Layout::instance, 2, 3, size, 1, 0, shift}, o, types);
            }
        }
        // More than a block, and more than one piece for the team.
        add({Layout::channels_first, 4, 11, 1031, 1, 0, 0}, plain, kWideTypes);
        add({Layout::channels_last, 97, 131, 5, 1, 0, 1}, plain, kWideTypes);
        add({Layout::layer, 131, 517, 1, 1, 3, 0}, bare, kWideTypes);
        if (!large) continue;
        add({Layout::channels_first, 5, 7, 18001, 1, 0, 1}, plain, kWideTypes);
        add({Layout::channels_last, 4096, 161, 1, 1, 0, 0}, plain, kWideTypes);
        add({Layout::channels_last, 4096, 160, 1, 1, 0, 0}, plain, {DType::f32});
        add({Layout::layer, 640, 1027, 1, 1, 0, 1}, plain, kWideTypes);
        add({Layout::layer, 640, 1024, 1, 1, 0, 0}, bare, {DType::f32});
        add({Layout::group, 9, 16, 4111, 4, 0, 0}, plain, {DType::f32});
    }
}

// ---- activations ----------------------------------------------------------------------------------------------------

void add_activations(std::vector<Problem>& problems) {
    const Activation activations[] = {{Kind::identity, 0, 0},
                                      {Kind::relu, 0, 0},
                                      {Kind::leaky_relu, 0.1, 0},
                                      {Kind::sigmoid, 0, 0},
                                      {Kind::tanh, 0, 0},
                                      {Kind::scaled_tanh, 1.5, 0.7},
                                      {Kind::abs, 0, 0},
                                      {Kind::linear, 0.7, 0},
                                      {Kind::clamp, -1.3, 1.7},
                                      {Kind::gelu_tanh, 0.8, 0.04},
                                      {Kind::hard_sigmoid, 0.3, 0.47},
                                      {Kind::softplus, 1.2, 0.9},
                                      {Kind::softsign, 0, 0},
                                      {Kind::elu, 0.9, 0},
                                      {Kind::clamped_leaky_relu, 0.1, 2.1},
                                      {Kind::linear_with_bias, 0.7, 0.2},
                                      {Kind::log_sigmoid, 0, 0},
                                      {Kind::selu, 0, 0},
                                      {Kind::celu, 1.3, 0},
                                      {Kind::hard_shrink, 0.6, 0},
                                      {Kind::soft_shrink, 0.6, 0},
                                      {Kind::tanh_shrink, 0, 0},
                                      {Kind::threshold, 0.4, 0.3},
                                      {Kind::hard_swish, 0, 0},
                                      {Kind::silu, 0, 0},
                                      {Kind::relu6, 0, 0},
                                      {Kind::erf, 0, 0},
                                      {Kind::gelu, 0, 0},
                                      {Kind::gelu_sigmoid, 0, 0},
                                      {Kind::closed_hard_sigmoid, 0.3, 0.47}};
    for (const Activation& activation : activations) {
        for (const int64_t count : {1, 3, 4, 5, 8, 9, 17, 31, 257}) {
            const auto input = [=](Random& random) {
                Values values = random.take(count);
                const double special[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 96.0, -96.0, 0.03125};
                for (size_t i = 0; count > 16 && i < 8; ++i) values[2 * i] = special[i];
                return values;
            };
            const std::string name = std::to_string(int(activation.kind)) + " of " + std::to_string(count);
            problems.push_back({"activation " + name, kAllTypes, 8, [=](DType dtype, int threads) {
                                    Random random(uint64_t(count) + 1);
                                    const Block x(dtype, input(random), count % 5);
                                    const Block y(dtype, count, count % 3);
                                    rg::ActivationForward call;
                                    call.axes.axis[call.axes.size++] = {count, {1, 1, 0, 0}};
                                    call.dtype = dtype;
                                    call.activation = activation;
                                    call.x = x.data();
                                    call.threads = threads;
                                    call.y = y.data();
                                    rg::activation_forward(call);
                                    return std::vector<Output>{y.output("y")};
                                }});
            for (const bool from_input : {true, false}) {
                if (!from_input && !rg::output_tells_slope(activation.kind)) continue;
                problems.push_back({(from_input ? "slope from input " : "slope from output ") + name, kAllTypes, 16,
                                    [=](DType dtype, int threads) {
                                        Random random(uint64_t(count) + 2);
                                        Values values = from_input ? input(random) : random.take(count, 1.0 / 4);
                                        const Block from(dtype, values, count % 5), dy(dtype, random.take(count), 1);
                                        const Block dx(dtype, count, count % 3);
                                        rg::ActivationBackward call;
                                        call.axes.axis[call.axes.size++] = {count, {1, 0, 1, 1}};
                                        call.dtype = dtype;
                                        call.activation = activation;
                                        call.from = from.data();
                                        call.slope_from_input = from_input;
                                        call.dy = dy.data();
                                        call.threads = threads;
                                        call.dx = dx.data();
                                        rg::activation_backward(call);
                                        return std::vector<Output>{dx.output("dx")};
                                    }});
            }
        }
    }
}

// ---- LSTM -----------------------------------------------------------------------------------------------------------

struct LstmSizes {
    int64_t steps, samples, inputs, units, layers, directions;
    bool custom = false, ragged = false, lookup = false;
    rg::Peephole peephole = rg::Peephole::none;
    double dropout = 0;
};

class LstmProblem {
public:
    LstmProblem(const LstmSizes& s, DType dtype) : s_(s), dtype_(dtype), random_(uint64_t(s.units * 31 + s.samples)) {
        shape_.steps = s.steps;
        shape_.samples = s.samples;
        shape_.inputs = s.inputs;
        shape_.units = s.units;
        shape_.layers = s.layers;
        shape_.directions = s.directions;
        shape_.dtype = dtype;
        rg::LstmActivations& f = shape_.activations;
        for (Activation& gate : f.gate) gate.kind = Kind::sigmoid;
        f.gate[2].kind = f.hidden.kind = Kind::tanh;
        f.standard = !s.custom;
        if (s.custom) {
            f.gate[0] = {Kind::hard_sigmoid, 0.21, 0.47};
            f.gate[2] = {Kind::softsign, 0, 0};
            f.hidden = {Kind::gelu, 0, 0};
        }
        shape_.peephole = s.peephole;
        shape_.output_reads_old = s.custom;
        shape_.dropout = s.dropout;
        shape_.seed = 11;
        if (s.ragged) {
            for (int64_t t = 0; t < s.steps; ++t) active_.push_back(s.samples - t * s.samples / (s.steps + 1));
            for (int64_t n = 0; n < s.samples; ++n) order_.push_back((n + 1) % s.samples);
            shape_.active = active_.data();
            shape_.order = order_.data();
        }
        for (int64_t i = 0; s.lookup && i < s.steps * s.samples; ++i) numbers_.push_back(random_.below(kTableRows));
    }

    std::vector<Output> run(int threads) {
        const int64_t T = s_.steps, N = s_.samples, H = s_.units, D = s_.directions, cells = s_.layers * D;
        Block& x = input((s_.lookup ? kTableRows : T * N) * s_.inputs, 1.0 / 4, 1);
        Block& h0 = input(cells * N * H, 1.0 / 8, 0);
        Block& c0 = input(cells * N * H, 1.0 / 4, 2);
        std::vector<rg::CellArrays> weights, gradients;
        for (int64_t cell = 0; cell < cells; ++cell) {
            const int64_t inputs = cell < D ? s_.inputs : D * H;
            const int64_t p = s_.peephole == rg::Peephole::none ? 0 : s_.peephole == rg::Peephole::full ? H * H : H;
            rg::CellArrays w, dw;
            const std::string at = std::to_string(cell);
            parameter(inputs * H, inputs, 0.25 / std::sqrt(double(inputs)), "dwx" + at, w.wx, dw.wx);
            parameter(H * H, H, 0.25 / std::sqrt(double(H)), "dwh" + at, w.wh, dw.wh);
            parameter(H, 1, 1.0 / 8, "db" + at, w.b, dw.b);
            if (p) parameter(p, p / H, 1.0 / 16, "dpeephole" + at, w.peephole, dw.peephole);
            weights.push_back(w);
            gradients.push_back(dw);
        }
        Block cache(DType::f64, (rg::lstm_cache_bytes(shape_) + 7) / 8, 0);
        rg::LstmForward forward;
        forward.shape = shape_;
        const int64_t row = s_.inputs;
        forward.x = s_.lookup ? rg::Sequence{x.data(), row, 0} : rg::Sequence{x.data(), N * row, row};
        if (s_.lookup) forward.lookup = {numbers_.data(), kTableRows};
        forward.cells = weights.data();
        forward.h0 = {h0.data(), N * H, H};
        forward.c0 = {c0.data(), N * H, H};
        forward.cache = cache.data();
        forward.threads = threads;
        forward.y = {result("y", T * N * D * H).data(), N * D * H, D * H};
        forward.hn = {result("hn", cells * N * H).data(), N * H, H};
        forward.cn = {result("cn", cells * N * H).data(), N * H, H};
        rg::lstm_forward(forward);

        rg::LstmBackward backward;
        backward.shape = shape_;
        backward.x = forward.x;
        backward.lookup = forward.lookup;
        backward.cells = weights.data();
        backward.cache = cache.data();
        backward.dy = {input(T * N * D * H, 1.0 / 8, 0).data(), N * D * H, D * H};
        backward.dhn = {input(cells * N * H, 1.0 / 8, 0).data(), N * H, H};
        backward.dcn = {input(cells * N * H, 1.0 / 8, 0).data(), N * H, H};
        backward.threads = threads;
        void* dx = result("dx", s_.lookup ? kTableRows * row : T * N * row).data();
        backward.dx = s_.lookup ? rg::Sequence{dx, row, 0} : rg::Sequence{dx, N * row, row};
        backward.dcells = gradients.data();
        backward.dh0 = {result("dh0", cells * N * H).data(), N * H, H};
        backward.dc0 = {result("dc0", cells * N * H).data(), N * H, H};
        rg::lstm_backward(backward);
        void* gates = result("gates", T * N * 4 * H).data();
        rg::lstm_show(shape_, cache.data(), cells - 1, gates, result("states", T * N * H).data());

        std::vector<Output> outputs;
        for (const auto& [name, block] : results_) outputs.push_back(block->output(name));
        cache.output("cache");  // its sentinels
        return outputs;
    }

private:
    static constexpr int64_t kTableRows = 11;

    Block& input(int64_t count, double scale, int64_t shift) {
        Values values = random_.take(count, scale);
        for (double& v : values) v = double(float(v));
        inputs_.push_back(std::make_unique<Block>(dtype_, values, shift));
        return *inputs_.back();
    }
    Block& result(const std::string& name, int64_t count) {
        results_.emplace_back(name, std::make_unique<Block>(dtype_, Values(size_t(count)), 1));
        return *results_.back().second;
    }
    void parameter(int64_t count, int64_t columns, double scale, const std::string& name, rg::GateArray& w,
                   rg::GateArray& dw) {
        for (int k = 0; k < 4; ++k) {
            w.gate[k] = input(count, scale, k).data();
            dw.gate[k] = result(name, count).data();
        }
        w.row_stride = dw.row_stride = columns;
        w.col_stride = dw.col_stride = 1;
    }

    LstmSizes s_;
    DType dtype_;
    Random random_;
    rg::LstmShape shape_;
    std::vector<int64_t> active_, order_, numbers_;
    std::vector<std::unique_ptr<Block>> inputs_;
    std::vector<std::pair<std::string, std::unique_ptr<Block>>> results_;
};

void add_lstms(std::vector<Problem>& problems, bool large) {
    const auto add = [&](const LstmSizes& s) {
        const std::string name =
            "t" + std::to_string(s.steps) + "n" + std::to_string(s.samples) + "i" + std::to_string(s.inputs) + "h" +
            std::to_string(s.units) + "l" + std::to_string(s.layers) + "d" + std::to_string(s.directions) +
            (s.custom ? " custom" : "") + (s.ragged ? " ragged" : "") + (s.lookup ? " lookup" : "") + " peephole " +
            std::to_string(int(s.peephole)) + (s.dropout > 0 ? " dropout" : "");
        problems.push_back({"lstm " + name, kWideTypes, 128,
                            [=](DType dtype, int threads) { return LstmProblem(s, dtype).run(threads); }});
    };
    for (const int64_t samples : {1, 2, 3, 4, 5, 6, 7, 9, 10, 13, 14, 15, 29}) {
        add({3, samples, 5, 7, 1, 1});
        add({2, samples, 17, 33, 1, 2});
    }
    for (const int64_t units : {1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 40, 65}) {
        LstmSizes s{4, 5, 3, units, 2, 1};
        add(s);
        s.custom = true;
        add(s);
        s.peephole = rg::Peephole::diagonal;
        s.ragged = true;
        add(s);
        s.custom = false;
        s.peephole = rg::Peephole::full;
        s.directions = 2;
        add(s);
        s.lookup = true;
        s.dropout = 0.25;
        add(s);
    }
    if (large) add({12, 20, 70, 130, 2, 2});
}

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

// ---- convolutions ---------------------------------------------------------------------------------------------------

struct ConvSizes {
    int64_t samples, groups, inputs, outputs;  // channels of one group
    int64_t height, width, kernel, stride, dilation, padding;
    bool channels_last;
};

template <class A>
rg::Images<A> images(A* data, int64_t channels, int64_t height, int64_t width, bool channels_last) {
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
    const auto read = [](const rg::Images<A>& from) {
        return rg::Images<const A>{from.data, from.n, from.c, from.y, from.x};
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

void add_convolutions(std::vector<Problem>& problems) {
    const ConvSizes sizes[] = {{2, 1, 3, 7, 7, 9, 3, 1, 1, 1, false},   {2, 1, 5, 17, 8, 17, 3, 2, 1, 1, false},
                               {1, 1, 40, 20, 5, 5, 1, 1, 1, 0, false}, {2, 1, 9, 2, 9, 33, 3, 1, 2, 2, false},
                               {2, 6, 1, 1, 8, 15, 3, 1, 1, 1, false},  {2, 2, 3, 6, 6, 7, 2, 3, 1, 1, true},
                               {3, 1, 20, 33, 7, 6, 3, 1, 1, 1, true},  {2, 1, 4, 3, 9, 8, 5, 1, 1, 2, true}};
    for (const ConvSizes& s : sizes) {
        problems.push_back({"convolution " + std::to_string(s.inputs) + "x" + std::to_string(s.outputs) + "x" +
                                std::to_string(s.kernel) + " of " + std::to_string(s.height) + "x" +
                                std::to_string(s.width) + (s.channels_last ? " channels last" : ""),
                            kWideTypes, 64, [=](DType dtype, int threads) { return RG_EITHER(convolution, s); }});
    }
}

// ---- optimizers -----------------------------------------------------------------------------------------------------

void add_optimizers(std::vector<Problem>& problems) {
    struct Options {
        rg::OptimizerKind kind;
        bool optional_state[3];
        bool regularized, nesterov;
    };
    const Options all[] = {{rg::OptimizerKind::sgd, {false, false, false}, false, false},
                           {rg::OptimizerKind::sgd, {true, false, false}, true, true},
                           {rg::OptimizerKind::adam, {true, true, false}, false, false},
                           {rg::OptimizerKind::adam, {true, true, true}, true, false},
                           {rg::OptimizerKind::rmsprop, {true, false, false}, false, false},
                           {rg::OptimizerKind::rmsprop, {true, true, false}, true, false},
                           {rg::OptimizerKind::rmsprop, {true, true, true}, false, true}};
    int number = 0;
    for (const Options& o : all) {
        for (const int64_t count : {1, 3, 8, 17, 31, 9001}) {
            problems.push_back({"optimizer " + std::to_string(number) + " of " + std::to_string(count), kWideTypes, 16,
                                [=](DType dtype, int threads) {
                                    Random random(static_cast<uint64_t>(count) + 3);
                                    std::vector<Block> blocks;
                                    for (int k = 0; k < rg::kOptimizerArrays; ++k) {
                                        Values values = random.take(count, k == rg::kGradient ? 1 : 1.0 / 4);
                                        // Second moments and squares are positive, and larger than the square of a
                                        // mean.
                                        for (double& v : values) v = k >= rg::kState ? 2 + std::fabs(v) : v;
                                        if (k == rg::kState + 1 && o.kind == rg::OptimizerKind::rmsprop) {
                                            for (double& v : values) v /= 8;
                                        }
                                        blocks.emplace_back(dtype, values, k % 3);
                                    }
                                    std::vector<rg::OptimizerParameter> parameters(1);
                                    rg::OptimizerParameter& p = parameters[0];
                                    p.dtype = dtype;
                                    p.elements = count;
                                    for (int k = 0; k < rg::kOptimizerArrays; ++k) {
                                        if (k < rg::kState || o.optional_state[k - rg::kState])
                                            p.array[k] = blocks[size_t(k)].data();
                                    }
                                    rg::OptimizerRule<double> rule{};
                                    rule.kind = o.kind;
                                    rule.nesterov = o.nesterov;
                                    rule.scale = 0.5;
                                    rule.low = -1.25;
                                    rule.high = 1.5;
                                    rule.l2 = o.regularized ? 0.25 : 0;
                                    rule.l1 = o.regularized ? 0.125 : 0;
                                    rule.first = {0.875, 0.125};
                                    rule.second = {0.9375, 0.0625};
                                    rule.eps = 1e-3;
                                    rule.eps_inside = 1e-2;
                                    rule.momentum = 0.75;
                                    rule.gain = 1;
                                    rule.rate = -0.125;
                                    rule.decay = 0.03125;
                                    rg::NormClipping clipping;
                                    clipping.maximum = o.regularized ? 0.5 : 0;
                                    const Block norm(DType::f64, 1, 0);
                                    *norm.as<double>() = rg::gradient_norm(parameters, threads);
                                    rg::optimizer_step(rule, clipping, parameters, threads);
                                    std::vector<Output> outputs = {norm.output("norm")};
                                    for (int k = 0; k < rg::kOptimizerArrays; ++k) {
                                        outputs.push_back(blocks[size_t(k)].output("array " + std::to_string(k)));
                                    }
                                    return outputs;
                                }});
        }
        ++number;
    }
}

}  // namespace

std::vector<Problem> all(bool large) {
    std::vector<Problem> problems;
    add_norms(problems, large);
    add_activations(problems);
    add_lstms(problems, large);
    add_dense(problems);
    add_convolutions(problems);
    add_optimizers(problems);
    return problems;
}

Values values_of(const Output& output) {
    Values values;
    const size_t item = size_t(item_size(output.dtype));
    for (size_t i = 0; i < output.bytes.size(); i += item) values.push_back(decode(output.dtype, &output.bytes[i]));
    return values;
}

double unit_of(DType dtype) {
    return dtype == DType::f64 ? 0x1p-52 : dtype == DType::f32 ? 0x1p-23 : dtype == DType::f16 ? 0x1p-10 : 0x1p-7;
}

const char* name_of(DType dtype) {
    return dtype == DType::f64   ? "float64"
           : dtype == DType::f32 ? "float32"
           : dtype == DType::f16 ? "float16"
                                 : "bfloat16";
}

}  // namespace problems
