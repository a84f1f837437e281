// Write requests, handled directly in a buffer: docs/native.md says what is done here.
#ifndef KERA_TAKE_H
#define KERA_TAKE_H

#include "append.h"

extern const char take_writes_doc[], held_answers_doc[];

// take_writes(rules, write, data, level, bulk_bytes_max, most, now_ms, now_us), see its docstring.
PyObject *take_writes(PyObject *module, PyObject *const *args, Py_ssize_t count);

// held_answers(held, virtual_segment_id, backup_ids), see its docstring.
PyObject *held_answers(PyObject *module, PyObject *const *args, Py_ssize_t count);

#endif
