// Convolutions, pooling, GRUs and RNNs by oneDNN 3 (a build with OpenMP), behind functions that Python can call
// (onednn.py).
//
// Images are dense, [N, C, H, W]; of a recurrent layer, only the weights have layouts. Layouts:
//   plain      the primitives work on them as they are
//   reordered  the primitives work in layouts of their choice; conversions are part of forward and backward
//   blocked    the same, but data are converted before and after, outside of what is timed
#include <omp.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "oneapi/dnnl/dnnl.hpp"

namespace {

using dnnl::memory;
using Tag = memory::format_tag;
using Arguments = std::unordered_map<int, memory>;

enum class Layout { plain, reordered, blocked };

std::string last_error;

struct Step {
    dnnl::primitive primitive;
    Arguments arguments;
};
using Steps = std::vector<Step>;

class Layer {
public:
    explicit Layer(Layout layout) : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_), layout_(layout) {}

    const dnnl::engine& engine() const { return engine_; }
    const memory& array(const std::string& name) const { return arrays_.at(name); }
    float* data(const std::string& name) { return static_cast<float*>(arrays_.at(name).get_data_handle()); }
    void forward() { run(forward_); }
    void backward() { run(backward_); }
    void load() { run(load_); }
    void store() { run(store_); }

    // What a primitive is asked for: this layout, or one of its choice.
    memory::desc wanted(const memory::dims& dims, Tag tag) const {
        return memory::desc(dims, memory::data_type::f32, layout_ == Layout::plain ? tag : Tag::any);
    }
    memory& add(const std::string& name, const memory::dims& dims, Tag tag) {
        return arrays_[name] = memory(memory::desc(dims, memory::data_type::f32, tag), engine_);
    }

    // An array as the primitive needs it. What forward has converted, backward does not convert again.
    memory input(const std::string& name, const memory::desc& desc, Steps& pass) {
        const memory& plain = arrays_.at(name);
        if (plain.get_desc() == desc) return plain;
        for (const auto& [known, converted] : converted_) {
            if (known == name && converted.get_desc() == desc) return converted;
        }
        const memory converted(desc, engine_);
        convert(plain, converted, layout_ == Layout::blocked ? load_ : pass);
        converted_.emplace_back(name, converted);
        return converted;
    }
    // Calls body with the memory that receives a result, and then converts that.
    template <class Body>
    void output(const std::string& name, const memory::desc& desc, Steps& pass, const Body& body) {
        const memory& plain = arrays_.at(name);
        if (plain.get_desc() == desc) return body(plain);
        const memory result(desc, engine_);
        body(result);
        convert(result, plain, layout_ == Layout::blocked ? store_ : pass);
    }

    Steps forward_, backward_;

private:
    static void convert(const memory& from, const memory& to, Steps& where) {
        where.push_back({dnnl::reorder(from, to), {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}}});
    }
    void run(const Steps& steps) {
        for (const Step& step : steps) step.primitive.execute(stream_, step.arguments);
        stream_.wait();
    }

    dnnl::engine engine_;
    dnnl::stream stream_;
    Layout layout_;
    std::map<std::string, memory> arrays_;
    std::vector<std::pair<std::string, memory>> converted_;
    Steps load_, store_;
};

std::unique_ptr<Layer> convolution(Layout layout, int64_t samples, int64_t channels, int64_t size, int64_t outputs,
                                   int64_t kernel, int64_t groups) {
    auto layer = std::make_unique<Layer>(layout);
    const memory::dims x_dims = {samples, channels, size, size}, y_dims = {samples, outputs, size, size};
    memory::dims w_dims = {outputs, channels / groups, kernel, kernel};
    Tag w_tag = Tag::oihw;
    if (groups > 1) {
        w_dims = {groups, outputs / groups, channels / groups, kernel, kernel};
        w_tag = Tag::goihw;
    }
    const memory::dims strides = {1, 1}, pad = {kernel / 2, kernel / 2};
    for (const char* name : {"x", "dx"}) layer->add(name, x_dims, Tag::nchw);
    for (const char* name : {"y", "dy"}) layer->add(name, y_dims, Tag::nchw);
    for (const char* name : {"w", "dw"}) layer->add(name, w_dims, w_tag);
    const memory b = layer->add("b", {outputs}, Tag::a), db = layer->add("db", {outputs}, Tag::a);
    const memory::desc x = layer->wanted(x_dims, Tag::nchw), y = layer->wanted(y_dims, Tag::nchw);
    const memory::desc w = layer->wanted(w_dims, w_tag);
    const auto direct = dnnl::algorithm::convolution_direct;
    const dnnl::convolution_forward::primitive_desc forward(layer->engine(), dnnl::prop_kind::forward_training, direct,
                                                            x, w, b.get_desc(), y, strides, pad, pad);
    const dnnl::convolution_backward_data::primitive_desc to_x(layer->engine(), direct, x, w, y, strides, pad, pad,
                                                               forward);
    const dnnl::convolution_backward_weights::primitive_desc to_w(layer->engine(), direct, x, w, db.get_desc(), y,
                                                                  strides, pad, pad, forward);
    Steps &first = layer->forward_, &second = layer->backward_;
    {
        const memory from_x = layer->input("x", forward.src_desc(), first);
        const memory from_w = layer->input("w", forward.weights_desc(), first);
        layer->output("y", forward.dst_desc(), first, [&](const memory& result) {
            first.push_back(
                {dnnl::convolution_forward(forward),
                 {{DNNL_ARG_SRC, from_x}, {DNNL_ARG_WEIGHTS, from_w}, {DNNL_ARG_BIAS, b}, {DNNL_ARG_DST, result}}});
        });
    }
    {
        const memory from_dy = layer->input("dy", to_x.diff_dst_desc(), second);
        const memory from_w = layer->input("w", to_x.weights_desc(), second);
        layer->output("dx", to_x.diff_src_desc(), second, [&](const memory& result) {
            second.push_back({dnnl::convolution_backward_data(to_x),
                              {{DNNL_ARG_DIFF_DST, from_dy}, {DNNL_ARG_WEIGHTS, from_w}, {DNNL_ARG_DIFF_SRC, result}}});
        });
    }
    {
        const memory from_dy = layer->input("dy", to_w.diff_dst_desc(), second);
        const memory from_x = layer->input("x", to_w.src_desc(), second);
        layer->output("dw", to_w.diff_weights_desc(), second, [&](const memory& result) {
            second.push_back({dnnl::convolution_backward_weights(to_w),
                              {{DNNL_ARG_DIFF_DST, from_dy},
                               {DNNL_ARG_SRC, from_x},
                               {DNNL_ARG_DIFF_WEIGHTS, result},
                               {DNNL_ARG_DIFF_BIAS, db}}});
        });
    }
    return layer;
}

std::unique_ptr<Layer> pooling(Layout layout, bool largest, int64_t samples, int64_t channels, int64_t size,
                               int64_t kernel, int64_t stride, int64_t padding) {
    auto layer = std::make_unique<Layer>(layout);
    const int64_t outputs = (size + 2 * padding - kernel) / stride + 1;
    const memory::dims x_dims = {samples, channels, size, size}, y_dims = {samples, channels, outputs, outputs};
    const memory::dims strides = {stride, stride}, kernels = {kernel, kernel}, none = {0, 0}, pad = {padding, padding};
    for (const char* name : {"x", "dx"}) layer->add(name, x_dims, Tag::nchw);
    for (const char* name : {"y", "dy"}) layer->add(name, y_dims, Tag::nchw);
    // A pooling takes its layout from x.
    const bool wide = dnnl::get_effective_cpu_isa() >= dnnl::cpu_isa::avx512_core;
    const Tag tag = layout == Layout::plain ? Tag::nchw : wide ? Tag::nChw16c : Tag::nChw8c;
    const memory::desc x(x_dims, memory::data_type::f32, tag), y(y_dims, memory::data_type::f32, tag);
    const auto algorithm = largest ? dnnl::algorithm::pooling_max : dnnl::algorithm::pooling_avg_include_padding;
    const dnnl::pooling_forward::primitive_desc forward(layer->engine(), dnnl::prop_kind::forward_training, algorithm,
                                                        x, y, strides, kernels, none, pad, pad);
    const dnnl::pooling_backward::primitive_desc backward(layer->engine(), algorithm, x, y, strides, kernels, none, pad,
                                                          pad, forward);
    Steps &first = layer->forward_, &second = layer->backward_;
    const memory workspace(forward.workspace_desc(), layer->engine());
    const memory from_x = layer->input("x", x, first);
    layer->output("y", y, first, [&](const memory& result) {
        Arguments arguments = {{DNNL_ARG_SRC, from_x}, {DNNL_ARG_DST, result}};
        if (largest) arguments.emplace(DNNL_ARG_WORKSPACE, workspace);
        first.push_back({dnnl::pooling_forward(forward), arguments});
    });
    const memory from_dy = layer->input("dy", y, second);
    layer->output("dx", x, second, [&](const memory& result) {
        Arguments arguments = {{DNNL_ARG_DIFF_DST, from_dy}, {DNNL_ARG_DIFF_SRC, result}};
        if (largest) arguments.emplace(DNNL_ARG_WORKSPACE, workspace);
        second.push_back({dnnl::pooling_backward(backward), arguments});
    });
    return layer;
}

// An RNN with tanh, a GRU that resets after the product (linear before reset), or an LSTM. Parameters of each primitive
// are [L, D, I, G, H] and, of the bias, [L, D, gates of the bias, H]. Layers are one primitive if their shapes allow.
enum class Cell { rnn, gru, lstm };  // in the order of onednn.py
std::unique_ptr<Layer> recurrent(Layout layout, Cell cell, int64_t steps, int64_t samples, int64_t inputs,
                                 int64_t units, int64_t layers, int64_t directions) {
    auto layer = std::make_unique<Layer>(layout);
    const auto direction =
        directions == 2 ? dnnl::rnn_direction::bidirectional_concat : dnnl::rnn_direction::unidirectional_left2right;
    const bool whole = layers == 1 || (inputs == units && directions == 1);
    const int64_t primitives = whole ? 1 : layers, depth = whole ? layers : 1;
    const int64_t gates = cell == Cell::lstm ? 4 : cell == Cell::gru ? 3 : 1, biases = cell == Cell::rnn ? 1 : 4;
    const auto training = dnnl::prop_kind::forward_training;
    for (const char* name : {"x", "dx"}) layer->add(name, {steps, samples, inputs}, Tag::tnc);
    const memory::dims y_dims = {steps, samples, directions * units}, state_dims = {depth, directions, samples, units};
    struct Part {
        dnnl::rnn_primitive_desc_base forward;
        memory x, y, dx, dy, h0, b, workspace;
        memory::desc wx, wh;
    };
    std::vector<Part> parts;
    Steps &first = layer->forward_, &second = layer->backward_;
    const memory::desc none;
    for (int64_t number = 0; number < primitives; ++number) {
        const std::string n = std::to_string(number);
        const bool last = number == primitives - 1;
        const int64_t width = number == 0 ? inputs : directions * units;
        const memory::dims wx_dims = {depth, directions, width, gates, units};
        const memory::dims wh_dims = {depth, directions, units, gates, units};
        for (const char* of : {"", "d"}) {
            layer->add(of + ("wx" + n), wx_dims, Tag::ldigo);
            layer->add(of + ("wh" + n), wh_dims, Tag::ldigo);
            layer->add(of + ("b" + n), {depth, directions, biases, units}, Tag::ldgo);
            layer->add(of + (last ? "y" : "y" + n), y_dims, Tag::tnc);
        }
        Part part;
        part.x = number == 0 ? layer->array("x") : parts.back().y;
        part.dx = number == 0 ? layer->array("dx") : parts.back().dy;
        part.y = layer->array(last ? "y" : "y" + n);
        part.dy = layer->array(last ? "dy" : "dy" + n);
        part.b = layer->array("b" + n);
        // Without an initial state the gradient of wh would be the sum over dz_t h_t instead of dz_t h_(t-1).
        part.h0 = layer->add("h0" + n, state_dims, Tag::ldnc);
        std::memset(part.h0.get_data_handle(), 0, part.h0.get_desc().get_size());
        part.wx = memory::desc(wx_dims, memory::data_type::f32, Tag::any);
        part.wh = memory::desc(wh_dims, memory::data_type::f32, Tag::any);
        const memory::desc x = part.x.get_desc(), y = part.y.get_desc(), h0 = part.h0.get_desc();
        const memory::desc b = part.b.get_desc();
        dnnl::primitive primitive;
        if (cell == Cell::lstm) {
            const dnnl::lstm_forward::primitive_desc made(layer->engine(), training, direction, x, h0, h0, part.wx,
                                                          part.wh, b, y, none, none);
            part.forward = made;
            primitive = dnnl::lstm_forward(made);
        } else if (cell == Cell::gru) {
            const dnnl::lbr_gru_forward::primitive_desc made(layer->engine(), training, direction, x, h0, part.wx,
                                                             part.wh, b, y, none);
            part.forward = made;
            primitive = dnnl::lbr_gru_forward(made);
        } else {
            const dnnl::vanilla_rnn_forward::primitive_desc made(layer->engine(), training,
                                                                 dnnl::algorithm::eltwise_tanh, direction, x, h0,
                                                                 part.wx, part.wh, b, y, none);
            part.forward = made;
            primitive = dnnl::vanilla_rnn_forward(made);
        }
        part.workspace = memory(part.forward.workspace_desc(), layer->engine());
        first.push_back(
            {primitive,
             {{DNNL_ARG_SRC_LAYER, part.x},
              {DNNL_ARG_SRC_ITER, part.h0},
              {DNNL_ARG_SRC_ITER_C, part.h0},
              {DNNL_ARG_WEIGHTS_LAYER,
               layer->input("wx" + n, part.forward.query_md(dnnl::query::weights_md, 0), first)},
              {DNNL_ARG_WEIGHTS_ITER, layer->input("wh" + n, part.forward.query_md(dnnl::query::weights_md, 1), first)},
              {DNNL_ARG_BIAS, part.b},
              {DNNL_ARG_DST_LAYER, part.y},
              {DNNL_ARG_WORKSPACE, part.workspace}}});
        parts.push_back(part);
    }
    for (int64_t number = primitives - 1; number >= 0; --number) {
        const Part& part = parts[number];
        const std::string n = std::to_string(number);
        const memory::desc x = part.x.get_desc(), y = part.y.get_desc(), h0 = part.h0.get_desc();
        const memory::desc b = part.b.get_desc();
        // C's functions, because C++'s have no flags: without this one, gradients are added to what is there.
        const unsigned flags = dnnl_rnn_flags_diff_weights_overwrite;
        const auto towards = dnnl::convert_to_c(direction);
        dnnl_primitive_desc_t raw = nullptr;
        dnnl::primitive primitive;
        memory::desc wx, wh, dwx, dwh;
        const auto take = [&](const auto& made) {
            wx = made.weights_layer_desc(), wh = made.weights_iter_desc();
            dwx = made.diff_weights_layer_desc(), dwh = made.diff_weights_iter_desc();
        };
        if (cell == Cell::lstm) {
            dnnl::error::wrap_c_api(
                dnnl_lstm_backward_primitive_desc_create(
                    &raw, layer->engine().get(), dnnl_backward, towards, x.get(), h0.get(), h0.get(), part.wx.get(),
                    part.wh.get(), nullptr, nullptr, b.get(), y.get(), nullptr, nullptr, x.get(), h0.get(), h0.get(),
                    part.wx.get(), part.wh.get(), nullptr, nullptr, b.get(), y.get(), nullptr, nullptr, flags,
                    part.forward.get(), nullptr),
                "lstm backward");
            const dnnl::lstm_backward::primitive_desc made(raw);
            primitive = dnnl::lstm_backward(made);
            take(made);
        } else if (cell == Cell::gru) {
            dnnl::error::wrap_c_api(
                dnnl_lbr_gru_backward_primitive_desc_create(
                    &raw, layer->engine().get(), dnnl_backward, towards, x.get(), h0.get(), part.wx.get(),
                    part.wh.get(), b.get(), y.get(), nullptr, x.get(), h0.get(), part.wx.get(), part.wh.get(), b.get(),
                    y.get(), nullptr, flags, part.forward.get(), nullptr),
                "lbr_gru backward");
            const dnnl::lbr_gru_backward::primitive_desc made(raw);
            primitive = dnnl::lbr_gru_backward(made);
            take(made);
        } else {
            dnnl::error::wrap_c_api(
                dnnl_vanilla_rnn_backward_primitive_desc_create(
                    &raw, layer->engine().get(), dnnl_backward, dnnl_eltwise_tanh, towards, x.get(), h0.get(),
                    part.wx.get(), part.wh.get(), b.get(), y.get(), nullptr, x.get(), h0.get(), part.wx.get(),
                    part.wh.get(), b.get(), y.get(), nullptr, flags, 0, 0, part.forward.get(), nullptr),
                "vanilla_rnn backward");
            const dnnl::vanilla_rnn_backward::primitive_desc made(raw);
            primitive = dnnl::vanilla_rnn_backward(made);
            take(made);
        }
        const memory from_wx = layer->input("wx" + n, wx, second), from_wh = layer->input("wh" + n, wh, second);
        const memory dh0(h0, layer->engine()), dc0(h0, layer->engine());
        layer->output("dwx" + n, dwx, second, [&](const memory& to_wx) {
            layer->output("dwh" + n, dwh, second, [&](const memory& to_wh) {
                second.push_back({primitive,
                                  {{DNNL_ARG_SRC_LAYER, part.x},
                                   {DNNL_ARG_SRC_ITER, part.h0},
                                   {DNNL_ARG_SRC_ITER_C, part.h0},
                                   {DNNL_ARG_WEIGHTS_LAYER, from_wx},
                                   {DNNL_ARG_WEIGHTS_ITER, from_wh},
                                   {DNNL_ARG_BIAS, part.b},
                                   {DNNL_ARG_DST_LAYER, part.y},
                                   {DNNL_ARG_WORKSPACE, part.workspace},
                                   {DNNL_ARG_DIFF_DST_LAYER, part.dy},
                                   {DNNL_ARG_DIFF_SRC_LAYER, part.dx},
                                   {DNNL_ARG_DIFF_SRC_ITER, dh0},
                                   {DNNL_ARG_DIFF_SRC_ITER_C, dc0},
                                   {DNNL_ARG_DIFF_WEIGHTS_LAYER, to_wx},
                                   {DNNL_ARG_DIFF_WEIGHTS_ITER, to_wh},
                                   {DNNL_ARG_DIFF_BIAS, layer->array("db" + n)}}});
            });
        });
    }
    return layer;
}

Layer* opened(const std::function<std::unique_ptr<Layer>()>& make) {
    try {
        return make().release();
    } catch (const std::exception& error) {
        last_error = error.what();
        return nullptr;
    }
}

}  // namespace

extern "C" {

const char* error_text() { return last_error.c_str(); }
void set_threads(int threads) { omp_set_num_threads(threads); }
int version() { return dnnl_version()->major * 100 + dnnl_version()->minor; }

Layer* open_convolution(int layout, int64_t samples, int64_t channels, int64_t size, int64_t outputs, int64_t kernel,
                        int64_t groups) {
    return opened([&] { return convolution(Layout(layout), samples, channels, size, outputs, kernel, groups); });
}
Layer* open_pooling(int layout, int largest, int64_t samples, int64_t channels, int64_t size, int64_t kernel,
                    int64_t stride, int64_t padding) {
    return opened(
        [&] { return pooling(Layout(layout), largest != 0, samples, channels, size, kernel, stride, padding); });
}
Layer* open_recurrent(int layout, int cell, int64_t steps, int64_t samples, int64_t inputs, int64_t units,
                      int64_t layers, int64_t directions) {
    return opened(
        [&] { return recurrent(Layout(layout), Cell(cell), steps, samples, inputs, units, layers, directions); });
}
void close_layer(Layer* layer) { delete layer; }
float* array_of(Layer* layer, const char* name) { return layer->data(name); }
void load(Layer* layer) { layer->load(); }
void forward(Layer* layer) { layer->forward(); }
void backward(Layer* layer) { layer->backward(); }
void store(Layer* layer) { layer->store(); }
}
