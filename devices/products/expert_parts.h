/* The parts of products and experts, included once for each instruction set, after its inner loops.
 *
 * The including file defines, in addition to the macros of expert_tiles.h or instead of them,
 *   COLUMNS    the most rows of x in a panel
 *   panel      one panel: `columns` rows of x by `rows` rows of weights
 *   put        puts input k, counted within the step, of a row of x into its step
 *   put_step   the same for a whole step
 */

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
    const int64_t block_steps = PANEL_BYTES / STEP_BYTES / panel_of(product, 0, COLUMNS).columns;
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
                const Panel panel = panel_of(product, row, COLUMNS);
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
#undef COLUMNS
