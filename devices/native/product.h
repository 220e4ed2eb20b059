/* Products with matrices that are given as row blocks: what all instruction sets share. */
#ifndef MOESCHED_PRODUCT_H
#define MOESCHED_PRODUCT_H

#include <stdint.h>

#include "team.h"

enum {
    MOST_BATCH = 128,        /* rows of x that are multiplied at once: a group */
    FEW_ROWS_OF_X = 16,
    WHOLE_TILES = 96,        /* a multiple of the rows of every tile, and of every step */
    MOST_OUTPUTS = 2 * WHOLE_TILES, /* outputs of one call */
    PLACED_AT_ONCE = 512,    /* inputs */
};

/* A row block of a matrix of bfloat16 numbers. */
typedef struct {
    const uint16_t *first;
    int64_t count;
} Rows;

/* x times the transpose of a matrix given as row blocks, top to bottom. x is stored as groups of MOST_BATCH rows, the
 * last one with what is left; a group as panels of a few rows, as equal as possible: panel after panel, in each panel
 * step after step, in each step row after row. */
typedef struct {
    int64_t batch, inputs, outputs;
    int64_t steps; /* of all inputs, the last one filled up with zeros */
    const Rows *blocks;
    char *x;
} Product;

/* The inner loops of an instruction set. */
typedef struct {
    int64_t step, step_bytes;
    /* Puts inputs [first, last) of a row of x, `gap` numbers apart at `values`, where `multiply` looks for them. */
    void (*place)(const Product *product, int64_t row, int64_t first, int64_t last, const uint16_t *values, int64_t gap);
    /* Puts a whole row of x there. */
    void (*place_row)(const Product *product, int64_t row, const uint16_t *values);
    /* Outputs [first, last) for all rows of one group: out[output - first][row of x], on a cache line, with room for
     * MOST_OUTPUTS. */
    void (*multiply)(const Product *product, int64_t first, int64_t last, float *out);
    /* Outputs [first, last) for all rows of x, as bfloat16: y (batch, outputs). */
    void (*write)(const Product *product, int64_t first, int64_t last, uint16_t *y);
    /* Numbers [first, last) of silu(gate x) * up x, rounded once and put where `down` looks for them. */
    void (*gated)(const Product *gate, const Product *up, const Product *down, int64_t first, int64_t last);
} Multiplier;

const Multiplier *multiplier_of(const Team *team);

/* Without memory for its x. */
Product product_of(const Multiplier *multiplier, int64_t batch, int64_t inputs, int64_t outputs, const Rows *blocks);

/* Bytes of a product's x, in whole cache lines. */
int64_t placed_bytes(const Multiplier *multiplier, const Product *product);

void give_memory(const Multiplier *multiplier, Product *product, char *memory);

/* Puts inputs [first, last) of all rows of x, which are `stride` numbers apart, where products look for them. Threads share
 * out inputs, not rows: those lie side by side in cache lines. */
void place_inputs(const Multiplier *multiplier, const Product *product, const uint16_t *x, int64_t stride, int64_t first,
                  int64_t last);

/* The group of rows that begins with `row`, as a product of its own. */
static inline Product group_at(const Product *product, int64_t row, int64_t step_bytes) {
    Product rows = *product;
    rows.batch = product->batch - row < MOST_BATCH ? product->batch - row : MOST_BATCH;
    rows.x = product->x + row * product->steps * step_bytes;
    return rows;
}

/* Outputs [first, last) for all rows of x, as bfloat16: y (batch, outputs). */
void write_rounded(const Multiplier *multiplier, const Product *product, int64_t first, int64_t last, uint16_t *y);

/* The least outputs that a thread takes at a time. The last ones decide how long it waits for the others; half as many are
 * as fast where rows of x are few. */
static inline int64_t least_outputs(int64_t batch) { return batch <= FEW_ROWS_OF_X ? WHOLE_TILES / 2 : WHOLE_TILES; }

#endif
