#include "marginal.h"

int add(PyObject *named, float amount, float *to, Size experts) {
    PyObject *all = PySequence_Fast(named, "experts come as a sequence or as the keys of a dict");
    Size i = 0, count = all ? PySequence_Fast_GET_SIZE(all) : -1;
    for (; i < count; i++) {
        Size expert = PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(all, i));
        if (expert < 0 || expert >= experts) break;
        to[expert] += amount;
    }
    Py_XDECREF(all);
    return i == count;
}

static PyMethodDef methods[] = {
    {"see", see, METH_VARARGS, NULL},         {"price", price, METH_VARARGS, NULL},
    {"put", put, METH_VARARGS, NULL},         {"least", least, METH_O, NULL},
    {"coldest", coldest, METH_VARARGS, NULL}, {"warmest", warmest, METH_VARARGS, NULL},
    {"split", split, METH_VARARGS, NULL},     {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_marginal", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__marginal(void) { return PyModule_Create(&definition); }
