// The functions by which each file of the binding adds its part to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace rg::bind {

void bind_bench(nanobind::module_& module);
void bind_conv(nanobind::module_& module);
void bind_dense(nanobind::module_& module);
void bind_elementwise(nanobind::module_& module);
void bind_recurrent(nanobind::module_& module);
void bind_map(nanobind::module_& module);
void bind_norm(nanobind::module_& module);
void bind_optimizer(nanobind::module_& module);
void bind_pooling(nanobind::module_& module);
void bind_program(nanobind::module_& module);
void bind_batched(nanobind::module_& module);
void bind_gather(nanobind::module_& module);
void bind_random(nanobind::module_& module);
void bind_reduce(nanobind::module_& module);
void bind_scan(nanobind::module_& module);
void bind_softmax(nanobind::module_& module);
void bind_xla(nanobind::module_& module);

}  // namespace rg::bind
