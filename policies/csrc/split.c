/* split.py. Times are doubles here, which have all the digits of the integers there. */
#include "marginal.h"

typedef struct {
    double order, gain, on_cpu, on_gpu;
    Size expert;
} Missing;

enum { SMALL = 32 };

/* An expert's time by its tokens, of which few are different: each is looked up once. */
typedef struct {
    PyObject *times;
    double known[SMALL]; /* 0: not looked up */
} Times;

static int compare(const void *one, const void *other) {
    const Missing *a = one, *b = other;
    if (a->order != b->order) return a->order < b->order ? -1 : 1;
    return a->expert < b->expert ? -1 : 1;
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

static double time_of(Times *t, PyObject *load) {
    const Size tokens = PyLong_AsSsize_t(load);
    const int small = tokens >= 0 && tokens < SMALL;
    if (small && t->known[tokens]) return t->known[tokens];
    PyObject *ns = PyObject_GetItem(t->times, load);
    const double value = ns ? PyLong_AsDouble(ns) : -1;
    Py_XDECREF(ns);
    if (small) t->known[tokens] = value;
    return value;
}

/* What the answer says of an expert, the next in order. */
static void append(PyObject *answer, PyObject *answers, Size expert) {
    PyObject *pair = PySequence_GetItem(answers, expert);
    if (pair) PyList_Append(answer, pair);
    Py_XDECREF(pair);
}

PyObject *split(PyObject *module, PyObject *args) {
    Pool *pool;
    PyObject *experts, *loads, *held, *joins, *gpu, *fetch, *cpu, *unused;
    Times on_gpu = {0}, on_cpu = {0};
    Size layer, missed = 0;
    double floor, link_ns, use_ns, copy_ns, cpu_more_ns, host_ns, gpu_ns = 0;
    if (!PyArg_ParseTuple(args, "O!(nO!O!OOOOO)Odd(dOOddd)(OOO):split", &PoolType, &pool, &layer, &PyTuple_Type,
                          &experts, &PyTuple_Type, &loads, &unused, &unused, &unused, &held, &unused, &joins, &floor,
                          &link_ns, &use_ns, &on_gpu.times, &on_cpu.times, &copy_ns, &cpu_more_ns, &host_ns, &gpu, &fetch,
                          &cpu))
        return NULL;
    const Size count = PyTuple_GET_SIZE(experts);
    Missing *missing = PyMem_New(Missing, count + 1);
    if (!missing) PyErr_NoMemory();
    PyObject *answer = missing && has(pool, layer, 0) && PyTuple_GET_SIZE(loads) == count ? PyList_New(0) : NULL;
    for (Size at = 0; answer && !PyErr_Occurred() && at < count; at++) {
        PyObject *expert = PyTuple_GET_ITEM(experts, at), *load = PyTuple_GET_ITEM(loads, at);
        const Size e = PyLong_AsSsize_t(expert);
        const double on_gpu_ns = time_of(&on_gpu, load);
        const int resident = PySequence_Contains(held, expert);
        if (resident || PySequence_Contains(joins, expert)) {
            append(answer, resident ? gpu : fetch, e);
            gpu_ns += on_gpu_ns;
        } else if (has(pool, layer, e)) {
            const double kept = pool->worth[layer * pool->experts + e] - floor, on_cpu_ns = time_of(&on_cpu, load);
            const double gain = (kept > 0 ? kept : 0) * use_ns;
            missing[missed++] = (Missing){-gain - on_cpu_ns, gain, on_cpu_ns, on_gpu_ns, e};
        } else {
            Py_CLEAR(answer);
        }
    }
    qsort(missing, answer ? (size_t)missed : 0, sizeof *missing, compare);
    const Size copied = most_worth_copying(missing, missed, gpu_ns, link_ns, copy_ns, cpu_more_ns, host_ns);
    for (Size i = 0; answer && i < missed; i++) append(answer, i < copied ? fetch : cpu, missing[i].expert);
    PyMem_Free(missing);
    if (PyErr_Occurred()) Py_CLEAR(answer);
    return answer ? answer : not_there();
}
