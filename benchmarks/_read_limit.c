/* What bounds a kernel that reads its operands once: reading the same bytes, and multiplying, on the same cores. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum { MOST_THREADS = 1024, STREAMS = 4, CHAINS = 12 };

typedef uint64_t Words __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(64)));

typedef struct {
    const char *first;
    size_t bytes;
    long multiplications;
    volatile uint64_t sum;
} Share;

/* A sum over memory, in STREAMS places at once: one alone is slower on processors that prefetch page by page. */
static void *read_share(void *argument) {
    Share *share = argument;
    const size_t apart = share->bytes / STREAMS / sizeof(Words) * sizeof(Words);
    Words sums[STREAMS] = {0};
    for (size_t at = 0; at < apart; at += sizeof(Words))
#pragma GCC unroll 4
        for (int stream = 0; stream < STREAMS; stream++)
            sums[stream] += *(const Words *)(share->first + stream * apart + at);
    const Words sum = sums[0] + sums[1] + sums[2] + sums[3];
    share->sum = sum[0] + sum[1];
    return NULL;
}

/* float32 multiplications with additions, in CHAINS independent chains of vectors. */
static void *multiply_share(void *argument) {
    Share *share = argument;
    Floats sums[CHAINS], factor = {0};
    for (size_t i = 0; i < sizeof(Floats) / sizeof(float); i++) factor[i] = 1.0f + (float)i * 1e-7f;
#pragma GCC unroll 16
    for (int chain = 0; chain < CHAINS; chain++) sums[chain] = (Floats){0} + (float)chain; /* or they would be one */
    for (long n = 0; n < share->multiplications; n++) {
        __asm__ volatile("" : "+m"(factor)); /* or the compiler would know the result */
#pragma GCC unroll 16
        for (int chain = 0; chain < CHAINS; chain++) sums[chain] = sums[chain] * factor + factor;
    }
    Floats sum = sums[0];
#pragma GCC unroll 16
    for (int chain = 1; chain < CHAINS; chain++) sum += sums[chain];
    share->sum = (uint64_t)sum[0];
    return NULL;
}

static void on_threads(void *(*work)(void *), int threads, Share *shares) {
    pthread_t helpers[MOST_THREADS];
    int helping = 0;
    while (helping < threads - 1 && !pthread_create(&helpers[helping], NULL, work, &shares[helping])) helping++;
    for (int i = helping; i < threads; i++) work(&shares[i]);
    for (int i = 0; i < helping; i++) pthread_join(helpers[i], NULL);
}

void read_memory(const char *first, size_t bytes, int threads) {
    Share shares[MOST_THREADS];
    const size_t part = bytes / threads / 4096 * 4096;
    for (int i = 0; i < threads; i++) shares[i] = (Share){first + i * part, i < threads - 1 ? part : bytes - i * part, 0, 0};
    on_threads(read_share, threads, shares);
}

/* `rounds` rounds in each thread; returns the floating-point operations of all. */
double multiply(long rounds, int threads) {
    Share shares[MOST_THREADS];
    for (int i = 0; i < threads; i++) shares[i] = (Share){NULL, 0, rounds, 0};
    on_threads(multiply_share, threads, shares);
    return 2.0 * CHAINS * (sizeof(Floats) / sizeof(float)) * (double)rounds * threads;
}
