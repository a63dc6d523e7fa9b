// A normalization: views of its arrays, and the calls of the drivers.
#pragma once

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "../core/norm/norm.h"
#include "axes.h"
#include "view.h"

namespace rg::bind {

// What forward saves for backward.
template <class Array>
struct NormSaved {
    Array x, y, gamma, beta, statistics;
    bool given, frozen;
};

// A normalization of one shape and one set of options. Immutable, and reused for many calls.
class NormProblem {
public:
    // roles: one of 'n', 'c', 'r' per axis
    NormProblem(std::vector<int64_t> shape, const std::string& roles, int64_t channels_per_set, int dtype, double eps,
                int activation, double alpha, double beta, bool slope_from_input)
        : shape_(std::move(shape)),
          channels_per_set_(channels_per_set),
          dtype_(static_cast<DType>(dtype)),
          element_(element_of(dtype_)),
          eps_(eps),
          activation_{static_cast<ActivationKind>(activation), alpha, beta},
          needs_y_(activation_.kind != ActivationKind::identity && !slope_from_input),
          needs_beta_(activation_.kind != ActivationKind::identity && slope_from_input) {
        if (needs_y_ && !output_tells_slope(activation_.kind)) {
            throw nb::value_error("the output does not determine the slope");
        }
        if (roles.size() != shape_.size()) throw nb::value_error("roles and shape differ in length");
        if (shape_.size() > kMaxAxes) throw nb::value_error("too many axes");
        double bytes = 16;  // statistics and sums take two doubles per set, and a set may have only one element
        for (const int64_t extent : shape_) bytes *= double(extent);
        if (bytes >= 0x1p62) throw nb::value_error("the shape is too large");
        for (size_t i = 0; i < shape_.size(); ++i) {
            if (shape_[i] < 0) throw nb::value_error("negative extent");
            roles_.push_back(roles[i] == 'n' ? AxisRole::n : roles[i] == 'c' ? AxisRole::c : AxisRole::r);
            if (roles[i] == 'c') parameter_shape_.push_back(shape_[i]);
            (roles[i] == 'n' ? samples_ : roles[i] == 'c' ? channels_ : reduced_) *= shape_[i];
        }
        if (elements() == 0) throw nb::value_error("no elements");
        if (channels_per_set_ < 1 || channels_ % channels_per_set_) {
            throw nb::value_error("channels_per_set does not divide the channels");
        }
        sets_ = samples_ * (channels_ / channels_per_set_);
        std::vector<size_t> order(shape_.size());  // of the axes in memory
        std::iota(order.begin(), order.end(), size_t(0));
        strides_[0] = dense_strides(shape_, order, item_size(element_));
        if (order.size() > 2) std::rotate(order.begin() + 1, order.begin() + 2, order.end());
        strides_[1] = dense_strides(shape_, order, item_size(element_));
        order.resize(parameter_shape_.size());
        std::iota(order.begin(), order.end(), size_t(0));
        parameter_strides_ = dense_strides(parameter_shape_, order, item_size(arithmetic_of(dtype_)));
    }

    // y may be x itself, if `keep` takes a copy of x.
    template <class Array>
    Outcome forward(Array x_array, Array gamma_array, Array beta_array, Array y_array, Array keep_array,
                    Array statistics_array, bool statistics_given, bool overlap_checked, int threads) const {
        Call call;
        const View x(call, x_array, "x", element_), gamma(call, gamma_array, "gamma", arithmetic_of(dtype_)),
            beta(call, beta_array, "beta", arithmetic_of(dtype_)), y(call, y_array, "out", element_, Access::write),
            keep(call, keep_array, "keep_x", element_, Access::write),
            statistics(call, statistics_array, "statistics", Element::f64,
                       statistics_given ? Access::read : Access::write);
        for (const View* v : {&x, &y, &keep}) v->check_shape(shape_);
        for (const View* v : {&gamma, &beta}) v->check_contiguous(parameter_shape_);
        statistics.check_vector(2 * sets_);
        for (const View* v : {&x, &statistics}) v->require();
        if (keep.present()) y.require();
        if (!overlap_checked) {
            call.check_overlap({{&y, &x}});
            if (y.overlaps(x) && !keep.present()) call.refuse(Reason::in_place, "out");
        }
        if (call.refused()) return call.refusal();
        NormForward forward;
        forward.shape = axes({&x, &y, nullptr, nullptr, &keep});
        forward.dtype = dtype_;
        forward.activation = activation_;
        forward.eps = eps_;
        forward.x = x.data();
        forward.gamma = gamma.data();
        forward.beta = beta.data();
        forward.statistics_given = statistics_given;
        forward.mean = static_cast<double*>(statistics.data());
        forward.var = forward.mean + sets_;
        forward.y = y.data();
        forward.keep = keep.data();
        run_driver<Array>(double(elements()), threads, forward, norm_forward);
        return {};
    }

    // dx may be dy itself. Of y and beta, only the one that the slope is computed from is read.
    template <class Array>
    Outcome backward(Array dy_array, const NormSaved<Array>& saved, Array given_sum_dz_array,
                     Array given_sum_dz_xhat_array, Array given_count_array, Array dx_array, Array dgamma_array,
                     Array dbeta_array, bool accumulate, bool overlap_checked, int threads) const {
        Call call;
        const Inputs in(call, dy_array, saved, *this, true);
        const View given_sum_dz(call, given_sum_dz_array, "sum_dz", Element::f64),
            given_sum_dz_xhat(call, given_sum_dz_xhat_array, "sum_dz_xhat", Element::f64),
            given_count(call, given_count_array, "count", Element::f64),
            dx(call, dx_array, "dx", element_, Access::write),
            dgamma(call, dgamma_array, "dgamma", arithmetic_of(dtype_), Access::write),
            dbeta(call, dbeta_array, "dbeta", arithmetic_of(dtype_), Access::write);
        dx.check_shape(shape_);
        for (const View* v : {&dgamma, &dbeta}) v->check_contiguous(parameter_shape_);
        check_sums(given_sum_dz, given_sum_dz_xhat);
        if (given_sum_dz.present()) given_count.require().check_vector(1);
        if (!overlap_checked) call.check_overlap({{&dx, &in.dy}});
        if (call.refused()) return call.refusal();
        NormBackward backward = in.call(*this, dx);
        backward.statistics_given = saved.given;
        backward.frozen = saved.frozen;
        backward.accumulate = accumulate;
        backward.given_sum_dz = static_cast<const double*>(given_sum_dz.data());
        backward.given_sum_dz_xhat = static_cast<const double*>(given_sum_dz_xhat.data());
        backward.given_count = static_cast<const double*>(given_count.data());
        backward.dx = dx.data();
        backward.dgamma = dgamma.data();
        backward.dbeta = dbeta.data();
        run_driver<Array>(double(elements()), threads, backward, norm_backward);
        return {};
    }

    // The same for dense arrays that are given by their addresses, 0 for none: axes in the order of the shape, or with
    // axis 1 last (`channels_last`). The caller has checked that the memory holds them.
    Outcome forward_at(uintptr_t x, uintptr_t gamma, uintptr_t beta, uintptr_t y, nb::handle statistics,
                       bool statistics_given, bool channels_last, int threads) const {
        const At at(*this, channels_last, statistics);
        const RawArray x_array = at.data(x), gamma_array = at.parameter(gamma), beta_array = at.parameter(beta),
                       y_array = at.data(y);
        Outcome outcome;
        without_lock(double(elements()), [&] {
            outcome = forward<const RawArray*>(given(x_array), given(gamma_array), given(beta_array), given(y_array),
                                               nullptr, &at.statistics, statistics_given, false, threads);
        });
        return outcome;
    }
    Outcome backward_at(uintptr_t dy, uintptr_t x, uintptr_t y, uintptr_t gamma, uintptr_t beta, nb::handle statistics,
                        bool statistics_given, bool frozen, uintptr_t dx, uintptr_t dgamma, uintptr_t dbeta,
                        bool channels_last, int threads) const {
        const At at(*this, channels_last, statistics);
        const RawArray dy_array = at.data(dy), x_array = at.data(x), y_array = at.data(y),
                       gamma_array = at.parameter(gamma), beta_array = at.parameter(beta), dx_array = at.data(dx),
                       dgamma_array = at.parameter(dgamma), dbeta_array = at.parameter(dbeta);
        const NormSaved<const RawArray*> saved = {
            given(x_array),   given(y_array), given(gamma_array), given(beta_array), &at.statistics,
            statistics_given, frozen};
        Outcome outcome;
        without_lock(double(elements()), [&] {
            outcome = backward<const RawArray*>(given(dy_array), saved, nullptr, nullptr, nullptr, given(dx_array),
                                                given(dgamma_array), given(dbeta_array), false, false, threads);
        });
        return outcome;
    }

    Outcome gradient_sums(nb::handle dy_array, const NormSaved<nb::handle>& saved, nb::handle sum_dz_array,
                          nb::handle sum_dz_xhat_array, bool overlap_checked, int threads) const {
        Call call;
        const Inputs in(call, dy_array, saved, *this, needs_beta_);
        const View sum_dz(call, sum_dz_array, "sum_dz", Element::f64, Access::write),
            sum_dz_xhat(call, sum_dz_xhat_array, "sum_dz_xhat", Element::f64, Access::write),
            no_dx(call, nb::none(), "dx", element_);
        for (const View* v : {&sum_dz, &sum_dz_xhat}) v->require();
        check_sums(sum_dz, sum_dz_xhat);
        if (!overlap_checked) call.check_overlap();
        if (call.refused()) return call.refusal();
        NormBackward backward = in.call(*this, no_dx);
        backward.statistics_given = true;  // sums across workers come with statistics of more than x
        backward.sum_dz = static_cast<double*>(sum_dz.data());
        backward.sum_dz_xhat = static_cast<double*>(sum_dz_xhat.data());
        run_driver<nb::handle>(double(elements()), threads, backward, norm_backward);
        return {};
    }

    int64_t sets() const { return sets_; }

private:
    int64_t elements() const { return samples_ * channels_ * reduced_; }

    // Sums have one value per channel, so each channel must be one set.
    void check_sums(const View& sum_dz, const View& sum_dz_xhat) const {
        if (!sum_dz.present() && !sum_dz_xhat.present()) return;
        if (samples_ != 1 || channels_per_set_ != 1) throw nb::value_error("sums are for batch normalization only");
        for (const View* v : {&sum_dz, &sum_dz_xhat}) v->require().check_vector(channels_);
    }

    NormShape axes(const SharedShape& arrays) const {
        NormShape shape;
        shape.channels_per_set = channels_per_set_;
        for (size_t i = 0; i < shape_.size(); ++i) {
            AxisList& list = roles_[i] == AxisRole::n ? shape.n : roles_[i] == AxisRole::c ? shape.c : shape.r;
            list.axis[list.size++] = axis_of(int(i), shape_[i], arrays);
        }
        return shape;
    }

    static std::vector<int64_t> dense_strides(const std::vector<int64_t>& shape, const std::vector<size_t>& order,
                                              int64_t step) {
        std::vector<int64_t> strides(shape.size());
        for (size_t i = order.size(); i-- > 0;) {
            strides[order[i]] = step;
            step *= shape[order[i]];
        }
        return strides;
    }

    // Descriptions of dense arrays by their addresses, and of the statistics, a contiguous NumPy array of float64.
    struct At {
        const NormProblem& problem;
        const std::vector<int64_t>& strides;
        ArrayMemory memory;
        int64_t step = int64_t(sizeof(double));
        RawArray statistics;

        At(const NormProblem& p, bool channels_last, nb::handle array)
            : problem(p), strides(p.strides_[channels_last]) {
            if (Py_TYPE(array.ptr()) != numpy().ndarray ||
                !is_dtype(reinterpret_cast<const ArrayObject*>(array.ptr())->dtype, Element::f64) ||
                !memory.read(array.ptr(), step) || !memory.contiguous) {
                throw nb::type_error("statistics must be a contiguous array of float64");
            }
            statistics = {Element::f64, memory.data, 1, &memory.elements, &step};
        }
        At(const At&) = delete;
        At& operator=(const At&) = delete;

        RawArray data(uintptr_t address) const {
            return {problem.element_, reinterpret_cast<char*>(address), int(problem.shape_.size()),
                    problem.shape_.data(), strides.data()};
        }
        RawArray parameter(uintptr_t address) const {
            return {arithmetic_of(problem.dtype_), reinterpret_cast<char*>(address),
                    int(problem.parameter_shape_.size()), problem.parameter_shape_.data(),
                    problem.parameter_strides_.data()};
        }
    };
    static const RawArray* given(const RawArray& array) { return array.data ? &array : nullptr; }

    // What backward reads.
    struct Inputs {
        const View dy, x, y, gamma, beta, statistics;

        template <class Array>
        Inputs(Call& call, Array dy_array, const NormSaved<Array>& saved, const NormProblem& p, bool needs_gamma)
            : dy(call, dy_array, "dy", p.element_),
              x(call, saved.x, "x", p.element_),
              y(call, if_needed(saved.y, p.needs_y_), "y", p.element_),
              gamma(call, if_needed(saved.gamma, needs_gamma), "gamma", arithmetic_of(p.dtype_)),
              beta(call, if_needed(saved.beta, p.needs_beta_), "beta", arithmetic_of(p.dtype_)),
              statistics(call, saved.statistics, "statistics", Element::f64) {
            for (const View* v : {&dy, &x, &y}) v->check_shape(p.shape_);
            for (const View* v : {&gamma, &beta}) v->check_contiguous(p.parameter_shape_);
            statistics.check_vector(2 * p.sets_);
            for (const View* v : {&dy, &x, &statistics}) v->require();
            if (p.needs_y_) y.require();
        }

        NormBackward call(const NormProblem& p, const View& dx) const {
            NormBackward call;
            call.shape = p.axes({&x, &y, &dy, &dx, nullptr});
            call.dtype = p.dtype_;
            call.activation = p.activation_;
            call.eps = p.eps_;
            call.x = x.data();
            call.y = y.data();
            call.dy = dy.data();
            call.gamma = gamma.data();
            call.beta = beta.data();
            call.slope_from_input = p.needs_beta_;
            call.mean = static_cast<const double*>(statistics.data());
            call.var = call.mean + p.sets_;
            return call;
        }

        template <class Array>
        static Array if_needed(Array array, bool needed) {
            return needed ? array : absent<Array>();
        }
    };

    std::vector<int64_t> shape_, parameter_shape_;
    std::vector<int64_t> strides_[2], parameter_strides_;  // of dense arrays, in bytes; [1]: with axis 1 last
    std::vector<AxisRole> roles_;
    int64_t channels_per_set_;
    DType dtype_;
    Element element_;
    double eps_;
    Activation activation_;
    bool needs_y_, needs_beta_;  // backward computes the slope from the output, or from the input, which it recomputes
    int64_t samples_ = 1, channels_ = 1, reduced_ = 1, sets_ = 0;
};

}  // namespace rg::bind
