/* Experts on their rows: down(silu(gate x) * up x). */
#ifndef MOESCHED_EXPERTS_H
#define MOESCHED_EXPERTS_H

#include "product.h"

/* The row blocks of an expert: gate and up (width, hidden), down (hidden, width). */
typedef struct {
    const Rows *gate, *up, *down;
} ExpertWeights;

/* An expert, its rows of x in `gate.x`, and its outputs y (rows, hidden). */
typedef struct {
    Product gate, up, down;
    uint16_t *y;
} Expert;

/* Experts that are computed together. */
typedef struct {
    const Multiplier *multiplier;
    int64_t hidden, width;
    int64_t count;
    Expert *experts;
} Experts;

/* Bytes that the products of an expert need for `rows` rows. */
int64_t expert_bytes(const Multiplier *multiplier, int64_t rows, int64_t hidden, int64_t width);

/* An expert with its memory, of `expert_bytes`. */
Expert expert_in(const Experts *experts, int64_t rows, const ExpertWeights *weights, uint16_t *y, char *memory);

/* Items [first, last) of the count * width numbers between the matrices. */
void gate_experts(const Experts *experts, int64_t first, int64_t last);

/* Items [first, last) of the count * hidden outputs. */
void project_experts(const Experts *experts, int64_t first, int64_t last);

#endif
