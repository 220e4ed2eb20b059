/* Products of a few rows by bfloat16 matrices, and whole experts, as fast as memory gives the weights.
 *
 * A plain shared library: no Python, no torch. The instruction set is chosen when it is loaded. Sums are float32.
 * `expert_kernel.py` documents the guarantees.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if !defined(__GNUC__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "needs a little-endian processor, and GCC or Clang"
#endif

enum {
    MOST_BATCH = 32,         /* rows of x in one call */
    MOST_COLUMNS = 6,        /* rows of x that are multiplied at once, in vectors */
    MOST_TILE_ROWS = 8,      /* rows of weights that are multiplied at once, in vectors */
    PANEL_BYTES = 64 << 10,  /* of x: stay in the second-level cache while rows of weights pass */
    AHEAD = 512,             /* inputs from a weight to the one that is prefetched meanwhile */
    WHOLE_TILES = 24,        /* a multiple of the rows of every tile, except AMX's */
    MOST_OUTPUTS = 2 * WHOLE_TILES, /* outputs that a thread takes at a time */
    CHUNKS = 4,              /* of each thread, at least, if there is enough work: shortens the wait for the last one */
    ALONE_BYTES = 128 << 10, /* up to this many bytes of weights, one thread computes alone */
    SPIN_NANOSECONDS = 50000,
};

typedef struct {
    const uint16_t *first;
    int64_t count;
} Rows;

/* x times the transpose of a matrix given as row blocks, top to bottom. x is stored as panels of a few rows, as equal
 * as possible: panel after panel, in each panel step after step, in each step row after row. */
typedef struct {
    int64_t batch, inputs, outputs;
    int64_t steps; /* of all inputs, the last one filled up with zeros */
    const Rows *blocks;
    char *x;
} Product;

typedef struct {
    int column, columns; /* its first row of x, and its number of rows */
} Panel;

/* A product (`last` alone), or an expert: its gate and up, then its down as `last`. */
typedef struct {
    Product gate, up, last;
    uint16_t *y;
} Job;

typedef struct {
    int64_t step, step_bytes;
    void (*place_row)(const Product *, int row, const uint16_t *x);
    void (*gate)(const Job *, int64_t first, int64_t last);
    void (*project)(const Job *, int64_t first, int64_t last);
} Variant;

typedef void (*Part)(const Job *, int64_t first, int64_t last);

/* The panel that a row of x is in: the first ones have a row more where the batch does not divide evenly. */
static inline Panel panel_of(const Product *product, int row, int most) {
    const int batch = (int)product->batch, panels = (batch + most - 1) / most;
    const int fewer = batch / panels, edge = batch % panels * (fewer + 1);
    if (row < edge) return (Panel){row / (fewer + 1) * (fewer + 1), fewer + 1};
    return (Panel){edge + (row - edge) / fewer * fewer, fewer};
}

/* ---------------------------------------------------------------- numbers */

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* To bfloat16, to nearest, ties to even. */
static inline uint16_t rounded(float value) {
    const uint32_t bits = to_bits(value);
    if (value != value) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* e^x to about 1e-7, as if x were at least -87, infinite from 88.4 on; the same bits wherever the compiler makes
 * vectors of it. */
static inline float exponential(float x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number in the lowest bits */
    x = x < -87.0f ? -87.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float shifted = x * 1.44269504f + shift;
    const float whole = shifted - shift;
    const float r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return p * from_bits((to_bits(shifted) + 127u) << 23);
}

static inline float silu(float x) { return x / (1.0f + exponential(-x)); }

/* ---------------------------------------------------------------- instruction sets */

/* Two neighbouring weights are one 32-bit word: the even one becomes a float by a shift, the odd one by a mask.
 * So a step of x has its even inputs first, then its odd ones, as floats. */
#define PLACE_WIDENED(step, k, bits)                                                                                  \
    do {                                                                                                              \
        const float placed = from_bits((uint32_t)(bits) << 16);                                                       \
        memcpy((step) + ((k) % 2 * (STEP / 2) + (k) / 2) * (int64_t)sizeof(float), &placed, sizeof placed);           \
    } while (0)
#define PLACE_PLAIN(step, k, bits)                                                                                    \
    do {                                                                                                              \
        const uint16_t placed = (bits);                                                                               \
        memcpy((step) + (k) * (int64_t)sizeof(uint16_t), &placed, sizeof placed);                                     \
    } while (0)

typedef float Float4 __attribute__((vector_size(16)));
typedef uint32_t Word4 __attribute__((vector_size(16)));

static inline Word4 words_at(const void *p) {
    Word4 words;
    memcpy(&words, p, sizeof words);
    return words;
}

#define ISA(name) name##_portable
#define TARGET
#define LANES 4
#define STEP 8
#define STEP_BYTES 32
#define TILE_ROWS(C) ((C) == 1 ? 4 : 2)
#define Sums Float4
#define HALVES 2
#define Vector Float4
#define WEIGHTS(p, half) ((Float4)((half) ? words_at(p) & 0xffff0000u : words_at(p) << 16))
#define INPUTS(x, half) ((Float4)words_at((x) + (half) * 16))
#define DOT(sums, w, x) sums += (w) * (x)
#define PLACE PLACE_WIDENED
#include "expert_tiles.h"

#if defined(__x86_64__)
#include <immintrin.h>

/* Twelve sums, three rows of weights and one of x are all sixteen registers: the mask stays in memory, and the order
 * of multiplications as it is written, or the compiler keeps sums in memory too. */
static const uint32_t odd_mask[8] __attribute__((aligned(32))) = {
    0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};

__attribute__((target("avx2,fma"), always_inline)) static inline __m256i odd_avx2(__m256i words) {
    __asm__ volatile("vpand %1, %0, %0" : "+x"(words) : "m"(*(const __m256i *)odd_mask));
    return words;
}

#define ISA(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define STEP 16
#define STEP_BYTES 64
#define TILE_ROWS(C) ((C) <= 2 ? 4 : (C) <= 4 ? 3 : 2)
#define Sums __m256
#define HALVES 2
#define Vector __m256
#define WORDS(p) _mm256_loadu_si256((const __m256i *)(p))
#define WEIGHTS(p, half) _mm256_castsi256_ps((half) ? odd_avx2(WORDS(p)) : _mm256_slli_epi32(WORDS(p), 16))
#define INPUTS(x, half) _mm256_load_ps((const float *)(x) + (half) * 8)
#define DOT(sums, w, x) __asm__ volatile("vfmadd231ps %1, %2, %0" : "+x"(sums) : "x"(w), "x"(x))
#define PLACE PLACE_WIDENED
#include "expert_tiles.h"

#define ISA(name) name##_avx512_bf16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define LANES 16
#define STEP 32
#define STEP_BYTES 64
#define TILE_ROWS(C) ((C) <= 2 ? 8 : 4)
#define Sums __m512
#define HALVES 1
#define Vector __m512i
#define WEIGHTS(p, half) _mm512_loadu_si512(p)
#define INPUTS(x, half) _mm512_load_si512(x)
#define DOT(sums, w, x) sums = _mm512_dpbf16_ps(sums, (__m512bh)(w), (__m512bh)(x))
#define PLACE PLACE_PLAIN
#include "expert_tiles.h"

#if defined(__linux__) && (__GNUC__ >= 11 || defined(__clang__)) /* those that know it */
#define HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include "expert_amx.h"

/* Whether the processor has AMX, and the system lets this process use it: a process has to ask. */
static int may_use_amx(void) {
    enum { TILES_AND_BF16 = 1 << 24 | 1 << 22, ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & TILES_AND_BF16) != TILES_AND_BF16) return 0;
    return !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}
#endif
#endif

#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define ISA(name) name##_neon
#define TARGET
#define LANES 4
#define STEP 8
#define STEP_BYTES 32
#define TILE_ROWS(C) ((C) <= 2 ? 8 : 4)
#define Sums float32x4_t
#define HALVES 2
#define Vector float32x4_t
#define WORDS(p) vreinterpretq_u32_u16(vld1q_u16(p))
#define WEIGHTS(p, half)                                                                                              \
    vreinterpretq_f32_u32((half) ? vandq_u32(WORDS(p), vdupq_n_u32(0xffff0000u)) : vshlq_n_u32(WORDS(p), 16))
#define INPUTS(x, half) vld1q_f32((const float *)(x) + (half) * 4)
#define DOT(sums, w, x) sums = vfmaq_f32(sums, w, x)
#define PLACE PLACE_WIDENED
#include "expert_tiles.h"

#define ISA(name) name##_neon_bf16
#define TARGET __attribute__((target(BF16_TARGET)))
#define LANES 4
#define STEP 8
#define STEP_BYTES 16
#define TILE_ROWS(C) ((C) <= 2 ? 8 : 4)
#define Sums float32x4_t
#define HALVES 1
#define Vector uint16x8_t
#define WEIGHTS(p, half) vld1q_u16(p)
#define INPUTS(x, half) vld1q_u16((const uint16_t *)(x))
#define DOT(sums, w, x) sums = vbfdotq_f32(sums, vreinterpretq_bf16_u16(w), vreinterpretq_bf16_u16(x))
#define PLACE PLACE_PLAIN
#if defined(__clang__)
#define BF16_TARGET "bf16"
#else
#define BF16_TARGET "arch=armv8.2-a+bf16"
#endif
#include "expert_tiles.h"

static int has_bfdot(void) {
#if defined(__linux__)
    return (getauxval(AT_HWCAP2) >> 14) & 1; /* HWCAP2_BF16 */
#elif defined(__APPLE__)
    int there = 0;
    size_t size = sizeof there;
    return sysctlbyname("hw.optional.arm.FEAT_BF16", &there, &size, NULL, 0) == 0 && there;
#else
    return 0;
#endif
}
#endif

typedef struct {
    const char *name;
    const Variant *variant;
    int here;
} Choice;

/* All variants that were compiled, best first. */
enum { MOST_CHOICES = 4 };
static int choices(Choice *into) {
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int avx512 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("avx512bw");
#if defined(HAS_AMX)
    into[count++] = (Choice){"amx_bf16", &variant_amx_bf16, may_use_amx()};
#endif
    into[count++] = (Choice){"avx512_bf16", &variant_avx512_bf16, avx512};
    into[count++] = (Choice){"avx2", &variant_avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")};
#elif defined(__aarch64__)
    into[count++] = (Choice){"neon_bf16", &variant_neon_bf16, has_bfdot()};
    into[count++] = (Choice){"neon", &variant_neon, 1};
#endif
    into[count++] = (Choice){"portable", &variant_portable, 1};
    return count;
}

/* The names of the instruction sets that can be used here, best first, with a blank between them. */
const char *moesched_variants(void) {
    static char names[64];
    Choice all[MOST_CHOICES];
    const int count = choices(all);
    names[0] = 0;
    for (int i = 0; i < count; i++)
        if (all[i].here) strcat(strcat(names, names[0] ? " " : ""), all[i].name);
    return names;
}

static const Variant *variant_named(const char *name) {
    Choice all[MOST_CHOICES];
    const int count = choices(all);
    for (int i = 0; i < count; i++)
        if (all[i].here && !strcmp(all[i].name, name)) return all[i].variant;
    return NULL;
}

/* ---------------------------------------------------------------- threads */

/* A job's parts come one after the other, each in chunks that threads take off a counter until none is left. */
typedef struct {
    Part part;
    int64_t outputs, chunk; /* number of all outputs, and of those in a chunk */
    _Atomic int64_t taken, done;
} Share;

typedef struct {
    const Job *job;
    int parts;
    Share shares[2];
} Task;

/* The threads that help the caller. A late helper finds the work done by the others: nobody waits for a
 * helper that has not begun. */
typedef struct {
    const Variant *variant;
    int helpers;
    pthread_t *threads;
    pid_t process; /* a forked child has no helpers */
    pthread_mutex_t calling; /* held by the caller that the helpers work for */
    pthread_mutex_t sleeping;
    pthread_cond_t wake;
    _Atomic(Task *) task;
    _Atomic uint64_t calls;
    _Atomic int inside, asleep, ending;
} Team;

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void wait_for(_Atomic int64_t *value, int64_t wanted) {
    for (int tries = 1; atomic_load(value) < wanted; tries++) {
        if (tries % 1024 == 0) sched_yield(); /* the thread with the last chunk may be waiting for this core */
        pause_briefly();
    }
}

static void work(Task *task) {
    for (Share *share = task->shares; share < task->shares + task->parts; share++) {
        int64_t first;
        while ((first = atomic_fetch_add(&share->taken, share->chunk)) < share->outputs) {
            const int64_t end = first + share->chunk, last = end < share->outputs ? end : share->outputs;
            share->part(task->job, first, last);
            atomic_fetch_add(&share->done, last - first);
        }
        wait_for(&share->done, share->outputs);
    }
}

/* Until there is another call than the ones seen. */
static void wait_for_call(Team *team, uint64_t seen) {
    const int64_t sleepy = nanoseconds() + SPIN_NANOSECONDS;
    while (atomic_load(&team->calls) == seen) {
        for (int i = 0; i < 32; i++) pause_briefly();
        if (nanoseconds() < sleepy) continue;
        pthread_mutex_lock(&team->sleeping);
        atomic_fetch_add(&team->asleep, 1);
        while (atomic_load(&team->calls) == seen) pthread_cond_wait(&team->wake, &team->sleeping);
        atomic_fetch_sub(&team->asleep, 1);
        pthread_mutex_unlock(&team->sleeping);
    }
}

static void *help(void *argument) {
    Team *team = argument;
    for (uint64_t seen = 0; !atomic_load(&team->ending); ) {
        wait_for_call(team, seen);
        seen = atomic_load(&team->calls);
        atomic_fetch_add(&team->inside, 1);
        Task *task = atomic_load(&team->task);
        if (task) work(task);
        atomic_fetch_sub(&team->inside, 1);
    }
    return NULL;
}

static void call_helpers(Team *team) {
    atomic_fetch_add(&team->calls, 1);
    if (atomic_load(&team->asleep)) {
        pthread_mutex_lock(&team->sleeping);
        pthread_cond_broadcast(&team->wake);
        pthread_mutex_unlock(&team->sleeping);
    }
}

static void run(Team *team, Task *task) {
    int64_t bytes = 0;
    const Job *job = task->job;
    bytes += (task->parts > 1 ? 2 * job->gate.inputs * job->gate.outputs : 0) + job->last.inputs * job->last.outputs;
    bytes *= (int64_t)sizeof(uint16_t);
    const int alone = !team->helpers || bytes <= ALONE_BYTES || team->process != getpid();
    if (alone || pthread_mutex_trylock(&team->calling)) {
        work(task);
        return;
    }
    atomic_store(&team->task, task);
    call_helpers(team);
    work(task);
    atomic_store(&team->task, NULL);
    while (atomic_load(&team->inside)) pause_briefly();
    pthread_mutex_unlock(&team->calling);
}

void moesched_free_team(Team *team) {
    if (team->process == getpid()) {
        atomic_store(&team->ending, 1);
        call_helpers(team);
        for (int i = 0; i < team->helpers; i++) pthread_join(team->threads[i], NULL);
    }
    pthread_cond_destroy(&team->wake);
    pthread_mutex_destroy(&team->sleeping);
    pthread_mutex_destroy(&team->calling);
    free(team->threads);
    free(team);
}

/* A team of the caller and `helpers` threads, which compute with the named instruction set; NULL if there is no such
 * set, or no memory. cores: the core that each helper is pinned to, or NULL. */
Team *moesched_new_team(const char *variant, int helpers, const int *cores) {
    const Variant *known = variant_named(variant);
    Team *team = known ? calloc(1, sizeof *team) : NULL;
    if (!team) return NULL;
    team->variant = known;
    team->process = getpid();
    pthread_mutex_init(&team->calling, NULL);
    pthread_mutex_init(&team->sleeping, NULL);
    pthread_cond_init(&team->wake, NULL);
    team->threads = calloc((size_t)helpers + 1, sizeof *team->threads);
    while (team->threads && team->helpers < helpers) {
        if (pthread_create(&team->threads[team->helpers], NULL, help, team)) break; /* fewer will do */
#if defined(__linux__)
        if (cores) {
            cpu_set_t one;
            CPU_ZERO(&one);
            CPU_SET(cores[team->helpers], &one);
            pthread_setaffinity_np(team->threads[team->helpers], sizeof one, &one);
        }
#endif
        team->helpers++;
    }
    return team;
}

/* ---------------------------------------------------------------- products */

static int64_t scratch_bytes(const Variant *variant, const Product *product) {
    const int64_t bytes = product->batch * product->steps * variant->step_bytes;
    return (bytes + 63) / 64 * 64;
}

static Product product_of(const Variant *variant, int64_t batch, int64_t inputs, int64_t outputs, const Rows *blocks) {
    const int64_t steps = (inputs + variant->step - 1) / variant->step;
    return (Product){batch, inputs, outputs, steps, blocks, NULL};
}

static void give_scratch(const Variant *variant, Product *product, char *memory) {
    product->x = memory;
    if (product->inputs % variant->step) memset(memory, 0, (size_t)scratch_bytes(variant, product));
}

static void place_rows(const Variant *variant, const Product *product, const uint16_t *x, int64_t stride) {
    for (int row = 0; row < product->batch; row++) variant->place_row(product, row, x + row * stride);
}

/* Outputs that a thread takes at a time: whole tiles, as long as there are any. */
static int64_t chunk_of(const Team *team, int64_t outputs) {
    const int64_t share = outputs / (CHUNKS * (team->helpers + 1)) / WHOLE_TILES * WHOLE_TILES;
    return share < WHOLE_TILES ? WHOLE_TILES : share > MOST_OUTPUTS ? MOST_OUTPUTS : share;
}

int moesched_most_batch(void) { return MOST_BATCH; }

/* y (batch, outputs) = x (batch, inputs) times the transpose of the matrix (outputs, inputs) in row blocks.
 * All are bfloat16; rows of x are `stride` numbers apart, those of y follow each other. Returns 0, or -1 without
 * memory. */
int moesched_product(Team *team, int64_t batch, int64_t inputs, int64_t outputs, const uint16_t *x, int64_t stride,
                     const Rows *blocks, uint16_t *y) {
    const Variant *variant = team->variant;
    Job job = {.last = product_of(variant, batch, inputs, outputs, blocks), .y = y};
    char *memory = aligned_alloc(64, (size_t)scratch_bytes(variant, &job.last));
    if (!memory) return -1;
    give_scratch(variant, &job.last, memory);
    place_rows(variant, &job.last, x, stride);
    Task task = {.job = &job, .parts = 1, .shares = {{variant->project, outputs, chunk_of(team, outputs), 0, 0}}};
    run(team, &task);
    free(memory);
    return 0;
}

/* y (batch, hidden) = down(silu(gate x) * up x), of matrices (width, hidden), (width, hidden) and (hidden, width). */
int moesched_expert(Team *team, int64_t batch, int64_t hidden, int64_t width, const uint16_t *x, int64_t stride,
                    const Rows *gate, const Rows *up, const Rows *down, uint16_t *y) {
    const Variant *variant = team->variant;
    Job job = {.gate = product_of(variant, batch, hidden, width, gate),
               .up = product_of(variant, batch, hidden, width, up),
               .last = product_of(variant, batch, width, hidden, down),
               .y = y};
    const int64_t before = scratch_bytes(variant, &job.gate);
    char *memory = aligned_alloc(64, (size_t)(before + scratch_bytes(variant, &job.last)));
    if (!memory) return -1;
    give_scratch(variant, &job.gate, memory);
    give_scratch(variant, &job.last, memory + before);
    job.up.x = job.gate.x;
    place_rows(variant, &job.gate, x, stride);
    Task task = {.job = &job,
                 .parts = 2,
                 .shares = {{variant->gate, width, chunk_of(team, width), 0, 0},
                            {variant->project, hidden, chunk_of(team, hidden), 0, 0}}};
    run(team, &task);
    free(memory);
    return 0;
}
