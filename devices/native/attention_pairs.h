/* Scores of bfloat16 keys with AVX512_BF16, in place of those in attention_loops.h: products of pairs of numbers.
 *
 * A register has a quarter for each head of a quad, all with the same four pairs of a token's keys: so the sums of few
 * lanes remain to be added. On Zen 4 pairs have twice the rate of float32 products.
 */
enum {
    CHUNK = 8,                     /* numbers of a head in a register */
    SHARE = TOKENS * CHUNK / STEP, /* lines of values that the first-level cache gets during a chunk */
};

/* Puts queries where `score` looks for them: of each quad, chunk after chunk, in each chunk head after head. */
static TARGET void NAME(place)(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const Attend *attend = job->attend;
    const int64_t kv_heads = attend->kv_heads, group = attend->heads / kv_heads, size = attend->head_dim;
    for (int64_t item = first; item < last; item++) {
        float *placed = job->queries + item * job->quads * job->quad_floats;
        const uint16_t *query = (const uint16_t *)attend->queries + item / kv_heads * attend->query_stride +
                                item % kv_heads * group * size;
        memset(placed, 0, (size_t)(job->quads * job->quad_floats) * sizeof *placed);
        for (int64_t head = 0; head < group; head++, query += size) {
            uint16_t *to = (uint16_t *)(placed + head / QUAD * job->quad_floats) + head % QUAD * CHUNK;
            for (int64_t k = 0; k < size; k += CHUNK, to += QUAD * CHUNK)
                memcpy(to, query + k, (size_t)smaller(CHUNK, size - k) * sizeof *to);
        }
    }
}

/* Adds the products of CHUNK numbers from k on, or of as many as are left. */
INLINE void NAME(score_chunk)(const int quads, const uint16_t *const keys[TOKENS], int64_t k, int64_t left,
                              const float *const queries[], __m512 sums[][TOKENS]) {
    UNROLL
    for (int i = 0; i < TOKENS; i++) {
        __m128i chunk = _mm_setzero_si128();
        memcpy(&chunk, keys[i] + k, (size_t)left * sizeof(uint16_t));
        const __m512i pairs = _mm512_broadcast_i32x4(chunk);
        UNROLL
        for (int q = 0; q < quads; q++) {
            const __m512i query = _mm512_loadu_si512(queries[q] + k / CHUNK * LANES);
            sums[q][i] = _mm512_dpbf16_ps(sums[q][i], (__m512bh)pairs, (__m512bh)query);
        }
    }
}

/* Scores of TOKENS tokens for `quads` quads, from token t of a tile on: scores[quad][token][head]. at: of the head, in
 * the slots. */
INLINE void NAME(score_tokens)(const int quads, const Job *job, const Tile *tile, int64_t t, Ahead *ahead, int64_t at,
                               const float *placed, float scores[][TILE * QUAD]) {
    const __m512i turned = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512 scale = _mm512_set1_ps((float)job->attend->scale);
    const int64_t size = job->attend->head_dim;
    const uint16_t *keys[TOKENS];
    const float *queries[MOST_QUADS];
    __m512 sums[MOST_QUADS][TOKENS];
    UNROLL
    for (int i = 0; i < TOKENS; i++) keys[i] = (const uint16_t *)(tile->keys[t + i] + at);
    UNROLL
    for (int q = 0; q < quads; q++) {
        queries[q] = placed + q * job->quad_floats;
        UNROLL
        for (int i = 0; i < TOKENS; i++) sums[q][i] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < size; k += CHUNK) {
        if (k % STEP == 0) fetch(ahead, lines_of(TOKENS * LINE));
        UNROLL
        for (int i = 0; i < SHARE; i++)
            __builtin_prefetch(tile->values[t + k % STEP / CHUNK * SHARE + i] + at + k / STEP * LINE, 0, 3);
        if (size - k < CHUNK)
            NAME(score_chunk)(quads, keys, k, size - k, queries, sums);
        else
            NAME(score_chunk)(quads, keys, k, CHUNK, queries, sums);
    }
    UNROLL
    for (int q = 0; q < quads; q++)
        UNROLL
        for (int i = 0; i < TOKENS; i += QUAD) {
            const __m512 of_tokens = _mm512_permutexvar_ps(turned, quad_sums_avx512(sums[q] + i));
            _mm512_storeu_ps(scores[q] + (t + i) * QUAD, _mm512_mul_ps(of_tokens, scale));
        }
}
