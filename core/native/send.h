// What `Producer.send` does to most records: kera/client/producing/open_chunks/records.py says what, and has the twin.
#ifndef KERA_SEND_H
#define KERA_SEND_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

// Adds the types Room, Gathered and Accepted to a module. 0, or -1 and an error.
int send_init(PyObject *module);

extern const char sender_doc[];
PyObject *sender(PyObject *module, PyObject *args);

#endif
