#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>

static int has_avx2(void) {
    unsigned a, b, c = 0, d;
    __builtin_cpu_init();
    /* Bit 29: F16C, which not every compiler knows by name. */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) && c >> 29 & 1;
}

static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

const Isa *spac_isa(const char *name) {
    const Isa *found[3] = {0};
    int n = 0;
#if defined(__x86_64__)
    if (has_avx512()) found[n++] = &spac_avx512;
    if (has_avx2()) found[n++] = &spac_avx2;
#endif
    found[n++] = &spac_scalar;
    for (int i = 0; i < n; i++)
        if (*name == 0 || strcmp(name, found[i]->name) == 0) return found[i];
    return NULL;
}

const char *spac_isa_name(const char *name) {
    const Isa *isa = spac_isa(name);
    return isa ? isa->name : NULL;
}
