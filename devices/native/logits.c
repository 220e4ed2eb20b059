/* The end of a step: norm, LM head and the likeliest tokens, as one task. */
#include <math.h>
#include <stddef.h>

#include "norm.h"
#include "numbers.h"
#include "product.h"
#include "scratch.h"

/* Numbers that Python prepares. Rows `chosen` of x (any, hidden), bfloat16; logits (rows, vocabulary), float32, rounded
 * to bfloat16; likeliest (rows): the first token with the largest logit, -1 if that is not finite. */
typedef struct {
    int64_t rows, hidden, vocabulary;
    const uint16_t *x;
    const int64_t *chosen;
    Norm norm;
    const Rows *weights;
    float *logits;
    int64_t *likeliest;
} Head;

typedef struct {
    float logit;
    int32_t token;
} Best;

typedef struct {
    const Head *head;
    const Multiplier *multiplier;
    Product product;
    uint16_t *normed;
    int64_t chunk;
    Best *best; /* (chunks, rows) */
} Job;

static void norm_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const int64_t hidden = job->head->hidden;
    for (int64_t row = first; row < last; row++) {
        uint16_t *normed = job->normed + row * hidden;
        normalise(&job->head->norm, hidden, job->head->x + job->head->chosen[row] * hidden, normed);
        job->multiplier->place_row(&job->product, (int)row, normed);
    }
}

/* NaN counts as the largest, so that it is not overlooked. */
static int is_larger(float a, float b) { return a > b || (a != a && b == b); }

static void project_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Head *head = job->head;
    float out[MOST_OUTPUTS * MOST_BATCH] __attribute__((aligned(64)));
    job->multiplier->multiply(&job->product, first, last, out);
    for (int64_t row = 0; row < head->rows; row++) {
        float *logits = head->logits + row * head->vocabulary;
        Best best = {-INFINITY, (int32_t)first};
        for (int64_t n = first; n < last; n++) {
            logits[n] = widened(rounded(out[(n - first) * head->rows + row]));
            if (is_larger(logits[n], best.logit)) best = (Best){logits[n], (int32_t)n};
        }
        job->best[first / job->chunk * head->rows + row] = best;
    }
}

static void choose_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Head *head = job->head;
    for (int64_t row = first; row < last; row++) {
        Best best = job->best[row];
        for (int64_t n = job->chunk, chunk = 1; n < head->vocabulary; n += job->chunk, chunk++) {
            const Best other = job->best[chunk * head->rows + row];
            if (is_larger(other.logit, best.logit)) best = other;
        }
        head->likeliest[row] = isfinite(best.logit) ? best.token : -1;
    }
}

/* Returns 0, or -1 without memory. */
API int moesched_logits(Team *team, const Head *head) {
    const Multiplier *multiplier = multiplier_of(team);
    Job job = {.head = head,
               .multiplier = multiplier,
               .product = product_of(multiplier, head->rows, head->hidden, head->vocabulary, head->weights),
               .chunk = chunk_of(team, head->vocabulary)};
    const int64_t placed = placed_bytes(multiplier, &job.product);
    const int64_t best = (head->vocabulary / job.chunk + 1) * head->rows * (int64_t)sizeof(Best);
    char *memory = scratch(placed + best + head->rows * head->hidden * (int64_t)sizeof(uint16_t));
    if (!memory) return -1;
    give_memory(multiplier, &job.product, memory);
    job.best = (Best *)(memory + placed);
    job.normed = (uint16_t *)(memory + placed + best);
    Task task = {&job,
                 3,
                 {{norm_part, head->rows, 1, 0, 0},
                  {project_part, head->vocabulary, job.chunk, 0, 0},
                  {choose_part, head->rows, 1, 0, 0}}};
    run(team, &task, head->hidden * head->vocabulary * (int64_t)sizeof(uint16_t));
    return 0;
}
