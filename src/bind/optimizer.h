#pragma once

#include <nanobind/nanobind.h>

namespace rg::bind {

void bind_optimizer(nanobind::module_& module);

}  // namespace rg::bind
