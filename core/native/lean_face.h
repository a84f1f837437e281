// The Python interface for turning lean payloads into record batches; see lean_decode.h and lean_join.h.
#ifndef KERA_LEAN_FACE_H
#define KERA_LEAN_FACE_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

// As in kera/core/format/joining.py.
#define JOINED_PAYLOAD_BYTES_MAX ((uint32_t)16 << 10)
#define JOINED_RECORDS_MAX ((uint64_t)64 << 10)

struct Type;

// The type in a capsule from `lean_type`. Returns NULL, with an error set, if it is not such a capsule.
const struct Type *type_in(PyObject *capsule);

extern const char lean_type_doc[];
PyObject *lean_type(PyObject *module, PyObject *schema);

extern const char decode_in_place_doc[];
PyObject *decode_in_place(PyObject *module, PyObject *const *args, Py_ssize_t count);

extern const char join_chunks_doc[];
PyObject *join_chunks(PyObject *module, PyObject *const *args, Py_ssize_t count);

#endif
