// kera.core._native: the Python interface of the C sources, see docs/native.md.
//
// Each function here does the same as a Python function, its twin, in the usual case. In every other case it calls the
// twin with the same arguments, which then handles the case or raises the error. So no function here raises anything
// itself, and it leaves all unusual arguments (passed by name, a buffer with other items, a number that is too large)
// to the twin. `bind` connects the two. Only the stable ABI of Python is used (abi3).

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "append.h"
#include "arrow.h"
#include "capsules.h"
#include "chunk.h"
#include "chunks_of_rows.h"
#include "combine.h"
#include "crc32c.h"
#include "key_hash.h"
#include "frame_face.h"
#include "lean.h"
#include "lean_encode.h"
#include "lean_face.h"
#include "records.h"
#include "replicate.h"
#include "send.h"
#include "take.h"
#include "twin.h"

// Incremented with each change of what a function takes, does or returns; kera/core/native.py has the same number.
#define NATIVE_VERSION 11

#ifndef SOURCES
#define SOURCES "unknown"
#endif
// Tells build.py which sources this extension was built from.
static const char made_of[] = "kera-native-sources:" SOURCES;

// While at least this many bytes are processed, other threads may run. Fewer are done before any thread would start.
#define LARGE ((size_t)64 << 10)

// -- fields of a header ---------------------------------------------------------------------------------------------

typedef struct {
    int at;
    char type;  // as a format character of the struct module
} Field;

static const Field fields[] = {
    {0, 's'},    {4, 'B'},    {5, 'B'},    {6, 'H'},    {8, 'I'},    {12, 'I'},  {16, 'Q'}, {24, 'I'}, {28, 'I'},
    {32, 'Q'},   {40, 'I'},   {44, 'I'},   {48, 'Q'},   {56, 'q'},   {64, 'q'},  {72, 'q'}, {80, 'I'}, {84, 'I'},
    {88, 'Q'},   {96, 'I'},   {100, 'I'},  {104, 'Q'},  {112, 'Q'},  {120, 'I'}, {124, 'I'},
};

#define FIELDS ((Py_ssize_t)(sizeof fields / sizeof fields[0]))
// The indices of the fields that `verify_payload` uses.
#define PAYLOAD_BYTES_FIELD 4
#define PAYLOAD_CRC_FIELD 16

static PyObject *magic;  // the first field's value

static PyObject *value_of(const Field *field, const uint8_t *header)
{
    const uint8_t *at = header + field->at;
    switch (field->type) {
    case 's':
        return Py_NewRef(magic);
    case 'B':
        return PyLong_FromLong(*at);
    case 'H':
        return PyLong_FromLong(u16_at(at));
    case 'I':
        return PyLong_FromUnsignedLong(u32_at(at));
    case 'Q':
        return PyLong_FromUnsignedLongLong(u64_at(at));
    default:
        return PyLong_FromLongLong((int64_t)u64_at(at));
    }
}

// Make a tuple of `type` from a verified header.
static PyObject *new_header(PyTypeObject *type, const uint8_t *at)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *header = allocate(type, FIELDS);
    for (Py_ssize_t index = 0; header != NULL && index < FIELDS; index++) {
        PyObject *value = value_of(&fields[index], at);
        if (value == NULL)
            Py_CLEAR(header);
        else
            PyTuple_SetItem(header, index, value);
    }
    return header;
}

// -- calls ----------------------------------------------------------------------------------------------------------

// A call of a function, and the buffer of its argument once that was opened. The buffer is released after the call.
typedef struct {
    PyObject *const *args;
    Py_ssize_t count;  // the number of positional arguments
    PyObject *names;   // the names of the other arguments, which follow those; NULL: there are none
    PyTypeObject *type;  // see `bind`
    Py_buffer buffer;
    View view;
} Call;

// A function with a twin. It returns its result, or NULL to have the twin called.
typedef PyObject *Function(Call *);

// Open the first argument as contiguous bytes; `flags` may require them to be writable.
static bool open_view(Call *call, int flags)
{
    static const uint8_t nothing[1];
    if (PyObject_GetBuffer(call->args[0], &call->buffer, flags) != 0) {
        call->buffer.obj = NULL;
        return false;
    }
    call->view.at = call->buffer.buf == NULL ? nothing : call->buffer.buf;
    call->view.size = (size_t)call->buffer.len;
    return true;
}

// Open the first argument, if its items are bytes. The twin slices it, and slices count items.
static bool open_bytes(Call *call, int flags)
{
    return open_view(call, flags) && call->buffer.itemsize == 1;
}

static bool has_arguments(const Call *call, Py_ssize_t least, Py_ssize_t most)
{
    return call->names == NULL && call->count >= least && call->count <= most;
}

static bool as_u64(PyObject *object, uint64_t *number)
{
    *number = PyLong_AsUnsignedLongLong(object);
    return *number != UINT64_MAX || PyErr_Occurred() == NULL;
}

static bool as_u32(PyObject *object, uint32_t *number)
{
    uint64_t found;
    bool fits = as_u64(object, &found) && found <= UINT32_MAX;
    *number = fits ? (uint32_t)found : 0;
    return fits;
}

// An offset into a buffer. Negative ones, which count from the end, are left to the twin.
static bool as_size(PyObject *object, size_t *number)
{
    Py_ssize_t found = PyLong_AsSsize_t(object);
    *number = (size_t)found;
    return found >= 0;
}

static PyObject *none_if(bool good)
{
    return good ? Py_NewRef(Py_None) : NULL;
}

static PyThreadState *let_others_run(size_t bytes)
{
    return bytes < LARGE ? NULL : PyEval_SaveThread();
}

static void go_on(PyThreadState *state)
{
    if (state != NULL)
        PyEval_RestoreThread(state);
}

// -- checksums ------------------------------------------------------------------------------------------------------

// (buffer, checksum=0)
static PyObject *checksum_by(Call *call, uint32_t (*go)(uint32_t, const uint8_t *, size_t))
{
    uint32_t checksum = 0;
    if (!has_arguments(call, 1, 2) || (call->count == 2 && !as_u32(call->args[1], &checksum)) ||
        !open_view(call, PyBUF_SIMPLE))
        return NULL;
    PyThreadState *state = let_others_run(call->view.size);
    checksum = go(checksum, call->view.at, call->view.size);
    go_on(state);
    return PyLong_FromUnsignedLong(checksum);
}

static PyObject *of_instruction(Call *call)
{
    return checksum_by(call, crc32c);
}

static PyObject *of_tables(Call *call)
{
    return checksum_by(call, crc32c_by_tables);
}

// -- chunks ---------------------------------------------------------------------------------------------------------

static bool is_payload_of(View view, size_t at, uint32_t payload_bytes, uint32_t checksum)
{
    PyThreadState *state = let_others_run(payload_bytes);
    bool good = is_payload(view, at, payload_bytes, checksum);
    go_on(state);
    return good;
}

// (buffer, offset=0): whether there is a valid header. It is copied, so that it cannot change after the check.
static bool take_header(Call *call, size_t *at, uint8_t header[HEADER_BYTES])
{
    *at = 0;
    if (!has_arguments(call, 1, 2) || (call->count == 2 && !as_size(call->args[1], at)) ||
        !open_bytes(call, PyBUF_SIMPLE) || !is_within(call->view, *at, HEADER_BYTES))
        return false;
    memcpy(header, call->view.at + *at, HEADER_BYTES);
    return is_header(header);
}

static PyObject *verify_header(Call *call)
{
    size_t at;
    uint8_t header[HEADER_BYTES];
    return take_header(call, &at, header) ? new_header(call->type, header) : NULL;
}

static PyObject *verify_chunk(Call *call)
{
    size_t at;
    uint8_t header[HEADER_BYTES];
    if (!take_header(call, &at, header))
        return NULL;
    uint32_t payload_bytes = u32_at(header + PAYLOAD_BYTES_AT), checksum = u32_at(header + PAYLOAD_CRC_AT);
    return is_payload_of(call->view, at, payload_bytes, checksum) ? new_header(call->type, header) : NULL;
}

static bool as_field(PyObject *header, Py_ssize_t field, uint32_t *number)
{
    return PyTuple_Check(header) && PyTuple_Size(header) == FIELDS && as_u32(PyTuple_GetItem(header, field), number);
}

// (buffer, offset, header)
static PyObject *verify_payload(Call *call)
{
    size_t at;
    uint32_t payload_bytes, checksum;
    if (!has_arguments(call, 3, 3) || !as_size(call->args[1], &at) ||
        !as_field(call->args[2], PAYLOAD_BYTES_FIELD, &payload_bytes) ||
        !as_field(call->args[2], PAYLOAD_CRC_FIELD, &checksum) || !open_bytes(call, PyBUF_SIMPLE))
        return NULL;
    return none_if(is_payload_of(call->view, at, payload_bytes, checksum));
}

static bool put_unsigned(const Field *field, uint64_t number, uint8_t *header)
{
    size_t bytes = field->type == 'B' ? 1 : field->type == 'I' ? 4 : 8;
    if (bytes < 8 && number >> 8 * bytes != 0)
        return false;
    memcpy(header + field->at, &number, bytes);
    return true;
}

static bool put_field(const Field *field, PyObject *value, uint8_t *header)
{
    uint64_t number;
    if (field->type == 'q') {
        int64_t found = PyLong_AsLongLong(value);
        memcpy(header + field->at, &found, 8);
        return found != -1 || PyErr_Occurred() == NULL;
    }
    return as_u64(value, &number) && put_unsigned(field, number, header);
}

// Write the payload's fields of a header, and the header's checksum.
static void seal(uint8_t *header, const uint8_t *payload, uint32_t payload_bytes)
{
    static const uint8_t padding[ALIGNMENT_BYTES];
    uint16_t header_bytes = HEADER_BYTES;
    uint32_t checksum = crc32c(crc32c(0, payload, payload_bytes), padding, padded(payload_bytes) - payload_bytes);
    memcpy(header + HEADER_BYTES_AT, &header_bytes, sizeof header_bytes);
    memcpy(header + PAYLOAD_BYTES_AT, &payload_bytes, sizeof payload_bytes);
    memcpy(header + PAYLOAD_CRC_AT, &checksum, sizeof checksum);
    checksum = crc32c(0, header, HEADER_CRC_AT);
    memcpy(header + HEADER_CRC_AT, &checksum, sizeof checksum);
}

// (payload, and the fields that a producer sets, except for those that follow from the payload's bytes)
static PyObject *encode_header(Call *call)
{
    static const Py_ssize_t given[] = {1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};  // indices of `fields`
    static const Py_ssize_t count = sizeof given / sizeof given[0];
    if (!has_arguments(call, count + 1, count + 1) || !open_bytes(call, PyBUF_SIMPLE) ||
        call->view.size > PAYLOAD_BYTES_MAX)
        return NULL;
    uint32_t payload_bytes = (uint32_t)call->view.size;
    uint8_t header[HEADER_BYTES] = MAGIC;
    for (Py_ssize_t index = 0; index < count; index++)
        if (!put_field(&fields[given[index]], call->args[index + 1], header))
            return NULL;
    PyThreadState *state = let_others_run(payload_bytes);
    seal(header, call->view.at, payload_bytes);
    go_on(state);
    return PyBytes_FromStringAndSize((const char *)header, HEADER_BYTES);
}

// The fields that differ between the chunks of a `seal_chunks` call.
static const Py_ssize_t own_fields[] = {7, 5, 10, 12, 14, 15};
#define OWN_FIELDS (sizeof own_fields / sizeof own_fields[0])

// The length of all chunks with payloads of these lengths; -1: a length is negative, or too large.
static Py_ssize_t bytes_of_chunks(const int64_t *payload_bytes, Py_ssize_t count)
{
    uint64_t size = 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        if (payload_bytes[index] < 0 || payload_bytes[index] > PAYLOAD_BYTES_MAX || size > PY_SSIZE_T_MAX / 2)
            return -1;
        size += HEADER_BYTES + padded((uint32_t)payload_bytes[index]);
    }
    return (Py_ssize_t)size;
}

// Write the headers of chunks. `base`: a header with the fields that all of them share. Returns false if a number does
// not fit into its field.
static bool put_headers(uint8_t *at, const int64_t *payload_bytes, Py_ssize_t count, const Py_buffer *own,
                        const uint8_t *base)
{
    for (Py_ssize_t index = 0; index < count; index++) {
        uint32_t bytes = (uint32_t)payload_bytes[index];
        memcpy(at, base, HEADER_BYTES);
        for (size_t field = 0; field < OWN_FIELDS; field++) {
            const Field *known = &fields[own_fields[field]];
            int64_t number = ((const int64_t *)own[field].buf)[index];
            if (known->type == 'q')
                memcpy(at + known->at, &number, sizeof number);
            else if (number < 0 || !put_unsigned(known, (uint64_t)number, at))
                return false;
        }
        seal(at, at + HEADER_BYTES, bytes);
        at += HEADER_BYTES + padded(bytes);
    }
    return true;
}

// Open a column, if it has `count` signed numbers of 8 bytes.
static bool open_numbers(PyObject *column, Py_ssize_t count, Py_buffer *numbers)
{
    if (PyObject_GetBuffer(column, numbers, PyBUF_ND | PyBUF_FORMAT) != 0) {
        numbers->obj = NULL;
        return false;
    }
    const char *format = numbers->format == NULL ? "B" : numbers->format;
    bool is_signed = strcmp(format, "q") == 0 || strcmp(format, "l") == 0;
    return is_signed && numbers->ndim == 1 && numbers->itemsize == 8 && numbers->len / 8 == count;
}

// (chunks, payload_bytes, six columns of the fields that differ, and the fields that all share: version to created_us)
static PyObject *seal_chunks(Call *call)
{
    static const Py_ssize_t given[] = {1, 2, 6, 8, 9, 11, 13};  // indices of `fields`
    static const Py_ssize_t all = sizeof given / sizeof given[0];
    if (!has_arguments(call, 2 + OWN_FIELDS + all, 2 + OWN_FIELDS + all) || !open_bytes(call, PyBUF_WRITABLE))
        return NULL;
    Py_ssize_t count = PyObject_Size(call->args[1]);
    uint8_t base[HEADER_BYTES] = MAGIC;
    Py_buffer own[OWN_FIELDS] = {0}, sizes = {0};
    bool good = count >= 0 && open_numbers(call->args[1], count, &sizes);
    for (Py_ssize_t index = 0; good && index < all; index++)
        good = put_field(&fields[given[index]], call->args[2 + OWN_FIELDS + index], base);
    for (size_t index = 0; good && index < OWN_FIELDS; index++)
        good = open_numbers(call->args[2 + index], count, &own[index]);
    good = good && bytes_of_chunks(sizes.buf, count) == call->buffer.len &&
           put_headers(call->buffer.buf, sizes.buf, count, own, base);
    for (size_t index = 0; index < OWN_FIELDS; index++)
        if (own[index].obj != NULL)
            PyBuffer_Release(&own[index]);
    if (sizes.obj != NULL)
        PyBuffer_Release(&sizes);
    return none_if(good);
}

// (view, offset, checksum)
static PyObject *verify_placed(Call *call)
{
    size_t at;
    uint32_t checksum;
    if (!has_arguments(call, 3, 3) || !as_size(call->args[1], &at) || !as_u32(call->args[2], &checksum) ||
        !open_bytes(call, PyBUF_SIMPLE) || !pass_placed(call->view, &at, &checksum))
        return NULL;
    return Py_BuildValue("nk", (Py_ssize_t)at, (unsigned long)checksum);
}

// Write the ends of `chunks` placed chunks into `ends`, counted from `base`, and advance `*at` to the last one. Returns
// whether all chunks are valid.
static bool pass_run(View view, uint64_t base, size_t chunks, char *ends, uint32_t *checksum, size_t *at)
{
    for (size_t index = 0; index < chunks; index++) {
        if (!pass_placed(view, at, checksum) || base + *at > UINT32_MAX)
            return false;
        uint32_t end = (uint32_t)(base + *at);
        memcpy(ends + index * sizeof end, &end, sizeof end);
    }
    return true;
}

// (view, base, checksum, chunks_max)
static PyObject *verify_run(Call *call)
{
    size_t most;
    uint32_t base, checksum;
    if (!has_arguments(call, 4, 4) || !as_u32(call->args[1], &base) || !as_u32(call->args[2], &checksum) ||
        !as_size(call->args[3], &most) || !open_bytes(call, PyBUF_SIMPLE))
        return NULL;
    size_t chunks = count_chunks(call->view, most);
    PyObject *ends = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(chunks * sizeof(uint32_t)));
    if (ends == NULL)
        return NULL;
    PyThreadState *state = let_others_run(call->view.size);
    size_t at = 0;
    bool good = pass_run(call->view, base, chunks, PyBytes_AsString(ends), &checksum, &at);
    go_on(state);
    if (good && (chunks == most || at == call->view.size))  // lengths may have changed since they were read
        return Py_BuildValue("Nk", ends, (unsigned long)checksum);
    Py_DECREF(ends);
    return NULL;
}

static bool chain_over(View view, size_t start, const Py_buffer *ends, uint32_t *checksum)
{
    const uint8_t *end = ends->buf;
    for (Py_ssize_t left = ends->len; left > 0; left -= 4, end += 4) {
        if (!is_within(view, start, HEADER_BYTES))
            return false;
        *checksum = chained(view.at + start, *checksum);
        start = u32_at(end);
    }
    return true;
}

// (view, start, ends, checksum)
static PyObject *chained_checksums(Call *call)
{
    size_t start;
    uint32_t checksum;
    Py_buffer ends;
    if (!has_arguments(call, 4, 4) || !as_size(call->args[1], &start) || !as_u32(call->args[3], &checksum) ||
        !open_bytes(call, PyBUF_SIMPLE) || PyObject_GetBuffer(call->args[2], &ends, PyBUF_ND | PyBUF_FORMAT) != 0)
        return NULL;
    bool good = ends.format != NULL && strcmp(ends.format, "I") == 0 && chain_over(call->view, start, &ends, &checksum);
    PyBuffer_Release(&ends);
    return good ? PyLong_FromUnsignedLong(checksum) : NULL;
}

// (view, start, ends, checksum)
static PyObject *combined_checksum(Call *call)
{
    size_t start;
    uint32_t checksum;
    Py_buffer ends;
    if (!has_arguments(call, 4, 4) || !as_size(call->args[1], &start) || !as_u32(call->args[3], &checksum) ||
        !open_bytes(call, PyBUF_SIMPLE) || PyObject_GetBuffer(call->args[2], &ends, PyBUF_ND | PyBUF_FORMAT) != 0)
        return NULL;
    bool good = ends.format != NULL && strcmp(ends.format, "I") == 0;
    if (good) {
        PyThreadState *state = let_others_run(call->view.size);
        good = combine(call->view, start, ends.buf, (size_t)ends.len / 4, &checksum);
        go_on(state);
    }
    PyBuffer_Release(&ends);
    return good ? PyLong_FromUnsignedLong(checksum) : NULL;
}

// (data, offsets)
static PyObject *hash_each(Call *call, KeyHash *hash)
{
    Py_buffer offsets;
    if (!has_arguments(call, 2, 2) || !open_bytes(call, PyBUF_SIMPLE) ||
        PyObject_GetBuffer(call->args[1], &offsets, PyBUF_ND | PyBUF_FORMAT) != 0)
        return NULL;
    bool good = offsets.format != NULL && strchr("iI", offsets.format[0]) != NULL && offsets.format[1] == 0;
    Py_ssize_t count = offsets.len / 4 - 1;
    PyObject *found = good && count >= 0 ? PyBytes_FromStringAndSize(NULL, 4 * count) : NULL;
    if (found != NULL) {
        uint8_t *hashes = (uint8_t *)PyBytes_AsString(found);
        const uint8_t *bounds = offsets.buf;
        size_t start = u32_at(bounds);
        for (Py_ssize_t index = 0; good && index < count; index++) {
            size_t end = u32_at(bounds + 4 * (index + 1));
            good = start <= end && end <= call->view.size;
            if (good) {
                uint32_t found_hash = hash(call->view.at + start, end - start);
                memcpy(hashes + 4 * index, &found_hash, 4);
            }
            start = end;
        }
    }
    PyBuffer_Release(&offsets);
    if (found != NULL && !good) {
        Py_DecRef(found);
        return NULL;
    }
    return found;
}

static PyObject *crc32c_each(Call *call)
{
    return hash_each(call, hash_crc32c);
}

static PyObject *crc32_each(Call *call)
{
    return hash_each(call, hash_crc32);
}

static PyObject *murmur2_each(Call *call)
{
    return hash_each(call, hash_murmur2);
}

// (key)
static PyObject *murmur2(Call *call)
{
    if (!has_arguments(call, 1, 1) || !open_bytes(call, PyBUF_SIMPLE))
        return NULL;
    return PyLong_FromUnsignedLong(hash_murmur2(call->view.at, call->view.size));
}

static bool as_placement(PyObject *object, Placement *placement, uint64_t *first_record)
{
    return PyTuple_Check(object) && PyTuple_Size(object) == 6 &&
           as_u64(PyTuple_GetItem(object, 0), &placement->group_id) &&
           as_u32(PyTuple_GetItem(object, 1), &placement->segment_id) &&
           as_u32(PyTuple_GetItem(object, 2), &placement->entry) &&
           as_u64(PyTuple_GetItem(object, 3), first_record) &&
           as_u64(PyTuple_GetItem(object, 4), &placement->broker_epoch) &&
           as_u32(PyTuple_GetItem(object, 5), &placement->durable_head);
}

// (buffer, offset, placement)
static PyObject *place_chunk(Call *call)
{
    size_t at;
    Placement placement;
    uint64_t first_record;
    if (!has_arguments(call, 3, 3) || !as_size(call->args[1], &at) ||
        !as_placement(call->args[2], &placement, &first_record) || !open_bytes(call, PyBUF_WRITABLE) ||
        !is_within(call->view, at, HEADER_BYTES))
        return NULL;
    place((uint8_t *)call->buffer.buf + at, &placement, first_record);
    return none_if(true);
}

// (buffer)
static PyObject *check_headers(Call *call)
{
    if (!has_arguments(call, 1, 1) || !open_bytes(call, PyBUF_SIMPLE))
        return NULL;
    PyThreadState *state = let_others_run(call->view.size);
    bool good = call->view.size % HEADER_BYTES == 0;
    for (size_t at = 0; good && at < call->view.size; at += HEADER_BYTES)
        good = is_header(call->view.at + at);
    go_on(state);
    return none_if(good);
}

// -- lean payloads --------------------------------------------------------------------------------------------------

#define KNOWN_TYPE 1  // the index of `type` in kera.core.format.lean.kinds.Known

static bool is_named(const Call *call, Py_ssize_t index, const char *name)
{
    return PyUnicode_CompareWithASCIIString(PyTuple_GetItem(call->names, index), name) == 0;
}

// (payload, known, records, *, compressed, bytes_max), in this order
static PyObject *check(Call *call)
{
    uint64_t records, bytes_max;
    if (call->count != 3 || call->names == NULL || PyTuple_Size(call->names) != 2 ||
        !is_named(call, 0, "compressed") || !is_named(call, 1, "bytes_max") || !PyBool_Check(call->args[3]) ||
        !as_u64(call->args[2], &records) || !as_u64(call->args[4], &bytes_max))
        return NULL;
    PyObject *capsule = PyTuple_Check(call->args[1]) ? PyTuple_GetItem(call->args[1], KNOWN_TYPE) : NULL;
    const struct Type *type = capsule == NULL || capsule == Py_None ? NULL : type_in(capsule);
    if (type == NULL || !open_bytes(call, PyBUF_SIMPLE))
        return NULL;
    PyThreadState *state = let_others_run(call->view.size);
    bool good = is_lean(call->view, records, call->args[3] == Py_True, bytes_max, type);
    go_on(state);
    return none_if(good);
}

static PyObject *joined(const Bytes *nodes, const Bytes *body)
{
    PyObject *payload = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(nodes->size + body->size));
    if (payload == NULL)
        return NULL;
    memcpy(PyBytes_AsString(payload), nodes->at, nodes->size);
    if (body->size > 0)
        memcpy(PyBytes_AsString(payload) + nodes->size, body->at, body->size);
    return payload;
}

// Byte strings in one buffer, and where each of them begins and the last one ends.
typedef struct {
    Bytes offsets, data;
    int32_t end;
} Items;

static bool begin_items(Items *items)
{
    return put_bytes(&items->offsets, &items->end, sizeof items->end);
}

static bool put_item(Items *items, PyObject *item)
{
    char *at;
    Py_ssize_t size;
    if (!PyBytes_CheckExact(item) || PyBytes_AsStringAndSize(item, &at, &size) != 0 || size > INT32_MAX - items->end)
        return false;
    items->end += (int32_t)size;
    return put_bytes(&items->data, at, (size_t)size) && put_bytes(&items->offsets, &items->end, sizeof items->end);
}

static void free_items(Items *items)
{
    free_bytes(&items->offsets);
    free_bytes(&items->data);
}

static bool gather_values(PyObject *list, Items *values)
{
    Py_ssize_t count = PyList_Size(list);
    bool good = make_room(&values->offsets, (size_t)(count + 1) * sizeof values->end) && begin_items(values);
    for (Py_ssize_t index = 0; good && index < count; index++)
        good = put_item(values, PyList_GetItem(list, index));
    return good;
}

// Gather the keys of records, given as tuples. `lists`: where the keys of each record begin, and the last ones end.
static bool gather_keys(PyObject *list, Bytes *lists, Items *keys)
{
    Py_ssize_t count = PyList_Size(list);
    int32_t end = 0;
    bool good = begin_items(keys) && put_bytes(lists, &end, sizeof end);
    for (Py_ssize_t index = 0; good && index < count; index++) {
        PyObject *of_record = PyList_GetItem(list, index);
        good = PyTuple_CheckExact(of_record) && PyTuple_Size(of_record) <= INT32_MAX - end;
        for (Py_ssize_t key = 0; good && key < PyTuple_Size(of_record); key++, end++)
            good = put_item(keys, PyTuple_GetItem(of_record, key));
        good = good && put_bytes(lists, &end, sizeof end);
    }
    return good;
}

// (values, timestamps_us, keys, bytes_max)
static PyObject *encode_records(Call *call)
{
    uint64_t bytes_max;
    Py_buffer times;
    if (!has_arguments(call, 4, 4) || !PyList_Check(call->args[0]) || !as_u64(call->args[3], &bytes_max) ||
        PyObject_GetBuffer(call->args[1], &times, PyBUF_ND | PyBUF_FORMAT) != 0)
        return NULL;
    PyObject *payload = NULL, *list = call->args[2];
    Py_ssize_t count = PyList_Size(call->args[0]);
    Items values = {0}, keys = {0};
    Bytes lists = {0}, nodes = {0}, body = {0};
    bool numbers = times.format != NULL && (strcmp(times.format, "q") == 0 || strcmp(times.format, "l") == 0);
    bool keyed = list != Py_None;
    if (numbers && count > 0 && times.itemsize == 8 && times.len / 8 == count &&
        gather_values(call->args[0], &values) &&
        (!keyed || (PyList_Check(list) && PyList_Size(list) == count && gather_keys(list, &lists, &keys)))) {
        ValuesAndKeys columns = {
            .count = (uint64_t)count,
            .times = times.buf,
            .value_offsets = (const int32_t *)values.offsets.at,
            .value_data = values.data.at,
            .lists = (const int32_t *)lists.at,
            .key_offsets = (const int32_t *)keys.offsets.at,
            .key_data = keys.data.at,
        };
        if (encode_values(&columns, bytes_max, &nodes, &body))
            payload = joined(&nodes, &body);
    }
    free_items(&values);
    free_items(&keys);
    free_bytes(&lists);
    free_bytes(&nodes);
    free_bytes(&body);
    PyBuffer_Release(&times);
    return payload;
}

#define COLUMNS_MAX 64  // with more columns, Python makes the payload

// How to complete a batch with columns that it does not have, see `encode_completed`.
typedef struct {
    int64_t sources[COLUMNS_MAX];
    size_t columns;
    int64_t time_us;
} Completion;

static PyObject *payload_of(PyObject *batch, const Completion *completion, uint64_t bytes_max)
{
    struct ArrowSchema *schema;
    struct ArrowArray *array;
    PyObject *payload = NULL;
    Bytes nodes = {0}, body = {0};
    PyObject *capsules = PyObject_CallMethod(batch, "__arrow_c_array__", NULL);
    if (open_batch(capsules, &schema, &array) &&
        (completion == NULL
             ? encode_lean(schema, array, 0, (uint64_t)array->length, bytes_max, &nodes, &body)
             : encode_completed(schema, array, completion->sources, completion->columns, completion->time_us,
                                bytes_max, &nodes, &body)))
        payload = joined(&nodes, &body);
    free_bytes(&nodes);
    free_bytes(&body);
    Py_XDECREF(capsules);
    return payload;
}

// (batch, bytes_max)
static PyObject *encode_plain(Call *call)
{
    uint64_t bytes_max;
    if (!has_arguments(call, 2, 2) || !as_u64(call->args[1], &bytes_max))
        return NULL;
    return payload_of(call->args[0], NULL, bytes_max);
}

// (batch, sources, time_us, bytes_max)
static PyObject *encode_completed_batch(Call *call)
{
    Completion completion;
    uint64_t bytes_max;
    if (!has_arguments(call, 4, 4) || !PyTuple_Check(call->args[1]) || PyTuple_Size(call->args[1]) > COLUMNS_MAX ||
        !as_u64(call->args[3], &bytes_max))
        return NULL;
    completion.columns = (size_t)PyTuple_Size(call->args[1]);
    for (size_t column = 0; column < completion.columns; column++)
        completion.sources[column] = PyLong_AsLongLong(PyTuple_GetItem(call->args[1], (Py_ssize_t)column));
    completion.time_us = PyLong_AsLongLong(call->args[2]);
    return PyErr_Occurred() == NULL ? payload_of(call->args[0], &completion, bytes_max) : NULL;
}

// (batch, order, ends, bytes_max)
static PyObject *begin_chunks(Call *call)
{
    uint64_t bytes_max;
    Py_buffer ends, order = {0};
    struct ArrowSchema *schema;
    struct ArrowArray *array;
    if (!has_arguments(call, 4, 4) || !as_u64(call->args[3], &bytes_max) ||
        PyObject_GetBuffer(call->args[2], &ends, PyBUF_ND | PyBUF_FORMAT) != 0)
        return NULL;
    PyObject *made = NULL;
    PyObject *capsules = PyObject_CallMethod(call->args[0], "__arrow_c_array__", NULL);
    if (ends.format != NULL && strcmp(ends.format, "I") == 0 && open_batch(capsules, &schema, &array)) {
        const uint32_t *bounds = ends.buf;
        size_t count = (size_t)ends.len / sizeof *bounds;
        Py_ssize_t rows = count > 0 ? (Py_ssize_t)bounds[count - 1] : 0;
        if (call->args[1] == Py_None || open_numbers(call->args[1], rows, &order))
            made = begin_all_chunks(schema, array, order.buf, bounds, count, bytes_max);
    }
    if (order.obj != NULL)
        PyBuffer_Release(&order);
    Py_XDECREF(capsules);
    PyBuffer_Release(&ends);
    return made;
}

// -- frames and records ----------------------------------------------------------------------------------------------

// (view, at, bulk_bytes_max)
static PyObject *decode_header(Call *call)
{
    return has_arguments(call, 3, 3) ? new_frame_header(call->type, call->args) : NULL;
}

// (head, kind, method, request_id, bulk_bytes)
static PyObject *with_header(Call *call)
{
    return has_arguments(call, 5, 5) ? new_frame(call->args) : NULL;
}

// (batch, stream, streamlet, entry, first, no_headers)
static PyObject *records(Call *call)
{
    return has_arguments(call, 6, 6) ? new_records(call->type, call->args) : NULL;
}

// -- functions and their twins --------------------------------------------------------------------------------------

typedef struct {
    const char *name;
    Function *function;
    bool has_type;  // `bind` sets the type of its result
} Known;

static const Known known[] = {
    {"crc32c", of_instruction, false},
    {"crc32c_by_tables", of_tables, false},
    {"verify_header", verify_header, true},
    {"verify_chunk", verify_chunk, true},
    {"verify_payload", verify_payload, false},
    {"encode_header", encode_header, false},
    {"seal_chunks", seal_chunks, false},
    {"verify_placed", verify_placed, false},
    {"verify_run", verify_run, false},
    {"chained_checksums", chained_checksums, false},
    {"combined_checksum", combined_checksum, false},
    {"crc32c_each", crc32c_each, false},
    {"crc32_each", crc32_each, false},
    {"murmur2", murmur2, false},
    {"murmur2_each", murmur2_each, false},
    {"place_chunk", place_chunk, false},
    {"check_headers", check_headers, false},
    {"check", check, false},
    {"encode_plain", encode_plain, false},
    {"encode_completed", encode_completed_batch, false},
    {"begin_chunks", begin_chunks, false},
    {"encode_records", encode_records, false},
    {"decode_header", decode_header, true},
    {"with_header", with_header, false},
    {"records", records, true},
};

#define FUNCTIONS (sizeof known / sizeof known[0])

static PyMethodDef callable[FUNCTIONS];  // filled by `name_callables`: all are `call_bound`, under different names

// `self`: (twin, type or None, index in `known`)
static PyObject *call_bound(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    Call call = {.args = args, .count = count, .names = names, .type = (PyTypeObject *)PyTuple_GetItem(self, 1)};
    PyObject *answer = known[PyLong_AsLong(PyTuple_GetItem(self, 2))].function(&call);
    if (call.buffer.obj != NULL)
        PyBuffer_Release(&call.buffer);
    return answer != NULL ? answer : ask_twin(PyTuple_GetItem(self, 0), args, count, names);
}

static void name_callables(void)
{
    for (size_t index = 0; index < FUNCTIONS; index++)
        callable[index] = (PyMethodDef){
            .ml_name = known[index].name,
            .ml_meth = (PyCFunction)(void (*)(void))call_bound,
            .ml_flags = METH_FASTCALL | METH_KEYWORDS,
        };
}

PyDoc_STRVAR(bind_doc, "bind(name, twin, type): the function of that name; it leaves unusual cases to `twin`.");

static PyObject *bind(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *name;
    PyObject *twin, *type;
    if (!PyArg_ParseTuple(args, "sOO", &name, &twin, &type))
        return NULL;
    size_t index = 0;
    while (index < FUNCTIONS && strcmp(known[index].name, name) != 0)
        index++;
    if (index == FUNCTIONS)
        return PyErr_Format(PyExc_LookupError, "there is no %s", name);
    bool is_tuple = PyType_Check(type) && PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type);
    if (known[index].has_type ? !is_tuple : type != Py_None)
        return PyErr_Format(PyExc_TypeError, "%s returns no %R", name, type);
    PyObject *self = Py_BuildValue("OOn", twin, type, (Py_ssize_t)index);
    if (self == NULL)
        return NULL;
    PyObject *function = PyCFunction_NewEx(&callable[index], self, NULL);
    Py_DECREF(self);
    return function;
}

// -- the module -----------------------------------------------------------------------------------------------------

PyDoc_STRVAR(layout_doc, "layout(): the offsets of a header's fields, and other numbers that Python has as well");

static PyObject *layout(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{
    PyObject *found = PyList_New(FIELDS);
    for (Py_ssize_t index = 0; found != NULL && index < FIELDS; index++) {
        PyObject *field = Py_BuildValue("iC", fields[index].at, fields[index].type);
        if (field == NULL)
            Py_CLEAR(found);
        else
            PyList_SetItem(found, index, field);
    }
    if (found == NULL)
        return NULL;
    return Py_BuildValue(
        "{sN,s[ii],si,si,sk,si,si,si,si,si,si,si,sK,si,sK,si,si,sK,sK,sI,sK}", "fields", found, "VERSIONS", VERSION_MIN,
        VERSION_MAX, "HEADER_BYTES", HEADER_BYTES, "ALIGNMENT_BYTES", ALIGNMENT_BYTES, "PAYLOAD_BYTES_MAX",
        (unsigned long)PAYLOAD_BYTES_MAX, "PAYLOAD_BYTES_AT", PAYLOAD_BYTES_AT, "PAYLOAD_CRC_AT", PAYLOAD_CRC_AT,
        "HEADER_CRC_AT", HEADER_CRC_AT, "PLACEMENT_AT", PLACEMENT_AT, "PLACEMENT_CRC_AT", PLACEMENT_CRC_AT,
        "PAYLOAD_BYTES_FIELD", PAYLOAD_BYTES_FIELD, "PAYLOAD_CRC_FIELD", PAYLOAD_CRC_FIELD, "VALUES_MAX",
        (unsigned long long)NODE_VALUES_MAX, "DEPTH_MAX", DEPTH_MAX, "RECORDS_WITHOUT_BYTES",
        (unsigned long long)RECORDS_WITHOUT_BYTES, "PACKED_VALUES_MAX", PACKED_VALUES_MAX, "NODES_BYTES_MAX",
        NODES_BYTES_MAX, "DECOMPRESSED_BYTES_MAX", (unsigned long long)DECOMPRESSED_BYTES_MAX,
        "BATCH_RECORDS_WITHOUT_BYTES", (unsigned long long)BATCH_RECORDS_WITHOUT_BYTES, "JOINED_PAYLOAD_BYTES_MAX",
        (unsigned int)JOINED_PAYLOAD_BYTES_MAX, "JOINED_RECORDS_MAX", (unsigned long long)JOINED_RECORDS_MAX);
}

static PyMethodDef functions[] = {
    {"bind", bind, METH_VARARGS, bind_doc},
    {"take_writes", (PyCFunction)(void (*)(void))take_writes, METH_FASTCALL, take_writes_doc},
    {"take_replicas", (PyCFunction)(void (*)(void))take_replicas, METH_FASTCALL, take_replicas_doc},
    {"held_answers", (PyCFunction)(void (*)(void))held_answers, METH_FASTCALL, held_answers_doc},
    {"decode_in_place", (PyCFunction)(void (*)(void))decode_in_place, METH_FASTCALL, decode_in_place_doc},
    {"join_chunks", (PyCFunction)(void (*)(void))join_chunks, METH_FASTCALL, join_chunks_doc},
    {"lean_type", lean_type, METH_O, lean_type_doc},
    {"sender", sender, METH_VARARGS, sender_doc},
    {"layout", layout, METH_NOARGS, layout_doc},
    {NULL, NULL, 0, NULL},
};

// Not for subinterpreters with their own GIL: all interpreters share `magic`.
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "kera.core._native",
    .m_doc = "Twins of functions of kera in C, see kera.core.native.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *by_instruction = crc32c_init() ? Py_True : Py_False;
    key_hash_init();
    combine_init();
    name_callables();
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || append_init() != 0 || replicate_init() != 0 || records_init() != 0 ||
        send_init(module) != 0 || progress_init(module) != 0 ||
        (magic = PyBytes_FromStringAndSize(MAGIC, 4)) == NULL ||
        PyModule_AddIntConstant(module, "VERSION", NATIVE_VERSION) != 0 ||
        PyModule_AddStringConstant(module, "APPEND_RULES", APPEND_RULES) != 0 ||
        PyModule_AddStringConstant(module, "SOURCES", strchr(made_of, ':') + 1) != 0 ||
        PyModule_AddObjectRef(module, "CRC32C_BY_INSTRUCTION", by_instruction) != 0)
        Py_CLEAR(module);
    return module;
}
