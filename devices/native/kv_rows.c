/* Keys and values of new tokens, written to their slots in a KV cache. */
#include <string.h>

#include "team.h"

enum { LEAST_TOKENS = 16 }; /* that a thread writes at a time */

/* Python fills it, field by field. A row holds a token's keys or values of all key-value heads. */
typedef struct {
    int64_t tokens, row_bytes;
    const int64_t *slots;              /* of each token */
    char *keys, *values;               /* of the layer: slot 0 */
    const char *new_keys, *new_values; /* (tokens, row_bytes) */
} NewRows;

static void store_tokens(void *job, int64_t first, int64_t last) {
    const NewRows *rows = job;
    const int64_t bytes = rows->row_bytes;
    for (int64_t i = first; i < last; i++) {
        memcpy(rows->keys + rows->slots[i] * bytes, rows->new_keys + i * bytes, (size_t)bytes);
        memcpy(rows->values + rows->slots[i] * bytes, rows->new_values + i * bytes, (size_t)bytes);
    }
}

/* Stores the new tokens. Returns 0. */
API int moesched_store(Team *team, NewRows *rows) {
    Phase phases[] = {{store_tokens, rows->tokens, LEAST_TOKENS, rows->tokens, 0}};
    Task task = {rows, 1, phases};
    run(team, &task, 2 * rows->tokens * rows->row_bytes);
    return 0;
}
