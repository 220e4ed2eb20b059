/* Native attention against sums in double, with every instruction set of an Arm processor. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../devices/native/attention.h"
#include "../devices/native/numbers.h"

const char *moesched_instruction_sets(void);
Team *moesched_new_team(const char *instruction_set, int helpers, const int *cores, int count, int pinned);
void moesched_free_team(Team *team);
int moesched_attend(Team *team, const Attend *attend);

enum { BLOCK = 16 };

static double number_at(const char *numbers, int64_t i, int64_t bytes) {
    if (bytes == sizeof(float)) return ((const float *)numbers)[i];
    return widened(((const uint16_t *)numbers)[i]);
}

static char *random_numbers(int64_t count, int64_t bytes) {
    char *numbers = malloc((size_t)(count * bytes));
    for (int64_t i = 0; i < count; i++) {
        const float number = 4 * (float)rand() / (float)RAND_MAX - 2;
        if (bytes == sizeof(float))
            ((float *)numbers)[i] = number;
        else
            ((uint16_t *)numbers)[i] = rounded(number);
    }
    return numbers;
}

/* One sequence, whose new token is already in the cache; its blocks lie in the opposite order. */
static void check(Team *team, const char *set, int64_t bytes, int64_t length, int64_t heads, int64_t kv_heads,
                  int64_t size) {
    const int64_t blocks = (length + BLOCK - 1) / BLOCK, apart = kv_heads * size, last = length - 1;
    const int64_t last_slot = (blocks - 1 - last / BLOCK) * BLOCK + last % BLOCK;
    char *keys = random_numbers(blocks * BLOCK * apart, bytes), *values = random_numbers(blocks * BLOCK * apart, bytes);
    char *queries = random_numbers(heads * size, bytes), *out = random_numbers(heads * size, bytes);
    int64_t *places = malloc((size_t)blocks * sizeof *places);
    double *weights = malloc((size_t)length * sizeof *weights);
    for (int64_t i = 0; i < blocks; i++) places[i] = blocks - 1 - i;
    const Attend attend = {
        .number_bytes = bytes, .sequences = 1, .heads = heads, .kv_heads = kv_heads, .head_dim = size,
        .block_size = BLOCK, .scale = 1 / sqrt((double)size), .lengths = &length, .blocks = places, .keys = keys,
        .values = values, .queries = queries, .new_keys = keys + last_slot * apart * bytes,
        .new_values = values + last_slot * apart * bytes, .out = out,
    };
    if (moesched_attend(team, &attend)) exit(2);
    for (int64_t head = 0; head < heads; head++) {
        const int64_t first = head / (heads / kv_heads) * size;
        double total = 0;
        for (int64_t t = 0; t < length; t++) {
            const int64_t slot = (blocks - 1 - t / BLOCK) * BLOCK + t % BLOCK;
            double score = 0;
            for (int64_t k = 0; k < size; k++)
                score += number_at(queries, head * size + k, bytes) * number_at(keys, slot * apart + first + k, bytes);
            total += weights[t] = exp(score * attend.scale);
        }
        for (int64_t k = 0; k < size; k++) {
            double exact = 0;
            for (int64_t t = 0; t < length; t++) {
                const int64_t slot = (blocks - 1 - t / BLOCK) * BLOCK + t % BLOCK;
                exact += weights[t] / total * number_at(values, slot * apart + first + k, bytes);
            }
            const double got = number_at(out, head * size + k, bytes);
            if (fabs(got - exact) <= fabs(exact) * (bytes == sizeof(float) ? 1e-5 : 1.0 / 256) + 1e-5) continue;
            printf("%s: %g instead of %g\n", set, got, exact);
            exit(1);
        }
    }
    free(keys), free(values), free(queries), free(out), free(places), free(weights);
}

int main(void) {
    char sets[64];
    strcpy(sets, moesched_instruction_sets());
    for (char *set = strtok(sets, " "); set; set = strtok(NULL, " ")) {
        Team *team = moesched_new_team(set, 1, NULL, 0, 0);
        for (int64_t bytes = 2; bytes <= 4; bytes += 2) {
            check(team, set, bytes, 1, 4, 4, 8);
            check(team, set, bytes, 700, 8, 1, 64);
            check(team, set, bytes, 333, 6, 2, 21);
        }
        moesched_free_team(team);
        printf("%s ", set);
    }
    return 0;
}
