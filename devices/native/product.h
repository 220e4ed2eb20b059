/* Products with matrices that are given as row blocks: what all instruction sets share. */
#ifndef MOESCHED_PRODUCT_H
#define MOESCHED_PRODUCT_H

#include <stdint.h>

#include "team.h"

enum {
    MOST_BATCH = 128,        /* rows of x that are multiplied at once: a group */
    FEW_ROWS_OF_X = 16,
    WHOLE_TILES = 96,        /* a multiple of the rows of every tile, and of every step */
    FEW_TILES = WHOLE_TILES / 2,
    MOST_OUTPUTS = 2 * WHOLE_TILES, /* outputs of one call */
    PLACED_AT_ONCE = 512,    /* inputs */
};

/* Storage formats of matrices, in the order of `moesched_formats`. */
typedef enum { BFLOAT16, FLOAT32, Q8_0, Q4_0, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, MXFP4, FORMATS } Format;

/* A row block of a matrix. */
typedef struct {
    const void *first;
    int64_t count;
} Rows;

/* A matrix as row blocks, top to bottom. */
typedef struct {
    int64_t format;
    Rows blocks[];
} Matrix;

typedef struct Multiplier Multiplier;

/* x times the transpose of a matrix. x is stored as groups of MOST_BATCH rows, the last one with what is left. A group for
 * a plain matrix is panels of a few rows, as equal as possible: panel after panel, in each panel step after step, in each
 * step row after row. */
typedef struct {
    const Multiplier *multiplier;
    int64_t batch, inputs, outputs;
    int64_t steps; /* of all inputs, the last one filled up with zeros */
    int64_t row_bytes; /* of the matrix */
    const Rows *blocks;
    char *x;
} Product;

/* The inner loops of an instruction set for a format. */
struct Multiplier {
    int64_t step, step_bytes;   /* inputs of a step, and its bytes for a row of x */
    int is_coded;
    int64_t block, block_bytes; /* the least number of weights that rows are made of, and its bytes */
    int64_t least;              /* outputs that a thread takes at a time where rows of x are few: whole steps of a coded
                                 * matrix that they are inputs of */
    /* Puts inputs [first, last) of a row of x where `multiply` looks for them: whole steps of a coded matrix. */
    void (*place)(const Product *product, int64_t row, int64_t first, int64_t last, const uint16_t *values);
    /* Outputs [first, last) for all rows of one group: out[output - first][row of x], on a cache line, with room for
     * MOST_OUTPUTS. */
    void (*multiply)(const Product *product, int64_t first, int64_t last, float *out);
    /* Outputs [first, last) for all rows of x, as bfloat16: output n of row m at y[m * stride + n]. */
    void (*write)(const Product *product, int64_t first, int64_t last, uint16_t *y, int64_t stride);
    /* Numbers [first, last) of silu(gate x) * up x, rounded once and put where `down` looks for them, or NULL. Gate and up
     * have multipliers with this function, and so has down where they are plain. */
    void (*gated)(const Product *gate, const Product *up, const Product *down, int64_t first, int64_t last);
};

/* The multipliers for matrices in bfloat16, in float32, and coded ones. */
const Multiplier *plain_multiplier(InstructionSet set);
const Multiplier *float32_multiplier(void);
const Multiplier *coded_multiplier(InstructionSet set, Format format);

/* Weights of a row of coded ones, rounded: y (inputs). */
void decode_row(Format format, const void *rows, int64_t row, int64_t inputs, uint16_t *y);

/* Without memory for its x. Without a matrix, it only counts bytes. */
Product product_of(const Team *team, int64_t batch, int64_t inputs, int64_t outputs, const Matrix *matrix);

/* Bytes of a product's x, in whole cache lines. */
int64_t placed_bytes(const Product *product);

void give_memory(Product *product, char *memory);

static inline int64_t matrix_bytes(const Product *product) { return product->outputs * product->row_bytes; }

static inline void place(const Product *product, int64_t row, int64_t first, int64_t last, const uint16_t *values) {
    product->multiplier->place(product, row, first, last, values);
}

/* Puts inputs [first, last) of all rows of x, which are `stride` numbers apart, where products look for them. Threads share
 * out inputs, not rows: those lie side by side in cache lines. */
void place_inputs(const Product *product, const uint16_t *x, int64_t stride, int64_t first, int64_t last);

/* The group of rows that begins with `row`, as a product of its own. */
static inline Product group_at(const Product *product, int64_t row) {
    Product rows = *product;
    rows.batch = product->batch - row < MOST_BATCH ? product->batch - row : MOST_BATCH;
    rows.x = product->x + row * product->steps * product->multiplier->step_bytes;
    return rows;
}

/* Outputs [first, last) for all rows of x, as bfloat16: y (batch, outputs). */
static inline void write_rounded(const Product *product, int64_t first, int64_t last, uint16_t *y) {
    product->multiplier->write(product, first, last, y, product->outputs);
}

/* The least outputs that a thread takes at a time. The last ones decide how long it waits for the others; fewer are as fast
 * where rows of x are few. */
static inline int64_t least_outputs(const Product *product) {
    return product->batch <= FEW_ROWS_OF_X ? product->multiplier->least : WHOLE_TILES;
}

#endif
