/* One row of x by rows of weights as they lie, included by coded.c for AVX2 after coded_formats.h: to turn weights into lanes
 * costs more than to multiply them once. Sums are whole numbers, so their bits are those of tiles. */

/* In each lane, the sum of the lanes of one of eight vectors. */
INLINE __m256i lane_sums(const __m256i *sums) {
    __m256i pairs[4], quads[2];
    for (int i = 0; i < 4; i++)
        pairs[i] = _mm256_add_epi32(_mm256_unpacklo_epi32(sums[2 * i], sums[2 * i + 1]),
                                    _mm256_unpackhi_epi32(sums[2 * i], sums[2 * i + 1]));
    for (int i = 0; i < 2; i++)
        quads[i] = _mm256_add_epi32(_mm256_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                                    _mm256_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(quads[0], quads[1], 0x20),
                            _mm256_permute2x128_si256(quads[0], quads[1], 0x31));
}

/* The codes of a group, 32 signed bytes, times the even and the odd multiples of x. */
INLINE __m256i products_of_bytes(const char *bytes, __m256i even, __m256i odd) {
    const __m256i codes = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)bytes), _mm256_set1_epi8((char)Q8_0_ZERO));
    return _mm256_add_epi32(_mm256_madd_epi16(_mm256_and_si256(codes, _mm256_set1_epi16(255)), even),
                            _mm256_madd_epi16(_mm256_srli_epi16(codes, 8), odd));
}

/* Adds LANES rows of q8_0 times x to the total. */
static TARGET void one_row_q8_0(const uint8_t *first, int64_t stride, int64_t weights, const char *pieces, const Group *group,
                                Ahead *ahead, void *total) {
    EightRows rows = eight_rows(first, stride);
    Floats *sum = total;
    for (int64_t g = 0; g < weights / 32; g++, rows.first += 34, pieces += PIECES_BYTES(32), group++) {
        const __m256i *multiples = (const __m256i *)pieces;
        const __m256i even = _mm256_loadu_si256(multiples), odd = _mm256_loadu_si256(multiples + 1);
        __m256i sums[8];
        fetch(ahead);
        _Pragma("GCC unroll 8")
        for (int row = 0; row < 8; row++) sums[row] = products_of_bytes((const char *)row_of(&rows, row) + 2, even, odd);
        fetch(ahead);
        const Floats scales = (Floats)_mm256_cvtph_ps(eight_halves(rows.first, stride));
        *sum += __builtin_convertvector((Ints)lane_sums(sums) + group->offset, Floats) * group->unit * scales;
    }
}

/* The codes of a group, 32 halves of bytes from bit `shift` on, times the even and the odd multiples of x. */
INLINE __m256i products_of_halves(const char *bytes, const int shift, __m256i even, __m256i odd) {
    const __m256i codes = _mm256_loadu_si256((const __m256i *)bytes), half = _mm256_set1_epi16(15);
    return _mm256_add_epi32(_mm256_madd_epi16(_mm256_and_si256(_mm256_srli_epi16(codes, shift), half), even),
                            _mm256_madd_epi16(_mm256_and_si256(_mm256_srli_epi16(codes, shift + 8), half), odd));
}

/* Adds LANES rows of q4_k times x to the total. */
static TARGET void one_row_q4_k(const uint8_t *first, int64_t stride, int64_t weights, const char *pieces, const Group *group,
                                Ahead *ahead, void *total) {
    (void)weights;
    EightRows rows = eight_rows(first + 16, stride);
    Floats *sum = total;
    Tile tile; /* its scales and minimums alone */
    ISA(unpack_six_bits)(first, stride, &tile);
    for (int pair = 0; pair < 4; pair++, rows.first += 32)
        _Pragma("GCC unroll 2")
        for (int upper = 0; upper < 2; upper++, pieces += PIECES_BYTES(32), group++) {
            const __m256i *multiples = (const __m256i *)pieces;
            const __m256i even = _mm256_loadu_si256(multiples), odd = _mm256_loadu_si256(multiples + 1);
            __m256i sums[8];
            fetch(ahead);
            _Pragma("GCC unroll 8")
            for (int row = 0; row < 8; row++) sums[row] = products_of_halves(row_of(&rows, row), 4 * upper, even, odd);
            fetch(ahead);
            const Floats products = __builtin_convertvector((Ints)lane_sums(sums), Floats) * group->unit;
            *sum += products * tile.scales[2 * pair + upper] + group->sum * tile.minimums[2 * pair + upper];
        }
}
