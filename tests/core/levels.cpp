// Runs every driver at every instruction-set level that is built in and runs here, and compares.
//
// The scalar level must be within each problem's bound of float64 at every data type. All levels must have its bits, at
// any number of threads and with any sizes of the caches; so must all architectures and compilers, which
// bits.txt has the digests for. `make levels` runs it here, and `make aarch64` under an emulator.
#include <string.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <set>

#include "../../src/core/base/dispatch.h"
#include "../../src/core/base/machine.h"
#include "problems.h"

namespace {

using problems::Output;
using problems::Problem;

int failures = 0;

void check(bool good, const char* what) {
    if (good) return;
    ++failures;
    fprintf(stderr, "%s\n", what);
}

// The bytes of an output. The sign and the payload of a NaN that arithmetic makes depend on the architecture, so all of
// them count as the same.
problems::Bytes bits_of(const Output& output) {
    problems::Bytes bytes = output.bytes;
    const std::vector<double> values = problems::values_of(output);
    const size_t item = values.empty() ? 0 : bytes.size() / values.size();
    for (size_t i = 0; i < values.size(); ++i) {
        if (std::isnan(values[i])) memset(&bytes[i * item], 0xff, item);
    }
    return bytes;
}

bool same_bits(const std::vector<Output>& a, const std::vector<Output>& b) {
    for (size_t i = 0; i < a.size(); ++i) {
        if (a[i].bytes != b[i].bytes && bits_of(a[i]) != bits_of(b[i])) return false;
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

// Continues a digest (FNV-1a).
constexpr uint64_t kFirst = 0xcbf29ce484222325u;
uint64_t digest(uint64_t hash, const std::vector<Output>& outputs) {
    for (const Output& output : outputs) {
        for (const unsigned char byte : bits_of(output)) hash = (hash ^ byte) * 0x100000001b3u;
    }
    return hash;
}
std::string written(uint64_t hash) {
    char text[17];
    snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
    return text;
}

std::vector<Output> run_at(const std::string& level, const Problem& problem, rg::DType dtype, int threads) {
    check(rg::select_isa(level), "a level that is said to be available cannot be selected");
    return problem.run(dtype, threads);
}

// The comparisons themselves must see a wrong element, a NaN and a missing one.
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
    check(same_bits({doubles({1, NAN})}, {doubles({1, -NAN})}), "the sign of a NaN is seen");
    check(!same_bits({doubles({1, 0.0})}, {doubles({1, -0.0})}), "the sign of a zero is not seen");
    check(!same_bits({doubles({1})}, {doubles({NAN})}), "a NaN is not seen in bits");
    const auto digest_of = [&](std::vector<double> values) { return digest(kFirst, {doubles(values)}); };
    check(digest_of({1, NAN}) == digest_of({1, -NAN}), "the sign of a NaN is in the digest");
    check(digest_of({1, 0.0}) != digest_of({1, -0.0}), "the sign of a zero is not in the digest");
}

// One digest for all problems of a kind and data type, in lines "digest kind".
using Digests = std::map<std::string, std::string>;
Digests read_digests(const char* path) {
    Digests digests;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) digests[line.substr(17)] = line.substr(0, 16);
    return digests;
}

// Runs a problem at a data type at every level; `base` are the results at the scalar level with one thread.
void compare_levels(const Problem& problem, rg::DType dtype, const std::string& name, const std::vector<Output>& base) {
    constexpr rg::Caches kTiny = {1 << 10, 4 << 10, 16 << 10, 1};
    for (const std::string& level : rg::available_isa_levels()) {
        for (const int threads : {1, 3}) {
            for (const bool tiny : {false, true}) {
                if (level == "scalar" && threads == 1 && !tiny) continue;
                rg::override_caches(tiny ? &kTiny : nullptr);
                if (same_bits(run_at(level, problem, dtype, threads), base)) continue;
                ++failures;
                fprintf(stderr, "%s: other bits at %s with %d threads%s\n", name.c_str(), level.c_str(), threads,
                        tiny ? " and tiny caches" : "");
            }
        }
    }
    rg::override_caches(nullptr);
}

}  // namespace

// levels [--quick | --write] [--list] bits.txt
// --quick: without problems that do not stay in cache. --write: save the digests, after a change that is meant to
// change bits. --list: print the digest of each problem, to find where two machines differ.
int main(int count, char** arguments) {
    bool quick = false, write = false, list = false;
    const char* path = nullptr;
    for (int i = 1; i < count; ++i) {
        const std::string argument = arguments[i];
        if (argument == "--quick") {
            quick = true;
        } else if (argument == "--write") {
            write = true;
        } else if (argument == "--list") {
            list = true;
        } else {
            path = arguments[i];
        }
    }
    if (!path || (quick && write)) {
        fprintf(stderr, "usage: levels [--quick | --write] [--list] bits.txt\n");
        return 2;
    }
    check_comparison();
    std::set<std::string> small;
    for (const Problem& problem : problems::all(false)) small.insert(problem.name);
    std::map<std::string, uint64_t> found;
    double worst = 0;
    std::string worst_name;
    int runs = 0;
    for (const Problem& problem : problems::all(!quick)) {
        const std::vector<Output> reference = run_at("scalar", problem, rg::DType::f64, 1);
        for (const rg::DType dtype : problem.dtypes) {
            const std::string name = problem.name + ", " + problems::name_of(dtype);
            const std::vector<Output> base = run_at("scalar", problem, dtype, 1);
            ++runs;
            if (list) printf("%s %s\n", written(digest(kFirst, base)).c_str(), name.c_str());
            const std::string kind = (small.count(problem.name) ? "" : "large ") +
                                     problem.name.substr(0, problem.name.find(' ')) + ", " + problems::name_of(dtype);
            uint64_t& hash = found.emplace(kind, kFirst).first->second;
            hash = digest(hash, base);
            compare_levels(problem, dtype, name, base);
            for (size_t i = 0; i < base.size() && problem.units > 0; ++i) {
                // What is kept in double follows from float arithmetic where the data is not double.
                const bool wide = base[i].dtype == rg::DType::f64 && dtype != rg::DType::f64;
                const double unit = problems::unit_of(wide ? rg::DType::f32 : base[i].dtype);
                const double error = error_of(base[i], reference[i], unit) / problem.units;
                if (error > worst) {
                    worst = error;
                    worst_name = name + ", " + base[i].name;
                }
                if (!(error <= 1)) {
                    ++failures;
                    fprintf(stderr, "%s: %s is off by %g of its bound\n", name.c_str(), base[i].name.c_str(), error);
                }
            }
        }
    }
    if (write) {
        std::ofstream file(path);
        for (const auto& [kind, hash] : found) file << written(hash) << " " << kind << "\n";
        check(bool(file.flush()), "the digests cannot be written");
    }
    Digests saved = read_digests(path);
    for (const auto& [kind, hash] : found) {
        if (written(hash) == saved[kind]) continue;
        ++failures;
        fprintf(stderr, "%s: digest %s, but %s in %s\n", kind.c_str(), written(hash).c_str(), saved[kind].c_str(),
                path);
    }
    printf("%d problems at", runs);
    for (const std::string& level : rg::available_isa_levels()) printf(" %s", level.c_str());
    printf(": largest error %.2f of its bound (%s), %d failures\n", worst, worst_name.c_str(), failures);
    return failures != 0;
}
