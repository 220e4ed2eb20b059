/* Products by float32 matrices, which routers are in some files: they are small. */
#include "numbers.h"
#include "product.h"

enum { LANES = 16 };

/* Where a row of x is put, widened. */
static float *row_of(const Product *product, int64_t row) { return (float *)product->x + row * product->inputs; }

static void place_float32(const Product *product, int64_t row, int64_t first, int64_t last, const uint16_t *values) {
    for (int64_t k = first; k < last; k++) row_of(product, row)[k] = widened(values[k - first]);
}

static const float *weights_of(const Product *product, int64_t output) {
    const Rows *block = product->blocks;
    for (; output >= block->count; block++) output -= block->count;
    return (const float *)block->first + output * product->inputs;
}

/* A sum in each lane, then a tree over the lanes: the same order for any width of vectors. */
ANY_WIDTH static float dot(int64_t count, const float *a, const float *b) {
    float sums[LANES] = {0};
    for (int64_t k = 0; k < count / LANES * LANES; k += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += a[k + lane] * b[k + lane];
    for (int64_t k = count / LANES * LANES; k < count; k++) sums[k % LANES] += a[k] * b[k];
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++) sums[lane] += sums[lane + width];
    return sums[0];
}

static void multiply_float32(const Product *product, int64_t first, int64_t last, float *out) {
    for (int64_t n = first; n < last; n++)
        for (int64_t row = 0; row < product->batch; row++)
            *out++ = dot(product->inputs, weights_of(product, n), row_of(product, row));
}

static void write_float32(const Product *product, int64_t first, int64_t last, uint16_t *y, int64_t stride) {
    float out[MOST_OUTPUTS * MOST_BATCH];
    for (int64_t from = 0; from < product->batch; from += MOST_BATCH) {
        const Product rows = group_at(product, from);
        multiply_float32(&rows, first, last, out);
        for (int64_t row = 0; row < rows.batch; row++)
            for (int64_t n = first; n < last; n++)
                y[(from + row) * stride + n] = rounded(out[(n - first) * rows.batch + row]);
    }
}

static const Multiplier multiplier = {
    .step = 1, .step_bytes = sizeof(float), .block = 1, .block_bytes = sizeof(float), .least = FEW_TILES,
    .place = place_float32, .multiply = multiply_float32, .write = write_float32};

const Multiplier *float32_multiplier(void) { return &multiplier; }
