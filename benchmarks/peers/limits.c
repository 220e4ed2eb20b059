// Two loops that bound every kernel: one only reads memory, the other only multiplies and adds.
// Each runs on several threads that begin together; the time is from then until the last one ends.

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__AVX512BF16__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16) || defined(__ARM_NEON)
#include <arm_neon.h>
#endif

enum { MOST_THREADS = 256, STREAMS = 8, WORDS = 32 };

typedef struct {
    void (*work)(const void *task, int thread, int threads);
    const void *task;
    int thread, threads;
    atomic_int *missing;
    double begun, ended;
} Member;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void *member(void *argument) {
    Member *m = argument;
    atomic_fetch_sub(m->missing, 1);
    while (atomic_load(m->missing) > 0) sched_yield();
    m->begun = now();
    m->work(m->task, m->thread, m->threads);
    m->ended = now();
    return NULL;
}

// Seconds of the work on all threads, or -1 if that is no number of threads.
static double together(void (*work)(const void *, int, int), const void *task, int threads) {
    pthread_t handles[MOST_THREADS];
    Member members[MOST_THREADS];
    atomic_int missing = threads;
    if (threads < 1 || threads > MOST_THREADS) return -1;
    for (int t = 0; t < threads; t++) {
        members[t] = (Member){work, task, t, threads, &missing, 0, 0};
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

// Each thread reads its part of each piece as several streams at once: one alone does not fill the memory's queues.
static void read_part(const void *task, int thread, int threads) {
    const Reading *reading = task;
    uint64_t sums[WORDS] = {0};
    for (int p = 0; p < reading->count; p++) {
        size_t stream = reading->words[p] / threads / STREAMS / WORDS * WORDS;
        const uint64_t *first = reading->pieces[p] + thread * stream * STREAMS;
        for (size_t i = 0; i < stream; i += WORDS)
            for (int s = 0; s < STREAMS; s++)
                for (int k = 0; k < WORDS; k++) sums[k] += first[s * stream + i + k];
    }
    uint64_t sum = 0;
    for (int k = 0; k < WORDS; k++) sum += sums[k];
    sink = sum;
}

// Seconds of reading these pieces once on all threads.
double read_seconds(const uint64_t *const *pieces, const size_t *words, int count, int threads) {
    Reading reading = {pieces, words, count};
    return together(read_part, &reading, threads);
}

// ---------------------------------------------------------------- multiplying

// `multiply` does one round of independent multiplications of bfloat16 (float32 where the processor has none) that
// stay in registers; FLOPS is what a round does.

#if defined(__AMX_BF16__) && defined(__linux__)
enum { FLOPS = 4 * 16 * 16 * 32 * 2, PERMISSION = 0x1023, TILE_DATA = 18 };

static int allowed(void) { return syscall(SYS_arch_prctl, PERMISSION, TILE_DATA) == 0; }

static void multiply(int64_t rounds) {
    uint8_t config[64] __attribute__((aligned(64))) = {1};
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
}

#else
#if defined(__AVX512BF16__)
typedef __m512 Sum;
typedef __m512bh Factor;
enum { PER_OPERATION = 64 };
#define MULTIPLY(sum, a, b) _mm512_dpbf16_ps(sum, a, b)
#elif defined(__AVX512F__)
typedef __m512 Sum;
typedef __m512 Factor;
enum { PER_OPERATION = 32 };
#define MULTIPLY(sum, a, b) _mm512_fmadd_ps(a, b, sum)
#elif defined(__AVX2__) && defined(__FMA__)
typedef __m256 Sum;
typedef __m256 Factor;
enum { PER_OPERATION = 16 };
#define MULTIPLY(sum, a, b) _mm256_fmadd_ps(a, b, sum)
#elif defined(__ARM_FEATURE_BF16)
typedef float32x4_t Sum;
typedef bfloat16x8_t Factor;
enum { PER_OPERATION = 32 };
#define MULTIPLY(sum, a, b) vbfmmlaq_f32(sum, a, b)
#elif defined(__ARM_NEON)
typedef float32x4_t Sum;
typedef float32x4_t Factor;
enum { PER_OPERATION = 8 };
#define MULTIPLY(sum, a, b) vfmaq_f32(sum, a, b)
#else
typedef float Sum;
typedef float Factor;
enum { PER_OPERATION = 2 };
#define MULTIPLY(sum, a, b) ((sum) + (a) * (b))
#endif

#if defined(__aarch64__)
#define REGISTER "+w"
#elif defined(__x86_64__)
#define REGISTER "+x"
#else
#define REGISTER "+r"
#endif

enum { SUMS = 12, FLOPS = SUMS * PER_OPERATION };

static int allowed(void) { return 1; }

static void multiply(int64_t rounds) {
    static const Factor zeros[2];
    Factor a = zeros[0], b = zeros[1];
    Sum sums[SUMS] = {0};
    for (int64_t i = 0; i < rounds; i++) {
        for (int s = 0; s < SUMS; s++) sums[s] = MULTIPLY(sums[s], a, b);
        for (int s = 0; s < SUMS; s++) __asm__ volatile("" : REGISTER(sums[s]));
    }
}
#endif

static void multiply_part(const void *task, int thread, int threads) {
    (void)thread, (void)threads;
    multiply(*(const int64_t *)task);
}

// Floating-point operations per second of all threads, or -1 if the system does not allow the instructions.
double flops_per_second(int64_t rounds, int threads) {
    if (!allowed()) return -1;
    double seconds = together(multiply_part, &rounds, threads);
    return seconds > 0 ? (double)rounds * FLOPS * threads / seconds : -1;
}
