/* The inner loops of products.c for vectors, included once for each instruction set.
 *
 * The including file defines
 *   ISA(name)        the name with the instruction set's ending
 *   TARGET           the function attribute that lets the compiler use its instructions
 *   LANES            number of float32 sums in one accumulator
 *   FOLD             the function of lanes.h that adds them up
 *   STEP             number of inputs in one step
 *   STEP_BYTES       bytes of one row of x per step, in the layout that the instructions need
 *   TILE_ROWS(C)     number of rows of weights multiplied at once with C rows of x: TILE_ROWS(C) * C accumulators,
 *                    TILE_ROWS(C) vectors of weights and one of x have to fit into the registers
 *   MOST_TILE_ROWS   the largest of these
 *   COLUMNS          most rows of x multiplied at once
 *   Sums             the type of an accumulator
 *   HALVES           1, or 2 where a step takes two multiplications, first of its even inputs, then of its odd ones
 *   Vector           the type of the factors
 *   WEIGHTS(p, half) that half of the step's weights at p
 *   INPUTS(x, half)  that half of the step of x at address x
 *   DOT(sums, w, x)  sums += w * x
 *   ROUND_TRANSPOSED  optionally, as in product_parts.h
 *   ON_ZEN_5         optionally, whether the processor is one, for which pieces and prefetching differ
 *   PLACE(step, k, bits)  puts input k, counted within the step, into a step of one row of x
 *
 * Every output is summed in the same order whatever the number of rows, of threads or of row blocks: LANES sums over
 * the inputs from first to last, then a tree over the lanes.
 */

#if !defined(ON_ZEN_5)
#define ON_ZEN_5 0
#endif
#define UNROLL _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline)) TARGET

/* sums_RC += weights_R x_C of one step, for R rows of weights and C rows of x. */
INLINE void ISA(add_step)(const int R, const int C, const uint16_t *weights, int64_t stride, const char *x,
                          Sums sums[MOST_TILE_ROWS][COLUMNS]) {
    UNROLL
    for (int half = 0; half < HALVES; half++) {
        Vector rows[MOST_TILE_ROWS];
        UNROLL
        for (int r = 0; r < R; r++) rows[r] = WEIGHTS(weights + r * stride, half);
        UNROLL
        for (int c = 0; c < C; c++) {
            const Vector column = INPUTS(x + c * STEP_BYTES, half);
            UNROLL
            for (int r = 0; r < R; r++) DOT(sums[r][c], rows[r], column);
        }
    }
}

/* Memory takes longer than the few misses of the first-level cache can wait for: a line comes to the second level early,
 * and to the first a little before its use. With few streams, the processor does the former. */
INLINE void ISA(prefetch)(const uint16_t *weights, const uint16_t *ahead, int64_t soon) {
    __builtin_prefetch(ahead, 0, 2);
    __builtin_prefetch(weights + soon, 0, 3);
}

/* Adds up the lanes of each sum. */
INLINE void ISA(fold)(const int R, const int C, const Sums sums[MOST_TILE_ROWS][COLUMNS], const Tile *tile) {
    enum { ROOM = (MOST_TILE_ROWS * COLUMNS + FOLDED - 1) / FOLDED * FOLDED };
    Sums line[ROOM];
    float out[ROOM];
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int c = 0; c < C; c++) line[r * C + c] = sums[r][c];
    UNROLL
    for (int n = R * C; n % 4; n++) line[n] = (Sums){0};
    FOLD((const float *)line, R * C, out);
    UNROLL
    for (int r = 0; r < R; r++) memcpy(tile->out + r * tile->out_stride, out + r * C, (size_t)C * sizeof *out);
}

/* The product of R rows of weights and C rows of x. */
INLINE void ISA(tile)(const int R, const int C, const Ahead which, const Tile *tile) {
    enum { STEPS = LINE / STEP };
    const int64_t stride = tile->stride, turn = tile->turn, steps = tile->steps;
    const uint16_t *weights = tile->weights;
    const char *x = tile->x;
    Sums sums[MOST_TILE_ROWS][COLUMNS];
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int c = 0; c < C; c++) sums[r][c] = (Sums){0};
    if (!tile->begins)
        UNROLL
        for (int r = 0; r < R; r++)
            UNROLL
            for (int c = 0; c < C; c++) memcpy(&sums[r][c], tile->sums + r * tile->sums_stride + c * LANES, sizeof(Sums));
    int64_t step = 0;
    for (; step + STEPS <= steps; step += STEPS) {
        const uint16_t *ahead = weights + AHEAD + (step < turn ? 0 : tile->gap);
        if (which == TO_FIRST_LEVEL) {
            UNROLL
            for (int r = 0; r < R; r++) __builtin_prefetch(weights + r * stride + NEAR, 0, 3);
        } else if (which == ALL_ROWS) {
            UNROLL
            for (int r = 0; r < R; r++) ISA(prefetch)(weights + r * stride, ahead + r * stride, tile->soon);
        } else {
            for (int r = tile->first_ahead; r < tile->last_ahead; r++)
                ISA(prefetch)(weights + r * stride, ahead + r * stride, tile->soon);
        }
        UNROLL
        for (int i = 0; i < STEPS; i++, weights += STEP, x += C * STEP_BYTES)
            ISA(add_step)(R, C, weights, stride, x, sums);
    }
    for (; step < steps; step++, weights += STEP, x += C * STEP_BYTES) ISA(add_step)(R, C, weights, stride, x, sums);
    if (tile->rest) {
        uint16_t padded[MOST_TILE_ROWS * STEP];
        memset(padded, 0, sizeof padded);
        UNROLL
        for (int r = 0; r < R; r++)
            memcpy(padded + r * STEP, weights + r * stride, (size_t)tile->rest * sizeof *weights);
        ISA(add_step)(R, C, padded, STEP, x, sums);
    }
    if (tile->out) {
        ISA(fold)(R, C, sums, tile);
        return;
    }
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int c = 0; c < C; c++) memcpy(tile->sums + r * tile->sums_stride + c * LANES, &sums[r][c], sizeof(Sums));
}

#define TILES(C)                                                                                                       \
    static TARGET void ISA(tiles_##C)(int rows, const Tile *tile) {                                                    \
        if (rows == 1)                                                                                                 \
            ISA(tile)(1, C, SOME_ROWS, tile);                                                                          \
        else if (tile->near)                                                                                           \
            ISA(tile)(TILE_ROWS(COLUMNS), C, TO_FIRST_LEVEL, tile);                                                    \
        else if (tile->first_ahead == 0 && tile->last_ahead == TILE_ROWS(C))                                           \
            ISA(tile)(TILE_ROWS(C), C, ALL_ROWS, tile);                                                                \
        else if (rows == TILE_ROWS(C))                                                                                 \
            ISA(tile)(TILE_ROWS(C), C, SOME_ROWS, tile);                                                               \
        else /* the first panel is wider */                                                                            \
            ISA(tile)(TILE_ROWS(COLUMNS), C, SOME_ROWS, tile);                                                         \
    }
TILES(1)
TILES(2)
TILES(3)
TILES(4)
#if COLUMNS > 4
TILES(5)
TILES(6)
#endif
#undef TILES

static void (*const ISA(tiles)[])(int rows, const Tile *tile) = {
    ISA(tiles_1), ISA(tiles_2), ISA(tiles_3), ISA(tiles_4),
#if COLUMNS > 4
    ISA(tiles_5), ISA(tiles_6),
#endif
};

/* All rows of x by `rows` rows of weights, 1 or those of a tile, each `apart` rows below the one before.
 *
 * Several panels take turns at pieces of the weights, which stay in the first-level cache meanwhile, and share the
 * prefetching of a later piece: so that memory is read all the time. */
INLINE void ISA(tile_rows)(const Stretch *stretch, int rows, int64_t row, int64_t apart, int64_t gap, float *out) {
    const Product *product = stretch->product;
    const int panels = stretch->panels->count;
    const int64_t inputs = piece_of(product, ON_ZEN_5), piece = panels > 1 ? inputs / STEP : stretch->steps;
    const int64_t sums_row = product->batch * LANES;
    Tile tile = {.stride = apart * product->inputs, .sums_stride = apart * sums_row,
                 .out_stride = apart * product->batch, .gap = gap, .near = panels == 1 && ON_ZEN_5,
                 .soon = panels > 1 ? inputs : SOON};
    int64_t step = 0;
    do {
        const int64_t left = stretch->steps - step;
        tile.weights = stretch->weights + row * product->inputs + step * STEP;
        tile.steps = left < piece ? left : piece;
        tile.rest = tile.steps == left ? stretch->rest : 0;
        tile.turn = left - AHEAD / STEP;
        tile.begins = stretch->first + step == 0;
        const int ends = stretch->first + step + tile.steps == product->inputs / STEP;
        for (int number = 0; number < panels; number++) {
            const Panel panel = stretch->panels->panel[number];
            tile.x = product->x + (panel.column * product->steps + panel.columns * (stretch->first + step)) * STEP_BYTES;
            tile.sums = stretch->sums + row * sums_row + panel.column * LANES;
            tile.out = ends ? out + row * product->batch + panel.column : NULL;
            tile.first_ahead = rows * number / panels;
            tile.last_ahead = rows * (number + 1) / panels;
            ISA(tiles)[panel.columns - 1](rows, &tile);
        }
        step += tile.steps;
    } while (step < stretch->steps);
}

/* Adds weights x to the sums, and puts out what they come to in the last stretch. A tile has rows far apart, and the next
 * tile the rows below them: thus few streams of memory are read, each from its beginning to its end. */
static TARGET void ISA(stretch)(const Stretch *stretch, float *out) {
    const int few = stretch->panels->count == 1 && ON_ZEN_5;
    const int rows = few ? TILE_ROWS(COLUMNS) : TILE_ROWS(stretch->panels->panel[0].columns);
    const int64_t tiles = stretch->rows / rows;
    for (int64_t row = 0; row < tiles; row++)
        ISA(tile_rows)(stretch, rows, row, tiles, gap_behind(stretch, row, tiles, STEP), out);
    for (int64_t row = tiles * rows; row < stretch->rows; row++)
        ISA(tile_rows)(stretch, 1, row, 0, gap_behind(stretch, row, stretch->rows, STEP), out);
}

INLINE void ISA(put)(char *step, int columns, int column, int k, uint16_t bits) {
    (void)columns;
    PLACE(step + column * STEP_BYTES, k, bits);
}

/* Stores x in the layout that weights have when they are multiplied. */
INLINE void ISA(put_step)(char *step, int columns, int column, const uint16_t *values) {
    (void)columns;
    for (int half = 0; half < HALVES; half++) {
        const Vector placed = WEIGHTS(values, half);
        memcpy(step + column * STEP_BYTES + half * sizeof placed, &placed, sizeof placed);
    }
}

#define MOST_SUMS 3072
#define SUMMED_ROWS 24
#include "product_parts.h"

#undef TILE_ROWS
#undef FOLD
#undef MOST_TILE_ROWS
#undef Sums
#undef HALVES
#undef Vector
#undef WEIGHTS
#undef INPUTS
#undef DOT
#undef PLACE
#undef ON_ZEN_5
