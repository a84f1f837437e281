// See append.h.
//
// This does the work of kera.broker.serving.write, Streamlet.append and Segment.append for the next chunk of a known
// producer, in an open segment with room. The chunks of a run go to one segment. Their totals are kept here, and are
// written into the Python objects (see progress.h) at the end of the run. The first chunk of any other kind ends the
// work: it is left to Python.

#include "append.h"

#include "arrow.h"
#include "attributes.h"
#include "frame.h"
#include "lean.h"
#include "lean_arrays.h"
#include "lean_face.h"

// While a payload of at least this many bytes is checked, other threads may run.
#define LARGE ((size_t)64 << 10)

// Levels, as in kera/v1/common.proto.
#define LEADER 1
#define REPLICATED 2
#define PERSISTED 3

// Offsets of header fields, in addition to those in chunk.h.
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

// The indices of the heads in the row of a slot, which is an array of 32-bit numbers.
#define ROW_HEAD 12
#define ROW_DURABLE_HEAD 13

// Only this much of a chunk's destination is prefetched in software: the processor predicts the rest by itself.
#define PREFETCHED_BYTES_MAX 1024

// The maximum size of a status with all fields that are set here, including its tag and length.
#define STATUS_BYTES_MAX 64

// -- names ----------------------------------------------------------------------------------------------------------

#define NAMES(name)                                                                                                    \
    name(by_disk) name(durability) name(logs) name(lean_types) name(streamlets) name(wake)

#define AS_MEMBER(name) NAME_##name,
#define AS_TEXT(name) #name,
enum { NAMES(AS_MEMBER) NAMES_COUNT };
static const char *const texts[] = {NAMES(AS_TEXT)};
static PyObject *names[NAMES_COUNT];

int append_init(void)
{
    return intern_names(names, texts, NAMES_COUNT);
}

#define GET(object, name) PyObject_GetAttr(object, names[NAME_##name])

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

static void forget_stream(Run *run)
{
    Py_CLEAR(run->stream);
    Py_CLEAR(run->streamlets);
}

static void close_run(Run *run)
{
    if (!run->open)
        return;
    Py_CLEAR(run->streamlet);
    Py_CLEAR(run->entry);
    Py_CLEAR(run->segment);
    Py_CLEAR(run->log);
    if (run->called)
        forget_stream(run);
    run->called = false;
    run->ends.size = run->held.size = run->requests = 0;
    run->open = false;
}

// The result of `kera.core.native.lean_type` for a schema of the stream, as a new reference; NULL: the stream has no
// such schema.
static PyObject *lean_type_of(PyObject *stream, uint32_t schema_id)
{
    PyObject *types = GET(stream, lean_types);
    PyObject *type = types == NULL ? NULL : value_of(types, schema_id);
    Py_XDECREF(types);
    return type;
}

// Find the stream, if this code can append such a chunk to it. The stream of the last run is reused, unless Python code
// has run since.
static bool find_stream(Append *call, Run *run, const uint8_t *header)
{
    uint64_t stream_id = u64_at(header + STREAM_AT), of_stream;
    uint32_t schema_id = u32_at(header + SCHEMA_AT);
    if (run->stream != NULL && run->stream_id == stream_id && run->schema_id == schema_id &&
        run->asked_level == call->level)
        return true;
    forget_stream(run);
    bool by_disk;
    PyObject *stream = value_of(call->streams, stream_id);
    if (stream == NULL)
        return false;
    run->stream = stream;
    run->stream_id = stream_id;
    run->schema_id = schema_id;
    if (!number_of(GET(stream, durability), &of_stream) || !is_true(GET(stream, by_disk), &by_disk) ||
        (run->streamlets = GET(stream, streamlets)) == NULL) {
        forget_stream(run);
        return false;
    }
    run->asked_level = call->level;
    run->level = call->level != 0 ? call->level : of_stream;
    run->by_leader = of_stream == LEADER;
    PyObject *logs = GET(stream, logs), *type = lean_type_of(stream, schema_id);
    bool known = logs != NULL && type != NULL;
    run->replicated = logs != Py_None;
    Py_XDECREF(logs);
    Py_XDECREF(type);
    if (known && !(by_disk && (run->level == PERSISTED || of_stream == PERSISTED)))
        return true;
    forget_stream(run);
    return false;
}

// Whether the caller is known to be allowed to write to the stream with this producer id.
static bool may_use(const Append *call, const Run *run)
{
    if (call->producers == Py_None)
        return true;
    PyObject *of_stream = value_of(call->producers, run->stream_id);
    PyObject *producer = of_stream == NULL ? NULL : PyLong_FromUnsignedLongLong(run->producer_id);
    int found = producer == NULL ? 0 : PySet_Contains(of_stream, producer);
    Py_XDECREF(producer);
    Py_XDECREF(of_stream);
    return found > 0;
}

// Find the streamlet, if this chunk is the next one of its producer there, and the entry that it goes to.
static bool find_streamlet(Append *call, Run *run, const uint8_t *header)
{
    run->streamlet_id = u32_at(header + STREAMLET_AT);
    run->producer_id = u64_at(header + PRODUCER_AT);
    run->epoch = u32_at(header + EPOCH_AT);
    run->sequence = u64_at(header + SEQUENCE_AT);
    if (!may_use(call, run))
        return false;
    run->streamlet = value_of(run->streamlets, run->streamlet_id);
    StreamletProgress *streamlet = as_streamlet(run->streamlet);
    bool fenced;
    if (streamlet == NULL || !streamlet->takes_chunks || streamlet->first_epochs == NULL ||
        !is_true(Py_NewRef(streamlet->first_epochs), &fenced) || fenced)
        return false;
    ProducerPlace *place =
        find_place(run->streamlet, call->record_type, run->producer_id, run->epoch, run->sequence);
    if (place == NULL)
        return false;
    run->entry = Py_NewRef(place->entry);
    return true;
}

// Have the processor translate the address that a chunk goes to, and fetch the memory, while the chunk is checked. With
// a thousand open segments neither is cached, and the store to each cache line would wait for it.
static void prefetch(const uint8_t *at, uint32_t bytes)
{
    for (uint32_t line = 0; line < bytes && line < PREFETCHED_BYTES_MAX; line += ALIGNMENT_BYTES)
        __builtin_prefetch(at + line, 1);
}

// Find the open segment of the entry, if it has room for `bytes` bytes.
static bool find_segment(Run *run, uint32_t bytes)
{
    const EntryProgress *entry = (EntryProgress *)run->entry;
    Py_ssize_t segments = entry->tail == NULL || !PyList_Check(entry->tail) ? 0 : PyList_Size(entry->tail);
    if (segments == 0)
        return false;
    run->segment = Py_NewRef(PyList_GetItem(entry->tail, segments - 1));
    const SegmentProgress *segment = as_segment(run->segment);
    if (segment == NULL || segment->closed || segment->dropped || !map_segment(run->segment) ||
        segment->head > segment->memory_bytes || bytes > segment->memory_bytes - segment->head)
        return false;
    run->memory = segment->memory;
    run->memory_bytes = segment->memory_bytes;
    run->start = run->head = (uint32_t)segment->head;
    run->next_record = entry->next_record;
    run->placement = (Placement){
        .group_id = segment->group_id,
        .segment_id = segment->segment_id,
        .entry = segment->entry,
        .broker_epoch = ((StreamletProgress *)run->streamlet)->broker_epoch,
        .durable_head = (uint32_t)segment->durable_head,
    };
    prefetch(run->memory + run->head, bytes);
    return true;
}

// Set the bounds for the maximum timestamps of chunks, and check the first one: see is_timely.
static bool find_times(const Append *call, Run *run, const uint8_t *header)
{
    uint64_t ahead_us = ((StreamletProgress *)run->streamlet)->timestamp_ahead_us;
    run->earliest = ((EntryProgress *)run->entry)->promised_us;
    run->latest = INT64_MAX;
    if (ahead_us != 0 && call->now_us >= 0 && ahead_us < (uint64_t)(INT64_MAX - call->now_us))
        run->latest = call->now_us + (int64_t)ahead_us;
    return is_timely(run, header);
}

// Ask the gate for the virtual log of a replicated stream. Returns false if the log takes no chunks now.
static bool pass_gate(Append *call, Run *run)
{
    if (!run->replicated)
        return run->level != REPLICATED;
    run->called = true;
    PyObject *answer = PyObject_CallFunction(call->gate, "OOIKK", call->write, run->stream,
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
    run->open = true;
    if (find_stream(call, run, header) && find_streamlet(call, run, header) && find_segment(run, bytes) &&
        find_times(call, run, header) && pass_gate(call, run))
        return TAKEN;
    Outcome outcome = left_or_failed();
    close_run(run);
    return outcome;
}

// -- chunks ---------------------------------------------------------------------------------------------------------

bool is_timely(const Run *run, const uint8_t *header)
{
    int64_t time = (int64_t)u64_at(header + MAX_TIME_AT);
    return time >= run->earliest && time <= run->latest;
}

bool goes_on(const Append *call, const uint8_t *header, uint32_t bytes, uint32_t last_bytes)
{
    const Run *run = &call->run;
    return run->open && run->stream_id == u64_at(header + STREAM_AT) &&
           run->streamlet_id == u32_at(header + STREAMLET_AT) && run->schema_id == u32_at(header + SCHEMA_AT) &&
           run->producer_id == u64_at(header + PRODUCER_AT) && run->epoch == u32_at(header + EPOCH_AT) &&
           run->sequence == u64_at(header + SEQUENCE_AT) && run->asked_level == call->level && is_timely(run, header) &&
           bytes <= run->memory_bytes - run->head &&
           (run->log == NULL || ((size_t)(run->head - run->start) + bytes <= call->run_bytes_max &&
                                 (size_t)(run->head - run->start) + (bytes - last_bytes) < run->room));
}

// Whether the fields that a producer sets are valid (check_sent).
static bool is_sent(const uint8_t *header)
{
    uint8_t flags = header[FLAGS_AT];
    uint32_t codec = u32_at(header + CODEC_AT);
    return u32_at(header + RECORDS_AT) != 0 && u32_at(header + PAYLOAD_BYTES_AT) != 0 && flags <= FLAGS_MAX &&
           codec <= CODEC_MAX && (flags & COMPRESSED) == (codec != 0) &&
           (int64_t)u64_at(header + MIN_TIME_AT) <= (int64_t)u64_at(header + MAX_TIME_AT) &&
           is_unplaced_header(header);
}

// The type of a lean payload's schema; NULL: the schema is unknown, or not supported here.
static const Type *find_type(Append *call, const uint8_t *header)
{
    uint64_t stream_id = u64_at(header + STREAM_AT);
    uint32_t schema_id = u32_at(header + SCHEMA_AT);
    if (call->type.capsule == NULL || call->type.stream_id != stream_id || call->type.schema_id != schema_id) {
        Py_CLEAR(call->type.capsule);
        PyObject *stream = value_of(call->streams, stream_id);
        if (stream == NULL)
            return NULL;
        call->type.capsule = lean_type_of(stream, schema_id);
        call->type.stream_id = stream_id;
        call->type.schema_id = schema_id;
        Py_DECREF(stream);
    }
    return call->type.capsule == NULL || call->type.capsule == Py_None ? NULL : type_in(call->type.capsule);
}

static bool is_trusted(const Append *call, const uint8_t *header, const Type *type)
{
    uint32_t payload_bytes = u32_at(header + PAYLOAD_BYTES_AT), records = u32_at(header + RECORDS_AT);
    bool compressed = u32_at(header + CODEC_AT) != 0;
    if (!is_payload(call->bulk, call->at, payload_bytes, u32_at(header + PAYLOAD_CRC_AT)))
        return false;
    if (!call->check_payloads)
        return true;
    View payload = {call->bulk.at + call->at + HEADER_BYTES, payload_bytes};
    if (header[VERSION_AT] == LEAN_VERSION)
        return is_lean(payload, records, compressed, DECOMPRESSED_BYTES_MAX, type);
    return !compressed && is_arrow(payload, records);
}

bool is_good_payload(Append *call, const uint8_t *header)
{
    bool lean = call->check_payloads && header[VERSION_AT] == LEAN_VERSION;
    const Type *type = lean ? find_type(call, header) : NULL;
    if (lean && type == NULL)
        return false;
    PyThreadState *state = u32_at(header + PAYLOAD_BYTES_AT) < LARGE ? NULL : PyEval_SaveThread();
    bool good = is_trusted(call, header, type);
    if (state != NULL)
        PyEval_RestoreThread(state);
    return good;
}

// Add an item to `statuses`, the third field of a response.
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
    uint8_t *to = run->memory + run->head;
    memcpy(to, header, HEADER_BYTES);
    memcpy(to + HEADER_BYTES, call->bulk.at + call->at + HEADER_BYTES, bytes - HEADER_BYTES);
    place(to, &run->placement, run->next_record);
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

// Update what others read of a segment. The head comes last: a reader that sees the new head finds the chunks.
static void set_segment(const Append *call, const Run *run)
{
    SegmentProgress *segment = (SegmentProgress *)run->segment;
    segment->record_count += run->records;
    segment->min_timestamp_us = run->min_time < segment->min_timestamp_us ? run->min_time : segment->min_timestamp_us;
    segment->max_timestamp_us = run->max_time > segment->max_timestamp_us ? run->max_time : segment->max_timestamp_us;
    segment->touched_ms = call->now_ms;
    segment->newest_us = call->now_us;
    segment->head = run->head;
    __atomic_store_n(segment->row + ROW_HEAD, run->head, __ATOMIC_RELEASE);
}

// Let readers read all chunks of the run, and wake those that wait.
static bool publish(Run *run)
{
    SegmentProgress *segment = (SegmentProgress *)run->segment;
    segment->durable_head = run->head;
    __atomic_store_n(segment->row + ROW_DURABLE_HEAD, run->head, __ATOMIC_RELEASE);
    PyObject *waiters = ((EntryProgress *)run->entry)->waiters;
    if (waiters == NULL || PySet_Size(waiters) == 0)
        return true;
    run->called = true;
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
                         : PyObject_CallFunction(call->replicate, "OOOOIIKOn", call->write, run->stream, run->log,
                                                 run->segment, (unsigned)run->start, (unsigned)run->head,
                                                 (unsigned long long)run->level, answers,
                                                 (Py_ssize_t)(call->by_request ? run->requests : chunks));
    Py_XDECREF(answers);
    Py_XDECREF(done);
    return done != NULL;
}

bool end_run(Append *call)
{
    Run *run = &call->run;
    bool good = true;
    if (run->open && run->head > run->start) {
        Reached reached = {.producer_id = run->producer_id, .following = run->sequence, .epoch = run->epoch};
        good = note_ends((SegmentProgress *)run->segment, (const uint32_t *)run->ends.at,
                         run->ends.size / sizeof(uint32_t)) &&
               note_reached(run->segment, run->streamlet, call->record_type, &reached);
        if (good) {
            StreamletProgress *streamlet = (StreamletProgress *)run->streamlet;
            streamlet->records_appended += run->records;
            streamlet->bytes_appended += run->head - run->start;
            ((EntryProgress *)run->entry)->next_record = run->next_record;
            set_segment(call, run);
            good = (!run->by_leader || publish(run)) && (run->log == NULL || replicate(call, run));
        }
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

Outcome take_chunk(Append *call, Bytes *statuses)
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
        return left_or_failed();
    return append_chunk(call, header, statuses) ? TAKEN : FAILED;
}

bool read_rules(Append *call, PyObject *rules)
{
    Py_ssize_t run_bytes_max;
    int check_payloads;
    if (!PyTuple_Check(rules)) {
        PyErr_Format(PyExc_TypeError, "the rules of appending are a tuple, not %R", rules);
        return false;
    }
    if (!PyArg_ParseTuple(rules, "O!OOO!npO", &PyDict_Type, &call->streams, &call->gate, &call->replicate, &PyType_Type,
                          &call->record_type, &run_bytes_max, &check_payloads, &call->producers))
        return false;
    if (call->producers != Py_None && !PyDict_Check(call->producers)) {
        PyErr_Format(PyExc_TypeError, "the producers are in a dict, not in %R", call->producers);
        return false;
    }
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
    forget_stream(&call->run);
    Py_CLEAR(call->type.capsule);
    free_bytes(&call->run.ends);
    free_bytes(&call->run.held);
}
