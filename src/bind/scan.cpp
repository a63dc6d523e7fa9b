// Linear recurrences.
#include <nanobind/stl/optional.h>

#include "bind.h"
#include "scan_call.h"

namespace rg::bind {

void bind_scan(nb::module_& m) {
    m.def("scan_forward", &scan_forward<nb::handle>, nb::arg("f64"), nb::arg("axis"), nb::arg("a"), nb::arg("b"),
          nb::arg("h0").none(), nb::arg("reset").none(), nb::arg("y").none(), nb::arg("hn").none(),
          nb::arg("overlap_checked"), nb::arg("threads"), "y[t] = a[t] * y[t-1] + b[t] along an axis; hn is the last.");
    m.def("scan_backward", &scan_backward<nb::handle>, nb::arg("f64"), nb::arg("axis"), nb::arg("dy").none(),
          nb::arg("dhn").none(), nb::arg("a"), nb::arg("reset").none(), nb::arg("y"), nb::arg("h0").none(),
          nb::arg("da").none(), nb::arg("da_sums").none(), nb::arg("db").none(), nb::arg("dh0").none(),
          nb::arg("accumulate"), nb::arg("overlap_checked"), nb::arg("threads"),
          "Gradients of scan_forward. da_sums, float64: the sums of da over time.");
}

}  // namespace rg::bind
