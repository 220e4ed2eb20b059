/* What all kernels with AMX need. */
#ifndef MOESCHED_TILES_H
#define MOESCHED_TILES_H

#include <stdint.h>

/* The layout of the processor's tile configuration. */
typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t line_bytes[16];
    uint8_t lines[16];
} TileShapes;

/* The intrinsics do not tell the compiler which memory they read and write. */
#define MEMORY_IS_READ_OR_WRITTEN __asm__ volatile("" ::: "memory")

#endif
