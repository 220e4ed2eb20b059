/* A call of a C function with its arguments: `int function(void *first, const void *second)`, by their addresses, and with
 * four further 64-bit numbers where the function takes them. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>

enum { VERSION = 2, NUMBERS = 4 }; /* Of what is here; bound_call.py names the one that it uses. */

typedef int Plain(void *first, const void *second);
typedef int WithNumbers(void *first, const void *second, int64_t, int64_t, int64_t, int64_t);

typedef struct {
    PyObject_HEAD
    vectorcallfunc run;
    Plain *function;
    void *first;
    const void *second;
    PyObject *owners; /* of what the addresses lead to */
    int keeps_interpreter;
} BoundCall;

static int called(const BoundCall *call, const int64_t *numbers) {
    if (!numbers) return call->function(call->first, call->second);
    WithNumbers *function = (WithNumbers *)call->function;
    return function(call->first, call->second, numbers[0], numbers[1], numbers[2], numbers[3]);
}

static PyObject *run(PyObject *self, PyObject *const *arguments, size_t count, PyObject *names) {
    const BoundCall *call = (const BoundCall *)self;
    const Py_ssize_t given = PyVectorcall_NARGS(count);
    int64_t numbers[NUMBERS];
    int result;
    if ((given && given != NUMBERS) || names) {
        PyErr_SetString(PyExc_TypeError, "a bound call takes four further numbers, or none");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < given; i++) {
        numbers[i] = (int64_t)PyLong_AsLongLong(arguments[i]);
        if (numbers[i] == -1 && PyErr_Occurred()) return NULL;
    }
    if (call->keeps_interpreter) return PyLong_FromLong(called(call, given ? numbers : NULL));
    Py_BEGIN_ALLOW_THREADS
    result = called(call, given ? numbers : NULL);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(result);
}

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    unsigned long long function, first, second;
    PyObject *owners;
    int keeps_interpreter;
    if ((names && PyDict_GET_SIZE(names))
        || !PyArg_ParseTuple(arguments, "KKKpO", &function, &first, &second, &keeps_interpreter, &owners))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "a bound call takes no keywords");
    BoundCall *call = (BoundCall *)type->tp_alloc(type, 0);
    if (!call) return NULL;
    call->run = run;
    call->function = (Plain *)(uintptr_t)function;
    call->first = (void *)(uintptr_t)first;
    call->second = (const void *)(uintptr_t)second;
    call->owners = Py_NewRef(owners);
    call->keeps_interpreter = keeps_interpreter;
    return (PyObject *)call;
}

static void forget(PyObject *self) {
    Py_XDECREF(((BoundCall *)self)->owners);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "moesched.system._bound_call.BoundCall",
    .tp_doc = PyDoc_STR("The call of a function, given its address, those of two arguments, whether it keeps the "
                        "interpreter from other threads, and the owners of what the addresses lead to."),
    .tp_basicsize = sizeof(BoundCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(BoundCall, run),
    .tp_call = PyVectorcall_Call,
    .tp_new = make,
    .tp_dealloc = forget,
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_bound_call", "See bound_call.c.", -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__bound_call(void) {
    PyObject *made = PyType_Ready(&Type) ? NULL : PyModule_Create(&module);
    if (!made) return NULL;
#ifdef Py_GIL_DISABLED
    PyUnstable_Module_SetGIL(made, Py_MOD_GIL_NOT_USED);
#endif
    if (PyModule_AddIntConstant(made, "VERSION", VERSION) || PyModule_AddObjectRef(made, "BoundCall", (PyObject *)&Type)) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
