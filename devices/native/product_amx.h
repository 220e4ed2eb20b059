/* The inner loops of products.c for AMX, whose registers are tiles: 16 lines of 64 bytes.
 *
 * A tile of weights is a few rows by 32 inputs, as in memory; each line of a tile of x has the same two
 * inputs of all rows of x side by side. One instruction multiplies both, so that 16 rows of x cost little more than
 * one. Every output is summed over the inputs from first to last, whatever the number of rows, of threads or of row
 * blocks.
 */

#define ISA(name) name##_amx_bf16
#define TARGET __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 1
#define FOLD fold_one
#define STEP 32
#define STEP_BYTES 64
#define COLUMNS 16

/* Numbers of tiles. */
#define SUMS 0
#define WEIGHTS 1
#define INPUTS 2

/* Rows of weights in a tile for few rows of x and for many: with fewer rows, memory is read in fewer streams; with more,
 * x is loaded less often. */
enum { LINES = 16, LINE_BYTES = 64, PAIR_BYTES = 4, FEW_COLUMNS = 8, FEW_ROWS = 4, MANY_ROWS = 8 };

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

/* The product of `rows` rows of weights and `columns` rows of x. */
INLINE void ISA(tile)(int rows, int columns, const Tile *tile) {
    const uint16_t *weights = tile->weights;
    const char *x = tile->x;
    MEMORY_IS_READ_OR_WRITTEN;
    _tile_loadd(SUMS, tile->sums, tile->sums_stride * (int64_t)sizeof *tile->sums);
    for (int64_t step = 0; step < tile->steps; step++, weights += STEP, x += columns * STEP_BYTES) {
        const uint16_t *ahead = weights + AHEAD * FEW_ROWS / rows + (step < tile->turn ? 0 : tile->gap);
        for (int r = 0; r < rows; r++) __builtin_prefetch(ahead + r * tile->stride, 0, 3);
        ISA(add_step)(columns, weights, tile->stride, x);
    }
    if (tile->rest) {
        uint16_t padded[LINES * STEP] = {0};
        for (int r = 0; r < rows; r++)
            memcpy(padded + r * STEP, weights + r * tile->stride, (size_t)tile->rest * sizeof *weights);
        MEMORY_IS_READ_OR_WRITTEN;
        ISA(add_step)(columns, padded, STEP, x);
    }
    _tile_stored(SUMS, tile->sums, tile->sums_stride * (int64_t)sizeof *tile->sums);
    MEMORY_IS_READ_OR_WRITTEN;
}

/* One panel of x by the weights of a stretch. A tile has rows far apart, and the next tile the rows below them. */
INLINE void ISA(panel)(const Stretch *stretch, int columns, const char *x, float *sums) {
    const int64_t inputs = stretch->product->inputs, sums_row = stretch->product->batch;
    const int height = columns <= FEW_COLUMNS ? FEW_ROWS : MANY_ROWS, over = (int)(stretch->rows % height);
    const int64_t tiles = stretch->rows / height;
    Tile tile = {.x = x, .stride = tiles * inputs, .sums_stride = tiles * sums_row, .steps = stretch->steps,
                 .rest = stretch->rest, .turn = stretch->steps - AHEAD * FEW_ROWS / height / STEP};
    if (tiles) ISA(shape_tiles)(height, columns);
    for (int64_t row = 0; row < tiles; row++) {
        tile.weights = stretch->weights + row * inputs;
        tile.sums = sums + row * sums_row;
        tile.gap = gap_behind(stretch, row, tiles, STEP);
        if (height == FEW_ROWS)
            ISA(tile)(FEW_ROWS, columns, &tile);
        else
            ISA(tile)(MANY_ROWS, columns, &tile);
    }
    if (over) {
        ISA(shape_tiles)(over, columns);
        tile.weights = stretch->weights + tiles * height * inputs;
        tile.sums = sums + tiles * height * sums_row;
        tile.stride = inputs;
        tile.sums_stride = sums_row;
        ISA(tile)(over, columns, &tile);
    }
    _tile_release();
}

static TARGET void ISA(stretch)(const Stretch *stretch, float *sums) {
    const Product *product = stretch->product;
    for (int number = 0; number < stretch->panels->count; number++) {
        const Panel panel = stretch->panels->panel[number];
        const char *x = product->x + (panel.column * product->steps + panel.columns * stretch->first) * STEP_BYTES;
        ISA(panel)(stretch, panel.columns, x, sums + panel.column);
    }
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
