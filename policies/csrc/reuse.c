/* `Reuse._see`: features, counts and forecast of a layer after one more pass. */
#include "marginal.h"

enum { RECENCY = 1, SEQUEL, RATES, OF_HALF_LIFE_64 = RATES + 3 }; /* rows of the features, as in reuse.py */

static void recency_and_rates(float *restrict features, Size rows, const float *restrict keep,
                              const float *restrict need, Size experts) {
    float *recency = features + RECENCY * experts;
    for (Size e = 0; e < experts; e++) {
        float faded = recency[e] / (1 + recency[e]);
        recency[e] = faded > need[e] ? faded : need[e];
    }
    for (Size row = RATES; row < rows; row++) {
        float *rate = features + row * experts, gain = 1 - keep[row - RATES];
        for (Size e = 0; e < experts; e++) rate[e] += gain * (need[e] - rate[e]);
    }
}

static void sequel(float *restrict sequel, const float *restrict rate, float *restrict pairs, float *restrict uses,
                   const float *restrict last, const float *restrict need, Size experts) {
    float needed = 0;
    for (Size e = 0; e < experts; e++) {
        needed += need[e];
        uses[e] += last[e];
        sequel[e] = 0;
    }
    for (Size a = 0; a < experts; a++) {
        float *after = pairs + a * experts;
        for (Size b = 0; last[a] && b < experts; b++) after[b] += need[b];
        if (!need[a]) continue;
        float weight = 1 / (needed * uses[a]);
        for (Size b = 0; b < experts; b++) sequel[b] += weight * (after[b] + rate[b]);
    }
}

static void forecast(float *restrict demand, const float *restrict features, Size rows, const float *restrict weights,
                     Size experts) {
    for (Size e = 0; e < experts; e++) demand[e] = weights[0] * features[e];
    for (Size row = 1; row < rows; row++)
        for (Size e = 0; e < experts; e++) demand[e] += weights[row] * features[row * experts + e];
}

PyObject *see(PyObject *module, PyObject *args) {
    enum { FEATURES, PAIRS, USES, LAST, WINDOW, DEMAND, WEIGHTS, KEEP, NEED, ARRAYS };
    Py_buffer v[ARRAYS];
    Size layer;
    PyObject *named;
    if (!PyArg_ParseTuple(args, "nOw*w*w*w*w*w*w*w*w*:see", &layer, &named, v, v + 1, v + 2, v + 3, v + 4, v + 5, v + 6,
                          v + 7, v + 8))
        return NULL;
    const Size experts = v[NEED].len / (Size)sizeof(float), rows = v[WEIGHTS].len / (Size)sizeof(float);
    float *need = memset(v[NEED].buf, 0, (size_t)v[NEED].len);
    int there = layer >= 0 && layer < v[LAST].len / v[NEED].len && add(named, 1, need, experts);
    if (there) {
        float *features = (float *)v[FEATURES].buf + layer * rows * experts;
        float *pairs = (float *)v[PAIRS].buf + layer * experts * experts;
        float *uses = (float *)v[USES].buf + layer * experts, *last = (float *)v[LAST].buf + layer * experts;
        float *since = (float *)v[WINDOW].buf + (layer * (rows + 1) + rows) * experts;
        recency_and_rates(features, rows, v[KEEP].buf, need, experts);
        sequel(features + SEQUEL * experts, features + OF_HALF_LIFE_64 * experts, pairs, uses, last, need, experts);
        forecast((float *)v[DEMAND].buf + layer * experts, features, rows, v[WEIGHTS].buf, experts);
        for (Size e = 0; e < experts; e++) since[e] += need[e];
        memcpy(last, need, (size_t)v[NEED].len);
    } else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_IndexError, "no such layer or expert");
    }
    for (int i = 0; i < ARRAYS; i++) PyBuffer_Release(&v[i]);
    return there ? Py_NewRef(Py_None) : NULL;
}
