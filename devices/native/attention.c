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
    LONG_SPAN = 256,   /* tokens; only of a sequence of MOST_SPANS a span is longer */
    MOST_SPANS = 32,   /* of a sequence */
    STREAMS = 8,       /* see `Ahead` */
    LINE = 64,         /* bytes of a cache line */
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
    int64_t quads;       /* of a key-value head's group; the last one is filled up with zeros */
    int64_t steps;       /* of a head; the last one is filled up with zeros */
    int64_t quad_floats; /* of the queries of a quad, and of its sums */
    Sequence *sequences;
    float *queries; /* of each sequence, of each key-value head, of each quad */
    /* Of each span, of each key-value head in it, of each quad, of each head in that: */
    float *sums;            /* values, weighted */
    float *highest, *total; /* score; sum of weights */
} Job;

/* The slots of neighbouring tokens in one sequence: their first keys and values. Up to TILE, the last one again. */
typedef struct {
    int64_t count;
    const char *keys[TILE], *values[TILE];
} Tile;

/* The keys or the values of the next tile, which the second-level cache gets while this one is computed: STREAMS lines at
 * a time, from places so far apart that the processor follows each of them on its own. One stream has half the
 * bandwidth. */
typedef struct {
    const char *const *slots;
    int64_t token;           /* of each stream */
    int64_t at, first, last; /* bytes in a slot */
} Ahead;

/* The keys that follow a head's, which the first-level cache gets while the head's values are computed. */
typedef struct {
    const char *const *slots;
    int64_t at;
} Soon;

/* A tile's place. */
typedef struct {
    const Sequence *sequence;
    int64_t span;        /* of all */
    int64_t token, last; /* its first token; where the span ends */
} Place;

/* The inner loops of an instruction set and a type of numbers. */
typedef struct Loops {
    int64_t step; /* numbers */
    int64_t quads_at_once; /* a group that has more than one is filled up to a multiple of these */
    Part place, attend;
    void (*attend_head)(const Job *job, const Tile *tile, Ahead *keys, Ahead *values, Soon soon, int64_t at,
                        const float *queries, int64_t quad);
    Part merge;
} Loops;

typedef struct {
    int64_t spans, tokens;
} Seen;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* The first quad of a key-value head in a span. */
static inline int64_t quad_of(const Job *job, int64_t span, int64_t head) {
    return (span * job->attend->kv_heads + head) * job->quads;
}

static inline float *sums_of(const Job *job, int64_t quad) { return job->sums + quad * job->quad_floats; }

static void clear(const Job *job, int64_t quad) {
    memset(sums_of(job, quad), 0, (size_t)(job->quads * job->quad_floats) * sizeof(float));
    for (int64_t i = quad * QUAD; i < (quad + job->quads) * QUAD; i++) {
        job->highest[i] = -FLT_MAX;
        job->total[i] = 0.0f;
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
            const int64_t quad = quad_of(job, span, head);
            if (place.token == begin) clear(job, quad);
            if (place.token + TILE >= place.sequence->last) store_new(job, place.sequence, head);
            const int same = head + 1 < last || !ahead; /* tile; its last head has nothing behind it without a next one */
            const Soon soon = {same ? tiles[side].keys : ahead->keys, head_bytes * (head + 1 < last ? head + 1 : first)};
            job->loops->attend_head(job, &tiles[side], &keys, &values, soon, head_bytes * head,
                                    job->queries + (sequence * kv_heads + head) * job->quads * job->quad_floats, quad);
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

#include "attention_sets.h"

/* ---------------------------------------------------------------- the parts of a call */

#define BOTH_TYPES(set) {&loops_##set##_float32, &loops_##set##_bfloat16}

/* By whether numbers are bfloat16. */
static const Loops *const loops[INSTRUCTION_SETS][2] = {
    [PORTABLE] = BOTH_TYPES(portable),
#if defined(__x86_64__)
    [AVX2] = BOTH_TYPES(avx2),
    [AVX512] = BOTH_TYPES(avx512),
    [AVX512_BF16] = {&loops_avx512_float32, &loops_avx512_bf16_bfloat16},
#if defined(HAS_AMX)
    [AMX_BF16] = {&loops_avx512_float32, &loops_amx},
#endif
#elif defined(__aarch64__)
    [NEON] = BOTH_TYPES(neon),
    [NEON_DOTPROD] = BOTH_TYPES(neon),
    [NEON_BF16] = BOTH_TYPES(neon),
#endif
};

/* Cuts a sequence into equal spans, which are 2, 4, 8 or so on, so that cores have as many each. */
static Sequence sequence_of(const Attend *attend, int64_t length, int64_t spans_before, const int64_t *blocks) {
    const int64_t first = attend->window && attend->window < length ? length - attend->window : 0;
    int64_t spans = 1;
    while (spans < MOST_SPANS && length - first > spans * LONG_SPAN) spans *= 2;
    const int64_t share = (length - first + spans - 1) / spans, span = (share + TILE - 1) / TILE * TILE;
    Sequence sequence = {first, length, span, 0, spans_before, blocks};
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

/* The least items that a thread takes at a time: a whole span, whose heads are neighbours in memory, if there are enough of
 * them for all threads; else as many neighbouring heads as there can be. */
static int64_t least_items(const Team *team, int64_t spans, int64_t kv_heads) {
    int64_t share = spans * kv_heads / threads_of(team);
    if (share >= kv_heads) return kv_heads;
    while (share > 1 && kv_heads % share) share--;
    return share > 1 ? share : 1;
}

/* Quads of a group, filled up to as many as are computed at once. */
static int64_t quads_of(const Attend *attend, const Loops *inner) {
    const int64_t quads = (attend->heads / attend->kv_heads + QUAD - 1) / QUAD, at_once = inner->quads_at_once;
    return quads == 1 ? 1 : (quads + at_once - 1) / at_once * at_once;
}

/* Gives the job its memory; 0 without any. */
static int give_memory(Job *job, int64_t groups, int64_t items) {
    const int64_t queries = groups * job->quads * job->quad_floats, parts = items * job->quads;
    const int64_t floats = queries + parts * (job->quad_floats + 2 * QUAD);
    char *memory = scratch(floats * (int64_t)sizeof(float) + (job->attend->sequences + 1) * (int64_t)sizeof(Sequence));
    if (!memory) return 0;
    job->queries = (float *)memory;
    job->sums = job->queries + queries;
    job->highest = job->sums + parts * job->quad_floats;
    job->total = job->highest + parts * QUAD;
    job->sequences = (Sequence *)(job->total + parts * QUAD);
    return 1;
}

/* Stores the new tokens, and attends. Returns 0, or -1 without memory. */
API int moesched_attend(Team *team, const Attend *attend) {
    const Loops *inner = loops[set_of(team)][attend->number_bytes == sizeof(uint16_t)];
    const int64_t kv_heads = attend->kv_heads, groups = attend->sequences * kv_heads;
    const int64_t heads = attend->sequences * attend->heads;
    const Seen seen = seen_by(attend);
    const int64_t items = seen.spans * kv_heads, steps = (attend->head_dim + inner->step - 1) / inner->step;
    Job job = {.attend = attend, .loops = inner, .quads = quads_of(attend, inner), .steps = steps,
               .quad_floats = QUAD * steps * inner->step};
    if (!give_memory(&job, groups, items)) return -1;
    cut(attend, job.sequences);
    Phase phases[] = {{inner->place, groups, 1, groups, 0},
                      {inner->attend, items, least_items(team, seen.spans, kv_heads), items, 0},
                      {inner->merge, heads, QUAD, heads, 0}};
    Task task = {&job, 3, phases};
    run(team, &task, 2 * seen.tokens * in_slot(attend, 1, 0));
    return 0;
}
