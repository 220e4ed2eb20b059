/* The inner loops of attention.c for each instruction set. */
#define JOINED(a, b) a##_##b
#define SUFFIXED(a, b) JOINED(a, b)

typedef float Float4 __attribute__((vector_size(16)));
typedef uint32_t Word4 __attribute__((vector_size(16)));

static inline Float4 floats_at(const void *p) {
    Float4 floats;
    memcpy(&floats, p, sizeof floats);
    return floats;
}

static inline void store_floats(float *p, Float4 floats) { memcpy(p, &floats, sizeof floats); }

static inline Float4 larger_floats(Float4 a, Float4 b) {
    const Word4 first = (Word4)(a > b);
    return (Float4)((first & (Word4)a) | (~first & (Word4)b));
}

static inline void add_lanes_portable(const Float4 sums[][QUAD], float *out) {
    for (int i = 0; i < 2 * QUAD; i++) {
        const Float4 s = sums[i / QUAD][i % QUAD];
        out[i] = (s[0] + s[2]) + (s[1] + s[3]);
    }
}

#define SET portable
#define TARGET
#define LANES 4
#define TOKENS 2
#define MOST_QUADS 1
#define Floats Float4
#define LOADED(p) floats_at(p)
#define STORE(p, v) store_floats(p, v)
#define EVERY(x) ((Float4){x, x, x, x})
#define LARGER(a, b) larger_floats(a, b)
#define ADD_PRODUCT(sums, a, b) sums += (a) * (b)
#define OF_QUAD(p) floats_at(p)
#define SWAPPED(x, lanes) (x)
#define EVEN(p) ((Float4)((Word4)floats_at(p) << 16))
#define ODD(p) ((Float4)((Word4)floats_at(p) & 0xffff0000u))
#define ADD_LANES add_lanes_portable
#include "attention_types.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* The sums of a quad's lanes, in each half of a register. */
__attribute__((target("avx2,fma"), always_inline)) static inline __m256 quad_sums_avx2(const __m256 sums[QUAD]) {
    const __m256 a = _mm256_add_ps(_mm256_unpacklo_ps(sums[0], sums[1]), _mm256_unpackhi_ps(sums[0], sums[1]));
    const __m256 b = _mm256_add_ps(_mm256_unpacklo_ps(sums[2], sums[3]), _mm256_unpackhi_ps(sums[2], sums[3]));
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
}

__attribute__((target("avx2,fma"), always_inline)) static inline void add_lanes_avx2(const __m256 sums[][QUAD], float *out) {
    const __m256 a = quad_sums_avx2(sums[0]), b = quad_sums_avx2(sums[1]);
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
}

#define SET avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define TOKENS 2
#define MOST_QUADS 1
#define Floats __m256
#define LOADED(p) _mm256_loadu_ps((const float *)(p))
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define EVERY(x) _mm256_set1_ps(x)
#define LARGER(a, b) _mm256_max_ps(a, b)
#define ADD_PRODUCT(sums, a, b) sums = _mm256_fmadd_ps(a, b, sums)
#define OF_QUAD(p) _mm256_broadcast_ps((const __m128 *)(p))
#define SWAPPED(x, lanes) _mm256_permute2f128_ps(x, x, 1)
#define WORDS(p) _mm256_loadu_si256((const __m256i *)(p))
#define EVEN(p) _mm256_castsi256_ps(_mm256_slli_epi32(WORDS(p), 16))
#define ODD(p) _mm256_castsi256_ps(_mm256_and_si256(WORDS(p), _mm256_set1_epi32((int)0xffff0000u)))
#define ADD_LANES add_lanes_avx2
#include "attention_types.h"
#undef WORDS

/* The sums of a quad's lanes, in each quarter of a register. */
__attribute__((target("avx512f"), always_inline)) static inline __m512 quad_sums_avx512(const __m512 sums[QUAD]) {
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]), _mm512_unpackhi_ps(sums[0], sums[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]), _mm512_unpackhi_ps(sums[2], sums[3]));
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}

__attribute__((target("avx512f"), always_inline)) static inline __m512 halved_avx512(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

__attribute__((target("avx512f"), always_inline)) static inline void add_lanes_avx512(const __m512 sums[][QUAD], float *out) {
    const __m512 a = halved_avx512(quad_sums_avx512(sums[0]), quad_sums_avx512(sums[1]));
    const __m512 b = halved_avx512(quad_sums_avx512(sums[2]), quad_sums_avx512(sums[3]));
    _mm512_storeu_ps(out, halved_avx512(a, b));
}

#define SET avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl")))
#define LANES 16
#define TOKENS 4
#define MOST_QUADS 2
#define Floats __m512
#define LOADED(p) _mm512_loadu_ps(p)
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define EVERY(x) _mm512_set1_ps(x)
#define LARGER(a, b) _mm512_max_ps(a, b)
#define ADD_PRODUCT(sums, a, b) sums = _mm512_fmadd_ps(a, b, sums)
#define OF_QUAD(p) _mm512_broadcast_f32x4(_mm_loadu_ps(p))
#define SWAPPED(x, lanes) ((lanes) == 4 ? _mm512_shuffle_f32x4(x, x, 0xb1) : _mm512_shuffle_f32x4(x, x, 0x4e))
#define WORDS(p) _mm512_loadu_si512(p)
#define EVEN(p) _mm512_castsi512_ps(_mm512_slli_epi32(WORDS(p), 16))
#define ODD(p) _mm512_castsi512_ps(_mm512_and_si512(WORDS(p), _mm512_set1_epi32((int)0xffff0000u)))
#define ADD_LANES add_lanes_avx512
#include "attention_types.h"
#undef WORDS

#define SET avx512_bf16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define LANES 16
#define TOKENS 8
#define MOST_QUADS 2
#define Floats __m512
#define LOADED(p) _mm512_loadu_ps(p)
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define EVERY(x) _mm512_set1_ps(x)
#define LARGER(a, b) _mm512_max_ps(a, b)
#define ADD_PRODUCT(sums, a, b) sums = _mm512_fmadd_ps(a, b, sums)
#define OF_QUAD(p) _mm512_broadcast_f32x4(_mm_loadu_ps(p))
#define SWAPPED(x, lanes) ((lanes) == 4 ? _mm512_shuffle_f32x4(x, x, 0xb1) : _mm512_shuffle_f32x4(x, x, 0x4e))
#define WORDS(p) _mm512_loadu_si512(p)
#define EVEN(p) _mm512_castsi512_ps(_mm512_slli_epi32(WORDS(p), 16))
#define ODD(p) _mm512_castsi512_ps(_mm512_and_si512(WORDS(p), _mm512_set1_epi32((int)0xffff0000u)))
#define PAIRS
#include "attention_types.h"
#undef WORDS
#undef PAIRS

#if defined(HAS_AMX)
#include "attention_amx.h"
#endif
#endif

#if defined(__aarch64__)
#include <arm_neon.h>

static inline void add_lanes_neon(const float32x4_t sums[][QUAD], float *out) {
    for (int r = 0; r < 4; r++) {
        const float32x4_t a = vpaddq_f32(sums[r][0], sums[r][1]), b = vpaddq_f32(sums[r][2], sums[r][3]);
        vst1q_f32(out + r * QUAD, vpaddq_f32(a, b));
    }
}

#define WORDS(p) vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)(p)))

#define SET neon
#define TARGET
#define LANES 4
#define TOKENS 4
#define MOST_QUADS 2
#define Floats float32x4_t
#define LOADED(p) vld1q_f32((const float *)(p))
#define STORE(p, v) vst1q_f32(p, v)
#define EVERY(x) vdupq_n_f32(x)
#define LARGER(a, b) vmaxq_f32(a, b)
#define ADD_PRODUCT(sums, a, b) sums = vfmaq_f32(sums, a, b)
#define OF_QUAD(p) vld1q_f32(p)
#define SWAPPED(x, lanes) (x)
#define EVEN(p) vreinterpretq_f32_u32(vshlq_n_u32(WORDS(p), 16))
#define ODD(p) vreinterpretq_f32_u32(vandq_u32(WORDS(p), vdupq_n_u32(0xffff0000u)))
#define ADD_LANES add_lanes_neon
#include "attention_types.h"
#endif
