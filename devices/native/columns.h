/* Products with matrices that are stored transposed: what all instruction sets share. */
#ifndef MOESCHED_COLUMNS_H
#define MOESCHED_COLUMNS_H

#include <stdint.h>

enum {
    ROWS_AT_ONCE = 16, /* of x */
    FEW_ROWS = 4,      /* of x: weights are read once, so what counts is that they are read in the order of memory */
    SUMS = 8192,       /* that are kept at once */
    INPUTS = 64,       /* most of a tile, even */
    INPUTS_AHEAD = 16, /* from the weights that few rows are multiplied by to those that are fetched meanwhile */
    VECTOR = 32,       /* outputs that are summed together: a cache line of weights */
};

/* Some inputs of a strip of outputs. Two inputs that follow each other are a pair, the first one at an even place of the
 * whole matrix. */
typedef struct {
    int64_t rows, outputs, pairs;
    int64_t strip; /* outputs of each row that `sums` has room for */
    const uint16_t *weights[2 * INPUTS]; /* of each input of this tile, then of the one that follows */
    uint32_t x[INPUTS / 2 * ROWS_AT_ONCE];          /* pair after pair, in each row after row */
    float *sums;                                    /* row after row, on cache lines, in an order of their own */
} Tile;

/* The inner loops of an instruction set. */
typedef struct {
    void (*add)(const Tile *tile);                                    /* the tile's products to the sums */
    void (*write)(const Tile *tile, int64_t row, uint16_t *y);        /* a row's sums, rounded */
} ColumnLoops;

#endif
