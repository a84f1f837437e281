// Batches of the default schema as records: kera/client/consuming/delivering/records.py does the same.
#ifndef KERA_RECORDS_H
#define KERA_RECORDS_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

// Create the type of the iterators. Returns 0, or -1 with an error set.
int records_init(void);

// An iterator over the rows of a batch as tuples of `type`, each created on access.
// args: (batch, stream, streamlet, entry, first, no_headers); no_headers: the headers of a record without any. Other
// headers have the same type, which keeps its pairs in the attribute `_pairs`. Returns NULL if Python has to do it.
PyObject *new_records(PyTypeObject *type, PyObject *const *args);

#endif
