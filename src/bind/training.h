#pragma once

#include <nanobind/nanobind.h>

namespace rg::bind {

// Linear layers, embeddings, losses, dropout.
void bind_training(nanobind::module_& module);

}  // namespace rg::bind
