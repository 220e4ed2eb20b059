/* Attention of one new token per sequence over a KV cache in blocks. */
#ifndef MOESCHED_ATTENTION_H
#define MOESCHED_ATTENTION_H

#include "team.h"

/* A decode step's attention in one layer. Python fills it, field by field.
 *
 * Numbers are of one type. A slot holds a token's keys or values of all key-value heads; a block is `block_size` slots
 * that follow each other. Strides are in numbers. */
typedef struct {
    int64_t number_bytes; /* 2: bfloat16, 4: float32 */
    int64_t sequences, heads, kv_heads, head_dim;
    int64_t window; /* tokens that a query sees, itself included; 0 for all */
    int64_t block_size;
    int64_t query_stride, new_stride; /* from a sequence to the next */
    double scale;
    const int64_t *lengths; /* of each sequence, its new token included */
    const int64_t *blocks;  /* of each sequence, as many as its length takes, one sequence after the other */
    char *keys, *values;    /* of the layer: slot 0 */
    const char *queries;    /* (sequences, heads, head_dim) */
    const char *new_keys, *new_values; /* (sequences, kv_heads, head_dim): stored in the cache */
    const float *sinks;     /* (heads): a score of each, that no token has; NULL for none */
    char *out;              /* (sequences, heads * head_dim) */
} Attend;

#endif
