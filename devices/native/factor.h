/* Products by a matrix in the way in which it is stored, by rows or transposed, with or without a bias. */
#ifndef MOESCHED_FACTOR_H
#define MOESCHED_FACTOR_H

#include "column_product.h"
#include "product.h"

/* A matrix that multiplies some rows of x. Without outputs it is none. */
typedef struct {
    int64_t transposed, rows, outputs;
    Product by_rows;
    ColumnProduct by_columns;
    const uint16_t *bias; /* NULL for none */
} Factor;

/* Items that a thread takes at a time. */
typedef struct {
    int64_t least, most;
} Grain;

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

Factor factor_of(const Team *team, int64_t transposed, int64_t rows, int64_t inputs, int64_t outputs, const Matrix *matrix,
                 const uint16_t *bias);

/* Bytes of a copy of x, in the order in which it is multiplied; 0 if x is read as it is. */
int64_t copied_bytes(const Factor *factor);

/* Bytes of the matrix. */
int64_t factor_bytes(const Factor *factor);

/* Outputs that a thread takes at a time. */
Grain factor_grain(const Team *team, const Factor *factor);

/* Outputs [first, last) of all rows, with their bias, rounded after each: y (rows, outputs). x (rows, inputs) is read only
 * where there is no copy of it. */
void write_factor(const Factor *factor, const uint16_t *x, int64_t first, int64_t last, uint16_t *y);

#endif
