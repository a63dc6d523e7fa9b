// Runs every driver at every instruction-set level that is built in and runs here, and compares.
//
// The reference is float64 at the scalar level. Every level must be within each problem's bound of it at every data
// type (a fused multiply-add rounds once where the scalar level rounds twice, so bits differ), have the scalar level's
// bits where a problem says so, and the same bits at any number of threads. `make aarch64` runs it under an emulator.
#include <string.h>

#include <cmath>
#include <cstdio>

#include "../../src/core/base/dispatch.h"
#include "problems.h"

namespace {

using problems::Output;
using problems::Problem;

int failures = 0;

void fail(const std::string& level, const Problem& problem, rg::DType dtype, const std::string& what) {
    ++failures;
    fprintf(stderr, "%s, %s, %s: %s\n", level.c_str(), problem.name.c_str(), problems::name_of(dtype), what.c_str());
}

void check(bool good, const char* what) {
    if (good) return;
    ++failures;
    fprintf(stderr, "%s\n", what);
}

bool same_bits(const std::vector<Output>& a, const std::vector<Output>& b) {
    for (size_t i = 0; i < a.size(); ++i) {
        if (a[i].bytes != b[i].bytes) return false;
    }
    return a.size() == b.size();
}

// The largest error of an output, in units of the last place of its largest finite value; infinite where one is NaN or
// infinite and the other is not the same.
double error_of(const Output& output, const Output& reference, double unit) {
    const std::vector<double> values = problems::values_of(output), expected = problems::values_of(reference);
    double scale = 0, error = 0;
    for (const double v : expected) scale = std::isfinite(v) ? std::fmax(scale, std::fabs(v)) : scale;
    for (size_t i = 0; i < values.size(); ++i) {
        if (!std::isfinite(expected[i]) || !std::isfinite(values[i])) {
            const bool same = std::isnan(expected[i]) ? std::isnan(values[i]) : expected[i] == values[i];
            if (!same) return INFINITY;
        } else if (values[i] != expected[i]) {
            error = std::fmax(error, std::fabs(values[i] - expected[i]) / (scale * unit));
        }
    }
    return values.size() == expected.size() ? error : INFINITY;
}

uint64_t digest(uint64_t hash, const std::vector<Output>& outputs) {
    for (const Output& output : outputs) {
        for (const unsigned char byte : output.bytes) hash = (hash ^ byte) * 0x100000001b3u;
    }
    return hash;
}

std::vector<Output> run_at(const std::string& level, const Problem& problem, rg::DType dtype, int threads) {
    check(rg::select_isa(level), "a level that is said to be available cannot be selected");
    return problem.run(dtype, threads);
}

// The comparison itself must see a wrong element, a NaN and a missing one.
void check_comparison() {
    const auto doubles = [](std::vector<double> values) {
        Output output{"", rg::DType::f64, problems::Bytes(values.size() * 8)};
        memcpy(output.bytes.data(), values.data(), output.bytes.size());
        return output;
    };
    const double unit = problems::unit_of(rg::DType::f64);
    check(error_of(doubles({1, 2, INFINITY, NAN}), doubles({1, 2, INFINITY, NAN}), unit) == 0, "equal is not equal");
    check(error_of(doubles({1, 2 + 16 * unit}), doubles({1, 2}), unit) == 8, "an error is not measured");
    check(error_of(doubles({1, NAN}), doubles({1, 2}), unit) == INFINITY, "a NaN is not seen");
    check(error_of(doubles({1, 2}), doubles({1, NAN}), unit) == INFINITY, "a missing NaN is not seen");
    check(error_of(doubles({1}), doubles({1, 2}), unit) == INFINITY, "a missing element is not seen");
}

}  // namespace

// --quick: without problems that do not stay in cache. --digest: also a number for all bits of a level, to compare
// builds.
int main(int count, char** arguments) {
    bool quick = false, digests = false;
    for (int i = 1; i < count; ++i) {
        quick = quick || !strcmp(arguments[i], "--quick");
        digests = digests || !strcmp(arguments[i], "--digest");
    }
    check_comparison();
    const std::vector<Problem> list = problems::all(!quick);
    for (const std::string& level : rg::available_isa_levels()) {
        double worst = 0;
        std::string worst_name;
        uint64_t hash = 0xcbf29ce484222325u;
        int runs = 0;
        for (const Problem& problem : list) {
            const std::vector<Output> reference = run_at("scalar", problem, rg::DType::f64, 1);
            for (const rg::DType dtype : problem.dtypes) {
                const std::vector<Output> outputs = run_at(level, problem, dtype, 1);
                ++runs;
                hash = digest(hash, outputs);
                if (!same_bits(outputs, run_at(level, problem, dtype, 3))) {
                    fail(level, problem, dtype, "bits differ between 1 and 3 threads");
                }
                if (problem.units == 0) {
                    if (!same_bits(outputs, run_at("scalar", problem, dtype, 1))) {
                        fail(level, problem, dtype, "bits are not the scalar level's");
                    }
                    continue;
                }
                for (size_t i = 0; i < outputs.size(); ++i) {
                    // What is kept in double follows from float arithmetic where the data is not double.
                    const bool wide = outputs[i].dtype == rg::DType::f64 && dtype != rg::DType::f64;
                    const double unit = problems::unit_of(wide ? rg::DType::f32 : outputs[i].dtype);
                    const double error = error_of(outputs[i], reference[i], unit) / problem.units;
                    if (error > worst) {
                        worst = error;
                        worst_name = problem.name + ", " + problems::name_of(dtype) + ", " + outputs[i].name;
                    }
                    if (!(error <= 1)) {
                        fail(level, problem, dtype,
                             outputs[i].name + " is off by " + std::to_string(error) + " of its bound");
                    }
                }
            }
        }
        printf("%s: %d runs, largest error %.2f of its bound (%s)", level.c_str(), runs, worst, worst_name.c_str());
        if (digests) printf(", digest %016llx", static_cast<unsigned long long>(hash));
        printf("\n");
    }
    if (failures) printf("%d failures\n", failures);
    return failures != 0;
}
