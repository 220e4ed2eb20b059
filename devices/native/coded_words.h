/* Words of four bytes, and smaller numbers, of rows: a row in each lane of a vector. */
#ifndef MOESCHED_CODED_WORDS_H
#define MOESCHED_CODED_WORDS_H

#include <stdint.h>
#include <string.h>

static inline void words_portable(const uint8_t *first, int64_t stride, int count, void *words) {
    for (int w = 0; w < count; w++)
        for (int row = 0; row < 4; row++)
            memcpy((char *)words + (w * 4 + row) * 4, first + row * stride + 4 * w, 4);
}

#if defined(__x86_64__)
#include <immintrin.h>

#define WITH_AVX2 __attribute__((target("avx2,fma,f16c"), always_inline)) static inline

/* Four words of two rows, `below` bytes apart. */
WITH_AVX2 __m256i four_words_avx2(const uint8_t *row, int64_t below) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)row)),
                                   _mm_loadu_si128((const __m128i *)(row + below)), 1);
}

/* A transposition of four words of each row, in both halves of vectors. */
WITH_AVX2 void words_avx2(const uint8_t *first, int64_t stride, int count, void *words) {
    __m256i *word = words;
    _Pragma("GCC unroll 4")
    for (int w = 0; w < count; w += 4, first += 16) {
        const __m256i a = four_words_avx2(first, 4 * stride), b = four_words_avx2(first + stride, 4 * stride);
        const __m256i c = four_words_avx2(first + 2 * stride, 4 * stride);
        const __m256i d = four_words_avx2(first + 3 * stride, 4 * stride);
        const __m256i ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
        const __m256i above_ab = _mm256_unpackhi_epi32(a, b), above_cd = _mm256_unpackhi_epi32(c, d);
        word[w] = _mm256_unpacklo_epi64(ab, cd);
        word[w + 1] = _mm256_unpackhi_epi64(ab, cd);
        word[w + 2] = _mm256_unpacklo_epi64(above_ab, above_cd);
        word[w + 3] = _mm256_unpackhi_epi64(above_ab, above_cd);
    }
}

/* Rows 0 to 7 from `first` on. Their addresses need four registers: left alone, the compiler keeps a pointer to each row,
 * and most of them in memory. */
typedef struct {
    const uint8_t *first;
    int64_t below[8];
} EightRows;

static inline __attribute__((always_inline)) EightRows eight_rows(const uint8_t *first, int64_t stride) {
    int64_t three = 3 * stride, five = 5 * stride, seven = 7 * stride;
    __asm__("" : "+r"(three), "+r"(five), "+r"(seven));
    return (EightRows){first, {0, stride, 2 * stride, three, 4 * stride, five, 2 * three, seven}};
}

static inline __attribute__((always_inline)) const void *row_of(const EightRows *rows, int row) {
    return rows->first + rows->below[row];
}

static inline __attribute__((always_inline)) int half_of(const EightRows *rows, int row) {
    uint16_t half;
    memcpy(&half, row_of(rows, row), sizeof half);
    return half;
}

/* Eight numbers of 16 bits, one of each row. */
__attribute__((target("avx2"), always_inline)) static inline __m128i eight_halves(const uint8_t *first, int64_t stride) {
    const EightRows rows = eight_rows(first, stride);
    __m128i halves = _mm_cvtsi32_si128(half_of(&rows, 0));
    halves = _mm_insert_epi16(halves, half_of(&rows, 1), 1);
    halves = _mm_insert_epi16(halves, half_of(&rows, 2), 2);
    halves = _mm_insert_epi16(halves, half_of(&rows, 3), 3);
    halves = _mm_insert_epi16(halves, half_of(&rows, 4), 4);
    halves = _mm_insert_epi16(halves, half_of(&rows, 5), 5);
    halves = _mm_insert_epi16(halves, half_of(&rows, 6), 6);
    return _mm_insert_epi16(halves, half_of(&rows, 7), 7);
}

/* The number of 16 bits at `first` of each row, in a word. */
WITH_AVX2 __m256i halves_of_avx2(const uint8_t *first, int64_t stride) {
    return _mm256_cvtepu16_epi32(eight_halves(first, stride));
}

/* float16 in the lower half of words to float32. */
WITH_AVX2 __m256 widened_halves_avx2(__m256i halves) {
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}

/* Twice the numbers of the format e2m1, and 12 more. */
WITH_AVX2 __m256i numbers_of_fp4_avx2(__m256i codes) {
    const __m128i numbers = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(numbers), codes);
}

#define WITH_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl"), always_inline)) static inline

/* The number of 16 bits at `first` of each row, in a word. */
WITH_AVX512 __m512i halves_of_avx512(const uint8_t *first, int64_t stride) {
    const __m128i upper = eight_halves(first, stride), lower = eight_halves(first + 8 * stride, stride);
    return _mm512_cvtepu16_epi32(_mm256_inserti128_si256(_mm256_castsi128_si256(upper), lower, 1));
}

/* float16 in the lower half of words to float32. */
WITH_AVX512 __m512 widened_halves_avx512(__m512i halves) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves)); }

/* Twice the numbers of the format e2m1, and 12 more. */
WITH_AVX512 __m512i numbers_of_fp4_avx512(__m512i codes) {
    const __m128i numbers = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), codes);
}

/* Four words of four rows, four apart. */
WITH_AVX512 __m512i four_words_avx512(const EightRows *upper, const EightRows *lower, int row) {
    __m512i words = _mm512_castsi128_si512(_mm_loadu_si128(row_of(upper, row)));
    words = _mm512_inserti32x4(words, _mm_loadu_si128(row_of(upper, row + 4)), 1);
    words = _mm512_inserti32x4(words, _mm_loadu_si128(row_of(lower, row)), 2);
    return _mm512_inserti32x4(words, _mm_loadu_si128(row_of(lower, row + 4)), 3);
}

/* Eight words of two rows, four apart. */
WITH_AVX512 __m512i eight_words_avx512(const EightRows *rows, int row) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(row_of(rows, row))),
                              _mm256_loadu_si256(row_of(rows, row + 4)), 1);
}

/* Transposes the four words of all quarters of four vectors. */
WITH_AVX512 void transpose_quarters(const __m512i *rows, __m512i *words) {
    const __m512i ab = _mm512_unpacklo_epi32(rows[0], rows[1]), cd = _mm512_unpacklo_epi32(rows[2], rows[3]);
    const __m512i above_ab = _mm512_unpackhi_epi32(rows[0], rows[1]), above_cd = _mm512_unpackhi_epi32(rows[2], rows[3]);
    words[0] = _mm512_unpacklo_epi64(ab, cd);
    words[1] = _mm512_unpackhi_epi64(ab, cd);
    words[2] = _mm512_unpacklo_epi64(above_ab, above_cd);
    words[3] = _mm512_unpackhi_epi64(above_ab, above_cd);
}

/* Words of 16 rows: eight at a time, four where no more are left. */
WITH_AVX512 void words_of_avx512(const uint8_t *first, int64_t stride, int count, void *words) {
    __m512i *word = words;
    for (int w = 0; w < count; w += 8) {
        const EightRows upper = eight_rows(first + 4 * w, stride), lower = eight_rows(first + 4 * w + 8 * stride, stride);
        __m512i rows[8], above[4], below[4];
        if (count - w == 4) {
            for (int row = 0; row < 4; row++) rows[row] = four_words_avx512(&upper, &lower, row);
            transpose_quarters(rows, word + w);
            break;
        }
        for (int row = 0; row < 4; row++) {
            rows[row] = eight_words_avx512(&upper, row);
            rows[4 + row] = eight_words_avx512(&lower, row);
        }
        transpose_quarters(rows, above);
        transpose_quarters(rows + 4, below);
        for (int i = 0; i < 4; i++) {
            word[w + i] = _mm512_shuffle_i32x4(above[i], below[i], 0x88);
            word[w + i + 4] = _mm512_shuffle_i32x4(above[i], below[i], 0xdd);
        }
    }
}
#endif

#if defined(__aarch64__)
#include <arm_neon.h>

#define WITH_NEON __attribute__((always_inline)) static inline

WITH_NEON uint32x4_t four_words_neon(const uint8_t *row) { return vreinterpretq_u32_u8(vld1q_u8(row)); }

/* The lower halves of both, and the upper ones. */
WITH_NEON uint32x4_t lower_halves(uint32x4_t a, uint32x4_t b) {
    return vreinterpretq_u32_u64(vzip1q_u64(vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b)));
}

WITH_NEON uint32x4_t upper_halves(uint32x4_t a, uint32x4_t b) {
    return vreinterpretq_u32_u64(vzip2q_u64(vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b)));
}

/* A transposition of four words of each row. */
WITH_NEON void words_of_neon(const uint8_t *first, int64_t stride, int count, void *words) {
    uint32x4_t *word = words;
    for (int w = 0; w < count; w += 4, first += 16) {
        const uint32x4_t a = four_words_neon(first), b = four_words_neon(first + stride);
        const uint32x4_t c = four_words_neon(first + 2 * stride), d = four_words_neon(first + 3 * stride);
        const uint32x4_t ab = vzip1q_u32(a, b), cd = vzip1q_u32(c, d);
        const uint32x4_t above_ab = vzip2q_u32(a, b), above_cd = vzip2q_u32(c, d);
        word[w] = lower_halves(ab, cd);
        word[w + 1] = upper_halves(ab, cd);
        word[w + 2] = lower_halves(above_ab, above_cd);
        word[w + 3] = upper_halves(above_ab, above_cd);
    }
}

/* float16 in the lower half of words to float32. */
WITH_NEON float32x4_t widened_halves_neon(uint32x4_t halves) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(halves)));
}

/* Twice the numbers of the format e2m1, and 12 more. */
WITH_NEON uint8x16_t numbers_of_fp4_neon(uint8x16_t codes) {
    static const uint8_t numbers[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return vqtbl1q_u8(vld1q_u8(numbers), codes);
}
#endif

#endif
