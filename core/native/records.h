// Batches of the default schema as records: kera/client/consuming/records.py does the same.
#ifndef KERA_RECORDS_H
#define KERA_RECORDS_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

// Makes the type of the iterators. 0, or -1 and an error.
int records_init(void);

// An iterator over the rows of a batch as tuples of `type`, each made when it is asked for.
// args: (batch, stream, streamlet, entry, first, no_headers); no_headers: of a record without any, and others are of
// its type, which keeps its pairs in the attribute `_pairs`. NULL: Python knows more about it.
PyObject *new_records(PyTypeObject *type, PyObject *const *args);

#endif
