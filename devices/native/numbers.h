/* bfloat16 as its bits, and functions of float32. */
#ifndef MOESCHED_NUMBERS_H
#define MOESCHED_NUMBERS_H

#include <stdint.h>
#include <string.h>

#if !defined(__GNUC__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "needs a little-endian processor, and GCC or Clang"
#endif

/* Before a function whose loops are compiled for several widths of vectors: the bits are the same. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define ANY_WIDTH __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define ANY_WIDTH
#endif

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float widened(uint16_t bits) { return from_bits((uint32_t)bits << 16); }

/* To bfloat16, to nearest, ties to even. */
static inline uint16_t rounded(float value) {
    const uint32_t bits = to_bits(value);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* e^x to about 1e-7, as if x were at least -87, infinite from 88.4 on; the same bits wherever the compiler makes
 * vectors of it. */
static inline float exponential(float x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number in the lowest bits */
    x = x < -87.0f ? -87.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float shifted = x * 1.44269504f + shift;
    const float whole = shifted - shift;
    const float r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * from_bits((to_bits(shifted) + 127u) << 23);
}

static inline float silu(float x) { return x / (1.0f + exponential(-x)); }

#endif
