// See chunks_of_rows.h.

#include "chunks_of_rows.h"

#include "chunk.h"
#include "lean_encode.h"
#include "pick.h"

// The initial size of the bytearray, which grows as needed.
#define MEMORY_BYTES_MIN ((size_t)64 << 10)

// The maximum number of rows to pick together, unless a single chunk has more.
#define ROWS_AT_ONCE ((uint32_t)256)

typedef struct {
    const struct ArrowSchema *schema;
    const struct ArrowArray *batch;
    uint64_t bytes_max;
    Picked picked;
    Bytes rows, nodes, body, sizes;
    PyObject *memory;
    size_t used, room;
} Chunks;

// Pick rows by their numbers into `chunks->picked`.
static bool pick_rows(Chunks *chunks, const int64_t *order, size_t count)
{
    chunks->rows.size = 0;
    if (!make_room(&chunks->rows, count * sizeof(Range) + 1))
        return false;
    Range *rows = (Range *)chunks->rows.at;
    for (size_t index = 0; index < count; index++) {
        if (order[index] < 0 || order[index] >= chunks->batch->length)
            return false;
        rows[index] = (Range){(uint64_t)order[index], 1};
    }
    return pick(chunks->schema, chunks->batch, rows, count, &chunks->picked);
}

// Make room for `bytes` bytes at the end. Returns NULL if there is no memory.
static uint8_t *reserve(Chunks *chunks, size_t bytes)
{
    if (bytes > chunks->room - chunks->used) {
        size_t room = 2 * (chunks->used + bytes);
        if (PyByteArray_Resize(chunks->memory, (Py_ssize_t)room) != 0)
            return NULL;
        chunks->room = room;
    }
    return (uint8_t *)PyByteArray_AsString(chunks->memory) + chunks->used;
}

static bool put_chunk(Chunks *chunks)
{
    const Bytes *nodes = &chunks->nodes, *body = &chunks->body;
    size_t size = nodes->size + body->size;
    if (size > PAYLOAD_BYTES_MAX)
        return false;
    size_t chunk_bytes = HEADER_BYTES + padded((uint32_t)size);
    uint8_t *at = reserve(chunks, chunk_bytes);
    int64_t payload_bytes = (int64_t)size;
    if (at == NULL || !put_bytes(&chunks->sizes, &payload_bytes, sizeof payload_bytes))
        return false;
    memset(at, 0, HEADER_BYTES);
    memcpy(at + HEADER_BYTES, nodes->at, nodes->size);
    if (body->size > 0)
        memcpy(at + HEADER_BYTES + nodes->size, body->at, body->size);
    memset(at + HEADER_BYTES + size, 0, chunk_bytes - HEADER_BYTES - size);
    chunks->used += chunk_bytes;
    return true;
}

// Add chunks of the rows of `batch` up to each of `count` ends; `first` is the number of the batch's first row.
static bool put_chunks(Chunks *chunks, const struct ArrowArray *batch, uint32_t first, const uint32_t *ends,
                       size_t count)
{
    uint32_t start = first;
    for (size_t index = 0; index < count; start = ends[index++])
        if (ends[index] < start || ends[index] - first > batch->length ||
            !encode_lean(chunks->schema, batch, start - first, ends[index] - start, chunks->bytes_max, &chunks->nodes,
                         &chunks->body) ||
            !put_chunk(chunks))
            return false;
    return true;
}

// Add chunks of rows in the given order. The rows of a few chunks are picked together, so that the processor waits for
// many of them at once, while they still fit into its cache.
static bool put_chunks_in_order(Chunks *chunks, const int64_t *order, const uint32_t *ends, size_t count)
{
    uint32_t start = 0;
    for (size_t index = 1; index < count; index++)
        if (ends[index] < ends[index - 1])  // `order` has as many rows as the last end, and no more
            return false;
    for (size_t first = 0, last; first < count; first = last) {
        for (last = first + 1; last < count && ends[last] >= start && ends[last] - start <= ROWS_AT_ONCE;)
            last++;
        uint32_t end = ends[last - 1];
        if (end < start || !pick_rows(chunks, order + start, end - start) ||
            !put_chunks(chunks, &chunks->picked.array, start, ends + first, last - first))
            return false;
        start = end;
    }
    return true;
}

static PyObject *memory_and_sizes(Chunks *chunks)
{
    if (PyByteArray_Resize(chunks->memory, (Py_ssize_t)chunks->used) != 0)
        return NULL;
    return Py_BuildValue("Oy#", chunks->memory, chunks->sizes.size == 0 ? "" : (const char *)chunks->sizes.at,
                         (Py_ssize_t)chunks->sizes.size);
}

PyObject *begin_all_chunks(const struct ArrowSchema *schema, const struct ArrowArray *batch, const int64_t *order,
                           const uint32_t *ends, size_t count, uint64_t bytes_max)
{
    static size_t last_bytes = MEMORY_BYTES_MIN;  // the next call is likely to need about as many
    Chunks chunks = {.schema = schema, .batch = batch, .bytes_max = bytes_max};
    PyObject *made = NULL;
    chunks.memory = PyByteArray_FromStringAndSize(NULL, 0);
    if (chunks.memory != NULL && PyByteArray_Resize(chunks.memory, (Py_ssize_t)last_bytes) == 0) {
        chunks.room = last_bytes;
        bool good = order == NULL ? put_chunks(&chunks, batch, 0, ends, count)
                                  : new_picked(schema, &chunks.picked) &&
                                        put_chunks_in_order(&chunks, order, ends, count);
        made = good ? memory_and_sizes(&chunks) : NULL;
        last_bytes = chunks.used > MEMORY_BYTES_MIN ? chunks.used : MEMORY_BYTES_MIN;
    }
    free_picked(&chunks.picked);
    free_bytes(&chunks.rows);
    free_bytes(&chunks.nodes);
    free_bytes(&chunks.body);
    free_bytes(&chunks.sizes);
    Py_XDECREF(chunks.memory);
    return made;
}
