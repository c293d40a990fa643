#include "marginal.h"

Size *to_experts(PyObject *named, Size experts, Size *count) {
    const int dict = PyDict_Check(named), known = dict || PyTuple_Check(named) || PyList_Check(named);
    const Size most = known ? PyObject_Size(named) : 0;
    Size *found = known ? PyMem_New(Size, most + 1) : NULL, at = 0;
    PyObject *name = NULL;
    if (!known) PyErr_SetString(PyExc_TypeError, "experts come as a tuple, a list or the keys of a dict");
    if (known && !found) PyErr_NoMemory();
    for (*count = 0; found && *count < most; ++*count) {
        if (!dict) name = PySequence_Fast_GET_ITEM(named, *count);
        if (dict && !PyDict_Next(named, &at, &name, NULL)) break;
        found[*count] = PyLong_AsSsize_t(name);
        if (found[*count] >= 0 && found[*count] < experts) continue;
        PyMem_Free(found);
        found = NULL;
    }
    return found;
}

static PyMethodDef methods[] = {
    {"see", see, METH_VARARGS, NULL},
    {"split", split, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_marginal", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__marginal(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddType(module, &PoolType)) Py_CLEAR(module);
    return module;
}
