/* What a transformer layer does between its matrix products, in one pass each, in float32.
 *
 * A row's result depends on no other row. Rows are divided among threads where there is
 * enough to do.
 */
#include <math.h>

#include "vectors.h"

/* Elements from which on a second thread is worth its start. */
#define WORTH_A_THREAD 16384
#define MANY(count) if ((count) > WORTH_A_THREAD) num_threads(threads)

/* out[n] = x[n] / root(mean(x[n]^2) + eps) * (offset + weight); x has rows of a stride. */
void rms_norm(const float *x, int64_t x_row, const float *weight, float offset, float eps,
              int64_t rows, int64_t size, float *out, int threads) {
#pragma omp parallel for MANY(rows * size)
    for (int64_t n = 0; n < rows; n++) {
        const float *from = x + n * x_row;
        float *to = out + n * size, total = 0;
        vec sums[4] = {splat(0), splat(0), splat(0), splat(0)};
        int64_t i = 0;
        for (; i + 4 * LANES <= size; i += 4 * LANES)
            for (int j = 0; j < 4; j++) {
                vec part = load(from + i + j * LANES);
                sums[j] += part * part;
            }
        for (; i < size; i++) total += from[i] * from[i];
        vec sum = sums[0] + sums[1] + sums[2] + sums[3];
        for (int j = 0; j < LANES; j++) total += sum[j];
        const float factor = 1 / sqrtf(total / size + eps);
        for (i = 0; i + LANES <= size; i += LANES)
            store(to + i, load(from + i) * factor * (load(weight + i) + offset));
        for (; i < size; i++) to[i] = from[i] * factor * (weight[i] + offset);
    }
}

/* out[n] = silu(gate[n]) * up[n]; gate and up have rows of a stride. */
void silu_mul(const float *gate, int64_t gate_row, const float *up, int64_t up_row, int64_t rows,
              int64_t size, float *out, int threads) {
#pragma omp parallel for MANY(rows * size)
    for (int64_t n = 0; n < rows; n++) {
        const float *g = gate + n * gate_row, *u = up + n * up_row;
        float *to = out + n * size;
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) {
            vec x = load(g + i);
            store(to + i, x / (exponential(-x) + 1.0f) * load(u + i));
        }
        for (; i < size; i++) to[i] = g[i] / (1 + expf(-g[i])) * u[i];
    }
}

/* Turn each head's halves by the token's angles, in place: x [T, H, 2 * half] with strides,
 * cos and sin [T, 2 * half]. */
void rotate(float *x, int64_t x_token, int64_t x_head, const float *cos, const float *sin,
            int64_t tokens, int64_t heads, int64_t half, int threads) {
#pragma omp parallel for MANY(tokens * heads * half)
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cos + t * 2 * half, *s = sin + t * 2 * half;
        for (int64_t h = 0; h < heads; h++) {
            float *low = x + t * x_token + h * x_head, *high = low + half;
            int64_t i = 0;
            for (; i + LANES <= half; i += LANES) {
                const vec a = load(low + i), b = load(high + i);
                store(low + i, a * load(c + i) - b * load(s + i));
                store(high + i, b * load(c + half + i) + a * load(s + half + i));
            }
            for (; i < half; i++) {
                const float a = low[i], b = high[i];
                low[i] = a * c[i] - b * s[i];
                high[i] = b * c[half + i] + a * s[half + i];
            }
        }
    }
}
