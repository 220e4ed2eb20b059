/* Experts on their rows: down(silu(gate x) * up x). */
#ifndef MOESCHED_EXPERTS_H
#define MOESCHED_EXPERTS_H

#include "product.h"

/* The matrices of an expert: gate and up (width, hidden), down (hidden, width). */
typedef struct {
    const Matrix *gate, *up, *down;
} ExpertWeights;

/* An expert, and its outputs y (rows, hidden). Gate and up share x where they have one multiplier. */
typedef struct {
    Product gate, up, down;
    uint16_t *y;
} Expert;

/* Experts that are computed together. All but the last have one width. */
typedef struct {
    const Team *team;
    int64_t hidden;
    int64_t stride; /* that width, in whole pieces that a thread takes */
    int64_t count;
    Expert *experts;
} Experts;

/* An expert for `rows` rows, without memory and outputs. */
Expert expert_of(const Experts *experts, int64_t rows, int64_t width, const ExpertWeights *weights);

/* Bytes of its products' x. */
int64_t expert_bytes(const Expert *expert);

/* Bytes of its matrices. */
int64_t weight_bytes(const Expert *expert);

void give_expert_memory(Expert *expert, char *memory);

/* Puts inputs [first, last) of a row where gate and up look for them. */
void place_expert(const Expert *expert, int64_t row, int64_t first, int64_t last, const uint16_t *values);

/* The least of the items below that a thread takes at a time. */
int64_t least_items(const Expert *expert);

/* The numbers between the matrices of all of them, each expert's `stride` items behind those of the one before. */
int64_t gate_items(const Experts *experts);

/* Items [first, last) of these. */
void gate_experts(const Experts *experts, int64_t first, int64_t last);

/* Items [first, last) of the count * hidden outputs. */
void project_experts(const Experts *experts, int64_t first, int64_t last);

#endif
