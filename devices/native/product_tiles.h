/* The inner loops of products.c, included once for each instruction set.
 *
 * The including file defines
 *   ISA(name)        the name with the instruction set's ending
 *   TARGET           the function attribute that lets the compiler use its instructions
 *   LANES            number of float32 sums in one accumulator
 *   STEP             number of inputs in one step
 *   STEP_BYTES       bytes of one row of x per step, in the layout that the instructions need
 *   TILE_ROWS(C)     number of rows of weights multiplied by C rows of x at once: as many as the registers hold
 *   Sums             the type of an accumulator
 *   HALVES           1, or 2 where a step takes two multiplications, first of its even inputs, then of its odd ones
 *   Vector           the type of the factors
 *   WEIGHTS(p, half) that half of the step's weights at p
 *   INPUTS(x, half)  that half of the step of x at address x
 *   DOT(sums, w, x)  sums += w * x
 *   PLACE(step, k, bits)  puts input k, counted within the step, into a step of one row of x
 *
 * Every output is summed in the same order whatever the number of rows, of threads or of row blocks: LANES sums over
 * the inputs from first to last, then a tree over the lanes.
 */

#define UNROLL _Pragma("GCC unroll 8")
#define INLINE static inline __attribute__((always_inline)) TARGET

/* sums_RC += weights_R x_C of one step, for R rows of weights and C rows of x. */
INLINE void ISA(add_step)(const int R, const int C, const uint16_t *weights, int64_t stride, const char *x,
                          Sums sums[MOST_TILE_ROWS][MOST_COLUMNS]) {
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

/* The same over `steps` whole steps and a partial one of `rest` inputs.
 * x: its steps one after the other, C rows in each. stride: inputs from one row of weights to the next.
 * next: inputs from a row of weights to the same row of the next tile; 0 if there is none.
 * Each row of weights is prefetched some way ahead, and at its end the beginning of its row in the next tile. */
INLINE void ISA(tile)(const int R, const int C, const uint16_t *weights, int64_t stride, int64_t next, const char *x,
                      int64_t steps, int64_t rest, float *total, int64_t total_stride) {
    Sums sums[MOST_TILE_ROWS][MOST_COLUMNS];
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int c = 0; c < C; c++) memcpy(&sums[r][c], total + r * total_stride + c * LANES, sizeof(Sums));
    enum { LINE = 32, STEPS = LINE / STEP };
    const int64_t here = steps * STEP, within = here < AHEAD ? here : AHEAD;
    const int64_t beyond = next ? next + within - here : 0;
    int64_t left = steps;
    for (; left >= STEPS; left -= STEPS) {
        const int64_t ahead = left * STEP >= within + LINE ? within : beyond;
        UNROLL
        for (int r = 0; r < R; r++) __builtin_prefetch(weights + r * stride + ahead, 0, 3);
        UNROLL
        for (int i = 0; i < STEPS; i++, weights += STEP, x += C * STEP_BYTES)
            ISA(add_step)(R, C, weights, stride, x, sums);
    }
    for (; left; left--, weights += STEP, x += C * STEP_BYTES) ISA(add_step)(R, C, weights, stride, x, sums);
    if (rest) {
        uint16_t padded[MOST_TILE_ROWS * STEP];
        memset(padded, 0, sizeof padded);
        UNROLL
        for (int r = 0; r < R; r++) memcpy(padded + r * STEP, weights + r * stride, (size_t)rest * sizeof *weights);
        ISA(add_step)(R, C, padded, STEP, x, sums);
    }
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int c = 0; c < C; c++) memcpy(total + r * total_stride + c * LANES, &sums[r][c], sizeof(Sums));
}

#define TILES(C)                                                                                                       \
    static TARGET void ISA(tiles_##C)(const uint16_t *weights, int64_t rows, int64_t stride, const char *x,           \
                                      int64_t steps, int64_t rest, float *sums, int64_t sums_stride) {                \
        int64_t row = 0;                                                                                               \
        for (; row + TILE_ROWS(C) <= rows; row += TILE_ROWS(C)) {                                                      \
            /* The bytes after the last ones may belong to another thread. */                                          \
            const int64_t next = row + 2 * TILE_ROWS(C) <= rows ? TILE_ROWS(C) * stride : 0;                           \
            ISA(tile)(TILE_ROWS(C), C, weights + row * stride, stride, next, x, steps, rest,                           \
                      sums + row * sums_stride, sums_stride);                                                          \
        }                                                                                                              \
        for (; row < rows; row++)                                                                                      \
            ISA(tile)(1, C, weights + row * stride, stride, 0, x, steps, rest, sums + row * sums_stride, sums_stride); \
    }
TILES(1)
TILES(2)
TILES(3)
TILES(4)
TILES(5)
TILES(6)
#undef TILES

/* One panel: `columns` rows of x by `rows` rows of weights. */
static TARGET void ISA(panel)(int columns, const uint16_t *weights, int64_t rows, int64_t stride, const char *x,
                              int64_t steps, int64_t rest, float *sums, int64_t sums_stride) {
    switch (columns) {
    case 1: ISA(tiles_1)(weights, rows, stride, x, steps, rest, sums, sums_stride); break;
    case 2: ISA(tiles_2)(weights, rows, stride, x, steps, rest, sums, sums_stride); break;
    case 3: ISA(tiles_3)(weights, rows, stride, x, steps, rest, sums, sums_stride); break;
    case 4: ISA(tiles_4)(weights, rows, stride, x, steps, rest, sums, sums_stride); break;
    case 5: ISA(tiles_5)(weights, rows, stride, x, steps, rest, sums, sums_stride); break;
    default: ISA(tiles_6)(weights, rows, stride, x, steps, rest, sums, sums_stride); break;
    }
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

#define COLUMNS MOST_COLUMNS
#include "product_parts.h"

#undef TILE_ROWS
#undef Sums
#undef HALVES
#undef Vector
#undef WEIGHTS
#undef INPUTS
#undef DOT
#undef PLACE
