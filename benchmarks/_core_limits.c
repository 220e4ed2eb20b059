/* Two loops of one core: one that only reads memory, and one that only multiplies, with each instruction set. */
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { LINE = 64, AHEAD = 2048, SUMS = 12 };

typedef uint64_t Line __attribute__((vector_size(LINE)));

/* Reads whole cache lines from first to last; returns what keeps the compiler from leaving it out. */
uint64_t read_memory(const char *first, int64_t bytes) {
    Line all = {0};
    for (int64_t at = 0; at + LINE <= bytes; at += LINE) {
        __builtin_prefetch(first + at + AHEAD);
        all |= *(const Line *)(first + at);
    }
    uint64_t folded = 0;
    for (int i = 0; i < LINE / (int)sizeof folded; i++) folded |= all[i];
    return folded;
}

/* Independent sums, which stay in registers. */
#define MULTIPLY(NAME, Vector, ADD, FLOP)                                                                              \
    static double NAME(int64_t rounds) {                                                                               \
        Vector sums[SUMS], factor;                                                                                     \
        memset(sums, 0, sizeof sums);                                                                                  \
        memset(&factor, 0, sizeof factor);                                                                             \
        __asm__ volatile("" : "+m"(sums), "+m"(factor)); /* not known to be equal */                                   \
        for (int64_t round = 0; round < rounds; round++) {                                                             \
            _Pragma("GCC unroll 12") for (int i = 0; i < SUMS; i++) sums[i] = ADD(sums[i], factor);                    \
        }                                                                                                              \
        __asm__ volatile("" : : "m"(sums));                                                                            \
        return (double)rounds * SUMS * (FLOP);                                                                         \
    }

#if defined(__AVX2__) && defined(__FMA__)
#define ADD(sum, factor) _mm256_fmadd_ps(factor, factor, sum)
MULTIPLY(avx2, __m256, ADD, 16)
#undef ADD
#endif
#if defined(__AVX512F__)
#define ADD(sum, factor) _mm512_fmadd_ps(factor, factor, sum)
MULTIPLY(avx512, __m512, ADD, 32)
#undef ADD
#endif
#if defined(__AVX512BF16__)
#define ADD(sum, factor) _mm512_dpbf16_ps(sum, (__m512bh)(factor), (__m512bh)(factor))
MULTIPLY(avx512_bf16, __m512, ADD, 64)
#undef ADD
#endif
#if defined(__AMX_BF16__)
/* The system has to allow it, which it does once the kernels are loaded. */
static double amx_bf16(int64_t rounds) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t line_bytes[16];
        uint8_t lines[16];
    } shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.lines[tile] = 16;
        shapes.line_bytes[tile] = 64;
    }
    __asm__ volatile("" : : "m"(shapes));
    _tile_loadconfig(&shapes);
    for (int64_t round = 0; round < rounds; round++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return (double)rounds * 4 * 16 * 16 * 32 * 2;
}
#endif
#if defined(__aarch64__)
#define ADD(sum, factor) vfmaq_f32(sum, factor, factor)
MULTIPLY(neon, float32x4_t, ADD, 8)
#undef ADD
#if defined(__ARM_FEATURE_BF16)
#define ADD(sum, factor) vbfdotq_f32(sum, vreinterpretq_bf16_f32(factor), vreinterpretq_bf16_f32(factor))
MULTIPLY(neon_bf16, float32x4_t, ADD, 16)
#undef ADD
#endif
#endif

/* FLOP done with an instruction set's multiplication; 0 if the loop was not compiled for it. */
double multiply(const char *set, int64_t rounds) {
#define TRY(NAME) if (!strcmp(set, #NAME)) return NAME(rounds);
#if defined(__AMX_BF16__)
    TRY(amx_bf16)
#endif
#if defined(__AVX512BF16__)
    TRY(avx512_bf16)
#endif
#if defined(__AVX512F__)
    TRY(avx512)
#endif
#if defined(__AVX2__) && defined(__FMA__)
    TRY(avx2)
#endif
#if defined(__aarch64__)
    TRY(neon)
#if defined(__ARM_FEATURE_BF16)
    TRY(neon_bf16)
#endif
#endif
    return 0;
}
