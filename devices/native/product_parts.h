/* The parts of products and experts, included once for each instruction set, after its inner loops.
 *
 * The including file defines, in addition to the macros of product_tiles.h or instead of them,
 *   COLUMNS    the most rows of x in a panel
 *   stretch    all rows of x by rows of weights, over a stretch of the inputs
 *   ROUND_TRANSPOSED  optionally, its own round_transposed
 *   OWN_HIDDEN  defined where it has its own place_hidden
 *   put        puts input k, counted within the step, of a row of x into its step
 *   put_step   the same for a whole step
 */

/* Outputs [first, last), which are few enough for MOST_SUMS. */
INLINE void ISA(multiply_few)(const Product *product, const Panels *panels, int64_t first, int64_t last,
                              const uint16_t *next, float *out) {
    const int64_t batch = product->batch, inputs = product->inputs, whole = inputs / STEP;
    const int64_t most_steps = X_BYTES / STEP_BYTES / batch;
#if LANES > 1
    float sums[MOST_SUMS * LANES] __attribute__((aligned(64)));
#else
    float *const sums = out; /* where tiles add up */
#endif
    for (int64_t from = first, to; from < last; from = to) {
        const Weights here = rows_from(product, from);
        to = from + here.count < last ? from + here.count : last;
        const uint16_t *behind = to < last ? rows_from(product, to).first : next;
        int64_t step = 0;
        do {
            const int64_t left = whole - step, steps = left < most_steps ? left : most_steps;
            const uint16_t *weights = here.first + step * STEP;
            const Stretch stretch = {.product = product, .panels = panels, .first = step, .steps = steps,
                                     .rest = steps == left ? inputs % STEP : 0, .weights = weights, .rows = to - from,
                                     .next = steps < left ? weights + steps * STEP : behind,
                                     .sums = sums + (from - first) * batch * LANES};
            ISA(stretch)(&stretch, out + (from - first) * batch);
            step += steps;
        } while (step < whole);
    }
}

/* Outputs [first, last). next: the weights that will be read afterwards, or NULL. */
static TARGET void ISA(multiply_before)(const Product *product, int64_t first, int64_t last, const uint16_t *next,
                                        float *out) {
    const Panels panels = panels_of(product, COLUMNS);
    const int64_t few = MOST_SUMS / product->batch / SUMMED_ROWS * SUMMED_ROWS;
    for (int64_t from = first, to; from < last; from = to) {
        to = from + few < last ? from + few : last;
        ISA(multiply_few)(product, &panels, from, to, to < last ? rows_from(product, to).first : next,
                          out + (from - first) * product->batch);
    }
}

static TARGET void ISA(multiply)(const Product *product, int64_t first, int64_t last, float *out) {
    ISA(multiply_before)(product, first, last, NULL, out);
}

static TARGET void ISA(place)(const Product *product, int64_t row, int64_t first, int64_t last,
                              const uint16_t *values) {
    const Product rows = group_at(product, row / MOST_BATCH * MOST_BATCH);
    const Panel panel = panel_of(&rows, (int)(row % MOST_BATCH), COLUMNS);
    const int column = (int)(row % MOST_BATCH) - panel.column;
    char *steps = rows.x + panel.column * rows.steps * STEP_BYTES;
    for (int64_t k = first; k < last;) {
        char *step = steps + k / STEP * panel.columns * STEP_BYTES;
        const int whole = k % STEP == 0 && k + STEP <= last;
        if (whole)
            ISA(put_step)(step, panel.columns, column, values);
        else
            ISA(put)(step, panel.columns, column, (int)(k % STEP), *values);
        k += whole ? STEP : 1;
        values += whole ? STEP : 1;
    }
}

#if !defined(ROUND_TRANSPOSED)
#define ROUND_TRANSPOSED ISA(round_transposed)

/* to[column][row] = from[row][column], rounded. */
INLINE void ISA(round_transposed)(const float *from, int64_t rows, int64_t columns, uint16_t *to, int64_t gap) {
    uint16_t bits[MOST_OUTPUTS * MOST_BATCH];
    for (int64_t i = 0; i < rows * columns; i++) bits[i] = rounded(from[i]);
    for (int64_t column = 0; column < columns; column++)
        for (int64_t row = 0; row < rows; row++) to[column * gap + row] = bits[row * columns + column];
}
#endif

#if !defined(OWN_HIDDEN)
/* Puts numbers [first, last) of all rows where `down` looks for them: hidden[number - first][row of x]. */
INLINE void ISA(place_hidden)(const Product *down, const Panels *panels, int64_t first, int64_t last,
                              const float *hidden) {
    (void)panels;
    uint16_t rows[MOST_OUTPUTS * MOST_BATCH];
    ROUND_TRANSPOSED(hidden, last - first, down->batch, rows, last - first);
    for (int64_t m = 0; m < down->batch; m++) ISA(place)(down, m, first, last, rows + m * (last - first));
}
#endif

static TARGET void ISA(gated)(const Product *gate, const Product *up, const Product *down, int64_t first,
                              int64_t last) {
    float gates[MOST_OUTPUTS * MOST_BATCH] __attribute__((aligned(64)));
    float ups[MOST_OUTPUTS * MOST_BATCH] __attribute__((aligned(64)));
    for (int64_t row = 0; row < gate->batch; row += MOST_BATCH) {
        const Product gate_rows = group_at(gate, row), up_rows = group_at(up, row);
        const Product down_rows = group_at(down, row);
        const Panels panels = panels_of(&down_rows, COLUMNS);
        ISA(multiply_before)(&gate_rows, first, last, rows_from(up, first).first, gates);
        ISA(multiply_before)(&up_rows, first, last, NULL, ups);
        const int64_t count = (last - first) * gate_rows.batch;
        for (int64_t i = 0; i < count; i++) gates[i] = silu(gates[i]) * ups[i];
        ISA(place_hidden)(&down_rows, &panels, first, last, gates);
    }
}

static TARGET void ISA(write)(const Product *product, int64_t first, int64_t last, uint16_t *y, int64_t stride) {
    float out[MOST_OUTPUTS * MOST_BATCH] __attribute__((aligned(64)));
    for (int64_t row = 0; row < product->batch; row += MOST_BATCH) {
        const Product rows = group_at(product, row);
        ISA(multiply)(&rows, first, last, out);
        ROUND_TRANSPOSED(out, last - first, rows.batch, y + row * stride + first, stride);
    }
}

static const Multiplier ISA(multiplier) = {
    .step = STEP, .step_bytes = STEP_BYTES, .block = 1, .block_bytes = sizeof(uint16_t), .least = FEW_TILES,
    .place = ISA(place), .multiply = ISA(multiply), .write = ISA(write), .gated = ISA(gated)};

#undef INLINE
#undef UNROLL
#undef ISA
#undef TARGET
#undef LANES
#undef STEP
#undef STEP_BYTES
#undef COLUMNS
#undef ROUND_TRANSPOSED
#undef MOST_SUMS
#undef SUMMED_ROWS
