// The Python interface to the headers of frames: kera/core/rpc/frames.py does the same.
#ifndef KERA_FRAME_FACE_H
#define KERA_FRAME_FACE_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

// Both functions return NULL where the case is left to Python.

// The header at `at`, as a tuple of `type`. args: (view, at, bulk_bytes_max)
PyObject *new_frame_header(PyTypeObject *type, PyObject *const *args);

// A header followed by the head, as bytes. args: (head, kind, method, request_id, bulk_bytes)
PyObject *new_frame(PyObject *const *args);

#endif
