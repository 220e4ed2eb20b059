/* The inner loops of expert_kernel.c, included once for each instruction set.
 *
 * Whoever includes it defines
 *   ISA(name)        the name with the instruction set's ending
 *   TARGET           the function attribute that lets the compiler use its instructions
 *   LANES            how many float32 sums one accumulator holds
 *   STEP             how many inputs one step takes in
 *   STEP_BYTES       what one row's share of x takes per step, laid out as the instructions want it
 *   TILE_ROWS(C)     how many rows of weights are multiplied by C rows of x at once: as many as the registers hold
 *   Sums             the type of an accumulator
 *   HALVES           1, or 2 where a step takes two multiplications, first of its even inputs, then of its odd ones
 *   Vector           the type of what is multiplied
 *   WEIGHTS(p, half) that half of the step's weights at p
 *   INPUTS(x, half)  that half of the step of x at address x
 *   DOT(sums, w, x)  sums += w * x
 *   PLACE(step, k, bits)  puts input k, counted within the step, into a step of x
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

/* The same over `steps` whole steps and a broken one of `rest` inputs.
 * x: its steps one after the other, C rows in each. stride: inputs from one row of weights to the next.
 * next: inputs from a row of weights to the one that has its place in the next tile; 0 if there is none.
 * Each row of weights is brought into the cache some way ahead, and at its end the beginning of the next tile's. */
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
            /* What comes after the last ones is another thread's, perhaps. */                                         \
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

/* out[row][m]: the sum of each accumulator's lanes. */
INLINE void ISA(add_lanes)(const float *sums, int64_t count, float *out) {
    for (int64_t n = 0; n < count; n++) {
        float lanes[LANES];
        memcpy(lanes, sums + n * LANES, sizeof lanes);
        for (int width = LANES / 2; width; width /= 2)
            for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
        out[n] = lanes[0];
    }
}

/* outputs [first, last) of a product for all rows of x: out[output - first][row of x]. */
static TARGET void ISA(multiply)(const Product *product, int64_t first, int64_t last, float *out) {
    const int64_t batch = product->batch, inputs = product->inputs, whole = inputs / STEP;
    const int64_t block_steps = PANEL_BYTES / STEP_BYTES / panel_of(product, 0).columns;
    float sums[MOST_OUTPUTS * MOST_BATCH * LANES] __attribute__((aligned(64)));
    memset(sums, 0, (size_t)((last - first) * batch * LANES) * sizeof(float));
    int64_t block_first = 0;
    for (const Rows *block = product->blocks; block_first < last; block_first += block->count, block++) {
        const int64_t from = block_first > first ? block_first : first;
        const int64_t end = block_first + block->count, to = end < last ? end : last;
        if (from >= to) continue;
        const uint16_t *weights = block->first + (from - block_first) * inputs;
        int64_t step = 0;
        do {
            const int64_t left = whole - step, steps = left < block_steps ? left : block_steps;
            const int64_t rest = step + steps == whole ? inputs % STEP : 0;
            for (int row = 0; row < batch;) {
                const Panel panel = panel_of(product, row);
                const char *x = product->x + (row * product->steps + panel.columns * step) * STEP_BYTES;
                ISA(panel)(panel.columns, weights + step * STEP, to - from, inputs, x, steps, rest,
                           sums + ((from - first) * batch + row) * LANES, batch * LANES);
                row += panel.columns;
            }
            step += steps;
        } while (step < whole);
    }
    ISA(add_lanes)(sums, (last - first) * batch, out);
}

/* Puts inputs [first, last) of a row of x, `gap` elements apart at `values`, where `multiply` looks for them. */
INLINE void ISA(place)(const Product *product, int row, int64_t first, int64_t last, const uint16_t *values,
                       int64_t gap) {
    const Panel panel = panel_of(product, row);
    char *steps = product->x + (panel.column * product->steps + (row - panel.column)) * STEP_BYTES;
    for (int64_t k = first; k < last; k++, values += gap)
        PLACE(steps + k / STEP * panel.columns * STEP_BYTES, k % STEP, *values);
}

static TARGET void ISA(place_row)(const Product *product, int row, const uint16_t *values) {
    const Panel panel = panel_of(product, row);
    const int64_t whole = product->inputs / STEP, gap = panel.columns * STEP_BYTES;
    char *step = product->x + (panel.column * product->steps + (row - panel.column)) * STEP_BYTES;
    for (int64_t k = 0; k < whole; k++, step += gap)
        for (int half = 0; half < HALVES; half++) {
            const Vector placed = WEIGHTS(values + k * STEP, half); /* x lies as weights do when they are multiplied */
            memcpy(step + half * sizeof placed, &placed, sizeof placed);
        }
    ISA(place)(product, row, whole * STEP, product->inputs, values + whole * STEP, 1);
}

static TARGET void ISA(project)(const Job *job, int64_t first, int64_t last) {
    float out[MOST_OUTPUTS * MOST_BATCH];
    const Product *product = &job->last;
    ISA(multiply)(product, first, last, out);
    for (int64_t m = 0; m < product->batch; m++)
        for (int64_t n = first; n < last; n++)
            job->y[m * product->outputs + n] = rounded(out[(n - first) * product->batch + m]);
}

static TARGET void ISA(gate)(const Job *job, int64_t first, int64_t last) {
    float gate[MOST_OUTPUTS * MOST_BATCH] __attribute__((aligned(64)));
    float up[MOST_OUTPUTS * MOST_BATCH] __attribute__((aligned(64)));
    const int64_t batch = job->gate.batch, count = (last - first) * batch;
    ISA(multiply)(&job->gate, first, last, gate);
    ISA(multiply)(&job->up, first, last, up);
    uint16_t hidden[MOST_OUTPUTS * MOST_BATCH];
    for (int64_t i = 0; i < count; i++) hidden[i] = rounded(silu(gate[i]) * up[i]);
    for (int64_t m = 0; m < batch; m++) ISA(place)(&job->last, (int)m, first, last, hidden + m, batch);
}

static const Variant ISA(variant) = {STEP, STEP_BYTES, ISA(place_row), ISA(gate), ISA(project)};

#undef INLINE
#undef UNROLL
#undef ISA
#undef TARGET
#undef LANES
#undef STEP
#undef STEP_BYTES
#undef TILE_ROWS
#undef Sums
#undef HALVES
#undef Vector
#undef WEIGHTS
#undef INPUTS
#undef DOT
#undef PLACE
