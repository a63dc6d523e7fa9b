// The logarithm in double precision, with the same bits on every machine.
#pragma once

#include <cmath>
#include <limits>

namespace rg {

// log(x) of a positive normal x, within 2 ulp. Not the C library's, whose last bit depends on its version and on the
// machine: with x = m 2^e and m near 1, log(x) = e log(2) + 2 atanh((m - 1) / (m + 1)).
inline double natural_log(double x) {
    if (!(x >= std::numeric_limits<double>::min() && x < std::numeric_limits<double>::infinity())) return std::log(x);
    int exponent;
    double m = std::frexp(x, &exponent);
    if (m < 0.70710678118654752440) {
        m *= 2;
        --exponent;
    }
    const double s = (m - 1) / (m + 1), s2 = s * s, s4 = s2 * s2, s8 = s4 * s4;
    // The terms s^2k / (2k + 1) up to k = 12, as |s| < 0.172; in four chains, which run in parallel.
    const auto chain = [&](int k) { return 1.0 / (2 * k + 1) + s8 * (1.0 / (2 * k + 9) + s8 * (1.0 / (2 * k + 17))); };
    const double tail = s2 * ((chain(1) + s2 * chain(2)) + s4 * (chain(3) + s2 * chain(4)));
    const double high = exponent * 0x1.62e42fefap-1,
                 low = exponent * 0x1.cf79abc9e3b398p-40;  // of log(2); high is exact
    return high + (2 * s + (2 * s * tail + low));
}

}  // namespace rg
