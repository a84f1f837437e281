// See take.h.
//
// A request in a frame is handled as a whole or not at all: all its chunks have to be valid, of one run, and the next
// in order. Consecutive requests can share a run, whose results are then written once for all of them. The answer is
// made at once, or it waits for backups: then its statuses are held, which lack only the places on the backups. If
// Python answers a request, its chunks are appended one by one, and only their statuses are returned.

#include "take.h"

#include "frame.h"

// As in kera/core/rpc/api.py.
#define MULTI_WRITE_CHUNKS 1
// As in kera/core/rpc/limits.py.
#define REQUEST_CHUNKS_MAX 1024

// The fields of a request that are handled here. REQUEST_FIELDS is one more than the highest.
#define DURABILITY 2
#define CHUNK_COUNT 3
#define REQUEST_FIELDS 4
#define LEVEL_LEADER 1
#define LEVEL_MAX 3

// The size of the header of held statuses: the request's id, and the number of bytes that follow.
#define HELD_BYTES 12
#define STATUS_TAG (3 << 3 | 2)
#define PLACES_TAG (4 << 3 | 2)
#define BACKUPS_TAG (2 << 3 | 2)
#define STATUS_SEGMENT 9
// The last field of a response with several statuses: none of them has an error.
static const uint8_t all_stored[] = {5 << 3, 1};

typedef struct {
    Append append;
    size_t requests, held;  // how many were handled, and how many of those have answers that wait
    Bytes answers;
} Take;

// Whether a chunk comes next after `count` chunks, the first of which has the header `first`.
static bool follows(const uint8_t *first, size_t count, const uint8_t *header)
{
    // stream, streamlet, schema, producer and epoch are adjacent, from 16 to 43
    return memcmp(first + 16, header + 16, 28) == 0 && u64_at(first + 48) + count == u64_at(header + 48);
}

// Whether all chunks of a request are valid, and of one run. Sets `first` to the first header, and `*last_bytes` to the
// size of the last chunk.
static bool check_request(Append *call, uint8_t *first, uint32_t *last_bytes)
{
    uint8_t header[HEADER_BYTES];
    size_t count = 0;
    for (call->at = 0; call->at < call->bulk.size; call->at += *last_bytes, count++) {
        if (count == REQUEST_CHUNKS_MAX || !read_chunk(call, header) || !is_good_payload(call, header) ||
            (count > 0 && !follows(first, count, header)))
            return false;
        if (count == 0)
            memcpy(first, header, HEADER_BYTES);
        *last_bytes = chunk_bytes(header);
    }
    return count > 0;
}

// Whether no chunk of a request needs a closer check of its timestamps.
static bool are_timely(const Append *call)
{
    const Run *run = &call->run;
    if (run->earliest == INT64_MIN && run->latest == INT64_MAX)
        return true;
    for (size_t at = 0; at < call->bulk.size; at += chunk_bytes(call->bulk.at + at))
        if (!is_timely(run, call->bulk.at + at))
            return false;
    return true;
}

// Append all chunks of a request, which were checked. Then make its answer, or hold it.
static bool answer_request(Take *take, const Frame *frame)
{
    Append *call = &take->append;
    Run *run = &call->run;
    bool waits = run->log != NULL && run->level > LEVEL_LEADER;
    Bytes *to = waits ? &run->held : &take->answers;
    size_t before = to->size, head = waits ? HELD_BYTES : FRAME_BYTES;
    if (!make_room(to, head)) {
        PyErr_NoMemory();
        return false;
    }
    to->size += head;
    size_t chunks_before = call->chunks;
    for (call->at = 0; call->at < call->bulk.size;) {
        uint8_t header[HEADER_BYTES];
        memcpy(header, call->bulk.at + call->at, HEADER_BYTES);
        if (!append_chunk(call, header, to))
            return false;
    }
    if (!waits && call->chunks - chunks_before > 1 && !put_bytes(to, all_stored, sizeof all_stored)) {
        PyErr_NoMemory();
        return false;
    }
    uint32_t bytes = (uint32_t)(to->size - before - head);
    if (waits) {
        memcpy(to->at + before, &frame->request_id, sizeof frame->request_id);
        memcpy(to->at + before + sizeof frame->request_id, &bytes, sizeof bytes);
        run->requests++;
        take->held++;
    } else {
        write_reply(to->at + before, frame->method, frame->request_id, bytes);
    }
    take->requests++;
    return true;
}

static Outcome take_request(Take *take, const Frame *frame)
{
    Append *call = &take->append;
    uint64_t numbers[REQUEST_FIELDS];
    if (frame->kind != FRAME_REQUEST || frame->method != MULTI_WRITE_CHUNKS ||
        frame->head_bytes > 2 * NUMBER_BYTES_MAX * REQUEST_FIELDS ||
        !read_numbers(frame->head, numbers, REQUEST_FIELDS) || numbers[DURABILITY] > LEVEL_MAX ||
        numbers[CHUNK_COUNT] > REQUEST_CHUNKS_MAX)
        return LEFT;
    uint8_t first[HEADER_BYTES];
    uint32_t bytes = frame->bulk_bytes, last_bytes = 0;
    call->bulk = frame->bulk;
    call->level = numbers[DURABILITY];
    if (!check_request(call, first, &last_bytes))
        return PyErr_Occurred() == NULL ? LEFT : FAILED;
    if (!goes_on(call, first, bytes, last_bytes)) {
        if (!end_run(call))
            return FAILED;
        Outcome outcome = begin_run(call, first, bytes);
        if (outcome != TAKEN)
            return outcome;
        if (!goes_on(call, first, bytes, last_bytes))
            return LEFT;  // too large for a run
    }
    if (!are_timely(call))
        return LEFT;
    return answer_request(take, frame) ? TAKEN : FAILED;
}

// Handle the requests in frames. Sets `*at` to the first one that is left.
static Outcome take_frames(Take *take, View frames, uint32_t bulk_bytes_max, size_t requests_max, size_t *at)
{
    Outcome outcome = TAKEN;
    Frame frame;
    while (take->requests < requests_max && read_frame(frames, *at, bulk_bytes_max, &frame)) {
        outcome = take_request(take, &frame);
        if (outcome != TAKEN)
            break;
        *at += frame.bytes;
    }
    return outcome;
}

// Append the chunks of one request. Sets `*at` to the first one that is left.
static Outcome take_chunks(Take *take, View chunks, size_t chunks_max, size_t *at)
{
    Append *call = &take->append;
    Outcome outcome = TAKEN;
    call->bulk = chunks;
    while (outcome == TAKEN && call->chunks < chunks_max && call->at < chunks.size)
        outcome = take_chunk(call, &take->answers);
    *at = call->at;
    return outcome;
}

static PyObject *take_all(Take *take, View data, uint32_t bulk_bytes_max, size_t most)
{
    Append *call = &take->append;
    size_t at = 0;
    Outcome outcome =
        call->by_request ? take_frames(take, data, bulk_bytes_max, most, &at) : take_chunks(take, data, most, &at);
    if (outcome == FAILED || !end_run(call))
        return NULL;
    return Py_BuildValue("(nnny#nKK)", (Py_ssize_t)at, (Py_ssize_t)take->requests, (Py_ssize_t)take->held,
                         take->answers.size == 0 ? "" : (const char *)take->answers.at,
                         (Py_ssize_t)take->answers.size, (Py_ssize_t)call->chunks, (unsigned long long)call->records,
                         (unsigned long long)call->bytes);
}

const char take_writes_doc[] = PyDoc_STR(
    "take_writes(rules, write, data, level, bulk_bytes_max, most, now_ms, now_us)\n"
    "\n"
    "Append chunks to an open segment with room: those at the beginning of `data`, up to the first one that is not\n"
    "the next chunk of a known producer. If `level` is None, `data` has frames of requests, each with at most\n"
    "`bulk_bytes_max` of chunks, which all go to one segment; the call carries out at most `most` requests, each as a\n"
    "whole or not at all. Otherwise `data` has the chunks of a request with that level; it appends at most `most`.\n"
    "\n"
    "Returns the offset of the first frame or chunk that is left; the number of requests that were carried out, and\n"
    "how many of them have no answer yet; the frames of the other answers, or the statuses of the chunks as a\n"
    "response has them; and the numbers of chunks, records and bytes that were appended.\n"
    "\n"
    "`rules`: an AppendRules of the broker.\n"
    "gate(write, stream, streamlet_id, producer_id, level): returns (the log of the chunks, its room in bytes), or\n"
    "None.\n"
    "replicate(write, stream, log, segment, start, end, level, answers, count): called after chunks were appended.\n"
    "For frames, `answers` has the answers to `count` requests that wait for the chunks, in the form that\n"
    "`held_answers` takes: for each request its id (u64), the length of its statuses (u32), and the statuses.\n"
    "Otherwise `answers` is the index, among the chunks of the call, of the first of `count` chunks.");

PyObject *take_writes(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 8)
        return PyErr_Format(PyExc_TypeError, "take_writes takes 8 arguments, not %zd", count);
    Take take = {.append = {.write = args[1],
                            .level = args[3] == Py_None ? 0 : PyLong_AsUnsignedLongLong(args[3]),
                            .now_ms = PyLong_AsLongLong(args[6]),
                            .now_us = PyLong_AsLongLong(args[7]),
                            .by_request = args[3] == Py_None}};
    Py_ssize_t bulk_bytes_max = PyLong_AsSsize_t(args[4]), most = PyLong_AsSsize_t(args[5]);
    if (PyErr_Occurred() != NULL || !read_rules(&take.append, args[0]))
        return NULL;
    if (bulk_bytes_max < 0 || most < 0)
        return PyErr_Format(PyExc_ValueError, "a number of bytes, requests or chunks is negative");
    Py_buffer data;
    if (PyObject_GetBuffer(args[2], &data, PyBUF_SIMPLE) != 0)
        return NULL;
    uint32_t bytes_max = bulk_bytes_max > (Py_ssize_t)UINT32_MAX ? UINT32_MAX : (uint32_t)bulk_bytes_max;
    PyObject *result = take_all(&take, (View){data.buf, (size_t)data.len}, bytes_max, (size_t)most);
    close_append(&take.append);
    free_bytes(&take.answers);
    PyBuffer_Release(&data);
    return result;
}

// -- held answers ----------------------------------------------------------------------------------------------------

// Encode the field of a response that tells which backups have a virtual segment.
static bool put_places(Bytes *places, uint64_t virtual_segment_id, PyObject *backup_ids)
{
    Py_ssize_t count = PyList_Check(backup_ids) ? PyList_Size(backup_ids) : -1;
    if (count < 0 || count > 1024 || !make_room(places, ((size_t)count + 4) * NUMBER_BYTES_MAX))
        return false;
    uint8_t ids[1024 * NUMBER_BYTES_MAX], *ids_end = ids, start[2 * NUMBER_BYTES_MAX], *end = start;
    for (Py_ssize_t index = 0; index < count; index++) {
        unsigned long id = PyLong_AsUnsignedLong(PyList_GetItem(backup_ids, index));
        if (PyErr_Occurred() != NULL)
            return false;
        ids_end = put_varint(ids_end, id);
    }
    end = put_number(end, 1, virtual_segment_id);
    if (count > 0) {
        *end++ = BACKUPS_TAG;
        end = put_varint(end, (uint64_t)(ids_end - ids));
    }
    uint8_t *at = places->at;
    *at++ = PLACES_TAG;
    at = put_varint(at, (uint64_t)((end - start) + (ids_end - ids)));
    places->size = (size_t)(at - places->at);
    return put_bytes(places, start, (size_t)(end - start)) && put_bytes(places, ids, (size_t)(ids_end - ids));
}

// Add statuses, each with the virtual segment as its last field. Sets `*count` to their number.
static bool put_placed(Bytes *answers, View statuses, const uint8_t *segment, size_t segment_bytes, size_t *count)
{
    *count = 0;
    for (size_t at = 0; at < statuses.size; ++*count) {
        if (!is_within(statuses, at, 2) || statuses.at[at] != STATUS_TAG)
            return false;
        size_t bytes = statuses.at[at + 1];
        if (bytes + segment_bytes > 127 || !is_within(statuses, at + 2, bytes))
            return false;
        uint8_t head[2] = {STATUS_TAG, (uint8_t)(bytes + segment_bytes)};
        if (!put_bytes(answers, head, 2) || !put_bytes(answers, statuses.at + at + 2, bytes) ||
            !put_bytes(answers, segment, segment_bytes))
            return false;
        at += 2 + bytes;
    }
    return true;
}

static bool put_answers(Bytes *answers, View held, uint64_t virtual_segment_id, const Bytes *places)
{
    uint8_t segment[NUMBER_BYTES_MAX];
    size_t segment_bytes = (size_t)(put_number(segment, STATUS_SEGMENT, virtual_segment_id) - segment);
    for (size_t at = 0; at < held.size;) {
        if (!is_within(held, at, HELD_BYTES))
            return false;
        View statuses = {held.at + at + HELD_BYTES, u32_at(held.at + at + 8)};
        if (!is_within(held, at + HELD_BYTES, statuses.size) || !make_room(answers, FRAME_BYTES))
            return false;
        size_t before = answers->size, count;
        answers->size += FRAME_BYTES;
        if (!put_placed(answers, statuses, segment, segment_bytes, &count) ||
            !put_bytes(answers, places->at, places->size) ||
            (count > 1 && !put_bytes(answers, all_stored, sizeof all_stored)))
            return false;
        write_reply(answers->at + before, MULTI_WRITE_CHUNKS, u64_at(held.at + at),
                    (uint32_t)(answers->size - before - FRAME_BYTES));
        at += HELD_BYTES + statuses.size;
    }
    return true;
}

const char held_answers_doc[] = PyDoc_STR(
    "held_answers(held, virtual_segment_id, backup_ids): the frames of the answers that `take_writes` has held, once\n"
    "the chunks are in this virtual segment on these backups.");

PyObject *held_answers(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 3 || !PyBytes_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "held_answers takes bytes, a virtual segment and a list of backups");
    uint64_t virtual_segment_id = PyLong_AsUnsignedLongLong(args[1]);
    if (PyErr_Occurred() != NULL)
        return NULL;
    View held = {(const uint8_t *)PyBytes_AsString(args[0]), (size_t)PyBytes_Size(args[0])};
    Bytes answers = {0}, places = {0};
    PyObject *result = NULL;
    if (put_places(&places, virtual_segment_id, args[2]) && put_answers(&answers, held, virtual_segment_id, &places))
        result = PyBytes_FromStringAndSize((const char *)answers.at, (Py_ssize_t)answers.size);
    else if (PyErr_Occurred() == NULL)
        PyErr_SetString(PyExc_ValueError, "these are not answers that were held");
    free_bytes(&answers);
    free_bytes(&places);
    return result;
}
