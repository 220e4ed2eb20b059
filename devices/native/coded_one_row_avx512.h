/* One row of x by coded rows of weights, included by coded.c after coded_formats.h where processors multiply bytes in
 * vectors of 512 bits: codes are multiplied as they are unpacked, or as they lie. A tile would be written to memory to be
 * read once. */

/* Codes of a group, four in each lane of `words` vectors, times the pieces of a row of x. */
INLINE Ints ISA(row_sum)(const Words *codes, const char *pieces, const int words, int32_t offset) {
    const __m512i zero = _mm512_setzero_si512();
    __m512i lower[2] = {_mm512_set1_epi32(offset), zero}, upper[2] = {zero, zero}; /* chains of half the length */
    _Pragma("GCC unroll 8")
    for (int w = 0; w < words; w++, pieces += 4) {
        const __m512i code = (__m512i)codes[w];
        upper[w % 2] = _mm512_dpbusd_epi32(upper[w % 2], code, _mm512_set1_epi32(word_at(pieces)));
        lower[w % 2] = _mm512_dpbusd_epi32(lower[w % 2], code, _mm512_set1_epi32(word_at(pieces + 4 * words)));
    }
    return (Ints)_mm512_add_epi32(_mm512_add_epi32(lower[0], lower[1]),
                                  _mm512_slli_epi32(_mm512_add_epi32(upper[0], upper[1]), 8));
}

/* With each 32 weights of vector v: three times in all for two vectors, as often as for tiles. */
INLINE void ISA(fetch_beside)(int v, Ahead *ahead) {
    fetch(ahead);
    if (v) fetch(ahead);
}

/* The codes of a group of two rows, 32 signed bytes each, times the bytes of multiples of x. */
INLINE __m512i ISA(products_of_bytes)(const void *row, const void *below, __m512i upper, __m512i lower) {
    const __m512i bytes = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(row)), _mm256_loadu_si256(below), 1);
    const __m512i codes = _mm512_xor_si512(bytes, _mm512_set1_epi8((char)Q8_0_ZERO));
    const __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, upper);
    return _mm512_dpbusd_epi32(_mm512_slli_epi32(sums, 8), codes, lower);
}

/* In each lane, the sum of the eight lanes of a row: vector i % 4 of a half has rows i and i + 4 of eight. */
INLINE Ints ISA(lane_sums)(const __m512i *rows) {
    __m512i pairs[4], quads[2];
    for (int i = 0; i < 4; i++)
        pairs[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]),
                                    _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]));
    for (int i = 0; i < 2; i++)
        quads[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                                    _mm512_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
    return (Ints)_mm512_add_epi32(_mm512_shuffle_i32x4(quads[0], quads[1], 0x88),
                                  _mm512_shuffle_i32x4(quads[0], quads[1], 0xdd));
}

/* Rows of q8_0 are multiplied as they lie: to turn words into lanes takes more than to add up lanes. */
static TARGET void ISA(one_row_q8_0)(const uint8_t *first, int64_t stride, int64_t weights, const char *x, const Group *group,
                                     Ahead *ahead, void *total) {
    Floats *totals = total;
    for (int64_t g = 0; g < weights / 32; g++, first += 34, x += PIECES_BYTES(32), group++) {
        const __m512i upper = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)x));
        const __m512i lower = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(x + 32)));
        _Pragma("GCC unroll 2")
        for (int v = 0; v < VECTORS; v++) {
            const EightRows halves[2] = {eight_rows(first + v * LANES * stride, stride),
                                         eight_rows(first + v * LANES * stride + 8 * stride, stride)};
            __m512i sums[8];
            ISA(fetch_beside)(v, ahead);
            _Pragma("GCC unroll 8")
            for (int i = 0; i < 8; i++)
                sums[i] = ISA(products_of_bytes)((const uint8_t *)row_of(&halves[i / 4], i % 4) + 2,
                                                 (const uint8_t *)row_of(&halves[i / 4], i % 4 + 4) + 2, upper, lower);
            const Floats scales = (Floats)WIDENED(HALVES(first + v * LANES * stride, stride));
            const Floats products = __builtin_convertvector(ISA(lane_sums)(sums) + group->offset, Floats);
            totals[v] += products * group->unit * scales;
        }
    }
}

/* Returns a sum with the products of LANES rows added; they are vector `v` of all rows. */
typedef Floats ISA(AddRow)(Floats sum, const uint8_t *rows, int64_t stride, const char *x, const Group *group, int v,
                           Ahead *ahead);

INLINE Floats ISA(add_q4_k)(Floats sum, const uint8_t *rows, int64_t stride, const char *x, const Group *group, int v,
                            Ahead *ahead) {
    Tile tile; /* its scales and minimums alone */
    ISA(unpack_six_bits)(rows, stride, &tile);
    for (int pair = 0; pair < 4; pair++) {
        Words codes[16];
        ISA(unpack_halves)(rows + 16 + 32 * pair, stride, 8, codes);
        _Pragma("GCC unroll 2")
        for (int upper = 0; upper < 2; upper++, group++, x += PIECES_BYTES(32)) {
            ISA(fetch_beside)(v, ahead);
            const Floats product = __builtin_convertvector(ISA(row_sum)(codes + 8 * upper, x, 8, group->offset), Floats);
            const int g = 2 * pair + upper;
            sum += product * group->unit * tile.scales[g] + group->sum * tile.minimums[g];
        }
    }
    return sum;
}

INLINE Floats ISA(add_q6_k)(Floats sum, const uint8_t *rows, int64_t stride, const char *x, const Group *group, int v,
                            Ahead *ahead) {
    Tile tile; /* its scales alone */
    ISA(scales_q6_k)(rows, stride, &tile);
    for (int half = 0; half < 2; half++) {
        Words lowest[16], highest[8];
        ISA(words_q6_k)(rows, stride, half, lowest, highest);
        _Pragma("GCC unroll 8")
        for (int part = 0; part < 8; part++, group++, x += PIECES_BYTES(16)) {
            Words codes[4];
            if (part % 2) ISA(fetch_beside)(v, ahead);
            for (int w = 0; w < 4; w++) codes[w] = ISA(six_bits)(lowest, highest, 4 * part + w);
            const Floats product = __builtin_convertvector(ISA(row_sum)(codes, x, 4, group->offset), Floats);
            sum += product * group->unit * tile.scales[8 * half + part];
        }
    }
    return sum;
}

/* Adds ROWS rows of a format times x to the totals. */
INLINE void ISA(add_rows_of)(ISA(AddRow) *add, const uint8_t *rows, int64_t stride, const char *x, const Group *groups,
                             Ahead *ahead, Floats *totals) {
    for (int v = 0; v < VECTORS; v++) totals[v] = add(totals[v], rows + v * LANES * stride, stride, x, groups, v, ahead);
}

static TARGET void ISA(one_row_q4_k)(const uint8_t *rows, int64_t stride, int64_t weights, const char *x, const Group *groups,
                                     Ahead *ahead, void *totals) {
    (void)weights;
    ISA(add_rows_of)(ISA(add_q4_k), rows, stride, x, groups, ahead, totals);
}

static TARGET void ISA(one_row_q6_k)(const uint8_t *rows, int64_t stride, int64_t weights, const char *x, const Group *groups,
                                     Ahead *ahead, void *totals) {
    (void)weights;
    ISA(add_rows_of)(ISA(add_q6_k), rows, stride, x, groups, ahead, totals);
}

#define Q8_0_ONE_ROW ISA(one_row_q8_0)
#define Q4_K_ONE_ROW ISA(one_row_q4_k)
#define Q6_K_ONE_ROW ISA(one_row_q6_k)
