/* The logits after the last layer: norm and LM head, as one task. */
#include <stddef.h>

#include "norm.h"
#include "numbers.h"
#include "product.h"
#include "scratch.h"

/* Numbers that Python prepares. Rows `chosen` of x (any, hidden), bfloat16; logits (rows, vocabulary), float32, rounded
 * to bfloat16. */
typedef struct {
    int64_t rows, hidden, vocabulary;
    const uint16_t *x;
    const int64_t *chosen;
    Norm norm;
    const Rows *weights;
    float *logits;
} Head;

typedef struct {
    const Head *head;
    const Multiplier *multiplier;
    Product product;
    uint16_t *normed;
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

static void project_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Head *head = job->head;
    float out[MOST_OUTPUTS * MOST_BATCH];
    job->multiplier->multiply(&job->product, first, last, out);
    for (int64_t row = 0; row < head->rows; row++)
        for (int64_t n = first; n < last; n++)
            head->logits[row * head->vocabulary + n] = widened(rounded(out[(n - first) * head->rows + row]));
}

/* Returns 0, or -1 without memory. */
API int moesched_logits(Team *team, const Head *head) {
    const Multiplier *multiplier = multiplier_of(team);
    Job job = {head, multiplier, product_of(multiplier, head->rows, head->hidden, head->vocabulary, head->weights), NULL};
    const int64_t placed = placed_bytes(multiplier, &job.product);
    char *memory = scratch(placed + head->rows * head->hidden * (int64_t)sizeof(uint16_t));
    if (!memory) return -1;
    give_memory(multiplier, &job.product, memory);
    job.normed = (uint16_t *)(memory + placed);
    Task task = {&job,
                 2,
                 {{norm_part, head->rows, 1, 0, 0},
                  {project_part, head->vocabulary, chunk_of(team, head->vocabulary), 0, 0}}};
    run(team, &task, head->hidden * head->vocabulary * (int64_t)sizeof(uint16_t));
    return 0;
}
