/* Attention of all new tokens of prompts, over keys and values in the cache, with AVX512_BF16.
 *
 * A thread takes a few new tokens of one key-value head at a time, with all query heads of its group: a row for each. All
 * rows pass over a tile of keys and values, which is stored in pairs for that, then over the next one (the online softmax
 * of Milakov and Gimelshein, 2018). Sums are float32, weights bfloat16. Tiles begin at multiples of TILE: so a query's
 * bits do not depend on the other queries, on how prompts are cut, or on the number of threads.
 */
#include "team.h"

/* Python fills it, field by field. Numbers are bfloat16, strides in numbers. */
typedef struct {
    int64_t sequences, queries, length; /* queries: new tokens of each sequence, at its end */
    int64_t heads, kv_heads, head_dim;
    int64_t window; /* tokens that a query sees, itself included; 0 for all */
    int64_t sequence_stride, token_stride, head_stride; /* of keys and of values */
    double scale;
    const uint16_t *keys, *values;
    const uint16_t *new_queries; /* (sequences * queries, heads, head_dim) */
    const float *sinks;          /* (heads): a score of each, that no token has; NULL for none */
    uint16_t *out;               /* (sequences * queries, heads * head_dim) */
} Prompts;

#if defined(__x86_64__)
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "numbers.h"
#include "round_avx512.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 8")

enum {
    LANES = 16,
    TILE = 64,       /* tokens */
    VECTORS = TILE / LANES,
    ROWS = 6,        /* that are computed together: ROWS * VECTORS sums, and what they take, are all registers */
    MOST_ROWS = 252, /* of an item */
    MOST_SIZE = 256, /* of a head */
};

typedef struct {
    const Prompts *prompts;
    int64_t group;  /* query heads of a key-value head */
    int64_t tokens; /* of an item, at most */
    int64_t cuts;   /* items of a sequence's key-value head */
} Job;

/* A tile, stored for products of pairs: two neighbouring numbers of each token's key; two tokens' values (TILE / 2, head_dim). */
typedef struct {
    uint32_t keys[MOST_SIZE / 2][TILE];
    uint32_t values[TILE / 2 * MOST_SIZE];
} Pairs;

/* The rows of an item. */
typedef struct {
    const Prompts *prompts;
    int64_t group, count;
    int64_t position;        /* of the first row's token */
    const uint16_t *queries; /* of the first row */
    const uint16_t *keys, *values; /* of the sequence's first token */
    float sums[MOST_ROWS * MOST_SIZE] __attribute__((aligned(64))); /* (count, head_dim): values, weighted */
    float totals[MOST_ROWS][LANES] __attribute__((aligned(64)));   /* of weights */
    float highest[MOST_ROWS];                                      /* score */
} Item;

/* The tokens of a tile that a row sees: from `first` on, up to `last`. */
typedef struct {
    int64_t first, last;
} Seen;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static inline Seen seen_by(const Item *item, int64_t row, int64_t tile) {
    const int64_t last = item->position + row / item->group + 1 - tile, window = item->prompts->window;
    return (Seen){window ? larger(last - window, 0) : 0, last};
}

/* Numbers from the first row's query to another's, and of what is put out. */
static inline int64_t offset_of(const Item *item, int64_t row) {
    return (row / item->group * item->prompts->heads + row % item->group) * item->prompts->head_dim;
}

/* ---------------------------------------------------------------- pairs */

/* LANES numbers of LANES tokens' keys; zeros from token `count` on. */
INLINE void pair_keys(const uint16_t *keys, int64_t stride, int64_t count, uint32_t *pairs) {
    __m512i word[LANES];
    for (int t = 0; t < LANES; t++)
        word[t] = t < count ? _mm512_loadu_si512(keys + t * stride) : _mm512_setzero_si512();
    transpose_avx512(word);
    for (int i = 0; i < LANES; i++) _mm512_store_si512(pairs + i * TILE, word[i]);
}

INLINE void pair_values(const uint16_t *even, const uint16_t *odd, int64_t size, uint32_t *pairs) {
    for (int64_t k = 0; k < size; k += LANES) {
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(even + k)));
        const __m512i high =
            odd ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(odd + k))) : _mm512_setzero_si512();
        _mm512_store_si512(pairs + k, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
}

INLINE void pair_tile(const Item *item, int64_t tile, Pairs *pairs) {
    const int64_t stride = item->prompts->token_stride, size = item->prompts->head_dim;
    const int64_t count = smaller(TILE, item->prompts->length - tile);
    const uint16_t *keys = item->keys + tile * stride, *values = item->values + tile * stride;
    for (int64_t t = 0; t < TILE; t += LANES)
        for (int64_t k = 0; k < size; k += 2 * LANES)
            pair_keys(keys + t * stride + k, stride, count - t, pairs->keys[k / 2] + t);
    memset(pairs->values + (count + 1) / 2 * size, 0, (size_t)((TILE - count) / 2 * size) * sizeof *pairs->values);
    for (int64_t t = 0; t < count; t += 2, values += 2 * stride)
        pair_values(values, t + 1 < count ? values + stride : NULL, size, pairs->values + t / 2 * size);
}

/* ---------------------------------------------------------------- a few rows by a tile */

INLINE __m512 product_of_pairs(__m512 sums, __m512i pairs, const uint32_t *pair) {
    return _mm512_dpbf16_ps(sums, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32((int)*pair));
}

INLINE void score(const Item *item, int64_t row, const Pairs *pairs, __m512 scores[ROWS][VECTORS]) {
    const uint32_t *query[ROWS];
    UNROLL
    for (int r = 0; r < ROWS; r++) {
        query[r] = (const uint32_t *)(item->queries + offset_of(item, smaller(row + r, item->count - 1)));
        UNROLL
        for (int i = 0; i < VECTORS; i++) scores[r][i] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < item->prompts->head_dim / 2; k++) {
        __m512i keys[VECTORS];
        UNROLL
        for (int i = 0; i < VECTORS; i++) keys[i] = _mm512_load_si512(pairs->keys[k] + i * LANES);
        UNROLL
        for (int r = 0; r < ROWS; r++)
            UNROLL
            for (int i = 0; i < VECTORS; i++) scores[r][i] = product_of_pairs(scores[r][i], keys[i], query[r] + k);
    }
}

/* Which tokens of a vector a row sees. */
INLINE __mmask16 seen_in(Seen seen, int64_t first) {
    const int64_t from = smaller(larger(seen.first - first, 0), LANES), to = smaller(larger(seen.last - first, 0), LANES);
    return (__mmask16)(((1u << to) - 1) & ~((1u << from) - 1));
}

/* Turns a row's scores into weights; returns what its sums so far are multiplied by. */
INLINE float weigh(Item *item, int64_t row, Seen seen, const __m512 scores[VECTORS], uint32_t weights[TILE / 2]) {
    const __m512 scale = _mm512_set1_ps((float)item->prompts->scale);
    float weight[TILE] __attribute__((aligned(64)));
    __mmask16 mask[VECTORS];
    __m512 scaled[VECTORS], most = _mm512_set1_ps(item->highest[row]);
    UNROLL
    for (int i = 0; i < VECTORS; i++) {
        mask[i] = seen_in(seen, i * LANES);
        scaled[i] = _mm512_mul_ps(scores[i], scale);
        most = _mm512_mask_max_ps(most, mask[i], most, scaled[i]);
    }
    const float highest = _mm512_reduce_max_ps(most), factor = exponential(item->highest[row] - highest);
    UNROLL
    for (int i = 0; i < VECTORS; i++)
        _mm512_store_ps(weight + i * LANES, _mm512_sub_ps(scaled[i], _mm512_set1_ps(highest)));
    for (int i = 0; i < TILE; i++) weight[i] = exponential(weight[i]);
    __m512 total = _mm512_mul_ps(_mm512_load_ps(item->totals[row]), _mm512_set1_ps(factor));
    UNROLL
    for (int i = 0; i < VECTORS; i++) {
        const __m512 seen_weight = _mm512_maskz_mov_ps(mask[i], _mm512_load_ps(weight + i * LANES));
        total = _mm512_add_ps(total, seen_weight);
        _mm256_store_si256((__m256i *)(weights + i * LANES / 2), (__m256i)_mm512_cvtneps_pbh(seen_weight));
    }
    _mm512_store_ps(item->totals[row], total);
    item->highest[row] = highest;
    return factor;
}

/* Adds `vectors` vectors of the tile's values to each row's sums. */
INLINE void add_values(const int vectors, Item *item, int64_t row, int64_t k, const float factors[ROWS],
                       const uint32_t weights[ROWS][TILE / 2], const Pairs *pairs) {
    const int64_t size = item->prompts->head_dim;
    float *const first = item->sums + row * size + k;
    __m512 sums[ROWS][VECTORS];
    UNROLL
    for (int r = 0; r < ROWS; r++)
        UNROLL
        for (int i = 0; i < vectors; i++)
            sums[r][i] = _mm512_mul_ps(_mm512_load_ps(first + r * size + i * LANES), _mm512_set1_ps(factors[r]));
    for (int64_t t = 0; t < TILE / 2; t++) {
        __m512i values[VECTORS];
        UNROLL
        for (int i = 0; i < vectors; i++) values[i] = _mm512_load_si512(pairs->values + t * size + k + i * LANES);
        UNROLL
        for (int r = 0; r < ROWS; r++)
            UNROLL
            for (int i = 0; i < vectors; i++) sums[r][i] = product_of_pairs(sums[r][i], values[i], weights[r] + t);
    }
    UNROLL
    for (int r = 0; r < ROWS; r++)
        UNROLL
        for (int i = 0; i < vectors; i++) _mm512_store_ps(first + r * size + i * LANES, sums[r][i]);
}

static TARGET void attend_rows(Item *item, int64_t row, int64_t tile, const Pairs *pairs) {
    uint32_t weights[ROWS][TILE / 2] __attribute__((aligned(64)));
    __m512 scores[ROWS][VECTORS];
    float factors[ROWS];
    const int64_t size = item->prompts->head_dim;
    score(item, row, pairs, scores);
    for (int r = 0; r < ROWS; r++)
        factors[r] = weigh(item, row + r, seen_by(item, smaller(row + r, item->count - 1), tile), scores[r], weights[r]);
    int64_t k = 0;
    for (; k + TILE <= size; k += TILE) add_values(VECTORS, item, row, k, factors, weights, pairs);
    for (; k < size; k += LANES) add_values(1, item, row, k, factors, weights, pairs);
}

/* ---------------------------------------------------------------- items */

static TARGET void write_row(const Item *item, int64_t row, uint16_t *out) {
    const float total = _mm512_reduce_add_ps(_mm512_load_ps(item->totals[row]));
    const int64_t size = item->prompts->head_dim;
    for (int64_t k = 0; k < size; k++) out[k] = rounded(item->sums[row * size + k] / total);
}

/* New tokens [first, last) of a sequence's key-value head. */
static TARGET void attend_tokens(const Job *job, int64_t sequence, int64_t head, int64_t first, int64_t last) {
    const Prompts *prompts = job->prompts;
    const int64_t slot = sequence * prompts->sequence_stride + head * prompts->head_stride;
    const int64_t query = ((sequence * prompts->queries + first) * prompts->heads + head * job->group) * prompts->head_dim;
    const int64_t position = prompts->length - prompts->queries + first;
    Pairs pairs __attribute__((aligned(64)));
    Item item;
    item.prompts = prompts, item.group = job->group, item.count = (last - first) * job->group;
    item.position = position;
    item.queries = prompts->new_queries + query;
    item.keys = prompts->keys + slot, item.values = prompts->values + slot;
    const int64_t rows = (item.count + ROWS - 1) / ROWS * ROWS;
    memset(item.sums, 0, (size_t)(rows * prompts->head_dim) * sizeof *item.sums);
    memset(item.totals, 0, (size_t)rows * sizeof *item.totals);
    for (int64_t row = 0; row < rows; row++) {
        item.highest[row] = prompts->sinks ? prompts->sinks[head * job->group + row % job->group] : -FLT_MAX;
        item.totals[row][0] = prompts->sinks ? 1.0f : 0.0f;
    }
    for (int64_t tile = seen_by(&item, 0, 0).first / TILE * TILE; tile < position + last - first; tile += TILE) {
        pair_tile(&item, tile, &pairs);
        for (int64_t row = 0; row < item.count; row += ROWS)
            if (seen_by(&item, smaller(row + ROWS, item.count) - 1, tile).last > 0) attend_rows(&item, row, tile, &pairs);
    }
    for (int64_t row = 0; row < item.count; row++)
        write_row(&item, row, prompts->out + query + offset_of(&item, row));
}

static void attend_items(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    for (int64_t item = first; item < last; item++) {
        const int64_t head = item / job->cuts, begin = item % job->cuts * job->tokens;
        attend_tokens(job, head / job->prompts->kv_heads, head % job->prompts->kv_heads, begin,
                      smaller(begin + job->tokens, job->prompts->queries));
    }
}
#endif

/* Returns 0, or 1 if it does not take such prompts: then nothing has happened. */
API int moesched_attend_prompts(Team *team, const Prompts *prompts) {
#if defined(__x86_64__)
    const int64_t group = prompts->heads / prompts->kv_heads, size = prompts->head_dim;
    if (set_of(team) != AVX512_BF16 || size % (2 * LANES) || size > MOST_SIZE || group > MOST_ROWS - ROWS) return 1;
    Job job = {prompts, group, (MOST_ROWS - ROWS) / group, 0};
    job.cuts = (prompts->queries + job.tokens - 1) / job.tokens;
    const int64_t items = prompts->sequences * prompts->kv_heads * job.cuts;
    Phase phases[] = {{attend_items, items, 1, 1, 0}};
    Task task = {&job, 1, phases};
    run(team, &task, 2 * prompts->sequences * prompts->length * prompts->kv_heads * size * (int64_t)sizeof(uint16_t));
    return 0;
#else
    (void)team, (void)prompts;
    return 1;
#endif
}
