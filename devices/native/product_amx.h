/* The inner loops of products.c for AMX, whose registers are tiles: 16 lines of 64 bytes.
 *
 * A tile of weights is a few rows by 32 inputs, as in memory; each line of a tile of x has the same two
 * inputs of all rows of x side by side. One instruction multiplies both, so that 16 rows of x cost little more than
 * one. Every output is summed over the inputs from first to last, whatever the number of rows, of threads or of row
 * blocks.
 */

#include "tiles.h"

#define ISA(name) name##_amx_bf16
#define TARGET __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 1
#define FOLD fold_one
#define STEP 32
#define STEP_BYTES 64
#define COLUMNS 16
#define MOST_SUMS 12288
#define SUMMED_ROWS 96

/* Numbers of tiles. */
#define SUMS 0
#define WEIGHTS 1
#define INPUTS 2
#define MORE_SUMS 3
#define MORE_INPUTS 4
#define LOWER_SUMS 5
#define LOWER_MORE_SUMS 6
#define LOWER_WEIGHTS 7

/* Rows of weights in a tile for few rows of x and for many: with fewer rows, memory is read in fewer streams; with more,
 * x is loaded less often. */
enum { LINES = 16, LINE_BYTES = 64, PAIR_BYTES = 4, FEW_COLUMNS = 8, FEW_ROWS = 4, MANY_ROWS = 8 };

/* Inputs from a weight to the one that is prefetched meanwhile: the fewer, the more rows a tile has. */
INLINE int64_t ahead_of(int rows) {
    const int64_t ahead = AHEAD * FEW_ROWS / rows / STEP * STEP;
    return ahead < STEP ? STEP : ahead;
}

/* A panel of x, or two, which are multiplied by two tiles of weights at once: so each tile that is loaded has two
 * products, and none has to wait for the one before. */
typedef struct {
    int columns, more_columns; /* 0 for one panel */
    const char *x, *more_x;
    float *sums, *more_sums;
} PanelPair;

/* For tiles of `rows` rows of weights, and the rows of x of a pair. */
INLINE void ISA(shape_tiles)(int rows, const PanelPair *pair) {
    const uint8_t lines = (uint8_t)rows, more_lines = pair->more_columns ? lines : 0;
    const uint16_t x_bytes = (uint16_t)(pair->columns * PAIR_BYTES);
    const uint16_t more_bytes = (uint16_t)(pair->more_columns * PAIR_BYTES);
    const TileShapes shapes = {
        .palette = 1,
        .lines = {[SUMS] = lines, [WEIGHTS] = lines, [INPUTS] = LINES, [MORE_SUMS] = more_lines,
                  [MORE_INPUTS] = more_bytes ? LINES : 0, [LOWER_SUMS] = more_lines, [LOWER_MORE_SUMS] = more_lines,
                  [LOWER_WEIGHTS] = more_lines},
        .line_bytes = {[SUMS] = x_bytes, [WEIGHTS] = LINE_BYTES, [INPUTS] = x_bytes, [MORE_SUMS] = more_bytes,
                       [MORE_INPUTS] = more_bytes, [LOWER_SUMS] = more_bytes ? x_bytes : 0,
                       [LOWER_MORE_SUMS] = more_bytes, [LOWER_WEIGHTS] = more_bytes ? LINE_BYTES : 0},
    };
    MEMORY_IS_READ_OR_WRITTEN;
    _tile_loadconfig(&shapes);
}

/* lower: inputs from the first tile of weights to the second one, or 0 without one. */
INLINE void ISA(add_step)(const PanelPair *pair, const uint16_t *weights, int64_t stride, int64_t lower, int64_t step) {
    const int64_t bytes = stride * (int64_t)sizeof *weights;
    _tile_loadd(INPUTS, pair->x + step * pair->columns * STEP_BYTES, pair->columns * PAIR_BYTES);
    _tile_loadd(WEIGHTS, weights, bytes);
    _tile_dpbf16ps(SUMS, WEIGHTS, INPUTS);
    if (pair->more_columns) {
        _tile_loadd(MORE_INPUTS, pair->more_x + step * pair->more_columns * STEP_BYTES, pair->more_columns * PAIR_BYTES);
        _tile_dpbf16ps(MORE_SUMS, WEIGHTS, MORE_INPUTS);
    }
    if (lower) {
        _tile_loadd(LOWER_WEIGHTS, weights + lower, bytes);
        _tile_dpbf16ps(LOWER_SUMS, LOWER_WEIGHTS, INPUTS);
        _tile_dpbf16ps(LOWER_MORE_SUMS, LOWER_WEIGHTS, MORE_INPUTS);
    }
}

/* The product of `rows` rows of weights, in two tiles if `doubled`, and the rows of x of a pair, whose sums begin at
 * `sums_at`. */
INLINE void ISA(tile)(int rows, int doubled, const PanelPair *pair, const Tile *tile, int64_t sums_at) {
    const uint16_t *weights = tile->weights;
    const int64_t sums_bytes = tile->sums_stride * (int64_t)sizeof *pair->sums;
    const int64_t lower = doubled ? rows / 2 * tile->stride : 0, lower_at = sums_at + rows / 2 * tile->sums_stride;
    MEMORY_IS_READ_OR_WRITTEN;
    _tile_loadd(SUMS, pair->sums + sums_at, sums_bytes);
    if (pair->more_columns) _tile_loadd(MORE_SUMS, pair->more_sums + sums_at, sums_bytes);
    if (doubled) {
        _tile_loadd(LOWER_SUMS, pair->sums + lower_at, sums_bytes);
        _tile_loadd(LOWER_MORE_SUMS, pair->more_sums + lower_at, sums_bytes);
    }
    for (int64_t step = 0; step < tile->steps; step++, weights += STEP) {
        const uint16_t *ahead = weights + ahead_of(rows) + (step < tile->turn ? 0 : tile->gap);
        for (int r = 0; r < rows; r++) __builtin_prefetch(ahead + r * tile->stride, 0, 3);
        ISA(add_step)(pair, weights, tile->stride, lower, step);
    }
    if (tile->rest) {
        uint16_t padded[2 * LINES * STEP] = {0};
        for (int r = 0; r < rows; r++)
            memcpy(padded + r * STEP, weights + r * tile->stride, (size_t)tile->rest * sizeof *weights);
        MEMORY_IS_READ_OR_WRITTEN;
        ISA(add_step)(pair, padded, STEP, doubled ? rows / 2 * STEP : 0, tile->steps);
    }
    _tile_stored(SUMS, pair->sums + sums_at, sums_bytes);
    if (pair->more_columns) _tile_stored(MORE_SUMS, pair->more_sums + sums_at, sums_bytes);
    if (doubled) {
        _tile_stored(LOWER_SUMS, pair->sums + lower_at, sums_bytes);
        _tile_stored(LOWER_MORE_SUMS, pair->more_sums + lower_at, sums_bytes);
    }
    MEMORY_IS_READ_OR_WRITTEN;
}

/* `count` times `rows` rows of weights, from row `first` of a stretch on. Those that are multiplied at once lie far
 * apart, and the next ones are the rows below them. */
INLINE void ISA(rows_of_tiles)(const Stretch *stretch, const PanelPair *pair, int64_t first, int64_t count, int rows,
                               int doubled) {
    const int64_t inputs = stretch->product->inputs, sums_row = stretch->product->batch;
    Tile tile = {.stride = count * inputs, .sums_stride = count * sums_row, .steps = stretch->steps,
                 .rest = stretch->rest, .turn = stretch->steps - ahead_of(rows) / STEP};
    if (!count) return;
    ISA(shape_tiles)(doubled ? rows / 2 : rows, pair);
    for (int64_t row = 0; row < count; row++) {
        tile.weights = stretch->weights + (first + row) * inputs;
        tile.gap = first ? 0 : gap_behind(stretch, row, count, STEP);
        ISA(tile)(rows, doubled, pair, &tile, (first + row) * sums_row);
    }
}

/* A pair of panels by the weights of a stretch. */
INLINE void ISA(pair)(const Stretch *stretch, const PanelPair *pair) {
    int64_t done = 0;
    if (pair->more_columns) {
        const int64_t count = stretch->rows / (2 * LINES);
        ISA(rows_of_tiles)(stretch, pair, 0, count, 2 * LINES, 1);
        done = count * 2 * LINES;
    }
    const int64_t left = stretch->rows - done;
    if (pair->columns <= FEW_COLUMNS) {
        ISA(rows_of_tiles)(stretch, pair, done, left / FEW_ROWS, FEW_ROWS, 0);
        done += left / FEW_ROWS * FEW_ROWS;
    } else {
        ISA(rows_of_tiles)(stretch, pair, done, left / MANY_ROWS, MANY_ROWS, 0);
        done += left / MANY_ROWS * MANY_ROWS;
    }
    if (done < stretch->rows) ISA(rows_of_tiles)(stretch, pair, done, 1, (int)(stretch->rows - done), 0);
    _tile_release();
}

static TARGET void ISA(stretch)(const Stretch *stretch, float *sums) {
    const Product *product = stretch->product;
    const Panels *panels = stretch->panels;
    for (int number = 0; number < panels->count; number += 2) {
        const Panel one = panels->panel[number];
        const char *x = product->x + (one.column * product->steps + one.columns * stretch->first) * STEP_BYTES;
        PanelPair pair = {.columns = one.columns, .x = x, .sums = sums + one.column};
        if (number + 1 < panels->count) {
            const Panel more = panels->panel[number + 1];
            pair.more_columns = more.columns;
            pair.more_x = product->x + (more.column * product->steps + more.columns * stretch->first) * STEP_BYTES;
            pair.more_sums = sums + more.column;
        }
        ISA(pair)(stretch, &pair);
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
#undef MORE_SUMS
#undef MORE_INPUTS
#undef LOWER_SUMS
#undef LOWER_MORE_SUMS
#undef LOWER_WEIGHTS
