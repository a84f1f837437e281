// A broker's way of chunks into its memory: docs/native.md has what is done here, and what is left to Python.
#ifndef KERA_APPEND_H
#define KERA_APPEND_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

extern const char append_chunks_doc[];

// append_chunks(door, context, bulk, at, chunks_max, level, now_ms, now_us), see the doc.
PyObject *append_chunks(PyObject *module, PyObject *const *args, Py_ssize_t count);

// Make the names of attributes that it looks at. -1: there is no memory.
int append_init(void);

#endif
