#include "machine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <algorithm>
#include <atomic>

namespace rg {
namespace {

// A small machine: what is unknown is assumed to be this.
constexpr Caches kAssumed = {32 << 10, 512 << 10, 4 << 20, 1};

#if defined(__linux__)

// One line of a file of /sys/devices/system/cpu/cpu0/cache/index<index>.
bool read_line(int index, const char* name, char (&line)[256]) {
    char path[128];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", index, name);
    FILE* file = fopen(path, "re");
    if (!file) return false;
    const bool found = fgets(line, sizeof line, file) != nullptr;
    fclose(file);
    return found;
}

// The number of CPUs in a list such as 0-3,8.
int count_cpus(const char* list) {
    int count = 0;
    for (char* end = nullptr; *list >= '0' && *list <= '9'; list = *end == ',' ? end + 1 : end) {
        const long first = strtol(list, &end, 10), last = *end == '-' ? strtol(end + 1, &end, 10) : first;
        count += int(std::max(1L, last - first + 1));
    }
    return std::max(1, count);
}

// Not sysconf, which on virtual machines gives the third level of the whole host.
Caches read_caches() {
    Caches found = {0, 0, 0, 1};
    char line[256];
    for (int index = 0; read_line(index, "level", line); ++index) {
        const int level = atoi(line);
        if (!read_line(index, "type", line) || strncmp(line, "Instruction", 11) == 0) continue;
        if (!read_line(index, "size", line)) continue;
        char* unit = nullptr;
        int64_t bytes = strtoll(line, &unit, 10);
        if (*unit == 'K') bytes <<= 10;
        if (*unit == 'M') bytes <<= 20;
        if (level == 1) found.l1 = bytes;
        if (level == 2) found.l2 = bytes;
        if (level < 2 || bytes < found.last_level) continue;
        found.last_level = bytes;
        found.last_level_cores = read_line(index, "shared_cpu_list", line) ? count_cpus(line) : 1;
    }
    return found;
}

#elif defined(__APPLE__)

int64_t system_value(const char* name) {
    int64_t value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 ? value : 0;
}

// The fast cores of a cluster share their second level.
Caches read_caches() {
    Caches found = {system_value("hw.perflevel0.l1dcachesize"), system_value("hw.perflevel0.l2cachesize"), 0,
                    int(std::max<int64_t>(1, system_value("hw.perflevel0.cpusperl2")))};
    if (found.l1 == 0) {  // Intel
        found = {system_value("hw.l1dcachesize"), system_value("hw.l2cachesize"), system_value("hw.l3cachesize"),
                 int(std::max<int64_t>(1, system_value("hw.physicalcpu")))};
    } else {
        found.last_level = found.l2;
        found.l2 /= found.last_level_cores;
    }
    return found;
}

#else

Caches read_caches() { return {0, 0, 0, 1}; }

#endif

// Replaces what could not be read by what is usual.
Caches sensible(Caches found) {
    if (found.l1 <= 0) found.l1 = kAssumed.l1;
    if (found.l2 <= 0) found.l2 = std::max(kAssumed.l2, found.l1);
    if (found.last_level_cores <= 0) found.last_level_cores = kAssumed.last_level_cores;
    if (found.last_level <= 0) found.last_level = std::max(kAssumed.last_level, found.l2);
    return found;
}

Caches replaced;
std::atomic<const Caches*> override_{nullptr};

}  // namespace

const Caches& caches() {
    const Caches* set = override_.load(std::memory_order_acquire);
    if (set) return *set;
    static const Caches machine = sensible(read_caches());
    return machine;
}

void override_caches(const Caches* replacement) {
    if (replacement) replaced = sensible(*replacement);
    override_.store(replacement ? &replaced : nullptr, std::memory_order_release);
}

}  // namespace rg
