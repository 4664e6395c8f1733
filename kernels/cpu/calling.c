/* Calls of generated functions (`stitch/cpp.py`), at a fifth of what ctypes takes.

   call(function, places, inputs, addresses, first, last)

   `function`: its address. `places`: 32-bit numbers in bytes, by which the pointers are taken from
   the list `addresses`: first the `inputs` ones that are read, then those that are written. The
   function runs on the units from `first` to before `last`, without the GIL. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define POINTERS_MAX 256

typedef void (*generated)(const void *const *in, void *const *out, int64_t first, int64_t last);

static PyObject *call(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (count != 6 || !PyBytes_Check(args[1]) || !PyList_Check(args[3])) {
        PyErr_SetString(PyExc_TypeError,
                        "call(function, places: bytes, inputs, addresses: list, first, last)");
        return NULL;
    }
    void *const function = PyLong_AsVoidPtr(args[0]);
    const int64_t inputs = PyLong_AsLongLong(args[2]);
    const int64_t first = PyLong_AsLongLong(args[4]), last = PyLong_AsLongLong(args[5]);
    if (PyErr_Occurred()) return NULL;
    const Py_ssize_t pointers = PyBytes_GET_SIZE(args[1]) / (Py_ssize_t)sizeof(int32_t);
    const int32_t *const places = (const int32_t *)PyBytes_AS_STRING(args[1]);
    if (function == NULL || pointers > POINTERS_MAX || inputs < 0 || inputs > pointers) {
        PyErr_SetString(PyExc_ValueError, "no function, too many places, or more inputs than places");
        return NULL;
    }
    void *found[POINTERS_MAX];
    for (Py_ssize_t i = 0; i < pointers; ++i) {
        if (places[i] < 0 || places[i] >= PyList_GET_SIZE(args[3])) {
            PyErr_SetString(PyExc_IndexError, "a place is beyond the addresses");
            return NULL;
        }
        found[i] = PyLong_AsVoidPtr(PyList_GET_ITEM(args[3], places[i]));
        if (found[i] == NULL && PyErr_Occurred()) return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    ((generated)function)((const void *const *)found, found + inputs, first, last);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL, "See calling.c."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "calling", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_calling(void) { return PyModule_Create(&definition); }
