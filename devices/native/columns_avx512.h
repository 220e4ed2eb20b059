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
    FEW_PAIRS = INPUTS_OF_FEW_ROWS / 2,
};

/* The pairs of two inputs and a vector of outputs: those of even outputs, and those of odd ones. */
typedef struct {
    __m512bh even, odd;
} Pairs;

/* Lanes that are not `here` are no outputs. */
PAIRS_INLINE Pairs pairs_of(const uint16_t *first_input, const uint16_t *second_input, __mmask32 here) {
    const __m512i up = _mm512_set1_epi32(0x01000100), down = _mm512_set1_epi32(0x03020302);
    const __m512i lanes = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
    const __m512i to_odd = _mm512_add_epi32(up, lanes), to_even = _mm512_add_epi32(down, lanes);
    const __mmask64 odd_halves = 0xccccccccccccccccu;
    const __m512i first = _mm512_maskz_loadu_epi16(here, first_input), second = _mm512_maskz_loadu_epi16(here, second_input);
    return (Pairs){(__m512bh)_mm512_mask_shuffle_epi8(first, odd_halves, second, to_odd),
                   (__m512bh)_mm512_mask_shuffle_epi8(second, ~odd_halves, first, to_even)};
}

/* The sums of a row's vector of outputs: those of even outputs, then those of odd ones. */
PAIRS_INLINE float *sums_at(const Tile *tile, int64_t row, int64_t output) { return tile->sums + row * tile->strip + output; }

/* Adds to the sums of R rows and V vectors of outputs, from `row` and `output` on. Lanes that are not `here` are no outputs. */
PAIRS_INLINE void add_panel(const int R, const int V, const Tile *tile, int64_t row, int64_t output, __mmask32 here) {
    __m512 even[PANEL][2], odd[PANEL][2];
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int v = 0; v < V; v++) {
            even[r][v] = _mm512_load_ps(sums_at(tile, row + r, output + v * VECTOR));
            odd[r][v] = _mm512_load_ps(sums_at(tile, row + r, output + v * VECTOR) + VECTOR / 2);
        }
    for (int64_t pair = 0; pair < tile->pairs; pair++) {
        Pairs pairs[2];
        UNROLL
        for (int v = 0; v < V; v++) {
            const int64_t at = output + v * VECTOR;
            pairs[v] = pairs_of(tile->weights[2 * pair] + at, tile->weights[2 * pair + 1] + at, here);
            if (!row) {
                __builtin_prefetch(tile->next[2 * pair] + at, 0, 2);
                __builtin_prefetch(tile->next[2 * pair + 1] + at, 0, 2);
            }
        }
        const uint32_t *x = tile->x + pair * tile->rows + row;
        UNROLL
        for (int r = 0; r < R; r++) {
            const __m512bh of_row = (__m512bh)_mm512_set1_epi32((int)x[r]);
            UNROLL
            for (int v = 0; v < V; v++) {
                even[r][v] = _mm512_dpbf16_ps(even[r][v], pairs[v].even, of_row);
                odd[r][v] = _mm512_dpbf16_ps(odd[r][v], pairs[v].odd, of_row);
            }
        }
    }
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int v = 0; v < V; v++) {
            _mm512_store_ps(sums_at(tile, row + r, output + v * VECTOR), even[r][v]);
            _mm512_store_ps(sums_at(tile, row + r, output + v * VECTOR) + VECTOR / 2, odd[r][v]);
        }
}

PAIRS_INLINE __mmask32 outputs_from(const Tile *tile, int64_t output) {
    const int64_t left = tile->outputs - output;
    return left < VECTOR ? (__mmask32)((1u << left) - 1) : 0xffffffffu;
}

/* Adds to all outputs of R rows. */
PAIRS_INLINE void add_rows(const int R, const Tile *tile, int64_t row) {
    int64_t output = 0;
    for (; output + 2 * VECTOR <= tile->outputs; output += 2 * VECTOR) add_panel(R, 2, tile, row, output, 0xffffffffu);
    for (; output < tile->outputs; output += VECTOR) add_panel(R, 1, tile, row, output, outputs_from(tile, output));
}

/* Adds FEW_PAIRS pairs to a vector of outputs of R rows, all rows of the tile. Pairs are not counted, and all addresses are
 * known, so that the processor reads weights for later outputs while it multiplies. */
PAIRS_INLINE void add_few_panel(const int R, const Tile *tile, const uint16_t *const *weights, const uint16_t *const *next,
                                const uint32_t *x, int64_t output, __mmask32 here) {
    __m512 even[FEW_ROWS], odd[FEW_ROWS];
    UNROLL
    for (int r = 0; r < R; r++) {
        even[r] = _mm512_load_ps(sums_at(tile, r, output));
        odd[r] = _mm512_load_ps(sums_at(tile, r, output) + VECTOR / 2);
    }
    UNROLL
    for (int pair = 0; pair < FEW_PAIRS; pair++) {
        const Pairs pairs = pairs_of(weights[2 * pair] + output, weights[2 * pair + 1] + output, here);
        __builtin_prefetch(next[2 * pair] + output, 0, 2);
        __builtin_prefetch(next[2 * pair + 1] + output, 0, 2);
        UNROLL
        for (int r = 0; r < R; r++) {
            const __m512bh of_row = (__m512bh)_mm512_set1_epi32((int)x[pair * R + r]);
            even[r] = _mm512_dpbf16_ps(even[r], pairs.even, of_row);
            odd[r] = _mm512_dpbf16_ps(odd[r], pairs.odd, of_row);
        }
    }
    UNROLL
    for (int r = 0; r < R; r++) {
        _mm512_store_ps(sums_at(tile, r, output), even[r]);
        _mm512_store_ps(sums_at(tile, r, output) + VECTOR / 2, odd[r]);
    }
}

PAIRS_INLINE void add_few(const int R, const Tile *tile) {
    const uint16_t *weights[INPUTS_OF_FEW_ROWS], *next[INPUTS_OF_FEW_ROWS];
    uint32_t x[FEW_PAIRS * FEW_ROWS];
    memcpy(weights, tile->weights, sizeof weights);
    memcpy(next, tile->next, sizeof next);
    memcpy(x, tile->x, sizeof x);
    int64_t output = 0;
    for (; output + VECTOR <= tile->outputs; output += VECTOR)
        add_few_panel(R, tile, weights, next, x, output, 0xffffffffu);
    if (output < tile->outputs) add_few_panel(R, tile, weights, next, x, output, outputs_from(tile, output));
}

static PAIRS_TARGET void add_to_one(const Tile *tile) { add_few(1, tile); }
static PAIRS_TARGET void add_to_two(const Tile *tile) { add_few(2, tile); }
static PAIRS_TARGET void add_to_three(const Tile *tile) { add_few(3, tile); }

static PAIRS_TARGET void add_pairs(const Tile *tile) {
    if (tile->rows <= FEW_ROWS && tile->pairs == FEW_PAIRS) {
        void (*const add[FEW_ROWS])(const Tile *) = {add_to_one, add_to_two, add_to_three};
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
        const __m512i words = words_avx512(_mm512_load_ps(sums), _mm512_load_ps(sums + VECTOR / 2));
        _mm512_mask_storeu_epi16(y + output, outputs_from(tile, output), words);
    }
}

static const ColumnLoops pair_loops = {add_pairs, write_pairs};

#endif
