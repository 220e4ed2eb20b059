/* Products with matrices that are stored transposed, (inputs, outputs), in blocks of inputs: those of some families.
 *
 * An output is the sum over inputs in their order, in float32, rounded once. So bits depend on no other row, and not on how
 * the matrix is cut into blocks.
 */
#include <string.h>

#include "numbers.h"
#include "product.h"

enum {
    STRIP = 256,        /* outputs whose sums are kept at once, and what a thread takes at a time */
    LEAST_STRIP = 64,
    SUMS = 4096,        /* of all rows of a strip: stay in the first-level cache */
    INPUTS = 4,         /* that are added at once */
    AHEAD = 16,         /* inputs between those that are multiplied and those that are fetched */
    LINE = 32,          /* numbers of a cache line */
};

typedef struct {
    int64_t rows, inputs, outputs, stride;
    const uint16_t *x;
    const Matrix *matrix; /* its blocks have rows of inputs */
    uint16_t *y;
} Job;

ANY_WIDTH static void widen(int64_t count, const uint16_t *weights, float *numbers) {
    for (int64_t n = 0; n < count; n++) numbers[n] = widened(weights[n]);
}

/* Adds the products of INPUTS inputs of a row, in their order. */
ANY_WIDTH static void add_all(int64_t count, const float *x, const float weights[INPUTS][STRIP], float *sums) {
    for (int64_t n = 0; n < count; n++) {
        float sum = sums[n];
        for (int i = 0; i < INPUTS; i++) sum += x[i] * weights[i][n];
        sums[n] = sum;
    }
}

ANY_WIDTH static void add_one(int64_t count, float x, const float *weights, float *sums) {
    for (int64_t n = 0; n < count; n++) sums[n] += x * weights[n];
}

static void fetch(const uint16_t *weights, int64_t inputs, int64_t outputs, int64_t count) {
    for (int64_t i = 0; i < inputs; i++)
        for (int64_t n = 0; n < count; n += LINE) __builtin_prefetch(weights + i * outputs + n, 0, 3);
}

/* Outputs [first, last) of `rows` rows, from row `row` on. */
static void multiply_rows(const Job *job, int64_t row, int64_t rows, int64_t first, int64_t last) {
    float sums[SUMS], numbers[INPUTS][STRIP], x[INPUTS];
    const int64_t count = last - first, outputs = job->outputs;
    memset(sums, 0, (size_t)(rows * count) * sizeof *sums);
    const Rows *block = job->matrix->blocks;
    for (int64_t before = 0; before < job->inputs; before += block++->count) {
        const uint16_t *weights = (const uint16_t *)block->first + first;
        for (int64_t i = 0; i < block->count; i += INPUTS, weights += INPUTS * outputs) {
            const int64_t left = block->count - i, inputs = left < INPUTS ? left : INPUTS;
            if (left >= AHEAD + INPUTS && !row) fetch(weights + AHEAD * outputs, INPUTS, outputs, count);
            for (int64_t k = 0; k < inputs; k++) widen(count, weights + k * outputs, numbers[k]);
            for (int64_t r = 0; r < rows; r++) {
                const uint16_t *values = job->x + (row + r) * job->stride + before + i;
                for (int64_t k = 0; k < inputs; k++) x[k] = widened(values[k]);
                if (inputs == INPUTS) add_all(count, x, numbers, sums + r * count);
                else
                    for (int64_t k = 0; k < inputs; k++) add_one(count, x[k], numbers[k], sums + r * count);
            }
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t n = 0; n < count; n++) job->y[(row + r) * outputs + first + n] = rounded(sums[r * count + n]);
}

static void multiply_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const int64_t most = SUMS / (last - first);
    for (int64_t row = 0; row < job->rows; row += most)
        multiply_rows(job, row, job->rows - row < most ? job->rows - row : most, first, last);
}

/* y (rows, outputs) of x; rows of x are `stride` numbers apart. All numbers are bfloat16. Returns 0. */
API int moesched_columns(Team *team, int64_t rows, int64_t inputs, int64_t outputs, const uint16_t *x, int64_t stride,
                         const Matrix *matrix, uint16_t *y) {
    Job job = {rows, inputs, outputs, stride, x, matrix, y};
    Phase phases[] = {{multiply_part, outputs, LEAST_STRIP, STRIP, 0}};
    Task task = {&job, 1, phases};
    run(team, &task, inputs * outputs * (int64_t)sizeof(uint16_t));
    return 0;
}
