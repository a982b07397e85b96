/* Causal attention of packed tokens over a paged KV pool, in float32.
 *
 * A token goes over its keys in pieces of KEYS positions that begin at multiples of KEYS, with
 * a running maximum and sum (online softmax). Nothing it computes depends on other tokens, so
 * its result is the same to the bit in any batch, at any block size and number of threads.
 *
 * Tokens that stand together are taken through the same pieces side by side (a tile): where
 * their block tables name the same blocks, a piece of a shared prefix comes from memory once
 * and is in the first-level cache for the rest of the tile. That is all there is to sharing.
 *
 * HEAD_SIZE (a multiple of 8) and GROUP (query heads to a key/value head) are given when it is
 * compiled.
 */
#include <math.h>
#include "vectors.h"

#define CHUNKS (HEAD_SIZE / LANES)
#define KEYS 32
#define MAX_TILE 8
/* Bytes of running sums that a tile may hold: they should stay in the second-level cache. */
#define TILE_BYTES (128 * 1024)
/* Query heads taken together, and chunks of the output: 12 sums and what they are made of fit
 * the 16 vector registers. */
#define QUERIES (GROUP % 3 == 0 ? 3 : GROUP % 2 == 0 ? 2 : 1)
#define SPAN (CHUNKS % 4 == 0 ? 4 : CHUNKS % 2 == 0 ? 2 : 1)

/* What a query head has seen so far: l holds the sum of its weights in parts. */
typedef struct {
    vec acc[CHUNKS];
    vec l;
    float m;
    float unused[LANES - 1];
} __attribute__((aligned(32))) state;

typedef struct {
    const int32_t *tables;
    int64_t width;
    const int64_t *rows;
    const int64_t *positions;
    int64_t block_size;
    int64_t stride;
    int64_t window;
} places;

INLINE float highest(vec x) {
    x = larger(x, SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
    x = larger(x, SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
    x = larger(x, SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6));
    return x[0];
}

INLINE vec pairs(vec x, vec y) {
    return SHUFFLE(x, y, 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLE(x, y, 1, 3, 9, 11, 5, 7, 13, 15);
}

/* Products of the queries with four keys, each summed up to its two halves. */
INLINE void four_keys(const float *q, int64_t q_head, const float *keys, const int64_t *at,
                      vec out[QUERIES]) {
    vec sum[QUERIES][4];
    for (int i = 0; i < QUERIES; i++)
        for (int j = 0; j < 4; j++) sum[i][j] = splat(0);
#pragma GCC unroll 32
    for (int c = 0; c < CHUNKS; c++) {
        vec y[QUERIES];
        for (int i = 0; i < QUERIES; i++) y[i] = load(q + i * q_head + c * LANES);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            vec x = load(keys + at[j] + c * LANES);
#pragma GCC unroll 4
            for (int i = 0; i < QUERIES; i++) sum[i][j] += y[i] * x;
        }
    }
    for (int i = 0; i < QUERIES; i++)
        out[i] = pairs(pairs(sum[i][0], sum[i][1]), pairs(sum[i][2], sum[i][3]));
}

/* Scores of the queries with n keys, minus infinity behind them; the maxima go to best. */
INLINE void score(const float *q, int64_t q_head, const float *keys, const int64_t *at, int n,
                  float scale, float softcap, vec s[QUERIES][KEYS / LANES], vec best[QUERIES]) {
    const lanes count = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int i = 0; i < QUERIES; i++) best[i] = splat(-INFINITY);
    for (int j = 0; j < n; j += LANES) {
        vec x[QUERIES], y[QUERIES];
        four_keys(q, q_head, keys, at + j, x);
        four_keys(q, q_head, keys, at + j + 4, y);
        for (int i = 0; i < QUERIES; i++) {
            vec z = SHUFFLE(x[i], y[i], 0, 1, 2, 3, 8, 9, 10, 11) +
                    SHUFFLE(x[i], y[i], 4, 5, 6, 7, 12, 13, 14, 15);
            z *= scale;
            if (softcap > 0)
                for (int h = 0; h < LANES; h++) z[h] = softcap * tanhf(z[h] / softcap);
            z = choose(count < n - j, z, splat(-INFINITY));
            best[i] = larger(best[i], z);
            s[i][j / LANES] = z;
        }
    }
}

/* Turn scores into weights under the running maximum; what was summed so far is scaled to it. */
INLINE void weigh(state *st, int n, vec s[KEYS / LANES], float best) {
    if (best > st->m) {
        float c = expf(st->m - best);
        st->m = best;
        st->l *= c;
        for (int h = 0; h < CHUNKS; h++) st->acc[h] *= c;
    }
    const lanes count = {0, 1, 2, 3, 4, 5, 6, 7};
    for (int j = 0; j < n; j += LANES) {
        vec p = exponential(s[j / LANES] - st->m);
        p = choose(count < n - j, p, splat(0));
        st->l += p;
        s[j / LANES] = p;
    }
}

INLINE void add_values(state st[QUERIES], const float *values, const int64_t *at, int n,
                       vec s[QUERIES][KEYS / LANES]) {
    for (int h = 0; h < CHUNKS; h += SPAN) {
        vec acc[QUERIES][SPAN];
        for (int i = 0; i < QUERIES; i++)
            for (int c = 0; c < SPAN; c++) acc[i][c] = st[i].acc[h + c];
        for (int j = 0; j < n; j++) {
            const float *value = values + at[j] + h * LANES;
            vec p[QUERIES];
            for (int i = 0; i < QUERIES; i++) p[i] = splat(((const float *)s[i])[j]);
#pragma GCC unroll 4
            for (int c = 0; c < SPAN; c++) {
                vec x = load(value + c * LANES);
#pragma GCC unroll 4
                for (int i = 0; i < QUERIES; i++) acc[i][c] += p[i] * x;
            }
        }
        for (int i = 0; i < QUERIES; i++)
            for (int c = 0; c < SPAN; c++) st[i].acc[h + c] = acc[i][c];
    }
}

INLINE void attend(state *st, const float *q, int64_t q_head, const float *keys,
                   const float *values, const int64_t *at, int n, float scale, float softcap) {
    vec s[QUERIES][KEYS / LANES], best[QUERIES];
    score(q, q_head, keys, at, n, scale, softcap, s, best);
    for (int i = 0; i < QUERIES; i++) weigh(&st[i], n, s[i], highest(best[i]));
    add_values(st, values, at, n, s);
}

INLINE int64_t first_seen(const places *in, int64_t token) {
    int64_t first = in->positions[token] - in->window + 1;
    return in->window && first > 0 ? first : 0;
}

/* Where the keys that a token sees of a piece lie in the pool; padded to a whole vector. */
INLINE int find(const places *in, int64_t token, int64_t from, int64_t at[KEYS]) {
    int64_t first = first_seen(in, token), end = in->positions[token] + 1;
    if (first < from) first = from;
    if (end > from + KEYS) end = from + KEYS;
    if (end <= first) return 0;
    const int32_t *table = in->tables + in->rows[token] * in->width;
    int n = (int)(end - first);
    for (int j = 0; j < n; j++) {
        int64_t position = first + j;
        int64_t block = table[position / in->block_size];
        at[j] = (block * in->block_size + position % in->block_size) * in->stride;
    }
    for (int j = n; j % LANES; j++) at[j] = at[n - 1];
    return n;
}

INLINE void start(state *st, int64_t heads, const float *sinks) {
    for (int64_t h = 0; h < heads; h++) {
        for (int c = 0; c < CHUNKS; c++) st[h].acc[c] = splat(0);
        st[h].m = sinks ? sinks[h] : -INFINITY;
        st[h].l = splat(0);
        if (sinks) st[h].l[0] = 1;
    }
}

INLINE void finish(const state *st, int64_t heads, float *out) {
    for (int64_t h = 0; h < heads; h++) {
        float total = 0;
        for (int i = 0; i < LANES; i++) total += st[h].l[i];
        for (int c = 0; c < CHUNKS; c++)
            store(out + h * HEAD_SIZE + c * LANES, st[h].acc[c] / total);
    }
}

/* q [T, Hkv * GROUP, D] with strides; keys, values [N, B, Hkv, D]; tables [R, width];
 * rows, positions [T]; sinks [Hkv * GROUP] or NULL; out [T, Hkv * GROUP, D]. A window or
 * softcap of 0 is none. tile: most tokens to take together. */
void paged_attention(const float *q, int64_t q_token, int64_t q_head, const float *keys,
                     const float *values, const int32_t *tables, int64_t width,
                     const int64_t *rows, const int64_t *positions, int64_t num_tokens,
                     int64_t num_kv_heads, int64_t block_size, float scale, float softcap,
                     int64_t window, const float *sinks, float *out, int64_t tile, int threads) {
    const places in = {tables,     width, rows, positions, block_size, num_kv_heads * HEAD_SIZE,
                       window};
    const int64_t heads = num_kv_heads * GROUP;
    /* Some tiles for each thread, so that none waits long for the last. */
    const int64_t bounds[] = {num_tokens / (4 * threads), MAX_TILE,
                              TILE_BYTES / (heads * (int64_t)sizeof(state))};
    for (int i = 0; i < 3; i++) tile = bounds[i] < tile ? bounds[i] : tile;
    if (tile < 1) tile = 1;
    const int64_t tiles = (num_tokens + tile - 1) / tile;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t item = 0; item < tiles; item++) {
        const int64_t first = item * tile;
        const int64_t size = first + tile < num_tokens ? tile : num_tokens - first;
        state states[tile * heads];
        int64_t from = INT64_MAX, end = 0;
        for (int64_t t = first; t < first + size; t++) {
            int64_t begin = first_seen(&in, t);
            from = begin < from ? begin : from;
            end = positions[t] + 1 > end ? positions[t] + 1 : end;
            start(states + (t - first) * heads, heads, sinks);
        }
        for (from -= from % KEYS; from < end; from += KEYS) {
            int64_t at[MAX_TILE][KEYS];
            int n[MAX_TILE];
            for (int64_t t = 0; t < size; t++) n[t] = find(&in, first + t, from, at[t]);
            for (int64_t h = 0; h < heads; h += QUERIES) {
                const int64_t kv = h / GROUP * HEAD_SIZE;
                for (int64_t t = 0; t < size; t++)
                    if (n[t])
                        attend(states + t * heads + h, q + (first + t) * q_token + h * q_head,
                               q_head, keys + kv, values + kv, at[t], n[t], scale, softcap);
            }
        }
        for (int64_t t = 0; t < size; t++)
            finish(states + t * heads, heads, out + (first + t) * heads * HEAD_SIZE);
    }
}
