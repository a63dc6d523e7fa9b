// Arrays of any data type among sentinels, and numbers to fill them with; written independently of the kernels.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "problems.h"

namespace problems {

using rg::DType;
using Values = std::vector<double>;

inline const std::vector<DType> kWideTypes = {DType::f32, DType::f64};

inline int64_t item_size(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

inline double decode(DType dtype, const unsigned char* p) {
    if (dtype == DType::f64) {
        double v;
        memcpy(&v, p, 8);
        return v;
    }
    if (dtype == DType::f32) {
        float v;
        memcpy(&v, p, 4);
        return double(v);
    }
    uint16_t bits;
    memcpy(&bits, p, 2);
    const int mantissa_bits = dtype == DType::f16 ? 10 : 7, exponent_bits = 15 - mantissa_bits;
    const int top = (1 << exponent_bits) - 1, bias = top / 2;
    const int exponent = (bits >> mantissa_bits) & top, mantissa = bits & ((1 << mantissa_bits) - 1);
    double v;
    if (exponent == top) {
        v = mantissa ? NAN : INFINITY;
    } else if (exponent == 0) {
        v = std::ldexp(mantissa, 1 - bias - mantissa_bits);
    } else {
        v = std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    }
    return bits & 0x8000 ? -v : v;
}

// `v` is a number that the type has, and not subnormal.
inline void encode(DType dtype, double v, unsigned char* p) {
    if (dtype == DType::f64) {
        memcpy(p, &v, 8);
        return;
    }
    const float single = float(v);
    if (dtype == DType::f32) {
        memcpy(p, &single, 4);
        return;
    }
    uint32_t wide;
    memcpy(&wide, &single, 4);
    uint16_t bits = uint16_t(wide >> 16);  // bfloat16 is the first half of a float
    if (dtype == DType::f16) {
        int exponent;
        const double fraction = std::frexp(std::fabs(v), &exponent);  // in [1/2, 1)
        bits = std::signbit(v) ? 0x8000 : 0;
        if (std::isinf(v)) {
            bits = uint16_t(bits | 0x7c00);
        } else if (std::isnan(v)) {
            bits = uint16_t(bits | 0x7e00);
        } else if (v != 0) {
            bits = uint16_t(bits | ((exponent - 1 + 15) << 10) | (int(std::ldexp(fraction, 11)) - 1024));
        }
    }
    memcpy(p, &bits, 2);
}

// An array among sentinels, `shift` elements away from an aligned address. Drivers must leave the sentinels alone.
class Block {
public:
    Block(DType dtype, int64_t count, int64_t shift) : dtype_(dtype), count_(count) {
        const int64_t item = item_size(dtype);
        start_ = kGuard + shift * item;
        bytes_ = (start_ + count * item + kGuard + 63) / 64 * 64;
        memory_.reset(static_cast<unsigned char*>(aligned_alloc(64, size_t(bytes_))));
        memset(memory_.get(), kSentinel, size_t(bytes_));
    }
    Block(DType dtype, const Values& values, int64_t shift) : Block(dtype, int64_t(values.size()), shift) {
        for (int64_t i = 0; i < count_; ++i) set(i, values[size_t(i)]);
    }
    void set(int64_t i, double v) { encode(dtype_, v, memory_.get() + start_ + i * item_size(dtype_)); }
    void* data() const { return memory_.get() + start_; }
    template <class T>
    T* as() const {
        return static_cast<T*>(data());
    }
    Output output(const std::string& name) const {
        const int64_t end = start_ + count_ * item_size(dtype_);
        for (int64_t i = 0; i < bytes_; ++i) {
            if ((i < start_ || i >= end) && memory_.get()[i] != kSentinel) {
                fprintf(stderr, "%s: byte %lld, outside of the array, was written to\n", name.c_str(),
                        static_cast<long long>(i - start_));
                exit(1);
            }
        }
        return {name, dtype_, Bytes(memory_.get() + start_, memory_.get() + end)};
    }

private:
    static constexpr int64_t kGuard = 128;
    static constexpr unsigned char kSentinel = 0xa5;
    struct Free {
        void operator()(unsigned char* p) const { free(p); }
    };
    DType dtype_;
    int64_t count_, start_, bytes_;
    std::unique_ptr<unsigned char[], Free> memory_;
};

// Multiples of 1/32 between -4 and 4.
class Random {
public:
    explicit Random(uint64_t seed) : state_(seed * 2654435761u + 88172645463325252u) {}
    uint64_t bits() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return state_ >> 11;
    }
    double operator()() { return (double(bits() % 255) - 127) / 32; }
    int64_t below(int64_t end) { return int64_t(bits() % uint64_t(end)); }
    Values take(int64_t count, double scale = 1) {
        Values values;
        for (int64_t i = 0; i < count; ++i) values.push_back((*this)() * scale);
        return values;
    }

private:
    uint64_t state_;
};

}  // namespace problems
