/* Rounding to bfloat16, and swapping rows and columns, with AVX-512. */
#ifndef MOESCHED_ROUND_AVX512_H
#define MOESCHED_ROUND_AVX512_H

#include <immintrin.h>
#include <stdint.h>

#define AVX512_INLINE static inline __attribute__((always_inline, target("avx512f,avx512bw")))

/* The upper halves of the words are the numbers rounded to bfloat16, as in `rounded`. */
AVX512_INLINE __m512i rounded_avx512(__m512 numbers) {
    const __m512i bits = _mm512_castps_si512(numbers), one = _mm512_set1_epi32(1);
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), even);
    const __mmask16 nan = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(up, nan, _mm512_set1_epi32(0x7fc00000));
}

/* The words of two rows of 16 numbers: those of `even`, rounded, are the lower halves. */
AVX512_INLINE __m512i words_avx512(__m512 even, __m512 odd) {
    return _mm512_or_si512(_mm512_srli_epi32(rounded_avx512(even), 16),
                           _mm512_and_si512(rounded_avx512(odd), _mm512_set1_epi32((int)0xffff0000)));
}

/* Words of outputs `n` and `n` + 1, zero from `outputs` on, for up to 16 rows of x. */
AVX512_INLINE __m512i words_of_avx512(const float *out, int64_t outputs, int64_t batch, int64_t n, __mmask16 rows) {
    const __m512 even = n < outputs ? _mm512_maskz_loadu_ps(rows, out + n * batch) : _mm512_setzero_ps();
    const __m512 odd = n + 1 < outputs ? _mm512_maskz_loadu_ps(rows, out + (n + 1) * batch) : _mm512_setzero_ps();
    return words_avx512(even, odd);
}

/* Swaps the rows and columns of 16 x 16 words. */
AVX512_INLINE void transpose_avx512(__m512i word[16]) {
    __m512i half[16];
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            const __m512i low = _mm512_unpacklo_epi32(word[i + 2 * j], word[i + 2 * j + 1]);
            half[i + 2 * j + 1] = _mm512_unpackhi_epi32(word[i + 2 * j], word[i + 2 * j + 1]);
            half[i + 2 * j] = low;
        }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            word[i + 2 * j] = _mm512_unpacklo_epi64(half[i + j], half[i + j + 2]);
            word[i + 2 * j + 1] = _mm512_unpackhi_epi64(half[i + j], half[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            half[i + 8 * j] = _mm512_shuffle_i32x4(word[i + 8 * j], word[i + 8 * j + 4], 0x88);
            half[i + 8 * j + 4] = _mm512_shuffle_i32x4(word[i + 8 * j], word[i + 8 * j + 4], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        word[i] = _mm512_shuffle_i32x4(half[i], half[i + 8], 0x88);
        word[i + 8] = _mm512_shuffle_i32x4(half[i], half[i + 8], 0xdd);
    }
}

/* y[row][output] = out[output][row], rounded; rows of y are `gap` numbers apart. */
AVX512_INLINE void round_transposed_avx512(const float *out, int64_t outputs, int64_t batch, uint16_t *y, int64_t gap) {
    for (int64_t m = 0; m < batch; m += 16) {
        const int64_t rows = batch - m < 16 ? batch - m : 16;
        const __mmask16 here = (__mmask16)((1u << rows) - 1);
        for (int64_t n = 0; n < outputs; n += 32) {
            __m512i word[16];
            for (int i = 0; i < 16; i++) word[i] = words_of_avx512(out + m, outputs, batch, n + 2 * i, here);
            transpose_avx512(word);
            const __mmask32 there = outputs - n < 32 ? (__mmask32)((1u << (outputs - n)) - 1) : 0xffffffffu;
            for (int64_t row = 0; row < rows; row++)
                _mm512_mask_storeu_epi16(y + (m + row) * gap + n, there, word[row]);
        }
    }
}

#endif
