/* The inner loops of products.c for AMX, whose registers are tiles: 16 lines of 64 bytes.
 *
 * A tile of weights is 16 rows by 32 inputs, as in memory; each line of a tile of x has the same two
 * inputs of all rows of x side by side. One instruction multiplies both, so that 16 rows of x cost little more than
 * one. Every output is summed over the inputs from first to last, whatever the number of rows, of threads or of row
 * blocks.
 */

#define ISA(name) name##_amx_bf16
#define TARGET __attribute__((target("amx-tile,amx-bf16")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 1
#define STEP 32
#define STEP_BYTES 64
#define COLUMNS 16

/* Numbers of tiles. */
#define SUMS 0
#define WEIGHTS 1
#define INPUTS 2

enum { LINES = 16, LINE_BYTES = 64, PAIR_BYTES = 4 };

/* The layout of the processor's tile configuration. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t line_bytes[16];
    uint8_t lines[16];
} TileShapes;

/* The intrinsics do not tell the compiler which memory they read and write. */
#define MEMORY_IS_READ_OR_WRITTEN __asm__ volatile("" ::: "memory")

/* For `rows` rows of weights and `columns` rows of x. */
INLINE void ISA(shape_tiles)(int rows, int columns) {
    const TileShapes shapes = {
        .palette = 1,
        .lines = {[SUMS] = (uint8_t)rows, [WEIGHTS] = (uint8_t)rows, [INPUTS] = LINES},
        .line_bytes = {[SUMS] = (uint16_t)(columns * PAIR_BYTES), [WEIGHTS] = LINE_BYTES,
                       [INPUTS] = (uint16_t)(columns * PAIR_BYTES)},
    };
    MEMORY_IS_READ_OR_WRITTEN;
    _tile_loadconfig(&shapes);
}

INLINE void ISA(add_step)(int columns, const uint16_t *weights, int64_t stride, const char *x) {
    _tile_loadd(INPUTS, x, columns * PAIR_BYTES);
    _tile_loadd(WEIGHTS, weights, stride * (int64_t)sizeof *weights);
    _tile_dpbf16ps(SUMS, WEIGHTS, INPUTS);
}

/* sums += weights x for `rows` rows of weights, over `steps` whole steps and a partial one of `rest` inputs.
 * next: inputs from a row of weights to the same row of the next tile; 0 if there is none. */
INLINE void ISA(tile)(int rows, int columns, const uint16_t *weights, int64_t stride, int64_t next, const char *x,
                      int64_t steps, int64_t rest, float *sums, int64_t sums_stride) {
    const int64_t here = steps * STEP, within = here < AHEAD ? here : AHEAD;
    const int64_t beyond = next ? next + within - here : 0;
    MEMORY_IS_READ_OR_WRITTEN;
    _tile_loadd(SUMS, sums, sums_stride * (int64_t)sizeof *sums);
    for (int64_t left = steps; left; left--, weights += STEP, x += columns * STEP_BYTES) {
        const int64_t ahead = left * STEP >= within + STEP ? within : beyond;
        for (int r = 0; r < rows; r++) __builtin_prefetch(weights + r * stride + ahead, 0, 2);
        ISA(add_step)(columns, weights, stride, x);
    }
    if (rest) {
        uint16_t padded[LINES * STEP] = {0};
        for (int r = 0; r < rows; r++) memcpy(padded + r * STEP, weights + r * stride, (size_t)rest * sizeof *weights);
        MEMORY_IS_READ_OR_WRITTEN;
        ISA(add_step)(columns, padded, STEP, x);
    }
    _tile_stored(SUMS, sums, sums_stride * (int64_t)sizeof *sums);
    MEMORY_IS_READ_OR_WRITTEN;
}

static TARGET void ISA(panel)(int columns, const uint16_t *weights, int64_t rows, int64_t stride, const char *x,
                              int64_t steps, int64_t rest, float *sums, int64_t sums_stride) {
    int64_t row = 0;
    ISA(shape_tiles)(LINES, columns);
    for (; row + LINES <= rows; row += LINES) {
        /* The bytes after the last ones may belong to another thread. */
        const int64_t next = row + 2 * LINES <= rows ? LINES * stride : 0;
        ISA(tile)(LINES, columns, weights + row * stride, stride, next, x, steps, rest, sums + row * sums_stride,
                  sums_stride);
    }
    if (row < rows) {
        ISA(shape_tiles)((int)(rows - row), columns);
        ISA(tile)((int)(rows - row), columns, weights + row * stride, stride, 0, x, steps, rest,
                  sums + row * sums_stride, sums_stride);
    }
    _tile_release();
}

INLINE void ISA(put)(char *step, int columns, int column, int k, uint16_t bits) {
    memcpy(step + (k / 2 * columns + column) * PAIR_BYTES + k % 2 * (int)sizeof bits, &bits, sizeof bits);
}

INLINE void ISA(put_step)(char *step, int columns, int column, const uint16_t *values) {
    for (int pair = 0; pair < STEP / 2; pair++)
        memcpy(step + (pair * columns + column) * PAIR_BYTES, values + 2 * pair, PAIR_BYTES);
}

#include "product_parts.h"

#undef SUMS
#undef WEIGHTS
#undef INPUTS
