/* Products with matrices that are stored transposed, (inputs, outputs), in blocks of inputs: those of some families.
 *
 * An output is the sum over inputs in their order, in float32, rounded once. So bits depend on no other row, and not on how
 * the matrix is cut into blocks.
 */
#include "column_product.h"

#include <string.h>

#include "numbers.h"

/* Tiles of few rows are long and flat: with a thread's whole share of outputs, memory is read in long runs. Those of many
 * rows stay in the cache while panel after panel of rows is multiplied. */
enum { LEAST_STRIP = 64, STRIP = SUMS / ROWS_AT_ONCE, WIDENED = 512 };

/* An input of the matrix, by its block. */
typedef struct {
    const Rows *block;
    int64_t input, left; /* in the block; inputs to the end of the matrix */
} Place;

static const uint16_t zeros[SUMS];

/* The weights of the next inputs from output `first` on, and zeros behind the last one. */
static void find(Place *place, int64_t outputs, int64_t first, const uint16_t **weights) {
    for (int64_t i = 0; i < INPUTS; i++) {
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
static void pair_up(const ColumnProduct *product, const uint16_t *x, int64_t inputs, Tile *tile) {
    tile->pairs = (inputs + 1) / 2;
    for (int64_t row = 0; row < tile->rows; row++, x += product->stride)
        for (int64_t i = 0; i < inputs; i += 2) {
            const uint32_t odd = i + 1 < inputs ? x[i + 1] : 0;
            tile->x[i / 2 * tile->rows + row] = odd << 16 | x[i];
        }
}

/* Outputs [first, last) of the rows of x from row `row` on: a strip. */
static void write_strip(const ColumnProduct *product, int64_t row, int64_t first, int64_t last, Tile *tile) {
    Place place = {product->matrix->blocks, 0, product->inputs};
    tile->outputs = last - first;
    memset(tile->sums, 0, (size_t)(tile->rows * tile->strip) * sizeof *tile->sums);
    find(&place, product->outputs, first, tile->weights + INPUTS);
    for (int64_t input = 0; input < product->inputs; input += INPUTS) {
        const int64_t left = product->inputs - input;
        memcpy(tile->weights, tile->weights + INPUTS, INPUTS * sizeof *tile->weights);
        find(&place, product->outputs, first, tile->weights + INPUTS);
        pair_up(product, product->x + row * product->stride + input, left < INPUTS ? left : INPUTS, tile);
        product->loops->add(tile);
    }
    for (int64_t r = 0; r < tile->rows; r++)
        product->loops->write(tile, r, product->y + (row + r) * product->outputs + first);
}

void write_columns(const ColumnProduct *product, int64_t first, int64_t last) {
    float sums[SUMS] __attribute__((aligned(64)));
    Tile tile = {.sums = sums};
    for (int64_t row = 0; row < product->rows; row += tile.rows) {
        const int64_t left = product->rows - row;
        tile.rows = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
        tile.strip = tile.rows > FEW_ROWS ? STRIP : SUMS / tile.rows / VECTOR * VECTOR;
        for (int64_t output = first; output < last; output += tile.strip)
            write_strip(product, row, output, output + tile.strip < last ? output + tile.strip : last, &tile);
    }
}

int64_t least_columns(const Team *team, const ColumnProduct *product) {
    const int64_t lines = (product->outputs + VECTOR - 1) / VECTOR, threads = threads_of(team);
    return product->rows > FEW_ROWS ? LEAST_STRIP : (lines + threads - 1) / threads * VECTOR;
}

int64_t most_columns(const Team *team, const ColumnProduct *product) {
    return product->rows > FEW_ROWS ? STRIP : least_columns(team, product);
}

/* ---------------------------------------------------------------- the inner loops */

ANY_WIDTH static void widen(int64_t count, const uint16_t *weights, float *numbers) {
    for (int64_t n = 0; n < count; n++) numbers[n] = widened(weights[n]);
}

ANY_WIDTH static void add_pair(int64_t count, uint32_t x, const float *first, const float *second, float *sums) {
    const float even = from_bits(x << 16), odd = from_bits(x & 0xffff0000u);
    for (int64_t n = 0; n < count; n++) sums[n] = (sums[n] + even * first[n]) + odd * second[n];
}

/* Adds the products of a pair of inputs and WIDENED outputs, or what is left of them, from `output` on. */
static void add_widened(const Tile *tile, int64_t pair, int64_t output) {
    float first[WIDENED], second[WIDENED];
    const int64_t left = tile->outputs - output, count = left < WIDENED ? left : WIDENED;
    const uint16_t *const *ahead = tile->weights + 2 * pair + (tile->rows > FEW_ROWS ? INPUTS : INPUTS_AHEAD);
    for (int64_t n = output; n < output + count; n += VECTOR) {
        __builtin_prefetch(ahead[0] + n, 0, 2);
        __builtin_prefetch(ahead[1] + n, 0, 2);
    }
    widen(count, tile->weights[2 * pair] + output, first);
    widen(count, tile->weights[2 * pair + 1] + output, second);
    for (int64_t row = 0; row < tile->rows; row++)
        add_pair(count, tile->x[pair * tile->rows + row], first, second, tile->sums + row * tile->strip + output);
}

static void add_inputs(const Tile *tile) {
    for (int64_t pair = 0; pair < tile->pairs; pair++)
        for (int64_t output = 0; output < tile->outputs; output += WIDENED) add_widened(tile, pair, output);
}

static void write_sums(const Tile *tile, int64_t row, uint16_t *y) {
    for (int64_t n = 0; n < tile->outputs; n++) y[n] = rounded(tile->sums[row * tile->strip + n]);
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

ColumnProduct column_product_of(const Team *team, int64_t rows, int64_t inputs, int64_t outputs, const Matrix *matrix) {
    return (ColumnProduct){.rows = rows,
                           .inputs = inputs,
                           .outputs = outputs,
                           .stride = inputs,
                           .matrix = matrix,
                           .loops = loops_of(set_of(team))};
}

static void write_part(void *product, int64_t first, int64_t last) { write_columns(product, first, last); }

/* y (rows, outputs) of x; rows of x are `stride` numbers apart. All numbers are bfloat16. Returns 0. */
API int moesched_columns(Team *team, int64_t rows, int64_t inputs, int64_t outputs, const uint16_t *x, int64_t stride,
                         const Matrix *matrix, uint16_t *y) {
    ColumnProduct product = column_product_of(team, rows, inputs, outputs, matrix);
    product.x = x, product.stride = stride, product.y = y;
    Phase phases[] = {{write_part, outputs, least_columns(team, &product), most_columns(team, &product), 0}};
    Task task = {&product, 1, phases};
    run(team, &task, inputs * outputs * (int64_t)sizeof(uint16_t));
    return 0;
}
