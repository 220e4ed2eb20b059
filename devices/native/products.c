/* Products by bfloat16 matrices, and whole experts: of few rows as fast as memory gives the weights, of many in groups
 * that pass over weights in the cache.
 *
 * Sums are float32. A row's bits depend on the instruction set alone: not on the other rows, the row blocks, or the
 * number of threads.
 */
#include "product.h"

#include <string.h>

#include "lanes.h"
#include "numbers.h"
#include "scratch.h"

enum {
    X_BYTES = 512 << 10, /* of all rows of x: stay in the second-level cache while rows of weights pass */
    PIECE = 1024,        /* inputs of a few rows of weights that stay in the first-level cache while all of x passes */
    MOST_PANELS = 32,
    LINE = 32,           /* weights in a cache line */
    AHEAD = 2048,        /* inputs from a weight to the one that the second-level cache gets meanwhile */
    SOON = 256,          /* the same for the first-level cache, where one panel has all of x; else the next piece */
    NEAR = 512,          /* the same where the processor fills the second-level cache itself */
};

/* Which weights a tile prefetches: of some of its rows, of all of them, or of all only to the first-level cache. */
typedef enum { SOME_ROWS, ALL_ROWS, TO_FIRST_LEVEL } Ahead;

typedef struct {
    int column, columns; /* its first row of x, and its number of rows */
} Panel;

typedef struct {
    int count;
    Panel panel[MOST_PANELS];
} Panels;

/* Rows of weights that follow each other, over inputs that are multiplied at once: `steps` whole steps from step
 * `first`, and `rest` more inputs. */
typedef struct {
    const Product *product;
    const Panels *panels;
    int64_t first, steps, rest;
    const uint16_t *weights;
    int64_t rows;
    const uint16_t *next; /* the weights that are read afterwards, or NULL */
    float *sums;          /* between stretches, where they have lanes */
} Stretch;

/* A few rows of weights by a few rows of x, over some inputs. */
typedef struct {
    const uint16_t *weights;
    int64_t stride; /* inputs from one row of weights to the next */
    const char *x;  /* its steps one after the other, all rows of x in each */
    int64_t steps, rest;
    int begins; /* the sums are zero */
    float *sums, *out; /* out: NULL where more inputs follow */
    int64_t sums_stride, out_stride;
    int near; /* prefetches to the first-level cache only */
    int first_ahead, last_ahead; /* else the rows of which weights are prefetched */
    int64_t soon;      /* inputs from a weight to the one that the first-level cache gets meanwhile */
    int64_t turn, gap; /* from step `turn` on, those of the next tile, which are `gap` inputs further */
} Tile;

/* The panel that a row of x is in: the first ones have a row more where the batch does not divide evenly. */
static inline Panel panel_of(const Product *product, int row, int most) {
    const int batch = (int)product->batch, panels = (batch + most - 1) / most;
    const int fewer = batch / panels, edge = batch % panels * (fewer + 1);
    if (row < edge) return (Panel){row / (fewer + 1) * (fewer + 1), fewer + 1};
    return (Panel){edge + (row - edge) / fewer * fewer, fewer};
}

static inline Panels panels_of(const Product *product, int most) {
    Panels panels = {0};
    for (int row = 0; row < product->batch; row += panels.panel[panels.count++].columns)
        panels.panel[panels.count] = panel_of(product, row, most);
    return panels;
}

/* Rows of weights that follow each other. */
typedef struct {
    const uint16_t *first;
    int64_t count;
} Weights;

/* The rows of weights from `output` to the end of its row block. */
static inline Weights rows_from(const Product *product, int64_t output) {
    const Rows *block = product->blocks;
    for (; output >= block->count; block++) output -= block->count;
    return (Weights){(const uint16_t *)block->first + output * product->inputs, block->count - output};
}

/* Inputs between where a row of weights ends in the stretch and where the next tile's begins, which is the row below in
 * all but the last of `tiles`. */
static inline int64_t gap_behind(const Stretch *stretch, int64_t tile, int64_t tiles, int step) {
    const int64_t inputs = stretch->product->inputs, here = stretch->steps * step + stretch->rest;
    if (tile + 1 < tiles || !stretch->next) return inputs - here;
    const intptr_t bytes = (intptr_t)stretch->next - (intptr_t)stretch->weights;
    return bytes / (intptr_t)sizeof(uint16_t) - tile * inputs - here;
}

/* Inputs of a piece: fewer let memory be read more evenly, more let sums stay in registers longer, best to their end. */
static inline int64_t piece_of(const Product *product, int on_zen_5) {
    const int64_t batch = product->batch;
    if (!on_zen_5 || batch <= FEW_ROWS_OF_X / 2) return PIECE;
    if (batch > FEW_ROWS_OF_X) return 2 * PIECE;
    return product->inputs <= PIECE ? PIECE : PIECE / 4;
}

/* ---------------------------------------------------------------- the inner loops */

/* Two neighbouring weights are one 32-bit word: the even one becomes a float by a shift, the odd one by a mask.
 * So a step of x has its even inputs first, then its odd ones, as floats. */
#define PLACE_WIDENED(step, k, bits)                                                                                  \
    do {                                                                                                              \
        const float placed = from_bits((uint32_t)(bits) << 16);                                                       \
        memcpy((step) + ((k) % 2 * (STEP / 2) + (k) / 2) * (int64_t)sizeof(float), &placed, sizeof placed);           \
    } while (0)
#define PLACE_PLAIN(step, k, bits)                                                                                    \
    do {                                                                                                              \
        const uint16_t placed = (bits);                                                                               \
        memcpy((step) + (k) * (int64_t)sizeof(uint16_t), &placed, sizeof placed);                                     \
    } while (0)

typedef float Float4 __attribute__((vector_size(16)));
typedef uint32_t Word4 __attribute__((vector_size(16)));

static inline Word4 words_at(const void *p) {
    Word4 words;
    memcpy(&words, p, sizeof words);
    return words;
}

#define ISA(name) name##_portable
#define TARGET
#define LANES 4
#define FOLD fold_four
#define STEP 8
#define STEP_BYTES 32
#define TILE_ROWS(columns) 2
#define MOST_TILE_ROWS 2
#define COLUMNS 4
#define Sums Float4
#define HALVES 2
#define Vector Float4
#define WEIGHTS(p, half) ((Float4)((half) ? words_at(p) & 0xffff0000u : words_at(p) << 16))
#define INPUTS(x, half) ((Float4)words_at((x) + (half) * 16))
#define DOT(sums, w, x) sums += (w) * (x)
#define PLACE PLACE_WIDENED
#include "product_tiles.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "round_avx512.h"

/* Twelve sums, three rows of weights and one of x are all sixteen registers: the mask stays in memory, and the order
 * of multiplications as it is written, or the compiler keeps sums in memory too. */
static const uint32_t odd_mask[16] __attribute__((aligned(64))) = {
    0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
    0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};

__attribute__((target("avx2,fma"), always_inline)) static inline __m256i odd_avx2(__m256i words) {
    __asm__ volatile("vpand %1, %0, %0" : "+x"(words) : "m"(*(const __m256i *)odd_mask));
    return words;
}

#define ISA(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define FOLD fold_eight
#define STEP 16
#define STEP_BYTES 64
#define TILE_ROWS(columns) 3
#define MOST_TILE_ROWS 3
#define COLUMNS 4
#define Sums __m256
#define HALVES 2
#define Vector __m256
#define WORDS(p) _mm256_loadu_si256((const __m256i *)(p))
#define WEIGHTS(p, half) _mm256_castsi256_ps((half) ? odd_avx2(WORDS(p)) : _mm256_slli_epi32(WORDS(p), 16))
#define INPUTS(x, half) _mm256_load_ps((const float *)(x) + (half) * 8)
#define DOT(sums, w, x) __asm__ volatile("vfmadd231ps %1, %2, %0" : "+x"(sums) : "x"(w), "x"(x))
#define PLACE PLACE_WIDENED
#include "product_tiles.h"
#undef WORDS

__attribute__((target("avx512f"), always_inline)) static inline __m512i odd_avx512(__m512i words) {
    __asm__ volatile("vpandd %1, %0, %0" : "+v"(words) : "m"(*(const __m512i *)odd_mask));
    return words;
}

#define ISA(name) name##_avx512
#define ROUND_TRANSPOSED round_transposed_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl")))
#define LANES 16
#define FOLD fold_sixteen
#define STEP 32
#define STEP_BYTES 128
#define TILE_ROWS(columns) ((columns) > 4 ? 4 : 6)
#define MOST_TILE_ROWS 6
#define COLUMNS 6
#define Sums __m512
#define HALVES 2
#define Vector __m512
#define WORDS(p) _mm512_loadu_si512(p)
#define WEIGHTS(p, half) _mm512_castsi512_ps((half) ? odd_avx512(WORDS(p)) : _mm512_slli_epi32(WORDS(p), 16))
#define INPUTS(x, half) _mm512_load_ps((const float *)(x) + (half) * 16)
#define DOT(sums, w, x) __asm__ volatile("vfmadd231ps %1, %2, %0" : "+v"(sums) : "v"(w), "v"(x))
#define PLACE PLACE_WIDENED
#include "product_tiles.h"
#undef WORDS

#define ISA(name) name##_avx512_bf16
#define ROUND_TRANSPOSED round_transposed_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define LANES 16
#define FOLD fold_sixteen
#define STEP 32
#define STEP_BYTES 64
#define TILE_ROWS(columns) ((columns) > 4 ? 4 : 6)
#define MOST_TILE_ROWS 6
#define COLUMNS 6
#define Sums __m512
#define HALVES 1
#define Vector __m512i
#define WEIGHTS(p, half) _mm512_loadu_si512(p)
#define INPUTS(x, half) _mm512_load_si512(x)
#define DOT(sums, w, x) sums = _mm512_dpbf16_ps(sums, (__m512bh)(w), (__m512bh)(x))
#define PLACE PLACE_PLAIN
#define ON_ZEN_5 is_zen_5
#include "product_tiles.h"

#if defined(HAS_AMX)
#include "product_amx.h"

#endif
#endif

#if defined(__aarch64__)
#include <arm_neon.h>

#define ISA(name) name##_neon
#define TARGET
#define LANES 4
#define FOLD fold_four
#define STEP 8
#define STEP_BYTES 32
#define TILE_ROWS(columns) 4
#define MOST_TILE_ROWS 4
#define COLUMNS 6
#define Sums float32x4_t
#define HALVES 2
#define Vector float32x4_t
#define WORDS(p) vreinterpretq_u32_u16(vld1q_u16(p))
#define WEIGHTS(p, half)                                                                                              \
    vreinterpretq_f32_u32((half) ? vandq_u32(WORDS(p), vdupq_n_u32(0xffff0000u)) : vshlq_n_u32(WORDS(p), 16))
#define INPUTS(x, half) vld1q_f32((const float *)(x) + (half) * 4)
#define DOT(sums, w, x) sums = vfmaq_f32(sums, w, x)
#define PLACE PLACE_WIDENED
#include "product_tiles.h"

#define ISA(name) name##_neon_bf16
#define TARGET __attribute__((target(BF16_TARGET)))
#define LANES 4
#define FOLD fold_four
#define STEP 8
#define STEP_BYTES 16
#define TILE_ROWS(columns) 4
#define MOST_TILE_ROWS 4
#define COLUMNS 6
#define Sums float32x4_t
#define HALVES 1
#define Vector uint16x8_t
#define WEIGHTS(p, half) vld1q_u16(p)
#define INPUTS(x, half) vld1q_u16((const uint16_t *)(x))
#define DOT(sums, w, x) sums = vbfdotq_f32(sums, vreinterpretq_bf16_u16(w), vreinterpretq_bf16_u16(x))
#define PLACE PLACE_PLAIN
#if defined(__clang__)
#define BF16_TARGET "bf16"
#else
#define BF16_TARGET "arch=armv8.2-a+bf16"
#endif
#include "product_tiles.h"
#endif


static const Multiplier *const multipliers[INSTRUCTION_SETS] = {
    [PORTABLE] = &multiplier_portable,
#if defined(__x86_64__)
    [AVX2] = &multiplier_avx2,
    [AVX512] = &multiplier_avx512,
    [AVX512_BF16] = &multiplier_avx512_bf16,
#if defined(HAS_AMX)
    [AMX_BF16] = &multiplier_amx_bf16,
#endif
#elif defined(__aarch64__)
    [NEON] = &multiplier_neon,
    [NEON_DOTPROD] = &multiplier_neon,
    [NEON_BF16] = &multiplier_neon_bf16,
#endif
};

const Multiplier *plain_multiplier(InstructionSet set) { return multipliers[set]; }

static const Multiplier *multiplier_for(InstructionSet set, Format format) {
    if (format == BFLOAT16) return plain_multiplier(set);
    return format == FLOAT32 ? float32_multiplier() : coded_multiplier(set, format);
}

Product product_of(const Team *team, int64_t batch, int64_t inputs, int64_t outputs, const Matrix *matrix) {
    const Format format = matrix ? (Format)matrix->format : BFLOAT16;
    const Multiplier *multiplier = multiplier_for(set_of(team), format);
    return (Product){.multiplier = multiplier,
                     .batch = batch,
                     .inputs = inputs,
                     .outputs = outputs,
                     .steps = (inputs + multiplier->step - 1) / multiplier->step,
                     .row_bytes = inputs / multiplier->block * multiplier->block_bytes,
                     .blocks = matrix ? matrix->blocks : NULL};
}

int64_t placed_bytes(const Product *product) {
    const int64_t bytes = product->batch * product->steps * product->multiplier->step_bytes;
    return (bytes + 63) / 64 * 64;
}

void give_memory(Product *product, char *memory) {
    product->x = memory;
    if (product->inputs % product->multiplier->step) memset(memory, 0, (size_t)placed_bytes(product));
}

void place_inputs(const Product *product, const uint16_t *x, int64_t stride, int64_t first, int64_t last) {
    for (int64_t row = 0; row < product->batch; row++) place(product, row, first, last, x + row * stride + first);
}

typedef struct {
    Product product;
    const uint16_t *x;
    int64_t stride;
    uint16_t *y;
} Job;

static void place_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    place_inputs(&job->product, job->x, job->stride, first, last);
}

static void project(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    write_rounded(&job->product, first, last, job->y);
}

/* y (batch, outputs) = x (batch, inputs) times the transpose of the matrix (outputs, inputs).
 * x and y are bfloat16; rows of x are `stride` numbers apart, those of y follow each other. Returns 0, or -1 without
 * memory. */
API int moesched_product(Team *team, int64_t batch, int64_t inputs, int64_t outputs, const uint16_t *x, int64_t stride,
                     const Matrix *matrix, uint16_t *y) {
    Job job = {product_of(team, batch, inputs, outputs, matrix), x, stride, y};
    char *memory = scratch(placed_bytes(&job.product));
    if (!memory) return -1;
    give_memory(&job.product, memory);
    Phase phases[] = {{place_part, inputs, PLACED_AT_ONCE, inputs, 0},
                      {project, outputs, least_outputs(&job.product), MOST_OUTPUTS, 0}};
    Task task = {&job, 2, phases};
    run(team, &task, matrix_bytes(&job.product));
    return 0;
}
