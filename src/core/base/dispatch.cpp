#include "dispatch.h"

// All levels of the processor, or the one that RETROGRAD_LEVEL of CMakeLists.txt names.
#if defined(RG_ONLY_SCALAR)
#define RG_HAS_SCALAR
#elif defined(RG_ONLY_AVX2)
#define RG_HAS_AVX2
#elif defined(RG_ONLY_AVX512)
#define RG_HAS_AVX512
#elif defined(RG_ONLY_NEON)
#define RG_HAS_NEON
#else
#define RG_HAS_SCALAR
#if defined(__x86_64__)
#define RG_HAS_AVX2
#define RG_HAS_AVX512
#elif defined(__aarch64__)
#define RG_HAS_NEON
#endif
#endif

#if defined(RG_HAS_AVX2) || defined(RG_HAS_AVX512)
#define RG_X86
#include <cpuid.h>
#endif

#include <atomic>
#include <stdexcept>

namespace rg {

extern const KernelTable kScalarTable;
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
extern const KernelTable kNeonTable;

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
    std::vector<const KernelTable*> tables;
#if defined(RG_HAS_SCALAR)
    tables.push_back(&kScalarTable);
#endif
#if defined(RG_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()) {
#if defined(RG_HAS_AVX2)
        tables.push_back(&kAvx2Table);
#endif
#if defined(RG_HAS_AVX512)
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
            tables.push_back(&kAvx512Table);
        }
#endif
    }
#endif
#if defined(RG_HAS_NEON)
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
        const std::vector<const KernelTable*> tables = available_tables();
        if (tables.empty()) throw std::runtime_error("this processor cannot run the level that was compiled");
        chosen = tables.back();
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
