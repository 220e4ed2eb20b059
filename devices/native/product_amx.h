/* The inner loops of products.c for AMX, whose registers are tiles: 16 lines of 64 bytes.
 *
 * A tile of weights is a few rows by 32 inputs, as in memory; each line of a tile of x has the same two
 * inputs of all rows of x side by side. One instruction multiplies both, so that 16 rows of x cost little more than
 * one. Every output is summed over the inputs from first to last, whatever the number of rows, of threads or of row
 * blocks.
 */

#include "round_avx512.h"
#include "tiles.h"

#define ISA(name) name##_amx_bf16
#define TARGET __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 1
#define STEP 32
#define STEP_BYTES 64
#define COLUMNS 16
#define MOST_SUMS (MOST_OUTPUTS * MOST_BATCH)
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
enum { LINES = 16, LINE_BYTES = 64, PAIR_BYTES = 4, FEW_COLUMNS = 8, FEW_ROWS = 4, MANY_ROWS = 8, FEW_ROWS_AHEAD = 1024 };

/* From FEW_PANELS panels on, all of x passes over SQUARE rows of weights at a time, PASS_STEPS steps of them: a pair of
 * panels stays in the first-level cache, the weights in the second-level one. */
enum { FEW_PANELS = 2, SQUARE = 2 * LINES, PASS_STEPS = 8 };

/* Inputs from a weight to the one that is prefetched meanwhile: the fewer, the more rows a tile has. */
INLINE int64_t ahead_of(int rows) {
    const int64_t ahead = FEW_ROWS_AHEAD * FEW_ROWS / rows / STEP * STEP;
    return ahead < STEP ? STEP : ahead;
}

/* A panel of x, or two, which are multiplied by two tiles of weights at once: so each tile that is loaded has two
 * products, and none has to wait for the one before. */
typedef struct {
    int columns, more_columns; /* 0 for one panel */
    const char *x, *more_x;
    float *sums, *more_sums;
    int first_ahead, rows_ahead; /* of each two tiles of weights, the part that is prefetched with this pair */
} PanelPair;

/* The sums so far; zeros where a product begins. */
#define LOAD_SUMS(tile, begins, from, bytes)                                                                          \
    do {                                                                                                              \
        if (begins)                                                                                                   \
            _tile_zero(tile);                                                                                         \
        else                                                                                                          \
            _tile_loadd(tile, from, bytes);                                                                           \
    } while (0)

/* For tiles of `rows` rows of weights, and the rows of x of a pair. */
INLINE void ISA(shape_tiles)(int rows, const PanelPair *pair) {
    const uint8_t lines = (uint8_t)rows, more_lines = pair->more_columns ? lines : 0;
    const uint16_t x_bytes = (uint16_t)(pair->columns * PAIR_BYTES);
    const uint16_t more_bytes = (uint16_t)(pair->more_columns * PAIR_BYTES);
    const TileShapes shapes = {
        .palette = 1,
        .lines = {[SUMS] = lines, [WEIGHTS] = lines, [INPUTS] = LINES, [MORE_SUMS] = more_lines,
                  [MORE_INPUTS] = more_bytes ? LINES : 0, [LOWER_SUMS] = lines, [LOWER_MORE_SUMS] = more_lines,
                  [LOWER_WEIGHTS] = lines},
        .line_bytes = {[SUMS] = x_bytes, [WEIGHTS] = LINE_BYTES, [INPUTS] = x_bytes, [MORE_SUMS] = more_bytes,
                       [MORE_INPUTS] = more_bytes, [LOWER_SUMS] = x_bytes,
                       [LOWER_MORE_SUMS] = more_bytes, [LOWER_WEIGHTS] = LINE_BYTES},
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
        if (pair->more_columns) _tile_dpbf16ps(LOWER_MORE_SUMS, LOWER_WEIGHTS, MORE_INPUTS);
    }
}

/* The product of `rows` rows of weights, in two tiles if `doubled`, and the rows of x of a pair, whose sums begin at
 * `sums_at`. ahead: where prefetching is shared by pairs of panels, the pair's part of the weights. */
INLINE void ISA(tile)(int rows, int doubled, const PanelPair *pair, const Tile *tile, int64_t sums_at,
                      const uint16_t *ahead) {
    const uint16_t *weights = tile->weights;
    const int more = pair->more_columns, begins = tile->begins;
    const int64_t sums_bytes = tile->sums_stride * (int64_t)sizeof *pair->sums;
    const int64_t lower = doubled ? rows / 2 * tile->stride : 0, lower_at = sums_at + rows / 2 * tile->sums_stride;
    int64_t column = 0;
    MEMORY_IS_READ_OR_WRITTEN;
    LOAD_SUMS(SUMS, begins, pair->sums + sums_at, sums_bytes);
    if (more) LOAD_SUMS(MORE_SUMS, begins, pair->more_sums + sums_at, sums_bytes);
    if (doubled) LOAD_SUMS(LOWER_SUMS, begins, pair->sums + lower_at, sums_bytes);
    if (doubled && more) LOAD_SUMS(LOWER_MORE_SUMS, begins, pair->more_sums + lower_at, sums_bytes);
    for (int64_t step = 0; step < tile->steps; step++, weights += STEP) {
        if (!pair->rows_ahead) {
            const uint16_t *alone = weights + ahead_of(rows) + (step < tile->turn ? 0 : tile->gap);
            for (int r = 0; r < rows; r++) __builtin_prefetch(alone + r * tile->stride, 0, 3);
        } else if (ahead) {
            for (int r = 0; r < pair->rows_ahead; r++, ahead += STEP) {
                __builtin_prefetch(ahead, 0, 2);
                if (++column < tile->steps) continue;
                column = 0;
                ahead += tile->stride - tile->steps * STEP;
            }
        }
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
    if (more) _tile_stored(MORE_SUMS, pair->more_sums + sums_at, sums_bytes);
    if (doubled) _tile_stored(LOWER_SUMS, pair->sums + lower_at, sums_bytes);
    if (doubled && more) _tile_stored(LOWER_MORE_SUMS, pair->more_sums + lower_at, sums_bytes);
    MEMORY_IS_READ_OR_WRITTEN;
}

/* `count` times `rows` rows of weights, from row `first` of a stretch on. Those that are multiplied at once lie far
 * apart, and the next ones are the rows below them. */
INLINE void ISA(rows_of_tiles)(const Stretch *stretch, const PanelPair *pair, int64_t first, int64_t count, int rows,
                               int doubled) {
    const int64_t inputs = stretch->product->inputs, sums_row = stretch->product->batch;
    Tile tile = {.stride = count * inputs, .sums_stride = count * sums_row, .steps = stretch->steps,
                 .rest = stretch->rest, .begins = !stretch->first, .turn = stretch->steps - ahead_of(rows) / STEP};
    if (!count) return;
    ISA(shape_tiles)(doubled ? rows / 2 : rows, pair);
    for (int64_t row = 0; row < count; row++) {
        tile.weights = stretch->weights + (first + row) * inputs;
        tile.gap = first ? 0 : gap_behind(stretch, row, count, STEP);
        ISA(tile)(rows, doubled, pair, &tile, (first + row) * sums_row, NULL);
    }
}

/* Weights of a stretch from row `done` on, by a pair of panels. */
INLINE void ISA(few_rows)(const Stretch *stretch, const PanelPair *pair, int64_t done) {
    const int64_t left = stretch->rows - done;
    const int rows = pair->columns <= FEW_COLUMNS ? FEW_ROWS : MANY_ROWS;
    if (rows == FEW_ROWS)
        ISA(rows_of_tiles)(stretch, pair, done, left / FEW_ROWS, FEW_ROWS, 0);
    else
        ISA(rows_of_tiles)(stretch, pair, done, left / MANY_ROWS, MANY_ROWS, 0);
    done += left / rows * rows;
    if (done < stretch->rows) ISA(rows_of_tiles)(stretch, pair, done, 1, (int)(stretch->rows - done), 0);
}

/* A panel of x, and the next one if there is one. */
INLINE PanelPair ISA(pair_of)(const Stretch *stretch, int number, float *sums) {
    const Product *product = stretch->product;
    const Panels *panels = stretch->panels;
    const Panel one = panels->panel[number];
    const char *x = product->x + (one.column * product->steps + one.columns * stretch->first) * STEP_BYTES;
    PanelPair pair = {.columns = one.columns, .x = x, .sums = sums + one.column};
    if (number + 1 < panels->count) {
        const Panel more = panels->panel[number + 1];
        pair.more_columns = more.columns;
        pair.more_x = product->x + (more.column * product->steps + more.columns * stretch->first) * STEP_BYTES;
        pair.more_sums = sums + more.column;
    }
    return pair;
}

/* One panel or two by all weights of a stretch. */
INLINE void ISA(few_panels)(const Stretch *stretch, float *sums) {
    const PanelPair pair = ISA(pair_of)(stretch, 0, sums);
    const int64_t squares = pair.more_columns ? stretch->rows / SQUARE : 0;
    ISA(rows_of_tiles)(stretch, &pair, 0, squares, SQUARE, 1);
    ISA(few_rows)(stretch, &pair, squares * SQUARE);
}

/* A pair of panels by weights that follow each other, SQUARE rows at a time. */
INLINE void ISA(squares)(const Stretch *stretch, const PanelPair *pair, int64_t count) {
    const int64_t inputs = stretch->product->inputs, sums_row = stretch->product->batch;
    Tile tile = {.stride = inputs, .sums_stride = sums_row, .steps = stretch->steps, .rest = stretch->rest,
                 .begins = !stretch->first};
    const uint16_t *ahead = stretch->next ? stretch->next + pair->first_ahead * count * inputs : NULL;
    for (int64_t number = 0; number < count; number++) {
        tile.weights = stretch->weights + number * SQUARE * inputs;
        ISA(tile)(SQUARE, 1, pair, &tile, number * SQUARE * sums_row, ahead);
        if (ahead) ahead += pair->rows_ahead * inputs;
    }
}

/* All panels by a few steps of the weights of a stretch. */
INLINE void ISA(pass)(const Stretch *pass, float *sums) {
    const int panels = pass->panels->count;
    const int64_t squares = pass->rows / SQUARE;
    int columns = 0, more_columns = 0; /* of the tiles' shapes */
    for (int number = 0; number < panels; number += 2) {
        PanelPair pair = ISA(pair_of)(pass, number, sums);
        if (squares * SQUARE < pass->rows) ISA(few_rows)(pass, &pair, squares * SQUARE), columns = 0;
        if (pair.columns != columns || pair.more_columns != more_columns) ISA(shape_tiles)(LINES, &pair);
        columns = pair.columns, more_columns = pair.more_columns;
        pair.first_ahead = SQUARE * number / panels;
        pair.rows_ahead = (number + 2 < panels ? SQUARE * (number + 2) / panels : SQUARE) - pair.first_ahead;
        ISA(squares)(pass, &pair, squares);
    }
}

static TARGET void ISA(stretch)(const Stretch *stretch, float *sums) {
    if (stretch->panels->count <= FEW_PANELS) {
        ISA(few_panels)(stretch, sums);
    } else {
        int64_t step = 0;
        do {
            const int64_t left = stretch->steps - step, steps = left < PASS_STEPS ? left : PASS_STEPS;
            Stretch pass = *stretch;
            pass.first += step;
            pass.weights += step * STEP;
            pass.steps = steps;
            if (steps < left) pass.rest = 0, pass.next = pass.weights + steps * STEP;
            ISA(pass)(&pass, sums);
            step += steps;
        } while (step < stretch->steps);
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

/* Puts numbers [first, last) of all rows where `down` looks for them: hidden[number - first][row of x]. */
INLINE void ISA(place_hidden)(const Product *down, const Panels *panels, int64_t first, int64_t last,
                              const float *hidden) {
    for (int number = 0; number < panels->count; number++) {
        const Panel panel = panels->panel[number];
        const __mmask16 rows = (__mmask16)((1u << panel.columns) - 1);
        char *steps = down->x + panel.column * down->steps * STEP_BYTES;
        int64_t n = first;
        for (; n < last && n % 2; n++) /* the other half of the words is already there */
            for (int c = 0; c < panel.columns; c++)
                ISA(put)(steps + n / STEP * panel.columns * STEP_BYTES, panel.columns, c, (int)(n % STEP),
                         rounded(hidden[(n - first) * down->batch + panel.column + c]));
        for (; n < last; n += 2) {
            const float *numbers = hidden + panel.column;
            char *line = steps + (n / STEP * STEP_BYTES + n % STEP / 2 * PAIR_BYTES) * panel.columns;
            const __m512i words = words_of_avx512(numbers, last - first, down->batch, n - first, rows);
            if (n + 1 < last || last == down->inputs)
                _mm512_mask_storeu_epi32(line, rows, words);
            else /* another thread may have written the other half */
                for (int c = 0; c < panel.columns; c++)
                    ISA(put)(line, panel.columns, c, 0, rounded(numbers[(n - first) * down->batch + c]));
        }
    }
}

#define ROUND_TRANSPOSED round_transposed_avx512
#define OWN_HIDDEN
#include "product_parts.h"

#undef SUMS
#undef WEIGHTS
#undef INPUTS
#undef MORE_SUMS
#undef MORE_INPUTS
#undef LOWER_SUMS
#undef LOWER_MORE_SUMS
#undef LOWER_WEIGHTS
#undef LOAD_SUMS
#undef OWN_HIDDEN
