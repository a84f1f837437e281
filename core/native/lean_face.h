// What Python calls for lean payloads that become record batches; see lean_decode.h.
#ifndef KERA_LEAN_FACE_H
#define KERA_LEAN_FACE_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

extern const char lean_type_doc[];
PyObject *lean_type(PyObject *module, PyObject *schema);

extern const char decode_in_place_doc[];
PyObject *decode_in_place(PyObject *module, PyObject *const *args, Py_ssize_t count);

#endif
