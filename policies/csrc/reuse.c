/* `Reuse._see`: features, counts and forecast of a layer after one more pass. */
#include "marginal.h"

enum { RECENCY = 1, SEQUEL, RATES, OF_HALF_LIFE_64 = RATES + 3 }; /* rows of the features, as in reuse.py */

typedef struct {
    Size experts, size; /* of features */
    float *features, *window, *need, *uses, *pairs;
    Size *before, befores, *now, nows; /* whom the last pass needed, and whom this one does */
} Layer;

static void recency_and_rates(const Layer *l, const float *restrict keep) {
    const Size experts = l->experts;
    const float *restrict need = l->need;
    float *restrict recency = l->features + RECENCY * experts;
    for (Size e = 0; e < experts; e++) {
        float faded = recency[e] / (1 + recency[e]);
        recency[e] = faded > need[e] ? faded : need[e];
    }
    for (Size row = RATES; row < l->size; row++) {
        float *restrict rate = l->features + row * experts, gain = 1 - keep[row - RATES];
        for (Size e = 0; e < experts; e++) rate[e] += gain * (need[e] - rate[e]);
    }
}

/* Rows of pairs come from far away: they are asked for together, before the first of them is worked on. */
static void fetch(const Layer *l, const Size *rows, Size count) {
    for (Size i = 0; i < count; i++)
        for (Size e = 0; e < l->experts; e += 16) __builtin_prefetch(l->pairs + rows[i] * l->experts + e, 1);
}

static void sequel(const Layer *l) {
    const Size experts = l->experts;
    const float *restrict rate = l->features + OF_HALF_LIFE_64 * experts;
    float *restrict sequel = memset(l->features + SEQUEL * experts, 0, (size_t)experts * sizeof(float));
    for (Size i = 0; i < l->befores; i++) {
        float *after = l->pairs + l->before[i] * experts;
        l->uses[l->before[i]] += 1;
        for (Size j = 0; j < l->nows; j++) after[l->now[j]] += 1;
    }
    for (Size i = 0; i < l->nows; i++) {
        const float *restrict after = l->pairs + l->now[i] * experts;
        const float weight = 1 / ((float)l->nows * l->uses[l->now[i]]);
        for (Size e = 0; e < experts; e++) sequel[e] += weight * (after[e] + rate[e]);
    }
}

static void forecast(const Layer *l, float *restrict demand, const float *restrict weights) {
    const float *restrict features = l->features;
    for (Size e = 0; e < l->experts; e++) demand[e] = weights[0] * features[e];
    for (Size row = 1; row < l->size; row++)
        for (Size e = 0; e < l->experts; e++) demand[e] += weights[row] * features[row * l->experts + e];
}

static void see_pass(Layer *l, float *demand, const float *weights, const float *keep) {
    fetch(l, l->now, l->nows);
    for (Size e = 0; e < l->experts; e++)
        if (l->need[e]) l->before[l->befores++] = e;
    fetch(l, l->before, l->befores);
    memset(l->need, 0, (size_t)l->experts * sizeof(float));
    for (Size i = 0; i < l->nows; i++) l->need[l->now[i]] = 1;
    recency_and_rates(l, keep);
    sequel(l);
    forecast(l, demand, weights);
    float *since = l->window + l->size * l->experts;
    for (Size e = 0; e < l->experts; e++) since[e] += l->need[e];
}

/* The window that ends goes to `ended`, and another one begins. */
static void end_window(const Layer *l, float *ended) {
    const size_t features = (size_t)(l->size * l->experts) * sizeof(float), row = (size_t)l->experts * sizeof(float);
    memcpy(ended, l->window, features + row);
    memcpy(l->window, l->features, features);
    memset(l->window + l->size * l->experts, 0, row);
}

PyObject *see(PyObject *module, PyObject *args) {
    enum { STATE, DEMAND, ENDED, WEIGHTS, KEEP, ARRAYS };
    Py_buffer v[ARRAYS];
    PyObject *needed, *named;
    Size layer, ends_at, names = 0, right = 0;
    if (!PyArg_ParseTuple(args, "nOOnw*w*w*y*y*:see", &layer, &needed, &named, &ends_at, v, v + 1, v + 2, v + 3, v + 4))
        return NULL;
    const Size size = v[WEIGHTS].len / (Size)sizeof(float), rows = v[STATE].len / v[DEMAND].len;
    Layer l = {.experts = rows - (2 * size + 3), .size = size};
    const Size layers = v[DEMAND].len / (l.experts * (Size)sizeof(float));
    const int there = layer >= 0 && layer < layers && ends_at < layers;
    l.now = there ? to_experts(needed, l.experts, &l.nows) : NULL;
    Size *said = l.now ? to_experts(named, l.experts, &names) : NULL;
    l.before = said ? PyMem_New(Size, l.experts) : NULL;
    if (said && !l.before) PyErr_NoMemory();
    if (l.before) {
        l.features = (float *)v[STATE].buf + layer * rows * l.experts;
        l.window = l.features + size * l.experts;
        l.need = l.window + (size + 1) * l.experts;
        l.uses = l.need + l.experts;
        l.pairs = l.uses + l.experts;
        see_pass(&l, (float *)v[DEMAND].buf + layer * l.experts, v[WEIGHTS].buf, v[KEEP].buf);
        if (ends_at >= 0) end_window(&l, (float *)v[ENDED].buf + ends_at * (size + 1) * l.experts);
        for (Size i = 0; i < names; i++) right += l.need[said[i]] > 0;
    }
    const int seen = l.before != NULL;
    PyMem_Free(l.now), PyMem_Free(said), PyMem_Free(l.before);
    for (int i = 0; i < ARRAYS; i++) PyBuffer_Release(&v[i]);
    return seen ? PyLong_FromSsize_t(right) : not_there();
}
