/* pool.py, whose functions look through all experts; here the least and the greatest rank of every layer are kept, so
 * that a question looks at one number a layer and then at the experts of one layer. */
#include "marginal.h"

static const float ABSENT = 1000, ABSENT_ABOVE = 750, PASSED_OVER = 500; /* as in pool.py */

int to_pool(PyObject *array, void *address) {
    Pool *pool = address;
    if (!array) return PyBuffer_Release(&pool->view), 1; /* another argument was wrong */
    if (PyObject_GetBuffer(array, &pool->view, PyBUF_CONTIG)) return 0;
    pool->layers = pool->view.shape[1], pool->experts = pool->view.shape[2];
    const Size plane = pool->layers * pool->experts;
    pool->worth = pool->view.buf, pool->away = pool->worth + plane, pool->rank = pool->away + plane;
    pool->least = pool->rank + plane, pool->greatest = pool->least + plane;
    return Py_CLEANUP_SUPPORTED;
}

PyObject *done(Pool *pool, PyObject *answer) {
    PyBuffer_Release(&pool->view);
    if (!answer && !PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "no such layer or expert");
    return answer;
}

int has(const Pool *pool, Size layer, Size expert) {
    return layer >= 0 && layer < pool->layers && expert >= 0 && expert < pool->experts;
}

static void find_ends(const Pool *pool, Size layer) {
    const float *rank = pool->rank + layer * pool->experts;
    float least = rank[0], greatest = rank[0];
    for (Size e = 1; e < pool->experts; e++) {
        least = rank[e] < least ? rank[e] : least;
        greatest = rank[e] > greatest ? rank[e] : greatest;
    }
    pool->least[layer] = least;
    pool->greatest[layer] = greatest;
}

/* Follows every change to a layer's worth or whereabouts. */
static void rank(const Pool *pool, Size layer) {
    const float *worth = pool->worth + layer * pool->experts, *away = pool->away + layer * pool->experts;
    float *restrict rank = pool->rank + layer * pool->experts;
    for (Size e = 0; e < pool->experts; e++) rank[e] = worth[e] + away[e];
    find_ends(pool, layer);
}

static Size find(const float *numbers, float number) {
    Size at = 0;
    while (numbers[at] != number) at++;
    return at;
}

static float least_of(const Pool *pool) {
    float least = pool->least[0];
    for (Size layer = 1; layer < pool->layers; layer++) least = pool->least[layer] < least ? pool->least[layer] : least;
    return least;
}

static PyObject *key_of(PyObject *keys, Size layer, Size expert) {
    PyObject *row = PySequence_GetItem(keys, layer), *key = row ? PySequence_GetItem(row, expert) : NULL;
    Py_XDECREF(row);
    return key;
}

PyObject *price(PyObject *module, PyObject *args) {
    Pool pool;
    Py_buffer demand;
    Size layer;
    float passes, chance;
    PyObject *named;
    if (!PyArg_ParseTuple(args, "O&ny*fOf:price", to_pool, &pool, &layer, &demand, &passes, &named, &chance)) return NULL;
    int there = has(&pool, layer, 0);
    if (there) {
        const float *row = (float *)demand.buf + layer * pool.experts;
        float *restrict worth = pool.worth + layer * pool.experts;
        for (Size e = 0; e < pool.experts; e++) worth[e] = row[e] * passes;
        there = add(named, chance, worth, pool.experts);
        rank(&pool, layer);
    }
    PyBuffer_Release(&demand);
    return done(&pool, there ? Py_NewRef(Py_None) : NULL);
}

PyObject *put(PyObject *module, PyObject *args) {
    Pool pool;
    Size layer, expert;
    float away;
    if (!PyArg_ParseTuple(args, "O&(nn)f:put", to_pool, &pool, &layer, &expert, &away)) return NULL;
    if (!has(&pool, layer, expert)) return done(&pool, NULL);
    pool.away[layer * pool.experts + expert] = away;
    rank(&pool, layer);
    return done(&pool, Py_NewRef(Py_None));
}

PyObject *least(PyObject *module, PyObject *array) {
    Pool pool;
    return to_pool(array, &pool) ? done(&pool, PyFloat_FromDouble(least_of(&pool))) : NULL;
}

PyObject *coldest(PyObject *module, PyObject *args) {
    Pool pool;
    double below;
    float least;
    PyObject *keys, *candidates, *key = NULL;
    int found = 0, passed_over = 0;
    if (!PyArg_ParseTuple(args, "O&OOd:coldest", to_pool, &pool, &keys, &candidates, &below)) return NULL;
    while (!found && (least = least_of(&pool)) < below) {
        Size layer = find(pool.least, least), expert = find(pool.rank + layer * pool.experts, least);
        Size at = layer * pool.experts + expert;
        key = key_of(keys, layer, expert);
        found = key ? PySequence_Contains(candidates, key) : -1;
        if (found > 0) {
            pool.away[at] = ABSENT;
            rank(&pool, layer);
        } else {
            Py_CLEAR(key);
            pool.rank[at] = PASSED_OVER;
            find_ends(&pool, layer);
            passed_over = 1;
        }
    }
    for (Size layer = 0; passed_over && layer < pool.layers; layer++) rank(&pool, layer);
    return done(&pool, found ? key : Py_NewRef(Py_None));
}

PyObject *warmest(PyObject *module, PyObject *args) {
    Pool pool;
    PyObject *keys;
    if (!PyArg_ParseTuple(args, "O&O:warmest", to_pool, &pool, &keys)) return NULL;
    Size layer = 0;
    for (Size l = 1; l < pool.layers; l++)
        if (pool.greatest[l] > pool.greatest[layer]) layer = l;
    const float greatest = pool.greatest[layer];
    if (!(greatest > ABSENT_ABOVE)) return done(&pool, Py_NewRef(Py_None));
    PyObject *key = key_of(keys, layer, find(pool.rank + layer * pool.experts, greatest));
    return done(&pool, key ? Py_BuildValue("Nd", key, (double)greatest - ABSENT) : NULL);
}
