#include "dispatch.h"

#if defined(__x86_64__) && !defined(RG_SCALAR_ONLY)
#define RG_X86
#elif defined(__aarch64__) && !defined(RG_SCALAR_ONLY)
#define RG_ARM
#endif

#if defined(RG_X86)
#include <cpuid.h>
#endif

#include <atomic>

namespace rg {

extern const KernelTable kScalarTable;
#if defined(RG_X86)
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
#elif defined(RG_ARM)
extern const KernelTable kNeonTable;
#endif

namespace {

#if defined(RG_X86)
// __builtin_cpu_supports knows f16c only from GCC 11 and Clang 19 on. Its answer for avx2 already includes that the
// system saves AVX registers.
bool has_f16c() {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}
#endif

std::vector<const KernelTable*> available_tables() {
    std::vector<const KernelTable*> tables{&kScalarTable};
#if defined(RG_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
        tables.push_back(&kAvx2Table);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            tables.push_back(&kAvx512Table);
        }
    }
#elif defined(RG_ARM)
    tables.push_back(&kNeonTable);
#endif
    return tables;
}

std::atomic<const KernelTable*> table{nullptr};

}  // namespace

std::vector<std::string> available_isa_levels() {
    std::vector<std::string> names;
    for (const KernelTable* t : available_tables()) names.push_back(t->isa);
    return names;
}

const KernelTable& kernel_table() {
    const KernelTable* chosen = table.load(std::memory_order_acquire);
    if (!chosen) {
        chosen = available_tables().back();
        table.store(chosen, std::memory_order_release);
    }
    return *chosen;
}

bool select_isa(const std::string& name) {
    for (const KernelTable* t : available_tables()) {
        if (name == t->isa) {
            table.store(t, std::memory_order_release);
            return true;
        }
    }
    return false;
}

}  // namespace rg
