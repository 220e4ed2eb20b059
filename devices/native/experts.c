/* Experts on their rows: down(silu(gate x) * up x), or with a limited activation, as those of gpt-oss. */
#include "experts.h"

#include <stddef.h>
#include <string.h>

#include "limited_expert.h"
#include "numbers.h"
#include "scratch.h"

Expert expert_of(const Experts *experts, int64_t rows, int64_t width, const ExpertWeights *weights) {
    const Team *team = experts->team;
    const int64_t hidden = experts->hidden, transposed = experts->kind->transposed;
    const int64_t ups = weights->up ? width : 0, gates = 2 * width - ups;
    return (Expert){.kind = experts->kind, .rows = rows, .hidden = hidden, .width = width,
                    .gate = factor_of(team, transposed, rows, hidden, gates, weights->gate, weights->gate_bias),
                    .up = factor_of(team, transposed, rows, hidden, ups, weights->up, weights->up_bias),
                    .down = factor_of(team, transposed, rows, width, hidden, weights->down, weights->down_bias)};
}

static int is_limited(const Expert *expert) { return expert->kind->limit != 0; }

/* Whether up reads the copy of x that gate reads. */
static int shares_x(const Expert *expert) {
    return expert->gate.by_rows.multiplier == expert->up.by_rows.multiplier;
}

static int64_t bytes_of_up(const Expert *expert) { return shares_x(expert) ? 0 : copied_bytes(&expert->up); }

/* Numbers of 16 bits that a limited expert has in memory: x where it is not copied, gates, ups and what down multiplies. */
static int64_t numbers_of(const Expert *expert) {
    const int64_t x = expert->kind->transposed ? expert->hidden : 0;
    return is_limited(expert) ? expert->rows * (x + 3 * expert->width) : 0;
}

int64_t expert_bytes(const Expert *expert) {
    const int64_t copies = copied_bytes(&expert->gate) + bytes_of_up(expert) + copied_bytes(&expert->down);
    return copies + (numbers_of(expert) * (int64_t)sizeof(uint16_t) + 63) / 64 * 64;
}

int64_t weight_bytes(const Expert *expert) {
    return factor_bytes(&expert->gate) + factor_bytes(&expert->up) + factor_bytes(&expert->down);
}

/* Returns the memory behind the copy of x that it gives to a factor. */
static char *give_copy(Factor *factor, char *memory) {
    if (!copied_bytes(factor)) return memory;
    give_memory(&factor->by_rows, memory);
    return memory + copied_bytes(factor);
}

void give_expert_memory(Expert *expert, char *memory) {
    const int64_t numbers = expert->rows * expert->width;
    char *behind = give_copy(&expert->gate, memory);
    if (copied_bytes(&expert->up)) give_memory(&expert->up.by_rows, shares_x(expert) ? memory : behind);
    behind = give_copy(&expert->down, behind + bytes_of_up(expert));
    expert->gates = (uint16_t *)behind;
    expert->ups = expert->gates + numbers; /* unused where gates are both */
    expert->numbers = expert->gates + 2 * numbers;
    expert->x = expert->gates + 3 * numbers;
}

void place_expert(const Expert *expert, int64_t row, int64_t first, int64_t last, const uint16_t *values) {
    if (expert->kind->transposed) {
        memcpy(expert->x + row * expert->hidden + first, values, (size_t)(last - first) * sizeof *values);
        return;
    }
    place(&expert->gate.by_rows, row, first, last, values);
    if (bytes_of_up(expert)) place(&expert->up.by_rows, row, first, last, values);
}

/* Numbers between the matrices that a thread takes: if matrices are by rows, whole steps of down's inputs. */
static Grain number_grain(const Team *team, const Expert *expert) {
    const Grain gate = factor_grain(team, &expert->gate), up = factor_grain(team, &expert->up);
    const int64_t gates_each = expert->up.outputs ? 1 : 2;
    if (expert->kind->transposed) return (Grain){larger(gate.least / gates_each, up.least), gate.most / gates_each};
    const int64_t down = factor_grain(team, &expert->down).least;
    return (Grain){larger(larger(gate.least, up.least), down), gate.most / gates_each};
}

static void fit(Grain *grain, Grain wanted) {
    *grain = (Grain){larger(grain->least, wanted.least), larger(grain->most, wanted.most)};
}

void fit_grains(Experts *experts, const Expert *expert) {
    fit(&experts->numbers, number_grain(experts->team, expert));
    fit(&experts->outputs, factor_grain(experts->team, &expert->down));
}

/* Gate and up each rounded, where their multipliers have no common way to numbers that are not. */
static void gate_apart(const Expert *expert, int64_t first, int64_t last) {
    uint16_t gates[MOST_OUTPUTS * MOST_BATCH], ups[MOST_OUTPUTS * MOST_BATCH];
    const int64_t count = last - first;
    for (int64_t row = 0; row < expert->rows; row += MOST_BATCH) {
        const Product gate = group_at(&expert->gate.by_rows, row), up = group_at(&expert->up.by_rows, row);
        gate.multiplier->write(&gate, first, last, gates - first, count);
        up.multiplier->write(&up, first, last, ups - first, count);
        for (int64_t m = 0; m < gate.batch; m++) {
            uint16_t *hidden = gates + m * count;
            for (int64_t i = 0; i < count; i++)
                hidden[i] = rounded(silu(widened(hidden[i])) * widened(ups[m * count + i]));
            place(&expert->down.by_rows, row + m, first, last, hidden);
        }
    }
}

static void gate_silu(const Expert *expert, int64_t first, int64_t last) {
    const Product *products[] = {&expert->gate.by_rows, &expert->up.by_rows, &expert->down.by_rows};
    const Multiplier *gate = products[0]->multiplier, *up = products[1]->multiplier, *down = products[2]->multiplier;
    if (gate->gated && gate->gated == up->gated && (gate->is_coded || gate->gated == down->gated))
        gate->gated(products[0], products[1], products[2], first, last);
    else
        gate_apart(expert, first, last);
}

static void project(const Expert *expert, int64_t first, int64_t last) {
    write_factor(&expert->down, expert->numbers, first, last, expert->y);
}

static int64_t in_whole(int64_t pieces, int64_t items) { return (items + pieces - 1) / pieces * pieces; }

int64_t number_items(const Experts *experts) {
    const int64_t before = experts->count - 1;
    return before * in_whole(experts->numbers.least, experts->width) + experts->experts[before].width;
}

int64_t output_items(const Experts *experts) {
    return (experts->count - 1) * in_whole(experts->outputs.least, experts->hidden) + experts->hidden;
}

/* Items [first, last) of all experts, of which each but the last has `items`, from a multiple of `stride` on. */
static void over_experts(const Experts *experts, void (*part)(const Expert *, int64_t, int64_t), int64_t stride,
                         int64_t items, int64_t of_last, int64_t first, int64_t last) {
    while (first < last) {
        const int64_t final = experts->count - 1, number = first / stride < final ? first / stride : final;
        const int64_t before = number * stride, own = number < final ? items : of_last;
        const int64_t end = before + own < last ? before + own : last;
        if (first < end) part(experts->experts + number, first - before, end - before);
        first = number < final ? before + stride : last;
    }
}

void gate_experts(const Experts *experts, int64_t first, int64_t last) {
    over_experts(experts, experts->kind->limit != 0 ? gate_limited : gate_silu,
                 in_whole(experts->numbers.least, experts->width), experts->width,
                 experts->experts[experts->count - 1].width, first, last);
}

void project_experts(const Experts *experts, int64_t first, int64_t last) {
    over_experts(experts, project, in_whole(experts->outputs.least, experts->hidden), experts->hidden, experts->hidden,
                 first, last);
}

/* ---------------------------------------------------------------- one expert */

typedef struct {
    Experts experts;
    int64_t rows, stride;
    const uint16_t *x;
} Job;

static void place_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    for (int64_t row = 0; row < job->rows; row++)
        place_expert(job->experts.experts, row, first, last, job->x + row * job->stride + first);
}

static void gate_part(void *job, int64_t first, int64_t last) {
    gate_experts(&((const Job *)job)->experts, first, last);
}

static void project_part(void *job, int64_t first, int64_t last) {
    project_experts(&((const Job *)job)->experts, first, last);
}

/* Runs one expert: x and y (rows, hidden), the rows of x `stride` numbers apart. Returns 0, or -1 without memory. */
API int moesched_expert(Team *team, const OneExpert *one, int64_t rows, int64_t stride, const uint16_t *x, uint16_t *y) {
    Expert expert;
    Job job = {{.team = team, .kind = &one->kind, .hidden = one->hidden, .width = one->width, .count = 1,
                .experts = &expert}, rows, stride, x};
    expert = expert_of(&job.experts, rows, one->width, &one->weights);
    char *memory = scratch(expert_bytes(&expert));
    if (!memory) return -1;
    give_expert_memory(&expert, memory);
    expert.y = y;
    fit_grains(&job.experts, &expert);
    const Grain numbers = job.experts.numbers, outputs = job.experts.outputs;
    Phase phases[] = {{place_part, one->hidden, PLACED_AT_ONCE, one->hidden, 0},
                      {gate_part, one->width, numbers.least, numbers.most, 0},
                      {project_part, one->hidden, outputs.least, outputs.most, 0}};
    Task task = {&job, 3, phases};
    run(team, &task, weight_bytes(&expert));
    return 0;
}
