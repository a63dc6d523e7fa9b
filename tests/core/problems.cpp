#include "problems.h"

#include <cmath>
#include <memory>
#include <type_traits>
#include <utility>

#include "../../src/core/dense/elementwise.h"
#include "../../src/core/dense/optimizer.h"
#include "../../src/core/norm/norm.h"
#include "../../src/core/recurrent/recurrent.h"
#include "storage.h"

namespace problems {
namespace {

using rg::Activation;
using Kind = rg::ActivationKind;

const std::vector<DType> kAllTypes = {DType::f32, DType::f64, DType::f16, DType::bf16};

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
    // Any statistics near the data's: the driver takes them as they are.
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

// ---- recurrent layers -----------------------------------------------------------------------------------------------

struct RecurrentSizes {
    int64_t steps, samples, inputs, units, layers, directions;
    bool custom = false, ragged = false, lookup = false;
    rg::Peephole peephole = rg::Peephole::none;
    double dropout = 0;
    rg::CellKind kind = rg::CellKind::lstm;
    rg::CellNorm norm = rg::CellNorm::none;
    rg::MaskKind mask = rg::MaskKind::none;
    int64_t projection = 0;
    bool flip = false, coupled = false, reset = false, zoneout = false, cell_zoneout = false;
    double clip = 0, cell_clip = 0;
};

class RecurrentProblem {
public:
    RecurrentProblem(const RecurrentSizes& s, DType dtype)
        : s_(s), dtype_(dtype), random_(uint64_t(s.units * 31 + s.samples)) {
        shape_.steps = s.steps;
        shape_.samples = s.samples;
        shape_.inputs = s.inputs;
        shape_.units = s.units;
        shape_.layers = s.layers;
        shape_.directions = s.directions;
        shape_.dtype = dtype;
        rg::CellActivations& f = shape_.rule.activations;
        for (Activation& gate : f.gate) gate.kind = Kind::sigmoid;
        f.gate[2].kind = f.hidden.kind = Kind::tanh;  // an RNN has its own in the place of the candidate's
        f.standard = !s.custom;
        if (s.custom) {
            f.gate[0] = {Kind::hard_sigmoid, 0.21, 0.47};
            f.gate[2] = {Kind::softsign, 0, 0};
            f.hidden = {Kind::gelu, 0, 0};
        }
        shape_.peephole = s.peephole;
        shape_.rule.kind = s.kind;
        shape_.rule.output_reads_old = s.custom;
        shape_.rule.flip = s.flip;
        shape_.rule.coupled = s.coupled;
        shape_.rule.clip = s.clip;
        shape_.rule.cell_clip = s.cell_clip;
        shape_.projection = s.projection;
        shape_.norm = s.norm;
        shape_.eps = 1e-3;
        shape_.mask_kind = s.mask;
        shape_.has_zoneout = s.zoneout;
        shape_.dropout = s.dropout;
        shape_.seed = 11;
        if (s.ragged) {
            for (int64_t t = 0; t < s.steps; ++t) active_.push_back(s.samples - t * s.samples / (s.steps + 1));
            for (int64_t n = 0; n < s.samples; ++n) order_.push_back((n + 1) % s.samples);
            shape_.active = active_.data();
            shape_.order = order_.data();
        }
        for (int64_t i = 0; s.lookup && i < s.steps * s.samples; ++i) numbers_.push_back(random_.below(kTableRows));
        for (int64_t i = 0; s.reset && i < s.steps * s.samples; ++i) reset_.push_back(random_.below(4) == 0);
        if (s.reset) shape_.reset = reset_.data();
    }

    std::vector<Output> run(int threads) {
        const int64_t T = s_.steps, N = s_.samples, H = s_.units, D = s_.directions, cells = s_.layers * D;
        const int64_t P = shape_.outputs();
        const bool lstm = s_.kind == rg::CellKind::lstm, normed = s_.norm != rg::CellNorm::none;
        Block& x = input((s_.lookup ? kTableRows : T * N) * s_.inputs, 1.0 / 4, 1);
        Block& h0 = input(cells * N * P, 1.0 / 8, 0);
        Block& c0 = input(lstm ? cells * N * H : 0, 1.0 / 4, 2);
        std::vector<rg::CellArrays> weights, gradients;
        for (int64_t cell = 0; cell < cells; ++cell) {
            const int64_t inputs = cell < D ? s_.inputs : D * P;
            const int64_t p = s_.peephole == rg::Peephole::none ? 0 : s_.peephole == rg::Peephole::full ? H * H : H;
            rg::CellArrays w, dw;
            const std::string at = std::to_string(cell);
            parameter(inputs * H, inputs, 0.25 / std::sqrt(double(inputs)), "dwx" + at, w.wx, dw.wx);
            parameter(P * H, P, 0.25 / std::sqrt(double(P)), "dwh" + at, w.wh, dw.wh);
            parameter(H, 1, 1.0 / 8, "db" + at, w.b, dw.b);
            if (!lstm && s_.kind != rg::CellKind::rnn) parameter(H, 1, 1.0 / 8, "dbh" + at, w.bh, dw.bh);
            if (p) parameter(p, p / H, 1.0 / 16, "dpeephole" + at, w.peephole, dw.peephole);
            if (s_.projection) {
                parameter(P * H, H, 0.25 / std::sqrt(double(H)), "dprojection" + at, w.projection, dw.projection, 1);
            }
            if (normed) {
                parameter(H, 1, 1.0 / 4, "dgamma_x" + at, w.gamma_x, dw.gamma_x);
                parameter(H, 1, 1.0 / 4, "dgamma_h" + at, w.gamma_h, dw.gamma_h);
            }
            if (normed && lstm) {
                parameter(H, 1, 1.0 / 4, "dgamma_c" + at, w.gamma_c, dw.gamma_c, 1);
                parameter(H, 1, 1.0 / 8, "dbeta_c" + at, w.beta_c, dw.beta_c, 1);
            }
            weights.push_back(w);
            gradients.push_back(dw);
        }
        if (s_.mask != rg::MaskKind::none) {
            shape_.mask = factor(s_.mask == rg::MaskKind::each ? gates() : 1, P, 1.0 / 4);
        }
        if (s_.zoneout) shape_.zoneout = factor(1, P, 1.0 / 8);
        if (s_.cell_zoneout) shape_.cell_zoneout = factor(1, H, 1.0 / 8);
        Block cache(DType::f64, (rg::recurrent_cache_bytes(shape_) + 7) / 8, 0);
        rg::RecurrentForward forward;
        forward.shape = shape_;
        const int64_t row = s_.inputs;
        forward.x = s_.lookup ? rg::Sequence{x.data(), row, 0} : rg::Sequence{x.data(), N * row, row};
        if (s_.lookup) forward.lookup = {numbers_.data(), kTableRows};
        forward.cells = weights.data();
        forward.h0 = {h0.data(), N * P, P};
        if (lstm) forward.c0 = {c0.data(), N * H, H};
        forward.cache = cache.data();
        forward.threads = threads;
        forward.y = {result("y", T * N * D * P).data(), N * D * P, D * P};
        forward.hn = {result("hn", cells * N * P).data(), N * P, P};
        if (lstm) forward.cn = {result("cn", cells * N * H).data(), N * H, H};
        rg::recurrent_forward(forward);

        rg::RecurrentBackward backward;
        backward.shape = shape_;
        backward.x = forward.x;
        backward.lookup = forward.lookup;
        backward.cells = weights.data();
        backward.cache = cache.data();
        backward.dy = {input(T * N * D * P, 1.0 / 8, 0).data(), N * D * P, D * P};
        backward.dhn = {input(cells * N * P, 1.0 / 8, 0).data(), N * P, P};
        if (lstm) backward.dcn = {input(cells * N * H, 1.0 / 8, 0).data(), N * H, H};
        backward.threads = threads;
        void* dx = result("dx", s_.lookup ? kTableRows * row : T * N * row).data();
        backward.dx = s_.lookup ? rg::Sequence{dx, row, 0} : rg::Sequence{dx, N * row, row};
        backward.dcells = gradients.data();
        backward.dh0 = {result("dh0", cells * N * P).data(), N * P, P};
        if (lstm) backward.dc0 = {result("dc0", cells * N * H).data(), N * H, H};
        rg::recurrent_backward(backward);
        void* values = result("gates", T * N * gates() * H).data();
        void* states = lstm ? result("states", T * N * H).data() : nullptr;
        rg::recurrent_show(shape_, cache.data(), cells - 1, values, states);

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
                   rg::GateArray& dw, int of = 0) {
        for (int k = 0; k < (of ? of : gates()); ++k) {
            w.gate[k] = input(count, scale, k).data();
            dw.gate[k] = result(name, count).data();
        }
        w.row_stride = dw.row_stride = columns;
        w.col_stride = dw.col_stride = 1;
    }

    int gates() const { return s_.kind == rg::CellKind::lstm ? 4 : s_.kind == rg::CellKind::rnn ? 1 : 3; }
    // One for every cell, step and sample.
    rg::Factor factor(int64_t of_gates, int64_t units, double scale) {
        const int64_t sample = units, step = s_.samples * sample, gate = s_.steps * step, cell = of_gates * gate;
        return {input(s_.layers * s_.directions * cell, scale, 1).data(), cell, of_gates > 1 ? gate : 0, step, sample};
    }

    RecurrentSizes s_;
    DType dtype_;
    Random random_;
    rg::RecurrentShape shape_;
    std::vector<int64_t> active_, order_, numbers_;
    std::vector<uint8_t> reset_;
    std::vector<std::unique_ptr<Block>> inputs_;
    std::vector<std::pair<std::string, std::unique_ptr<Block>>> results_;
};

std::string name_of(const RecurrentSizes& s) {
    const auto number = [](const char* word, int64_t value) { return word + std::to_string(value); };
    std::string name = number("t", s.steps) + number("n", s.samples) + number("i", s.inputs) + number("h", s.units) +
                       number("l", s.layers) + number("d", s.directions) + (s.custom ? " custom" : "") +
                       (s.ragged ? " ragged" : "") + (s.lookup ? " lookup" : "") +
                       number(" peephole ", int64_t(s.peephole)) + (s.dropout > 0 ? " dropout" : "");
    if (s.kind == rg::CellKind::gru_before) name += " before";
    if (s.norm != rg::CellNorm::none) name += number(" norm ", int64_t(s.norm));
    if (s.mask != rg::MaskKind::none) name += number(" mask ", int64_t(s.mask));
    if (s.projection) name += number(" projection ", s.projection);
    return name + (s.flip ? " flip" : "") + (s.coupled ? " coupled" : "") + (s.reset ? " reset" : "") +
           (s.zoneout ? " zoneout" : "") + (s.cell_zoneout ? " cell zoneout" : "") + (s.clip > 0 ? " clip" : "") +
           (s.cell_clip > 0 ? " cell clip" : "");
}

void add_recurrent(std::vector<Problem>& problems, const char* kind, const RecurrentSizes& s) {
    // A normalization divides by the spread of a row, which may be small. Of one unit in a cell other than the plain
    // LSTM, a gradient may be a single sum that cancels: only bits are compared; `retrograd verify` has its bounds.
    const bool single = s.units == 1 && std::string(kind) != "lstm";
    const double units = single ? 0 : s.norm == rg::CellNorm::none ? 128 : 1024;
    problems.push_back({std::string(kind) + " " + name_of(s), kWideTypes, units,
                        [=](DType dtype, int threads) { return RecurrentProblem(s, dtype).run(threads); }});
}

void add_lstms(std::vector<Problem>& problems, bool large) {
    const auto add = [&](const RecurrentSizes& s) { add_recurrent(problems, "lstm", s); };
    for (const int64_t samples : {1, 2, 3, 4, 5, 6, 7, 9, 10, 13, 14, 15, 29}) {
        add({3, samples, 5, 7, 1, 1});
        add({2, samples, 17, 33, 1, 2});
    }
    for (const int64_t units : {1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 40, 65}) {
        RecurrentSizes s{4, 5, 3, units, 2, 1};
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

// GRUs, RNNs, and what acts inside the recurrence of all cells.
void add_other_cells(std::vector<Problem>& problems, bool large) {
    using rg::CellKind;
    const CellKind kinds[] = {CellKind::gru_after, CellKind::gru_before, CellKind::rnn};
    for (const CellKind kind : kinds) {
        const char* const word = kind == CellKind::rnn ? "rnn" : "gru";
        const auto sized = [&](int64_t steps, int64_t samples, int64_t inputs, int64_t units, int64_t layers,
                               int64_t directions) {
            RecurrentSizes s{steps, samples, inputs, units, layers, directions};
            s.kind = kind;
            return s;
        };
        for (const int64_t samples : {1, 3, 4, 6, 7, 13, 14, 29}) {
            add_recurrent(problems, word, sized(3, samples, 5, 7, 1, 1));
            add_recurrent(problems, word, sized(2, samples, 17, 33, 1, 2));
        }
        for (const int64_t units : {1, 2, 4, 8, 15, 16, 17, 31, 40, 65}) {
            RecurrentSizes s = sized(4, 5, 3, units, 2, 1);
            add_recurrent(problems, word, s);
            s.custom = true;
            add_recurrent(problems, word, s);
            s.custom = false;
            s.flip = kind != CellKind::rnn;
            s.ragged = s.lookup = true;
            s.dropout = 0.25;
            s.directions = 2;
            add_recurrent(problems, word, s);
        }
        if (large) add_recurrent(problems, word, sized(12, 20, 70, 130, 2, 2));
    }
    for (const CellKind kind : {CellKind::lstm, CellKind::gru_after, CellKind::gru_before, CellKind::rnn}) {
        const bool lstm = kind == CellKind::lstm;
        const char* const word = lstm ? "lstm_inside" : kind == CellKind::rnn ? "rnn_inside" : "gru_inside";
        const auto add = [&](const RecurrentSizes& s) { add_recurrent(problems, word, s); };
        for (const int64_t units : {1, 5, 8, 16, 17, 33}) {
            RecurrentSizes plain{4, 5, 3, units, 1, 1};
            plain.kind = kind;
            RecurrentSizes s = plain;
            s.mask = rg::MaskKind::all;
            add(s);
            s.reset = s.zoneout = true;
            s.clip = 0.5;
            s.layers = 2;
            add(s);
            s = plain;
            s.mask = rg::MaskKind::each;
            s.ragged = s.zoneout = true;
            s.directions = 2;
            add(s);
            s = plain;
            s.reset = true;
            add(s);
            if (kind != CellKind::gru_before && units >= 5) {
                s = plain;
                s.norm = rg::CellNorm::output;
                add(s);
                s.mask = rg::MaskKind::all;
                s.reset = s.zoneout = s.ragged = true;
                s.layers = 2;
                if (lstm) s.norm = rg::CellNorm::cell;
                add(s);
            }
            if (!lstm) continue;
            s = plain;
            s.coupled = s.cell_zoneout = true;
            s.cell_clip = 0.5;
            s.peephole = rg::Peephole::diagonal;
            add(s);
            s = plain;
            s.projection = (units + 1) / 2;
            s.directions = s.layers = 2;
            add(s);
            s.ragged = s.zoneout = s.cell_zoneout = true;
            s.mask = rg::MaskKind::each;
            s.projection = units;
            add(s);
        }
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
    add_other_cells(problems, large);
    add_dense(problems);
    add_convolutions(problems);
    add_recurrent(problems);
    add_arrays(problems);
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
