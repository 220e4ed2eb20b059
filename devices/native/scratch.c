/* Memory that each thread keeps from call to call: fresh pages in every call would cost more than some kernels. */
#include "scratch.h"

#include <pthread.h>
#include <stdlib.h>

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
    const int64_t whole = (bytes + 4095) / 4096 * 4096;
    free(kept->memory);
    kept->memory = aligned_alloc(4096, (size_t)whole);
    kept->bytes = kept->memory ? whole : 0;
    return kept->memory;
}
