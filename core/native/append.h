// How a broker appends chunks to its memory. docs/native.md says what is done here, and what is left to Python.
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

// Consecutive chunks of one producer in a segment. It owns its references to all objects.
typedef struct {
    PyObject *stream, *streamlets;  // kept for the next run
    PyObject *streamlet, *entry, *segment, *log;
    uint8_t *memory;
    uint64_t stream_id, producer_id, sequence, asked_level, level, next_record, records, broker_epoch;
    uint32_t streamlet_id, schema_id, epoch, start, head, memory_bytes;
    int64_t min_time, max_time;
    int64_t earliest, latest;  // bounds, both inclusive, of the maximum timestamp of a chunk
    Placement placement;
    Bytes ends;
    size_t first;  // the index of its first chunk among the chunks of the call
    size_t room;   // bytes that the log takes: a chunk is appended while the chunks before it have fewer bytes
    Bytes held;    // answers that wait for the log, see take.h
    size_t requests;  // the number of requests with such answers
    bool open, by_leader, replicated;
    bool called;  // Python code was called, which may have changed the stream
} Run;

typedef struct {
    // From the rules, borrowed.
    PyObject *streams, *gate, *replicate, *record_type;
    size_t run_bytes_max;
    bool check_payloads;
    PyObject *producers;  // by stream, the producer ids that chunks may have; None: any
    // From the call, borrowed.
    PyObject *write;
    int64_t now_ms, now_us;
    View bulk;
    uint64_t level;
    bool by_request;  // `replicate` gets the waiting answers instead of the index of the run's first chunk
    struct {
        PyObject *capsule;  // owned; NULL before the first lean payload
        uint64_t stream_id;
        uint32_t schema_id;
    } type;  // the type of the last lean payload, see kera.core.format.lean.kinds
    // The results so far.
    size_t at, chunks;
    uint64_t records, bytes;
    Run run;
} Append;

// The outcome for a chunk or a request: done, left to Python, or failed with an error set.
typedef enum { TAKEN, LEFT, FAILED } Outcome;

// The fields of AppendRules in kera.broker.serving.write_access, in the order in which read_rules reads them. A test
// compares them with Python's.
#define APPEND_RULES "streams gate replicate record_type run_bytes_max check_payloads producers"

// Read the rules of a call. Returns false, with an error set, if `rules` is malformed.
bool read_rules(Append *call, PyObject *rules);

// Free what a call owns. To be called at its end, whether it succeeded or not.
void close_append(Append *call);

// Copy the header at `call->at`. Returns whether a producer may send such a header and its chunk is complete.
bool read_chunk(const Append *call, uint8_t *header);

// Whether the payload at `call->at` matches its header and can be trusted. Other threads may run meanwhile. Returns
// false for a payload that Python has to judge; an error may be set.
bool is_good_payload(Append *call, const uint8_t *header);

uint32_t chunk_bytes(const uint8_t *header);

// Whether chunks of `bytes` bytes together, the first with this header and the last of `last_bytes` bytes, continue the
// run: they come next, have the same properties, and fit.
bool goes_on(const Append *call, const uint8_t *header, uint32_t bytes, uint32_t last_bytes);

// Whether the maximum timestamp of a chunk needs no closer check: it is not older than what readers were promised, and
// not too far ahead of the clock.
bool is_timely(const Run *run, const uint8_t *header);

// Begin a run whose first chunk has this header, in a segment with room for `bytes` bytes.
Outcome begin_run(Append *call, const uint8_t *header, uint32_t bytes);

// Copy the chunk at `call->at`, which was checked, to the head of the run's segment, advance `call->at` past it, and
// add its status to `statuses`.
bool append_chunk(Append *call, const uint8_t *header, Bytes *statuses);

// Append the chunk at `call->at` to the run or to a new one, and add its status to `statuses`. A chunk that is left
// changes nothing.
Outcome take_chunk(Append *call, Bytes *statuses);

// Write the results of the run into its objects. The head comes last: a reader that sees the new head finds the chunks.
bool end_run(Append *call);

// Intern the attribute names that are used here. Returns -1 if there is no memory.
int append_init(void);

#endif
