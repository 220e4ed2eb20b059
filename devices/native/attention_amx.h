/* The inner loops of attention.c for bfloat16 numbers with AMX, whose registers are tiles: up to 16 lines of 64 bytes.
 *
 * A tile of keys is 16 tokens by STEP numbers, as in memory; queries lie in pairs of numbers, for all heads side by
 * side. Weights are turned so that a head's are a line, and halved into the nearest bfloat16 below and the rest, which
 * keeps them to 16 bits; values are laid out in pairs of tokens. Products and sums are exact but for the rounding to
 * float32. What follows is prefetched a few lines at a time all along: else the core waits for them all at once.
 */

#include "tiles.h"

#define TARGET __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 16")
#define LANES 16
#define STEP 32
#define HALF 16       /* tokens of a tile of keys; a tile of the job has two */
#define MOST_HEADS 8  /* that are computed at once */
#define MARGIN 16.0f

/* Numbers of tiles. */
#define SCORES 0
#define MORE_SCORES 1
#define KEYS 2
#define QUERIES 3
#define SUMS 4
#define WEIGHTS 5
#define RESTS 6
#define VALUES 7

/* Heads that are computed at once. */
static inline int heads_at_once(const Job *job) { return job->quads == 1 ? QUAD : MOST_HEADS; }

static TARGET void attend_amx(void *argument, int64_t first, int64_t last) {
    const uint8_t heads = (uint8_t)heads_at_once(argument);
    const uint16_t head_bytes = (uint16_t)(heads * sizeof(float));
    const TileShapes shapes = {
        .palette = 1,
        .lines = {[SCORES] = HALF, [MORE_SCORES] = HALF, [KEYS] = HALF, [QUERIES] = STEP / 2, [SUMS] = heads,
                  [WEIGHTS] = heads, [RESTS] = heads, [VALUES] = TILE / 2},
        .line_bytes = {[SCORES] = head_bytes, [MORE_SCORES] = head_bytes, [KEYS] = LINE, [QUERIES] = head_bytes,
                       [SUMS] = LINE, [WEIGHTS] = LINE, [RESTS] = LINE, [VALUES] = LINE},
    };
    MEMORY_IS_READ_OR_WRITTEN;
    _tile_loadconfig(&shapes);
    attend_items(argument, first, last);
    _tile_release();
}

/* ---------------------------------------------------------------- queries */

/* Of the heads that are computed at once, step after step, in each step pair after pair of numbers, in each head after
 * head. */
static void place_amx(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Attend *attend = job->attend;
    const int64_t kv_heads = attend->kv_heads, group = attend->heads / kv_heads, size = attend->head_dim;
    const int64_t heads = heads_at_once(job);
    for (int64_t item = first; item < last; item++) {
        float *placed = job->queries + item * job->quads * job->quad_floats;
        const uint16_t *queries = (const uint16_t *)attend->queries + item / kv_heads * attend->query_stride +
                                  item % kv_heads * group * size;
        memset(placed, 0, (size_t)(job->quads * job->quad_floats) * sizeof *placed);
        for (int64_t head = 0; head < group; head++) {
            float *to = placed + head / heads * (heads / QUAD) * job->quad_floats + head % heads;
            const uint16_t *from = queries + head * size;
            for (int64_t pair = 0; pair < size / 2; pair++) memcpy(to + pair * heads, from + 2 * pair, 2 * sizeof *from);
            if (size % 2) memcpy(to + size / 2 * heads, from + size - 1, sizeof *from);
        }
    }
}

/* ---------------------------------------------------------------- scores */

INLINE __m512i numbers_at(const char *numbers, __mmask32 mask) { return _mm512_maskz_loadu_epi16(mask, numbers); }

INLINE __mmask32 mask_of(int64_t numbers) {
    return numbers < STEP ? (__mmask32)((1u << numbers) - 1) : (__mmask32)~0u;
}

/* Loads a step of the keys of HALF tokens. apart: bytes from one to the next, 0 if they are not evenly apart. */
INLINE void load_keys(const char *const *slots, int64_t at, int64_t numbers, int64_t apart) {
    char lines[HALF][LINE] __attribute__((aligned(LINE)));
    if (apart && numbers >= STEP) {
        _tile_loadd(KEYS, slots[0] + at, apart);
        return;
    }
    for (int t = 0; t < HALF; t++) _mm512_store_si512(lines[t], numbers_at(slots[t] + at, mask_of(numbers)));
    MEMORY_IS_READ_OR_WRITTEN;
    _tile_loadd(KEYS, lines, LINE);
}

/* Bytes from a token to the next one, if the slots of HALF of them are evenly apart; 0 if not. */
INLINE int64_t apart_in(const Job *job, const char *const *slots) {
    const int64_t apart = in_slot(job->attend, 1, 0);
    for (int t = 1; t < HALF; t++)
        if (slots[t] - slots[t - 1] != apart) return 0;
    return apart;
}

/* Scores of a tile, not scaled: scores[token][head]. After the last token they are -infinity. */
INLINE void score_amx(const int heads, const Job *job, const Tile *tile, Ahead *ahead, int64_t at, const float *queries,
                      float *scores) {
    const int64_t apart = apart_in(job, tile->keys), more_apart = apart_in(job, tile->keys + HALF);
    const int64_t stride = heads * (int64_t)sizeof(float);
    int64_t left = job->attend->head_dim;
    MEMORY_IS_READ_OR_WRITTEN;
    _tile_zero(SCORES);
    _tile_zero(MORE_SCORES);
    for (; left > 0; left -= STEP, at += LINE, queries += STEP / 2 * heads) {
        _tile_loadd(QUERIES, queries, stride);
        load_keys(tile->keys, at, left, apart);
        _tile_dpbf16ps(SCORES, KEYS, QUERIES);
        load_keys(tile->keys + HALF, at, left, more_apart);
        _tile_dpbf16ps(MORE_SCORES, KEYS, QUERIES);
        fetch(ahead, 1);
    }
    _tile_stored(SCORES, scores, stride);
    _tile_stored(MORE_SCORES, scores + HALF * heads, stride);
    MEMORY_IS_READ_OR_WRITTEN;
    for (int64_t i = tile->count * heads; i < TILE * heads; i++) scores[i] = -INFINITY;
}

/* ---------------------------------------------------------------- weights */

/* e^x to about 1e-7; 0 from -103 on. */
INLINE __m512 exponential_amx(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x);
    const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                              _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(whole, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, whole);
}

#define SWAPPED(x, order) _mm512_shuffle_f32x4(x, x, order)
#define SWAP_HALVES 0x4e
#define SWAP_QUARTERS 0xb1

/* A number of each head, in every place of the vector that is this head's. */
INLINE __m512 of_heads(const int heads, const float *numbers) {
    if (heads == QUAD) return _mm512_broadcast_f32x4(_mm_loadu_ps(numbers));
    return _mm512_castpd_ps(_mm512_broadcast_f64x4(_mm256_castps_pd(_mm256_loadu_ps(numbers))));
}

INLINE void store_heads(const int heads, float *numbers, __m512 vector) {
    _mm512_mask_storeu_ps(numbers, (__mmask16)((1u << heads) - 1), vector);
}

INLINE __m512 highest_of_heads(const int heads, __m512 x) {
    x = _mm512_max_ps(x, SWAPPED(x, SWAP_HALVES));
    return heads == QUAD ? _mm512_max_ps(x, SWAPPED(x, SWAP_QUARTERS)) : x;
}

INLINE __m512 sum_of_heads(const int heads, __m512 x) {
    x = _mm512_add_ps(x, SWAPPED(x, SWAP_HALVES));
    return heads == QUAD ? _mm512_add_ps(x, SWAPPED(x, SWAP_QUARTERS)) : x;
}

/* Turns quarters of four vectors: number c of quarter q of vector i becomes number i of quarter q of vector c. */
INLINE void turn(__m512 x[4]) {
    const __m512 a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]);
    const __m512 c = _mm512_unpacklo_ps(x[2], x[3]), d = _mm512_unpackhi_ps(x[2], x[3]);
    x[0] = _mm512_shuffle_ps(a, c, 0x44), x[1] = _mm512_shuffle_ps(a, c, 0xee);
    x[2] = _mm512_shuffle_ps(b, d, 0x44), x[3] = _mm512_shuffle_ps(b, d, 0xee);
}

/* The token of HALF whose weight comes to be number `place` of a head's line. */
INLINE int token_at(const int heads, int place) {
    return heads == QUAD ? place % 4 * 4 + place / 4 : place / 8 * 8 + place % 4 * 2 + place / 4 % 2;
}

/* The weights of HALF tokens: of[head][place]. weights: [token][head]. */
INLINE void turn_weights(const int heads, __m512 *weights, __m512 *of) {
    turn(weights);
    if (heads > QUAD) turn(weights + 4);
    UNROLL
    for (int c = 0; c < QUAD; c++) {
        if (heads == QUAD) {
            of[c] = weights[c];
        } else {
            of[c] = _mm512_shuffle_f32x4(weights[c], weights[4 + c], 0x88);
            of[QUAD + c] = _mm512_shuffle_f32x4(weights[c], weights[4 + c], 0xdd);
        }
    }
}

/* What all tokens of a tile weigh for each head, as tiles. */
typedef struct {
    uint16_t weights[MOST_HEADS][TILE], rests[MOST_HEADS][TILE];
} Weights;

INLINE __m512 rounded_down(__m512 x) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32((int)0xffff0000u)));
}

/* Turns scores into weights; returns whether sums so far have to be multiplied by `scaling` of their heads. Weights are
 * relative to a score so far that is at most MARGIN below the highest one: so sums are seldom multiplied. */
INLINE int weigh_amx(const int heads, const Job *job, Ahead *ahead, int64_t quad, const float *scores, Weights *weights,
                     float *scaling) {
    enum { MOST = TILE * MOST_HEADS / LANES };
    const int64_t lines = (job->steps + 3) / 4; /* at each of 12 places, beside one in each step of scores */
    const int count = TILE * heads / LANES;
    const __m512 scale = _mm512_set1_ps((float)job->attend->scale);
    float *highest_so_far = job->highest + quad * QUAD, *total_so_far = job->total + quad * QUAD;
    __m512 all[MOST], turned[2][MOST_HEADS], most = _mm512_load_ps(scores), total = _mm512_setzero_ps();
    for (int i = 1; i < count; i++) most = _mm512_max_ps(_mm512_load_ps(scores + i * LANES), most);
    const __m512 before = of_heads(heads, highest_so_far);
    const __m512 found = _mm512_mul_ps(highest_of_heads(heads, most), scale);
    const __mmask16 beyond = _mm512_cmp_ps_mask(found, _mm512_add_ps(before, _mm512_set1_ps(MARGIN)), _CMP_GT_OQ);
    const __m512 highest = _mm512_mask_blend_ps(beyond, before, found);
    UNROLL
    for (int i = 0; i < count; i++) {
        all[i] = exponential_amx(_mm512_fmsub_ps(_mm512_load_ps(scores + i * LANES), scale, highest));
        total = _mm512_add_ps(total, all[i]);
        if (i % (count / 8) == 0) fetch(ahead, lines);
    }
    const __m512 factor = exponential_amx(_mm512_sub_ps(before, highest));
    total = _mm512_fmadd_ps(of_heads(heads, total_so_far), factor, sum_of_heads(heads, total));
    store_heads(heads, highest_so_far, highest);
    store_heads(heads, total_so_far, total);
    store_heads(heads, scaling, factor);
    UNROLL
    for (int half = 0; half < 2; half++) turn_weights(heads, all + half * count / 2, turned[half]);
    UNROLL
    for (int c = 0; c < heads; c++) {
        if (c % (heads / 4) == 0) fetch(ahead, lines);
        const __m512 first = rounded_down(turned[0][c]), second = rounded_down(turned[1][c]);
        const __m512 first_rest = _mm512_sub_ps(turned[0][c], first), second_rest = _mm512_sub_ps(turned[1][c], second);
        _mm512_storeu_si512(weights->weights[c], (__m512i)_mm512_cvtne2ps_pbh(second, first));
        _mm512_storeu_si512(weights->rests[c], (__m512i)_mm512_cvtne2ps_pbh(second_rest, first_rest));
    }
    return beyond != 0;
}

/* ---------------------------------------------------------------- values */

/* One step of the values of all tokens: the even and the odd numbers, in pairs of tokens. */
INLINE void pair_values(const int heads, const Tile *tile, Ahead *ahead, int64_t at, __mmask32 mask,
                        char pairs[2][TILE / 2][LINE]) {
    const __mmask32 upper = 0xaaaaaaaau;
    UNROLL
    for (int pair = 0; pair < TILE / 2; pair++) {
        const int half = pair / (HALF / 2) * HALF, place = 2 * pair % HALF;
        const __m512i a = numbers_at(tile->values[half + token_at(heads, place)] + at, mask);
        const __m512i b = numbers_at(tile->values[half + token_at(heads, place + 1)] + at, mask);
        _mm512_store_si512(pairs[0][pair], _mm512_mask_blend_epi16(upper, a, _mm512_slli_epi32(b, 16)));
        _mm512_store_si512(pairs[1][pair], _mm512_mask_blend_epi16(upper, _mm512_srli_epi32(a, 16), b));
        if (pair % 8 == 3) fetch(ahead, 1);
    }
}

/* Adds a tile's weighted values to the sums of `heads` heads. */
INLINE void add_values(const int heads, const Job *job, const Tile *tile, Ahead *ahead, int64_t at,
                       const Weights *weights, float *sums) {
    const int64_t stride = job->steps * STEP * (int64_t)sizeof *sums;
    char pairs[2][TILE / 2][LINE] __attribute__((aligned(LINE)));
    MEMORY_IS_READ_OR_WRITTEN;
    _tile_loadd(WEIGHTS, weights->weights, LINE);
    _tile_loadd(RESTS, weights->rests, LINE);
    for (int64_t left = job->attend->head_dim; left > 0; left -= STEP, at += LINE) {
        pair_values(heads, tile, ahead, at, mask_of(left), pairs);
        MEMORY_IS_READ_OR_WRITTEN;
        UNROLL
        for (int half = 0; half < 2; half++, sums += LANES) {
            _tile_loadd(SUMS, sums, stride);
            _tile_loadd(VALUES, pairs[half], LINE);
            _tile_dpbf16ps(SUMS, WEIGHTS, VALUES);
            _tile_dpbf16ps(SUMS, RESTS, VALUES);
            fetch(ahead, 1);
            _tile_stored(SUMS, sums, stride);
        }
    }
    MEMORY_IS_READ_OR_WRITTEN;
}

INLINE void scale_sums(const int heads, const Job *job, const float *scaling, float *sums) {
    const int64_t numbers = job->steps * STEP;
    for (int c = 0; c < heads; c++)
        for (int64_t k = 0; k < numbers; k += LANES, sums += LANES)
            _mm512_storeu_ps(sums, _mm512_mul_ps(_mm512_loadu_ps(sums), _mm512_set1_ps(scaling[c])));
}

/* ---------------------------------------------------------------- a tile */

INLINE void attend_heads(const int heads, const Job *job, const Tile *tile, Ahead *keys, Ahead *values, int64_t at,
                         const float *queries, int64_t quad) {
    float scores[TILE * MOST_HEADS] __attribute__((aligned(LINE))), scaling[MOST_HEADS];
    Weights weights __attribute__((aligned(LINE)));
    score_amx(heads, job, tile, keys, at, queries, scores);
    if (weigh_amx(heads, job, keys, quad, scores, &weights, scaling))
        scale_sums(heads, job, scaling, sums_of(job, quad));
    add_values(heads, job, tile, values, at, &weights, sums_of(job, quad));
}

static TARGET void attend_head_amx(const Job *job, const Tile *tile, Ahead *keys, Ahead *values, Soon soon, int64_t at,
                                   const float *queries, int64_t quad) {
    (void)soon;
    if (job->quads == 1) {
        attend_heads(QUAD, job, tile, keys, values, at, queries, quad);
        return;
    }
    for (int64_t done = 0; done < job->quads; done += MOST_HEADS / QUAD)
        attend_heads(MOST_HEADS, job, tile, keys, values, at, queries + done * job->quad_floats, quad + done);
}

static const Loops loops_amx = {STEP, MOST_HEADS / QUAD, place_amx, attend_amx, attend_head_amx, merge_avx512_bfloat16};

#undef TARGET
#undef INLINE
#undef UNROLL
#undef LANES
#undef STEP
#undef HALF
#undef MOST_HEADS
#undef MARGIN
#undef SCORES
#undef MORE_SCORES
#undef KEYS
#undef QUERIES
#undef SUMS
#undef WEIGHTS
#undef RESTS
#undef VALUES
#undef SWAPPED
#undef SWAP_HALVES
#undef SWAP_QUARTERS
