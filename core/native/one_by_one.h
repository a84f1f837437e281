// Records one by one in `async for`: kera/client/consuming/one_by_one.py says why, and does the same.
#ifndef KERA_ONE_BY_ONE_H
#define KERA_ONE_BY_ONE_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

// Adds the type OneByOne to a module. 0, or -1 and an error.
int one_by_one_init(PyObject *module);

#endif
