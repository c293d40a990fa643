/* split.py. Times are doubles here, which have all the digits of the integers there. */
#include "marginal.h"

typedef struct {
    double order, gain, on_cpu, on_gpu;
    Size at; /* in the layer's experts, which ascend */
} Missing;

static int compare(const void *one, const void *other) {
    const Missing *a = one, *b = other;
    if (a->order != b->order) return a->order < b->order ? -1 : 1;
    return a->at < b->at ? -1 : 1;
}

static double greater(double a, double b) { return a > b ? a : b; }

static Size most_worth_copying(const Missing *missing, Size count, double gpu_ns, double link_ns, double copy_ns,
                               double cpu_more_ns, double host_ns) {
    double cpu_ns = cpu_more_ns, gained = 0;
    for (Size i = 0; i < count; i++) cpu_ns += missing[i].on_cpu;
    double least = greater(greater(cpu_ns, gpu_ns), link_ns);
    Size best = 0;
    for (Size i = 0; i < count; i++) {
        gained += missing[i].gain;
        cpu_ns -= missing[i].on_cpu;
        gpu_ns += missing[i].on_gpu;
        link_ns += copy_ns;
        double both = i + 1 < count ? greater(cpu_ns, (double)count * host_ns) : 0;
        double ns = greater(greater(gpu_ns, link_ns + missing[i].on_gpu), both) - gained;
        if (ns < least) best = i + 1, least = ns;
    }
    return best;
}

static double time_of(PyObject *times, PyObject *load) {
    PyObject *ns = PyObject_GetItem(times, load);
    double value = ns ? PyLong_AsDouble(ns) : -1;
    Py_XDECREF(ns);
    return value;
}

static void append(PyObject *answer, PyObject *expert, PyObject *place) {
    PyObject *pair = PyTuple_Pack(2, expert, place);
    if (pair) PyList_Append(answer, pair);
    Py_XDECREF(pair);
}

PyObject *split(PyObject *module, PyObject *args) {
    Pool pool;
    PyObject *experts, *loads, *held, *joins, *on_gpu, *on_cpu, *gpu, *fetch, *cpu, *unused;
    Size layer, missed = 0;
    double floor, link_ns, use_ns, copy_ns, cpu_more_ns, host_ns, gpu_ns = 0;
    if (!PyArg_ParseTuple(args, "O&(nO!O!OOOOO)Odd(dOOddd)(OOO):split", to_pool, &pool, &layer, &PyTuple_Type, &experts,
                          &PyTuple_Type, &loads, &unused, &unused, &unused, &held, &unused, &joins, &floor, &link_ns,
                          &use_ns, &on_gpu, &on_cpu, &copy_ns, &cpu_more_ns, &host_ns, &gpu, &fetch, &cpu))
        return NULL;
    const Size count = PyTuple_GET_SIZE(experts);
    Missing *missing = PyMem_New(Missing, count + 1);
    if (!missing) PyErr_NoMemory();
    PyObject *answer = missing && has(&pool, layer, 0) && PyTuple_GET_SIZE(loads) == count ? PyList_New(0) : NULL;
    for (Size at = 0; answer && !PyErr_Occurred() && at < count; at++) {
        PyObject *expert = PyTuple_GET_ITEM(experts, at), *load = PyTuple_GET_ITEM(loads, at);
        const Size e = PyLong_AsSsize_t(expert);
        const double on_gpu_ns = time_of(on_gpu, load);
        const int resident = PySequence_Contains(held, expert);
        if (resident || PySequence_Contains(joins, expert)) {
            append(answer, expert, resident ? gpu : fetch);
            gpu_ns += on_gpu_ns;
        } else if (has(&pool, layer, e)) {
            const double kept = pool.worth[layer * pool.experts + e] - floor, on_cpu_ns = time_of(on_cpu, load);
            const double gain = (kept > 0 ? kept : 0) * use_ns;
            missing[missed++] = (Missing){-gain - on_cpu_ns, gain, on_cpu_ns, on_gpu_ns, at};
        } else {
            Py_CLEAR(answer);
        }
    }
    qsort(missing, answer ? (size_t)missed : 0, sizeof *missing, compare);
    const Size copied = most_worth_copying(missing, missed, gpu_ns, link_ns, copy_ns, cpu_more_ns, host_ns);
    for (Size i = 0; answer && i < missed; i++)
        append(answer, PyTuple_GET_ITEM(experts, missing[i].at), i < copied ? fetch : cpu);
    PyMem_Free(missing);
    if (PyErr_Occurred()) Py_CLEAR(answer);
    return done(&pool, answer);
}
