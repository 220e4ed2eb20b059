/* Attention of one new token per sequence over a KV cache in blocks, as fast as memory gives keys and values.
 *
 * A sequence is cut into spans of tokens, whose number depends on its length alone. Each span of a key-value head is
 * attended to on its own, by all query heads of its group, four at a time; then its parts are merged in order (the
 * online softmax of Milakov and Gimelshein, 2018; spans as in Flash-Decoding). Sums are float32. So a sequence's bits
 * depend on the instruction set alone: not on the other sequences, the blocks that hold it, or the number of threads.
 */
#include "attention.h"

#include <float.h>
#include <math.h>

#include "numbers.h"
#include "scratch.h"

enum {
    QUAD = 4,          /* query heads that are computed together */
    TILE = 32,         /* tokens whose scores are computed together: their keys and values stay in the first caches */
    LEAST_SPAN = 256,  /* tokens */
    MOST_SPANS = 32,   /* of a sequence */
    STREAMS = 8,       /* see `Ahead` */
    LINE = 64,         /* bytes of a cache line */
    CHUNKS = 4,        /* of each thread, at least, if there is enough work */
};

/* The tokens that a sequence's query sees, in spans. */
typedef struct {
    int64_t first, last;
    int64_t span, spans;
    int64_t spans_before; /* of earlier sequences */
    const int64_t *blocks;
} Sequence;

typedef struct {
    const Attend *attend;
    const struct Loops *loops;
    int64_t quads;        /* of a key-value head's group; the last one is filled up with zeros */
    int64_t steps;        /* of a head; the last one is filled up with zeros */
    int64_t quad_floats;  /* of the queries of a quad */
    int64_t part_floats;  /* of a quad */
    Sequence *sequences;
    float *queries; /* of each sequence, of each key-value head, of each quad */
    float *parts; /* of each span, of each key-value head in it, of each quad */
} Job;

/* What a quad has of a span. */
typedef struct {
    float highest[QUAD], total[QUAD]; /* score; sum of weights */
    float sums[]; /* of values, weighted: head after head */
} Part4;

/* The slots of neighbouring tokens in one sequence: their first keys and values. Up to TILE, the last one again. */
typedef struct {
    int64_t count;
    const char *keys[TILE], *values[TILE];
} Tile;

/* The keys or the values of the next tile, which are prefetched while this one is computed: STREAMS lines at a time,
 * from places so far apart that the processor follows each of them on its own. One stream has half the bandwidth. */
typedef struct {
    const char *const *slots;
    int64_t token;           /* of each stream */
    int64_t at, first, last; /* bytes in a slot */
} Ahead;

/* A tile's place. */
typedef struct {
    const Sequence *sequence;
    int64_t span;        /* of all */
    int64_t token, last; /* its first token; where the span ends */
} Place;

/* The inner loops of an instruction set and a type of numbers. */
typedef struct Loops {
    int64_t step; /* numbers */
    Part place;
    void (*attend_head)(const Job *job, const Tile *tile, Ahead *keys, Ahead *values, int64_t at, const float *queries,
                        Part4 *part);
    Part merge;
} Loops;

typedef struct {
    int64_t spans, tokens;
} Seen;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline Part4 *parts_after(const Job *job, Part4 *part, int64_t quads) {
    return (Part4 *)((float *)part + quads * job->part_floats);
}

static inline Part4 *part_of(const Job *job, int64_t item) {
    return parts_after(job, (Part4 *)job->parts, item * job->quads);
}

static inline void clear(const Job *job, Part4 *part) {
    for (int64_t quad = 0; quad < job->quads; quad++, part = parts_after(job, part, 1)) {
        memset(part, 0, (size_t)job->part_floats * sizeof(float));
        for (int c = 0; c < QUAD; c++) part->highest[c] = -FLT_MAX;
    }
}

/* The beginning of a span. */
static Place place_of(const Job *job, int64_t span) {
    const Sequence *sequence = job->sequences;
    while (span >= sequence->spans_before + sequence->spans) sequence++;
    const int64_t first = sequence->first + (span - sequence->spans_before) * sequence->span;
    return (Place){sequence, span, first, smaller(first + sequence->span, sequence->last)};
}

/* To the next tile; beyond the span before `end`, too. */
static Place next_place(const Job *job, Place place, int64_t end) {
    place.token += TILE;
    if (place.token < place.last) return place;
    place.span++;
    return place.span < end ? place_of(job, place.span) : place;
}

/* The byte of a head in a slot. */
static inline int64_t in_slot(const Attend *attend, int64_t slot, int64_t head) {
    return (slot * attend->kv_heads + head) * attend->head_dim * attend->number_bytes;
}

static inline int64_t slot_of(const Attend *attend, const Sequence *sequence, int64_t token) {
    return sequence->blocks[token / attend->block_size] * attend->block_size + token % attend->block_size;
}

static void find_tile(const Attend *attend, const Place *place, Tile *tile) {
    const int64_t slot_bytes = in_slot(attend, 1, 0), count = smaller(TILE, place->last - place->token);
    tile->count = count;
    for (int64_t i = 0; i < count;) {
        const int64_t token = place->token + i, rest = attend->block_size - token % attend->block_size;
        int64_t at = in_slot(attend, slot_of(attend, place->sequence, token), 0);
        for (const int64_t end = smaller(count, i + rest); i < end; i++, at += slot_bytes) {
            tile->keys[i] = attend->keys + at;
            tile->values[i] = attend->values + at;
        }
    }
    for (int64_t i = count; i < TILE; i++) {
        tile->keys[i] = tile->keys[count - 1];
        tile->values[i] = tile->values[count - 1];
    }
}

/* Stores a head of a sequence's new token in the cache. */
static void store_new(const Job *job, const Sequence *sequence, int64_t head) {
    const Attend *attend = job->attend;
    const int64_t bytes = in_slot(attend, 0, 1), to = in_slot(attend, slot_of(attend, sequence, sequence->last - 1), head);
    const int64_t from = (sequence - job->sequences) * attend->new_stride * attend->number_bytes + head * bytes;
    memcpy(attend->keys + to, attend->new_keys + from, (size_t)bytes);
    memcpy(attend->values + to, attend->new_values + from, (size_t)bytes);
}

static inline Ahead ahead_of(const char *const *slots, int64_t first, int64_t last) {
    return (Ahead){slots, slots ? 0 : TILE, first, first, last};
}

/* The lines of each stream, of all that many bytes. */
static inline int64_t lines_of(int64_t bytes) { return (bytes + LINE * STREAMS - 1) / (LINE * STREAMS); }

/* Prefetches the next lines of each stream, `lines` of them. */
static inline void fetch(Ahead *ahead, int64_t lines) {
    for (; lines && ahead->token < TILE / STREAMS; lines--) {
        const char *const *slots = ahead->slots + ahead->token;
        for (int64_t stream = 0; stream < STREAMS; stream++)
            __builtin_prefetch(slots[stream * (TILE / STREAMS)] + ahead->at, 0, 2);
        ahead->at += LINE;
        if (ahead->at < ahead->last) continue;
        ahead->at = ahead->first;
        ahead->token++;
    }
}

/* ---------------------------------------------------------------- the inner loops */

#define JOINED(a, b) a##_##b
#define SUFFIXED(a, b) JOINED(a, b)

typedef float Float4 __attribute__((vector_size(16)));
typedef uint32_t Word4 __attribute__((vector_size(16)));

static inline Float4 floats_at(const void *p) {
    Float4 floats;
    memcpy(&floats, p, sizeof floats);
    return floats;
}

static inline void store_floats(float *p, Float4 floats) { memcpy(p, &floats, sizeof floats); }

static inline Float4 larger_floats(Float4 a, Float4 b) {
    const Word4 first = (Word4)(a > b);
    return (Float4)((first & (Word4)a) | (~first & (Word4)b));
}

static inline void add_lanes_portable(const Float4 sums[][QUAD], float *out) {
    for (int i = 0; i < 2 * QUAD; i++) {
        const Float4 s = sums[i / QUAD][i % QUAD];
        out[i] = (s[0] + s[2]) + (s[1] + s[3]);
    }
}

#define SET portable
#define TARGET
#define LANES 4
#define TOKENS 2
#define MOST_QUADS 1
#define Floats Float4
#define LOADED(p) floats_at(p)
#define STORE(p, v) store_floats(p, v)
#define EVERY(x) ((Float4){x, x, x, x})
#define LARGER(a, b) larger_floats(a, b)
#define ADD_PRODUCT(sums, a, b) sums += (a) * (b)
#define EVEN(p) ((Float4)((Word4)floats_at(p) << 16))
#define ODD(p) ((Float4)((Word4)floats_at(p) & 0xffff0000u))
#define ADD_LANES add_lanes_portable
#include "attention_types.h"

#if defined(__x86_64__)
#include <immintrin.h>


/* The sums of a quad's lanes, in each half of a register. */
__attribute__((target("avx2,fma"), always_inline)) static inline __m256 quad_sums_avx2(const __m256 sums[QUAD]) {
    const __m256 a = _mm256_add_ps(_mm256_unpacklo_ps(sums[0], sums[1]), _mm256_unpackhi_ps(sums[0], sums[1]));
    const __m256 b = _mm256_add_ps(_mm256_unpacklo_ps(sums[2], sums[3]), _mm256_unpackhi_ps(sums[2], sums[3]));
    return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
}

__attribute__((target("avx2,fma"), always_inline)) static inline void add_lanes_avx2(const __m256 sums[][QUAD], float *out) {
    const __m256 a = quad_sums_avx2(sums[0]), b = quad_sums_avx2(sums[1]);
    _mm256_storeu_ps(out, _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)));
}

#define SET avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define TOKENS 2
#define MOST_QUADS 1
#define Floats __m256
#define LOADED(p) _mm256_loadu_ps((const float *)(p))
#define STORE(p, v) _mm256_storeu_ps(p, v)
#define EVERY(x) _mm256_set1_ps(x)
#define LARGER(a, b) _mm256_max_ps(a, b)
#define ADD_PRODUCT(sums, a, b) sums = _mm256_fmadd_ps(a, b, sums)
#define WORDS(p) _mm256_loadu_si256((const __m256i *)(p))
#define EVEN(p) _mm256_castsi256_ps(_mm256_slli_epi32(WORDS(p), 16))
#define ODD(p) _mm256_castsi256_ps(_mm256_and_si256(WORDS(p), _mm256_set1_epi32((int)0xffff0000u)))
#define ADD_LANES add_lanes_avx2
#include "attention_types.h"
#undef WORDS


/* The sums of a quad's lanes, in each quarter of a register. */
__attribute__((target("avx512f"), always_inline)) static inline __m512 quad_sums_avx512(const __m512 sums[QUAD]) {
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]), _mm512_unpackhi_ps(sums[0], sums[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]), _mm512_unpackhi_ps(sums[2], sums[3]));
    return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
}

__attribute__((target("avx512f"), always_inline)) static inline __m512 halved_avx512(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

__attribute__((target("avx512f"), always_inline)) static inline void add_lanes_avx512(const __m512 sums[][QUAD], float *out) {
    const __m512 a = halved_avx512(quad_sums_avx512(sums[0]), quad_sums_avx512(sums[1]));
    const __m512 b = halved_avx512(quad_sums_avx512(sums[2]), quad_sums_avx512(sums[3]));
    _mm512_storeu_ps(out, halved_avx512(a, b));
}

#define SET avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl")))
#define LANES 16
#define TOKENS 4
#define MOST_QUADS 2
#define Floats __m512
#define LOADED(p) _mm512_loadu_ps(p)
#define STORE(p, v) _mm512_storeu_ps(p, v)
#define EVERY(x) _mm512_set1_ps(x)
#define LARGER(a, b) _mm512_max_ps(a, b)
#define ADD_PRODUCT(sums, a, b) sums = _mm512_fmadd_ps(a, b, sums)
#define WORDS(p) _mm512_loadu_si512(p)
#define EVEN(p) _mm512_castsi512_ps(_mm512_slli_epi32(WORDS(p), 16))
#define ODD(p) _mm512_castsi512_ps(_mm512_and_si512(WORDS(p), _mm512_set1_epi32((int)0xffff0000u)))
#define ADD_LANES add_lanes_avx512
#include "attention_types.h"
#undef WORDS
#endif

#if defined(__aarch64__)
#include <arm_neon.h>

static inline void add_lanes_neon(const float32x4_t sums[][QUAD], float *out) {
    for (int r = 0; r < 4; r++) {
        const float32x4_t a = vpaddq_f32(sums[r][0], sums[r][1]), b = vpaddq_f32(sums[r][2], sums[r][3]);
        vst1q_f32(out + r * QUAD, vpaddq_f32(a, b));
    }
}

#define WORDS(p) vreinterpretq_u32_u8(vld1q_u8((const uint8_t *)(p)))

#define SET neon
#define TARGET
#define LANES 4
#define TOKENS 4
#define MOST_QUADS 2
#define Floats float32x4_t
#define LOADED(p) vld1q_f32((const float *)(p))
#define STORE(p, v) vst1q_f32(p, v)
#define EVERY(x) vdupq_n_f32(x)
#define LARGER(a, b) vmaxq_f32(a, b)
#define ADD_PRODUCT(sums, a, b) sums = vfmaq_f32(sums, a, b)
#define EVEN(p) vreinterpretq_f32_u32(vshlq_n_u32(WORDS(p), 16))
#define ODD(p) vreinterpretq_f32_u32(vandq_u32(WORDS(p), vdupq_n_u32(0xffff0000u)))
#define ADD_LANES add_lanes_neon
#include "attention_types.h"
#endif

/* ---------------------------------------------------------------- the parts of a call */

#define BOTH_TYPES(set) {&loops_##set##_float32, &loops_##set##_bfloat16}

/* By whether numbers are bfloat16. Products of pairs of bfloat16 numbers are not faster here: see docs/design.md. */
static const Loops *const loops[INSTRUCTION_SETS][2] = {
    [PORTABLE] = BOTH_TYPES(portable),
#if defined(__x86_64__)
    [AVX2] = BOTH_TYPES(avx2),
    [AVX512] = BOTH_TYPES(avx512),
    [AVX512_BF16] = BOTH_TYPES(avx512),
    [AMX_BF16] = BOTH_TYPES(avx512),
#elif defined(__aarch64__)
    [NEON] = BOTH_TYPES(neon),
    [NEON_BF16] = BOTH_TYPES(neon),
#endif
};

/* Cuts a sequence into spans. */
static Sequence sequence_of(const Attend *attend, int64_t length, int64_t spans_before, const int64_t *blocks) {
    const int64_t first = attend->window && attend->window < length ? length - attend->window : 0;
    const int64_t share = (length - first + MOST_SPANS - 1) / MOST_SPANS, span = (share + TILE - 1) / TILE * TILE;
    Sequence sequence = {first, length, span < LEAST_SPAN ? LEAST_SPAN : span, 0, spans_before, blocks};
    sequence.spans = (length - first + sequence.span - 1) / sequence.span;
    return sequence;
}

/* Cuts all sequences. An empty sequence marks the end. */
static void cut(const Attend *attend, Sequence *sequences) {
    const int64_t *blocks = attend->blocks;
    int64_t spans = 0;
    for (int64_t i = 0; i < attend->sequences; i++) {
        sequences[i] = sequence_of(attend, attend->lengths[i], spans, blocks);
        spans += sequences[i].spans;
        blocks += (attend->lengths[i] + attend->block_size - 1) / attend->block_size;
    }
    sequences[attend->sequences] = (Sequence){.spans_before = spans};
}

/* Spans and tokens that queries see, of all sequences. */
static Seen seen_by(const Attend *attend) {
    Seen seen = {0, 0};
    for (int64_t i = 0; i < attend->sequences; i++) {
        const Sequence sequence = sequence_of(attend, attend->lengths[i], 0, NULL);
        seen.spans += sequence.spans;
        seen.tokens += sequence.last - sequence.first;
    }
    return seen;
}

/* Heads [first, last) of the span that begins at `place`, tile by tile; spans before `end` will follow. */
static void attend_span(const Job *job, Place place, int64_t first, int64_t last, int64_t end) {
    const int64_t kv_heads = job->attend->kv_heads, span = place.span, begin = place.token;
    const int64_t sequence = place.sequence - job->sequences, head_bytes = in_slot(job->attend, 0, 1);
    Tile tiles[2];
    find_tile(job->attend, &place, &tiles[0]);
    for (int side = 0; place.span == span; side = !side) {
        const Place next = next_place(job, place, end);
        Tile *ahead = next.span < end ? &tiles[!side] : NULL;
        if (ahead) find_tile(job->attend, &next, ahead);
        Ahead keys = ahead_of(ahead ? ahead->keys : NULL, head_bytes * first, head_bytes * last);
        Ahead values = ahead_of(ahead ? ahead->values : NULL, head_bytes * first, head_bytes * last);
        for (int64_t head = first; head < last; head++) {
            Part4 *part = part_of(job, span * kv_heads + head);
            if (place.token == begin) clear(job, part);
            if (place.token + TILE >= place.sequence->last) store_new(job, place.sequence, head);
            job->loops->attend_head(job, &tiles[side], &keys, &values, head_bytes * head,
                                    job->queries + (sequence * kv_heads + head) * job->quads * job->quad_floats, part);
        }
        place = next;
    }
}

/* Items are the key-value heads of the first span, then those of the second one, and so on. */
static void attend_items(void *argument, int64_t first, int64_t last) {
    const Job *job = argument;
    const int64_t kv_heads = job->attend->kv_heads, end = (last + kv_heads - 1) / kv_heads;
    while (first < last) {
        const int64_t span = first / kv_heads, stop = smaller((span + 1) * kv_heads, last);
        attend_span(job, place_of(job, span), first - span * kv_heads, stop - span * kv_heads, end);
        first = stop;
    }
}

/* Items that a thread takes at a time: whole spans, whose heads are neighbours in memory, if there are enough of them
 * for all threads; else single heads. */
static int64_t items_at_once(const Team *team, int64_t spans, int64_t kv_heads) {
    const int64_t share = spans / (CHUNKS * threads_of(team));
    return share ? share * kv_heads : 1;
}

/* Stores the new tokens, and attends. Returns 0, or -1 without memory. */
API int moesched_attend(Team *team, const Attend *attend) {
    const Loops *inner = loops[set_of(team)][attend->number_bytes == sizeof(uint16_t)];
    const int64_t kv_heads = attend->kv_heads, groups = attend->sequences * kv_heads;
    const Seen seen = seen_by(attend);
    Job job = {.attend = attend, .loops = inner, .quads = (attend->heads / kv_heads + QUAD - 1) / QUAD};
    job.steps = (attend->head_dim + inner->step - 1) / inner->step;
    job.quad_floats = QUAD * job.steps * inner->step;
    job.part_floats = job.quad_floats + (int64_t)(sizeof(Part4) / sizeof(float));
    const int64_t items = seen.spans * kv_heads;
    const int64_t floats = job.quads * (groups * job.quad_floats + items * job.part_floats);
    job.queries = (float *)scratch(floats * (int64_t)sizeof(float) +
                                   (attend->sequences + 1) * (int64_t)sizeof(Sequence));
    if (!job.queries) return -1;
    job.parts = job.queries + groups * job.quads * job.quad_floats;
    job.sequences = (Sequence *)(job.queries + floats);
    cut(attend, job.sequences);
    Task task = {&job,
                 3,
                 {{inner->place, groups, 1, 0, 0},
                  {attend_items, items, items_at_once(team, seen.spans, kv_heads), 0, 0},
                  {inner->merge, attend->sequences * attend->heads, QUAD, 0, 0}}};
    run(team, &task, 2 * seen.tokens * in_slot(attend, 1, 0));
    return 0;
}
