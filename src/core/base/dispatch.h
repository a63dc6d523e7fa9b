// Chooses the instruction-set level once, when the library is loaded.
#pragma once

#include <string>
#include <vector>

#include "../kernels.h"

namespace rg {

// Levels that are built in and that this machine can run, slowest first.
std::vector<std::string> available_isa_levels();

// The table in force. Before any selection: the fastest available.
const KernelTable& kernel_table();

// Makes `name` the level in force; false, and nothing changed, when it is unknown or cannot run here.
bool select_isa(const std::string& name);

}  // namespace rg
