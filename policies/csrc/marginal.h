/* What the files of `_marginal` share. Each has in C what numpy or Python defines in the module of its name, for speed:
 * every step is one operation of the same type in the same order, and setup.py asks for neither fused nor reordered
 * arithmetic, so both give the same bits and what a policy decides does not depend on whether there was a compiler.
 * Shapes of arrays are trusted, layers and experts are checked. Nothing is kept between calls. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef Py_ssize_t Size;

typedef struct {
    Py_buffer view;
    Size layers, experts;
    float *worth, *away, *rank, *least, *greatest; /* [L, E] three times; [L], of ranks, twice */
} Pool;

/* Converter for PyArg_ParseTuple's "O&": an array [5, L, E] as pool.py makes it. `done` gives it back. */
int to_pool(PyObject *array, void *pool);

/* The answer; NULL, if there is no other exception, means an IndexError. */
PyObject *done(Pool *pool, PyObject *answer);

int has(const Pool *pool, Size layer, Size expert);

/* Adds `amount` for every expert that `named` (a sequence, or a dict's keys) names. Whether all exist. */
int add(PyObject *named, float amount, float *to, Size experts);

PyObject *see(PyObject *module, PyObject *args);
PyObject *price(PyObject *module, PyObject *args);
PyObject *put(PyObject *module, PyObject *args);
PyObject *least(PyObject *module, PyObject *array);
PyObject *coldest(PyObject *module, PyObject *args);
PyObject *warmest(PyObject *module, PyObject *args);
PyObject *split(PyObject *module, PyObject *args);
