// See replicate.h.
//
// This does the work of kera.backup.service and ReplicaStore.append for the next chunks of an open replica, if the
// broker only wants them in memory. Any other request is left to Python, and changes nothing here.

#include "replicate.h"

#include "attributes.h"
#include "bytes.h"
#include "chunk.h"
#include "frame.h"
#include "progress.h"

// As in kera/core/rpc/api.py.
#define REPLICATE 201

// The fields of a request that are handled here. REQUEST_FIELDS is one more than the highest.
#define BROKER_ID 2
#define BROKER_EPOCH 3
#define VIRTUAL_SEGMENT_ID 6
#define OFFSET 7
#define CHECKSUM 8
#define PERSIST 9
#define CLOSES 10
#define REQUEST_FIELDS 11

// The fields of an answer.
#define LENGTH 3
#define DURABLE_LENGTH 4

// Larger requests are left to Python, which limits the number of their chunks (kera/core/rpc/limits.py).
#define REPLICATED_BYTES_MAX ((size_t)1 << 20)

#define NAMES(name)                                                                                                    \
    name(checksum) name(chunk_count) name(chunk_ends) name(closed) name(durable_length) name(error)    \
    name(length) name(sealed) name(view)

#define AS_MEMBER(name) NAME_##name,
#define AS_TEXT(name) #name,
enum { NAMES(AS_MEMBER) NAMES_COUNT };
static const char *const texts[] = {NAMES(AS_TEXT)};
static PyObject *names[NAMES_COUNT];

#define GET(object, name) PyObject_GetAttr(object, names[NAME_##name])

int replicate_init(void)
{
    return intern_names(names, texts, NAMES_COUNT);
}

typedef struct {
    PyObject *epochs, *replicas;  // by broker, and `replicas` then by virtual segment; borrowed
    size_t requests, chunks, bytes;
    Bytes ends, answers;
} Take;

typedef enum { TAKEN, LEFT, FAILED } Outcome;

static Outcome left_or_failed(void)
{
    return PyErr_Occurred() == NULL ? LEFT : FAILED;
}

// The replica that a request is for. NULL without an error: there is none, or its broker was replaced.
static PyObject *find_replica(const Take *take, const uint64_t *numbers)
{
    uint64_t epoch;
    PyObject *known = value_of(take->epochs, numbers[BROKER_ID]);
    if (known == NULL || !number_of(known, &epoch) || epoch != numbers[BROKER_EPOCH])
        return NULL;
    PyObject *of_broker = value_of(take->replicas, numbers[BROKER_ID]);
    PyObject *replica = of_broker == NULL ? NULL : value_of(of_broker, numbers[VIRTUAL_SEGMENT_ID]);
    Py_XDECREF(of_broker);
    return replica;
}

// Whether a replica accepts chunks, and ends at `offset`.
static bool is_open_at(PyObject *replica, uint64_t offset)
{
    bool closed, sealed;
    uint64_t length;
    PyObject *error = GET(replica, error);
    bool failed = error != Py_None;
    Py_XDECREF(error);
    return !failed && is_true(GET(replica, closed), &closed) && !closed && is_true(GET(replica, sealed), &sealed) &&
           !sealed && number_of(GET(replica, length), &length) && length == offset;
}

// Whether these are complete placed chunks that take the checksum over checksums from `checksum` to `wanted`.
static bool check_chunks(Take *take, View chunks, uint64_t offset, uint64_t checksum, uint64_t wanted)
{
    uint32_t passed = (uint32_t)checksum;
    take->ends.size = 0;
    for (size_t at = 0; at < chunks.size;) {
        if (!pass_placed(chunks, &at, &passed))
            return false;
        uint32_t end = (uint32_t)(offset + at);
        if (!put_bytes(&take->ends, &end, sizeof end))
            return false;
    }
    return passed == wanted;
}

static bool copy_chunks(PyObject *replica, uint64_t offset, View chunks)
{
    Py_buffer memory;
    PyObject *view = GET(replica, view);
    bool good = view != NULL && PyObject_GetBuffer(view, &memory, PyBUF_WRITABLE) == 0;
    Py_XDECREF(view);
    if (!good)
        return false;
    good = is_within((View){memory.buf, (size_t)memory.len}, (size_t)offset, chunks.size);
    if (good)
        memcpy((uint8_t *)memory.buf + offset, chunks.at, chunks.size);
    PyBuffer_Release(&memory);
    return good;
}

static bool set_ends(const Take *take, PyObject *replica)
{
    PyObject *ends = GET(replica, chunk_ends);
    bool good = ends != NULL && add_ends(ends, (const uint32_t *)take->ends.at, take->ends.size / sizeof(uint32_t));
    Py_XDECREF(ends);
    return good;
}

static bool answer(Take *take, const Frame *frame, PyObject *replica, uint64_t length)
{
    uint64_t durable_length;
    if (!number_of(GET(replica, durable_length), &durable_length))
        return false;
    uint8_t message[2 * NUMBER_BYTES_MAX], *end = put_number(message, LENGTH, length), header[FRAME_BYTES];
    end = put_number(end, DURABLE_LENGTH, durable_length);
    write_reply(header, frame->method, frame->request_id, (uint32_t)(end - message));
    if (put_bytes(&take->answers, header, FRAME_BYTES) && put_bytes(&take->answers, message, (size_t)(end - message)))
        return true;
    PyErr_NoMemory();
    return false;
}

static Outcome append_to(Take *take, const Frame *frame, const uint64_t *numbers, PyObject *replica)
{
    uint64_t offset = numbers[OFFSET], length = offset + frame->bulk_bytes, checksum;
    if (!is_open_at(replica, offset) || !number_of(GET(replica, checksum), &checksum) ||
        !check_chunks(take, frame->bulk, offset, checksum, numbers[CHECKSUM]) ||
        !copy_chunks(replica, offset, frame->bulk))
        return left_or_failed();
    size_t chunks = take->ends.size / sizeof(uint32_t);
    if (!set_ends(take, replica) || !add_number(replica, names[NAME_chunk_count], chunks) ||
        !set_number(replica, names[NAME_length], length) ||
        !set_number(replica, names[NAME_checksum], numbers[CHECKSUM]) || !answer(take, frame, replica, length))
        return FAILED;
    take->requests++;
    take->chunks += chunks;
    take->bytes += frame->bulk_bytes;
    return TAKEN;
}

static Outcome take_request(Take *take, const Frame *frame)
{
    uint64_t numbers[REQUEST_FIELDS];
    if (frame->kind != FRAME_REQUEST || frame->method != REPLICATE || frame->bulk_bytes == 0 ||
        frame->bulk_bytes > REPLICATED_BYTES_MAX || frame->head_bytes > 2 * NUMBER_BYTES_MAX * REQUEST_FIELDS ||
        !read_numbers(frame->head, numbers, REQUEST_FIELDS) ||
        numbers[BROKER_ID] > UINT32_MAX || numbers[OFFSET] == 0 || numbers[OFFSET] > UINT32_MAX - frame->bulk_bytes ||
        numbers[CHECKSUM] > UINT32_MAX || numbers[PERSIST] != 0 || numbers[CLOSES] != 0)
        return LEFT;
    PyObject *replica = find_replica(take, numbers);
    if (replica == NULL)
        return left_or_failed();
    Outcome outcome = append_to(take, frame, numbers, replica);
    Py_DECREF(replica);
    return outcome;
}

static PyObject *take_frames(Take *take, View frames, uint32_t bulk_bytes_max, size_t requests_max)
{
    size_t at = 0;
    Frame frame;
    while (take->requests < requests_max && read_frame(frames, at, bulk_bytes_max, &frame)) {
        Outcome outcome = take_request(take, &frame);
        if (outcome == FAILED)
            return NULL;
        if (outcome == LEFT)
            break;
        at += frame.bytes;
    }
    return Py_BuildValue("(nny#nn)", (Py_ssize_t)at, (Py_ssize_t)take->requests,
                         take->answers.size == 0 ? "" : (const char *)take->answers.at,
                         (Py_ssize_t)take->answers.size, (Py_ssize_t)take->chunks, (Py_ssize_t)take->bytes);
}

const char take_replicas_doc[] = PyDoc_STR(
    "take_replicas(epochs, replicas, frames, bulk_bytes_max, requests_max)\n"
    "\n"
    "Carry out requests to replicate: those at the beginning of `frames`, up to the first one that is not for the\n"
    "next chunks of an open replica, or that is not answered as soon as the chunks are in memory. Returns the offset\n"
    "of that request, the number of requests that were carried out, the frames of their answers, and the numbers of\n"
    "chunks and bytes that were appended.\n"
    "\n"
    "`epochs`: by broker, the epoch that may write; `replicas`: by broker, and then by virtual segment.");

PyObject *take_replicas(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 5 || !PyDict_Check(args[0]) || !PyDict_Check(args[1]))
        return PyErr_Format(PyExc_TypeError, "take_replicas takes two dicts, bytes and two numbers");
    Take take = {.epochs = args[0], .replicas = args[1]};
    Py_ssize_t bulk_bytes_max = PyLong_AsSsize_t(args[3]), requests_max = PyLong_AsSsize_t(args[4]);
    if (PyErr_Occurred() != NULL)
        return NULL;
    if (bulk_bytes_max < 0 || requests_max < 0)
        return PyErr_Format(PyExc_ValueError, "a number of bytes or requests is negative");
    Py_buffer frames;
    if (PyObject_GetBuffer(args[2], &frames, PyBUF_SIMPLE) != 0)
        return NULL;
    uint32_t most = bulk_bytes_max > (Py_ssize_t)UINT32_MAX ? UINT32_MAX : (uint32_t)bulk_bytes_max;
    PyObject *result = take_frames(&take, (View){frames.buf, (size_t)frames.len}, most, (size_t)requests_max);
    free_bytes(&take.ends);
    free_bytes(&take.answers);
    PyBuffer_Release(&frames);
    return result;
}
