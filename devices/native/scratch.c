/* Memory that each thread keeps from call to call: fresh pages in every call would cost more than some kernels. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "scratch.h"

#include <pthread.h>
#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

enum { PAGE = 4096, HUGE_PAGE = 2 << 20 };

typedef struct {
    int64_t bytes;
    char *memory;
} Kept;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static int known;

static void forget(void *argument) {
    Kept *kept = argument;
    free(kept->memory);
    free(kept);
}

static void make_key(void) { known = !pthread_key_create(&key, forget); }

static Kept *kept_here(void) {
    pthread_once(&once, make_key);
    if (!known) return NULL;
    Kept *kept = pthread_getspecific(key);
    if (kept) return kept;
    kept = calloc(1, sizeof *kept);
    if (kept && pthread_setspecific(key, kept)) {
        free(kept);
        return NULL;
    }
    return kept;
}

char *scratch(int64_t bytes) {
    Kept *kept = kept_here();
    if (!kept || bytes <= kept->bytes) return kept ? kept->memory : NULL;
    const int64_t page = bytes < HUGE_PAGE ? PAGE : HUGE_PAGE, whole = (bytes + page - 1) / page * page;
    free(kept->memory);
    kept->memory = aligned_alloc((size_t)page, (size_t)whole);
    kept->bytes = kept->memory ? whole : 0;
#if defined(__linux__)
    if (kept->memory && page == HUGE_PAGE) madvise(kept->memory, (size_t)whole, MADV_HUGEPAGE);
#endif
    return kept->memory;
}
