// See append.h.
//
// This does what kera.broker.serving.write, Streamlet.append and Segment.append do for the next chunk of a producer
// that is known, to an open segment that has room. Their objects stay what they are, and nothing of them is remembered
// between two calls: a run of chunks that go to one segment is counted here, and written into its objects at its end.
// At the first chunk that is anything else, it stops: that chunk is Python's.

#include "append.h"

#include "arrow.h"
#include "attributes.h"
#include "frame.h"
#include "lean.h"

// From so many bytes of payload on other threads may run meanwhile.
#define LARGE ((size_t)64 << 10)

// Levels, as in kera/v1/common.proto.
#define LEADER 1
#define REPLICATED 2
#define PERSISTED 3

// Where fields of a header are, in addition to those in chunk.h.
#define FLAGS_AT 5
#define RECORDS_AT 12
#define STREAM_AT 16
#define STREAMLET_AT 24
#define SCHEMA_AT 28
#define PRODUCER_AT 32
#define EPOCH_AT 40
#define CODEC_AT 44
#define SEQUENCE_AT 48
#define MIN_TIME_AT 64
#define MAX_TIME_AT 72

#define COMPRESSED 1
#define FLAGS_MAX 3
#define CODEC_MAX 2

// Where in the row of a slot the heads are, as numbers of 32 bits.
#define ROW_HEAD 12
#define ROW_DURABLE_HEAD 13

// A status with all fields that are set here, and its tag and length.
#define STATUS_BYTES_MAX 64

// -- names ----------------------------------------------------------------------------------------------------------

#define NAMES(name)                                                                                                    \
    name(address) name(broker_epoch) name(by_disk) name(bytes_appended) name(chunk_ends) name(closed) name(count)      \
    name(durability) name(durable_head) name(entries) name(first_epochs) name(frombytes) name(head)  \
    name(logs) name(made_by_index) name(max_timestamp_us) name(min_timestamp_us) name(newest_us) name(next_record)     \
    name(producers) name(producers_in_order) name(record_count) name(records_appended) name(row) name(schema_ids)      \
    name(slot) name(streamlets) name(tail) name(takes_chunks) name(touched_ms) name(view) name(waiters) name(wake)

#define AS_MEMBER(name) NAME_##name,
#define AS_TEXT(name) #name,
enum { NAMES(AS_MEMBER) NAMES_COUNT };
static const char *const texts[] = {NAMES(AS_TEXT)};
static PyObject *names[NAMES_COUNT];
static PyObject *row_head, *row_durable_head;

int append_init(void)
{
    row_head = PyLong_FromLong(ROW_HEAD);
    row_durable_head = PyLong_FromLong(ROW_DURABLE_HEAD);
    return row_head == NULL || row_durable_head == NULL ? -1 : intern_names(names, texts, NAMES_COUNT);
}

#define GET(object, name) PyObject_GetAttr(object, names[NAME_##name])
#define SET(object, name, value) set_to(object, names[NAME_##name], value)
#define SET_NUMBER(object, name, value) set_number(object, names[NAME_##name], value)
#define ADD_NUMBER(object, name, value) add_number(object, names[NAME_##name], value)

// -- a call ---------------------------------------------------------------------------------------------------------

static Outcome left_or_failed(void)
{
    return PyErr_Occurred() == NULL ? LEFT : FAILED;
}

uint32_t chunk_bytes(const uint8_t *header)
{
    return HEADER_BYTES + (uint32_t)padded(u32_at(header + PAYLOAD_BYTES_AT));
}

// -- the start of a run ---------------------------------------------------------------------------------------------

static void close_run(Run *run)
{
    if (!run->open)
        return;
    PyBuffer_Release(&run->memory);
    PyObject **references[] = {&run->stream,  &run->streamlet, &run->entry, &run->segment,
                               &run->slot,    &run->producer,  &run->log};
    for (size_t index = 0; index < sizeof references / sizeof references[0]; index++)
        Py_CLEAR(*references[index]);
    run->ends.size = run->held.size = run->requests = 0;
    run->open = false;
}

// The stream, if chunks of it are taken here as this one is to be.
static bool find_stream(Append *call, Run *run, const uint8_t *header)
{
    run->stream_id = u64_at(header + STREAM_AT);
    run->schema_id = u32_at(header + SCHEMA_AT);
    if ((run->stream = value_of(call->streams, run->stream_id)) == NULL)
        return false;
    uint64_t of_stream;
    bool by_disk;
    if (!number_of(GET(run->stream, durability), &of_stream) || !is_true(GET(run->stream, by_disk), &by_disk))
        return false;
    run->asked_level = call->level;
    run->level = call->level != 0 ? call->level : of_stream;
    run->by_leader = of_stream == LEADER;
    PyObject *ids = GET(run->stream, schema_ids), *id = PyLong_FromUnsignedLong(run->schema_id);
    int known = ids == NULL || id == NULL ? -1 : PySet_Contains(ids, id);
    Py_XDECREF(ids);
    Py_XDECREF(id);
    return known == 1 && !(by_disk && (run->level == PERSISTED || of_stream == PERSISTED));
}

// The streamlet, if it takes this chunk next of its producer.
static bool find_streamlet(Run *run, const uint8_t *header)
{
    run->streamlet_id = u32_at(header + STREAMLET_AT);
    run->producer_id = u64_at(header + PRODUCER_AT);
    run->epoch = u32_at(header + EPOCH_AT);
    run->sequence = u64_at(header + SEQUENCE_AT);
    PyObject *streamlets = GET(run->stream, streamlets);
    if (streamlets == NULL)
        return false;
    run->streamlet = value_of(streamlets, run->streamlet_id);
    Py_DECREF(streamlets);
    bool takes, fenced;
    uint64_t in_order;
    if (run->streamlet == NULL || !is_true(GET(run->streamlet, takes_chunks), &takes) || !takes ||
        !is_true(GET(run->streamlet, first_epochs), &fenced) || fenced ||
        !number_of(GET(run->streamlet, producers_in_order), &in_order))
        return false;
    PyObject *producers = GET(run->streamlet, producers);
    if (producers == NULL)
        return false;
    run->producer = PyLong_FromUnsignedLongLong(run->producer_id);
    PyObject *state = run->producer == NULL ? NULL : PyDict_GetItemWithError(producers, run->producer);
    uint64_t epoch, following;
    bool next = state != NULL && (uint64_t)PyDict_Size(producers) <= in_order && PyTuple_Size(state) == 2 &&
                number_of(Py_NewRef(PyTuple_GetItem(state, 0)), &epoch) &&
                number_of(Py_NewRef(PyTuple_GetItem(state, 1)), &following) && epoch == run->epoch &&
                following == run->sequence;
    Py_DECREF(producers);
    return next;
}

// The last item of a list.
static PyObject *last_of(PyObject *list)
{
    Py_ssize_t size = list == NULL ? 0 : PyList_Size(list);
    PyObject *last = size > 0 ? Py_XNewRef(PyList_GetItem(list, size - 1)) : NULL;
    Py_XDECREF(list);
    return last;
}

static bool find_entry(Run *run)
{
    PyObject *entries = GET(run->streamlet, entries);
    PyObject *made = entries == NULL ? NULL : GET(entries, made_by_index);
    uint64_t count;
    if (made != NULL && number_of(GET(entries, count), &count) && count > 0)
        run->entry = value_of(made, run->producer_id % count);
    Py_XDECREF(made);
    Py_XDECREF(entries);
    return run->entry != NULL;
}

// The open segment of the entry, and its memory, if it has room for so many bytes.
static bool find_segment(Run *run, uint32_t bytes)
{
    bool closed;
    uint64_t head, durable_head, group_id, segment_id, entry;
    run->segment = last_of(GET(run->entry, tail));
    if (run->segment == NULL || !is_true(GET(run->segment, closed), &closed) || closed ||
        !number_of(GET(run->segment, head), &head) || !number_of(GET(run->segment, durable_head), &durable_head) ||
        !number_of(GET(run->entry, next_record), &run->next_record) ||
        !number_of(GET(run->streamlet, broker_epoch), &run->broker_epoch))
        return false;
    PyObject *address = GET(run->segment, address);
    bool good = address != NULL && PyTuple_Size(address) == 5 &&
                number_of(Py_NewRef(PyTuple_GetItem(address, 2)), &entry) &&
                number_of(Py_NewRef(PyTuple_GetItem(address, 3)), &group_id) &&
                number_of(Py_NewRef(PyTuple_GetItem(address, 4)), &segment_id);
    Py_XDECREF(address);
    if (!good || (run->slot = GET(run->segment, slot)) == NULL)
        return false;
    PyObject *view = GET(run->slot, view);
    bool there = view != NULL && PyObject_GetBuffer(view, &run->memory, PyBUF_WRITABLE) == 0;
    Py_XDECREF(view);
    if (!there)
        return false;
    if ((uint64_t)run->memory.len > UINT32_MAX || head > (uint64_t)run->memory.len ||
        bytes > (uint64_t)run->memory.len - head) {
        PyBuffer_Release(&run->memory);
        return false;
    }
    run->start = run->head = (uint32_t)head;
    run->placement = (Placement){
        .group_id = group_id,
        .segment_id = (uint32_t)segment_id,
        .entry = (uint32_t)entry,
        .broker_epoch = run->broker_epoch,
        .durable_head = (uint32_t)durable_head,
    };
    return true;
}

// Of a stream that is replicated: its log, if that takes chunks now.
static bool pass_gate(Append *call, Run *run)
{
    PyObject *logs = GET(run->stream, logs);
    if (logs == NULL)
        return false;
    bool replicated = logs != Py_None;
    Py_DECREF(logs);
    if (!replicated)
        return run->level != REPLICATED;
    PyObject *answer = PyObject_CallFunction(call->gate, "OOIKK", call->context, run->stream,
                                             (unsigned)run->streamlet_id, (unsigned long long)run->producer_id,
                                             (unsigned long long)run->level);
    PyObject *log;
    Py_ssize_t room;
    bool passed = answer != NULL && answer != Py_None && PyArg_ParseTuple(answer, "On", &log, &room);
    if (passed) {
        run->log = Py_NewRef(log);
        run->room = room < 0 ? 0 : (size_t)room;
    }
    Py_XDECREF(answer);
    return passed;
}

Outcome begin_run(Append *call, const uint8_t *header, uint32_t bytes)
{
    Run *run = &call->run;
    run->records = 0;
    run->min_time = INT64_MAX;
    run->max_time = INT64_MIN;
    run->first = call->chunks;
    run->memory = (Py_buffer){0};
    run->open = true;
    if (find_stream(call, run, header) && find_streamlet(run, header) && find_entry(run) &&
        find_segment(run, bytes) && pass_gate(call, run))
        return TAKEN;
    Outcome outcome = left_or_failed();
    close_run(run);
    return outcome;
}

// -- chunks ---------------------------------------------------------------------------------------------------------

bool goes_on(const Append *call, const uint8_t *header, uint32_t bytes, uint32_t last_bytes)
{
    const Run *run = &call->run;
    return run->open && run->stream_id == u64_at(header + STREAM_AT) &&
           run->streamlet_id == u32_at(header + STREAMLET_AT) && run->schema_id == u32_at(header + SCHEMA_AT) &&
           run->producer_id == u64_at(header + PRODUCER_AT) && run->epoch == u32_at(header + EPOCH_AT) &&
           run->sequence == u64_at(header + SEQUENCE_AT) && run->asked_level == call->level &&
           bytes <= (uint32_t)run->memory.len - run->head &&
           (run->log == NULL || ((size_t)(run->head - run->start) + bytes <= call->run_bytes_max &&
                                 (size_t)(run->head - run->start) + (bytes - last_bytes) < run->room));
}

// Whether the fields that a producer has chosen are as they should be (check_sent).
static bool is_sent(const uint8_t *header)
{
    uint8_t flags = header[FLAGS_AT];
    uint32_t codec = u32_at(header + CODEC_AT);
    return u32_at(header + RECORDS_AT) != 0 && u32_at(header + PAYLOAD_BYTES_AT) != 0 && flags <= FLAGS_MAX &&
           codec <= CODEC_MAX && (flags & COMPRESSED) == (codec != 0) &&
           (int64_t)u64_at(header + MIN_TIME_AT) <= (int64_t)u64_at(header + MAX_TIME_AT) &&
           is_unplaced_header(header);
}

static bool is_trusted(const Append *call, const uint8_t *header)
{
    uint32_t payload_bytes = u32_at(header + PAYLOAD_BYTES_AT), records = u32_at(header + RECORDS_AT);
    bool compressed = u32_at(header + CODEC_AT) != 0;
    if (!is_payload(call->bulk, call->at, payload_bytes, u32_at(header + PAYLOAD_CRC_AT)))
        return false;
    if (!call->check_payloads)
        return true;
    View payload = {call->bulk.at + call->at + HEADER_BYTES, payload_bytes};
    if (header[VERSION_AT] == LEAN_VERSION)
        return is_lean(payload, records, compressed, DECOMPRESSED_BYTES_MAX);
    return !compressed && is_arrow(payload, records);
}

bool is_good_payload(const Append *call, const uint8_t *header)
{
    PyThreadState *state = u32_at(header + PAYLOAD_BYTES_AT) < LARGE ? NULL : PyEval_SaveThread();
    bool good = is_trusted(call, header);
    if (state != NULL)
        PyEval_RestoreThread(state);
    return good;
}

// One more of `statuses`, the third field of a response.
static bool put_status(Bytes *statuses, const Run *run)
{
    if (!make_room(statuses, STATUS_BYTES_MAX)) {
        PyErr_NoMemory();
        return false;
    }
    uint8_t *start = statuses->at + statuses->size, *at = start + 2;
    at = put_number(at, 2, run->placement.entry);
    at = put_number(at, 3, run->placement.group_id);
    at = put_number(at, 4, run->placement.segment_id);
    at = put_number(at, 5, run->head);
    at = put_number(at, 6, run->next_record);
    at = put_number(at, 7, run->level);
    start[0] = 3 << 3 | 2;
    start[1] = (uint8_t)(at - start - 2);
    statuses->size += (size_t)(at - start);
    return true;
}

bool append_chunk(Append *call, const uint8_t *header, Bytes *statuses)
{
    Run *run = &call->run;
    uint32_t bytes = chunk_bytes(header), records = u32_at(header + RECORDS_AT);
    int64_t min_time = (int64_t)u64_at(header + MIN_TIME_AT), max_time = (int64_t)u64_at(header + MAX_TIME_AT);
    if (!put_status(statuses, run))
        return false;
    uint8_t *to = (uint8_t *)run->memory.buf + run->head;
    memcpy(to, header, HEADER_BYTES);
    memcpy(to + HEADER_BYTES, call->bulk.at + call->at + HEADER_BYTES, bytes - HEADER_BYTES);
    run->placement.first_record = run->next_record;
    place(to, &run->placement);
    run->head += bytes;
    if (!put_bytes(&run->ends, &run->head, sizeof run->head)) {
        PyErr_NoMemory();
        return false;
    }
    run->sequence++;
    run->next_record += records;
    run->records += records;
    run->min_time = min_time < run->min_time ? min_time : run->min_time;
    run->max_time = max_time > run->max_time ? max_time : run->max_time;
    if (run->by_leader)
        run->placement.durable_head = run->head;
    call->chunks++;
    call->records += records;
    call->bytes += bytes;
    call->at += bytes;
    return true;
}

// -- the end of a run -----------------------------------------------------------------------------------------------

static bool set_times(const Run *run)
{
    int64_t least, most;
    return signed_of(GET(run->segment, min_timestamp_us), &least) &&
           signed_of(GET(run->segment, max_timestamp_us), &most) &&
           (run->min_time >= least ||
            SET(run->segment, min_timestamp_us, PyLong_FromLongLong(run->min_time))) &&
           (run->max_time <= most || SET(run->segment, max_timestamp_us, PyLong_FromLongLong(run->max_time)));
}

static bool set_record(PyObject *owner, const Run *run, PyObject *record)
{
    PyObject *producers = GET(owner, producers);
    bool good = producers != NULL && PyDict_SetItem(producers, run->producer, record) == 0;
    Py_XDECREF(producers);
    return good;
}

// How far the producer has got, at the segment and at the streamlet.
static bool set_producer(const Append *call, const Run *run)
{
    PyTypeObject *type = (PyTypeObject *)call->record_type;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *record = allocate(type, 2);
    if (record == NULL)
        return false;
    PyObject *epoch = PyLong_FromUnsignedLong(run->epoch), *following = PyLong_FromUnsignedLongLong(run->sequence);
    bool good = epoch != NULL && following != NULL;
    if (good) {
        PyTuple_SetItem(record, 0, epoch);
        PyTuple_SetItem(record, 1, following);
        good = set_record(run->segment, run, record) && set_record(run->streamlet, run, record);
    } else {
        Py_XDECREF(epoch);
        Py_XDECREF(following);
    }
    Py_DECREF(record);
    return good;
}

static bool set_ends(const Run *run)
{
    PyObject *ends = GET(run->segment, chunk_ends);
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)run->ends.at, (Py_ssize_t)run->ends.size);
    PyObject *done = ends == NULL || bytes == NULL
                         ? NULL
                         : PyObject_CallMethodObjArgs(ends, names[NAME_frombytes], bytes, NULL);
    Py_XDECREF(ends);
    Py_XDECREF(bytes);
    Py_XDECREF(done);
    return done != NULL;
}

static bool set_row(const Run *run, PyObject *index)
{
    PyObject *row = GET(run->slot, row), *head = PyLong_FromUnsignedLong(run->head);
    bool good = row != NULL && head != NULL && PyObject_SetItem(row, index, head) == 0;
    Py_XDECREF(row);
    Py_XDECREF(head);
    return good;
}

// Readers may read all of it.
static bool publish(const Run *run)
{
    if (!SET_NUMBER(run->segment, durable_head, run->head) || !set_row(run, row_durable_head))
        return false;
    bool waiting;
    if (!is_true(GET(run->entry, waiters), &waiting))
        return false;
    if (!waiting)
        return true;
    PyObject *done = PyObject_CallMethodObjArgs(run->entry, names[NAME_wake], NULL);
    Py_XDECREF(done);
    return done != NULL;
}

static bool replicate(const Append *call, const Run *run)
{
    size_t chunks = call->chunks - run->first;
    PyObject *answers = call->by_request
                            ? PyBytes_FromStringAndSize((const char *)run->held.at, (Py_ssize_t)run->held.size)
                            : PyLong_FromSize_t(run->first);
    PyObject *done = answers == NULL
                         ? NULL
                         : PyObject_CallFunction(call->replicate, "OOOOIIOnK", call->context, run->stream, run->log,
                                                 run->segment, (unsigned)run->start, (unsigned)run->head, answers,
                                                 (Py_ssize_t)(call->by_request ? run->requests : chunks),
                                                 (unsigned long long)run->level);
    Py_XDECREF(answers);
    Py_XDECREF(done);
    return done != NULL;
}

bool end_run(Append *call)
{
    Run *run = &call->run;
    bool good = true;
    if (run->open && run->head > run->start) {
        good = set_ends(run) && SET_NUMBER(run->segment, head, run->head) &&
               ADD_NUMBER(run->segment, record_count, run->records) && set_times(run) && set_producer(call, run) &&
               SET(run->segment, touched_ms, Py_NewRef(call->now_ms)) &&
               SET(run->segment, newest_us, Py_NewRef(call->now_us)) &&
               SET_NUMBER(run->entry, next_record, run->next_record) &&
               ADD_NUMBER(run->streamlet, records_appended, run->records) &&
               ADD_NUMBER(run->streamlet, bytes_appended, run->head - run->start) && set_row(run, row_head) &&
               (!run->by_leader || publish(run)) && (run->log == NULL || replicate(call, run));
    }
    close_run(run);
    return good;
}

// -- a call ---------------------------------------------------------------------------------------------------------

bool read_chunk(const Append *call, uint8_t *header)
{
    if (!is_within(call->bulk, call->at, HEADER_BYTES))
        return false;
    memcpy(header, call->bulk.at + call->at, HEADER_BYTES);
    return is_header(header) && is_sent(header) && u32_at(header + PAYLOAD_BYTES_AT) <= PAYLOAD_BYTES_MAX &&
           is_within(call->bulk, call->at, chunk_bytes(header));
}

static Outcome take_chunk(Append *call, Bytes *statuses)
{
    uint8_t header[HEADER_BYTES];
    if (!read_chunk(call, header))
        return LEFT;
    uint32_t bytes = chunk_bytes(header);
    if (!goes_on(call, header, bytes, bytes)) {
        if (!end_run(call))
            return FAILED;
        Outcome outcome = begin_run(call, header, bytes);
        if (outcome != TAKEN)
            return outcome;
    }
    if (!is_good_payload(call, header))
        return LEFT;
    return append_chunk(call, header, statuses) ? TAKEN : FAILED;
}

static PyObject *take_chunks(Append *call, size_t chunks_max)
{
    Bytes statuses = {0};
    Outcome outcome = TAKEN;
    PyObject *result = NULL;
    while (outcome == TAKEN && call->chunks < chunks_max && call->at < call->bulk.size)
        outcome = take_chunk(call, &statuses);
    if (outcome != FAILED && end_run(call))
        result = Py_BuildValue("(ny#nKK)", (Py_ssize_t)call->at, statuses.size == 0 ? "" : (const char *)statuses.at,
                               (Py_ssize_t)statuses.size, (Py_ssize_t)call->chunks, (unsigned long long)call->records,
                               (unsigned long long)call->bytes);
    free_bytes(&statuses);
    return result;
}

bool open_door(Append *call, PyObject *door)
{
    Py_ssize_t run_bytes_max;
    int check_payloads;
    if (!PyTuple_Check(door)) {
        PyErr_Format(PyExc_TypeError, "the door is a tuple, not %R", door);
        return false;
    }
    if (!PyArg_ParseTuple(door, "O!OOO!np", &PyDict_Type, &call->streams, &call->gate, &call->replicate, &PyType_Type,
                          &call->record_type, &run_bytes_max, &check_payloads))
        return false;
    if (run_bytes_max < 0) {
        PyErr_Format(PyExc_ValueError, "a number of bytes is negative");
        return false;
    }
    call->run_bytes_max = (size_t)run_bytes_max;
    call->check_payloads = check_payloads != 0;
    return true;
}

void close_append(Append *call)
{
    close_run(&call->run);
    free_bytes(&call->run.ends);
    free_bytes(&call->run.held);
}

const char append_chunks_doc[] = PyDoc_STR(
    "append_chunks(door, context, bulk, at, chunks_max, level, now_ms, now_us)\n"
    "\n"
    "Append the chunks from `at` on, at most `chunks_max`, up to the first that is not the next one of a known\n"
    "producer, to an open segment with room. Returns where that is, the statuses of those before it as they are in a\n"
    "response, and how many they are, with how many records and bytes.\n"
    "\n"
    "`door`: (streams by id, gate, replicate, type of a producer's record, run_bytes_max, check_payloads).\n"
    "gate(context, stream, streamlet_id, producer_id, level): (the log of the chunks, its room in bytes), or None.\n"
    "replicate(context, stream, log, segment, start, end, first, count, level): chunks are there, of which the first\n"
    "has the index `first`.");

PyObject *append_chunks(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 8)
        return PyErr_Format(PyExc_TypeError, "append_chunks takes 8 arguments, not %zd", count);
    Append call = {.context = args[1], .now_ms = args[6], .now_us = args[7]};
    Py_ssize_t at = PyLong_AsSsize_t(args[3]), chunks_max = PyLong_AsSsize_t(args[4]);
    call.level = PyLong_AsUnsignedLongLong(args[5]);
    if (PyErr_Occurred() != NULL || !open_door(&call, args[0]))
        return NULL;
    if (at < 0 || chunks_max < 0)
        return PyErr_Format(PyExc_ValueError, "a place or a number of chunks is negative");
    Py_buffer bulk;
    if (PyObject_GetBuffer(args[2], &bulk, PyBUF_SIMPLE) != 0)
        return NULL;
    call.at = (size_t)at;
    call.bulk = (View){bulk.buf, (size_t)bulk.len};
    PyObject *result = take_chunks(&call, (size_t)chunks_max);
    close_append(&call);
    PyBuffer_Release(&bulk);
    return result;
}
