/* Experts on their rows: down(silu(gate x) * up x). */
#include "experts.h"

#include <stddef.h>

#include "numbers.h"
#include "scratch.h"

Expert expert_of(const Experts *experts, int64_t rows, int64_t width, const ExpertWeights *weights) {
    const int64_t hidden = experts->hidden;
    return (Expert){.gate = product_of(experts->team, rows, hidden, width, weights->gate),
                    .up = product_of(experts->team, rows, hidden, width, weights->up),
                    .down = product_of(experts->team, rows, width, hidden, weights->down)};
}

static int shares_x(const Expert *expert) { return expert->gate.multiplier == expert->up.multiplier; }

int64_t expert_bytes(const Expert *expert) {
    const int64_t up = shares_x(expert) ? 0 : placed_bytes(&expert->up);
    return placed_bytes(&expert->gate) + up + placed_bytes(&expert->down);
}

int64_t weight_bytes(const Expert *expert) {
    return matrix_bytes(&expert->gate) + matrix_bytes(&expert->up) + matrix_bytes(&expert->down);
}

void give_expert_memory(Expert *expert, char *memory) {
    give_memory(&expert->gate, memory);
    if (!shares_x(expert)) memory += placed_bytes(&expert->gate);
    give_memory(&expert->up, memory);
    give_memory(&expert->down, memory + placed_bytes(&expert->up));
}

void place_expert(const Expert *expert, int64_t row, int64_t first, int64_t last, const uint16_t *values) {
    place(&expert->gate, row, first, last, values);
    if (!shares_x(expert)) place(&expert->up, row, first, last, values);
}

int64_t least_items(const Expert *expert) {
    const Product *products[] = {&expert->gate, &expert->up, &expert->down};
    int64_t least = 0;
    for (int i = 0; i < 3; i++)
        if (least_outputs(products[i]) > least) least = least_outputs(products[i]);
    return least;
}

/* Gate and up each rounded, where their multipliers have no common way to numbers that are not. */
static void gate_apart(const Expert *expert, int64_t first, int64_t last) {
    uint16_t gates[MOST_OUTPUTS * MOST_BATCH], ups[MOST_OUTPUTS * MOST_BATCH];
    const int64_t count = last - first;
    for (int64_t row = 0; row < expert->gate.batch; row += MOST_BATCH) {
        const Product gate = group_at(&expert->gate, row), up = group_at(&expert->up, row);
        gate.multiplier->write(&gate, first, last, gates - first, count);
        up.multiplier->write(&up, first, last, ups - first, count);
        for (int64_t m = 0; m < gate.batch; m++) {
            uint16_t *hidden = gates + m * count;
            for (int64_t i = 0; i < count; i++)
                hidden[i] = rounded(silu(widened(hidden[i])) * widened(ups[m * count + i]));
            place(&expert->down, row + m, first, last, hidden);
        }
    }
}

/* Numbers [first, last) of an expert. */
static void gate_expert(const Expert *expert, int64_t first, int64_t last) {
    const Multiplier *gate = expert->gate.multiplier, *up = expert->up.multiplier, *down = expert->down.multiplier;
    if (gate->gated && gate->gated == up->gated && (gate->is_coded || gate->gated == down->gated))
        gate->gated(&expert->gate, &expert->up, &expert->down, first, last);
    else
        gate_apart(expert, first, last);
}

int64_t gate_items(const Experts *experts) {
    const int64_t before = experts->count - 1;
    return before * experts->stride + experts->experts[before].gate.outputs;
}

void gate_experts(const Experts *experts, int64_t first, int64_t last) {
    while (first < last) {
        const int64_t quotient = first / experts->stride, final = experts->count - 1;
        const int64_t number = quotient < final ? quotient : final, before = number * experts->stride;
        const Expert *expert = experts->experts + number;
        const int64_t width = expert->gate.outputs, end = before + width < last ? before + width : last;
        if (first < end) gate_expert(expert, first - before, end - before);
        first = number < final ? before + experts->stride : last;
    }
}

void project_experts(const Experts *experts, int64_t first, int64_t last) {
    while (first < last) {
        const int64_t number = first / experts->hidden, before = number * experts->hidden;
        const int64_t end = before + experts->hidden < last ? before + experts->hidden : last;
        const Expert *expert = experts->experts + number;
        write_rounded(&expert->down, first - before, end - before, expert->y);
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
    const Expert *expert = job->experts.experts;
    for (int64_t row = 0; row < expert->gate.batch; row++)
        place_expert(expert, row, first, last, job->x + row * job->stride + first);
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
    Expert expert;
    Job job = {{team, hidden, width, 1, &expert}, x, stride};
    expert = expert_of(&job.experts, rows, width, weights);
    char *memory = scratch(expert_bytes(&expert));
    if (!memory) return -1;
    give_expert_memory(&expert, memory);
    expert.y = y;
    const int64_t least = least_items(&expert);
    Phase phases[] = {{place_part, hidden, PLACED_AT_ONCE, hidden, 0},
                      {gate_part, width, least, MOST_OUTPUTS, 0},
                      {project_part, hidden, least, MOST_OUTPUTS, 0}};
    Task task = {&job, 3, phases};
    run(team, &task, weight_bytes(&expert));
    return 0;
}
