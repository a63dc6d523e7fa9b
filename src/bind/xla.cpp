// Handlers for XLA, by which retrograd.jax calls the drivers: without Python, and so without the GIL.
#include <algorithm>
#include <array>
#include <cfenv>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "../core/dense/elementwise.h"
#include "bind.h"
#include "linear_call.h"
#include "norm_problem.h"
#include "recurrent_problem.h"
#include "scan_call.h"
#include "xla_frame.h"

namespace rg::bind {
namespace {

constexpr const RawArray* kAbsent = nullptr;

void check(const Outcome& outcome) {
    if (!outcome) return;
    const auto reason = std::find_if(std::begin(kReasons), std::end(kReasons),
                                     [&](const auto& entry) { return entry.second == outcome->reason; });
    fail(std::string(outcome->argument) + " was refused: " + reason->first);
}

int threads(const Frame& frame) { return int(std::clamp<int64_t>(frame.integer("threads"), 0, 1 << 16)); }

Activation checked_activation(double code, double alpha, double beta) {
    for (const ActivationEntry& entry : kActivations) {
        if (double(entry.kind) == code) return {entry.kind, alpha, beta};
    }
    fail("there is no such activation");
}

int64_t elements_of(const RawArray& array) {
    int64_t count = 1;
    for (int i = 0; i < array.ndim; ++i) count *= array.shape[i];
    return count;
}

// A dense array of the caller's own.
struct OwnArray {
    std::vector<int64_t> shape, strides;
    RawArray array;

    OwnArray(Element element, void* data, std::vector<int64_t> extents)
        : shape(std::move(extents)), strides(shape.size()), array{} {
        int64_t step = item_size(element);
        for (size_t axis = shape.size(); axis-- > 0; step *= shape[axis]) strides[axis] = step;
        array = {element, static_cast<char*>(data), int(shape.size()), shape.data(), strides.data()};
    }
    OwnArray(const OwnArray&) = delete;
    OwnArray& operator=(const OwnArray&) = delete;
};

// ---- normalization -------------------------------------------------------------------------------------------------

DType dtype_of(const RawArray& array) {
    for (const DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
        if (element_of(dtype) == array.element) return dtype;
    }
    fail("x has no dtype of a normalization");
}

// `folded`: how many axes of a batch precede the problem's axes. Each of its samples has its own statistics.
NormProblem norm_problem(const Frame& frame, int64_t folded) {
    const RawArray& x = frame.required("x");
    const std::string roles = std::string(size_t(folded), 'n') + std::string(frame.text("roles"));
    const Activation activation =
        checked_activation(double(frame.integer("activation")), frame.number("alpha"), frame.number("beta"));
    return {{x.shape, x.shape + x.ndim},
            roles,
            frame.integer("channels_per_set"),
            int(dtype_of(x)),
            frame.number("eps"),
            int(activation.kind),
            activation.alpha,
            activation.beta,
            frame.flag("slope_from_input")};
}

// Statistics are float64 in the engine. Between forward and backward they are bytes, because JAX disables
// float64 by default; to users they have the dtype of the arithmetic.
class Statistics {
public:
    explicit Statistics(int64_t sets)
        : sets_(sets), values_(size_t(2 * sets)), own_(Element::f64, values_.data(), {2 * sets}) {}

    const RawArray* array() const { return &own_.array; }
    void load(int row, const RawArray& from) { transfer(row, from, true); }
    void store(int row, const RawArray* to) {
        if (to) transfer(row, *to, false);
    }

private:
    // row: 0 for means, 1 for variances
    void transfer(int row, const RawArray& array, bool load) {
        double* values = values_.data() + row * sets_;
        const int64_t per_set = array.element == Element::u8 ? int64_t(sizeof(double)) : 1;
        if (elements_of(array) != sets_ * per_set) fail("statistics have the wrong shape");
        if (array.element == Element::f32) {
            auto* floats = reinterpret_cast<float*>(array.data);
            for (int64_t i = 0; i < sets_; ++i) load ? void(values[i] = floats[i]) : void(floats[i] = float(values[i]));
        } else if (array.element == Element::u8 || array.element == Element::f64) {
            void* const ours = values;
            void* const theirs = array.data;
            std::memcpy(load ? ours : theirs, load ? theirs : ours, size_t(sets_) * sizeof(double));
        } else {
            fail("statistics have the wrong dtype");
        }
    }

    int64_t sets_;
    std::vector<double> values_;
    OwnArray own_;
};

// Arguments: x, gamma, beta, mean and var (given statistics). Results: y, mean, var, saved_mean, saved_var.
void norm_forward_call(Frame& frame) {
    const int64_t folded = frame.argument("mean") ? 0 : frame.fold({"gamma", "beta"});
    if (elements_of(frame.required("x")) == 0) return frame.clear_results();
    const NormProblem problem = norm_problem(frame, folded);
    Statistics statistics(problem.sets());
    for (int64_t call = 0; call < frame.calls(); ++call) {
        frame.select(call);
        const bool given = frame.argument("mean");
        if (given) {
            statistics.load(0, frame.required("mean"));
            statistics.load(1, frame.required("var"));
        }
        check(problem.forward(&frame.required("x"), frame.argument("gamma"), frame.argument("beta"), frame.result("y"),
                              kAbsent, statistics.array(), given, false, threads(frame)));
        for (const char* name : {"mean", "saved_mean"}) statistics.store(0, frame.result(name));
        for (const char* name : {"var", "saved_var"}) statistics.store(1, frame.result(name));
    }
}

// Arguments: x, dy, y, gamma, beta, saved_mean, saved_var. Results: dx, dgamma, dbeta.
void norm_backward_call(Frame& frame) {
    const bool only_dx = !frame.result("dgamma") && !frame.result("dbeta");
    const int64_t folded = only_dx ? frame.fold({"gamma", "beta"}) : 0;
    if (elements_of(frame.required("x")) == 0) return frame.clear_results();
    const NormProblem problem = norm_problem(frame, folded);
    Statistics statistics(problem.sets());
    for (int64_t call = 0; call < frame.calls(); ++call) {
        frame.select(call);
        statistics.load(0, frame.required("saved_mean"));
        statistics.load(1, frame.required("saved_var"));
        const NormSaved<const RawArray*> saved = {&frame.required("x"),   frame.argument("y"), frame.argument("gamma"),
                                                  frame.argument("beta"), statistics.array(),  frame.flag("frozen"),
                                                  frame.flag("frozen")};
        check(problem.backward(&frame.required("dy"), saved, kAbsent, kAbsent, kAbsent, frame.result("dx"),
                               frame.result("dgamma"), frame.result("dbeta"), false, false, threads(frame)));
    }
}

// ---- linear --------------------------------------------------------------------------------------------------------

// All axes but the last flattened into rows. Null: absent.
class Rows {
public:
    explicit Rows(const RawArray* array) {
        if (!array) return;
        if (array->ndim < 1) fail("an array of rows has no axes");
        const int64_t columns = array->shape[array->ndim - 1];
        int64_t rows = 1;
        for (int axis = 0; axis + 1 < array->ndim; ++axis) rows *= array->shape[axis];
        own_.emplace(array->element, array->data, std::vector<int64_t>{rows, columns});
    }
    const RawArray* array() const { return own_ ? &own_->array : nullptr; }

private:
    std::optional<OwnArray> own_;
};

// Arguments: x, w, b. Result: y.
void linear_forward_call(Frame& frame) {
    frame.fold({"w", "b"});
    const bool f64 = frame.required("x").element == Element::f64;
    for (int64_t call = 0; call < frame.calls(); ++call) {
        frame.select(call);
        const Rows x(frame.argument("x")), y(frame.result("y"));
        check(
            linear_forward(f64, x.array(), frame.argument("w"), frame.argument("b"), y.array(), false, threads(frame)));
    }
}

// Arguments: dy, x (for dw), w (for dx). Results: dx, dw, db.
void linear_backward_call(Frame& frame) {
    if (!frame.result("dw") && !frame.result("db")) frame.fold({"w"});
    const bool f64 = frame.required("dy").element == Element::f64;
    for (int64_t call = 0; call < frame.calls(); ++call) {
        frame.select(call);
        const Rows dy(frame.argument("dy")), x(frame.argument("x")), dx(frame.result("dx"));
        check(linear_backward(f64, dy.array(), x.array(), frame.argument("w"), dx.array(), frame.result("dw"),
                              frame.result("db"), false, false, threads(frame)));
    }
}

// ---- LSTM ----------------------------------------------------------------------------------------------------------

// A sequence with time first, whatever the order of its axes in memory. Null: absent.
class TimeFirst {
public:
    TimeFirst(const RawArray* array, bool batch_first) : array_(array) {
        if (!array || !batch_first || array->ndim != 3) return;
        for (int axis = 0; axis < 3; ++axis) {
            const int from = axis == 2 ? 2 : 1 - axis;
            shape_[axis] = array->shape[from];
            strides_[axis] = array->strides[from];
        }
        swapped_ = {array->element, array->data, 3, shape_, strides_};
        array_ = &swapped_;
    }
    TimeFirst(const TimeFirst&) = delete;
    TimeFirst& operator=(const TimeFirst&) = delete;

    const RawArray* array() const { return array_; }

private:
    const RawArray* array_;
    RawArray swapped_ = {};
    int64_t shape_[3], strides_[3];
};

// The arrays wx0, wh0, b0, ... wx1, ... named after the fields of a cell; with a prefix, their gradients.
class RawCells {
public:
    template <class Find>
    RawCells(CellKind kind, int64_t count, const std::string& prefix, const Find& find) {
        for (int64_t i = 0; i < count; ++i) {
            std::vector<const RawArray*>& cell = cells_.emplace_back();
            for (const CellField& field : fields_of(kind)) {
                cell.push_back(find(prefix + field.name + std::to_string(i)));
            }
        }
    }
    size_t size() const { return cells_.size(); }
    const std::vector<const RawArray*>& operator[](size_t i) const { return cells_[i]; }

private:
    std::vector<std::vector<const RawArray*>> cells_;
};
using RawInputs = RecurrentInputs<const RawArray*, RawCells>;

int64_t integer_at(const RawArray& array, int64_t i) {
    if (array.element == Element::i32) {
        int32_t value;
        std::memcpy(&value, array.data + size_t(i) * sizeof value, sizeof value);
        return value;
    }
    if (array.element != Element::i64) fail("an array of integers has another dtype");
    int64_t value;
    std::memcpy(&value, array.data + size_t(i) * sizeof value, sizeof value);
    return value;
}

// Added to the seed of a call where a rate of zoneout is drawn, as in retrograd/ops/recurrent/factors.py.
constexpr uint64_t kZoneoutStreams[2] = {0x1E3779B97F4A7C15, 0x51B54A32D192ED03};

// One call of a frame.
class RecurrentCall {
public:
    explicit RecurrentCall(const Frame& frame)
        : frame_(frame),
          batch_first_(frame.flag("batch_first")),
          x_(&frame.required("x"), batch_first_),
          kind_(static_cast<CellKind>(frame.integer("kind"))),
          layers_(frame.integer("layers")),
          directions_(frame.integer("directions")) {
        if (int(kind_) < 0 || kind_ > CellKind::rnn) fail("there is no such cell");
        if (x_.array()->ndim != 3) fail("x must have 3 axes");
        if (layers_ < 1 || layers_ > 1 << 20 || directions_ < 1 || directions_ > 2) fail("a size is out of range");
        set_slots();
        set_zoneout(0, "zoneout_rate", kind_ == CellKind::lstm && frame.integer("projection") ? "projection" : "units");
        if (kind_ == CellKind::lstm) set_zoneout(1, "cell_zoneout_rate", "units");
    }

    RecurrentProblem problem() const {
        // Code, alpha and beta of every gate and, of an LSTM, the cell state.
        const int count = 3 * (gate_count(kind_) + (kind_ == CellKind::lstm));
        const double* given = frame_.numbers("activations", count);
        std::vector<ActivationTuple> activations;
        for (int i = 0; i < count; i += 3) {
            const Activation activation = checked_activation(given[i], given[i + 1], given[i + 2]);
            activations.emplace_back(int(activation.kind), activation.alpha, activation.beta);
        }
        const RawArray& x = *x_.array();
        const int dtype = int(x.element == Element::f64 ? DType::f64 : DType::f32);
        return {int(kind_),
                steps(),
                samples(),
                x.shape[2],
                frame_.integer("units"),
                frame_.integer("projection"),
                layers_,
                directions_,
                dtype,
                activations,
                int(frame_.integer("peephole")),
                frame_.flag("output_reads_old"),
                frame_.flag("coupled"),
                frame_.flag("flip"),
                frame_.number("clip"),
                frame_.number("cell_clip"),
                int(frame_.integer("norm")),
                frame_.number("eps"),
                int(frame_.integer("mask_kind")),
                frame_.flag("has_zoneout"),
                frame_.number("dropout")};
    }
    RawInputs inputs() const {
        const auto find = [&](const std::string& name) { return frame_.argument(name); };
        const bool ragged = !order_.empty();
        RawInputs in = {x_.array(),
                        nullptr,
                        RawCells(kind_, layers_ * directions_, "", find),
                        find("h0"),
                        find("c0"),
                        ragged ? &active_array_->array : nullptr,
                        ragged ? &order_array_->array : nullptr,
                        0,
                        nullptr,
                        find("reset"),
                        find("mask"),
                        zoneout_[0] ? &zoneout_[0]->array : find("zoneout"),
                        zoneout_[1] ? &zoneout_[1]->array : find("cell_zoneout")};
        in.seed = seed();
        return in;
    }
    RawCells gradients() const {
        const auto find = [&](const std::string& name) { return frame_.result(name); };
        return RawCells(kind_, layers_ * directions_, "d", find);
    }
    bool batch_first() const { return batch_first_; }

private:
    int64_t steps() const { return x_.array()->shape[0]; }
    int64_t samples() const { return x_.array()->shape[1]; }

    void set_slots() {
        const RawArray* lengths = frame_.argument("lengths");
        if (!lengths) return;
        if (lengths->ndim != 1 || lengths->shape[0] != samples()) fail("lengths must have one value for each sample");
        std::vector<int64_t> ends;
        for (int64_t i = 0; i < samples(); ++i) {
            ends.push_back(integer_at(*lengths, i));
            if (ends.back() < 0 || ends.back() > steps()) {
                fail("lengths[" + std::to_string(i) + "] is " + std::to_string(ends.back()) + ", must be from 0 to " +
                     std::to_string(steps()) + ", the steps of x");
            }
        }
        if (ends.empty() || *std::min_element(ends.begin(), ends.end()) == steps()) return;
        active_.resize(size_t(steps()));
        order_.resize(ends.size());
        recurrent_slots(steps(), samples(), ends.data(), active_.data(), order_.data());
        active_array_.emplace(Element::i64, active_.data(), std::vector<int64_t>{steps()});
        order_array_.emplace(Element::i64, order_.data(), std::vector<int64_t>{samples()});
    }

    uint64_t seed() const {
        const RawArray* const seed = frame_.argument("seed");
        if (!seed) return 0;
        if (elements_of(*seed) != 1) fail("seed must be one integer");
        const int64_t value = integer_at(*seed, 0);
        return seed->element == Element::i32 ? uint64_t(uint32_t(value)) : uint64_t(value);
    }

    // The weights of the new state that the array functions draw for a rate: 0 or 1.
    template <class A>
    void draw_zoneout(int state, double rate, const std::vector<int64_t>& shape) {
        size_t count = 1;
        for (const int64_t extent : shape) count *= size_t(extent);
        std::vector<char>& memory = drawn_[state];
        memory.resize(count * sizeof(A));
        A* const kept = reinterpret_cast<A*>(memory.data());
        std::fill(kept, kept + count, A(1));
        DropoutCall<A> call;
        call.count = int64_t(count);
        call.rate = rate;
        call.seed = seed() + kZoneoutStreams[state];
        call.x = kept;
        call.y = kept;
        rg::dropout(call);
        for (size_t i = 0; i < count; ++i) kept[i] = std::min(kept[i], A(1));
        zoneout_[state].emplace(x_.array()->element, kept, shape);
    }
    void set_zoneout(int state, const char* name, const char* width) {
        const double rate = frame_.number(name);
        if (rate < 0) return;  // none, or weights are given
        if (!(rate < 1)) fail("a rate of zoneout must be below 1");
        const int64_t units = frame_.integer(width);
        if (units < 0 || units > int64_t(1) << 40) fail("a size is out of range");
        const std::vector<int64_t> shape = {layers_ * directions_, steps(), samples(), units};
        x_.array()->element == Element::f64 ? draw_zoneout<double>(state, rate, shape)
                                            : draw_zoneout<float>(state, rate, shape);
    }

    const Frame& frame_;
    bool batch_first_;
    TimeFirst x_;
    CellKind kind_;
    int64_t layers_, directions_;
    std::vector<char> drawn_[2];
    std::optional<OwnArray> zoneout_[2];  // of the hidden and the cell state
    std::vector<int64_t> active_, order_;
    std::optional<OwnArray> active_array_, order_array_;
};

// Arguments: x, the cells, h0, c0, lengths, seed, reset, mask, zoneout, cell_zoneout. Results: y, hn, cn, cache.
void recurrent_forward_call(Frame& frame) {
    for (int64_t i = 0; i < frame.calls(); ++i) {
        frame.select(i);
        const RecurrentCall call(frame);
        const TimeFirst y(frame.result("y"), call.batch_first());
        check(call.problem().forward(call.inputs(), frame.result("cache"), 0, y.array(), frame.result("hn"),
                                     frame.result("cn"), false, threads(frame)));
    }
}

// Arguments: x, the cells, lengths, seed, reset, mask, zoneout, cell_zoneout, cache, dy, dhn, dcn. Results: dx, dh0,
// dc0, the gradients of the cells.
void recurrent_backward_call(Frame& frame) {
    for (int64_t i = 0; i < frame.calls(); ++i) {
        frame.select(i);
        const RecurrentCall call(frame);
        const TimeFirst dy(frame.argument("dy"), call.batch_first()), dx(frame.result("dx"), call.batch_first());
        check(call.problem().backward(dy.array(), frame.argument("dhn"), frame.argument("dcn"), call.inputs(),
                                      &frame.required("cache"), std::nullopt, dx.array(),
                                      std::optional<RawCells>(call.gradients()), frame.result("dh0"),
                                      frame.result("dc0"), false, false, threads(frame)));
    }
}

// ---- linear recurrences --------------------------------------------------------------------------------------------

int scan_axis(const Frame& frame, int64_t folded) {
    return int(std::clamp<int64_t>(frame.integer("axis") + folded, -1, kMaxAxes));
}

// Arguments: b, a, h0. Results: y, hn.
void scan_forward_call(Frame& frame) {
    const int axis = scan_axis(frame, frame.fold({}));
    const bool f64 = frame.required("b").element == Element::f64;
    for (int64_t call = 0; call < frame.calls(); ++call) {
        frame.select(call);
        check(scan_forward(f64, axis, frame.argument("a"), frame.argument("b"), frame.argument("h0"), kAbsent,
                           frame.result("y"), frame.result("hn"), false, threads(frame)));
    }
}

// Arguments: y, a, h0, dy, dhn. Results: da, db, dh0.
void scan_backward_call(Frame& frame) {
    const int axis = scan_axis(frame, frame.fold({}));
    const bool f64 = frame.required("y").element == Element::f64;
    for (int64_t call = 0; call < frame.calls(); ++call) {
        frame.select(call);
        check(scan_backward(f64, axis, frame.argument("dy"), frame.argument("dhn"), frame.argument("a"), kAbsent,
                            frame.argument("y"), frame.argument("h0"), frame.result("da"), kAbsent, frame.result("db"),
                            frame.result("dh0"), false, false, threads(frame)));
    }
}

// ---- the interface -------------------------------------------------------------------------------------------------

// The size of a structure up to and including a field, without the padding at its end.
#define RG_SIZE_THROUGH(type, field) (offsetof(type, field) + sizeof(type::field))

bool can_report(const xla::Api* api) { return api && api->size >= RG_SIZE_THROUGH(xla::Api, create_error); }

xla::Error* error(const xla::Api* api, xla::ErrorCode code, const std::string& message) {
    // XLA catches exceptions too. It is the last resort: registration refuses an interface without this function.
    if (!can_report(api)) throw std::runtime_error(message);
    xla::ErrorArguments arguments = {RG_SIZE_THROUGH(xla::ErrorArguments, code), nullptr, message.c_str(), code};
    return api->create_error(&arguments);
}

// Whether the structures of a call are the ones in xla_ffi.h.
bool is_known(const xla::CallFrame& frame) {
    return frame.size >= sizeof frame && frame.arguments.size == sizeof frame.arguments &&
           frame.results.size == sizeof frame.results && frame.attributes.size == sizeof frame.attributes;
}

// XLA refuses handlers for an interface older than the oldest that it supports, or newer than its own. So this reports
// XLA's version, as far as its structures are known to be the same. Older versions of XLA do not report theirs.
void describe(const xla::CallFrame& frame, xla::Metadata& metadata) {
    if (metadata.size < RG_SIZE_THROUGH(xla::Metadata, traits)) return;
    int minor = xla::kOldestMinorVersion;
    if (frame.api) {
        const bool known = frame.size >= sizeof frame && can_report(frame.api) &&
                           frame.api->version.major_version == xla::kMajorVersion;
        // 0 is of no version of XLA: it refuses the handler.
        minor = known ? std::clamp(frame.api->version.minor_version, minor, xla::kNewestMinorVersion) : 0;
    }
    metadata.version = {sizeof(xla::Version), nullptr, xla::kMajorVersion, minor};
    metadata.traits = 0;
}

// The default floating-point environment, for as long as it exists: XLA's threads flush small numbers to zero, which
// would give other bits than the array functions.
class DefaultFloats {
public:
    DefaultFloats() {
        std::fegetenv(&before_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultFloats() { std::fesetenv(&before_); }
    DefaultFloats(const DefaultFloats&) = delete;
    DefaultFloats& operator=(const DefaultFloats&) = delete;

private:
    std::fenv_t before_;
};

template <void (*call)(Frame&)>
xla::Error* handler(xla::CallFrame* frame) {
    if (frame->extensions && frame->extensions->type == xla::kMetadataExtension) {
        describe(*frame, *reinterpret_cast<xla::MetadataExtension*>(frame->extensions)->metadata);
        return nullptr;
    }
    try {
        if (!is_known(*frame))
            return error(frame->api, xla::kInternal, "retrograd: unknown version of XLA's interface");
        if (frame->stage != xla::kExecute) return nullptr;  // nothing to prepare
        Frame decoded(*frame);
        const DefaultFloats floats;
        call(decoded);
        return nullptr;
    } catch (const std::bad_alloc&) {
        return error(frame->api, xla::kResourceExhausted, "retrograd: out of memory");
    } catch (const std::exception& failure) {
        return error(frame->api, xla::kInvalidArgument, std::string("retrograd: ") + failure.what());
    }
}

struct Entry {
    const char* name;
    xla::Handler* handler;
};
constexpr Entry kHandlers[] = {
    {"retrograd_norm_forward", handler<norm_forward_call>},
    {"retrograd_norm_backward", handler<norm_backward_call>},
    {"retrograd_linear_forward", handler<linear_forward_call>},
    {"retrograd_linear_backward", handler<linear_backward_call>},
    {"retrograd_recurrent_forward", handler<recurrent_forward_call>},
    {"retrograd_recurrent_backward", handler<recurrent_backward_call>},
    {"retrograd_scan_forward", handler<scan_forward_call>},
    {"retrograd_scan_backward", handler<scan_backward_call>},
};

}  // namespace

void bind_xla(nb::module_& m) {
    m.def(
        "xla_handlers",
        [] {
            nb::dict handlers;
            for (const auto& [name, function] : kHandlers) {
                handlers[name] = nb::capsule(reinterpret_cast<const void*>(function));
            }
            return handlers;
        },
        nb::sig("def xla_handlers() -> dict[str, object]"),
        "Capsules of the functions that XLA calls, by the name under which jax.ffi registers them.");
}

}  // namespace rg::bind
