// The chunks of the rows of a batch, up to their headers.
#ifndef KERA_CHUNKS_OF_ROWS_H
#define KERA_CHUNKS_OF_ROWS_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include "arrow_data.h"

// Chunks of the rows up to each of `ends`, ascending, from the one before: a bytearray, in which the header of each is
// zeros, and how many bytes each payload is (int64), as bytes. `order`: which rows, up to the last end; NULL: as they
// are. NULL where Python knows more about one of them, or where there is an error.
PyObject *begin_all_chunks(const struct ArrowSchema *schema, const struct ArrowArray *batch, const int64_t *order,
                           const uint32_t *ends, size_t count, uint64_t bytes_max);

#endif
