/* The tile instructions of AMX in C, in place of the compiler's, for processors without them. What the processor refuses
 * ends the program. */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../devices/native/tiles.h"

enum { TILES = 8, MOST_LINES = 16, MOST_LINE_BYTES = 64 };

static TileShapes shapes_in_c;
static uint8_t tiles_in_c[TILES][MOST_LINES][MOST_LINE_BYTES];

static void must(int holds, const char *what) {
    if (holds) return;
    printf("tiles: %s\n", what);
    exit(3);
}

static void load_shapes_in_c(const TileShapes *shapes) {
    must(shapes->palette == 1 && !shapes->start, "palette 1, from the first line");
    for (int tile = 0; tile < 16; tile++) {
        const int most = tile < TILES ? MOST_LINES : 0;
        must(shapes->lines[tile] <= most && shapes->line_bytes[tile] <= 4 * most, "16 lines of 64 bytes at most");
    }
    shapes_in_c = *shapes;
    memset(tiles_in_c, 0, sizeof tiles_in_c);
}

static void release_in_c(void) { memset(&shapes_in_c, 0, sizeof shapes_in_c); }

static void must_have_shape(int tile) { must(shapes_in_c.palette && shapes_in_c.lines[tile], "a tile has no shape"); }

static void zero_in_c(int tile) {
    must_have_shape(tile);
    memset(tiles_in_c[tile], 0, sizeof tiles_in_c[tile]);
}

static void load_in_c(int tile, const void *from, int64_t stride) {
    zero_in_c(tile);
    for (int line = 0; line < shapes_in_c.lines[tile]; line++)
        memcpy(tiles_in_c[tile][line], (const char *)from + line * stride, shapes_in_c.line_bytes[tile]);
}

static void store_in_c(int tile, void *to, int64_t stride) {
    must_have_shape(tile);
    for (int line = 0; line < shapes_in_c.lines[tile]; line++)
        memcpy((char *)to + line * stride, tiles_in_c[tile][line], shapes_in_c.line_bytes[tile]);
}

/* sums += signed bytes times unsigned ones, four at a time. */
static void add_bytes_in_c(int sums, int signs, int codes) {
    must_have_shape(sums), must_have_shape(signs), must_have_shape(codes);
    must(shapes_in_c.lines[sums] == shapes_in_c.lines[signs], "lines of sums and of the first factor");
    must(shapes_in_c.line_bytes[sums] == shapes_in_c.line_bytes[codes], "columns of sums and of the second factor");
    must(shapes_in_c.line_bytes[signs] == 4 * shapes_in_c.lines[codes], "columns of one factor, lines of the other");
    for (int line = 0; line < shapes_in_c.lines[sums]; line++)
        for (int column = 0; column < shapes_in_c.line_bytes[sums] / 4; column++) {
            int32_t sum;
            memcpy(&sum, tiles_in_c[sums][line] + 4 * column, sizeof sum);
            for (int k = 0; k < shapes_in_c.line_bytes[signs]; k++)
                sum += (int8_t)tiles_in_c[signs][line][k] * tiles_in_c[codes][k / 4][4 * column + k % 4];
            memcpy(tiles_in_c[sums][line] + 4 * column, &sum, sizeof sum);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define _tile_loadconfig load_shapes_in_c
#define _tile_release release_in_c
#define _tile_zero zero_in_c
#define _tile_loadd load_in_c
#define _tile_stored store_in_c
#define _tile_dpbsud add_bytes_in_c
