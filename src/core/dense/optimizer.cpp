#include "optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "../base/dispatch.h"
#include "../base/parallel.h"
#include "../base/scratch.h"

namespace rg {
namespace {

constexpr int64_t kBlock = 8192;  // elements of a parameter in one work item
constexpr int64_t kStage = 512;   // elements of a strided array gathered at a time

// Sorts the axes by the parameter's strides and merges those that form one axis in every array, so that arrays that are
// contiguous in any order of axes become one run.
void simplify(OptimizerParameter& parameter) {
    std::vector<OptimizerAxis>& axes = parameter.axes;
    axes.erase(std::remove_if(axes.begin(), axes.end(), [](const OptimizerAxis& a) { return a.extent == 1; }),
               axes.end());
    const int lead = parameter.array[kParameter] ? kParameter : kGradient;
    const auto outer = [=](const OptimizerAxis& a, const OptimizerAxis& b) {
        return std::llabs(a.stride[lead]) > std::llabs(b.stride[lead]);
    };
    for (auto axis = axes.begin(); axis != axes.end(); ++axis) {
        std::rotate(std::upper_bound(axes.begin(), axis, *axis, outer), axis, axis + 1);
    }
    Vector<OptimizerAxis> joined;
    for (const OptimizerAxis& inner : axes) {
        const bool joins = !joined.empty() && [&] {
            for (int k = 0; k < kOptimizerArrays; ++k) {
                if (joined.back().stride[k] != inner.stride[k] * inner.extent) return false;
            }
            return true;
        }();
        if (joins) {
            const int64_t extent = joined.back().extent * inner.extent;
            joined.back() = inner;
            joined.back().extent = extent;
        } else {
            joined.push_back(inner);
        }
    }
    const auto contiguous = [&](const OptimizerAxis& axis) {
        for (int k = 0; k < kOptimizerArrays; ++k) {
            if (parameter.array[k] && axis.stride[k] != 1) return false;
        }
        return true;
    };
    if (joined.size() == 1 && contiguous(joined[0])) joined.clear();
    axes.assign(joined.begin(), joined.end());
}

// Calls body(offset, stride, count) for every run of the elements [first, last), in the order of the axes.
template <class Body>
void for_runs(const OptimizerParameter& parameter, int64_t first, int64_t last, const Body& body) {
    if (parameter.axes.empty()) {
        int64_t offset[kOptimizerArrays], stride[kOptimizerArrays];
        std::fill(offset, offset + kOptimizerArrays, first);
        std::fill(stride, stride + kOptimizerArrays, int64_t(1));
        return body(offset, stride, last - first);
    }
    const OptimizerAxis& inner = parameter.axes.back();
    while (first < last) {
        const int64_t count = std::min(last - first, inner.extent - first % inner.extent);
        int64_t offset[kOptimizerArrays] = {}, index = first;
        for (size_t i = parameter.axes.size(); i-- > 0;) {
            const OptimizerAxis& axis = parameter.axes[i];
            for (int k = 0; k < kOptimizerArrays; ++k) offset[k] += index % axis.extent * axis.stride[k];
            index /= axis.extent;
        }
        body(offset, inner.stride, count);
        first += count;
    }
}

template <class A>
A* at(const OptimizerParameter& parameter, int array, int64_t offset) {
    A* data = static_cast<A*>(parameter.array[array]);
    return data ? data + offset : nullptr;
}

template <class A>
constexpr DType kDType = sizeof(A) == sizeof(double) ? DType::f64 : DType::f32;

template <class A>
void step_range(const OptimizerRule<A>& rule, const OptimizerParameter& parameter, int64_t first, int64_t last) {
    const OptimizerKernels<A>& kernels = kernel_table().optimizer.of<A>();
    const StorageKernels<A>& storage = kernel_table().storage.of<A>();
    for_runs(parameter, first, last, [&](const int64_t* offset, const int64_t* stride, int64_t count) {
        A* run[kOptimizerArrays];
        bool straight = true;
        for (int k = 0; k < kOptimizerArrays; ++k) {
            run[k] = at<A>(parameter, k, offset[k]);
            straight = straight && (!run[k] || stride[k] == 1);
        }
        if (straight) return kernels.step(rule, run, count);
        A buffer[kOptimizerArrays][kStage];
        for (int64_t i = 0; i < count; i += kStage) {
            const int64_t n = std::min(kStage, count - i);
            A* staged[kOptimizerArrays] = {};
            for (int k = 0; k < kOptimizerArrays; ++k) {
                if (!run[k]) continue;
                staged[k] = buffer[k];
                storage.load(kDType<A>, run[k] + i * stride[k], stride[k], n, buffer[k]);
            }
            kernels.step(rule, staged, n);
            for (int k = 0; k < kOptimizerArrays; ++k) {
                if (!run[k] || k == kGradient) continue;
                storage.store(kDType<A>, buffer[k], n, run[k] + i * stride[k], stride[k], false, false);
            }
        }
    });
}

template <class A>
double square_range(const OptimizerParameter& parameter, int64_t first, int64_t last) {
    const OptimizerKernels<A>& kernels = kernel_table().optimizer.of<A>();
    const StorageKernels<A>& storage = kernel_table().storage.of<A>();
    double sum = 0;
    for_runs(parameter, first, last, [&](const int64_t* offset, const int64_t* stride, int64_t count) {
        const A* run = at<A>(parameter, kGradient, offset[kGradient]);
        if (stride[kGradient] == 1) {
            sum += kernels.sum_squares(run, count);
            return;
        }
        A buffer[kStage];
        for (int64_t i = 0; i < count; i += kStage) {
            const int64_t n = std::min(kStage, count - i);
            storage.load(kDType<A>, run + i * stride[kGradient], stride[kGradient], n, buffer);
            sum += kernels.sum_squares(buffer, n);
        }
    });
    return sum;
}

// All blocks of all parameters, in order, as one parallel job.
class Blocks {
public:
    Blocks(const std::vector<OptimizerParameter>& parameters, int threads)
        : parameters_(parameters), threads_(threads) {
        first_block_.push_back(0);
        for (const OptimizerParameter& parameter : parameters) {
            elements_ += parameter.elements;
            first_block_.push_back(first_block_.back() + (parameter.elements + kBlock - 1) / kBlock);
        }
    }

    int64_t count() const { return first_block_.back(); }
    int64_t first_block(size_t parameter) const { return first_block_[parameter]; }

    // body(block, parameter, first, last)
    template <class Body>
    void run(const Body& body) const {
        Workers(cost::kElement * double(elements_), threads_).ranges(count(), [&](int64_t first, int64_t last) {
            size_t p = size_t(std::upper_bound(first_block_.begin(), first_block_.end(), first) - first_block_.begin());
            --p;
            for (int64_t block = first; block < last; ++block) {
                while (block >= first_block_[p + 1]) ++p;
                const int64_t begin = (block - first_block_[p]) * kBlock;
                body(block, p, begin, std::min(begin + kBlock, parameters_[p].elements));
            }
        });
    }

private:
    const std::vector<OptimizerParameter>& parameters_;
    Vector<int64_t> first_block_;
    int64_t elements_ = 0;
    int threads_;
};

// The sum of squares of each gradient, accumulated over blocks in order.
Vector<double> square_sums(const std::vector<OptimizerParameter>& parameters, const Blocks& blocks) {
    Vector<double> partial(size_t(blocks.count())), sums(parameters.size());
    blocks.run([&](int64_t block, size_t p, int64_t first, int64_t last) {
        partial[size_t(block)] = parameters[p].dtype == DType::f64 ? square_range<double>(parameters[p], first, last)
                                                                   : square_range<float>(parameters[p], first, last);
    });
    for (size_t p = 0; p < parameters.size(); ++p) {
        for (int64_t b = blocks.first_block(p); b < blocks.first_block(p + 1); ++b) sums[p] += partial[size_t(b)];
    }
    return sums;
}

double norm_of_all(const Vector<double>& sums) {
    double sum = 0;
    for (const double s : sums) sum += s;
    return std::sqrt(sum);
}

template <class A>
OptimizerRule<A> rounded(const OptimizerRule<double>& rule, double factor, bool clip_before_scale) {
    OptimizerRule<A> out{};
    out.kind = rule.kind;
    out.nesterov = rule.nesterov;
    out.scale = A(rule.scale * factor);
    out.low = A(rule.low);
    out.high = A(rule.high);
    if (clip_before_scale) {
        // clip(g) * scale equals clip(g * scale) with scaled bounds, bit for bit: rounding is monotone.
        const auto scaled = [&](A bound) { return std::isinf(bound) && out.scale == 0 ? bound : bound * out.scale; };
        out.low = scaled(out.low);
        out.high = scaled(out.high);
        if (out.scale < 0) std::swap(out.low, out.high);
    }
    out.l2 = A(rule.l2);
    out.l1 = A(rule.l1);
    out.first = {A(rule.first.keep), A(rule.first.take)};
    out.second = {A(rule.second.keep), A(rule.second.take)};
    out.eps = A(rule.eps);
    out.eps_inside = A(rule.eps_inside);
    out.momentum = A(rule.momentum);
    out.gain = A(rule.gain);
    out.rate = A(rule.rate);
    out.decay = A(rule.decay);
    return out;
}

// 1 - base^exponent, as in ops/optimizer.py: without cancellation, and from products and sums alone, because the last
// bit of the C library's functions depends on the machine.
double one_minus_power(double base, int64_t exponent) {
    if (base == 0) return 1;
    const double once = 1 - base;
    double result = 0;
    for (int bit = 62; bit >= 0; --bit) {
        result *= 2 - result;
        if (exponent >> bit & 1) result += (1 - result) * once;
    }
    return result;
}

}  // namespace

void optimizer_step(const OptimizerRule<double>& rule, const NormClipping& clipping,
                    std::vector<OptimizerParameter>& parameters, int threads) {
    for (OptimizerParameter& parameter : parameters) {
        if (!parameter.axes.empty()) simplify(parameter);
    }
    const Blocks blocks(parameters, threads);
    Vector<double> factor(clipping.each ? parameters.size() : 1, 1.0);  // for each gradient, or for all
    if (clipping.maximum > 0) {
        const bool given = !clipping.each && clipping.known > 0;
        const Vector<double> sums = given ? Vector<double>() : square_sums(parameters, blocks);
        const double all = given ? clipping.known : norm_of_all(sums);
        const double unit = clipping.before_scale ? 1.0 : std::fabs(rule.scale);
        for (size_t f = 0; f < factor.size(); ++f) {
            const double norm = unit * (clipping.each ? std::sqrt(sums[f]) : all);
            if (!(norm <= clipping.maximum)) factor[f] = clipping.maximum / norm;
        }
    }
    Vector<OptimizerRule<float>> rules32;
    Vector<OptimizerRule<double>> rules64;
    for (const double f : factor) {
        rules32.push_back(rounded<float>(rule, f, clipping.before_scale));
        rules64.push_back(rounded<double>(rule, f, clipping.before_scale));
    }
    blocks.run([&](int64_t, size_t p, int64_t first, int64_t last) {
        const size_t r = clipping.each ? p : 0;
        if (parameters[p].dtype == DType::f64) {
            step_range(rules64[r], parameters[p], first, last);
        } else {
            step_range(rules32[r], parameters[p], first, last);
        }
    });
}

void scheduled_step(const ScheduledStep& call) {
    OptimizerRule<double> rule = call.rule;
    const double learning_rate = *call.learning_rate;
    if (rule.kind == OptimizerKind::adam) {
        const double first = one_minus_power(rule.first.keep, *call.count);
        const double second = std::sqrt(one_minus_power(rule.second.keep, *call.count));
        rule.eps = call.epsilon_hat ? call.eps : call.eps * second;
        rule.rate = -learning_rate * second / first;
        rule.decay = learning_rate * call.weight_decay;
    } else {
        rule.gain = call.gain + call.gain_factor * learning_rate;
        rule.rate = call.rate + call.rate_factor * learning_rate;
    }
    // The list is only simplified, which changes nothing from the second time on.
    optimizer_step(rule, call.clipping, const_cast<std::vector<OptimizerParameter>&>(call.parameters), call.threads);
}

void given_step(const GivenStep& call) {
    const auto value = [&](const void* p) {
        return call.dtype == DType::f64 ? *static_cast<const double*>(p) : double(*static_cast<const float*>(p));
    };
    OptimizerRule<double> rule = call.rule;
    rule.rate = -value(call.learning_rate);
    if (rule.kind == OptimizerKind::adam) {
        for (const auto& [average, keep] :
             {std::pair(&rule.first, call.keep_first), std::pair(&rule.second, call.keep_second)}) {
            *average = {value(keep), 1 - value(keep)};
        }
        rule.eps = value(call.eps);
    }
    optimizer_step(rule, {}, const_cast<std::vector<OptimizerParameter>&>(call.parameters), call.threads);
}

double gradient_norm(std::vector<OptimizerParameter>& parameters, int threads) {
    for (OptimizerParameter& parameter : parameters) {
        if (!parameter.axes.empty()) simplify(parameter);
    }
    return norm_of_all(square_sums(parameters, Blocks(parameters, threads)));
}

}  // namespace rg
