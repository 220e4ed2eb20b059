/* The inner loops of columns.c with AVX512_BF16: an instruction adds the products of a pair of inputs. */
#ifndef MOESCHED_COLUMNS_AVX512_H
#define MOESCHED_COLUMNS_AVX512_H

#include "columns.h"
#include "round_avx512.h"

#define PAIRS_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define PAIRS_INLINE static inline __attribute__((always_inline)) PAIRS_TARGET
#define UNROLL _Pragma("GCC unroll 8")

enum { PANEL = 6 }; /* rows whose sums of two vectors stay in registers */

/* The sums of a row's vector of outputs: those of even outputs, then those of odd ones. */
PAIRS_INLINE float *sums_at(const Tile *tile, int64_t row, int64_t output) { return tile->sums + row * tile->strip + output; }

/* Adds to the sums of R rows and V vectors of outputs, from `row` and `output` on. Lanes that are not `here` are no outputs. */
PAIRS_INLINE void add_panel(const int R, const int V, const Tile *tile, int64_t row, int64_t output, __mmask32 here) {
    const __m512i up = _mm512_set1_epi32(0x01000100), down = _mm512_set1_epi32(0x03020302);
    const __m512i lanes = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c));
    const __m512i to_odd = _mm512_add_epi32(up, lanes), to_even = _mm512_add_epi32(down, lanes);
    const __mmask64 odd_halves = 0xccccccccccccccccu;
    __m512 even[PANEL][2], odd[PANEL][2];
    UNROLL
    for (int r = 0; r < R; r++)
        UNROLL
        for (int v = 0; v < V; v++) {
            even[r][v] = _mm512_load_ps(sums_at(tile, row + r, output + v * VECTOR));
            odd[r][v] = _mm512_load_ps(sums_at(tile, row + r, output + v * VECTOR) + VECTOR / 2);
        }
    for (int64_t pair = 0; pair < tile->pairs; pair++) {
        __m512i even_pairs[2], odd_pairs[2];
        UNROLL
        for (int v = 0; v < V; v++) {
            const int64_t at = output + v * VECTOR;
            const __m512i first = _mm512_maskz_loadu_epi16(here, tile->weights[2 * pair] + at);
            const __m512i second = _mm512_maskz_loadu_epi16(here, tile->weights[2 * pair + 1] + at);
            even_pairs[v] = _mm512_mask_shuffle_epi8(first, odd_halves, second, to_odd);
            odd_pairs[v] = _mm512_mask_shuffle_epi8(second, ~odd_halves, first, to_even);
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
                even[r][v] = _mm512_dpbf16_ps(even[r][v], (__m512bh)even_pairs[v], of_row);
                odd[r][v] = _mm512_dpbf16_ps(odd[r][v], (__m512bh)odd_pairs[v], of_row);
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

static PAIRS_TARGET void add_pairs(const Tile *tile) {
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
