// Calling the Python twin of a function in the cases that the function does not handle.
#ifndef KERA_TWIN_H
#define KERA_TWIN_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <stdbool.h>

// Call a twin with the arguments of a call: `count` positional ones, followed by the keyword arguments `names` (NULL:
// none).
static inline PyObject *ask_twin(PyObject *twin, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    PyErr_Clear();  // the twin raises the error itself
    Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);
    PyObject *answer = NULL, *by_name = PyDict_New(), *in_order = PyTuple_New(count);
    bool good = by_name != NULL && in_order != NULL;
    for (Py_ssize_t index = 0; good && index < count; index++)
        good = PyTuple_SetItem(in_order, index, Py_NewRef(args[index])) == 0;
    for (Py_ssize_t index = 0; good && index < named; index++)
        good = PyDict_SetItem(by_name, PyTuple_GetItem(names, index), args[count + index]) == 0;
    if (good)
        answer = PyObject_Call(twin, in_order, by_name);
    Py_XDECREF(in_order);
    Py_XDECREF(by_name);
    return answer;
}

#endif
