#pragma once

#include <nanobind/nanobind.h>

namespace rg::bind {

void bind_lstm(nanobind::module_& module);

}  // namespace rg::bind
