// Two loops that bound every kernel: one only reads memory, the other only multiplies and adds.
// Each runs on several threads that begin together, on a core each; the time is from then until the last one ends, by any
// clock.

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#define AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

enum { MOST_THREADS = 256, STREAMS = 4, WORDS = 32, LINE = 8, AHEAD = 128 };

typedef struct {
    void (*work)(const void *task, int thread, int threads);
    const void *task;
    int thread, threads;
    clockid_t clock;
    atomic_int *missing;
    double begun, ended;
} Member;

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void work_together(Member *m) {
    atomic_fetch_sub(m->missing, 1);
    while (atomic_load(m->missing) > 0) sched_yield();
    m->begun = now(m->clock);
    m->work(m->task, m->thread, m->threads);
    m->ended = now(m->clock);
}

#if defined(__linux__)
// Keeps the calling thread on the core of that number among the allowed ones, if there are as many as threads.
static void take_core(const Member *m, const cpu_set_t *allowed) {
    int core = -1;
    cpu_set_t own;
    if (m->threads == 1 || m->threads > CPU_COUNT(allowed)) return;
    for (int left = m->thread; left >= 0;) left -= CPU_ISSET(++core, allowed) != 0;
    CPU_ZERO(&own);
    CPU_SET(core, &own);
    sched_setaffinity(0, sizeof own, &own);
}
#endif

static void *member(void *argument) {
#if defined(__linux__)
    cpu_set_t allowed;
    const int known = !sched_getaffinity(0, sizeof allowed, &allowed);
    if (known) take_core(argument, &allowed);
    work_together(argument);
    if (known) sched_setaffinity(0, sizeof allowed, &allowed);
#else
    work_together(argument);
#endif
    return NULL;
}

// Seconds of the work on all threads, or -1 if that is no number of threads.
static double together(void (*work)(const void *, int, int), const void *task, int threads, int clock) {
    pthread_t handles[MOST_THREADS];
    Member members[MOST_THREADS];
    atomic_int missing = threads;
    if (threads < 1 || threads > MOST_THREADS) return -1;
    for (int t = 0; t < threads; t++) {
        members[t] = (Member){work, task, t, threads, (clockid_t)clock, &missing, 0, 0};
        if (t && pthread_create(&handles[t], NULL, member, &members[t])) abort();
    }
    member(&members[0]);
    double begun = members[0].begun, ended = members[0].ended;
    for (int t = 1; t < threads; t++) {
        pthread_join(handles[t], NULL);
        if (members[t].begun < begun) begun = members[t].begun;
        if (members[t].ended > ended) ended = members[t].ended;
    }
    return ended - begun;
}

// ---------------------------------------------------------------- reading

typedef struct {
    const uint64_t *const *pieces;
    const size_t *words;
    int count;
} Reading;

static volatile uint64_t sink;

// Each thread reads its part of each piece as several streams at once, and prefetches them a little ahead: one alone does
// not fill the memory's queues.
static void read_part(const void *task, int thread, int threads) {
    const Reading *reading = task;
    uint64_t sums[WORDS] = {0};
    for (int p = 0; p < reading->count; p++) {
        size_t stream = reading->words[p] / threads / STREAMS / WORDS * WORDS;
        const uint64_t *first = reading->pieces[p] + thread * stream * STREAMS;
        for (size_t i = 0; i < stream; i += WORDS)
            for (int s = 0; s < STREAMS; s++) {
                const uint64_t *words = first + s * stream + i;
                for (int k = 0; k < WORDS; k += LINE) __builtin_prefetch(words + AHEAD + k);
                for (int k = 0; k < WORDS; k++) sums[k] += words[k];
            }
    }
    uint64_t sum = 0;
    for (int k = 0; k < WORDS; k++) sum += sums[k];
    sink = sum;
}

// Seconds of reading these pieces once on all threads.
double read_seconds(const uint64_t *const *pieces, const size_t *words, int count, int threads, int clock) {
    Reading reading = {pieces, words, count};
    return together(read_part, &reading, threads, clock);
}

// ---------------------------------------------------------------- multiplying

// Rounds of independent sums of products, which stay in registers. Each function returns the FLOP that it did.

enum { SUMS = 12 };

typedef float Float4 __attribute__((vector_size(16)));

#if defined(__aarch64__)
#define REGISTER "+w"
#elif defined(__x86_64__)
#define REGISTER "+x"
#else
#define REGISTER "+m"
#endif

#define MULTIPLY(NAME, Sum, Factor, ADD_PRODUCT, FLOP)                                                                 \
    static double NAME(int64_t rounds) {                                                                               \
        static const Factor zeros[2];                                                                                  \
        Factor a = zeros[0], b = zeros[1];                                                                             \
        Sum sums[SUMS] = {0};                                                                                          \
        for (int64_t i = 0; i < rounds; i++) {                                                                         \
            _Pragma("GCC unroll 12") for (int s = 0; s < SUMS; s++) sums[s] = ADD_PRODUCT(sums[s], a, b);              \
            _Pragma("GCC unroll 12") for (int s = 0; s < SUMS; s++) __asm__ volatile("" : REGISTER(sums[s]));          \
        }                                                                                                              \
        return (double)rounds * SUMS * (FLOP);                                                                         \
    }

#define ADD_PRODUCT(sum, a, b) ((sum) + (a) * (b))
MULTIPLY(portable, Float4, Float4, ADD_PRODUCT, 8)
#if defined(__AVX2__) && defined(__FMA__)
#define ADD_AVX2(sum, a, b) _mm256_fmadd_ps(a, b, sum)
MULTIPLY(avx2, __m256, __m256, ADD_AVX2, 16)
#endif
#if defined(__AVX512F__)
#define ADD_AVX512(sum, a, b) _mm512_fmadd_ps(a, b, sum)
MULTIPLY(avx512, __m512, __m512, ADD_AVX512, 32)
#endif
#if defined(__AVX512BF16__)
MULTIPLY(avx512_bf16, __m512, __m512bh, _mm512_dpbf16_ps, 64)
#endif
#if defined(__aarch64__)
MULTIPLY(neon, float32x4_t, float32x4_t, vfmaq_f32, 8)
#endif
#if defined(__ARM_FEATURE_BF16)
MULTIPLY(neon_bf16, float32x4_t, bfloat16x8_t, vbfmmlaq_f32, 32)
#endif
#if defined(AMX)
static double amx_bf16(int64_t rounds) {
    enum { PERMISSION = 0x1023, TILE_DATA = 18 };
    uint8_t config[64] __attribute__((aligned(64))) = {1};
    if (syscall(SYS_arch_prctl, PERMISSION, TILE_DATA)) return 0;
    for (int t = 0; t < 8; t++) config[16 + 2 * t] = 64, config[48 + t] = 16;
    __asm__ volatile("" : : "r"(config) : "memory");  // the intrinsic alone reads only 8 bytes of it, says GCC 12
    _tile_loadconfig(config);                         // sets all tiles to zero
    for (int64_t i = 0; i < rounds; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return (double)rounds * 4 * 16 * 16 * 32 * 2;
}
#endif

typedef struct {
    const char *name;
    double (*multiply)(int64_t rounds);
} Set;

static const Set sets[] = {
#if defined(AMX)
    {"amx_bf16", amx_bf16},
#endif
#if defined(__AVX512BF16__)
    {"avx512_bf16", avx512_bf16},
#endif
#if defined(__AVX512F__)
    {"avx512", avx512},
#endif
#if defined(__AVX2__) && defined(__FMA__)
    {"avx2", avx2},
#endif
#if defined(__ARM_FEATURE_BF16)
    {"neon_bf16", neon_bf16},
#endif
#if defined(__aarch64__)
    {"neon_dotprod", neon},
    {"neon", neon},
#endif
    {"portable", portable},
};

typedef struct {
    const Set *set;
    int64_t rounds;
} Multiplying;

static void multiply_part(const void *task, int thread, int threads) {
    const Multiplying *multiplying = task;
    (void)thread, (void)threads;
    multiplying->set->multiply(multiplying->rounds);
}

// FLOP/s of all threads with an instruction set, NULL for the best one; -1 if the processor or the system lacks it.
double flops_per_second(const char *name, int64_t rounds, int threads, int clock) {
    for (size_t s = 0; s < sizeof sets / sizeof *sets; s++) {
        Multiplying multiplying = {&sets[s], rounds};
        const double flop = name && strcmp(sets[s].name, name) ? 0 : sets[s].multiply(1) * (double)rounds;
        if (flop <= 0) continue;
        const double seconds = together(multiply_part, &multiplying, threads, clock);
        return seconds > 0 ? flop * threads / seconds : -1;
    }
    return -1;
}
