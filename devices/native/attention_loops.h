/* The inner loops of attention.c for one instruction set and one type of numbers; see attention_types.h.
 *
 * In addition it defines
 *   NAME(name)           the name with the ending of the set and the type
 *   Number               the type of numbers
 *   VALUES(p, half)      that half of a step's numbers at p, as float32
 *   FROM_FLOATS(numbers, halves)   a step's numbers, from both halves
 * and PAIRS where keys and queries are multiplied as pairs of bfloat16 numbers.
 */

#if defined(PAIRS)
#include "attention_pairs.h"
#else
/* ---------------------------------------------------------------- queries */

/* Puts queries, scaled, where `score` looks for them: of each quad, step after step, in each step head after head. */
static TARGET void NAME(place)(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Attend *attend = job->attend;
    const int64_t kv_heads = attend->kv_heads, group = attend->heads / kv_heads, size = attend->head_dim;
    const float scale = (float)attend->scale;
    for (int64_t item = first; item < last; item++) {
        float *placed = job->queries + item * job->quads * job->quad_floats;
        const Number *query = (const Number *)attend->queries + item / kv_heads * attend->query_stride +
                              item % kv_heads * group * size;
        for (int64_t head = 0; head < job->quads * QUAD; head++)
            for (int64_t step = 0; step < job->steps; step++) {
                const int64_t left = head < group ? smaller(STEP, size - step * STEP) : 0;
                Number numbers[STEP] = {0};
                if (left) memcpy(numbers, query + head * size + step * STEP, (size_t)left * sizeof *numbers);
                float *to = placed + ((head / QUAD * job->steps + step) * QUAD + head % QUAD) * STEP;
                STORE(to, VALUES(numbers, 0) * scale);
                STORE(to + LANES, VALUES(numbers, 1) * scale);
            }
    }
}

/* ---------------------------------------------------------------- scores */

INLINE void NAME(score_step)(const Number *const keys[TOKENS], int64_t k, const float *query, Floats sums[TOKENS][QUAD]) {
    UNROLL
    for (int half = 0; half < 2; half++) {
        Floats rows[TOKENS];
        UNROLL
        for (int t = 0; t < TOKENS; t++) rows[t] = VALUES(keys[t] + k, half);
        UNROLL
        for (int c = 0; c < QUAD; c++) {
            const Floats column = LOADED(query + c * STEP + half * LANES);
            UNROLL
            for (int t = 0; t < TOKENS; t++) ADD_PRODUCT(sums[t][c], rows[t], column);
        }
    }
}

/* Scores of TOKENS tokens for a quad: out[token][head]. at: of the head, in the slots. */
INLINE void NAME(score_quad)(const char *const *slots, int64_t at, int64_t size, const float *query, float *out) {
    const Number *keys[TOKENS];
    Floats sums[TOKENS][QUAD];
    UNROLL
    for (int t = 0; t < TOKENS; t++) {
        keys[t] = (const Number *)(slots[t] + at);
        UNROLL
        for (int c = 0; c < QUAD; c++) sums[t][c] = EVERY(0.0f);
    }
    int64_t k = 0;
    for (; k + STEP <= size; k += STEP, query += QUAD * STEP) NAME(score_step)(keys, k, query, sums);
    if (k < size) {
        Number padded[TOKENS][STEP] = {{0}};
        for (int t = 0; t < TOKENS; t++) {
            memcpy(padded[t], keys[t] + k, (size_t)(size - k) * sizeof(Number));
            keys[t] = padded[t];
        }
        NAME(score_step)(keys, 0, query, sums);
    }
    ADD_LANES((const Floats(*)[QUAD])sums, out);
}

/* Brings bytes [at, last) of TOKENS slots into the first-level cache. */
INLINE void NAME(bring)(const char *const *slots, int64_t at, int64_t last) {
    for (; at < last; at += LINE)
        UNROLL
        for (int t = 0; t < TOKENS; t++) __builtin_prefetch(slots[t] + at, 0, 3);
}

/* Scores of TOKENS tokens for `quads` quads, from token t of a tile on: scores[quad][token][head]. */
INLINE void NAME(score_tokens)(const int quads, const Job *job, const Tile *tile, int64_t t, Ahead *ahead, int64_t at,
                               const float *queries, float scores[][TILE * QUAD]) {
    const int64_t bytes = in_slot(job->attend, 0, 1);
    fetch(ahead, lines_of(TOKENS * bytes));
    NAME(bring)(tile->values + t, at, at + bytes);
    for (int q = 0; q < quads; q++)
        NAME(score_quad)(tile->keys + t, at, job->attend->head_dim, queries + q * job->quad_floats, scores[q] + t * QUAD);
}
#endif

/* Scores of a tile for `quads` quads: scores[quad][token][head]. After the last token they are -infinity. */
INLINE void NAME(score)(const int quads, const Job *job, const Tile *tile, Ahead *ahead, int64_t at,
                        const float *queries, float scores[][TILE * QUAD]) {
    for (int64_t t = 0; t < tile->count; t += TOKENS) NAME(score_tokens)(quads, job, tile, t, ahead, at, queries, scores);
    for (int q = 0; q < quads; q++)
        for (int64_t i = tile->count * QUAD; i < TILE * QUAD; i++) scores[q][i] = -INFINITY;
}

/* Turns scores into weights, and sets `scaling` to what sums so far are multiplied by. */
INLINE void NAME(weigh)(float *highest_of, float *total_of, float scores[TILE * QUAD], float scaling[QUAD]) {
    const Floats before = OF_QUAD(highest_of);
    Floats most[2] = {before, before}, total = EVERY(0.0f);
    for (int i = 0; i < TILE * QUAD; i += 2 * LANES) {
        most[0] = LARGER(LOADED(scores + i), most[0]);
        most[1] = LARGER(LOADED(scores + i + LANES), most[1]);
    }
    Floats highest = LARGER(most[0], most[1]);
    UNROLL
    for (int lanes = QUAD; lanes < LANES; lanes *= 2) highest = LARGER(highest, SWAPPED(highest, lanes));
    const Floats factor = EXPONENTIALS(before - highest);
    UNROLL
    for (int i = 0; i < TILE * QUAD; i += LANES) {
        const Floats weights = EXPONENTIALS(LOADED(scores + i) - highest);
        STORE(scores + i, weights);
        total = total + weights;
    }
    UNROLL
    for (int lanes = QUAD; lanes < LANES; lanes *= 2) total = total + SWAPPED(total, lanes);
    ADD_PRODUCT(total, OF_QUAD(total_of), factor);
    memcpy(total_of, &total, QUAD * sizeof(float));
    memcpy(highest_of, &highest, QUAD * sizeof(float));
    memcpy(scaling, &factor, QUAD * sizeof(float));
}

/* ---------------------------------------------------------------- values */

/* One step of the weighted sums of values, for `quads` quads at once. */
INLINE void NAME(add_step)(const int quads, const Tile *tile, Ahead *ahead, const Soon *soon, int64_t at, int64_t numbers,
                           float weights[][TILE * QUAD], float scaling[][QUAD], float *sums[], int64_t stride) {
    Floats total[MOST_QUADS * QUAD][2];
    UNROLL
    for (int i = 0; i < quads * QUAD; i++)
        UNROLL
        for (int half = 0; half < 2; half++) {
            total[i][half] = EVERY(0.0f);
            ADD_PRODUCT(total[i][half], EVERY(scaling[i / QUAD][i % QUAD]),
                        LOADED(sums[i / QUAD] + i % QUAD * stride + half * LANES));
        }
    for (int64_t t = 0; t < tile->count; t++) {
        const Number *values = (const Number *)(tile->values[t] + at);
        Number padded[STEP];
        if (t % STREAMS == 0) fetch(ahead, lines_of(STREAMS * STEP * (int64_t)sizeof(Number)));
        UNROLL
        for (int64_t byte = 0; byte < STEP * (int64_t)sizeof(Number); byte += LINE)
            __builtin_prefetch(soon->slots[t] + soon->at + byte, 0, 3);
        if (numbers < STEP) {
            memset(padded, 0, sizeof padded);
            memcpy(padded, values, (size_t)numbers * sizeof *padded);
            values = padded;
        }
        const Floats even = VALUES(values, 0), odd = VALUES(values, 1);
        UNROLL
        for (int i = 0; i < quads * QUAD; i++) {
            const Floats weight = EVERY(weights[i / QUAD][t * QUAD + i % QUAD]);
            ADD_PRODUCT(total[i][0], even, weight);
            ADD_PRODUCT(total[i][1], odd, weight);
        }
    }
    UNROLL
    for (int i = 0; i < quads * QUAD; i++)
        UNROLL
        for (int half = 0; half < 2; half++)
            STORE(sums[i / QUAD] + i % QUAD * stride + half * LANES, total[i][half]);
}

/* Adds a tile to the parts of `quads` quads. at: of the head, in the slots. */
INLINE void NAME(attend_quads)(const int quads, const Job *job, const Tile *tile, Ahead *keys, Ahead *values, Soon soon,
                               int64_t at, const float *queries, int64_t quad) {
    float scores[MOST_QUADS][TILE * QUAD] __attribute__((aligned(64))), scaling[MOST_QUADS][QUAD];
    const int64_t step_bytes = STEP * (int64_t)sizeof(Number);
    float *sums[MOST_QUADS];
    NAME(score)(quads, job, tile, keys, at, queries, scores);
    for (int q = 0; q < quads; q++, quad++) {
        NAME(weigh)(job->highest + quad * QUAD, job->total + quad * QUAD, scores[q], scaling[q]);
        sums[q] = sums_of(job, quad);
    }
    for (int64_t left = job->attend->head_dim; left > 0; left -= STEP, at += step_bytes, soon.at += step_bytes) {
        if (left < STEP)
            NAME(add_step)(quads, tile, values, &soon, at, left, scores, scaling, sums, job->steps * STEP);
        else
            NAME(add_step)(quads, tile, values, &soon, at, STEP, scores, scaling, sums, job->steps * STEP);
        for (int q = 0; q < quads; q++) sums[q] += STEP;
    }
}

/* Adds a tile to a head's parts. */
static TARGET void NAME(attend_head)(const Job *job, const Tile *tile, Ahead *keys, Ahead *values, Soon soon, int64_t at,
                                     const float *queries, int64_t quad) {
    int64_t left = job->quads;
    for (; MOST_QUADS > 1 && left >= MOST_QUADS; left -= MOST_QUADS, quad += MOST_QUADS) {
        NAME(attend_quads)(MOST_QUADS, job, tile, keys, values, soon, at, queries, quad);
        queries += MOST_QUADS * job->quad_floats;
    }
    for (; left; left--, quad++) {
        NAME(attend_quads)(1, job, tile, keys, values, soon, at, queries, quad);
        queries += job->quad_floats;
    }
}

/* ---------------------------------------------------------------- outputs */

/* The weighted sum of values of a head, from its parts in order; overwrites the first one.
 * sink: the score of a token without a value; NULL for none.
 * head: of all heads of all quads in the first of `spans` spans, which are `apart` heads from each other. */
INLINE const float *NAME(merge_head)(const Job *job, int64_t head, int64_t spans, int64_t apart,
                                    const float *sink) {
    const int64_t stride = job->steps * STEP;
    float weights[MOST_SPANS], highest = sink ? *sink : -FLT_MAX, total = 0.0f, *first = job->sums + head * stride;
    for (int64_t p = 0; p < spans; p++) {
        const float other = job->highest[head + p * apart];
        highest = other > highest ? other : highest;
    }
    for (int64_t p = 0; p < spans; p++) {
        weights[p] = exponential(job->highest[head + p * apart] - highest);
        total += weights[p] * job->total[head + p * apart];
    }
    if (sink) total += exponential(*sink - highest);
    for (int64_t p = 0; p < spans; p++) weights[p] /= total;
    for (int64_t k = 0; k < stride; k += LANES) {
        Floats sums = EVERY(0.0f);
        for (int64_t p = 0; p < spans; p++) ADD_PRODUCT(sums, LOADED(first + p * apart * stride + k), EVERY(weights[p]));
        STORE(first + k, sums);
    }
    return first;
}

static TARGET void NAME(merge)(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Attend *attend = job->attend;
    const int64_t size = attend->head_dim, group = attend->heads / attend->kv_heads;
    for (int64_t item = first; item < last; item++) {
        const Sequence *sequence = job->sequences + item / attend->heads;
        const int64_t head = item % attend->heads, kv_head = head / group, within = head % group;
        const int64_t quad = quad_of(job, sequence->spans_before, kv_head), apart = quad_of(job, 1, 0) * QUAD;
        const float *sums = NAME(merge_head)(job, quad * QUAD + within, sequence->spans, apart,
                                                    attend->sinks ? attend->sinks + head : NULL);
        Number *out = (Number *)attend->out + item * size;
        for (int64_t at = 0; at < size; at += STEP) {
            Number numbers[STEP];
            FROM_FLOATS(numbers, sums + at);
            memcpy(out + at, numbers, (size_t)smaller(STEP, size - at) * sizeof *numbers);
        }
    }
}

static const Loops NAME(loops) = {STEP, 1, NAME(place), attend_items, NAME(attend_head), NAME(merge)};

#undef NAME
#undef Number
#undef VALUES
#undef FROM_FLOATS
