/* Products by coded matrices, compared with those in portable C to the bit. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../devices/native/numbers.h"
#include "../devices/native/product.h"

/* A format's first bytes of a block that are scales or minimums in float16, and their number; a power of two for one. */
typedef struct {
    Format format;
    int first, bytes;
} CodedFormat;

static const CodedFormat coded_formats[] = {
    {Q8_0, 0, 2}, {Q4_0, 0, 2}, {Q5_0, 0, 2}, {Q5_1, 0, 4}, {Q4_K, 0, 4}, {Q5_K, 0, 4}, {Q6_K, 208, 2}, {MXFP4, 0, 1},
};

/* Blocks of any bytes, with scales between 2^-6 and 2^9, and a subnormal one. */
static uint8_t *random_blocks(CodedFormat coded, int64_t blocks, int64_t block_bytes) {
    uint8_t *rows = malloc((size_t)(blocks * block_bytes)), *block = rows;
    for (int64_t i = 0; i < blocks * block_bytes; i++) rows[i] = (uint8_t)(rand() >> 7);
    for (int64_t i = 0; i < blocks; i++, block += block_bytes)
        for (int k = coded.first; k < coded.first + coded.bytes; k++) {
            if (coded.bytes == 1) block[k] = (uint8_t)(121 + block[k] % 8);
            else if (k % 2) block[k] = i == 3 ? block[k] & 0x83 : (block[k] & 0xbf) | 0x20;
        }
    return rows;
}

static uint16_t *random_inputs(int64_t count) {
    uint16_t *numbers = malloc((size_t)count * sizeof *numbers);
    for (int64_t i = 0; i < count; i++) numbers[i] = rounded(((float)rand() / (float)RAND_MAX - 0.5f) * (float)(1 << i % 12));
    return numbers;
}

/* y (batch, outputs) of x (batch, inputs). */
static void multiply_coded(const Multiplier *multiplier, const Rows *blocks, int64_t batch, int64_t inputs, int64_t outputs,
                           const uint16_t *x, uint16_t *y) {
    Product product = {.multiplier = multiplier, .batch = batch, .inputs = inputs, .outputs = outputs, .blocks = blocks};
    product.steps = inputs / multiplier->step;
    product.row_bytes = inputs / multiplier->block * multiplier->block_bytes;
    product.x = malloc((size_t)(batch * product.steps * multiplier->step_bytes));
    for (int64_t row = 0; row < batch; row++) place(&product, row, 0, inputs, x + row * inputs);
    multiplier->write(&product, 0, outputs, y, outputs);
    free(product.x);
}

/* With a matrix in three row blocks, one of them of a single row. */
static void check_bits_of(InstructionSet set, const char *name, CodedFormat coded, int64_t batch, int64_t inputs,
                          int64_t outputs) {
    const Multiplier *multiplier = coded_multiplier(set, coded.format);
    const int64_t block_bytes = multiplier->block_bytes, row_blocks = inputs / multiplier->block;
    uint8_t *rows = random_blocks(coded, outputs * row_blocks, block_bytes), *second = rows + row_blocks * block_bytes;
    const int64_t cut = outputs / 3;
    const Rows blocks[] = {{rows, 1}, {second, cut}, {second + cut * row_blocks * block_bytes, outputs - 1 - cut}};
    uint16_t *x = random_inputs(batch * inputs), *y[2];
    for (int k = 0; k < 2; k++) y[k] = malloc((size_t)(batch * outputs) * sizeof **y);
    multiply_coded(multiplier, blocks, batch, inputs, outputs, x, y[0]);
    multiply_coded(coded_multiplier(PORTABLE, coded.format), blocks, batch, inputs, outputs, x, y[1]);
    if (memcmp(y[0], y[1], (size_t)(batch * outputs) * sizeof **y)) {
        printf("%s: format %d by %d rows has other bits\n", name, coded.format, (int)batch);
        exit(1);
    }
    free(rows), free(x), free(y[0]), free(y[1]);
}

/* All formats, by few rows and many. */
static void check_bits(InstructionSet set, const char *name) {
    static const int64_t batches[] = {1, 2, 5, 16, 17, 33, 130};
    for (size_t f = 0; f < sizeof coded_formats / sizeof *coded_formats; f++) {
        for (size_t b = 0; b < sizeof batches / sizeof *batches; b++)
            check_bits_of(set, name, coded_formats[f], batches[b], 512, 45);
        if (coded_multiplier(set, coded_formats[f].format)->block == 32)
            check_bits_of(set, name, coded_formats[f], 3, 288, 70);
    }
}
