/* Experts on their rows: down(silu(gate x) * up x). */
#include "experts.h"

#include <stddef.h>

#include "scratch.h"

static void products_of(const Multiplier *multiplier, int64_t rows, int64_t hidden, int64_t width,
                        const ExpertWeights *weights, Expert *expert) {
    expert->gate = product_of(multiplier, rows, hidden, width, weights ? weights->gate : NULL);
    expert->up = product_of(multiplier, rows, hidden, width, weights ? weights->up : NULL);
    expert->down = product_of(multiplier, rows, width, hidden, weights ? weights->down : NULL);
}

int64_t expert_bytes(const Multiplier *multiplier, int64_t rows, int64_t hidden, int64_t width) {
    Expert expert;
    products_of(multiplier, rows, hidden, width, NULL, &expert);
    return placed_bytes(multiplier, &expert.gate) + placed_bytes(multiplier, &expert.down);
}

Expert expert_in(const Experts *experts, int64_t rows, const ExpertWeights *weights, uint16_t *y, char *memory) {
    Expert expert = {.y = y};
    products_of(experts->multiplier, rows, experts->hidden, experts->width, weights, &expert);
    give_memory(experts->multiplier, &expert.gate, memory);
    expert.up.x = expert.gate.x;
    give_memory(experts->multiplier, &expert.down, memory + placed_bytes(experts->multiplier, &expert.gate));
    return expert;
}

void gate_experts(const Experts *experts, int64_t first, int64_t last) {
    while (first < last) {
        const int64_t number = first / experts->width, before = number * experts->width;
        const int64_t end = before + experts->width < last ? before + experts->width : last;
        const Expert *expert = experts->experts + number;
        experts->multiplier->gated(&expert->gate, &expert->up, &expert->down, first - before, end - before);
        first = end;
    }
}

void project_experts(const Experts *experts, int64_t first, int64_t last) {
    while (first < last) {
        const int64_t number = first / experts->hidden, before = number * experts->hidden;
        const int64_t end = before + experts->hidden < last ? before + experts->hidden : last;
        const Expert *expert = experts->experts + number;
        write_rounded(experts->multiplier, &expert->down, first - before, end - before, expert->y);
        first = end;
    }
}

/* One expert, and rows of x that are `stride` numbers apart. */
typedef struct {
    Experts experts;
    const uint16_t *x;
    int64_t stride;
} Job;

static void place_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Experts *experts = &job->experts;
    place_inputs(experts->multiplier, &experts->experts->gate, job->x, job->stride, first, last);
}

static void gate_part(void *job, int64_t first, int64_t last) {
    gate_experts(&((const Job *)job)->experts, first, last);
}

static void project_part(void *job, int64_t first, int64_t last) {
    project_experts(&((const Job *)job)->experts, first, last);
}

/* y (rows, hidden) of one expert; rows of x are `stride` numbers apart. Returns 0, or -1 without memory. */
API int moesched_expert(Team *team, int64_t rows, int64_t hidden, int64_t width, const uint16_t *x, int64_t stride,
                    const ExpertWeights *weights, uint16_t *y) {
    const Multiplier *multiplier = multiplier_of(team);
    char *memory = scratch(expert_bytes(multiplier, rows, hidden, width));
    if (!memory) return -1;
    Expert expert;
    Job job = {{multiplier, hidden, width, 1, &expert}, x, stride};
    expert = expert_in(&job.experts, rows, weights, y, memory);
    const int64_t least = least_outputs(rows);
    Phase phases[] = {{place_part, hidden, PLACED_AT_ONCE, hidden, 0},
                      {gate_part, width, least, MOST_OUTPUTS, 0},
                      {project_part, hidden, least, MOST_OUTPUTS, 0}};
    Task task = {&job, 3, phases};
    run(team, &task, 3 * hidden * width * (int64_t)sizeof(uint16_t));
    return 0;
}
