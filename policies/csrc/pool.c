/* pool.py, where questions look through all experts; here the least and the greatest rank of every layer are kept, so
 * that a question looks at one number a layer and then at the experts of one layer. */
#include "marginal.h"
#include <structmember.h>

static const float RESIDENT = 0, ABSENT = 1000, ABSENT_ABOVE = 750, PASSED_OVER = 500; /* as in pool.py */

PyObject *not_there(void) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "no such layer or expert");
    return NULL;
}

int has(const Pool *pool, Size layer, Size expert) {
    return layer >= 0 && layer < pool->layers && expert >= 0 && expert < pool->experts;
}

enum { LANES = 16 }; /* extremes of so many parts, in vectors; which part a number is in does not matter */

static float least_in(const float *numbers, Size count) {
    float part[LANES], least = numbers[0];
    for (Size i = 0; i < LANES; i++) part[i] = least;
    Size at = 0;
    for (; at + LANES <= count; at += LANES)
        for (Size i = 0; i < LANES; i++) part[i] = numbers[at + i] < part[i] ? numbers[at + i] : part[i];
    for (; at < count; at++) least = numbers[at] < least ? numbers[at] : least;
    for (Size i = 0; i < LANES; i++) least = part[i] < least ? part[i] : least;
    return least;
}

static float greatest_in(const float *numbers, Size count) {
    float part[LANES], greatest = numbers[0];
    for (Size i = 0; i < LANES; i++) part[i] = greatest;
    Size at = 0;
    for (; at + LANES <= count; at += LANES)
        for (Size i = 0; i < LANES; i++) part[i] = numbers[at + i] > part[i] ? numbers[at + i] : part[i];
    for (; at < count; at++) greatest = numbers[at] > greatest ? numbers[at] : greatest;
    for (Size i = 0; i < LANES; i++) greatest = part[i] > greatest ? part[i] : greatest;
    return greatest;
}

/* Follows every change to a layer's ranks. */
static void find_ends(const Pool *pool, Size layer) {
    const float *rank = pool->rank + layer * pool->experts;
    pool->least[layer] = least_in(rank, pool->experts);
    pool->greatest[layer] = greatest_in(rank, pool->experts);
}

static void rank(const Pool *pool, Size layer) {
    const float *worth = pool->worth + layer * pool->experts, *away = pool->away + layer * pool->experts;
    float *restrict rank = pool->rank + layer * pool->experts;
    for (Size e = 0; e < pool->experts; e++) rank[e] = worth[e] + away[e];
    find_ends(pool, layer);
}

static void move(const Pool *pool, Size layer, Size expert, float away) {
    const Size at = layer * pool->experts + expert;
    pool->away[at] = away;
    pool->rank[at] = pool->worth[at] + away;
    find_ends(pool, layer);
}

static Size find(const float *numbers, float number) {
    Size at = 0;
    while (numbers[at] != number) at++;
    return at;
}

static PyObject *key_of(const Pool *pool, Size layer, Size expert) {
    PyObject *row = PySequence_GetItem(pool->keys, layer), *key = row ? PySequence_GetItem(row, expert) : NULL;
    Py_XDECREF(row);
    return key;
}

static int to_key(const Pool *pool, PyObject *key, Size *layer, Size *expert) {
    if (!PyTuple_Check(key)) return PyErr_SetString(PyExc_TypeError, "a key is a tuple"), 0;
    return PyArg_ParseTuple(key, "nn:Key", layer, expert) && (has(pool, *layer, *expert) || not_there());
}

static int two(Size given) {
    if (given != 2) PyErr_SetString(PyExc_TypeError, "takes two arguments");
    return given == 2;
}

static PyObject *price(Pool *pool, PyObject *args) {
    Py_buffer demand;
    Size layer, count;
    float passes, chance;
    PyObject *named;
    if (!PyArg_ParseTuple(args, "ny*fOf:price", &layer, &demand, &passes, &named, &chance)) return NULL;
    Size *experts = has(pool, layer, 0) ? to_experts(named, pool->experts, &count) : NULL;
    if (experts) {
        const float *row = (float *)demand.buf + layer * pool->experts;
        float *restrict worth = pool->worth + layer * pool->experts;
        for (Size e = 0; e < pool->experts; e++) worth[e] = row[e] * passes;
        for (Size i = 0; i < count; i++) worth[experts[i]] += chance;
        rank(pool, layer);
    }
    PyBuffer_Release(&demand);
    PyMem_Free(experts);
    return experts ? Py_NewRef(Py_None) : not_there();
}

static PyObject *put(Pool *pool, PyObject *const *args, Size given) {
    Size layer, expert;
    if (!two(given) || !to_key(pool, args[0], &layer, &expert)) return NULL;
    const double away = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred()) return NULL;
    move(pool, layer, expert, (float)away);
    Py_RETURN_NONE;
}

static PyObject *least(Pool *pool, PyObject *none) { return PyFloat_FromDouble(least_in(pool->least, pool->layers)); }

/* A new reference to a key, or to None. */
static PyObject *find_coldest(const Pool *pool, PyObject *candidates, double below) {
    PyObject *key = NULL;
    float least;
    int found = 0, passed_over = 0;
    while (!found && (least = least_in(pool->least, pool->layers)) < below) {
        const Size layer = find(pool->least, least), expert = find(pool->rank + layer * pool->experts, least);
        key = key_of(pool, layer, expert);
        found = key ? PySequence_Contains(candidates, key) : -1;
        if (found > 0) {
            move(pool, layer, expert, ABSENT);
        } else {
            Py_CLEAR(key);
            pool->rank[layer * pool->experts + expert] = PASSED_OVER;
            find_ends(pool, layer);
            passed_over = 1;
        }
    }
    for (Size layer = 0; passed_over && layer < pool->layers; layer++) rank(pool, layer);
    return found ? key : Py_NewRef(Py_None);
}

static PyObject *coldest(Pool *pool, PyObject *const *args, Size given) {
    if (!two(given)) return NULL;
    const double below = PyFloat_AsDouble(args[1]);
    return PyErr_Occurred() ? NULL : find_coldest(pool, args[0], below);
}

static PyObject *exchange(Pool *pool, PyObject *const *args, Size given) {
    Size layer, expert;
    if (!two(given) || !to_key(pool, args[1], &layer, &expert)) return NULL;
    PyObject *victim = find_coldest(pool, args[0], pool->worth[layer * pool->experts + expert]);
    if (victim && victim != Py_None) move(pool, layer, expert, RESIDENT);
    return victim;
}

static PyObject *warmest(Pool *pool, PyObject *none) {
    const float greatest = greatest_in(pool->greatest, pool->layers);
    if (!(greatest > ABSENT_ABOVE)) Py_RETURN_NONE;
    const Size layer = find(pool->greatest, greatest);
    PyObject *key = key_of(pool, layer, find(pool->rank + layer * pool->experts, greatest));
    const double least = least_in(pool->least, pool->layers);
    return key ? Py_BuildValue("Ndd", key, (double)greatest - ABSENT, least) : NULL;
}

static PyObject *new(PyTypeObject *type, PyObject *args, PyObject *named) {
    PyObject *array, *keys;
    if (!PyArg_ParseTuple(args, "OO:Pool", &array, &keys)) return NULL;
    Pool *pool = (Pool *)type->tp_alloc(type, 0);
    if (!pool || PyObject_GetBuffer(array, &pool->view, PyBUF_CONTIG)) {
        Py_XDECREF(pool);
        return NULL;
    }
    pool->keys = Py_NewRef(keys);
    pool->layers = pool->view.shape[1], pool->experts = pool->view.shape[2];
    const Size plane = pool->layers * pool->experts;
    pool->worth = pool->view.buf, pool->away = pool->worth + plane, pool->rank = pool->away + plane;
    pool->least = PyMem_New(float, 2 * pool->layers), pool->greatest = pool->least + pool->layers;
    for (Size layer = 0; pool->least && layer < pool->layers; layer++) find_ends(pool, layer);
    if (pool->least) return (PyObject *)pool;
    Py_DECREF(pool);
    return PyErr_NoMemory();
}

static void dealloc(Pool *pool) {
    PyBuffer_Release(&pool->view);
    PyMem_Free(pool->least);
    Py_XDECREF(pool->keys);
    Py_TYPE(pool)->tp_free(pool);
}

/* For copies and pickles. */
static PyObject *reduce(Pool *pool, PyObject *none) {
    return Py_BuildValue("O(OO)", Py_TYPE(pool), pool->view.obj, pool->keys);
}

#define CALL(name) (PyCFunction)(void (*)(void)) name
static PyMethodDef methods[] = {
    {"price", CALL(price), METH_VARARGS, NULL},       {"put", CALL(put), METH_FASTCALL, NULL},
    {"least", CALL(least), METH_NOARGS, NULL},        {"coldest", CALL(coldest), METH_FASTCALL, NULL},
    {"exchange", CALL(exchange), METH_FASTCALL, NULL}, {"warmest", CALL(warmest), METH_NOARGS, NULL},
    {"__reduce__", CALL(reduce), METH_NOARGS, NULL},  {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"array", T_OBJECT_EX, offsetof(Pool, view.obj), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyTypeObject PoolType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "moe_spac.policies._marginal.Pool",
    .tp_basicsize = sizeof(Pool),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = new,
    .tp_dealloc = (destructor)dealloc,
    .tp_methods = methods,
    .tp_members = members,
};
