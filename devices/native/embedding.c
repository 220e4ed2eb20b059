/* The start of a step: embeddings of tokens, and the angles that rotate queries and keys by their positions. */
#include <math.h>
#include <stddef.h>

#include "numbers.h"
#include "product.h"

/* Numbers that Python prepares. embedding (any, hidden), one row block; x (tokens, hidden), bfloat16; frequencies
 * (turning / 2), cosines and signed sines (tokens, turning) times the magnitude, float32. */
typedef struct {
    int64_t tokens, hidden, turning;
    double magnitude, factor; /* of angles, of embeddings */
    const int64_t *ids, *positions;
    const Matrix *embedding;
    const float *frequencies;
    uint16_t *x;
    float *cosines, *sines;
} Tokens;

static void look_up(const Matrix *embedding, int64_t hidden, int64_t row, uint16_t *x) {
    if (embedding->format == BFLOAT16)
        memcpy(x, (const uint16_t *)embedding->blocks->first + row * hidden, (size_t)hidden * sizeof *x);
    else
        decode_row((Format)embedding->format, embedding->blocks->first, row, hidden, x);
}

ANY_WIDTH static void multiply(int64_t count, float factor, uint16_t *x) {
    for (int64_t i = 0; i < count; i++) x[i] = rounded(widened(x[i]) * factor);
}

static void embed_part(void *argument, int64_t first, int64_t last) {
    const Tokens *tokens = argument;
    const float magnitude = (float)tokens->magnitude;
    const int64_t hidden = tokens->hidden, size = tokens->turning, half = size / 2;
    for (int64_t t = first; t < last; t++) {
        look_up(tokens->embedding, hidden, tokens->ids[t], tokens->x + t * hidden);
        if (tokens->factor != 1) multiply(hidden, (float)tokens->factor, tokens->x + t * hidden);
        float *cosines = tokens->cosines + t * size, *sines = tokens->sines + t * size;
        for (int64_t i = 0; i < half; i++) {
            const float angle = (float)tokens->positions[t] * tokens->frequencies[i];
            cosines[i] = cosines[i + half] = cosf(angle) * magnitude;
            sines[i + half] = sinf(angle) * magnitude;
            sines[i] = -sines[i + half];
        }
    }
}

API int moesched_embed(Team *team, const Tokens *tokens) {
    Phase phases[] = {{embed_part, tokens->tokens, 1, 1, 0}};
    Task task = {(void *)tokens, 1, phases};
    run(team, &task, tokens->tokens * tokens->hidden * (int64_t)sizeof(uint16_t));
    return 0;
}
