// Chunks of the rows of a batch, complete except for their headers.
#ifndef KERA_CHUNKS_OF_ROWS_H
#define KERA_CHUNKS_OF_ROWS_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include "arrow_data.h"

// Make one chunk for each of the ascending `ends`, of the rows from the end before up to this one. Returns a bytearray
// with the chunks, whose headers are zeros, and the sizes of the payloads (int64) as bytes. `order`: the numbers of the
// rows, up to the last end; NULL: the rows in their own order. Returns NULL if Python has to do it, or on an error.
PyObject *begin_all_chunks(const struct ArrowSchema *schema, const struct ArrowArray *batch, const int64_t *order,
                           const uint32_t *ends, size_t count, uint64_t bytes_max);

#endif
