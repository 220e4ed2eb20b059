/* Copies of memory that threads share out: one thread has a fraction of the memory's rate. */
#include <string.h>

#include "team.h"

enum {
    LEAST_BYTES = 64 << 10,
    MOST_BYTES = 1 << 20, /* of a share that is taken at a time */
};

/* Bytes that lie together in both memories. */
typedef struct {
    char *target;
    const char *source;
    int64_t nbytes;
} Piece;

/* Copies bytes [first, last) of the pieces, numbered from the first piece to the last. */
static void copy_bytes(void *job, int64_t first, int64_t last) {
    int64_t start = 0;
    for (const Piece *piece = job; start < last; start += piece++->nbytes) {
        const int64_t from = first > start ? first - start : 0;
        const int64_t to = last - start < piece->nbytes ? last - start : piece->nbytes;
        if (from < to) memcpy(piece->target + from, piece->source + from, (size_t)(to - from));
    }
}

/* Copies pieces that do not overlap: `nbytes` in all. */
API void moesched_copy(Team *team, const Piece *pieces, int64_t nbytes) {
    Phase phase = {.part = copy_bytes, .items = nbytes, .least = LEAST_BYTES, .most = MOST_BYTES};
    Task task = {.job = (void *)pieces, .phases = 1, .phase = &phase};
    run(team, &task, nbytes);
}
