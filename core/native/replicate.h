// Replication requests, handled directly in a connection's buffer: docs/native.md says what is done here.
#ifndef KERA_REPLICATE_H
#define KERA_REPLICATE_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

extern const char take_replicas_doc[];

// take_replicas(epochs, replicas, frames, bulk_bytes_max, requests_max), see its docstring.
PyObject *take_replicas(PyObject *module, PyObject *const *args, Py_ssize_t count);

// Intern the attribute names that are used here. Returns -1 if there is no memory.
int replicate_init(void);

#endif
