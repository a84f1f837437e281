// `Producer.send` for the usual record: kera/client/producing/open_chunks/records.py defines it, and has the twin.
#ifndef KERA_SEND_H
#define KERA_SEND_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

// Add the types Room, Gathered and Accepted to a module. Returns 0, or -1 with an error set.
int send_init(PyObject *module);

extern const char sender_doc[];
PyObject *sender(PyObject *module, PyObject *args);

#endif
