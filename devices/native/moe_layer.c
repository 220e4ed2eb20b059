/* The second half of a layer: output projection, norm, router, experts and their weighted sum, as one task or in two. */
#include <math.h>
#include <stddef.h>

#include "experts.h"
#include "norm.h"
#include "numbers.h"
#include "scratch.h"

/* Numbers that Python prepares. All tensors are bfloat16, except logits and weights, which are float32. */
typedef struct {
    int64_t tokens, hidden, attended_width, experts, top_k, width;
    int64_t sum_to_one; /* the weights of a token's experts */
    const uint16_t *attended; /* (tokens, attended_width) */
    const uint16_t *residual; /* (tokens, hidden) */
    const Rows *output_weights; /* NULL: x is the residual */
    Norm norm;
    const Rows *router;
    const ExpertWeights *expert_weights;
    uint16_t *projected; /* (tokens, hidden): the residual plus the output projection */
    uint16_t *x; /* (tokens, hidden): its norm, the experts' input */
    float *logits; /* (tokens, experts) */
    int64_t *chosen; /* (tokens, top_k): ascending */
    float *weights; /* (tokens, top_k) */
    int64_t *counts; /* rows of each expert */
    uint16_t *out; /* (tokens, hidden) */
} Layer;

enum { COLUMNS = 512 }; /* of a token, that are summed over its experts by one thread */

typedef struct {
    const Layer *layer;
    const Multiplier *multiplier;
    Product output, router;
    Experts experts;
    char *memory; /* of the experts */
    uint16_t *y; /* (tokens * top_k, hidden): rows sorted by expert, then by token */
    int64_t *rows; /* (tokens, top_k): of y */
    Phase *gates, *downs; /* whose items are known after the router */
} Job;

static void project_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Layer *layer = job->layer;
    float out[MOST_OUTPUTS * MOST_BATCH] __attribute__((aligned(64)));
    job->multiplier->multiply(&job->output, first, last, out);
    for (int64_t t = 0; t < layer->tokens; t++)
        for (int64_t n = first; n < last; n++) {
            const float projected = widened(rounded(out[(n - first) * layer->tokens + t]));
            const int64_t at = t * layer->hidden + n;
            layer->projected[at] = rounded(widened(layer->residual[at]) + projected);
        }
}

static void norm_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Layer *layer = job->layer;
    const uint16_t *before = layer->output_weights ? layer->projected : layer->residual;
    for (int64_t t = first; t < last; t++) {
        uint16_t *x = layer->x + t * layer->hidden;
        normalise(&layer->norm, layer->hidden, before + t * layer->hidden, x);
        job->multiplier->place_row(&job->router, (int)t, x);
    }
}

static void router_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Layer *layer = job->layer;
    float out[MOST_OUTPUTS * MOST_BATCH] __attribute__((aligned(64)));
    job->multiplier->multiply(&job->router, first, last, out);
    for (int64_t t = 0; t < layer->tokens; t++)
        for (int64_t e = first; e < last; e++)
            layer->logits[t * layer->experts + e] = out[(e - first) * layer->tokens + t];
}

/* NaN counts as the greatest, as in torch; of equal logits the first one is chosen. */
static int is_greater(float a, float b) { return a > b || (a != a && b == b); }

static void choose(const Layer *layer, const float *logits, int64_t *chosen, float *weights) {
    float greatest = 0, sum = 0;
    for (int64_t choice = 0; choice < layer->top_k; choice++) {
        int64_t best = -1;
        for (int64_t e = 0; e < layer->experts; e++) {
            int taken = 0;
            for (int64_t i = 0; i < choice; i++) taken |= chosen[i] == e;
            if (!taken && (best < 0 || is_greater(logits[e], logits[best]))) best = e;
        }
        if (!choice) greatest = logits[best];
        int64_t at = choice;
        for (; at && chosen[at - 1] > best; at--) chosen[at] = chosen[at - 1];
        chosen[at] = best;
    }
    for (int64_t i = 0; i < layer->top_k; i++) weights[i] = exponential(logits[chosen[i]] - greatest);
    if (layer->sum_to_one)
        for (int64_t i = 0; i < layer->top_k; i++) sum += weights[i];
    else
        for (int64_t e = 0; e < layer->experts; e++) sum += exponential(logits[e] - greatest);
    for (int64_t i = 0; i < layer->top_k; i++) weights[i] /= sum;
}

static void choose_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Layer *layer = job->layer;
    for (int64_t t = first; t < last; t++)
        choose(layer, layer->logits + t * layer->experts, layer->chosen + t * layer->top_k,
               layer->weights + t * layer->top_k);
}

/* Gives each expert its rows, and the later phases their items. */
static void group_part(void *argument, int64_t first, int64_t last) {
    (void)first, (void)last;
    Job *job = argument;
    const Layer *layer = job->layer;
    const int64_t pairs = layer->tokens * layer->top_k;
    for (int64_t e = 0; e < layer->experts; e++) layer->counts[e] = 0;
    for (int64_t pair = 0; pair < pairs; pair++) layer->counts[layer->chosen[pair]]++;
    char *memory = job->memory;
    uint16_t *y = job->y;
    job->experts.count = 0;
    for (int64_t e = 0; e < layer->experts; e++) {
        const int64_t rows = layer->counts[e];
        if (!rows) continue;
        Expert *expert = job->experts.experts + job->experts.count++;
        *expert = expert_in(&job->experts, rows, layer->expert_weights + e, y, memory);
        int row = 0;
        for (int64_t pair = 0; pair < pairs; pair++) {
            if (layer->chosen[pair] != e) continue;
            job->rows[pair] = (y - job->y) / layer->hidden + row;
            job->multiplier->place_row(&expert->gate, row++, layer->x + pair / layer->top_k * layer->hidden);
        }
        memory += expert_bytes(job->multiplier, rows, layer->hidden, layer->width);
        y += rows * layer->hidden;
    }
    job->gates->items = job->experts.count * layer->width;
    job->downs->items = job->experts.count * layer->hidden;
}

static void gate_part(void *argument, int64_t first, int64_t last) {
    gate_experts(&((const Job *)argument)->experts, first, last);
}

static void down_part(void *argument, int64_t first, int64_t last) {
    project_experts(&((const Job *)argument)->experts, first, last);
}

/* Columns [first, last) of a token: the residual plus its experts' outputs, added in the order of its choices. */
static void combine(int64_t hidden, int64_t top_k, const uint16_t *y, const int64_t *rows, const float *weights,
                    const uint16_t *residual, uint16_t *out, int64_t first, int64_t last) {
    float total[COLUMNS];
    const int64_t count = last - first;
    for (int64_t choice = 0; choice < top_k; choice++) {
        const uint16_t *values = y + rows[choice] * hidden + first;
        const float weight = weights[choice];
        if (!choice)
            for (int64_t i = 0; i < count; i++) total[i] = widened(values[i]) * weight;
        else
            for (int64_t i = 0; i < count; i++) total[i] += widened(values[i]) * weight;
    }
    for (int64_t i = 0; i < count; i++) out[first + i] = rounded(total[i] + widened(residual[first + i]));
}

static void combine_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Layer *layer = job->layer;
    const uint16_t *residual = layer->output_weights ? layer->projected : layer->residual;
    const int64_t hidden = layer->hidden, pieces = (hidden + COLUMNS - 1) / COLUMNS;
    for (int64_t item = first; item < last; item++) {
        const int64_t t = item / pieces, from = item % pieces * COLUMNS;
        const int64_t to = from + COLUMNS < hidden ? from + COLUMNS : hidden;
        combine(hidden, layer->top_k, job->y, job->rows + t * layer->top_k, layer->weights + t * layer->top_k,
                residual + t * hidden, layer->out + t * hidden, from, to);
    }
}

static int64_t on_line(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* The products before the experts, in `memory`; NULL only counts its bytes. */
static int64_t give_router(Job *job, char *memory) {
    const Layer *layer = job->layer;
    job->output = product_of(job->multiplier, layer->tokens, layer->attended_width, layer->hidden, layer->output_weights);
    job->router = product_of(job->multiplier, layer->tokens, layer->hidden, layer->experts, layer->router);
    const int64_t before = placed_bytes(job->multiplier, &job->output);
    if (memory) {
        give_memory(job->multiplier, &job->output, memory);
        give_memory(job->multiplier, &job->router, memory + before);
    }
    return before + placed_bytes(job->multiplier, &job->router);
}

static int64_t give_experts(Job *job, char *memory) {
    const Layer *layer = job->layer;
    const int64_t pairs = layer->tokens * layer->top_k;
    const int64_t most = pairs < layer->experts ? pairs : layer->experts;
    const int64_t sizes[] = {on_line(most * (int64_t)sizeof(Expert)), on_line(pairs * (int64_t)sizeof(int64_t)),
                             on_line(pairs * layer->hidden * (int64_t)sizeof(uint16_t))};
    if (memory) {
        job->experts.experts = (Expert *)memory;
        job->rows = (int64_t *)(memory + sizes[0]);
        job->y = (uint16_t *)(memory + sizes[0] + sizes[1]);
        job->memory = memory + sizes[0] + sizes[1] + sizes[2];
    }
    /* However the rows are divided, those of one row each need the most. */
    return sizes[0] + sizes[1] + sizes[2] + pairs * expert_bytes(job->multiplier, 1, layer->hidden, layer->width);
}

static Phase *add(Task *task, Part part, int64_t items, int64_t chunk) {
    Phase *phase = task->phase + task->phases++;
    phase->part = part;
    phase->items = items;
    phase->chunk = chunk;
    return phase;
}

/* Phases up to the choice of experts; returns the bytes of weights that they read. */
static int64_t add_router(Team *team, Task *task, Job *job) {
    const Layer *layer = job->layer;
    int64_t weights = 0;
    if (layer->output_weights) {
        for (int row = 0; row < layer->tokens; row++)
            job->multiplier->place_row(&job->output, row, layer->attended + row * layer->attended_width);
        add(task, project_part, layer->hidden, chunk_of(team, layer->hidden));
        weights += layer->attended_width * layer->hidden;
    }
    add(task, norm_part, layer->tokens, 1);
    if (layer->router) add(task, router_part, layer->experts, WHOLE_TILES);
    add(task, choose_part, layer->tokens, 1);
    return (weights + layer->hidden * layer->experts) * (int64_t)sizeof(uint16_t);
}

static int64_t add_experts(Team *team, Task *task, Job *job) {
    const Layer *layer = job->layer;
    add(task, group_part, 1, 1);
    job->gates = add(task, gate_part, 0, chunk_of(team, layer->width));
    job->downs = add(task, down_part, 0, chunk_of(team, layer->hidden));
    add(task, combine_part, layer->tokens * ((layer->hidden + COLUMNS - 1) / COLUMNS), 1);
    return 3 * layer->hidden * layer->width * (int64_t)sizeof(uint16_t);
}

/* Up to the choice of experts: `projected`, `x`, `logits`, `chosen` and `weights`. Returns 0, or -1 without memory. */
API int moesched_route(Team *team, const Layer *layer) {
    Job job = {.layer = layer, .multiplier = multiplier_of(team)};
    char *memory = scratch(give_router(&job, NULL));
    if (!memory) return -1;
    give_router(&job, memory);
    Task task = {.job = &job};
    const int64_t bytes = add_router(team, &task, &job);
    run(team, &task, bytes);
    return 0;
}

/* All of it. Returns 0, or -1 without memory. */
API int moesched_moe_layer(Team *team, const Layer *layer) {
    Job job = {.layer = layer, .multiplier = multiplier_of(team)};
    job.experts = (Experts){job.multiplier, layer->hidden, layer->width, 0, NULL};
    const int64_t before = give_router(&job, NULL);
    char *memory = scratch(before + give_experts(&job, NULL));
    if (!memory) return -1;
    give_router(&job, memory);
    give_experts(&job, memory + before);
    Task task = {.job = &job};
    int64_t bytes = add_router(team, &task, &job);
    bytes += add_experts(team, &task, &job);
    run(team, &task, bytes);
    return 0;
}

/* The residual plus the experts' outputs y (any, hidden), of which each token has the rows (tokens, top_k). */
API void moesched_combine(int64_t tokens, int64_t hidden, int64_t top_k, const uint16_t *y, const int64_t *rows,
                          const float *weights, const uint16_t *residual, uint16_t *out) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t first = 0; first < hidden; first += COLUMNS)
            combine(hidden, top_k, y, rows + t * top_k, weights + t * top_k, residual + t * hidden, out + t * hidden,
                    first, first + COLUMNS < hidden ? first + COLUMNS : hidden);
}
