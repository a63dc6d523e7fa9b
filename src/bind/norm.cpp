// Normalization for Python: reads the arguments of NormProblem's calls.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bind.h"
#include "norm_problem.h"

namespace rg::bind {
namespace {

using Saved = NormSaved<nb::handle>;

// The fields of NormCache in ops/normalization.py. The first field is the problem.
Saved saved_of(nb::handle cache) {
    if (!PyTuple_Check(cache.ptr()) || PyTuple_GET_SIZE(cache.ptr()) != 8) {
        throw nb::type_error("the cache is not a NormCache");
    }
    const auto item = [&](Py_ssize_t i) { return nb::handle(PyTuple_GET_ITEM(cache.ptr(), i)); };
    return {item(1), item(2), item(3), item(4), item(5), nb::cast<bool>(item(6)), nb::cast<bool>(item(7))};
}

Outcome backward(const NormProblem& problem, nb::handle dy, nb::handle cache, nb::handle sum_dz, nb::handle sum_dz_xhat,
                 nb::handle count, nb::handle dx, nb::handle dgamma, nb::handle dbeta, bool accumulate,
                 bool overlap_checked, int threads) {
    return problem.backward(dy, saved_of(cache), sum_dz, sum_dz_xhat, count, dx, dgamma, dbeta, accumulate,
                            overlap_checked, threads);
}

Outcome gradient_sums(const NormProblem& problem, nb::handle dy, nb::handle cache, nb::handle sum_dz,
                      nb::handle sum_dz_xhat, bool overlap_checked, int threads) {
    return problem.gradient_sums(dy, saved_of(cache), sum_dz, sum_dz_xhat, overlap_checked, threads);
}

}  // namespace

void bind_norm(nb::module_& m) {
    nb::class_<NormProblem>(m, "NormProblem", "A normalization of one shape with one set of options.")
        .def(nb::init<std::vector<int64_t>, const std::string&, int64_t, int, double, int, double, double, bool>(),
             nb::arg("shape"), nb::arg("roles"), nb::arg("channels_per_set"), nb::arg("dtype"), nb::arg("eps"),
             nb::arg("activation"), nb::arg("alpha"), nb::arg("beta"), nb::arg("slope_from_input"))
        .def("forward", &NormProblem::forward<nb::handle>, nb::arg("x"), nb::arg("gamma").none(),
             nb::arg("beta").none(), nb::arg("y").none(), nb::arg("keep").none(), nb::arg("statistics"),
             nb::arg("statistics_given"), nb::arg("overlap_checked"), nb::arg("threads"))
        .def("backward", &backward, nb::arg("dy"), nb::arg("cache"), nb::arg("sum_dz").none(),
             nb::arg("sum_dz_xhat").none(), nb::arg("count").none(), nb::arg("dx").none(), nb::arg("dgamma").none(),
             nb::arg("dbeta").none(), nb::arg("accumulate"), nb::arg("overlap_checked"), nb::arg("threads"))
        .def("forward_at", &NormProblem::forward_at, nb::arg("x"), nb::arg("gamma"), nb::arg("beta"), nb::arg("y"),
             nb::arg("statistics"), nb::arg("statistics_given"), nb::arg("channels_last"), nb::arg("threads"),
             "Forward of dense arrays by their addresses, which the caller has checked; 0: none.")
        .def("backward_at", &NormProblem::backward_at, nb::arg("dy"), nb::arg("x"), nb::arg("y"), nb::arg("gamma"),
             nb::arg("beta"), nb::arg("statistics"), nb::arg("statistics_given"), nb::arg("frozen"), nb::arg("dx"),
             nb::arg("dgamma"), nb::arg("dbeta"), nb::arg("channels_last"), nb::arg("threads"),
             "Backward of dense arrays by their addresses, which the caller has checked; 0: none.")
        .def("gradient_sums", &gradient_sums, nb::arg("dy"), nb::arg("cache"), nb::arg("sum_dz"),
             nb::arg("sum_dz_xhat"), nb::arg("overlap_checked"), nb::arg("threads"));
}

}  // namespace rg::bind
