/* The inner loops of attention.c for one instruction set and one type of numbers; see attention_types.h.
 *
 * In addition it defines
 *   NAME(name)           the name with the ending of the set and the type
 *   Number               the type of numbers
 *   VALUES(p, half)      that half of a step's numbers at p, as float32
 *   PLACE_OF(k)          where number k of a step comes to be then
 *   FROM_FLOAT(x)        x as a number
 */

/* ---------------------------------------------------------------- queries */

/* Puts queries where `score` looks for them: of each quad, step after step, in each step head after head. */
static TARGET void NAME(place)(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Attend *attend = job->attend;
    const int64_t kv_heads = attend->kv_heads, group = attend->heads / kv_heads, size = attend->head_dim;
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
                STORE(to, VALUES(numbers, 0));
                STORE(to + LANES, VALUES(numbers, 1));
            }
    }
}

/* ---------------------------------------------------------------- scores */

INLINE void NAME(score_step)(const Number *const keys[TOKENS], const float *query, Floats sums[TOKENS][QUAD]) {
    UNROLL
    for (int half = 0; half < 2; half++) {
        Floats rows[TOKENS];
        UNROLL
        for (int t = 0; t < TOKENS; t++) rows[t] = VALUES(keys[t], half);
        UNROLL
        for (int c = 0; c < QUAD; c++) {
            const Floats column = LOADED(query + c * STEP + half * LANES);
            UNROLL
            for (int t = 0; t < TOKENS; t++) ADD_PRODUCT(sums[t][c], rows[t], column);
        }
    }
}

/* Scores of some tokens for a quad: out[token][head]. */
INLINE void NAME(score_tokens)(const char *const *heads, int64_t size, const float *query, float scale, float *out) {
    const Number *keys[TOKENS];
    Floats sums[TOKENS][QUAD];
    UNROLL
    for (int t = 0; t < TOKENS; t++) {
        keys[t] = (const Number *)heads[t];
        UNROLL
        for (int c = 0; c < QUAD; c++) sums[t][c] = EVERY(0.0f);
    }
    int64_t k = 0;
    for (; k + STEP <= size; k += STEP, query += QUAD * STEP) {
        NAME(score_step)(keys, query, sums);
        UNROLL
        for (int t = 0; t < TOKENS; t++) keys[t] += STEP;
    }
    if (k < size) {
        Number padded[TOKENS][STEP] = {{0}};
        for (int t = 0; t < TOKENS; t++) {
            memcpy(padded[t], keys[t], (size_t)(size - k) * sizeof(Number));
            keys[t] = padded[t];
        }
        NAME(score_step)(keys, query, sums);
    }
    ADD_LANES((const Floats(*)[QUAD])sums, out);
    for (int i = 0; i < TOKENS * QUAD; i++) out[i] *= scale;
}

/* Prefetches a head of some tokens. */
INLINE void NAME(fetch)(const char *const *heads, int64_t bytes) {
    for (int t = 0; t < TOKENS; t++)
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(heads[t] + at, 0, 3);
}

/* Scores of a tile for a quad: scores[token][head]. Those after the last one are -infinity, up to TILE. */
INLINE void NAME(score)(const Attend *attend, const Tile *tile, const Tile *next, const float *query,
                        float scores[TILE * QUAD]) {
    const int64_t size = attend->head_dim, bytes = size * (int64_t)sizeof(Number);
    for (int64_t t = 0; t < tile->count; t += TOKENS) {
        if (next) NAME(fetch)(next->keys + t, bytes);
        NAME(score_tokens)(tile->keys + t, size, query, (float)attend->scale, scores + t * QUAD);
    }
    for (int64_t i = tile->count * QUAD; i < TILE * QUAD; i++) scores[i] = -INFINITY;
}

/* Turns scores into weights, and sets `scaling` to what sums so far are multiplied by. */
INLINE void NAME(weigh)(Part4 *part, float scores[TILE * QUAD], float scaling[QUAD]) {
    float lanes[LANES] __attribute__((aligned(64))), total[LANES] __attribute__((aligned(64))) = {0};
    Floats most[2] = {LOADED(scores), LOADED(scores + LANES)};
    for (int i = 2 * LANES; i < TILE * QUAD; i += 2 * LANES) {
        most[0] = LARGER(LOADED(scores + i), most[0]);
        most[1] = LARGER(LOADED(scores + i + LANES), most[1]);
    }
    STORE(lanes, LARGER(most[0], most[1]));
    for (int c = 0; c < QUAD; c++) {
        float highest = part->highest[c];
        for (int i = c; i < LANES; i += QUAD) highest = lanes[i] > highest ? lanes[i] : highest;
        scaling[c] = exponential(part->highest[c] - highest);
        part->highest[c] = highest;
    }
    for (int i = 0; i < LANES; i++) lanes[i] = part->highest[i % QUAD];
    for (int i = 0; i < TILE * QUAD; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            scores[i + lane] = exponential(scores[i + lane] - lanes[lane]);
            total[lane] += scores[i + lane];
        }
    for (int c = 0; c < QUAD; c++) {
        float sum = 0.0f;
        for (int i = c; i < LANES; i += QUAD) sum += total[i];
        part->total[c] = part->total[c] * scaling[c] + sum;
    }
}

/* ---------------------------------------------------------------- values */

/* One step of the weighted sums of values, for `quads` quads at once. */
INLINE void NAME(add_step)(const int quads, const Tile *tile, const Tile *next, int64_t at, int64_t numbers,
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
        const Number *values = (const Number *)tile->values[t] + at;
        Number padded[STEP];
        if (next) __builtin_prefetch((const Number *)next->values[t] + at, 0, 3);
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

/* Adds a tile to the parts of `quads` quads, from `quad` on. */
INLINE void NAME(attend_tile)(const int quads, const Job *job, const Tile *tile, const Tile *next, const float *queries,
                              Part4 *part) {
    float scores[MOST_QUADS][TILE * QUAD] __attribute__((aligned(64))), scaling[MOST_QUADS][QUAD];
    float *sums[MOST_QUADS];
    const int64_t size = job->attend->head_dim, stride = job->steps * STEP;
    for (int q = 0; q < quads; q++) {
        Part4 *one = (Part4 *)((float *)part + q * job->part_floats);
        NAME(score)(job->attend, tile, q ? NULL : next, queries + q * job->quad_floats, scores[q]);
        NAME(weigh)(one, scores[q], scaling[q]);
        sums[q] = one->sums;
    }
    for (int64_t at = 0; at < size; at += STEP) {
        const int64_t numbers = size - at;
        if (numbers < STEP)
            NAME(add_step)(quads, tile, next, at, numbers, scores, scaling, sums, stride);
        else
            NAME(add_step)(quads, tile, next, at, STEP, scores, scaling, sums, stride);
        for (int q = 0; q < quads; q++) sums[q] += STEP;
    }
}

static TARGET void NAME(attend)(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    Tile tiles[2];
    Cursor here = cursor_at(job, first);
    find_tile(job->attend, &here, &tiles[0]);
    for (int side = 0; here.item < last; side = !side) {
        const Tile *next = NULL;
        Cursor then = here;
        advance(job, last, &then);
        if (then.item < last) {
            find_tile(job->attend, &then, &tiles[!side]);
            next = &tiles[!side];
        }
        Part4 *part = part_of(job, here.item);
        const float *queries = queries_of(job, &here);
        if (here.token == here.first) clear(job, part);
        if (here.token + TILE >= here.sequence->last) store_new(job, &here);
        for (int64_t quad = 0; quad < job->quads; next = NULL) {
            if (MOST_QUADS > 1 && quad + MOST_QUADS <= job->quads) {
                NAME(attend_tile)(MOST_QUADS, job, &tiles[side], next, queries, part);
                quad += MOST_QUADS, queries += MOST_QUADS * job->quad_floats, part = parts_after(job, part, MOST_QUADS);
            } else {
                NAME(attend_tile)(1, job, &tiles[side], next, queries, part);
                quad++, queries += job->quad_floats, part = parts_after(job, part, 1);
            }
        }
        here = then;
    }
}

/* ---------------------------------------------------------------- outputs */

/* The weighted sum of values of one head, from its parts in order; overwrites the first part.
 * parts: of `spans` spans, `apart` quads from each other. */
INLINE const float *NAME(merge_head)(const Job *job, Part4 *parts, int64_t spans, int64_t apart, int c) {
    const int64_t stride = job->steps * STEP;
    float weights[MOST_SPANS], highest = -FLT_MAX, total = 0.0f;
    for (int64_t p = 0; p < spans; p++) {
        const Part4 *part = parts_after(job, parts, p * apart);
        highest = part->highest[c] > highest ? part->highest[c] : highest;
    }
    for (int64_t p = 0; p < spans; p++) {
        const Part4 *part = parts_after(job, parts, p * apart);
        weights[p] = exponential(part->highest[c] - highest);
        total += weights[p] * part->total[c];
    }
    for (int64_t p = 0; p < spans; p++) weights[p] /= total;
    for (int64_t k = c * stride; k < (c + 1) * stride; k += LANES) {
        Floats sums = EVERY(0.0f);
        for (int64_t p = 0; p < spans; p++)
            ADD_PRODUCT(sums, LOADED(parts_after(job, parts, p * apart)->sums + k), EVERY(weights[p]));
        STORE(parts->sums + k, sums);
    }
    return parts->sums + c * stride;
}

static TARGET void NAME(merge)(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Attend *attend = job->attend;
    const int64_t size = attend->head_dim, group = attend->heads / attend->kv_heads;
    for (int64_t item = first; item < last; item++) {
        const Sequence *sequence = job->sequences + item / attend->heads;
        const int64_t head = item % attend->heads, kv_head = head / group, within = head % group;
        Part4 *parts = parts_after(job, part_of(job, sequence->spans_before * attend->kv_heads + kv_head),
                                   within / QUAD);
        const float *sums = NAME(merge_head)(job, parts, sequence->spans, attend->kv_heads * job->quads,
                                             (int)(within % QUAD));
        Number *out = (Number *)attend->out + item * size;
        for (int64_t at = 0; at < size; at += STEP) {
            Number numbers[STEP];
            for (int k = 0; k < STEP; k++) numbers[k] = FROM_FLOAT(sums[at + PLACE_OF(k)]);
            memcpy(out + at, numbers, (size_t)smaller(STEP, size - at) * sizeof *numbers);
        }
    }
}

static const Loops NAME(loops) = {STEP, NAME(place), NAME(attend), NAME(merge)};

#undef NAME
#undef Number
#undef VALUES
#undef PLACE_OF
#undef FROM_FLOAT
