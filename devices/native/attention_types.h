/* The inner loops of attention.c for both types of numbers, included once for each instruction set.
 *
 * The including file defines
 *   SET              the instruction set's name
 *   TARGET           the function attribute that lets the compiler use its instructions
 *   LANES            float32 numbers in a register
 *   TOKENS           tokens whose scores are computed together
 *   MOST_QUADS       quads that a value is multiplied for while it is in a register
 *   Floats           the type of a register of float32 numbers
 *   LOADED(p), STORE(p, v), EVERY(x), LARGER(a, b), ADD_PRODUCT(sums, a, b)   operations on them
 *   EVEN(p), ODD(p)  the even and the odd ones of 2 * LANES bfloat16 numbers, as float32
 *   ADD_LANES(sums, out)   the sum of the lanes of each of `TOKENS` quads
 */

#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 8")
#define STEP (2 * LANES) /* numbers */

#define NAME(name) SUFFIXED(name, SUFFIXED(SET, float32))
#define Number float
#define VALUES(p, half) LOADED((const float *)(p) + (half) * LANES)
#define FROM_FLOATS(numbers, halves) memcpy(numbers, halves, sizeof numbers)
#include "attention_loops.h"

#define NAME(name) SUFFIXED(name, SUFFIXED(SET, bfloat16))
#define Number uint16_t
#define VALUES(p, half) ((half) ? ODD(p) : EVEN(p))
#define FROM_FLOATS(numbers, halves) \
    for (int k = 0; k < LANES; k++) numbers[2 * k] = rounded((halves)[k]), numbers[2 * k + 1] = rounded((halves)[LANES + k])
#include "attention_loops.h"

#undef INLINE
#undef UNROLL
#undef STEP
#undef SET
#undef TARGET
#undef LANES
#undef TOKENS
#undef MOST_QUADS
#undef Floats
#undef LOADED
#undef STORE
#undef EVERY
#undef LARGER
#undef ADD_PRODUCT
#undef EVEN
#undef ODD
#undef ADD_LANES
