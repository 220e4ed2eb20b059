/* Normalised rows of bfloat16 numbers. */
#include "norm.h"

#include <math.h>

#include "numbers.h"

enum { LANES = 16 };

static inline float sum_of(const float *lanes) {
    float sums[LANES];
    memcpy(sums, lanes, sizeof sums);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) sums[i] += sums[i + width];
    return sums[0];
}

static inline float mean_of(int64_t count, const uint16_t *x) {
    float lanes[LANES] = {0};
    for (int64_t i = 0; i < count / LANES * LANES; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += widened(x[i + lane]);
    for (int64_t i = count / LANES * LANES; i < count; i++) lanes[i % LANES] += widened(x[i]);
    return sum_of(lanes) / (float)count;
}

static inline float mean_square_of(int64_t count, const uint16_t *x, float mean) {
    float lanes[LANES] = {0};
    for (int64_t i = 0; i < count / LANES * LANES; i += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            const float centred = widened(x[i + lane]) - mean;
            lanes[lane] += centred * centred;
        }
    for (int64_t i = count / LANES * LANES; i < count; i++) {
        const float centred = widened(x[i]) - mean;
        lanes[i % LANES] += centred * centred;
    }
    return sum_of(lanes) / (float)count;
}

ANY_WIDTH void normalise(const Norm *norm, int64_t count, const uint16_t *x, uint16_t *y) {
    const float mean = norm->subtracts_mean ? mean_of(count, x) : 0.0f;
    const float scale = 1.0f / sqrtf(mean_square_of(count, x, mean) + (float)norm->epsilon);
    const uint16_t *halves = norm->weight;
    const float *weights = norm->weight;
    if (norm->in_float32)
        for (int64_t i = 0; i < count; i++) y[i] = rounded((widened(x[i]) - mean) * scale * weights[i]);
    else
        for (int64_t i = 0; i < count; i++) y[i] = rounded((widened(x[i]) - mean) * scale * widened(halves[i]));
}
