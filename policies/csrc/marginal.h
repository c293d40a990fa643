/* What the files of `_marginal` share. Each has in C what numpy or Python defines in the module of its name, for speed:
 * every step is one operation of the same type in the same order, and setup.py asks for neither fused nor reordered
 * arithmetic, so both give the same bits and what a policy decides does not depend on whether there was a compiler.
 * Shapes of arrays are trusted, layers and experts are checked. Between calls nothing is kept but what is in the arrays,
 * and each `Pool`. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef Py_ssize_t Size;

/* `Pool` of pool.py, over the same array [3, L, E], which it keeps. */
typedef struct {
    PyObject_HEAD
    Py_buffer view;
    PyObject *keys;
    Size layers, experts;
    float *worth, *away, *rank;  /* [L, E] */
    float *least, *greatest;     /* [L], of ranks */
} Pool;

extern PyTypeObject PoolType;

int has(const Pool *pool, Size layer, Size expert);

/* NULL, and an IndexError if there is no other exception. */
PyObject *not_there(void);

/* What a tuple, a list or a dict's keys name, to be freed with PyMem_Free; NULL if one is none of so many experts. */
Size *to_experts(PyObject *named, Size experts, Size *count);

PyObject *see(PyObject *module, PyObject *args);
PyObject *split(PyObject *module, PyObject *args);
