/* Products with matrices that are stored transposed, (inputs, outputs), in blocks of inputs: those of some families.
 *
 * An output is the sum over inputs in their order, in float32, rounded once. So bits depend on no other row, and not on how
 * the matrix is cut into blocks.
 */
#include "columns.h"

#include <string.h>

#include "numbers.h"
#include "product.h"

enum { LEAST_STRIP = 64 };

typedef struct {
    int64_t rows, inputs, outputs, stride;
    const uint16_t *x;
    const Matrix *matrix; /* its blocks have rows of inputs */
    const ColumnLoops *loops;
    uint16_t *y;
} Job;

/* An input of the matrix, by its block. */
typedef struct {
    const Rows *block;
    int64_t input, left; /* in the block; inputs to the end of the matrix */
} Place;

static const uint16_t zeros[STRIP];

/* The weights of the next inputs from output `first` on, and zeros behind the last one. */
static void find(Place *place, int64_t outputs, int64_t first, const uint16_t **weights) {
    for (int i = 0; i < INPUTS; i++) {
        if (!place->left) {
            weights[i] = zeros;
            continue;
        }
        while (place->input == place->block->count) place->block++, place->input = 0;
        weights[i] = (const uint16_t *)place->block->first + place->input++ * outputs + first;
        place->left--;
    }
}

/* Pairs of some inputs of each row, with a zero behind the last one. */
static void pair_up(const Job *job, const uint16_t *x, int64_t inputs, Tile *tile) {
    tile->pairs = (inputs + 1) / 2;
    for (int64_t row = 0; row < tile->rows; row++, x += job->stride)
        for (int64_t i = 0; i < inputs; i += 2) {
            const uint32_t odd = i + 1 < inputs ? x[i + 1] : 0;
            tile->x[i / 2 * tile->rows + row] = odd << 16 | x[i];
        }
}

/* Outputs [first, last) of `rows` rows, from row `row` on. */
static void multiply_rows(const Job *job, int64_t row, int64_t rows, int64_t first, int64_t last) {
    float sums[ROWS_AT_ONCE * STRIP] __attribute__((aligned(64)));
    Tile tile = {.rows = rows, .outputs = last - first, .sums = sums};
    Place place = {job->matrix->blocks, 0, job->inputs};
    memset(sums, 0, (size_t)(rows * STRIP) * sizeof *sums);
    find(&place, job->outputs, first, tile.next);
    for (int64_t input = 0; input < job->inputs; input += INPUTS) {
        const int64_t left = job->inputs - input;
        memcpy(tile.weights, tile.next, sizeof tile.weights);
        find(&place, job->outputs, first, tile.next);
        pair_up(job, job->x + row * job->stride + input, left < INPUTS ? left : INPUTS, &tile);
        job->loops->add(&tile);
    }
    for (int64_t r = 0; r < rows; r++) job->loops->write(&tile, r, job->y + (row + r) * job->outputs + first);
}

static void multiply_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    for (int64_t row = 0; row < job->rows; row += ROWS_AT_ONCE) {
        const int64_t left = job->rows - row;
        multiply_rows(job, row, left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE, first, last);
    }
}

/* ---------------------------------------------------------------- the inner loops */

ANY_WIDTH static void widen(int64_t count, const uint16_t *weights, float *numbers) {
    for (int64_t n = 0; n < count; n++) numbers[n] = widened(weights[n]);
}

ANY_WIDTH static void add_pair(int64_t count, uint32_t x, const float *first, const float *second, float *sums) {
    const float even = from_bits(x << 16), odd = from_bits(x & 0xffff0000u);
    for (int64_t n = 0; n < count; n++) sums[n] = (sums[n] + even * first[n]) + odd * second[n];
}

static void add_inputs(const Tile *tile) {
    float first[STRIP], second[STRIP];
    for (int64_t pair = 0; pair < tile->pairs; pair++) {
        for (int64_t n = 0; n < tile->outputs; n += VECTOR) {
            __builtin_prefetch(tile->next[2 * pair] + n, 0, 2);
            __builtin_prefetch(tile->next[2 * pair + 1] + n, 0, 2);
        }
        widen(tile->outputs, tile->weights[2 * pair], first);
        widen(tile->outputs, tile->weights[2 * pair + 1], second);
        for (int64_t row = 0; row < tile->rows; row++)
            add_pair(tile->outputs, tile->x[pair * tile->rows + row], first, second, tile->sums + row * STRIP);
    }
}

static void write_sums(const Tile *tile, int64_t row, uint16_t *y) {
    for (int64_t n = 0; n < tile->outputs; n++) y[n] = rounded(tile->sums[row * STRIP + n]);
}

static const ColumnLoops plain_loops = {add_inputs, write_sums};

#if defined(__x86_64__)
#include "columns_avx512.h"

static const ColumnLoops *loops_of(InstructionSet set) {
    return set == AVX512_BF16 || set == AMX_BF16 ? &pair_loops : &plain_loops;
}
#else
static const ColumnLoops *loops_of(InstructionSet set) { return (void)set, &plain_loops; }
#endif

/* y (rows, outputs) of x; rows of x are `stride` numbers apart. All numbers are bfloat16. Returns 0. */
API int moesched_columns(Team *team, int64_t rows, int64_t inputs, int64_t outputs, const uint16_t *x, int64_t stride,
                         const Matrix *matrix, uint16_t *y) {
    Job job = {rows, inputs, outputs, stride, x, matrix, loops_of(set_of(team)), y};
    Phase phases[] = {{multiply_part, outputs, LEAST_STRIP, STRIP, 0}};
    Task task = {&job, 1, phases};
    run(team, &task, inputs * outputs * (int64_t)sizeof(uint16_t));
    return 0;
}
