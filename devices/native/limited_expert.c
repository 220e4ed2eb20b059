/* One expert with a limited activation, as those of gpt-oss: with biases or without, gate and up apart or one matrix, in which
 * gate's rows are the even ones.
 *
 * Roundings to bfloat16 are where torch has them: after each product, each bias, and before `down`.
 */
#include <stddef.h>

#include "column_product.h"
#include "numbers.h"
#include "scratch.h"

/* Arguments: x and y (rows, hidden); the matrices gate and up (width, hidden) and down (hidden, width), all by rows or all
 * transposed. Without up, gate is both: (2 width, hidden). Biases may be NULL. */
typedef struct {
    int64_t rows, hidden, width, stride, transposed;
    double limit, alpha;
    const uint16_t *x;
    const Matrix *gate, *up, *down;
    const uint16_t *gate_bias, *up_bias, *down_bias;
    uint16_t *y;
} LimitedExpert;

/* A product by one of the matrices, in the way in which it is stored, and its bias. */
typedef struct {
    int64_t transposed, outputs;
    Product by_rows;
    ColumnProduct by_columns;
    const uint16_t *bias;
    uint16_t *y; /* (rows, outputs) */
} Factor;

typedef struct {
    const LimitedExpert *expert;
    Factor gate, up, down;
    uint16_t *numbers; /* that `down` multiplies: (rows, width) */
} Job;

static Factor factor_of(const Team *team, const LimitedExpert *expert, int64_t inputs, int64_t outputs, const Matrix *matrix,
                        const uint16_t *bias) {
    Factor factor = {.transposed = expert->transposed, .outputs = outputs, .bias = bias};
    if (expert->transposed)
        factor.by_columns = column_product_of(team, expert->rows, inputs, outputs, matrix);
    else
        factor.by_rows = product_of(team, expert->rows, inputs, outputs, matrix);
    return factor;
}

static Job job_of(const Team *team, const LimitedExpert *expert) {
    const int64_t hidden = expert->hidden, width = expert->width, gates = expert->up ? width : 2 * width;
    Job job = {.expert = expert,
               .gate = factor_of(team, expert, hidden, gates, expert->gate, expert->gate_bias),
               .down = factor_of(team, expert, width, hidden, expert->down, expert->down_bias)};
    if (expert->up) job.up = factor_of(team, expert, hidden, width, expert->up, expert->up_bias);
    return job;
}

/* Bytes of the x of a product, in the order in which it is multiplied; none of no product. */
static int64_t placed(const Factor *factor) {
    return factor->transposed || !factor->outputs ? 0 : placed_bytes(&factor->by_rows);
}

static int64_t bytes_of(const Factor *factor) {
    const int64_t columns = factor->by_columns.inputs * factor->outputs * (int64_t)sizeof(uint16_t);
    return factor->transposed ? columns : matrix_bytes(&factor->by_rows);
}

static int64_t least_of(const Team *team, const Factor *factor) {
    if (!factor->outputs) return 0;
    return factor->transposed ? least_columns(team, &factor->by_columns) : least_outputs(&factor->by_rows);
}

static int64_t most_of(const Team *team, const Factor *factor) {
    return factor->transposed ? most_columns(team, &factor->by_columns) : MOST_OUTPUTS;
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

ANY_WIDTH static void add_bias(int64_t count, const uint16_t *bias, uint16_t *values) {
    for (int64_t i = 0; i < count; i++) values[i] = rounded(widened(values[i]) + widened(bias[i]));
}

/* Outputs [first, last) of all rows, with their bias. */
static void write_outputs(const Factor *factor, int64_t rows, int64_t first, int64_t last) {
    if (factor->transposed)
        write_columns(&factor->by_columns, first, last);
    else
        write_rounded(&factor->by_rows, first, last, factor->y);
    for (int64_t row = 0; factor->bias && row < rows; row++)
        add_bias(last - first, factor->bias + first, factor->y + row * factor->outputs + first);
}

/* gate * sigmoid(alpha gate) * (up + 1), both limited. A number that is none stays none. */
static inline uint16_t activated(float gate, float up, float limit, float alpha) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    return rounded(gate * (1.0f / (1.0f + exponential(-alpha * gate))) * (up + 1.0f));
}

ANY_WIDTH static void activate(int64_t count, float limit, float alpha, const uint16_t *gates, const uint16_t *ups,
                               uint16_t *numbers) {
    for (int64_t i = 0; i < count; i++) numbers[i] = activated(widened(gates[i]), widened(ups[i]), limit, alpha);
}

ANY_WIDTH static void activate_pairs(int64_t count, float limit, float alpha, const uint16_t *pairs, uint16_t *numbers) {
    for (int64_t i = 0; i < count; i++)
        numbers[i] = activated(widened(pairs[2 * i]), widened(pairs[2 * i + 1]), limit, alpha);
}

static void place_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const LimitedExpert *expert = job->expert;
    place_inputs(&job->gate.by_rows, expert->x, expert->stride, first, last);
    if (expert->up) place_inputs(&job->up.by_rows, expert->x, expert->stride, first, last);
}

/* Numbers [first, last) that `down` multiplies. */
static void gate_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const LimitedExpert *expert = job->expert;
    const int64_t rows = expert->rows, width = expert->width, count = last - first;
    const float limit = (float)expert->limit, alpha = (float)expert->alpha;
    if (expert->up) {
        write_outputs(&job->gate, rows, first, last);
        write_outputs(&job->up, rows, first, last);
    } else {
        write_outputs(&job->gate, rows, 2 * first, 2 * last);
    }
    for (int64_t row = 0; row < rows; row++) {
        const int64_t at = row * width + first;
        if (expert->up)
            activate(count, limit, alpha, job->gate.y + at, job->up.y + at, job->numbers + at);
        else
            activate_pairs(count, limit, alpha, job->gate.y + 2 * at, job->numbers + at);
        if (!expert->transposed) place(&job->down.by_rows, row, first, last, job->numbers + at);
    }
}

static void project_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    write_outputs(&job->down, job->expert->rows, first, last);
}

static void give_x(Factor *factor, char **memory) {
    if (placed(factor)) give_memory(&factor->by_rows, *memory);
    *memory += placed(factor);
}

static void give_y(Factor *factor, const uint16_t *x, int64_t stride, uint16_t *y) {
    factor->y = factor->by_columns.y = y;
    factor->by_columns.x = x, factor->by_columns.stride = stride;
}

/* Gives the products their inputs and outputs. */
static void connect(Job *job, char *memory) {
    const LimitedExpert *expert = job->expert;
    const int64_t numbers = expert->rows * expert->width;
    give_x(&job->gate, &memory);
    give_x(&job->up, &memory);
    give_x(&job->down, &memory);
    uint16_t *gates = (uint16_t *)memory, *ups = gates + numbers;
    job->numbers = ups + numbers;
    give_y(&job->gate, expert->x, expert->stride, gates);
    give_y(&job->up, expert->x, expert->stride, ups);
    give_y(&job->down, job->numbers, expert->width, expert->y);
}

/* Runs the expert. Returns 0, or -1 without memory. */
API int moesched_limited_expert(Team *team, const LimitedExpert *expert) {
    const int64_t hidden = expert->hidden, width = expert->width, transposed = expert->transposed;
    Job job = job_of(team, expert);
    const int64_t between = 3 * expert->rows * width * (int64_t)sizeof(uint16_t);
    char *memory = scratch(placed(&job.gate) + placed(&job.up) + placed(&job.down) + between);
    if (!memory) return -1;
    connect(&job, memory);
    const int64_t numbers_at_once = expert->up ? 1 : 2, outputs = least_of(team, &job.down);
    int64_t least = larger(least_of(team, &job.gate) / (transposed ? numbers_at_once : 1), least_of(team, &job.up));
    if (!transposed) least = larger(least, outputs); /* whole steps of down's inputs */
    Phase phases[] = {{place_part, hidden, PLACED_AT_ONCE, hidden, 0},
                      {gate_part, width, least, most_of(team, &job.gate) / numbers_at_once, 0},
                      {project_part, hidden, outputs, most_of(team, &job.down), 0}};
    Task task = {&job, transposed ? 2 : 3, phases + (transposed ? 1 : 0)};
    run(team, &task, bytes_of(&job.gate) + bytes_of(&job.up) + bytes_of(&job.down));
    return 0;
}
