/* Experts on their rows: down(silu(gate x) * up x), or with a limited activation, as those of gpt-oss. */
#ifndef MOESCHED_EXPERTS_H
#define MOESCHED_EXPERTS_H

#include "factor.h"

/* What the experts of a layer have in common. With limit 0 they have SiLU, no biases, and matrices by rows. */
typedef struct {
    int64_t transposed; /* whether their matrices are stored so */
    double limit, alpha; /* of the activation gate * sigmoid(alpha gate) * (up + 1) */
} ExpertKind;

/* The matrices of an expert: gate and up (width, hidden), down (hidden, width). Without up, gate is both, their rows in turn:
 * (2 width, hidden). Biases may be NULL. */
typedef struct {
    const Matrix *gate, *up, *down;
    const uint16_t *gate_bias, *up_bias, *down_bias;
} ExpertWeights;

/* An expert, and its outputs y (rows, hidden). Gate and up share x where they have one multiplier. */
typedef struct {
    const ExpertKind *kind;
    int64_t rows, hidden, width;
    Factor gate, up, down;
    /* With a limit: */
    uint16_t *x;       /* (rows, hidden), if matrices are transposed */
    uint16_t *gates;   /* (rows, width), or (rows, 2 width) where gate is both */
    uint16_t *ups;     /* (rows, width) */
    uint16_t *numbers; /* that `down` multiplies: (rows, width) */
    uint16_t *y;
} Expert;

/* Experts that are computed together. All but the last have one width. */
typedef struct {
    const Team *team;
    const ExpertKind *kind;
    int64_t hidden;
    Grain numbers, outputs; /* that a thread takes: between the matrices, and behind them */
    int64_t width;
    int64_t count;
    Expert *experts;
} Experts;

/* An expert for `rows` rows, without memory and outputs. */
Expert expert_of(const Experts *experts, int64_t rows, int64_t width, const ExpertWeights *weights);

/* Bytes of what it has between its matrices, in whole cache lines. */
int64_t expert_bytes(const Expert *expert);

/* Bytes of its matrices. */
int64_t weight_bytes(const Expert *expert);

void give_expert_memory(Expert *expert, char *memory);

/* Puts inputs [first, last) of a row where gate and up look for them. */
void place_expert(const Expert *expert, int64_t row, int64_t first, int64_t last, const uint16_t *values);

/* Makes the pieces that threads take large enough for this expert, too. */
void fit_grains(Experts *experts, const Expert *expert);

/* The numbers between the matrices of all of them, and their outputs: each expert's begin with a whole piece. */
int64_t number_items(const Experts *experts);
int64_t output_items(const Experts *experts);

/* Items [first, last) of these. */
void gate_experts(const Experts *experts, int64_t first, int64_t last);
void project_experts(const Experts *experts, int64_t first, int64_t last);

/* An expert that runs alone. */
typedef struct {
    int64_t hidden, width;
    ExpertKind kind;
    ExpertWeights weights;
} OneExpert;

#endif
