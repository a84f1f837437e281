// The state of a streamlet, an entry and a segment that appending changes. These types are the bases of the classes in
// kera.broker.log, which have everything else. So both languages find the numbers, and an append to a remembered place
// writes only these.
//
// Python sees no difference. Two things are written into Python's containers only when Python reads them: where the
// last chunks of a segment end, and the progress of producers. The place where a producer's chunks go is remembered
// until Python reads the producers of the streamlet, as it may change them.
#ifndef KERA_PROGRESS_H
#define KERA_PROGRESS_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

// How many producers a streamlet remembers, and how many ends of chunks a segment keeps before it writes them.
#define PLACES 4
#define ENDS_MAX 16

// The progress of a producer.
typedef struct {
    uint64_t producer_id, following;
    uint32_t epoch;
    bool unwritten;  // Python's dict has an older state, or none
} Reached;

typedef struct {
    PyObject_HEAD
    uint64_t head, durable_head, record_count;
    int64_t min_timestamp_us, max_timestamp_us, newest_us, touched_ms;
    char closed, dropped;
    bool known;  // whether the fields from here to `row` are set; they never change
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

// The place where the next chunk of a producer goes.
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

// Cast Python objects to these types. They return NULL for NULL, and NULL with an error set for an object of another
// type.
StreamletProgress *as_streamlet(PyObject *object);
EntryProgress *as_entry(PyObject *object);
SegmentProgress *as_segment(PyObject *object);

// The place where this producer's chunks go, if `sequence` is known to come next. Otherwise NULL; an error may be set.
ProducerPlace *find_place(PyObject *streamlet, PyObject *record_type, uint64_t producer_id, uint32_t epoch,
                          uint64_t sequence);

// Set the fields of an open segment that never change, above all its memory. Returns false on an error.
bool map_segment(PyObject *segment);

// Append ends of chunks to a Python array. Returns false on an error.
bool add_ends(PyObject *chunk_ends, const uint32_t *ends, size_t count);

// Note where chunks of a segment end. Returns false, and changes nothing, on an error.
bool note_ends(SegmentProgress *segment, const uint32_t *ends, size_t count);

// Note the progress of a producer in a segment and in its streamlet. Returns false on an error.
bool note_reached(PyObject *segment, PyObject *streamlet, PyObject *record_type, const Reached *reached);

// Add the types to the module. Returns 0, or -1 with an error set.
int progress_init(PyObject *module);

#endif
