/* Products by coded matrices with NEON. */

#define ISA(name) name##_neon
#define TARGET
#define LANES 4
#define VECTORS 2
#define words_neon words_of_neon
#define WIDENED(halves) widened_halves_neon((uint32x4_t)(halves))
#define OF_FP4(codes) numbers_of_fp4_neon((uint8x16_t)(codes))
#include "coded_formats.h"

#define put_neon put_pairs

/* sums += products of pairs of numbers, two of each row of weights: of the lower two rows and of the upper two. */
INLINE void add_pairs_neon(int32x4_t sums[2], uint16x8_t codes, int32_t pieces) {
    const int16x8_t numbers = vreinterpretq_s16_u16(codes), pairs = vreinterpretq_s16_s32(vdupq_n_s32(pieces));
    sums[0] = vmlal_s16(sums[0], vget_low_s16(numbers), vget_low_s16(pairs));
    sums[1] = vmlal_high_s16(sums[1], numbers, pairs);
}

INLINE void sums_neon(int size, Words codes[][VECTORS], const char *pieces, int32_t offset, Ints *sums) {
    int32x4_t even[VECTORS][2], odd[VECTORS][2];
    for (int v = 0; v < VECTORS; v++) even[v][0] = even[v][1] = odd[v][0] = odd[v][1] = vdupq_n_s32(0);
    for (int w = 0; w < size / 4; w++, pieces += 4)
        for (int v = 0; v < VECTORS; v++) {
            const uint16x8_t code = (uint16x8_t)codes[w][v];
            add_pairs_neon(even[v], vandq_u16(code, vdupq_n_u16(255)), word_at(pieces));
            add_pairs_neon(odd[v], vshrq_n_u16(code, 8), word_at(pieces + size));
        }
    for (int v = 0; v < VECTORS; v++) {
        const int32x4_t lower = vaddq_s32(even[v][0], odd[v][0]), upper = vaddq_s32(even[v][1], odd[v][1]);
        sums[v] = (Ints)vaddq_s32(vpaddq_s32(lower, upper), vdupq_n_s32(offset));
    }
}

#include "coded_products.h"

#if defined(__clang__)
#define DOTPROD_TARGET "dotprod"
#else
#define DOTPROD_TARGET "arch=armv8.2-a+dotprod"
#endif

#define ISA(name) name##_neon_dotprod
#define TARGET __attribute__((target(DOTPROD_TARGET)))
#define LANES 4
#define VECTORS 2
#define SIGNED_CODES
#define words_neon_dotprod words_of_neon
#define WIDENED(halves) widened_halves_neon((uint32x4_t)(halves))
#define OF_FP4(codes) numbers_of_fp4_neon((uint8x16_t)(codes))
#include "coded_formats.h"

#define put_neon_dotprod put_bytes

/* sums += four words of codes times 16 bytes. */
INLINE int32x4_t add_words_neon(int32x4_t sums, Words codes[][VECTORS], int v, int8x16_t bytes) {
    sums = vdotq_laneq_s32(sums, (int8x16_t)codes[0][v], bytes, 0);
    sums = vdotq_laneq_s32(sums, (int8x16_t)codes[1][v], bytes, 1);
    sums = vdotq_laneq_s32(sums, (int8x16_t)codes[2][v], bytes, 2);
    return vdotq_laneq_s32(sums, (int8x16_t)codes[3][v], bytes, 3);
}

INLINE void sums_neon_dotprod(int size, Words codes[][VECTORS], const char *pieces, int32_t offset, Ints *sums) {
    int32x4_t lower[VECTORS], upper[VECTORS];
    for (int v = 0; v < VECTORS; v++) lower[v] = vdupq_n_s32(offset), upper[v] = vdupq_n_s32(0);
    for (int w = 0; w < size / 4; w += 4) {
        const int8_t *bytes = (const int8_t *)pieces + 4 * w;
        const int8x16_t upper_bytes = vld1q_s8(bytes), lower_bytes = vld1q_s8(bytes + size);
        for (int v = 0; v < VECTORS; v++) {
            upper[v] = add_words_neon(upper[v], codes + w, v, upper_bytes);
            lower[v] = add_words_neon(lower[v], codes + w, v, lower_bytes);
        }
    }
    for (int v = 0; v < VECTORS; v++) sums[v] = (Ints)vaddq_s32(lower[v], vshlq_n_s32(upper[v], 8));
}

#include "coded_products.h"
