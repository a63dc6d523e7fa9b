// Chooses the instruction-set level once, when the library is loaded.
#pragma once

#include <string>
#include <vector>

#include "../kernels.h"

namespace rg {

// Levels that are built in and that this machine can run, slowest first.
std::vector<std::string> available_isa_levels();

// The selected table; by default the fastest available.
const KernelTable& kernel_table();

// Selects the level `name`. Returns false and changes nothing if it is unknown or this machine cannot run it.
bool select_isa(const std::string& name);

}  // namespace rg
