/* Products by coded matrices, included once for each instruction set, after coded_formats.h and with its macros.
 *
 * The including file also defines
 *   VECTORS     vectors of rows of weights that are multiplied at once
 *   ISA(put)    puts the multiples of a group into its pieces: 2 bytes for each
 *   ISA(sums)   adds codes times multiples of a group, for each row of weights
 *   X_ROWS      optionally, rows of x that are multiplied at once by its own ISA(row_sums); else one by ISA(sums)
 *   Q8_0_ONE_ROW, Q4_K_ONE_ROW, Q6_K_ONE_ROW  optionally, its OneRow of the format
 *   MANY_ROWS   optionally, the rows of x from which on sums come from tiles of the processor, which take LINES of them:
 *               ISA(shape_tiles), ISA(load_codes), ISA(tile_sums) and ISA(release_tiles)
 */

#define ROWS (VECTORS * LANES)

/* A number for each row of weights. */
typedef struct {
    Floats of[VECTORS];
} ISA(Vectors);
#define Vectors ISA(Vectors)

/* A chunk of ROWS rows of weights: where they lie, or a copy where they are in several row blocks or fewer. */
typedef struct {
    const uint8_t *first;
    int64_t stride;
} ISA(Chunk);

/* Of rows from `output` on; the last row of the matrix stands for those below it. */
INLINE ISA(Chunk) ISA(copied_chunk)(const Product *product, int64_t output, int64_t offset, int64_t bytes,
                                    uint8_t *copy) {
    for (int64_t row = 0; row < ROWS; row++) {
        const int64_t last = product->outputs - 1, here = output + row < last ? output + row : last;
        memcpy(copy + row * bytes, coded_rows(product, here).first + offset, (size_t)bytes);
    }
    return (ISA(Chunk)){copy, bytes};
}

/* Adds the sums of a group, times its scale, to the totals of a row of x. */
INLINE void ISA(add_sums)(const int has_minimums, const Tile *tiles, int64_t g, const Group *group, const Ints *sums,
                          Vectors *totals) {
    for (int v = 0; v < VECTORS; v++) {
        Floats part = __builtin_convertvector(sums[v], Floats) * group->unit * tiles[v].scales[g];
        if (has_minimums) part += group->sum * tiles[v].minimums[g];
        totals->of[v] += part;
    }
}

#if !defined(X_ROWS)
#define X_ROWS 1

INLINE void ISA(row_sums)(const int rows, int size, Words codes[][VECTORS], const char *pieces, const Group *group,
                          Ints sums[][VECTORS]) {
    for (int row = 0; row < rows; row++)
        ISA(sums)(size, codes, pieces + row * PIECES_BYTES(size), group[row].offset, sums[row]);
}
#endif

/* A group's codes times a few rows of x. */
INLINE void ISA(add_rows)(const int rows, const int size, const int has_minimums, Words codes[][VECTORS],
                          const Tile *tiles, int64_t g, const char *pieces, const Group *group, Vectors *totals) {
    Ints sums[X_ROWS][VECTORS];
    ISA(row_sums)(rows, size, codes, pieces, group, sums);
    for (int row = 0; row < rows; row++) ISA(add_sums)(has_minimums, tiles, g, group + row, sums[row], totals + row);
}

#if defined(MANY_ROWS)
/* The groups of `add_groups` by tiles of x, as equal as possible; the last one has rows of the one before again. */
INLINE void ISA(add_groups_by_tiles)(const int size, const int has_minimums, const Tile *tiles, int64_t groups, int64_t batch,
                                     const char *pieces, const Group *group, Ahead *ahead, Vectors *totals) {
    const int64_t turns = (batch + LINES - 1) / LINES, rows = (batch + turns - 1) / turns;
    ISA(shape_tiles)(size, (int)rows);
    for (int64_t g = 0; g < groups; g++, pieces += batch * PIECES_BYTES(size), group += batch) {
        if (g * size % 32 == 0) fetch(ahead);
        ISA(load_codes)(size, tiles, g);
        for (int64_t done = 0; done < batch; done += rows) {
            const int64_t first = done + rows < batch ? done : batch - rows;
            Ints sums[LINES][VECTORS];
            ISA(tile_sums)(size, pieces + first * PIECES_BYTES(size), group + first, (int)rows, sums);
            for (int64_t row = done; row < first + rows; row++)
                ISA(add_sums)(has_minimums, tiles, g, group + row, sums[row - first], totals + row);
        }
    }
    ISA(release_tiles)();
}
#endif

/* Adds a chunk's codes times x to the totals of each row of x: groups one after the other, each times its scale. */
INLINE void ISA(add_groups)(const int size, const int has_minimums, const Tile *tiles, int64_t groups, int64_t batch,
                            const char *pieces, const Group *group, Ahead *ahead, Vectors *totals) {
#if defined(MANY_ROWS)
    if (batch >= MANY_ROWS) {
        ISA(add_groups_by_tiles)(size, has_minimums, tiles, groups, batch, pieces, group, ahead, totals);
        return;
    }
#endif
    for (int64_t g = 0; g < groups; g++) {
        Words codes[8][VECTORS];
        if (g * size % 32 == 0) fetch(ahead);
        for (int w = 0; w < size / 4; w++)
            for (int v = 0; v < VECTORS; v++) codes[w][v] = tiles[v].codes[g * (size / 4) + w];
        int64_t row = 0;
        for (; row + X_ROWS <= batch; row += X_ROWS, pieces += X_ROWS * PIECES_BYTES(size), group += X_ROWS)
            ISA(add_rows)(X_ROWS, size, has_minimums, codes, tiles, g, pieces, group, totals + row);
        const int64_t left = batch - row;
        if (X_ROWS > 3 && left == 3)
            ISA(add_rows)(3, size, has_minimums, codes, tiles, g, pieces, group, totals + row);
        else if (X_ROWS > 2 && left == 2)
            ISA(add_rows)(2, size, has_minimums, codes, tiles, g, pieces, group, totals + row);
        else if (X_ROWS > 1 && left == 1)
            ISA(add_rows)(1, size, has_minimums, codes, tiles, g, pieces, group, totals + row);
        pieces += left * PIECES_BYTES(size), group += left;
    }
}

INLINE void ISA(add_chunk)(const Coding *coding, const Tile *tiles, int64_t groups, int64_t batch, const char *pieces,
                           const Group *group, Ahead *ahead, Vectors *totals) {
    if (coding->multiplier.step == 16)
        ISA(add_groups)(16, 0, tiles, groups, batch, pieces, group, ahead, totals);
    else if (coding->has_minimums)
        ISA(add_groups)(32, 1, tiles, groups, batch, pieces, group, ahead, totals);
    else
        ISA(add_groups)(32, 0, tiles, groups, batch, pieces, group, ahead, totals);
}

/* Chunks [first, last) of the rows of weights from `output` on. next: the rows that are multiplied next, or NULL. */
static TARGET void ISA(add_tile)(const Product *product, int64_t output, int64_t first, int64_t last,
                                 const uint8_t *next, Vectors *totals) {
    const Coding *coding = coding_of(product);
    const int64_t size = product->multiplier->step, block = product->multiplier->block;
    const CodedRows rows = coded_rows(product, output);
    uint8_t copy[ROWS * MOST_CHUNK_BYTES];
    Tile tiles[VECTORS];
    for (int64_t chunk = first; chunk < last; chunk++) {
        const int64_t left = product->inputs - chunk * CHUNK, weights = left < CHUNK ? left : CHUNK;
        const int64_t offset = chunk * CHUNK / block * product->multiplier->block_bytes;
        const int64_t bytes = weights / block * product->multiplier->block_bytes;
        Ahead ahead = {next + (next ? ROWS * offset : 0), next ? ROWS * bytes * 32 / weights / (VECTORS + 1) : 0,
                       goes_near(ROWS * product->row_bytes)};
        const ISA(Chunk) here = rows.count >= ROWS ? (ISA(Chunk)){rows.first + offset, product->row_bytes}
                                                   : ISA(copied_chunk)(product, output, offset, bytes, copy);
        const char *pieces = pieces_of(product, chunk * CHUNK / size);
        const Group *group = groups_of(product, chunk * CHUNK / size);
        if (product->batch == 1 && coding->one_row) {
            coding->one_row(here.first, here.stride, weights, pieces, group, &ahead, totals);
            continue;
        }
        for (int v = 0; v < VECTORS; v++)
            coding->unpack(here.first + v * LANES * here.stride, here.stride, weights, tiles + v, &ahead);
        ISA(add_chunk)(coding, tiles, weights / size, product->batch, pieces, group, &ahead, totals);
    }
}

/* Outputs [first, last) for all rows of one group: totals[tile][row of x]. next: the rows of weights that are read
 * afterwards, or NULL. */
static TARGET void ISA(add_tiles)(const Product *product, int64_t first, int64_t last, const uint8_t *next,
                                  Vectors *totals) {
    const int64_t chunks = (product->inputs + CHUNK - 1) / CHUNK, at_once = chunks_at_once(product);
    memset(totals, 0, (size_t)((last - first + ROWS - 1) / ROWS * product->batch) * sizeof *totals);
    for (int64_t chunk = 0; chunk < chunks; chunk += at_once) {
        Vectors *tile = totals;
        for (int64_t output = first; output < last; output += ROWS, tile += product->batch) {
            const uint8_t *below = output + ROWS < last ? coded_rows(product, output + ROWS).first : next;
            ISA(add_tile)(product, output, chunk, chunk + at_once < chunks ? chunk + at_once : chunks,
                          at_once < chunks ? NULL : below, tile);
        }
    }
}

INLINE void ISA(place_group)(const int size, const Coding *coding, const uint16_t *values, char *pieces, Group *group) {
    int32_t multiples[32], sum = 0;
    uint16_t largest = 0;
    for (int i = 0; i < size; i++) {
        const uint16_t magnitude = values[i] & 0x7fff;
        largest = magnitude > largest ? magnitude : largest;
    }
    const int finite = largest < 0x7f80, above = (largest >> 7) + 1;
    const int exponent = above > LEAST_EXPONENT ? above : LEAST_EXPONENT;
    const float unit = finite ? power_of_two(exponent - BITS) : from_bits(0x7fc00000);
    const float inverse = finite ? power_of_two(2 * 127 + BITS - exponent) : 0;
    for (int i = 0; i < size; i++) {
        const float shift = 12582912.0f; /* adding it rounds to a whole number in the lowest bits */
        multiples[i] = (int32_t)(to_bits(widened(values[i]) * inverse + shift) - to_bits(shift));
        multiples[i] = finite ? multiples[i] : 0; /* infinity times 0 is NaN */
        sum += multiples[i];
    }
    ISA(put)(size, multiples, pieces);
    *group = (Group){unit, -coding->zero * sum, (float)sum * unit};
}

static TARGET void ISA(place_coded)(const Product *product, int64_t row, int64_t first, int64_t last,
                                    const uint16_t *values) {
    const Product rows = group_at(product, row / MOST_BATCH * MOST_BATCH);
    const Coding *coding = coding_of(product);
    const int64_t size = coding->multiplier.step, column = row % MOST_BATCH;
    for (int64_t k = first / size; k < last / size; k++, values += size) {
        char *pieces = pieces_of(&rows, k) + column * PIECES_BYTES(size);
        if (size == 32)
            ISA(place_group)(32, coding, values, pieces, groups_of(&rows, k) + column);
        else
            ISA(place_group)(16, coding, values, pieces, groups_of(&rows, k) + column);
    }
}

enum { ISA(MOST_TOTALS) = MOST_OUTPUTS / ROWS * MOST_BATCH };

static TARGET void ISA(multiply_coded)(const Product *product, int64_t first, int64_t last, float *out) {
    Vectors totals[ISA(MOST_TOTALS)];
    ISA(add_tiles)(product, first, last, NULL, totals);
    for (int64_t n = 0; n < last - first; n++)
        for (int64_t row = 0; row < product->batch; row++)
            out[n * product->batch + row] = totals[n / ROWS * product->batch + row].of[n % ROWS / LANES][n % LANES];
}

/* To bfloat16, as `rounded`. */
INLINE Halves ISA(rounded)(Floats numbers) {
    const Words bits = (Words)numbers, nan = (Words)(numbers != numbers);
    const Words up = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return __builtin_convertvector((up & ~nan) | (nan & 0x7fc0), Halves);
}

/* The totals of a row of x, rounded: `count` numbers. */
INLINE void ISA(round_row)(const Vectors *totals, int64_t batch, int64_t row, int64_t count, uint16_t *y) {
    for (int64_t n = 0; n < count; n += LANES) {
        const Halves bits = ISA(rounded)(totals[n / ROWS * batch + row].of[n % ROWS / LANES]);
        if (count - n < LANES)
            memcpy(y + n, &bits, (size_t)(count - n) * sizeof *y);
        else
            memcpy(y + n, &bits, sizeof bits);
    }
}

static TARGET void ISA(write_coded)(const Product *product, int64_t first, int64_t last, uint16_t *y,
                                    int64_t stride) {
    Vectors totals[ISA(MOST_TOTALS)];
    const uint8_t *next = last < product->outputs ? coded_rows(product, last).first : NULL;
    for (int64_t from = 0; from < product->batch; from += MOST_BATCH) {
        const Product rows = group_at(product, from);
        ISA(add_tiles)(&rows, first, last, next, totals);
        for (int64_t row = 0; row < rows.batch; row++)
            ISA(round_row)(totals, rows.batch, row, last - first, y + (from + row) * stride + first);
    }
}

/* gates = silu(gates) * ups */
INLINE void ISA(gate)(float *gates, const float *ups, int64_t count) {
    for (int64_t i = 0; i < count; i++) gates[i] = silu(gates[i]) * ups[i];
}

static TARGET void ISA(gated_coded)(const Product *gate, const Product *up, const Product *down, int64_t first,
                                    int64_t last) {
    Vectors gates[ISA(MOST_TOTALS)], ups[ISA(MOST_TOTALS)];
    uint16_t hidden[MOST_OUTPUTS];
    const uint8_t *next = last < gate->outputs ? coded_rows(gate, last).first : NULL;
    for (int64_t from = 0; from < gate->batch; from += MOST_BATCH) {
        const Product gate_rows = group_at(gate, from), up_rows = group_at(up, from);
        ISA(add_tiles)(&gate_rows, first, last, coded_rows(up, first).first, gates);
        ISA(add_tiles)(&up_rows, first, last, next, ups);
        ISA(gate)((float *)gates, (const float *)ups, (last - first + ROWS - 1) / ROWS * ROWS * gate_rows.batch);
        for (int64_t row = 0; row < gate_rows.batch; row++) {
            ISA(round_row)(gates, gate_rows.batch, row, last - first, hidden);
            place(down, from + row, first, last, hidden);
        }
    }
}

#if !defined(Q8_0_ONE_ROW)
#define Q8_0_ONE_ROW NULL
#endif
#if !defined(Q4_K_ONE_ROW)
#define Q4_K_ONE_ROW NULL
#endif
#if !defined(Q6_K_ONE_ROW)
#define Q6_K_ONE_ROW NULL
#endif
#define CODING(format, group, weights, bytes, centre, minimums, ...)                                                  \
    {.multiplier = {.step = group, .step_bytes = PIECES_BYTES(group) + sizeof(Group), .is_coded = 1, .block = weights,  \
                    .block_bytes = bytes, .least = LEAST_OUTPUTS, .place = ISA(place_coded),                             \
                    .multiply = ISA(multiply_coded), .write = ISA(write_coded), .gated = ISA(gated_coded)},            \
     .zero = centre, .has_minimums = minimums, .unpack = (Unpack)ISA(unpack_##format), __VA_ARGS__}
static const Coding ISA(codings)[FORMATS] = {
    [Q8_0] = CODING(q8_0, 32, 32, 34, Q8_0_ZERO, 0, .one_row = Q8_0_ONE_ROW),
    [Q4_0] = CODING(q4_0, 32, 32, 18, 8, 0),
    [Q5_0] = CODING(q5_0, 32, 32, 22, 16, 0),    [Q5_1] = CODING(q5_1, 32, 32, 24, 0, 1),
    [Q4_K] = CODING(q4_k, 32, 256, 144, 0, 1, .one_row = Q4_K_ONE_ROW),
    [Q5_K] = CODING(q5_k, 32, 256, 176, 0, 1),
    [Q6_K] = CODING(q6_k, 16, 256, 210, 32, 0, .one_row = Q6_K_ONE_ROW),
    [MXFP4] = CODING(mxfp4, 32, 32, 17, 12, 0),
};
#undef CODING
#undef Words
#undef Ints
#undef Floats
#undef Halves
#undef Tile
#undef Vectors
#undef VECTORS
#undef ROWS
#undef INLINE
#undef ISA
#undef TARGET
#undef LANES
#undef HALVES
#undef WIDENED
#undef OF_FP4
#undef SIGNED_CODES
#undef MANY_ROWS
#undef X_ROWS
#undef Q8_0_ONE_ROW
#undef Q4_K_ONE_ROW
#undef Q6_K_ONE_ROW
#undef Q8_0_ZERO
#undef Q8_0_SIGNS
