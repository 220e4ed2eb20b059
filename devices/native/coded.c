/* Products by coded matrices. A tile of a few rows of weights is unpacked once for all rows of x: a row in each lane of
 * the vectors, so that sums need no addition across lanes.
 *
 * Inputs of a group are multiples of a unit, a power of two BITS below the largest of them. Codes times multiples are
 * added as whole numbers, which no order shows in; the sum is rounded to float32 once and multiplied by unit and scale.
 * Groups are added one after the other. So the bits are those of every other instruction set, and of torch's
 * kernels for coded matrices.
 */
#include <string.h>

#include "coded_words.h"
#include "instructions.h"
#include "numbers.h"
#include "product.h"

enum {
    BITS = 14,            /* of a multiple, without its sign: two signed bytes, or one number of 16 bits */
    LEAST_EXPONENT = -100 + 127, /* of the power above a group's largest input, as in its bits */
    CHUNK = 256,          /* weights of a row that are unpacked at once: whole blocks of all formats */
    MOST_GROUPS = CHUNK / 16,
    MOST_CHUNK_BYTES = CHUNK / 32 * 34,
    X_BYTES = 512 << 10,  /* of all rows of x: stay in the second-level cache while tiles pass */
    LINE = 64,
    NEAR = 12 << 10, /* bytes of a tile that the first-level cache takes beside the one in use, for two threads of a core */
    LEAST_OUTPUTS = 64,   /* that a thread takes at a time: whole tiles and groups; common widths are even numbers of them */
};

/* What is the same for all pieces of a group of a row of x. */
typedef struct {
    float unit;
    int32_t offset; /* of the sums, since codes are multiplied as they are stored: without a sign */
    float sum;      /* of the inputs */
} Group;

#define PIECES_BYTES(size) (2 * (size))

/* The weights that are read next. Memory gives them in time if requests for them are spread evenly over what is done
 * meanwhile: some with every 32 weights that are unpacked or multiplied. */
typedef struct {
    const uint8_t *first;
    int64_t bytes; /* with each; none if 0 */
    int near;      /* whether they go to the first-level cache: else, to the second */
} Ahead;

static inline __attribute__((always_inline)) void fetch(Ahead *ahead) {
    for (int64_t line = 0; line < ahead->bytes; line += LINE)
        if (ahead->near)
            __builtin_prefetch(ahead->first + line, 0, 3);
        else
            __builtin_prefetch(ahead->first + line, 0, 2);
    ahead->first += ahead->bytes;
}

/* Whether the next tile goes to the first-level cache. A larger one drives out what is in use, but a Zen 5 brings it from
 * there to the second level sooner than it follows requests of that level. */
static inline int goes_near(int64_t tile_bytes) { return is_zen_5 || tile_bytes <= NEAR; }

/* Unpacks rows into a tile of the instruction set. */
typedef void (*Unpack)(const uint8_t *rows, int64_t stride, int64_t weights, void *tile, Ahead *ahead);

/* Adds rows of weights as they lie, times one row of x, to their totals. */
typedef void (*OneRow)(const uint8_t *rows, int64_t stride, int64_t weights, const char *pieces, const Group *group,
                       Ahead *ahead, void *totals);

/* The multiplier for a coded format. */
typedef struct {
    Multiplier multiplier;
    int zero; /* is subtracted from codes as they are stored */
    int has_minimums;
    Unpack unpack;
    OneRow one_row; /* where that is faster than a tile, or NULL */
} Coding;

static inline const Coding *coding_of(const Product *product) { return (const Coding *)product->multiplier; }

/* x of a product is its pieces, group after group, in each group row after row; then what the groups share. */
static inline char *pieces_of(const Product *product, int64_t group) {
    return product->x + group * product->batch * PIECES_BYTES(product->multiplier->step);
}

static inline Group *groups_of(const Product *product, int64_t group) {
    return (Group *)pieces_of(product, product->steps) + group * product->batch;
}

/* Rows of weights that follow each other. */
typedef struct {
    const uint8_t *first;
    int64_t count;
} CodedRows;

/* The rows of weights from `output` to the end of their row block. */
static inline CodedRows coded_rows(const Product *product, int64_t output) {
    const Rows *block = product->blocks;
    for (; output >= block->count; block++) output -= block->count;
    return (CodedRows){(const uint8_t *)block->first + output * product->row_bytes, block->count - output};
}

static inline int64_t chunks_at_once(const Product *product) {
    const int64_t bytes = product->batch * CHUNK / product->multiplier->step * product->multiplier->step_bytes;
    return bytes < X_BYTES ? X_BYTES / bytes : 1;
}

static inline float power_of_two(int exponent) { return from_bits((uint32_t)exponent << 23); }

/* ---------------------------------------------------------------- any processor */

#define ISA(name) name##_portable
#define TARGET
#define LANES 4
#define VECTORS 1
#include "coded_formats.h"

INLINE void put_portable(int size, const int32_t *multiples, char *pieces) {
    for (int i = 0; i < size; i++) {
        const int16_t piece = (int16_t)multiples[i];
        memcpy(pieces + 2 * i, &piece, sizeof piece);
    }
}

INLINE void sums_portable(int size, Words codes[][VECTORS], const char *pieces, int32_t offset, Ints *sums) {
    sums[0] = (Ints){0} + offset;
    for (int w = 0; w < size / 4; w++)
        for (int i = 0; i < 4; i++) {
            int16_t piece;
            memcpy(&piece, pieces + 2 * (4 * w + i), sizeof piece);
            sums[0] += (Ints)(codes[w][0] >> 8 * i & 255) * piece;
        }
}

#include "coded_products.h"

/* Even codes and odd ones are numbers of 16 bits in a word; so are the multiples: the even ones first. */
static inline void put_pairs(int size, const int32_t *multiples, char *pieces) {
    for (int i = 0; i < size; i++) {
        const int16_t piece = (int16_t)multiples[i];
        memcpy(pieces + i % 2 * size + i / 2 * 2, &piece, sizeof piece);
    }
}

/* A multiple is 256 times a signed byte plus another one: the upper ones first. */
static inline void put_bytes(int size, const int32_t *multiples, char *pieces) {
    for (int i = 0; i < size; i++) {
        const int32_t upper = (multiples[i] + 128) >> 8;
        pieces[i] = (char)upper;
        pieces[size + i] = (char)(multiples[i] - 256 * upper);
    }
}

static inline int32_t word_at(const char *pieces) {
    int32_t word;
    memcpy(&word, pieces, sizeof word);
    return word;
}

#if defined(__x86_64__)
#define ISA(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define LANES 8
#define VECTORS 1
#define HALVES halves_of_avx2
#define WIDENED(halves) widened_halves_avx2((__m256i)(halves))
#define OF_FP4(codes) numbers_of_fp4_avx2((__m256i)(codes))
#include "coded_formats.h"
#include "coded_one_row.h"

#define put_avx2 put_pairs

#define X_ROWS 4
#define Q8_0_ONE_ROW one_row_q8_0
#define Q4_K_ONE_ROW one_row_q4_k

/* sums += codes times pieces. In the order as it is written, or the compiler keeps all products in memory first. */
INLINE void add_pairs_avx2(Ints *sums, __m256i codes, const char *pieces) {
    const __m256i products = _mm256_madd_epi16(codes, _mm256_set1_epi32(word_at(pieces)));
    __asm__ volatile("vpaddd %1, %0, %0" : "+x"(*sums) : "x"(products));
}

/* Even codes and odd ones are taken apart once for all rows. */
INLINE void row_sums_avx2(const int rows, int size, Words codes[][VECTORS], const char *pieces, const Group *group,
                          Ints sums[][VECTORS]) {
    for (int row = 0; row < rows; row++) sums[row][0] = (Ints){0} + group[row].offset;
    _Pragma("GCC unroll 8")
    for (int w = 0; w < size / 4; w++, pieces += 4) {
        __m256i code = (__m256i)codes[w][0];
        __asm__ volatile("" : "+x"(code)); /* else they are taken apart ahead, and kept in memory */
        const __m256i even = _mm256_and_si256(code, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(code, 8);
        for (int row = 0; row < rows; row++) {
            add_pairs_avx2(&sums[row][0], even, pieces + row * PIECES_BYTES(size));
            add_pairs_avx2(&sums[row][0], odd, pieces + row * PIECES_BYTES(size) + size);
        }
    }
}

#include "coded_products.h"

#define ISA(name) name##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl")))
#define LANES 16
#define VECTORS 1
#define words_avx512 words_of_avx512
#define HALVES halves_of_avx512
#define WIDENED(halves) widened_halves_avx512((__m512i)(halves))
#define OF_FP4(codes) numbers_of_fp4_avx512((__m512i)(codes))
#include "coded_formats.h"

#define put_avx512 put_pairs

INLINE void sums_avx512(int size, Words codes[][VECTORS], const char *pieces, int32_t offset, Ints *sums) {
    __m512i even = _mm512_set1_epi32(offset), odd = _mm512_setzero_si512();
    for (int w = 0; w < size / 4; w++, pieces += 4) {
        const __m512i code = (__m512i)codes[w][0];
        const __m512i even_codes = _mm512_and_si512(code, _mm512_set1_epi16(255)), odd_codes = _mm512_srli_epi16(code, 8);
        even = _mm512_add_epi32(even, _mm512_madd_epi16(even_codes, _mm512_set1_epi32(word_at(pieces))));
        odd = _mm512_add_epi32(odd, _mm512_madd_epi16(odd_codes, _mm512_set1_epi32(word_at(pieces + size))));
    }
    sums[0] = (Ints)_mm512_add_epi32(even, odd);
}

#include "coded_products.h"

#define ISA(name) name##_avx512_vnni
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define LANES 16
#define VECTORS 2
#define words_avx512_vnni words_of_avx512
#define HALVES halves_of_avx512
#define WIDENED(halves) widened_halves_avx512((__m512i)(halves))
#define OF_FP4(codes) numbers_of_fp4_avx512((__m512i)(codes))
#include "coded_formats.h"
#include "coded_one_row_avx512.h"

#define put_avx512_vnni put_bytes

INLINE void sums_avx512_vnni(int size, Words codes[][VECTORS], const char *pieces, int32_t offset, Ints *sums) {
    __m512i lower[2][VECTORS], upper[2][VECTORS]; /* of even words and odd ones: chains of half the length */
    for (int v = 0; v < VECTORS; v++) {
        lower[0][v] = _mm512_set1_epi32(offset);
        lower[1][v] = upper[0][v] = upper[1][v] = _mm512_setzero_si512();
    }
    for (int w = 0; w < size / 4; w++, pieces += 4) {
        const __m512i upper_pieces = _mm512_set1_epi32(word_at(pieces));
        const __m512i lower_pieces = _mm512_set1_epi32(word_at(pieces + size));
        for (int v = 0; v < VECTORS; v++) {
            upper[w % 2][v] = _mm512_dpbusd_epi32(upper[w % 2][v], (__m512i)codes[w][v], upper_pieces);
            lower[w % 2][v] = _mm512_dpbusd_epi32(lower[w % 2][v], (__m512i)codes[w][v], lower_pieces);
        }
    }
    for (int v = 0; v < VECTORS; v++)
        sums[v] = (Ints)_mm512_add_epi32(_mm512_add_epi32(lower[0][v], lower[1][v]),
                                         _mm512_slli_epi32(_mm512_add_epi32(upper[0][v], upper[1][v]), 8));
}

#include "coded_products.h"

#if defined(HAS_AMX)
#include "coded_amx.h"
#endif
#endif

#if defined(__aarch64__)
#include "coded_neon.h"
#endif

static const Coding *const codings[INSTRUCTION_SETS] = {
#if defined(__x86_64__)
    [AVX2] = codings_avx2,
    [AVX512] = codings_avx512,
    [AVX512_BF16] = codings_avx512_vnni,
#if defined(HAS_AMX)
    [AMX_BF16] = codings_amx,
#endif
#elif defined(__aarch64__)
    [NEON] = codings_neon,
    [NEON_DOTPROD] = codings_neon_dotprod,
    [NEON_BF16] = codings_neon_dotprod,
#endif
    [PORTABLE] = codings_portable,
};

const Multiplier *coded_multiplier(InstructionSet set, Format format) { return &codings[set][format].multiplier; }

void decode_row(Format format, const void *rows, int64_t row, int64_t inputs, uint16_t *y) {
    const Coding *coding = &codings_portable[format];
    const int64_t block = coding->multiplier.block, block_bytes = coding->multiplier.block_bytes;
    const uint8_t *first = (const uint8_t *)rows + row * (inputs / block * block_bytes);
    Tile_portable tile; /* with the same row in all lanes */
    Ahead ahead = {0};
    for (int64_t k = 0; k < inputs; k += CHUNK, y += CHUNK) {
        const int64_t weights = inputs - k < CHUNK ? inputs - k : CHUNK;
        coding->unpack(first + k / block * block_bytes, 0, weights, &tile, &ahead);
        for (int64_t i = 0; i < weights; i++) {
            const int64_t group = i / coding->multiplier.step;
            const int code = (int)(tile.codes[i / 4][0] >> 8 * (i % 4) & 255) - coding->zero;
            const float weight = (float)code * tile.scales[group][0];
            y[i] = rounded(coding->has_minimums ? weight + tile.minimums[group][0] : weight);
        }
    }
}

/* The names of the formats, with a blank between them. */
API const char *moesched_formats(void) { return "bfloat16 float32 q8_0 q4_0 q5_0 q5_1 q4_k q5_k q6_k mxfp4"; }
