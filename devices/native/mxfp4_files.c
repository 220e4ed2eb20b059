/* Rows in MXFP4 as kernels read them, from files that have codes and scales apart. */
#include <string.h>

#include "team.h"

enum { CODES = 16, HALF = CODES / 2 }; /* bytes of a group, and of half of its codes */

/* Neighbours share a byte in the files; in rows, codes of the first half have the lower halves of the bytes. */
static inline void join(const uint8_t *codes, uint8_t *joined) {
    uint8_t even[HALF], odd[HALF];
    for (int i = 0; i < HALF; i++) {
        even[i] = (uint8_t)((codes[i] & 15) | codes[HALF + i] << 4);
        odd[i] = (uint8_t)(codes[i] >> 4 | (codes[HALF + i] & 0xf0));
    }
    for (int i = 0; i < HALF; i++) {
        joined[2 * i] = even[i];
        joined[2 * i + 1] = odd[i];
    }
}

/* Writes groups of a scale and 16 bytes of codes. */
API void moesched_join_mxfp4(int64_t groups, const uint8_t *codes, const uint8_t *scales, uint8_t *joined) {
    for (int64_t group = 0; group < groups; group++, codes += CODES, joined += 1 + CODES) {
        joined[0] = scales[group];
        join(codes, joined + 1);
    }
}
