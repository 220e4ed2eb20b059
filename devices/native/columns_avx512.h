/* The inner loops of columns.c with AVX512_BF16: an instruction adds the products of a pair of inputs. */
#ifndef MOESCHED_COLUMNS_AVX512_H
#define MOESCHED_COLUMNS_AVX512_H

#include <string.h>

#include "columns.h"
#include "round_avx512.h"

#define PAIRS_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define PAIRS_INLINE static inline __attribute__((always_inline)) PAIRS_TARGET
#define UNROLL _Pragma("GCC unroll 8")

enum {
    PANEL = 6, /* rows whose sums of two vectors stay in registers */
    FEW_PAIRS = 4, /* that are added at once where rows are few: each of their inputs is a stream of memory */
};

/* The pairs of two inputs and a vector of outputs: in each eight outputs, those of the first four and of the others. */
typedef struct {
    __m512bh low, high;
} Pairs;

#define ALL_OUTPUTS 0xffffffffu

/* Lanes that are not `here` are no outputs. */
PAIRS_INLINE __m512i weights_at(const uint16_t *weights, __mmask32 here) {
    return here == ALL_OUTPUTS ? _mm512_loadu_si512(weights) : _mm512_maskz_loadu_epi16(here, weights);
}

PAIRS_INLINE Pairs pairs_of(const uint16_t *first_input, const uint16_t *second_input, __mmask32 here) {
    __m512i first = weights_at(first_input, here), second = weights_at(second_input, here);
    __asm__("" : "+v"(first), "+v"(second)); /* or GCC loads each of them twice */
    return (Pairs){(__m512bh)_mm512_unpacklo_epi16(first, second), (__m512bh)_mm512_unpackhi_epi16(first, second)};
}

/* The sums of a row's vector of outputs: those of low pairs, then those of high ones. */
PAIRS_INLINE float *sums_at(const Tile *tile, int64_t row, int64_t output) { return tile->sums + row * tile->strip + output; }

/* Adds to the sums of R rows and V vectors of outputs, from `row` and `output` on. Lanes that are not `here` are no outputs. */
PAIRS_INLINE void add_panel(const int R, const int V, const Tile *tile, int64_t row, int64_t output, __mmask32 here) {
    __m512 low[PANEL][2], high[PANEL][2];
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int v = 0; v < V; v++) {
            low[r][v] = _mm512_load_ps(sums_at(tile, row + r, output + v * VECTOR));
            high[r][v] = _mm512_load_ps(sums_at(tile, row + r, output + v * VECTOR) + VECTOR / 2);
        }
    for (int64_t pair = 0; pair < tile->pairs; pair++) {
        Pairs pairs[2];
        UNROLL
        for (int v = 0; v < V; v++) {
            const int64_t at = output + v * VECTOR;
            pairs[v] = pairs_of(tile->weights[2 * pair] + at, tile->weights[2 * pair + 1] + at, here);
            if (!row) {
                __builtin_prefetch(tile->weights[INPUTS + 2 * pair] + at, 0, 2);
                __builtin_prefetch(tile->weights[INPUTS + 2 * pair + 1] + at, 0, 2);
            }
        }
        const uint32_t *x = tile->x + pair * tile->rows + row;
        UNROLL
        for (int r = 0; r < R; r++) {
            const __m512bh of_row = (__m512bh)_mm512_set1_epi32((int)x[r]);
            UNROLL
            for (int v = 0; v < V; v++) {
                low[r][v] = _mm512_dpbf16_ps(low[r][v], pairs[v].low, of_row);
                high[r][v] = _mm512_dpbf16_ps(high[r][v], pairs[v].high, of_row);
            }
        }
    }
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int v = 0; v < V; v++) {
            _mm512_store_ps(sums_at(tile, row + r, output + v * VECTOR), low[r][v]);
            _mm512_store_ps(sums_at(tile, row + r, output + v * VECTOR) + VECTOR / 2, high[r][v]);
        }
}

PAIRS_INLINE __mmask32 outputs_from(const Tile *tile, int64_t output) {
    const int64_t left = tile->outputs - output;
    return left < VECTOR ? (__mmask32)((1u << left) - 1) : ALL_OUTPUTS;
}

/* Adds to all outputs of R rows. */
PAIRS_INLINE void add_rows(const int R, const Tile *tile, int64_t row) {
    int64_t output = 0;
    for (; output + 2 * VECTOR <= tile->outputs; output += 2 * VECTOR) add_panel(R, 2, tile, row, output, ALL_OUTPUTS);
    for (; output < tile->outputs; output += VECTOR) add_panel(R, 1, tile, row, output, outputs_from(tile, output));
}

/* Adds FEW_PAIRS pairs to a vector of outputs of R rows, all rows of the tile. Pairs are not counted, and all addresses are
 * known, so that the processor reads weights for later outputs while it multiplies. With one row it does so far enough ahead
 * by itself. */
PAIRS_INLINE void add_few_panel(const int R, const uint16_t *const *weights, const uint16_t *const *ahead, const uint32_t *x,
                                float *sums, int64_t strip, int64_t output, __mmask32 here) {
    __m512 low[FEW_ROWS], high[FEW_ROWS];
    UNROLL
    for (int r = 0; r < R; r++) {
        low[r] = _mm512_load_ps(sums + r * strip + output);
        high[r] = _mm512_load_ps(sums + r * strip + output + VECTOR / 2);
    }
    UNROLL
    for (int pair = 0; pair < FEW_PAIRS; pair++) {
        const Pairs pairs = pairs_of(weights[2 * pair] + output, weights[2 * pair + 1] + output, here);
        if (R > 1) {
            __builtin_prefetch(ahead[2 * pair] + output);
            __builtin_prefetch(ahead[2 * pair + 1] + output);
        }
        UNROLL
        for (int r = 0; r < R; r++) {
            const __m512bh of_row = (__m512bh)_mm512_set1_epi32((int)x[pair * R + r]);
            low[r] = _mm512_dpbf16_ps(low[r], pairs.low, of_row);
            high[r] = _mm512_dpbf16_ps(high[r], pairs.high, of_row);
        }
    }
    UNROLL
    for (int r = 0; r < R; r++) {
        _mm512_store_ps(sums + r * strip + output, low[r]);
        _mm512_store_ps(sums + r * strip + output + VECTOR / 2, high[r]);
    }
}

PAIRS_INLINE void add_few(const int R, const Tile *tile) {
    const int64_t outputs = tile->outputs, strip = tile->strip;
    float *const sums = tile->sums;
    for (int64_t pair = 0; pair < tile->pairs; pair += FEW_PAIRS) {
        const uint16_t *weights[2 * FEW_PAIRS], *ahead[2 * FEW_PAIRS];
        uint32_t x[FEW_PAIRS * FEW_ROWS];
        memcpy(weights, tile->weights + 2 * pair, sizeof weights);
        memcpy(ahead, tile->weights + 2 * pair + INPUTS_AHEAD, sizeof ahead);
        memcpy(x, tile->x + pair * R, (size_t)(FEW_PAIRS * R) * sizeof *x);
        int64_t output = 0;
        for (; output + VECTOR <= outputs; output += VECTOR)
            add_few_panel(R, weights, ahead, x, sums, strip, output, ALL_OUTPUTS);
        if (output < outputs)
            add_few_panel(R, weights, ahead, x, sums, strip, output, outputs_from(tile, output));
    }
}

static PAIRS_TARGET void add_to_one(const Tile *tile) { add_few(1, tile); }
static PAIRS_TARGET void add_to_two(const Tile *tile) { add_few(2, tile); }
static PAIRS_TARGET void add_to_three(const Tile *tile) { add_few(3, tile); }
static PAIRS_TARGET void add_to_four(const Tile *tile) { add_few(4, tile); }

static PAIRS_TARGET void add_pairs(const Tile *tile) {
    if (tile->rows <= FEW_ROWS && tile->pairs % FEW_PAIRS == 0) {
        void (*const add[FEW_ROWS])(const Tile *) = {add_to_one, add_to_two, add_to_three, add_to_four};
        add[tile->rows - 1](tile);
        return;
    }
    const int64_t panels = (tile->rows + PANEL - 1) / PANEL;
    for (int64_t panel = 0; panel < panels; panel++) {
        const int64_t row = tile->rows * panel / panels;
        switch (tile->rows * (panel + 1) / panels - row) {
            case 1: add_rows(1, tile, row); break;
            case 2: add_rows(2, tile, row); break;
            case 3: add_rows(3, tile, row); break;
            case 4: add_rows(4, tile, row); break;
            case 5: add_rows(5, tile, row); break;
            default: add_rows(6, tile, row);
        }
    }
}

static PAIRS_TARGET void write_pairs(const Tile *tile, int64_t row, uint16_t *y) {
    for (int64_t output = 0; output < tile->outputs; output += VECTOR) {
        const float *sums = sums_at(tile, row, output);
        const __m512i low = _mm512_srli_epi32(rounded_avx512(_mm512_load_ps(sums)), 16);
        const __m512i high = _mm512_srli_epi32(rounded_avx512(_mm512_load_ps(sums + VECTOR / 2)), 16);
        _mm512_mask_storeu_epi16(y + output, outputs_from(tile, output), _mm512_packus_epi32(low, high));
    }
}

static const ColumnLoops pair_loops = {add_pairs, write_pairs};

#endif
