/* Products of many rows of x by coded matrices with AMX, whose registers are tiles: 16 lines of 64 bytes; few rows are
 * multiplied as with VNNI.
 *
 * A line of a tile of x has the upper bytes of a row's multiples, or the lower ones. A line of a tile of codes has four
 * codes of each row of weights, as they were unpacked. So a line of the sums is what `sums` gives for a row of x.
 */

#include "tiles.h"

#define ISA(name) name##_amx
#define TARGET __attribute__((target("amx-tile,amx-int8,avx512f,avx512bw,avx512vl,avx512vnni")))
#define LANES 16
#define VECTORS 2
#define words_amx words_of_avx512
#define HALVES halves_of_avx512
#define WIDENED(halves) widened_halves_avx512((__m512i)(halves))
#define OF_FP4(codes) numbers_of_fp4_avx512((__m512i)(codes))
#include "coded_formats.h"
#include "coded_one_row_avx512.h"

enum { LINES = 16, LINE_BYTES = 64 };

/* Fewer take about as long with VNNI, by the number of instructions; not measured. */
#define MANY_ROWS 8

/* Numbers of tiles. The sums of both bytes follow each other for each tile of codes. */
#define UPPER_BYTES 0
#define LOWER_BYTES 1
#define CODES 2
#define MORE_CODES 3
#define UPPER_SUMS 4
#define LOWER_SUMS 5
#define MORE_UPPER_SUMS 6
#define MORE_LOWER_SUMS 7

#define put_amx put_bytes
#define sums_amx sums_avx512_vnni

/* For groups of `size` weights, and as many rows of x. */
INLINE void shape_tiles_amx(int size, int rows) {
    TileShapes shapes = {.palette = 1};
    for (int tile = UPPER_BYTES; tile <= MORE_LOWER_SUMS; tile++) {
        const int has_codes = tile == CODES || tile == MORE_CODES;
        shapes.lines[tile] = (uint8_t)(has_codes ? size / 4 : rows);
        shapes.line_bytes[tile] = (uint16_t)(tile < CODES ? size : LINE_BYTES);
    }
    MEMORY_IS_READ_OR_WRITTEN;
    _tile_loadconfig(&shapes);
}

/* The codes of a group. */
INLINE void load_codes_amx(int size, const Tile *tiles, int64_t group) {
    MEMORY_IS_READ_OR_WRITTEN;
    _tile_loadd(CODES, tiles[0].codes + group * (size / 4), LINE_BYTES);
    _tile_loadd(MORE_CODES, tiles[1].codes + group * (size / 4), LINE_BYTES);
}

#define STORE_SUMS(sums, bytes, codes, to)                                                                            \
    do {                                                                                                              \
        _tile_zero(sums);                                                                                             \
        _tile_dpbsud(sums, bytes, codes);                                                                             \
        _tile_stored(sums, to, LINE_BYTES);                                                                           \
    } while (0)

/* Sums of the loaded codes times the multiples of `rows` rows of x. */
INLINE void tile_sums_amx(int size, const char *pieces, const Group *group, int rows, Ints sums[LINES][VECTORS]) {
    Ints upper[VECTORS][LINES], lower[VECTORS][LINES];
    _tile_loadd(UPPER_BYTES, pieces, PIECES_BYTES(size));
    _tile_loadd(LOWER_BYTES, pieces + size, PIECES_BYTES(size));
    STORE_SUMS(UPPER_SUMS, UPPER_BYTES, CODES, upper[0]);
    STORE_SUMS(LOWER_SUMS, LOWER_BYTES, CODES, lower[0]);
    STORE_SUMS(MORE_UPPER_SUMS, UPPER_BYTES, MORE_CODES, upper[1]);
    STORE_SUMS(MORE_LOWER_SUMS, LOWER_BYTES, MORE_CODES, lower[1]);
    MEMORY_IS_READ_OR_WRITTEN;
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++) sums[row][v] = (upper[v][row] << 8) + lower[v][row] + group[row].offset;
}

INLINE void release_tiles_amx(void) { _tile_release(); }

#include "coded_products.h"

#undef UPPER_BYTES
#undef LOWER_BYTES
#undef CODES
#undef MORE_CODES
#undef UPPER_SUMS
#undef LOWER_SUMS
#undef MORE_UPPER_SUMS
#undef MORE_LOWER_SUMS
#undef STORE_SUMS
