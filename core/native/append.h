// A broker's way of chunks into its memory: docs/native.md has what is done here, and what is left to Python.
#ifndef KERA_APPEND_H
#define KERA_APPEND_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include "bytes.h"
#include "chunk.h"
#include "progress.h"

// Chunks that follow each other in a segment, of one producer. All objects are references of its own.
typedef struct {
    PyObject *stream, *streamlets;  // these two stay for the next run
    PyObject *streamlet, *entry, *segment, *log;
    uint8_t *memory;
    uint64_t stream_id, producer_id, sequence, asked_level, level, next_record, records, broker_epoch;
    uint32_t streamlet_id, schema_id, epoch, start, head, memory_bytes;
    int64_t min_time, max_time;
    int64_t earliest, latest;  // what the greatest time of a chunk is between, both included
    Placement placement;
    Bytes ends;
    size_t first;  // the index of its first chunk among those of the call
    size_t room;   // of the log: a chunk is taken as long as those before it are fewer bytes
    Bytes held;    // answers that wait for the log, see take.h
    size_t requests;  // to which those are
    bool open, by_leader, replicated;
    bool called;  // Python, which may have changed the stream
} Run;

typedef struct {
    // Of the rules: borrowed.
    PyObject *streams, *gate, *replicate, *record_type;
    size_t run_bytes_max;
    bool check_payloads;
    PyObject *producers;  // by stream, the ids that may be written under; None: all
    // Of the call: borrowed.
    PyObject *write;
    int64_t now_ms, now_us;
    View bulk;
    uint64_t level;
    bool by_request;  // `replicate` gets the answers that wait, and not the number of the first chunk
    struct {
        PyObject *capsule;  // a reference of its own; NULL: no payload has been looked at
        uint64_t stream_id;
        uint32_t schema_id;
    } type;  // that of the last lean payload, see kera.core.format.lean.kinds
    // What has been done.
    size_t at, chunks;
    uint64_t records, bytes;
    Run run;
} Append;

// What becomes of a chunk, or of a request.
typedef enum { TAKEN, LEFT, FAILED } Outcome;

// The fields of AppendRules in kera.broker.serving.write_access, in the order in which read_rules reads them. A test
// compares them with Python's.
#define APPEND_RULES "streams gate replicate record_type run_bytes_max check_payloads producers"

// The rules of a call. False: they are none, and an error is set.
bool read_rules(Append *call, PyObject *rules);

// At the end of a call, whatever has become of it.
void close_append(Append *call);

// The header at `call->at`, if a producer may send it and its chunk is whole.
bool read_chunk(const Append *call, uint8_t *header);

// Whether the payload at `call->at` is as its header says, and can be trusted. Other threads may run meanwhile. False
// where Python knows more about it: an error may be set.
bool is_good_payload(Append *call, const uint8_t *header);

uint32_t chunk_bytes(const uint8_t *header);

// Whether chunks of so many bytes, of which that is the first header, go on where the run is, in the same way.
bool goes_on(const Append *call, const uint8_t *header, uint32_t bytes, uint32_t last_bytes);

// Whether the greatest time of a chunk is one that needs no look: not older than what readers were promised, and not
// too far ahead of the clock.
bool is_timely(const Run *run, const uint8_t *header);

// Begin a run of which that is the first header, in a segment with room for so many bytes.
Outcome begin_run(Append *call, const uint8_t *header, uint32_t bytes);

// Copy the chunk at `call->at`, which is good, to the head of the run's segment, and pass it; its status is put there.
bool append_chunk(Append *call, const uint8_t *header, Bytes *statuses);

// Append the chunk at `call->at`, to the run or to a new one; its status is put there. Nothing is changed for one
// that is left.
Outcome take_chunk(Append *call, Bytes *statuses);

// Write what the run has come to into its objects. The head is last: who finds it finds the chunks.
bool end_run(Append *call);

// Make the names of attributes that it looks at. -1: there is no memory.
int append_init(void);

#endif
