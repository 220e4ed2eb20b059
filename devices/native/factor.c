/* Products by a matrix in the way in which it is stored, by rows or transposed, with or without a bias. */
#include "factor.h"

#include "numbers.h"

Factor factor_of(const Team *team, int64_t transposed, int64_t rows, int64_t inputs, int64_t outputs, const Matrix *matrix,
                 const uint16_t *bias) {
    Factor factor = {.transposed = transposed, .rows = rows, .outputs = outputs, .bias = bias};
    if (transposed)
        factor.by_columns = column_product_of(team, rows, inputs, outputs, matrix);
    else
        factor.by_rows = product_of(team, rows, inputs, outputs, matrix);
    return factor;
}

int64_t copied_bytes(const Factor *factor) {
    return factor->transposed || !factor->outputs ? 0 : placed_bytes(&factor->by_rows);
}

int64_t factor_bytes(const Factor *factor) {
    const int64_t columns = factor->by_columns.inputs * factor->outputs * (int64_t)sizeof(uint16_t);
    return factor->transposed ? columns : matrix_bytes(&factor->by_rows);
}

Grain factor_grain(const Team *team, const Factor *factor) {
    if (!factor->outputs) return (Grain){0, MOST_OUTPUTS};
    if (!factor->transposed) return (Grain){least_outputs(&factor->by_rows), MOST_OUTPUTS};
    return (Grain){least_columns(team, &factor->by_columns), most_columns(team, &factor->by_columns)};
}

ANY_WIDTH static void add_bias(int64_t count, const uint16_t *bias, uint16_t *values) {
    for (int64_t i = 0; i < count; i++) values[i] = rounded(widened(values[i]) + widened(bias[i]));
}

void write_factor(const Factor *factor, const uint16_t *x, int64_t first, int64_t last, uint16_t *y) {
    if (factor->transposed) {
        ColumnProduct product = factor->by_columns;
        product.x = x, product.y = y;
        write_columns(&product, first, last);
    } else {
        write_rounded(&factor->by_rows, first, last, y);
    }
    for (int64_t row = 0; factor->bias && row < factor->rows; row++)
        add_bias(last - first, factor->bias + first, y + row * factor->outputs + first);
}
