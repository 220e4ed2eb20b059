/* The limited activation of experts, as those of gpt-oss. */
#include "limited_expert.h"

#include "numbers.h"

/* gate * sigmoid(alpha gate) * (up + 1), both limited. A number that is none stays none. */
static inline uint16_t activated(float gate, float up, float limit, float alpha) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = up < -limit ? -limit : up;
    return rounded(gate * (1.0f / (1.0f + exponential(-alpha * gate))) * (up + 1.0f));
}

ANY_WIDTH static void activate(int64_t count, float limit, float alpha, const uint16_t *gates, const uint16_t *ups,
                               uint16_t *numbers) {
    for (int64_t i = 0; i < count; i++) numbers[i] = activated(widened(gates[i]), widened(ups[i]), limit, alpha);
}

ANY_WIDTH static void activate_pairs(int64_t count, float limit, float alpha, const uint16_t *pairs, uint16_t *numbers) {
    for (int64_t i = 0; i < count; i++)
        numbers[i] = activated(widened(pairs[2 * i]), widened(pairs[2 * i + 1]), limit, alpha);
}

void gate_limited(const Expert *expert, int64_t first, int64_t last) {
    const float limit = (float)expert->kind->limit, alpha = (float)expert->kind->alpha;
    const int64_t apart = expert->up.outputs != 0, gates_each = apart ? 1 : 2;
    write_factor(&expert->gate, expert->x, gates_each * first, gates_each * last, expert->gates);
    if (apart) write_factor(&expert->up, expert->x, first, last, expert->ups);
    for (int64_t row = 0; row < expert->rows; row++) {
        const int64_t at = row * expert->width + first;
        if (apart)
            activate(last - first, limit, alpha, expert->gates + at, expert->ups + at, expert->numbers + at);
        else
            activate_pairs(last - first, limit, alpha, expert->gates + 2 * at, expert->numbers + at);
        if (!expert->kind->transposed) place(&expert->down.by_rows, row, first, last, expert->numbers + at);
    }
}
