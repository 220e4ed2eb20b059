/* Products and experts of the CPU kernels against sums in double, with every instruction set of an Arm processor. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../devices/native/experts.h"
#include "../devices/native/numbers.h"

const char *moesched_instruction_sets(void);
Team *moesched_new_team(const char *instruction_set, int helpers, const int *cores);
void moesched_free_team(Team *team);
int moesched_product(Team *team, int64_t batch, int64_t inputs, int64_t outputs, const uint16_t *x, int64_t stride,
                     const Rows *blocks, uint16_t *y);
int moesched_expert(Team *team, int64_t rows, int64_t hidden, int64_t width, const uint16_t *x, int64_t stride,
                    const ExpertWeights *weights, uint16_t *y);

static uint16_t *random_numbers(int64_t count) {
    uint16_t *numbers = malloc((size_t)count * sizeof *numbers);
    for (int64_t i = 0; i < count; i++) numbers[i] = rounded((float)rand() / (float)RAND_MAX - 0.5f);
    return numbers;
}

static double dot(const uint16_t *a, const uint16_t *b, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += (double)widened(a[i]) * widened(b[i]);
    return sum;
}

static void check(const char *what, double got, double exact, double tolerance) {
    if (fabs(got - exact) <= tolerance) return;
    printf("%s: %g instead of %g\n", what, got, exact);
    exit(1);
}

static void check_product(Team *team, const char *set, int64_t batch, int64_t inputs, int64_t outputs) {
    uint16_t *x = random_numbers(batch * inputs), *matrix = random_numbers(outputs * inputs);
    uint16_t *y = malloc((size_t)(batch * outputs) * sizeof *y);
    const int64_t cut = outputs / 3;
    const Rows blocks[] = {{matrix, cut}, {matrix + cut * inputs, outputs - cut}};
    if (moesched_product(team, batch, inputs, outputs, x, inputs, blocks, y)) exit(2);
    for (int64_t m = 0; m < batch; m++)
        for (int64_t n = 0; n < outputs; n++) {
            const double exact = dot(x + m * inputs, matrix + n * inputs, inputs);
            check(set, widened(y[m * outputs + n]), exact, fabs(exact) / 256 + 1e-5);
        }
    free(x), free(matrix), free(y);
}

static void check_expert(Team *team, const char *set, int64_t rows, int64_t hidden, int64_t width) {
    uint16_t *x = random_numbers(rows * hidden), *y = malloc((size_t)(rows * hidden) * sizeof *y);
    uint16_t *gate = random_numbers(width * hidden), *up = random_numbers(width * hidden);
    uint16_t *down = random_numbers(hidden * width);
    const Rows gates = {gate, width}, ups = {up, width}, downs = {down, hidden};
    const ExpertWeights weights = {&gates, &ups, &downs};
    if (moesched_expert(team, rows, hidden, width, x, hidden, &weights, y)) exit(2);
    double *between = malloc((size_t)width * sizeof *between);
    for (int64_t m = 0; m < rows; m++) {
        for (int64_t n = 0; n < width; n++) {
            const double g = dot(x + m * hidden, gate + n * hidden, hidden);
            between[n] = g / (1 + exp(-g)) * dot(x + m * hidden, up + n * hidden, hidden);
        }
        for (int64_t n = 0; n < hidden; n++) {
            double exact = 0, size = 0;
            for (int64_t k = 0; k < width; k++) {
                exact += between[k] * widened(down[n * width + k]);
                size += fabs(between[k] * widened(down[n * width + k]));
            }
            check(set, widened(y[m * hidden + n]), exact, size / 256 + 1e-5);
        }
    }
    free(x), free(y), free(gate), free(up), free(down), free(between);
}

int main(void) {
    char sets[64];
    strcpy(sets, moesched_instruction_sets());
    for (char *set = strtok(sets, " "); set; set = strtok(NULL, " ")) {
        Team *team = moesched_new_team(set, 1, NULL);
        for (int64_t batch = 1; batch <= 256; batch = batch < 8 ? batch + 1 : 2 * batch + 1) {
            check_product(team, set, batch, 200, 45);
            check_product(team, set, batch, 1300, 9);
            check_product(team, set, batch, 3, 2);
            check_expert(team, set, batch, 40, 205);
        }
        moesched_free_team(team);
        printf("%s ", set);
    }
    return 0;
}
