/* Products and experts of the CPU kernels against sums in double, with every instruction set of an Arm processor. */
#include <math.h>

#include "../devices/native/experts.h"
#include "coded_bits.h"

const char *moesched_instruction_sets(void);
Team *moesched_new_team(const char *instruction_set, int helpers, const int *cores, int count, int pinned);
void moesched_free_team(Team *team);
int moesched_product(Team *team, int64_t batch, int64_t inputs, int64_t outputs, const uint16_t *x, int64_t stride,
                     const Matrix *matrix, uint16_t *y);
int moesched_expert(Team *team, const OneExpert *one, int64_t rows, int64_t stride, const uint16_t *x, uint16_t *y);

/* A matrix in two row blocks. */
typedef struct {
    int64_t format;
    Rows blocks[2];
} Halved;

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
    const Halved halved = {BFLOAT16, {{matrix, cut}, {matrix + cut * inputs, outputs - cut}}};
    if (moesched_product(team, batch, inputs, outputs, x, inputs, (const Matrix *)&halved, y)) exit(2);
    for (int64_t m = 0; m < batch; m++)
        for (int64_t n = 0; n < outputs; n++) {
            const double exact = dot(x + m * inputs, matrix + n * inputs, inputs);
            check(set, widened(y[m * outputs + n]), exact, fabs(exact) / 256 + 1e-5);
        }
    free(x), free(matrix), free(y);
}

/* By weights in Q8_0: a scale of 1/128 in float16, then 32 signed bytes. */
static void check_coded(Team *team, const char *set, int64_t batch, int64_t groups, int64_t outputs) {
    enum { GROUP = 32, BYTES = 34 };
    const int64_t inputs = groups * GROUP, row_bytes = groups * BYTES, cut = outputs / 3;
    uint16_t *x = random_numbers(batch * inputs), *y = malloc((size_t)(batch * outputs) * sizeof *y);
    int8_t *rows = malloc((size_t)(outputs * row_bytes));
    for (int64_t i = 0; i < outputs * row_bytes; i++) rows[i] = i % BYTES == 0 ? 0 : i % BYTES == 1 ? 0x20 : (int8_t)rand();
    const Halved halved = {Q8_0, {{rows, cut}, {rows + cut * row_bytes, outputs - cut}}};
    if (moesched_product(team, batch, inputs, outputs, x, inputs, (const Matrix *)&halved, y)) exit(2);
    for (int64_t m = 0; m < batch; m++)
        for (int64_t n = 0; n < outputs; n++) {
            double exact = 0;
            for (int64_t k = 0; k < inputs; k++)
                exact += widened(x[m * inputs + k]) * rows[n * row_bytes + k / GROUP * BYTES + 2 + k % GROUP] / 128.0;
            check(set, widened(y[m * outputs + n]), exact, fabs(exact) / 256 + 1e-2);
        }
    free(x), free(y), free(rows);
}

static void check_expert(Team *team, const char *set, int64_t rows, int64_t hidden, int64_t width) {
    uint16_t *x = random_numbers(rows * hidden), *y = malloc((size_t)(rows * hidden) * sizeof *y);
    uint16_t *gate = random_numbers(width * hidden), *up = random_numbers(width * hidden);
    uint16_t *down = random_numbers(hidden * width);
    const Halved gates = {BFLOAT16, {{gate, width}}}, ups = {BFLOAT16, {{up, width}}}, downs = {BFLOAT16, {{down, hidden}}};
    const OneExpert expert = {
        .hidden = hidden, .width = width,
        .weights = {.gate = (const Matrix *)&gates, .up = (const Matrix *)&ups, .down = (const Matrix *)&downs}};
    if (moesched_expert(team, &expert, rows, hidden, x, y)) exit(2);
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
        Team *team = moesched_new_team(set, 1, NULL, 0, 0);
        for (int64_t batch = 1; batch <= 256; batch = batch < 8 ? batch + 1 : 2 * batch + 1) {
            check_product(team, set, batch, 200, 45);
            check_product(team, set, batch, 1300, 9);
            check_product(team, set, batch, 3, 2);
            check_coded(team, set, batch, 9, 45);
            check_expert(team, set, batch, 40, 205);
        }
        moesched_free_team(team);
        check_bits((InstructionSet)set_named(set), set);
        printf("%s ", set);
    }
    return 0;
}
