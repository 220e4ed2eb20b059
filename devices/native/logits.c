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
    double factor; /* of logits, above 0 */
    const uint16_t *x;
    const int64_t *chosen;
    Norm norm;
    const Matrix *weights;
    float *logits;
    int64_t *likeliest;
} Head;

enum { CHUNK = MOST_OUTPUTS }; /* logits whose largest one is found at once */

typedef struct {
    const Head *head;
    Product product;
    uint16_t *normed;
    uint16_t *bits; /* (rows, vocabulary): the logits as bfloat16 */
    int16_t *largest; /* (chunks, rows): the orders of the largest logits */
} Job;

/* An integer that grows with the number; that of NaN is the largest. */
static inline int16_t order_of(uint16_t bits) { return (int16_t)(bits & 0x8000 ? bits ^ 0x7fff : bits); }

static void norm_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const int64_t hidden = job->head->hidden;
    for (int64_t row = first; row < last; row++) {
        uint16_t *normed = job->normed + row * hidden;
        normalise(&job->head->norm, hidden, job->head->x + job->head->chosen[row] * hidden, normed);
    }
}

static void place_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    place_inputs(&job->product, job->normed, job->head->hidden, first, last);
}

static void project_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Head *head = job->head;
    write_rounded(&job->product, first, last, job->bits);
    for (int64_t row = 0; row < head->rows; row++) {
        const uint16_t *bits = job->bits + row * head->vocabulary;
        float *logits = head->logits + row * head->vocabulary;
        int16_t largest = INT16_MIN;
        for (int64_t n = first; n < last; n++) {
            const int16_t order = order_of(bits[n]);
            largest = order > largest ? order : largest;
        }
        for (int64_t n = first; n < last; n++) logits[n] = widened(bits[n]) * (float)head->factor;
        job->largest[first / CHUNK * head->rows + row] = largest;
    }
}

static void choose_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Head *head = job->head;
    for (int64_t row = first; row < last; row++) {
        int64_t best = 0;
        for (int64_t chunk = 1; chunk * CHUNK < head->vocabulary; chunk++)
            if (job->largest[chunk * head->rows + row] > job->largest[best * head->rows + row]) best = chunk;
        const uint16_t *bits = job->bits + row * head->vocabulary;
        int64_t token = best * CHUNK;
        while (order_of(bits[token]) != job->largest[best * head->rows + row]) token++;
        head->likeliest[row] = isfinite(widened(bits[token])) ? token : -1;
    }
}

/* Returns 0, or -1 without memory. */
API int moesched_logits(Team *team, const Head *head) {
    Job job = {.head = head, .product = product_of(team, head->rows, head->hidden, head->vocabulary, head->weights)};
    const int64_t placed = placed_bytes(&job.product);
    const int64_t normed = head->rows * head->hidden, bits = head->rows * head->vocabulary;
    const int64_t largest = (head->vocabulary / CHUNK + 1) * head->rows;
    char *memory = scratch(placed + (normed + bits + largest) * (int64_t)sizeof(uint16_t));
    if (!memory) return -1;
    give_memory(&job.product, memory);
    job.normed = (uint16_t *)(memory + placed);
    job.bits = job.normed + normed;
    job.largest = (int16_t *)(job.bits + bits);
    Phase phases[] = {{norm_part, head->rows, 1, 1, 0},
                      {place_part, head->hidden, PLACED_AT_ONCE, head->hidden, 0},
                      {project_part, head->vocabulary, CHUNK, CHUNK, 0},
                      {choose_part, head->rows, 1, 1, 0}};
    Task task = {&job, 4, phases};
    run(team, &task, matrix_bytes(&job.product));
    return 0;
}
