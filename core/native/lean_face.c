// See lean_face.h.

#include "lean_face.h"

#include "bytes.h"
#include "lean_decode.h"
#include "lean_join.h"

// While at least this many bytes are decoded, other threads may run.
#define LARGE ((size_t)64 << 10)

static const char type_name[] = "kera.core._native.lean_type";

static void let_go_of_type(PyObject *capsule)
{
    free_type(PyCapsule_GetPointer(capsule, type_name));
}

const Type *type_in(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, type_name);
}

const char lean_type_doc[] =
    PyDoc_STR("lean_type(schema): a schema as `decode_in_place` takes it; None: it cannot decode such payloads.");

PyObject *lean_type(PyObject *module, PyObject *schema)
{
    (void)module;
    PyObject *capsule = PyObject_CallMethod(schema, "__arrow_c_schema__", NULL);
    if (capsule == NULL)
        return NULL;
    struct ArrowSchema *found = PyCapsule_GetPointer(capsule, "arrow_schema");
    Type *type = found == NULL ? NULL : new_type(found);
    Py_DECREF(capsule);
    if (found == NULL)
        return NULL;
    if (type == NULL)
        Py_RETURN_NONE;
    PyObject *result = PyCapsule_New(type, type_name, let_go_of_type);
    if (result == NULL)
        free_type(type);
    return result;
}

// Release a payload after its last array was released, on any thread.
static void let_go(void *argument)
{
    PyGILState_STATE state = PyGILState_Ensure();
    Py_buffer *held = argument;
    PyBuffer_Release(held);
    PyMem_Free(held);
    PyGILState_Release(state);
}

static PyObject *import(PyObject *importer, PyObject *schema, struct ArrowArray *batch)
{
    PyObject *result = PyObject_CallFunction(importer, "KO", (unsigned long long)(uintptr_t)batch, schema);
    if (batch->release != NULL)  // the importer did not take it over
        batch->release(batch);
    return result;
}

const char decode_in_place_doc[] = PyDoc_STR(
    "decode_in_place(payload, type, schema, records, bytes_max, importer)\n"
    "\n"
    "Return the record batch of a payload that is not compressed; None: Python has to decode it. This does not look\n"
    "at the values. `type`: see `lean_type`. importer(address, schema) makes a batch from Arrow's C data interface.");

PyObject *decode_in_place(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "decode_in_place takes 6 arguments, not %zd", count);
    const Type *type = type_in(args[1]);
    uint64_t records = PyLong_AsUnsignedLongLong(args[3]), bytes_max = PyLong_AsUnsignedLongLong(args[4]);
    if (type == NULL || PyErr_Occurred() != NULL)
        return NULL;
    Py_buffer *held = PyMem_Malloc(sizeof *held);
    if (held == NULL)
        return PyErr_NoMemory();
    if (PyObject_GetBuffer(args[0], held, PyBUF_SIMPLE) != 0) {
        PyMem_Free(held);
        return NULL;
    }
    struct ArrowArray batch;
    View payload = {held->buf, (size_t)held->len};
    PyThreadState *state = payload.size < LARGE ? NULL : PyEval_SaveThread();
    bool decoded = payload.at != NULL && decode_lean(payload, type, records, bytes_max, (Owner){let_go, held}, &batch);
    if (state != NULL)
        PyEval_RestoreThread(state);
    if (decoded)
        return import(args[5], args[2], &batch);
    PyBuffer_Release(held);
    PyMem_Free(held);
    Py_RETURN_NONE;
}

// -- consecutive chunks ----------------------------------------------------------------------------------------------

#define RECORD_COUNT_AT 12
#define SCHEMA_ID_AT 28
#define CODEC_AT 44
#define MIN_TIMESTAMP_AT 64
#define MAX_TIMESTAMP_AT 72
#define FIRST_RECORD_AT 104
// The part of a placement that all chunks of a segment share: group, segment and entry.
#define PLACE_BYTES 16

typedef struct {
    View chunks;
    size_t at;
    const Type *type;
    uint32_t schema_id;
    bool verify, trusted;
    uint64_t joined_bytes_max, bytes_max;
    Joined *joined;
    // The totals of the chunks that were joined.
    Bytes headers;
    uint64_t records, bytes;
    int64_t min_timestamp_us, max_timestamp_us;
} Run;

static bool follows(const uint8_t *header, const uint8_t *before)
{
    return memcmp(header + PLACEMENT_AT, before + PLACEMENT_AT, PLACE_BYTES) == 0 &&
           u64_at(header + FIRST_RECORD_AT) == u64_at(before + FIRST_RECORD_AT) + u32_at(before + RECORD_COUNT_AT);
}

// Whether the chunk with this header can be joined. If `verify` is set, this checks its checksums too.
static bool is_joinable(const Run *run, const uint8_t *header)
{
    uint32_t payload_bytes = u32_at(header + PAYLOAD_BYTES_AT);
    return memcmp(header, MAGIC, 4) == 0 && header[VERSION_AT] == LEAN_VERSION &&
           u16_at(header + HEADER_BYTES_AT) == HEADER_BYTES && (header[FLAGS_AT] & PUNCTUATION) == 0 &&
           payload_bytes <= JOINED_PAYLOAD_BYTES_MAX &&
           u32_at(header + CODEC_AT) == 0 && u32_at(header + SCHEMA_ID_AT) == run->schema_id &&
           is_within(run->chunks, run->at + HEADER_BYTES, padded(payload_bytes)) &&
           (!run->verify || (is_header(header) && is_payload(run->chunks, run->at, payload_bytes,
                                                             u32_at(header + PAYLOAD_CRC_AT)))) &&
           (run->headers.size == 0 || follows(header, run->headers.at + run->headers.size - HEADER_BYTES));
}

// Join as many chunks as possible, perhaps one or none. Returns false if Python has to decide.
static bool join_run(Run *run)
{
    uint8_t header[HEADER_BYTES];  // a copy, so that it cannot change after the checks
    while (run->records < JOINED_RECORDS_MAX && run->bytes < run->joined_bytes_max &&
           is_within(run->chunks, run->at, HEADER_BYTES)) {
        memcpy(header, run->chunks.at + run->at, HEADER_BYTES);
        if (!is_joinable(run, header))
            break;
        View payload = {run->chunks.at + run->at + HEADER_BYTES, u32_at(header + PAYLOAD_BYTES_AT)};
        uint64_t records = u32_at(header + RECORD_COUNT_AT), written_bytes;
        if (!run->trusted && !is_lean(payload, records, false, run->bytes_max, run->type))
            break;
        if (!join_payload(run->joined, run->type, payload, records, run->bytes_max, &written_bytes) ||
            !put_bytes(&run->headers, header, HEADER_BYTES))
            return false;
        int64_t least = (int64_t)u64_at(header + MIN_TIMESTAMP_AT), most = (int64_t)u64_at(header + MAX_TIMESTAMP_AT);
        run->min_timestamp_us = least < run->min_timestamp_us ? least : run->min_timestamp_us;
        run->max_timestamp_us = most > run->max_timestamp_us ? most : run->max_timestamp_us;
        run->records += records;
        run->bytes += HEADER_BYTES + written_bytes;
        run->at += HEADER_BYTES + padded((uint32_t)payload.size);
    }
    return true;
}

const char join_chunks_doc[] = PyDoc_STR(
    "join_chunks(chunks, at, type, schema, schema_id, verify, trusted, joined_bytes_max, bytes_max, importer)\n"
    "\n"
    "Return the fields of a `kera.core.format.joining.Joined`; () for fewer than two chunks; None: Python has to\n"
    "decide. `type` and importer are the same as for `decode_in_place`.");

static PyObject *joined_of(Run *run, PyObject *schema, PyObject *importer)
{
    struct ArrowArray batch;
    PyThreadState *state = PyEval_SaveThread();
    bool known = join_run(run), several = run->headers.size > HEADER_BYTES;
    bool joined = known && several && finish_joined(run->joined, run->type, &batch);
    PyEval_RestoreThread(state);
    if (known && !several)
        return PyTuple_New(0);
    if (!joined)
        Py_RETURN_NONE;
    run->joined = NULL;  // the batch owns it now
    PyObject *found = import(importer, schema, &batch);
    if (found == NULL)
        return NULL;
    return Py_BuildValue("Ny#nLL", found, (const char *)run->headers.at, (Py_ssize_t)run->headers.size,
                         (Py_ssize_t)run->at, (long long)run->min_timestamp_us, (long long)run->max_timestamp_us);
}

PyObject *join_chunks(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 10)
        return PyErr_Format(PyExc_TypeError, "join_chunks takes 10 arguments, not %zd", count);
    Run run = {
        .at = PyLong_AsSize_t(args[1]),
        .type = type_in(args[2]),
        .schema_id = (uint32_t)PyLong_AsUnsignedLong(args[4]),
        .verify = args[5] == Py_True,
        .trusted = args[6] == Py_True,
        .joined_bytes_max = PyLong_AsUnsignedLongLong(args[7]),
        .bytes_max = PyLong_AsUnsignedLongLong(args[8]),
        .min_timestamp_us = INT64_MAX,
        .max_timestamp_us = INT64_MIN,
    };
    Py_buffer held;
    if (PyErr_Occurred() != NULL || PyObject_GetBuffer(args[0], &held, PyBUF_SIMPLE) != 0)
        return NULL;
    run.chunks = (View){held.buf, (size_t)held.len};
    run.joined = new_joined(run.type);
    PyObject *found = run.joined == NULL ? PyErr_NoMemory() : joined_of(&run, args[3], args[9]);
    if (run.joined != NULL)
        free_joined(run.joined);
    free_bytes(&run.headers);
    PyBuffer_Release(&held);
    return found;
}
