// Headers of frames, towards Python: kera/core/rpc/frames.py does the same.
#ifndef KERA_FRAME_FACE_H
#define KERA_FRAME_FACE_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

// Both return NULL where Python knows more about it.

// The header at a place, as a tuple of `type`. args: (view, at, bulk_bytes_max)
PyObject *new_frame_header(PyTypeObject *type, PyObject *const *args);

// A header, and the head behind it. args: (head, kind, method, request_id, bulk_bytes)
PyObject *new_frame(PyObject *const *args);

#endif
