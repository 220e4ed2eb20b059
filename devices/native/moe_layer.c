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
    int64_t groups, kept_groups; /* of experts; a token chooses from the kept ones */
    int64_t sum_to_one; /* the weights of a token's experts */
    double scale; /* of these weights */
    double residual_factor; /* of the output projection */
    int64_t shared_width; /* of the network that every token uses; 0 for none */
    double shared_scale;  /* of its outputs */
    const float *correction; /* (experts): added to scores for the choice; NULL for none */
    const float *router_bias; /* (experts): added to logits; NULL for none */
    const uint16_t *attended; /* (tokens, attended_width) */
    const uint16_t *residual; /* (tokens, hidden) */
    const Matrix *output_weights; /* NULL: x is the residual */
    const uint16_t *output_bias; /* (hidden); NULL for none */
    Norm norm;
    const Matrix *router;
    ExpertKind kind;
    const ExpertWeights *expert_weights; /* the formats of all experts are those of the first one */
    const ExpertWeights *shared_weights;
    uint16_t *projected; /* (tokens, hidden): the residual plus the output projection */
    uint16_t *x; /* (tokens, hidden): its norm, the experts' input */
    float *logits; /* (tokens, experts) */
    float *scores; /* (tokens, experts): their sigmoids; NULL for a softmax */
    int64_t *chosen; /* (tokens, top_k): ascending */
    float *weights; /* (tokens, top_k) */
    int64_t *rows;   /* (tokens, top_k): of each pair, among the pairs sorted by expert; `moesched_route` writes it */
    int64_t *sorted; /* (tokens * top_k): the token of each of these rows */
    int64_t *counts; /* rows of each expert */
    uint16_t *out; /* (tokens, hidden) */
} Layer;

enum {
    COLUMNS = 512,        /* of a token, that are summed over its experts by one thread */
    WAVE_ROWS = 1024,  /* of all experts, between their matrices: bounds the memory for any number of tokens */
    GATHERED_AT_ONCE = 4, /* rows that a thread takes at a time */
    MOST_GROUPS = 64,     /* bits that say which are kept */
};

/* Rows of experts are sorted by expert, then by token. The network that every token uses is one more expert, behind the
 * others. Rows are multiplied WAVE_ROWS at a time: a wave. */
typedef struct {
    const Layer *layer;
    Factor output;
    Product router;
    Experts experts; /* of the wave */
    char *memory;    /* of a wave's products */
    char *unused;    /* what the experts of the wave so far left of it */
    uint16_t *y;     /* (all rows, hidden) */
    int64_t *rows;   /* (tokens, top_k): of y */
    int64_t *tokens; /* (all rows): of each row */
    int64_t *ends;   /* (experts): behind the last row of each */
    int64_t first, last; /* rows of the wave */
    Phase *phases;   /* of the experts, whose items are known after the router: WAVE_PHASES of each wave */
} Job;

enum { BEGIN, GATHER, GATE, DOWN, WAVE_PHASES };

static void place_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Layer *layer = job->layer;
    place_inputs(&job->output.by_rows, layer->attended, layer->attended_width, first, last);
}

ANY_WIDTH static void add(int64_t count, const uint16_t *residual, uint16_t *projected) {
    for (int64_t i = 0; i < count; i++) projected[i] = rounded(widened(residual[i]) + widened(projected[i]));
}

ANY_WIDTH static void multiply(int64_t count, float factor, uint16_t *projected) {
    for (int64_t i = 0; i < count; i++) projected[i] = rounded(widened(projected[i]) * factor);
}

static void project_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Layer *layer = job->layer;
    write_factor(&job->output, layer->attended, first, last, layer->projected);
    for (int64_t at = first; at < layer->tokens * layer->hidden; at += layer->hidden) {
        if (layer->residual_factor != 1) multiply(last - first, (float)layer->residual_factor, layer->projected + at);
        add(last - first, layer->residual + at, layer->projected + at);
    }
}

static void norm_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Layer *layer = job->layer;
    const uint16_t *before = layer->output_weights ? layer->projected : layer->residual;
    for (int64_t t = first; t < last; t++)
        normalise(&layer->norm, layer->hidden, before + t * layer->hidden, layer->x + t * layer->hidden);
}

static void place_normed_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    place_inputs(&job->router, job->layer->x, job->layer->hidden, first, last);
}

static void router_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Layer *layer = job->layer;
    float out[MOST_OUTPUTS * MOST_BATCH] __attribute__((aligned(64)));
    for (int64_t row = 0; row < layer->tokens; row += MOST_BATCH) {
        const Product group = group_at(&job->router, row);
        group.multiplier->multiply(&group, first, last, out);
        for (int64_t t = 0; t < group.batch; t++)
            for (int64_t e = first; e < last; e++) {
                const float bias = layer->router_bias ? layer->router_bias[e] : 0.0f;
                layer->logits[(row + t) * layer->experts + e] = out[(e - first) * group.batch + t] + bias;
            }
    }
}

/* NaN counts as the greatest, as in torch; of equal logits the first one is chosen. */
static int is_greater(float a, float b) { return a > b || (a != a && b == b); }

static float corrected(const Layer *layer, const float *scores, int64_t expert) {
    return layer->correction ? scores[expert] + layer->correction[expert] : scores[expert];
}

/* A bit for each group that a token chooses from: those whose two best experts have the greatest sums. */
static uint64_t kept_groups(const Layer *layer, const float *scores) {
    const int64_t size = layer->experts / layer->groups;
    float sums[MOST_GROUPS];
    if (layer->kept_groups == layer->groups) return ~(uint64_t)0;
    for (int64_t group = 0; group < layer->groups; group++) {
        float best = -INFINITY, second = -INFINITY;
        for (int64_t e = group * size; e < (group + 1) * size; e++) {
            const float score = corrected(layer, scores, e);
            if (is_greater(score, best)) second = best, best = score;
            else if (is_greater(score, second)) second = score;
        }
        sums[group] = best + second;
    }
    uint64_t kept = 0;
    for (int64_t choice = 0; choice < layer->kept_groups; choice++) {
        int64_t best = -1;
        for (int64_t group = 0; group < layer->groups; group++)
            if (!(kept >> group & 1) && (best < 0 || is_greater(sums[group], sums[best]))) best = group;
        kept |= (uint64_t)1 << best;
    }
    return kept;
}

/* The experts of a token by their scores, ascending. */
static void choose(const Layer *layer, const float *scores, int64_t *chosen) {
    const uint64_t kept = kept_groups(layer, scores);
    const int64_t size = layer->experts / layer->groups;
    for (int64_t choice = 0; choice < layer->top_k; choice++) {
        int64_t best = -1;
        float greatest = 0;
        for (int64_t e = 0; e < layer->experts; e++) {
            int taken = !(kept >> (e / size) & 1);
            for (int64_t i = 0; i < choice; i++) taken |= chosen[i] == e;
            if (taken) continue;
            const float score = corrected(layer, scores, e);
            if (best < 0 || is_greater(score, greatest)) best = e, greatest = score;
        }
        int64_t at = choice;
        for (; at && chosen[at - 1] > best; at--) chosen[at] = chosen[at - 1];
        chosen[at] = best;
    }
}

static void weigh_by_sigmoid(const Layer *layer, const float *scores, const int64_t *chosen, float *weights) {
    float sum = 0;
    for (int64_t i = 0; i < layer->top_k; i++) sum += weights[i] = scores[chosen[i]];
    sum += 1e-20f; /* SUM_EPSILON of moesched/models/networks.py */
    for (int64_t i = 0; i < layer->top_k; i++)
        weights[i] = (layer->sum_to_one ? weights[i] / sum : weights[i]) * (float)layer->scale;
}

static void weigh_by_softmax(const Layer *layer, const float *logits, const int64_t *chosen, float *weights) {
    float greatest = logits[chosen[0]], sum = 0;
    for (int64_t i = 1; i < layer->top_k; i++)
        if (is_greater(logits[chosen[i]], greatest)) greatest = logits[chosen[i]];
    for (int64_t i = 0; i < layer->top_k; i++) weights[i] = exponential(logits[chosen[i]] - greatest);
    if (layer->sum_to_one)
        for (int64_t i = 0; i < layer->top_k; i++) sum += weights[i];
    else
        for (int64_t e = 0; e < layer->experts; e++) sum += exponential(logits[e] - greatest);
    for (int64_t i = 0; i < layer->top_k; i++) weights[i] = weights[i] / sum * (float)layer->scale;
}

static void choose_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Layer *layer = job->layer;
    for (int64_t t = first; t < last; t++) {
        const float *logits = layer->logits + t * layer->experts;
        int64_t *chosen = layer->chosen + t * layer->top_k;
        float *weights = layer->weights + t * layer->top_k, *scores = layer->scores + t * layer->experts;
        if (!layer->scores) {
            choose(layer, logits, chosen);
            weigh_by_softmax(layer, logits, chosen, weights);
            continue;
        }
        for (int64_t e = 0; e < layer->experts; e++) scores[e] = 1.0f / (1.0f + exponential(-logits[e]));
        choose(layer, scores, chosen);
        weigh_by_sigmoid(layer, scores, chosen, weights);
    }
}

static int64_t rows_of(const Layer *layer) {
    return layer->tokens * (layer->top_k + (layer->shared_width ? 1 : 0));
}

/* Adds an expert to the wave, if it has some of the expert's rows [begins, ends). */
static void add_expert(Job *job, int64_t begins, int64_t ends, int64_t width, const ExpertWeights *weights) {
    const int64_t first = begins < job->first ? job->first : begins, last = ends < job->last ? ends : job->last;
    if (first >= last) return;
    Expert *expert = job->experts.experts + job->experts.count++;
    *expert = expert_of(&job->experts, last - first, width, weights);
    expert->y = job->y + first * job->layer->hidden;
    give_expert_memory(expert, job->unused);
    job->unused += expert_bytes(expert);
}

/* Begins the next wave: its experts, and the items of its phases. */
static void begin_wave(Job *job) {
    const Layer *layer = job->layer;
    const int64_t rows = rows_of(layer), routed = layer->tokens * layer->top_k;
    Phase *phases = job->phases + job->last / WAVE_ROWS * WAVE_PHASES;
    job->first = job->last;
    job->last = rows - job->first < WAVE_ROWS ? rows : job->first + WAVE_ROWS;
    job->unused = job->memory;
    job->experts.count = 0;
    for (int64_t e = 0; e < layer->experts; e++)
        add_expert(job, job->ends[e] - layer->counts[e], job->ends[e], layer->width, layer->expert_weights + e);
    add_expert(job, routed, rows, layer->shared_width, layer->shared_weights);
    phases[GATHER].items = job->last - job->first;
    phases[GATE].items = number_items(&job->experts);
    phases[DOWN].items = output_items(&job->experts);
}

/* Sorts the pairs of tokens and experts by expert, then by token: the row of each pair, the token of each row, the number of
 * rows of each expert, and the row behind its last one. */
static void sort_pairs(const Layer *layer, int64_t *rows, int64_t *tokens, int64_t *counts, int64_t *ends) {
    const int64_t pairs = layer->tokens * layer->top_k;
    int64_t row = 0;
    for (int64_t e = 0; e < layer->experts; e++) counts[e] = 0;
    for (int64_t pair = 0; pair < pairs; pair++) counts[layer->chosen[pair]]++;
    for (int64_t e = 0; e < layer->experts; row += counts[e++]) ends[e] = row;
    for (int64_t pair = 0; pair < pairs; pair++) {
        rows[pair] = ends[layer->chosen[pair]]++;
        tokens[rows[pair]] = pair / layer->top_k;
    }
}

/* Sorts the rows, and begins the first wave. */
static void group_part(void *argument, int64_t first, int64_t last) {
    (void)first, (void)last;
    Job *job = argument;
    const Layer *layer = job->layer;
    const int64_t pairs = layer->tokens * layer->top_k;
    sort_pairs(layer, job->rows, job->tokens, layer->counts, job->ends);
    for (int64_t row = pairs; row < rows_of(layer); row++) job->tokens[row] = row - pairs;
    begin_wave(job);
}

static void begin_part(void *job, int64_t first, int64_t last) {
    (void)first, (void)last;
    begin_wave(job);
}

/* Rows [first, last) of the wave. */
static void gather_part(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Layer *layer = job->layer;
    const Expert *expert = job->experts.experts;
    int64_t before = 0; /* rows of the experts before */
    for (int64_t row = first; row < last; row++) {
        for (; row - before >= expert->rows; expert++) before += expert->rows;
        const uint16_t *x = layer->x + job->tokens[job->first + row] * layer->hidden;
        place_expert(expert, row - before, 0, layer->hidden, x);
    }
}

static void gate_part(void *argument, int64_t first, int64_t last) {
    gate_experts(&((const Job *)argument)->experts, first, last);
}

static void down_part(void *argument, int64_t first, int64_t last) {
    project_experts(&((const Job *)argument)->experts, first, last);
}

/* Adds a weighted output to a sum, or begins it. */
static inline void accumulate(int64_t count, int begins, const uint16_t *values, float weight, float *total) {
    if (begins)
        for (int64_t i = 0; i < count; i++) total[i] = widened(values[i]) * weight;
    else
        for (int64_t i = 0; i < count; i++) total[i] += widened(values[i]) * weight;
}

/* Columns [first, last) of a token: the residual plus its experts' outputs, added in the order of its choices, then that
 * of the network that every token uses, if `shared` is not NULL. */
ANY_WIDTH static void combine(int64_t hidden, int64_t top_k, const uint16_t *y, const int64_t *rows, const float *weights,
                    const uint16_t *shared, float shared_scale, const uint16_t *residual, uint16_t *out, int64_t first,
                    int64_t last) {
    float total[COLUMNS];
    const int64_t count = last - first;
    for (int64_t choice = 0; choice < top_k; choice++)
        accumulate(count, !choice, y + rows[choice] * hidden + first, weights[choice], total);
    if (shared) accumulate(count, !top_k, shared + first, shared_scale, total);
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
        const uint16_t *shared = layer->shared_width ? job->y + (layer->tokens * layer->top_k + t) * hidden : NULL;
        combine(hidden, layer->top_k, job->y, job->rows + t * layer->top_k, layer->weights + t * layer->top_k, shared,
                (float)layer->shared_scale, residual + t * hidden, layer->out + t * hidden, from, to);
    }
}

static int64_t on_line(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* The output projection, in `memory`; NULL only counts its bytes. */
static int64_t give_output(Job *job, char *memory) {
    const Layer *layer = job->layer;
    job->output = factor_of(job->experts.team, 0, layer->tokens, layer->attended_width, layer->hidden, layer->output_weights,
                            layer->output_bias);
    if (memory) give_memory(&job->output.by_rows, memory);
    return copied_bytes(&job->output);
}

/* The products before the experts, in `memory`; NULL only counts its bytes. */
static int64_t give_router(Job *job, char *memory) {
    const Layer *layer = job->layer;
    const int64_t before = give_output(job, memory);
    job->router = product_of(job->experts.team, layer->tokens, layer->hidden, layer->experts, layer->router);
    if (memory) give_memory(&job->router, memory + before);
    return before + placed_bytes(&job->router);
}

static int64_t waves_of(const Layer *layer) { return (rows_of(layer) + WAVE_ROWS - 1) / WAVE_ROWS; }

enum { KINDS = 2 };

/* An expert for some rows, and the network that every token uses, as far as the layer has them; returns their number. */
static int kinds_of(const Job *job, int64_t rows, Expert found[KINDS]) {
    const Layer *layer = job->layer;
    int count = 0;
    if (layer->experts) found[count++] = expert_of(&job->experts, rows, layer->width, layer->expert_weights);
    if (layer->shared_width)
        found[count++] = expert_of(&job->experts, rows, layer->shared_width, layer->shared_weights);
    return count;
}

enum { OTHER_PHASES = 7 };

/* What the phases need beside the products before the experts, in `memory`; NULL only counts its bytes. */
static int64_t give_experts(Job *job, Task *task, char *memory) {
    const Layer *layer = job->layer;
    const int64_t number = sizeof(int64_t), pairs = layer->tokens * layer->top_k, rows = rows_of(layer);
    const int64_t phases = OTHER_PHASES + waves_of(layer) * WAVE_PHASES;
    const int64_t at_once = rows < WAVE_ROWS ? rows : WAVE_ROWS;
    const int64_t experts = at_once <= layer->experts ? at_once : layer->experts + 1;
    Expert of_one_row[KINDS];
    int64_t row_bytes = 0;
    for (int kind = kinds_of(job, 1, of_one_row) - 1; kind >= 0; kind--)
        if (expert_bytes(of_one_row + kind) > row_bytes) row_bytes = expert_bytes(of_one_row + kind);
    const int64_t sizes[] = {phases * (int64_t)sizeof(Phase), experts * (int64_t)sizeof(Expert), pairs * number,
                             rows * number, layer->experts * number,
                             rows * layer->hidden * (int64_t)sizeof(uint16_t),
                             /* however the rows are divided, those of one row each need the most */
                             at_once * row_bytes};
    enum { PARTS = sizeof sizes / sizeof *sizes };
    char *part[PARTS];
    int64_t bytes = 0;
    for (int i = 0; i < PARTS; bytes += on_line(sizes[i++])) part[i] = memory + (memory ? bytes : 0);
    if (memory) {
        task->phase = (Phase *)part[0];
        job->experts.experts = (Expert *)part[1];
        job->rows = (int64_t *)part[2];
        job->tokens = (int64_t *)part[3];
        job->ends = (int64_t *)part[4];
        job->y = (uint16_t *)part[5];
        job->memory = part[6];
    }
    return bytes;
}

static void add_phase(Task *task, Part part, int64_t items, int64_t least, int64_t most) {
    task->phase[task->phases++] = (Phase){part, items, least, most, 0};
}

/* Phases of the output projection; returns the bytes of weights that they read. */
static int64_t add_output(Task *task, Job *job) {
    const Layer *layer = job->layer;
    const Grain outputs = factor_grain(job->experts.team, &job->output);
    add_phase(task, place_part, layer->attended_width, PLACED_AT_ONCE, layer->attended_width);
    add_phase(task, project_part, layer->hidden, outputs.least, outputs.most);
    return factor_bytes(&job->output);
}

/* Phases up to the choice of experts; returns the bytes of weights that they read. */
static int64_t add_router(Task *task, Job *job) {
    const Layer *layer = job->layer;
    const int64_t weights = layer->output_weights ? add_output(task, job) : 0;
    add_phase(task, norm_part, layer->tokens, 1, 1);
    if (layer->router) {
        add_phase(task, place_normed_part, layer->hidden, PLACED_AT_ONCE, layer->hidden);
        add_phase(task, router_part, layer->experts, WHOLE_TILES, WHOLE_TILES);
    }
    if (layer->experts) add_phase(task, choose_part, layer->tokens, 1, 1);
    return weights + matrix_bytes(&job->router);
}

static int64_t add_experts(Task *task, Job *job) {
    const Layer *layer = job->layer;
    Expert of_all[KINDS], of_one_row[KINDS];
    int64_t bytes = 0;
    kinds_of(job, 1, of_one_row);
    for (int kind = kinds_of(job, layer->tokens, of_all) - 1; kind >= 0; kind--) {
        fit_grains(&job->experts, of_all + kind);
        fit_grains(&job->experts, of_one_row + kind);
        bytes += weight_bytes(of_all + kind);
    }
    job->phases = task->phase + task->phases;
    for (int64_t wave = 0; wave < waves_of(layer); wave++) {
        add_phase(task, wave ? begin_part : group_part, 1, 1, 1);
        add_phase(task, gather_part, 0, 1, GATHERED_AT_ONCE);
        add_phase(task, gate_part, 0, job->experts.numbers.least, job->experts.numbers.most);
        add_phase(task, down_part, 0, job->experts.outputs.least, job->experts.outputs.most);
    }
    add_phase(task, combine_part, layer->tokens * ((layer->hidden + COLUMNS - 1) / COLUMNS), 1, 1);
    return bytes;
}

/* Computes the phases that `add` adds, in memory that `give` divides, with `more` bytes behind it. Returns the address of
 * these bytes, or NULL without memory. */
static char *run_phases(Team *team, const Layer *layer, int64_t (*give)(Job *, char *), int64_t (*add)(Task *, Job *),
                        int64_t more) {
    Job job = {.layer = layer, .experts.team = team};
    const int64_t before = give(&job, NULL);
    char *memory = scratch(before + more);
    if (!memory) return NULL;
    give(&job, memory);
    Phase phases[OTHER_PHASES];
    Task task = {&job, 0, phases};
    const int64_t bytes = add(&task, &job);
    run(team, &task, bytes);
    return memory + before;
}

/* The output projection and the residual: `projected`. Returns 0, or -1 without memory. */
API int moesched_output_projection(Team *team, const Layer *layer) {
    return run_phases(team, layer, give_output, add_output, 0) ? 0 : -1;
}

/* From the norm to the choice of experts: `x`, `logits`, `chosen`, `weights`, `rows`, `sorted` and `counts`. Returns 0, or
 * -1 without memory. */
API int moesched_route(Team *team, const Layer *layer) {
    char *ends = run_phases(team, layer, give_router, add_router, layer->experts * (int64_t)sizeof(int64_t));
    if (!ends) return -1;
    sort_pairs(layer, layer->rows, layer->sorted, layer->counts, (int64_t *)ends);
    return 0;
}

/* All of it. Returns 0, or -1 without memory. */
API int moesched_moe_layer(Team *team, const Layer *layer) {
    const int64_t width = layer->experts ? layer->width : layer->shared_width;
    Job job = {.layer = layer,
               .experts = {.team = team, .kind = &layer->kind, .hidden = layer->hidden, .width = width}};
    Task task = {.job = &job};
    const int64_t before = give_router(&job, NULL);
    char *memory = scratch(before + give_experts(&job, &task, NULL));
    if (!memory) return -1;
    give_router(&job, memory);
    give_experts(&job, &task, memory + before);
    int64_t bytes = add_router(&task, &job);
    bytes += add_experts(&task, &job);
    run(team, &task, bytes);
    return 0;
}

/* The residual plus the experts' outputs y (any, hidden), of which each token has the rows (tokens, top_k). */
API void moesched_combine(int64_t tokens, int64_t hidden, int64_t top_k, const uint16_t *y, const int64_t *rows,
                          const float *weights, const uint16_t *residual, uint16_t *out) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t first = 0; first < hidden; first += COLUMNS)
            combine(hidden, top_k, y, rows + t * top_k, weights + t * top_k, NULL, 0, residual + t * hidden,
                    out + t * hidden, first, first + COLUMNS < hidden ? first + COLUMNS : hidden);
}
