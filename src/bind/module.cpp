// Python's door to the engine: typed views in, interpreter lock released, driver called. No arithmetic, no policy.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "../core/dispatch.h"
#include "../core/elementwise.h"
#include "../core/memory.h"
#include "../core/norm.h"
#include "../core/parallel.h"
#include "../core/scratch.h"
#include "lstm.h"
#include "optimizer.h"
#include "training.h"
#include "view.h"

using namespace rg::bind;

namespace {

// What arrays of results lie in.
class ResultMemory {
public:
    explicit ResultMemory(size_t bytes) : memory_(rg::take_memory(bytes)) {}
    ~ResultMemory() { rg::give_memory(memory_); }
    ResultMemory(const ResultMemory&) = delete;
    ResultMemory& operator=(const ResultMemory&) = delete;

    static int show(PyObject* self, Py_buffer* view, int flags) {
        const rg::Memory& memory = nb::inst_ptr<ResultMemory>(self)->memory_;
        return PyBuffer_FillInfo(view, self, memory.data, Py_ssize_t(memory.bytes), 0, flags);
    }

private:
    rg::Memory memory_;
};

int64_t item_size(rg::DType dtype) { return dtype == rg::DType::f64 ? 8 : dtype == rg::DType::f32 ? 4 : 2; }

// The arrays of a call that share its shape, as far as it has them.
struct Views {
    const View *x, *y, *dy, *dx;

    void put_axis(int i, int64_t extent, int64_t itemsize, rg::Axis& axis) const {
        const View* view[rg::kViews];
        view[rg::kX] = x;
        view[rg::kY] = y;
        view[rg::kDy] = dy;
        view[rg::kDx] = dx;
        axis.extent = extent;
        for (int v = 0; v < rg::kViews; ++v) axis.stride[v] = view[v] ? view[v]->stride(i, itemsize) : 0;
    }
};

// A normalization of one shape and one set of options; made once, called many times, never changed.
class NormProblem {
public:
    // roles: one of 'n', 'c', 'r' per axis
    NormProblem(std::vector<int64_t> shape, const std::string& roles, int64_t channels_per_set, int dtype, double eps,
                int activation, double alpha, double beta, bool slope_from_input)
        : shape_(std::move(shape)),
          channels_per_set_(channels_per_set),
          dtype_(static_cast<rg::DType>(dtype)),
          itemsize_(item_size(dtype_)),
          eps_(eps),
          activation_{static_cast<rg::ActivationKind>(activation), alpha, beta},
          needs_y_(activation_.kind != rg::ActivationKind::identity && !slope_from_input),
          needs_beta_(activation_.kind != rg::ActivationKind::identity && slope_from_input) {
        if (needs_y_ && !rg::output_tells_slope(activation_.kind)) throw nb::value_error("the output tells no slope");
        if (roles.size() != shape_.size()) throw nb::value_error("roles and shape differ in length");
        if (shape_.size() > rg::kMaxAxes) throw nb::value_error("too many axes");
        double bytes = 16;  // statistics and sums are two doubles for a set, which may have one element
        for (const int64_t extent : shape_) bytes *= double(extent);
        if (bytes >= 0x1p62) throw nb::value_error("the shape is too large");
        for (size_t i = 0; i < shape_.size(); ++i) {
            if (shape_[i] < 0) throw nb::value_error("negative extent");
            roles_.push_back(roles[i] == 'n' ? rg::AxisRole::n : roles[i] == 'c' ? rg::AxisRole::c : rg::AxisRole::r);
            if (roles[i] == 'c') parameter_shape_.push_back(shape_[i]);
            (roles[i] == 'n' ? samples_ : roles[i] == 'c' ? channels_ : reduced_) *= shape_[i];
        }
        if (elements() == 0) throw nb::value_error("no elements");
        if (channels_per_set_ < 1 || channels_ % channels_per_set_) {
            throw nb::value_error("channels_per_set does not divide the channels");
        }
        sets_ = samples_ * (channels_ / channels_per_set_);
    }

    // y may be exactly in the place of x, if `keep` takes a copy of it.
    Outcome forward(nb::handle x_array, nb::handle gamma_array, nb::handle beta_array, nb::handle y_array,
                    nb::handle keep_array, nb::handle statistics_array, bool statistics_given, bool overlap_checked,
                    int threads) const {
        const View x(x_array, "x", Access::read), gamma(gamma_array, "gamma", Access::read),
            beta(beta_array, "beta", Access::read), y(y_array, "out", Access::write),
            keep(keep_array, "keep_x", Access::write);
        const View statistics(statistics_array, "statistics", statistics_given ? Access::read : Access::write);
        for (const View* v : {&x, &y, &keep}) v->check_elements(shape_, itemsize_);
        for (const View* v : {&gamma, &beta}) v->check_contiguous(parameter_shape_, arithmetic_size());
        statistics.check_vector(2 * sets_, sizeof(double));
        require(x, statistics);
        if (keep.present()) require(y);
        if (!overlap_checked) {
            for (const View* in : {&gamma, &beta, &statistics}) {
                if (y.overlaps(*in) || keep.overlaps(*in)) return Outcome::overlap;
            }
            if (keep.overlaps(x) || keep.overlaps(y)) return Outcome::overlap;
            if (y.overlaps(x)) {
                if (!y.same_elements(x)) return Outcome::overlap;
                if (!keep.present()) return Outcome::in_place;
            }
        }
        rg::NormForward call;
        call.shape = axes({&x, &y, &keep, nullptr});
        call.dtype = dtype_;
        call.activation = activation_;
        call.eps = eps_;
        call.x = x.data();
        call.gamma = gamma.data();
        call.beta = beta.data();
        call.statistics_given = statistics_given;
        call.threads = threads > 0 ? threads : rg::num_threads();
        call.mean = static_cast<double*>(statistics.data());
        call.var = call.mean + sets_;
        call.y = y.data();
        call.keep = keep.data();
        without_lock(double(elements()), [&] { rg::norm_forward(call); });
        return Outcome::done;
    }

    // dx may be exactly in the place of dy. Of y and beta only what the slope is found from is looked at.
    Outcome backward(nb::handle dy_array, nb::handle x_array, nb::handle y_array, nb::handle gamma_array,
                     nb::handle beta_array, nb::handle statistics_array, bool statistics_given, bool frozen,
                     nb::handle given_sum_dz_array, nb::handle given_sum_dz_xhat_array, double given_count,
                     nb::handle dx_array, nb::handle dgamma_array, nb::handle dbeta_array, bool accumulate,
                     bool overlap_checked, int threads) const {
        const View dy(dy_array, "dy", Access::read), x(x_array, "x", Access::read),
            y(if_needed(y_array, needs_y_), "y", Access::read), gamma(gamma_array, "gamma", Access::read),
            beta(if_needed(beta_array, needs_beta_), "beta", Access::read),
            statistics(statistics_array, "statistics", Access::read),
            given_sum_dz(given_sum_dz_array, "sum_dz", Access::read),
            given_sum_dz_xhat(given_sum_dz_xhat_array, "sum_dz_xhat", Access::read);
        const View dx(dx_array, "dx", Access::write), dgamma(dgamma_array, "dgamma", Access::write),
            dbeta(dbeta_array, "dbeta", Access::write);
        for (const View* v : {&dy, &x, &y, &dx}) v->check_elements(shape_, itemsize_);
        for (const View* v : {&gamma, &beta, &dgamma, &dbeta}) v->check_contiguous(parameter_shape_, arithmetic_size());
        statistics.check_vector(2 * sets_, sizeof(double));
        check_given(given_sum_dz, given_sum_dz_xhat);
        require(dy, x, statistics);
        if (needs_y_) require(y);
        if (!overlap_checked) {
            const View *inputs[] = {&x, &y, &gamma, &beta, &statistics}, *results[] = {&dx, &dgamma, &dbeta};
            for (const View* out : results) {
                for (const View* in : inputs) {
                    if (out->overlaps(*in)) return Outcome::overlap;
                }
                if (out->overlaps(dy) && !(out == &dx && dx.same_elements(dy))) return Outcome::overlap;
            }
            if (dx.overlaps(dgamma) || dx.overlaps(dbeta) || dgamma.overlaps(dbeta)) return Outcome::overlap;
        }
        rg::NormBackward call = backward_call(dy, x, y, gamma, beta, statistics, &dx);
        call.statistics_given = statistics_given;
        call.frozen = frozen;
        call.accumulate = accumulate;
        call.given_sum_dz = static_cast<const double*>(given_sum_dz.data());
        call.given_sum_dz_xhat = static_cast<const double*>(given_sum_dz_xhat.data());
        call.given_count = given_count;
        call.threads = threads > 0 ? threads : rg::num_threads();
        call.dx = dx.data();
        call.dgamma = dgamma.data();
        call.dbeta = dbeta.data();
        without_lock(double(elements()), [&] { rg::norm_backward(call); });
        return Outcome::done;
    }

    void gradient_sums(nb::handle dy_array, nb::handle x_array, nb::handle y_array, nb::handle gamma_array,
                       nb::handle beta_array, nb::handle statistics_array, nb::handle sum_dz_array,
                       nb::handle sum_dz_xhat_array, int threads) const {
        const View dy(dy_array, "dy", Access::read), x(x_array, "x", Access::read),
            y(if_needed(y_array, needs_y_), "y", Access::read),
            gamma(if_needed(gamma_array, needs_beta_), "gamma", Access::read),
            beta(if_needed(beta_array, needs_beta_), "beta", Access::read),
            statistics(statistics_array, "statistics", Access::read), sum_dz(sum_dz_array, "sum_dz", Access::write),
            sum_dz_xhat(sum_dz_xhat_array, "sum_dz_xhat", Access::write);
        for (const View* v : {&dy, &x, &y}) v->check_elements(shape_, itemsize_);
        for (const View* v : {&gamma, &beta}) v->check_contiguous(parameter_shape_, arithmetic_size());
        statistics.check_vector(2 * sets_, sizeof(double));
        check_given(sum_dz, sum_dz_xhat);
        require(dy, x, statistics, sum_dz, sum_dz_xhat);
        if (needs_y_) require(y);
        rg::NormBackward call = backward_call(dy, x, y, gamma, beta, statistics, nullptr);
        call.statistics_given = true;  // whoever adds up sums has statistics of more than x
        call.threads = threads > 0 ? threads : rg::num_threads();
        call.sum_dz = static_cast<double*>(sum_dz.data());
        call.sum_dz_xhat = static_cast<double*>(sum_dz_xhat.data());
        without_lock(double(elements()), [&] { rg::norm_backward(call); });
    }

private:
    int64_t elements() const { return samples_ * channels_ * reduced_; }
    int64_t arithmetic_size() const { return dtype_ == rg::DType::f64 ? 8 : 4; }

    static nb::handle if_needed(nb::handle array, bool needed) { return needed ? array : nb::handle(Py_None); }

    template <class... Views>
    static void require(const Views&... views) {
        if (!(views.present() && ...)) throw nb::value_error("an array that the call needs is missing");
    }
    // Sums of one value per channel make sense where each channel is one set.
    void check_given(const View& sum_dz, const View& sum_dz_xhat) const {
        if (!sum_dz.present() && !sum_dz_xhat.present()) return;
        require(sum_dz, sum_dz_xhat);
        if (samples_ != 1 || channels_per_set_ != 1) throw nb::value_error("sums are for batch normalization only");
        for (const View* v : {&sum_dz, &sum_dz_xhat}) v->check_vector(channels_, sizeof(double));
    }

    rg::NormShape axes(const Views& views) const {
        rg::NormShape shape;
        shape.channels_per_set = channels_per_set_;
        for (size_t i = 0; i < shape_.size(); ++i) {
            rg::AxisList& list = roles_[i] == rg::AxisRole::n   ? shape.n
                                 : roles_[i] == rg::AxisRole::c ? shape.c
                                                                : shape.r;
            views.put_axis(int(i), shape_[i], itemsize_, list.axis[list.size++]);
        }
        return shape;
    }
    rg::NormBackward backward_call(const View& dy, const View& x, const View& y, const View& gamma, const View& beta,
                                   const View& statistics, const View* dx) const {
        rg::NormBackward call;
        call.shape = axes({&x, &y, &dy, dx});
        call.dtype = dtype_;
        call.activation = activation_;
        call.eps = eps_;
        call.x = x.data();
        call.y = y.data();
        call.dy = dy.data();
        call.gamma = gamma.data();
        call.beta = beta.data();
        call.slope_from_input = needs_beta_;
        call.mean = static_cast<const double*>(statistics.data());
        call.var = call.mean + sets_;
        return call;
    }

    std::vector<int64_t> shape_, parameter_shape_;
    std::vector<rg::AxisRole> roles_;
    int64_t channels_per_set_;
    rg::DType dtype_;
    int64_t itemsize_;
    double eps_;
    rg::Activation activation_;
    bool needs_y_, needs_beta_;  // what backward finds the slope from: the output, or the input made again
    int64_t samples_ = 1, channels_ = 1, reduced_ = 1, sets_ = 0;
};

// The axes of arrays that must all have the shape of x.
rg::AxisList checked_axes(const Views& views, int64_t itemsize) {
    rg::AxisList list;
    if (views.x->axes() > rg::kMaxAxes) throw nb::value_error("too many axes");
    list.size = views.x->axes();
    std::vector<int64_t> shape;
    for (int i = 0; i < list.size; ++i) shape.push_back(views.x->extent(i));
    for (const View* v : {views.x, views.y, views.dy, views.dx}) {
        if (v) v->check_elements(shape, itemsize);
    }
    for (int i = 0; i < list.size; ++i) views.put_axis(i, shape[size_t(i)], itemsize, list.axis[i]);
    return list;
}

bool overlaps_partly(const View& out, const View& in) { return out.overlaps(in) && !out.same_elements(in); }

Outcome activation_forward(int kind, double alpha, double beta, int dtype, nb::handle x_array, nb::handle y_array,
                           bool overlap_checked, int threads) {
    const View x(x_array, "x", Access::read), y(y_array, "out", Access::write);
    rg::ActivationForward call;
    call.dtype = static_cast<rg::DType>(dtype);
    call.axes = checked_axes({&x, &y, nullptr, nullptr}, item_size(call.dtype));
    if (!overlap_checked && overlaps_partly(y, x)) return Outcome::overlap;
    call.activation = {static_cast<rg::ActivationKind>(kind), alpha, beta};
    call.x = x.data();
    call.y = y.data();
    call.threads = threads > 0 ? threads : rg::num_threads();
    without_lock(double(x.bytes() / x.itemsize()), [&] { rg::activation_forward(call); });
    return Outcome::done;
}

Outcome activation_backward(int kind, double alpha, double beta, int dtype, nb::handle dy_array, nb::handle from_array,
                            bool slope_from_input, nb::handle dx_array, bool accumulate, bool overlap_checked,
                            int threads) {
    const View dy(dy_array, "dy", Access::read), from(from_array, slope_from_input ? "x" : "y", Access::read),
        dx(dx_array, "out", Access::write);
    rg::ActivationBackward call;
    call.activation = {static_cast<rg::ActivationKind>(kind), alpha, beta};
    if (!slope_from_input && !rg::output_tells_slope(call.activation.kind)) {
        throw nb::value_error("the output tells no slope");
    }
    call.dtype = static_cast<rg::DType>(dtype);
    call.axes = checked_axes({&from, nullptr, &dy, &dx}, item_size(call.dtype));
    if (!overlap_checked && (overlaps_partly(dx, from) || overlaps_partly(dx, dy))) return Outcome::overlap;
    call.from = from.data();
    call.slope_from_input = slope_from_input;
    call.dy = dy.data();
    call.accumulate = accumulate;
    call.dx = dx.data();
    call.threads = threads > 0 ? threads : rg::num_threads();
    without_lock(double(dy.bytes() / dy.itemsize()), [&] { rg::activation_backward(call); });
    return Outcome::done;
}

bool may_overlap(nb::handle results, nb::handle others) {
    std::deque<View> views;
    for (nb::handle array : results) views.emplace_back(array, "an array", Access::read);
    const size_t written = views.size();
    for (nb::handle array : others) views.emplace_back(array, "an array", Access::read);
    for (size_t i = 0; i < written; ++i) {
        for (size_t j = i + 1; j < views.size(); ++j) {
            if (views[i].overlaps(views[j])) return true;
        }
    }
    return false;
}

// Seconds for one pass of dst = sum(sources): the machine's limit, measured in the process that is compared with it.
double stream_seconds(nb::handle dst_array, const std::vector<nb::object>& source_arrays, bool non_temporal,
                      int threads) {
    if (source_arrays.empty() || source_arrays.size() > 3) throw nb::value_error("sources: give 1 to 3 arrays");
    const View dst(dst_array, "dst", Access::write);
    std::vector<std::unique_ptr<View>> sources;
    const float* data[3] = {};
    const int64_t elements = dst.bytes() / int64_t(sizeof(float));
    dst.check_vector(elements, sizeof(float));
    for (const nb::object& array : source_arrays) {
        sources.push_back(std::make_unique<View>(array, "a source", Access::read));
        sources.back()->check_vector(elements, sizeof(float));
        data[sources.size() - 1] = static_cast<const float*>(sources.back()->data());
    }
    float* out = static_cast<float*>(dst.data());
    if (non_temporal && reinterpret_cast<uintptr_t>(out) % 64 != 0)
        throw nb::value_error("dst is not aligned to 64 bytes");
    const int count = int(sources.size());
    const int64_t lines = elements / 16;
    const LockReleased released;
    const auto start = std::chrono::steady_clock::now();
    rg::parallel_for(threads, threads, true, [&](int64_t part) {
        const int64_t first = lines * part / threads * 16, last = lines * (part + 1) / threads * 16;
        const float* from[3] = {data[0] + first, data[1] ? data[1] + first : nullptr,
                                data[2] ? data[2] + first : nullptr};
        rg::kernel_table().add_streams(from, count, last - first, out + first, non_temporal);
    });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

NB_MODULE(_core, m) {
    // Objects that daemon threads hold at exit are not leaks that a user could do anything about.
    nb::set_leak_warnings(false);
    rg::prepare_exceptions();
    m.doc() = "The engine of retrograd. Use the functions of the package instead: they check and explain.";

    m.def("isa", [] { return std::string(rg::kernel_table().isa); }, "The instruction-set level in force.");
    m.def("isa_levels", &rg::available_isa_levels, "The levels this machine can run, slowest first.");
    m.def("select_isa", &rg::select_isa, nb::arg("name"),
          "Put a level in force for all later calls; false if this machine cannot run it.");
    m.def("set_num_threads", &rg::set_num_threads, nb::arg("threads"));
    m.def("num_threads", &rg::num_threads);
    m.def("release_scratch", &rg::Buffer::release_all,
          "Give back the scratch memory that this thread keeps from call to call; returns its bytes.");
    PyType_Slot memory_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(ResultMemory::show)}, {0, nullptr}};
    nb::class_<ResultMemory>(m, "ResultMemory", nb::type_slots(memory_slots),
                             "A buffer of at least so many bytes. Its memory is kept for later ones when it is gone.")
        .def(nb::init<size_t>(), nb::arg("bytes"));
    m.def(
        "may_overlap_itself",
        [](nb::handle array) { return may_overlap_itself(View(array, "the array", Access::read).buffer()); },
        nb::arg("array"), "Whether elements of the array may share memory.");
    m.def("may_overlap", &may_overlap, nb::arg("results"), nb::arg("others"),
          "Whether the span of a result meets that of another array of either list; entries may be None.");
    m.def("waiting_memory", &rg::waiting_bytes, "Bytes that wait for later results.");
    m.def("release_memory", &rg::release_memory, "Give them back to the system; returns how many there were.");
    m.def("stream_seconds", &stream_seconds, nb::arg("dst"), nb::arg("sources"), nb::arg("non_temporal"),
          nb::arg("threads"), "Seconds for one pass of dst = sum(sources) over contiguous float32 arrays.");

    nb::enum_<Outcome>(m, "Outcome", "What became of a call; unless `done`, nothing was written.")
        .value("done", Outcome::done)
        .value("in_place", Outcome::in_place)
        .value("overlap", Outcome::overlap)
        .value("out_of_range", Outcome::out_of_range);

    m.def("activation_forward", &activation_forward, nb::arg("kind"), nb::arg("alpha"), nb::arg("beta"),
          nb::arg("dtype"), nb::arg("x"), nb::arg("y"), nb::arg("overlap_checked"), nb::arg("threads"), "y = f(x)");
    m.def("activation_backward", &activation_backward, nb::arg("kind"), nb::arg("alpha"), nb::arg("beta"),
          nb::arg("dtype"), nb::arg("dy"), nb::arg("slope_from"), nb::arg("slope_from_input"), nb::arg("dx"),
          nb::arg("accumulate"), nb::arg("overlap_checked"), nb::arg("threads"),
          "dx = dy * f', the slope found from x or from y.");

    nb::class_<NormProblem>(m, "NormProblem", "A normalization of one shape with one set of options.")
        .def(nb::init<std::vector<int64_t>, const std::string&, int64_t, int, double, int, double, double, bool>(),
             nb::arg("shape"), nb::arg("roles"), nb::arg("channels_per_set"), nb::arg("dtype"), nb::arg("eps"),
             nb::arg("activation"), nb::arg("alpha"), nb::arg("beta"), nb::arg("slope_from_input"))
        .def("forward", &NormProblem::forward, nb::arg("x"), nb::arg("gamma").none(), nb::arg("beta").none(),
             nb::arg("y").none(), nb::arg("keep").none(), nb::arg("statistics"), nb::arg("statistics_given"),
             nb::arg("overlap_checked"), nb::arg("threads"))
        .def("backward", &NormProblem::backward, nb::arg("dy"), nb::arg("x"), nb::arg("y").none(),
             nb::arg("gamma").none(), nb::arg("beta").none(), nb::arg("statistics"), nb::arg("statistics_given"),
             nb::arg("frozen"), nb::arg("sum_dz").none(), nb::arg("sum_dz_xhat").none(), nb::arg("count"),
             nb::arg("dx").none(), nb::arg("dgamma").none(), nb::arg("dbeta").none(), nb::arg("accumulate"),
             nb::arg("overlap_checked"), nb::arg("threads"))
        .def("gradient_sums", &NormProblem::gradient_sums, nb::arg("dy"), nb::arg("x"), nb::arg("y").none(),
             nb::arg("gamma").none(), nb::arg("beta").none(), nb::arg("statistics"), nb::arg("sum_dz"),
             nb::arg("sum_dz_xhat"), nb::arg("threads"));

    bind_lstm(m);
    bind_optimizer(m);
    bind_training(m);
}
