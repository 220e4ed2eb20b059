/* Queries, keys and values of a layer: norm, projection and rotation, as one task. */
#include "norm.h"
#include "numbers.h"
#include "product.h"
#include "scratch.h"

enum { MOST_PROJECTIONS = 3 };

/* Rows of the projection that are stored in one format, such as those of queries and keys. */
typedef struct {
    const Matrix *matrix;
    int64_t outputs;
} Projection;

/* Numbers that Python prepares. Hidden states (tokens, hidden), queries (tokens, heads, head_dim), keys and values
 * (tokens, kv_heads, head_dim), all bfloat16; cosines and signed sines (tokens, turning), float32.
 * query_norm, key_norm: of `query_normed` and `key_normed` numbers each, one head or all; without a weight for none.
 * clip: 0 for none. turning: numbers of a head that are rotated, the first ones. interleaved: whether 2i and 2i + 1 of
 * them make a pair, instead of i and i + turning / 2. */
typedef struct {
    int64_t tokens, hidden, heads, kv_heads, head_dim, turning, interleaved;
    const uint16_t *x;
    Norm norm;
    int64_t projections;
    const Projection *weights; /* up to MOST_PROJECTIONS */
    Norm query_norm, key_norm;
    int64_t query_normed, key_normed;
    const float *bias; /* (queries, keys, values): of the projections; NULL for none */
    double clip;
    const float *cosines, *sines;
    uint16_t *queries, *keys, *values;
} Inputs;

typedef struct {
    const Inputs *inputs;
    Product products[MOST_PROJECTIONS];
    uint16_t *normed, *projected;
} Job;

static int64_t outputs_of(const Inputs *inputs) { return (inputs->heads + 2 * inputs->kv_heads) * inputs->head_dim; }

static void norm_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const int64_t hidden = job->inputs->hidden;
    for (int64_t t = first; t < last; t++)
        normalise(&job->inputs->norm, hidden, job->inputs->x + t * hidden, job->normed + t * hidden);
}

static void place_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    for (int64_t number = 0; number < job->inputs->projections; number++)
        place_inputs(&job->products[number], job->normed, job->inputs->hidden, first, last);
}

static void project_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    int64_t before = 0; /* of the projections before */
    for (int64_t number = 0; number < job->inputs->projections; before += job->products[number++].outputs) {
        const Product *product = &job->products[number];
        const int64_t from = first > before ? first - before : 0;
        const int64_t to = last - before < product->outputs ? last - before : product->outputs;
        if (from < to) product->multiplier->write(product, from, to, job->projected + before, outputs_of(job->inputs));
    }
}

static void normalise_heads(const Norm *norm, int64_t normed, int64_t count, uint16_t *x) {
    for (int64_t i = 0; norm->weight && i + normed <= count; i += normed) normalise(norm, normed, x + i, x + i);
}

ANY_WIDTH static void add_bias(const float *bias, int64_t count, uint16_t *x) {
    for (int64_t i = 0; i < count; i++) x[i] = rounded(widened(x[i]) + bias[i]);
}

static void clip(double most, int64_t count, uint16_t *x) {
    const float limit = (float)most;
    for (int64_t i = 0; i < count; i++) {
        const float value = widened(x[i]);
        x[i] = rounded(value > limit ? limit : value < -limit ? -limit : value);
    }
}

/* Pairs are written as numbers i and i + turning / 2 of a head; the numbers behind them stay. */
ANY_WIDTH static void rotate(const Inputs *inputs, int64_t token, int64_t heads, const uint16_t *x, uint16_t *y) {
    const int64_t size = inputs->head_dim, turning = inputs->turning, half = turning / 2;
    const int64_t step = inputs->interleaved ? 2 : 1, apart = inputs->interleaved ? 1 : half;
    const float *cosines = inputs->cosines + token * turning, *sines = inputs->sines + token * turning;
    for (int64_t head = 0; head < heads; head++, x += size, y += size) {
        for (int64_t i = 0; i < half; i++) {
            const float low = widened(x[i * step]), high = widened(x[i * step + apart]);
            y[i] = rounded(low * cosines[i] + high * sines[i]);
            y[i + half] = rounded(high * cosines[i + half] + low * sines[i + half]);
        }
        memcpy(y + turning, x + turning, (size_t)(size - turning) * sizeof *y);
    }
}

static void finish_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Inputs *inputs = job->inputs;
    const int64_t queries = inputs->heads * inputs->head_dim, keys = inputs->kv_heads * inputs->head_dim;
    for (int64_t t = first; t < last; t++) {
        uint16_t *row = job->projected + t * (queries + 2 * keys);
        if (inputs->bias) add_bias(inputs->bias, queries + 2 * keys, row);
        normalise_heads(&inputs->query_norm, inputs->query_normed, queries, row);
        normalise_heads(&inputs->key_norm, inputs->key_normed, keys, row + queries);
        if (inputs->clip > 0) clip(inputs->clip, queries + 2 * keys, row);
        rotate(inputs, t, inputs->heads, row, inputs->queries + t * queries);
        rotate(inputs, t, inputs->kv_heads, row + queries, inputs->keys + t * keys);
        memcpy(inputs->values + t * keys, row + queries + keys, (size_t)keys * sizeof *row);
    }
}

/* Returns 0, or -1 without memory. */
API int moesched_attention_inputs(Team *team, const Inputs *inputs) {
    const int64_t tokens = inputs->tokens, outputs = outputs_of(inputs);
    int64_t placed = 0, weights = 0, least = 0;
    Job job = {.inputs = inputs};
    for (int64_t number = 0; number < inputs->projections; number++) {
        const Projection *rows = inputs->weights + number;
        job.products[number] = product_of(team, tokens, inputs->hidden, rows->outputs, rows->matrix);
        placed += placed_bytes(&job.products[number]);
        weights += matrix_bytes(&job.products[number]);
        if (least_outputs(&job.products[number]) > least) least = least_outputs(&job.products[number]);
    }
    char *memory = scratch(placed + tokens * (inputs->hidden + outputs) * (int64_t)sizeof(uint16_t));
    if (!memory) return -1;
    for (int64_t number = 0; number < inputs->projections; memory += placed_bytes(&job.products[number++]))
        give_memory(&job.products[number], memory);
    job.normed = (uint16_t *)memory;
    job.projected = job.normed + tokens * inputs->hidden;
    Phase phases[] = {{norm_part, tokens, 1, 1, 0},
                      {place_part, inputs->hidden, PLACED_AT_ONCE, inputs->hidden, 0},
                      {project_part, outputs, least, MOST_OUTPUTS, 0},
                      {finish_part, tokens, 1, 1, 0}};
    Task task = {&job, 4, phases};
    run(team, &task, weights);
    return 0;
}
