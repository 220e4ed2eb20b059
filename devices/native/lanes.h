/* Sums of the lanes of `count` accumulators, one after the other, to as many numbers; both have room for a multiple of
 * FOLDED. `count` is known to the compiler, so that accumulators in registers stay there. */
#ifndef MOESCHED_LANES_H
#define MOESCHED_LANES_H

#include <string.h>

enum { FOLDED = 16 };

static inline void fold_four(const float *sums, int count, float *out) {
    for (int n = 0; n < count; n++, sums += 4) out[n] = (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

#if defined(__x86_64__)
#include <immintrin.h>

/* In each quarter of the vectors, half as many lanes of a and b in turn. */
#define ADD_PAIR(width, a, b) width##_add_ps(width##_unpacklo_ps(a, b), width##_unpackhi_ps(a, b))

/* In each quarter of a vector, the sums of its lanes in four accumulators. */
__attribute__((target("avx2"), always_inline)) static inline __m256 four_of_eight(const float *sums) {
    const __m256 ab = ADD_PAIR(_mm256, _mm256_load_ps(sums), _mm256_load_ps(sums + 8));
    const __m256 cd = ADD_PAIR(_mm256, _mm256_load_ps(sums + 16), _mm256_load_ps(sums + 24));
    return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
}

__attribute__((target("avx2"), always_inline)) static inline void fold_eight(const float *sums, int count, float *out) {
    _Pragma("GCC unroll 8")
    for (int n = 0; n < count; n += 8, sums += 64) {
        const __m256 first = four_of_eight(sums), second = n + 4 < count ? four_of_eight(sums + 32) : first;
        _mm256_storeu_ps(out + n, _mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20),
                                                _mm256_permute2f128_ps(first, second, 0x31)));
    }
}

__attribute__((target("avx512f"), always_inline)) static inline __m512 four_of_sixteen(const float *sums) {
    const __m512 ab = ADD_PAIR(_mm512, _mm512_load_ps(sums), _mm512_load_ps(sums + 16));
    const __m512 cd = ADD_PAIR(_mm512, _mm512_load_ps(sums + 32), _mm512_load_ps(sums + 48));
    return _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
}

/* The even and the odd quarters of both. */
__attribute__((target("avx512f"), always_inline)) static inline __m512 add_quarters(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

/* Of up to eight accumulators. */
__attribute__((target("avx512f"), always_inline)) static inline __m512 eight_of_sixteen(const float *sums, int count) {
    const __m512 first = four_of_sixteen(sums);
    return add_quarters(first, count > 4 ? four_of_sixteen(sums + 64) : first);
}

__attribute__((target("avx512f"), always_inline)) static inline void fold_sixteen(const float *sums, int count, float *out) {
    _Pragma("GCC unroll 8")
    for (int n = 0; n < count; n += 16, sums += 256) {
        const __m512 low = eight_of_sixteen(sums, count - n);
        const __m512 high = count - n > 8 ? eight_of_sixteen(sums + 128, count - n - 8) : low;
        _mm512_storeu_ps(out + n, add_quarters(low, high));
    }
}
#endif

#endif
