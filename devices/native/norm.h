/* Normalised rows of bfloat16 numbers; sums in a fixed order. */
#ifndef MOESCHED_NORM_H
#define MOESCHED_NORM_H

#include <stdint.h>

typedef struct {
    const void *weight;
    int64_t in_float32; /* the weight, otherwise in bfloat16 */
    double epsilon;
    int64_t subtracts_mean; /* LayerNorm, otherwise RMSNorm */
} Norm;

/* y = x normalised, times the weight: `count` numbers, float32 inside, rounded once; y may be x. */
void normalise(const Norm *norm, int64_t count, const uint16_t *x, uint16_t *y);

#endif
