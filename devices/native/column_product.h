/* Products with matrices that are stored transposed, (inputs, outputs). */
#ifndef MOESCHED_COLUMN_PRODUCT_H
#define MOESCHED_COLUMN_PRODUCT_H

#include "columns.h"
#include "product.h"

/* x (rows, inputs) by a matrix whose blocks have rows of inputs: y (rows, outputs). Rows of x are `stride` numbers apart. All
 * numbers are bfloat16. */
typedef struct {
    int64_t rows, inputs, outputs, stride;
    const uint16_t *x;
    const Matrix *matrix;
    const ColumnLoops *loops;
    uint16_t *y;
} ColumnProduct;

/* Without x and y. */
ColumnProduct column_product_of(const Team *team, int64_t rows, int64_t inputs, int64_t outputs, const Matrix *matrix);

/* Outputs that a thread takes at a time: all that fall to it where rows of x are few, so that memory is read in long runs. */
int64_t least_columns(const Team *team, const ColumnProduct *product);
int64_t most_columns(const Team *team, const ColumnProduct *product);

/* Outputs [first, last) for all rows of x. */
void write_columns(const ColumnProduct *product, int64_t first, int64_t last);

#endif
