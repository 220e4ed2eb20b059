/* Finds the instruction sets of this processor. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "instructions.h"

#include "team.h"

#include <string.h>

static const char *const names[INSTRUCTION_SETS] = {
    [AMX_BF16] = "amx_bf16", [AVX512_BF16] = "avx512_bf16", [AVX512] = "avx512", [AVX2] = "avx2",
    [NEON_BF16] = "neon_bf16", [NEON_DOTPROD] = "neon_dotprod", [NEON] = "neon", [PORTABLE] = "portable",
};

int is_zen_5;

#if defined(__x86_64__)
#include <cpuid.h>

__attribute__((constructor)) static void know_processor(void) {
    enum { FAMILY_OF_ZEN_5 = 26 };
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return;
    is_zen_5 = (eax >> 8 & 15) + (eax >> 20 & 255) == FAMILY_OF_ZEN_5;
}

static int has_f16c(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && ecx & bit_F16C;
}

#if defined(HAS_AMX)
#include <sys/syscall.h>
#include <unistd.h>

/* Whether the processor has AMX, and the system lets this process use it: a process has to ask. */
static int may_use_amx(void) {
    enum { TILES_INT8_AND_BF16 = 1 << 25 | 1 << 24 | 1 << 22, ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & TILES_INT8_AND_BF16) != TILES_INT8_AND_BF16) return 0;
    return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}
#else
static int may_use_amx(void) { return 0; }
#endif

#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>

static int has_dotprod(void) { return getauxval(AT_HWCAP) >> 20 & 1; } /* HWCAP_ASIMDDP */
static int has_bf16(void) { return getauxval(AT_HWCAP2) >> 14 & 1; }   /* HWCAP2_BF16 */

#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

static int has_feature(const char *name) {
    int there = 0;
    size_t size = sizeof there;
    return sysctlbyname(name, &there, &size, NULL, 0) == 0 && there;
}

static int has_dotprod(void) { return has_feature("hw.optional.arm.FEAT_DotProd"); }
static int has_bf16(void) { return has_feature("hw.optional.arm.FEAT_BF16"); }

#elif defined(__aarch64__)
static int has_dotprod(void) { return 0; }
static int has_bf16(void) { return 0; }
#endif

static int is_here(InstructionSet set) {
    switch (set) {
#if defined(__x86_64__)
    case AMX_BF16: return is_here(AVX512_BF16) && may_use_amx();
    case AVX512_BF16: return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") && is_here(AVX512);
    case AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("avx512bw") && is_here(AVX2);
    case AVX2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
#elif defined(__aarch64__)
    case NEON_BF16: return has_bf16() && has_dotprod();
    case NEON_DOTPROD: return has_dotprod();
    case NEON: return 1;
#endif
    case PORTABLE: return 1;
    default: return 0;
    }
}

/* The names of the instruction sets that can be used here, best first, with a blank between them. */
API const char *moesched_instruction_sets(void) {
    static char found[64];
    found[0] = 0;
    for (int set = 0; set < INSTRUCTION_SETS; set++)
        if (is_here((InstructionSet)set)) strcat(strcat(found, found[0] ? " " : ""), names[set]);
    return found;
}

int set_named(const char *name) {
    for (int set = 0; set < INSTRUCTION_SETS; set++)
        if (!strcmp(names[set], name) && is_here((InstructionSet)set)) return set;
    return -1;
}
