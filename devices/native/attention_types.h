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
 *   OF_QUAD(p)       four numbers again and again
 *   SWAPPED(x, lanes)   x with neighbouring groups of that many lanes swapped
 *   EVEN(p), ODD(p)  the even and the odd ones of 2 * LANES bfloat16 numbers, as float32
 *   ADD_LANES(sums, out)   the sum of the lanes of each of `TOKENS` quads
 */

#define INLINE static inline __attribute__((always_inline)) TARGET
#define UNROLL _Pragma("GCC unroll 8")
#define STEP (2 * LANES) /* numbers */

typedef uint32_t SUFFIXED(Words, SET) __attribute__((vector_size(LANES * sizeof(uint32_t))));
#define EXPONENTIALS SUFFIXED(exponentials, SET)

/* e^x to about 1e-7, as if x were at least -87, for x up to 0. */
INLINE Floats EXPONENTIALS(Floats x) {
    const Floats shift = EVERY(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number in the lowest bits */
    const float factors[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    Floats r = LARGER(EVERY(-87.0f), x), shifted = shift, p = EVERY(1.9875691500e-4f);
    ADD_PRODUCT(shifted, r, EVERY(1.44269504f));
    const Floats whole = shifted - shift;
    ADD_PRODUCT(r, whole, EVERY(-0.693359375f));
    ADD_PRODUCT(r, whole, EVERY(2.12194440e-4f));
    UNROLL
    for (int i = 0; i < 5; i++) {
        Floats next = EVERY(factors[i]);
        ADD_PRODUCT(next, p, r);
        p = next;
    }
    Floats power = r + EVERY(1.0f);
    ADD_PRODUCT(power, p, r * r);
    return power * (Floats)(((SUFFIXED(Words, SET))shifted + 127u) << 23);
}

#if !defined(PAIRS)
#define NAME(name) SUFFIXED(name, SUFFIXED(SET, float32))
#define Number float
#define VALUES(p, half) LOADED((const float *)(p) + (half) * LANES)
#define FROM_FLOATS(numbers, halves) memcpy(numbers, halves, sizeof numbers)
#include "attention_loops.h"
#endif

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
#undef EXPONENTIALS
#undef OF_QUAD
#undef SWAPPED
#undef EVEN
#undef ODD
#undef ADD_LANES
