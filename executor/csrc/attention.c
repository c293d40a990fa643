/* The attention part of one layer in one call, for the few rows of a decode or verify step: norm, queries, keys and values,
 * their own norms and turns, attention over the cache, the output's product, and the sum with what came in. The dozens of
 * small tensor operations that it replaces take longer than the products do.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "layer.h"
#include "pool.h"

enum { MOST_ROWS = 16, WORTH_THREADS = 1 << 20 }; /* multiplications for which others are woken */

/* As `attention.py` fills it in. All numbers are floats, all arrays contiguous. */
typedef struct {
    int32_t rows, before;         /* of this step, at most MOST_ROWS; tokens in the cache before them */
    int32_t hidden, heads, kv_heads, width, threads;
    const char *isa;
    float eps, head_eps, scale;
    float *x;                     /* [rows, hidden], which it adds to */
    const float *norm, *q_norm, *k_norm; /* weights [hidden], [width]; heads are not normalised where there is no q_norm */
    const float *cosines, *sines; /* [rows, width]; sines of a head's first half with the other sign */
    float *keys, *values;         /* [.., kv_heads, width], with room for the new ones */
    const Layer *in, *out;        /* to queries, keys and values; from heads to hidden */
} Attention;

typedef struct {
    const Attention *a;
    const Isa *isa;
    const float *projected;       /* [rows, heads + 2 * kv_heads, width] */
    float *heads;                 /* [rows, heads, width] */
    atomic_int next, failed;
} Work;

/* n: a multiple of LANES. */
static void normalise(const float *x, const float *weight, float eps, float *y, int n) {
    float sum[LANES] = {0};
    for (int i = 0; i < n; i += LANES)
        for (int j = 0; j < LANES; j++) sum[j] += x[i + j] * x[i + j];
    const float by = 1.0f / sqrtf(spac_sum(sum) / (float)n + eps);
    for (int i = 0; i < n; i++) y[i] = x[i] * by * weight[i];
}

/* Turn a head (a, b) by its angles. */
static void turn(const float *x, const float *cosines, const float *sines, float *y, int width) {
    const int half = width / 2;
    for (int i = 0; i < half; i++) y[i] = x[i] * cosines[i] + x[i + half] * sines[i];
    for (int i = half; i < width; i++) y[i] = x[i] * cosines[i] + x[i - half] * sines[i];
}

/* Queries in place, keys and values into the cache. */
static void place(const Attention *a, float *projected) {
    const int both = a->heads + a->kv_heads, width = a->width;
    const size_t kept = (size_t)a->kv_heads * width;
    for (int r = 0; r < a->rows; r++) {
        float *row = projected + (size_t)r * (both + a->kv_heads) * width, head[width];
        float *keys = a->keys + (a->before + r) * kept;
        for (int h = 0; h < both; h++) {
            float *x = row + (size_t)h * width, *to = h < a->heads ? x : keys + (size_t)(h - a->heads) * width;
            if (a->q_norm)
                normalise(x, h < a->heads ? a->q_norm : a->k_norm, a->head_eps, head, width);
            else
                memcpy(head, x, sizeof head);
            turn(head, a->cosines + (size_t)r * width, a->sines + (size_t)r * width, to, width);
        }
        memcpy(a->values + (a->before + r) * kept, row + (size_t)both * width, kept * sizeof(float));
    }
}

static void attend_pieces(void *data) {
    Work *w = data;
    const Attention *a = w->a;
    const int group = a->heads / a->kv_heads, width = a->width;
    float *scores = malloc((size_t)group * whole(a->before + a->rows) * sizeof(float));
    if (scores == NULL) w->failed = 1;
    for (int i; scores && (i = atomic_fetch_add(&w->next, 1)) < a->rows * a->kv_heads;) {
        const int r = i / a->kv_heads, shared = i % a->kv_heads;
        const size_t first = ((size_t)r * (a->heads + 2 * a->kv_heads) + shared * group) * width;
        w->isa->attend(w->projected + first, group, a->keys + shared * width, a->values + shared * width,
                       (size_t)a->kv_heads * width, a->before + r + 1, width, a->scale, scores,
                       w->heads + ((size_t)r * a->heads + shared * group) * width);
    }
    free(scores);
}

static int multiply(const Attention *a, const Layer *matrix, const float *x, float *y) {
    int32_t sources[MOST_ROWS];
    for (int r = 0; r < a->rows; r++) sources[r] = r;
    Layer one = *matrix;
    one.rows = a->rows, one.counts = &a->rows, one.sources = sources;
    one.threads = a->threads, one.isa = a->isa;
    one.x = x, one.middle = y;
    return spac_layer(&one);
}

/* As spac_layer. */
int spac_attention(const Attention *a) {
    const size_t rows = a->rows, all = (size_t)a->heads * a->width, kept = (size_t)a->kv_heads * a->width;
    const Isa *isa = spac_isa(a->isa);
    if (isa == NULL) return 2;
    float *normed = malloc(rows * (2 * a->hidden + all + 2 * kept + all) * sizeof(float));
    if (normed == NULL) return 1;
    float *added = normed + rows * a->hidden, *projected = added + rows * a->hidden;
    float *heads = projected + rows * (all + 2 * kept);
    for (size_t r = 0; r < rows; r++)
        normalise(a->x + r * a->hidden, a->norm, a->eps, normed + r * a->hidden, a->hidden);
    int failed = multiply(a, a->in, normed, projected);
    if (!failed) {
        place(a, projected);
        Work w = {.a = a, .isa = isa, .projected = projected, .heads = heads};
        spac_together(attend_pieces, &w, rows * (a->before + rows) * all < WORTH_THREADS ? 1 : a->threads);
        failed = w.failed && w.next < a->rows * a->kv_heads;
    }
    if (!failed) failed = multiply(a, a->out, heads, added);
    for (size_t i = 0; i < rows * a->hidden && !failed; i++) a->x[i] += added[i];
    free(normed);
    return failed;
}
