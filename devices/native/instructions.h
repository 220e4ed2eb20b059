/* The instruction sets that kernels are compiled for. */
#ifndef MOESCHED_INSTRUCTIONS_H
#define MOESCHED_INSTRUCTIONS_H

#if defined(__x86_64__) && defined(__linux__) && (__GNUC__ >= 11 || defined(__clang__))
#define HAS_AMX /* the compiler knows it */
#endif

/* Best first. */
typedef enum {
    AMX_BF16, AVX512_BF16, AVX512, AVX2, NEON_BF16, NEON_DOTPROD, NEON, PORTABLE, INSTRUCTION_SETS
} InstructionSet;

/* The set with this name, -1 if this processor or this build does not have it. */
int set_named(const char *name);

/* Whether the processor is a Zen 5. It brings a few streams of weights to its second-level cache faster than prefetching
 * does, and its first-level cache of 48 KB holds larger pieces. */
extern int is_zen_5;

#endif
