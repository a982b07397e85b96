/* Vectors of eight floats, whatever the machine's are, and the exponential of them. */
#include <stdint.h>

#define LANES 8

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t lanes __attribute__((vector_size(4 * LANES)));

#ifdef __clang__
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (lanes){__VA_ARGS__})
#endif

INLINE vec load(const float *at) { return *(const vec *)at; }
INLINE void store(float *at, vec x) { *(vec *)at = x; }
INLINE vec splat(float x) { return (vec){x, x, x, x, x, x, x, x}; }
INLINE vec choose(lanes mask, vec yes, vec no) {
    return (vec)((mask & (lanes)yes) | (~mask & (lanes)no));
}
INLINE vec larger(vec x, vec y) { return choose(x > y, x, y); }

/* Polynomial of Cephes, 2e-7. What is not a number stays so. */
INLINE vec exponential(vec x) {
    x = choose(x < -87.0f, splat(-87.0f), x);
    x = choose(x > 88.0f, splat(88.0f), x);
    vec y = x * 1.44269504f;
    lanes n = __builtin_convertvector(choose(y < 0.0f, y - 0.5f, y + 0.5f), lanes);
    vec k = __builtin_convertvector(n, vec);
    vec f = x - k * 0.693359375f + k * 2.12194440e-4f;
    vec p = splat(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * (f * f) + f + 1.0f;
    return p * (vec)((n + 127) << 23);
}
