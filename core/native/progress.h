// What appending changes of a streamlet, an entry and a segment: bases of the classes of kera.broker.log, which have
// all else. So numbers are where both languages find them, and an append to a place that is known writes nothing but
// these.
//
// Python finds what it always finds. Two things are written down late, each before Python looks at it: where the last
// chunks of a segment end, and how far producers have got. Where a producer's chunks go is remembered (a place) until
// Python looks at the producers of the streamlet: it may change them.
#ifndef KERA_PROGRESS_H
#define KERA_PROGRESS_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

// Producers of a streamlet that are remembered, and ends of a segment's chunks that wait.
#define PLACES 4
#define ENDS_MAX 16

// How far a producer has got.
typedef struct {
    uint64_t producer_id, following;
    uint32_t epoch;
    bool unwritten;  // the dict of Python has an older one, or none
} Reached;

typedef struct {
    PyObject_HEAD
    uint64_t head, durable_head, record_count;
    int64_t min_timestamp_us, max_timestamp_us, newest_us, touched_ms;
    char closed, dropped;
    bool known;  // the fields from here to `row`, which do not change
    uint32_t entry, segment_id, memory_bytes;
    uint64_t group_id;
    uint8_t *memory;
    uint32_t *row;
    uint32_t ends_count;
    uint32_t ends[ENDS_MAX];
    Reached reached;
    PyObject *chunk_ends, *producers, *record_type;
    Py_buffer memory_buffer, row_buffer;
} SegmentProgress;

typedef struct {
    PyObject_HEAD
    uint64_t next_record;
    int64_t promised_us;
    PyObject *tail, *waiters;
} EntryProgress;

// Where the next chunk of a producer goes.
typedef struct {
    PyObject *entry;  // NULL: nothing is remembered here
    Reached reached;
} ProducerPlace;

typedef struct {
    PyObject_HEAD
    uint64_t broker_epoch, bytes_appended, records_appended;
    uint64_t timestamp_ahead_us;  // 0: no limit
    char takes_chunks;
    PyObject *first_epochs, *producers, *record_type;
    ProducerPlace places[PLACES];
} StreamletProgress;

// Those of the objects of Python; NULL and an error if it is none.
StreamletProgress *as_streamlet(PyObject *object);
EntryProgress *as_entry(PyObject *object);
SegmentProgress *as_segment(PyObject *object);

// The place where this producer's chunks go, if it is known that `sequence` comes next; NULL, perhaps with an error.
ProducerPlace *find_place(PyObject *streamlet, PyObject *record_type, uint64_t producer_id, uint32_t epoch,
                          uint64_t sequence);

// What does not change of an open segment, its memory above all. False: an error.
bool map_segment(PyObject *segment);

// More ends behind those in an array of Python's. False: an error.
bool add_ends(PyObject *chunk_ends, const uint32_t *ends, size_t count);

// Note where chunks of a segment end. False: an error, and nothing has changed.
bool note_ends(SegmentProgress *segment, const uint32_t *ends, size_t count);

// Note how far a producer has got in a segment and in its streamlet. False: an error.
bool note_reached(PyObject *segment, PyObject *streamlet, PyObject *record_type, const Reached *reached);

// Adds the types to the module. 0, or -1 and an error.
int progress_init(PyObject *module);

#endif
