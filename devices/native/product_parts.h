/* The parts of products and experts, included once for each instruction set, after its inner loops.
 *
 * The including file defines, in addition to the macros of product_tiles.h or instead of them,
 *   COLUMNS    the most rows of x in a panel
 *   stretch    all rows of x by rows of weights, over a stretch of the inputs
 *   put        puts input k, counted within the step, of a row of x into its step
 *   put_step   the same for a whole step
 */

/* to[n][width] = the sums of the halves of from[n][2 * width]. */
INLINE void ISA(fold)(const int width, const float *restrict from, float *restrict to) {
    for (int n = 0; n < FOLDED; n++)
        for (int i = 0; i < width; i++) to[n * width + i] = from[2 * n * width + i] + from[(2 * n + 1) * width + i];
}

/* out[row][m]: the sum of each accumulator's lanes. As many at once as make whole vectors of one lane each. */
INLINE void ISA(add_lanes)(const float *sums, int64_t count, float *out) {
    float lanes[2][FOLDED * 8] __attribute__((aligned(64)));
    for (int64_t n = 0; n < count; n += FOLDED, sums += FOLDED * LANES, out += FOLDED) {
        if (LANES > 8) ISA(fold)(8, sums, lanes[0]);
        if (LANES > 4) ISA(fold)(4, LANES > 8 ? lanes[0] : sums, lanes[1]);
        if (LANES > 1) {
            ISA(fold)(2, LANES > 4 ? lanes[1] : sums, lanes[0]);
            ISA(fold)(1, lanes[0], out);
        } else {
            memcpy(out, sums, FOLDED * sizeof *out);
        }
    }
}

static TARGET void ISA(multiply)(const Product *product, int64_t first, int64_t last, float *out) {
    const int64_t batch = product->batch, inputs = product->inputs, whole = inputs / STEP;
    const int64_t most_steps = X_BYTES / STEP_BYTES / batch;
    float sums[MOST_OUTPUTS * MOST_BATCH * LANES] __attribute__((aligned(64)));
    const int64_t count = ((last - first) * batch + FOLDED - 1) / FOLDED * FOLDED;
    memset(sums, 0, (size_t)(count * LANES) * sizeof(float));
    Panel panel[MOST_PANELS];
    int panels = 0;
    for (int row = 0; row < batch; row += panel[panels++].columns) panel[panels] = panel_of(product, row, COLUMNS);
    int64_t block_first = 0;
    for (const Rows *block = product->blocks; block_first < last; block_first += block->count, block++) {
        const int64_t from = block_first > first ? block_first : first;
        const int64_t end = block_first + block->count, to = end < last ? end : last;
        if (from >= to) continue;
        const uint16_t *weights = block->first + (from - block_first) * inputs;
        int64_t step = 0;
        do {
            const int64_t left = whole - step, steps = left < most_steps ? left : most_steps;
            const int64_t rest = steps == left ? inputs % STEP : 0;
            const Stretch stretch = {product, panels, panel, step, steps, rest, inputs - steps * STEP - rest};
            ISA(stretch)(&stretch, weights + step * STEP, to - from, sums + (from - first) * batch * LANES);
            step += steps;
        } while (step < whole);
    }
    ISA(add_lanes)(sums, count, out);
}

static TARGET void ISA(place)(const Product *product, int row, int64_t first, int64_t last, const uint16_t *values,
                              int64_t gap) {
    const Panel panel = panel_of(product, row, COLUMNS);
    char *steps = product->x + panel.column * product->steps * STEP_BYTES;
    for (int64_t k = first; k < last; k++, values += gap)
        ISA(put)(steps + k / STEP * panel.columns * STEP_BYTES, panel.columns, row - panel.column, (int)(k % STEP),
                 *values);
}

static TARGET void ISA(place_row)(const Product *product, int row, const uint16_t *values) {
    const Panel panel = panel_of(product, row, COLUMNS);
    const int64_t whole = product->inputs / STEP;
    char *step = product->x + panel.column * product->steps * STEP_BYTES;
    for (int64_t k = 0; k < whole; k++, step += panel.columns * STEP_BYTES)
        ISA(put_step)(step, panel.columns, row - panel.column, values + k * STEP);
    ISA(place)(product, row, whole * STEP, product->inputs, values + whole * STEP, 1);
}

static TARGET void ISA(gated)(const Product *gate, const Product *up, const Product *down, int64_t first,
                              int64_t last) {
    float gates[MOST_OUTPUTS * MOST_BATCH] __attribute__((aligned(64)));
    float ups[MOST_OUTPUTS * MOST_BATCH] __attribute__((aligned(64)));
    const int64_t batch = gate->batch, count = (last - first) * batch;
    ISA(multiply)(gate, first, last, gates);
    ISA(multiply)(up, first, last, ups);
    uint16_t hidden[MOST_OUTPUTS * MOST_BATCH];
    for (int64_t i = 0; i < count; i++) hidden[i] = rounded(silu(gates[i]) * ups[i]);
    for (int64_t m = 0; m < batch; m++) ISA(place)(down, (int)m, first, last, hidden + m, batch);
}

static const Multiplier ISA(multiplier) = {STEP,           STEP_BYTES,    ISA(place),
                                           ISA(place_row), ISA(multiply), ISA(gated)};

#undef INLINE
#undef UNROLL
#undef ISA
#undef TARGET
#undef LANES
#undef STEP
#undef STEP_BYTES
#undef COLUMNS
