/* Readers of coded rows, included once for each instruction set.
 *
 * The including file defines
 *   ISA(name)   the name with the instruction set's ending
 *   TARGET      the function attribute that lets the compiler use its instructions
 *   LANES       rows of weights of a tile, one in each lane of a vector
 *   ISA(words)  (first, stride, count, words) reads words of four bytes, `count` of each row, a multiple of 4: vector w
 *               has those at `first` + 4 w of rows that are `stride` bytes apart
 *   HALVES, WIDENED, OF_FP4  optionally, its own `halves`, `widened` and `of_fp4`
 *   SIGNED_CODES  where products take codes as signed bytes: those of q8_0 stay as they are, the others have no sign
 */

#if defined(SIGNED_CODES)
#define Q8_0_ZERO 0
#else
#define Q8_0_ZERO 128
#endif
#define Q8_0_SIGNS (Q8_0_ZERO * 0x01010101u)

typedef uint32_t ISA(Words) __attribute__((vector_size(LANES * 4)));
typedef int32_t ISA(Ints) __attribute__((vector_size(LANES * 4)));
typedef float ISA(Floats) __attribute__((vector_size(LANES * 4)));
typedef uint16_t ISA(Halves) __attribute__((vector_size(LANES * 2)));
#define Words ISA(Words)
#define Ints ISA(Ints)
#define Floats ISA(Floats)
#define Halves ISA(Halves)
#define INLINE static inline __attribute__((always_inline)) TARGET

/* CHUNK weights of LANES rows, or as many as are left: codes as they are multiplied, four in each lane of a vector;
 * the scale and the minimum of each group. */
typedef struct {
    Words codes[CHUNK / 4];
    Floats scales[MOST_GROUPS], minimums[MOST_GROUPS];
} ISA(Tile);
#define Tile ISA(Tile)

/* The 16-bit number at `first` of each row. */
INLINE Words ISA(halves)(const uint8_t *first, int64_t stride) {
#if defined(HALVES)
    return (Words)HALVES(first, stride);
#else
    Words halves;
    _Pragma("GCC unroll 16")
    for (int row = 0; row < LANES; row++) {
        uint16_t half;
        memcpy(&half, first + row * stride, sizeof half);
        halves[row] = half;
    }
    return halves;
#endif
}

/* float16 to float32. An exponent grows by 112, that of infinity and NaN twice; subnormal numbers are multiples. */
INLINE Floats ISA(widened)(Words halves) {
#if defined(WIDENED)
    return (Floats)WIDENED(halves);
#else
    const Words exponent = halves & 0x7c00, infinite = (Words)(exponent == 0x7c00), subnormal = (Words)(exponent == 0);
    const Words number = ((halves & 0x7fff) << 13) + (0x38000000 + (infinite & 0x38000000));
    const Floats multiple = __builtin_convertvector((Ints)(halves & 0x03ff), Floats) * 0x1p-24f;
    return (Floats)((number & ~subnormal) | ((Words)multiple & subnormal) | (halves & 0x8000) << 16);
#endif
}

/* Byte `number` of each word. */
INLINE Floats ISA(byte)(Words words, int number) {
    return __builtin_convertvector((Ints)(words >> 8 * number & 255), Floats);
}

INLINE Floats ISA(signed_byte)(Words words, int number) {
    return __builtin_convertvector((Ints)(words << 8 * (3 - number)) >> 24, Floats);
}

/* Four bits of each word, from bit `first` on, as bit 4 of its bytes. */
INLINE Words ISA(fifth_bits)(Words words, int first) {
    return (words >> first & 15) * 0x00204081 << 4 & 0x10101010;
}

static TARGET void ISA(unpack_q8_0)(const uint8_t *rows, int64_t stride, int64_t weights, Tile *tile, Ahead *ahead) {
    for (int64_t group = 0; group < weights / 32; group++, rows += 34) {
        Words codes[8];
        ISA(words)(rows + 2, stride, 8, codes);
        for (int w = 0; w < 8; w++) tile->codes[group * 8 + w] = codes[w] ^ Q8_0_SIGNS;
        tile->scales[group] = ISA(widened)(ISA(halves)(rows, stride));
        fetch(ahead);
    }
}

/* Lower halves of bytes have the first codes, upper halves the last ones. */
INLINE void ISA(unpack_halves)(const uint8_t *first, int64_t stride, int count, Words *codes) {
    Words both[16];
    ISA(words)(first, stride, count, both);
    for (int w = 0; w < count; w++) {
        codes[w] = both[w] & 0x0f0f0f0f;
        codes[count + w] = both[w] >> 4 & 0x0f0f0f0f;
    }
}

static TARGET void ISA(unpack_q4_0)(const uint8_t *rows, int64_t stride, int64_t weights, Tile *tile, Ahead *ahead) {
    for (int64_t group = 0; group < weights / 32; group++, rows += 18) {
        Words *codes = tile->codes + group * 8;
        ISA(unpack_halves)(rows + 2, stride, 4, codes);
        tile->scales[group] = ISA(widened)(ISA(halves)(rows, stride));
        fetch(ahead);
    }
}

/* Codes of five bits, whose highest bits are in the four bytes before the others. */
INLINE void ISA(unpack_five_bits)(const uint8_t *first, int64_t stride, Words *codes) {
    Words word[4]; /* the highest bits, and some that are read again */
    ISA(words)(first, stride, 4, word);
    ISA(unpack_halves)(first + 4, stride, 4, codes);
    for (int w = 0; w < 8; w++) codes[w] |= ISA(fifth_bits)(word[0], 4 * w);
}

static TARGET void ISA(unpack_q5_0)(const uint8_t *rows, int64_t stride, int64_t weights, Tile *tile, Ahead *ahead) {
    for (int64_t group = 0; group < weights / 32; group++, rows += 22) {
        ISA(unpack_five_bits)(rows + 2, stride, tile->codes + group * 8);
        tile->scales[group] = ISA(widened)(ISA(halves)(rows, stride));
        fetch(ahead);
    }
}

static TARGET void ISA(unpack_q5_1)(const uint8_t *rows, int64_t stride, int64_t weights, Tile *tile, Ahead *ahead) {
    for (int64_t group = 0; group < weights / 32; group++, rows += 24) {
        ISA(unpack_five_bits)(rows + 4, stride, tile->codes + group * 8);
        tile->scales[group] = ISA(widened)(ISA(halves)(rows, stride));
        fetch(ahead);
        tile->minimums[group] = ISA(widened)(ISA(halves)(rows + 2, stride));
    }
}

/* Scales and minimums of eight groups: two numbers in float16, and 16 factors of six bits in twelve bytes. */
INLINE void ISA(unpack_six_bits)(const uint8_t *first, int64_t stride, Tile *tile) {
    Words word[4];
    ISA(words)(first, stride, 4, word);
    const Floats scale = ISA(widened)(word[0] & 0xffff), minimum = -ISA(widened)(word[0] >> 16);
    const Words scales[] = {word[1] & 0x3f3f3f3f, (word[3] & 0x0f0f0f0f) | (word[1] >> 2 & 0x30303030)};
    const Words minimums[] = {word[2] & 0x3f3f3f3f, (word[3] >> 4 & 0x0f0f0f0f) | (word[2] >> 2 & 0x30303030)};
    for (int group = 0; group < 8; group++) {
        tile->scales[group] = scale * ISA(byte)(scales[group / 4], group % 4);
        tile->minimums[group] = minimum * ISA(byte)(minimums[group / 4], group % 4);
    }
}

static TARGET void ISA(unpack_q4_k)(const uint8_t *rows, int64_t stride, int64_t weights, Tile *tile, Ahead *ahead) {
    (void)weights;
    ISA(unpack_six_bits)(rows, stride, tile);
    for (int pair = 0; pair < 4; pair++) {
        Words *codes = tile->codes + pair * 16;
        fetch(ahead);
        fetch(ahead);
        ISA(unpack_halves)(rows + 16 + 32 * pair, stride, 8, codes);
    }
}

static TARGET void ISA(unpack_q5_k)(const uint8_t *rows, int64_t stride, int64_t weights, Tile *tile, Ahead *ahead) {
    (void)weights;
    Words highest[8];
    ISA(unpack_six_bits)(rows, stride, tile);
    ISA(words)(rows + 16, stride, 8, highest);
    for (int pair = 0; pair < 4; pair++) {
        Words *codes = tile->codes + pair * 16, lowest[8];
        fetch(ahead);
        fetch(ahead);
        ISA(words)(rows + 48 + 32 * pair, stride, 8, lowest);
        for (int w = 0; w < 8; w++) {
            codes[w] = (lowest[w] & 0x0f0f0f0f) | (highest[w] << 4 & 0x10101010);
            codes[8 + w] = (lowest[w] >> 4 & 0x0f0f0f0f) | (highest[w] << 3 & 0x10101010);
            highest[w] >>= 2;
        }
    }
}

INLINE void ISA(scales_q6_k)(const uint8_t *rows, int64_t stride, Tile *tile) {
    Words factors[4];
    ISA(words)(rows + 192, stride, 4, factors);
    const Floats scale = ISA(widened)(ISA(halves)(rows + 208, stride));
    for (int group = 0; group < 16; group++)
        tile->scales[group] = scale * ISA(signed_byte)(factors[group / 4], group % 4);
}

/* The words of half a block that have the lower four bits of its codes, and the upper two. */
INLINE void ISA(words_q6_k)(const uint8_t *rows, int64_t stride, int half, Words *lowest, Words *highest) {
    ISA(words)(rows + 64 * half, stride, 16, lowest);
    ISA(words)(rows + 128 + 32 * half, stride, 8, highest);
}

/* Word w of half a block's codes. */
INLINE Words ISA(six_bits)(const Words *lowest, const Words *highest, int w) {
    const Words lower = w < 16 ? lowest[w] : lowest[w - 16] >> 4, upper = highest[w % 8];
    const Words placed = w < 8 ? upper << 4 : w < 16 ? upper << 2 : w < 24 ? upper : upper >> 2;
    return (lower & 0x0f0f0f0f) | (placed & 0x30303030);
}

static TARGET void ISA(unpack_q6_k)(const uint8_t *rows, int64_t stride, int64_t weights, Tile *tile, Ahead *ahead) {
    (void)weights;
    ISA(scales_q6_k)(rows, stride, tile);
    _Pragma("GCC unroll 2")
    for (int half = 0; half < 2; half++) {
        Words lowest[16], highest[8];
        ISA(words_q6_k)(rows, stride, half, lowest, highest);
        _Pragma("GCC unroll 32")
        for (int w = 0; w < 32; w++) tile->codes[half * 32 + w] = ISA(six_bits)(lowest, highest, w);
        for (int part = 0; part < 4; part++) fetch(ahead);
    }
}

/* Twice the numbers of the format e2m1, and 12 more, so that no byte borrows from the next one: 0 to 4 are themselves,
 * 5 to 7 are 6, 8 and 12. */
INLINE Words ISA(of_fp4)(Words codes) {
#if defined(OF_FP4)
    return (Words)OF_FP4(codes);
#else
    const Words size = codes & 0x07070707, from_four = size >> 2 & 0x01010101;
    const Words above_four = size & (from_four | from_four << 1), seven = above_four & above_four >> 1 & 0x01010101;
    const Words number = size + above_four + (seven << 1);
    const Words sign = codes >> 3 & 0x01010101, negative = (sign << 8) - sign;
    return (number & ~negative) + 0x0c0c0c0c - (number & negative);
#endif
}

static TARGET void ISA(unpack_mxfp4)(const uint8_t *rows, int64_t stride, int64_t weights, Tile *tile, Ahead *ahead) {
    for (int64_t group = 0; group < weights / 32; group++, rows += 17) {
        Words *codes = tile->codes + group * 8;
        ISA(unpack_halves)(rows + 1, stride, 4, codes);
        for (int w = 0; w < 8; w++) codes[w] = ISA(of_fp4)(codes[w]);
        const Words exponents = ISA(halves)(rows, stride) & 255;
        const Words subnormal = (Words)(exponents < 2), no_number = (Words)(exponents == 255);
        fetch(ahead);
        const Words least = 0x00200000u << (exponents & 1);
        tile->scales[group] = (Floats)((subnormal & least) | (~subnormal & (exponents - 1) << 23) | no_number);
    }
}
