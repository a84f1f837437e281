// See progress.h.

#include "progress.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>

#include "attributes.h"
#include "types.h"

static PyTypeObject *streamlet_type, *entry_type, *segment_type;

#define NAMES(name)                                                                                                    \
    name(address) name(count) name(entries) name(frombytes) name(made_by_index) name(producers_in_order) name(row)     \
    name(slot) name(view)

#define AS_MEMBER(name) NAME_##name,
#define AS_TEXT(name) #name,
enum { NAMES(AS_MEMBER) NAMES_COUNT };
static const char *const texts[] = {NAMES(AS_TEXT)};
static PyObject *names[NAMES_COUNT];

#define GET(object, name) PyObject_GetAttr(object, names[NAME_##name])

static void *checked(PyObject *object, PyTypeObject *type)
{
    if (object != NULL && PyObject_TypeCheck(object, type))
        return object;
    if (object != NULL)
        PyErr_Format(PyExc_TypeError, "%R is not part of a log", object);
    return NULL;
}

StreamletProgress *as_streamlet(PyObject *object)
{
    return checked(object, streamlet_type);
}

EntryProgress *as_entry(PyObject *object)
{
    return checked(object, entry_type);
}

SegmentProgress *as_segment(PyObject *object)
{
    return checked(object, segment_type);
}

// -- progress of producers -------------------------------------------------------------------------------------------

// Write a producer's progress into a dict, as a named tuple of `record_type`, unless the dict has it already.
static bool write_reached(PyObject *producers, PyObject *record_type, Reached *reached)
{
    if (!reached->unwritten)
        return true;
    PyTypeObject *type = (PyTypeObject *)record_type;
    PyObject *record = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 2);
    PyObject *producer = PyLong_FromUnsignedLongLong(reached->producer_id);
    PyObject *epoch = PyLong_FromUnsignedLong(reached->epoch);
    PyObject *following = PyLong_FromUnsignedLongLong(reached->following);
    bool good = record != NULL && producer != NULL && epoch != NULL && following != NULL;
    if (good) {
        PyTuple_SetItem(record, 0, Py_NewRef(epoch));
        PyTuple_SetItem(record, 1, Py_NewRef(following));
        good = PyDict_SetItem(producers, producer, record) == 0;
    }
    Py_XDECREF(record);
    Py_XDECREF(producer);
    Py_XDECREF(epoch);
    Py_XDECREF(following);
    reached->unwritten = !good;
    return good;
}

static void keep_type(PyObject **kept, PyObject *record_type)
{
    if (*kept != record_type) {
        PyObject *before = *kept;
        *kept = Py_NewRef(record_type);
        Py_XDECREF(before);
    }
}

// Whether the dict has the producer with this epoch and next sequence, and is small enough not to be kept in order.
static bool is_next(PyObject *streamlet, PyObject *producers, uint64_t producer_id, uint32_t epoch, uint64_t sequence)
{
    uint64_t in_order, known_epoch, following;
    if (!number_of(GET(streamlet, producers_in_order), &in_order) ||
        (uint64_t)PyDict_Size(producers) > in_order)
        return false;
    PyObject *record = value_of(producers, producer_id);
    bool next = record != NULL && PyTuple_Check(record) && PyTuple_Size(record) == 2 &&
                number_of(Py_NewRef(PyTuple_GetItem(record, 0)), &known_epoch) &&
                number_of(Py_NewRef(PyTuple_GetItem(record, 1)), &following) && known_epoch == epoch &&
                following == sequence;
    Py_XDECREF(record);
    return next;
}

// The entry that a producer's chunks go to; NULL: it does not exist yet, or an error is set.
static PyObject *entry_of(PyObject *streamlet, uint64_t producer_id)
{
    PyObject *entries = GET(streamlet, entries), *entry = NULL;
    PyObject *made = entries == NULL ? NULL : GET(entries, made_by_index);
    uint64_t count;
    if (made != NULL && number_of(GET(entries, count), &count) && count > 0)
        entry = value_of(made, producer_id % count);
    Py_XDECREF(made);
    Py_XDECREF(entries);
    return entry;
}

ProducerPlace *find_place(PyObject *object, PyObject *record_type, uint64_t producer_id, uint32_t epoch,
                          uint64_t sequence)
{
    StreamletProgress *streamlet = as_streamlet(object);
    if (streamlet == NULL || streamlet->producers == NULL)
        return NULL;
    ProducerPlace *place = &streamlet->places[producer_id % PLACES];
    const Reached *reached = &place->reached;
    if (place->entry != NULL && reached->producer_id == producer_id)
        return reached->epoch == epoch && reached->following == sequence ? place : NULL;
    if (!is_next(object, streamlet->producers, producer_id, epoch, sequence))
        return NULL;
    PyObject *entry = entry_of(object, producer_id);
    if (entry == NULL || as_entry(entry) == NULL ||
        (place->entry != NULL && !write_reached(streamlet->producers, streamlet->record_type, &place->reached))) {
        Py_XDECREF(entry);
        return NULL;
    }
    keep_type(&streamlet->record_type, record_type);
    PyObject *before = place->entry;
    *place = (ProducerPlace){entry, {.producer_id = producer_id, .following = sequence, .epoch = epoch}};
    Py_XDECREF(before);
    return place;
}

// Write the progress of all remembered producers, and forget them: Python is about to read them, and may change them.
static bool forget_places(StreamletProgress *streamlet)
{
    for (int index = 0; index < PLACES; index++) {
        ProducerPlace *place = &streamlet->places[index];
        if (place->entry == NULL)
            continue;
        if (!write_reached(streamlet->producers, streamlet->record_type, &place->reached))
            return false;
        Py_CLEAR(place->entry);
    }
    return true;
}

// -- a segment ------------------------------------------------------------------------------------------------------

static bool read_address(PyObject *object, SegmentProgress *segment)
{
    PyObject *address = GET(object, address);
    uint64_t entry, segment_id;
    bool good = address != NULL && PyTuple_Check(address) && PyTuple_Size(address) == 5 &&
                number_of(Py_NewRef(PyTuple_GetItem(address, 2)), &entry) &&
                number_of(Py_NewRef(PyTuple_GetItem(address, 3)), &segment->group_id) &&
                number_of(Py_NewRef(PyTuple_GetItem(address, 4)), &segment_id);
    Py_XDECREF(address);
    if (good) {
        segment->entry = (uint32_t)entry;
        segment->segment_id = (uint32_t)segment_id;
    }
    return good;
}

static bool get_buffer(PyObject *object, Py_buffer *buffer)
{
    bool good = object != NULL && PyObject_GetBuffer(object, buffer, PyBUF_WRITABLE) == 0;
    Py_XDECREF(object);
    return good;
}

bool map_segment(PyObject *object)
{
    SegmentProgress *segment = (SegmentProgress *)object;
    if (segment->known)
        return true;
    PyObject *slot = read_address(object, segment) ? GET(object, slot) : NULL;
    bool good = slot != NULL && get_buffer(GET(slot, view), &segment->memory_buffer);
    if (good && !get_buffer(GET(slot, row), &segment->row_buffer)) {
        PyBuffer_Release(&segment->memory_buffer);
        good = false;
    }
    Py_XDECREF(slot);
    if (!good)
        return false;
    segment->memory = segment->memory_buffer.buf;
    segment->memory_bytes = segment->memory_buffer.len > UINT32_MAX ? UINT32_MAX : (uint32_t)segment->memory_buffer.len;
    segment->row = segment->row_buffer.buf;
    segment->known = true;
    return true;
}

bool add_ends(PyObject *chunk_ends, const uint32_t *ends, size_t count)
{
    if (count == 0)
        return true;
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)ends, (Py_ssize_t)(count * sizeof *ends));
    PyObject *done = bytes == NULL || chunk_ends == NULL
                         ? NULL
                         : PyObject_CallMethodObjArgs(chunk_ends, names[NAME_frombytes], bytes, NULL);
    Py_XDECREF(bytes);
    Py_XDECREF(done);
    return done != NULL;
}

static bool write_ends(SegmentProgress *segment)
{
    if (!add_ends(segment->chunk_ends, segment->ends, segment->ends_count))
        return false;
    segment->ends_count = 0;
    return true;
}

bool note_ends(SegmentProgress *segment, const uint32_t *ends, size_t count)
{
    if (count > ENDS_MAX - segment->ends_count && !write_ends(segment))
        return false;
    if (count > ENDS_MAX)
        return add_ends(segment->chunk_ends, ends, count);
    memcpy(segment->ends + segment->ends_count, ends, count * sizeof *ends);
    segment->ends_count += (uint32_t)count;
    return true;
}

static bool note_in_segment(SegmentProgress *segment, PyObject *record_type, const Reached *reached)
{
    Reached *noted = &segment->reached;
    if (noted->unwritten && noted->producer_id != reached->producer_id &&
        !write_reached(segment->producers, segment->record_type, noted))
        return false;
    keep_type(&segment->record_type, record_type);
    *noted = *reached;
    noted->unwritten = true;
    return true;
}

bool note_reached(PyObject *segment, PyObject *object, PyObject *record_type, const Reached *reached)
{
    StreamletProgress *streamlet = (StreamletProgress *)object;
    ProducerPlace *place = &streamlet->places[reached->producer_id % PLACES];
    Reached now = *reached;
    now.unwritten = true;
    if (!note_in_segment((SegmentProgress *)segment, record_type, &now))
        return false;
    if (place->entry == NULL || place->reached.producer_id != now.producer_id)  // Python has read them
        return write_reached(streamlet->producers, record_type, &now);
    place->reached = now;
    return true;
}

// -- attributes ------------------------------------------------------------------------------------------------------

static PyObject *found(PyObject *object, const char *name)
{
    return object != NULL ? Py_NewRef(object) : PyErr_Format(PyExc_AttributeError, "%s", name);
}

static int put(PyObject **attribute, PyObject *object)
{
    if (object == NULL) {
        PyErr_SetString(PyExc_AttributeError, "it cannot be deleted");
        return -1;
    }
    PyObject *before = *attribute;
    *attribute = Py_NewRef(object);
    Py_XDECREF(before);
    return 0;
}

static PyObject *get_chunk_ends(PyObject *self, void *closure)
{
    (void)closure;
    SegmentProgress *segment = (SegmentProgress *)self;
    return write_ends(segment) ? found(segment->chunk_ends, "chunk_ends") : NULL;
}

static int set_chunk_ends(PyObject *self, PyObject *ends, void *closure)
{
    (void)closure;
    ((SegmentProgress *)self)->ends_count = 0;
    return put(&((SegmentProgress *)self)->chunk_ends, ends);
}

static PyObject *get_segment_producers(PyObject *self, void *closure)
{
    (void)closure;
    SegmentProgress *segment = (SegmentProgress *)self;
    return write_reached(segment->producers, segment->record_type, &segment->reached)
               ? found(segment->producers, "producers")
               : NULL;
}

static int set_producers(PyObject **attribute, PyObject *producers)
{
    if (producers != NULL && !PyDict_Check(producers)) {
        PyErr_Format(PyExc_TypeError, "the producers are in a dict, not in %R", producers);
        return -1;
    }
    return put(attribute, producers);
}

static int set_segment_producers(PyObject *self, PyObject *producers, void *closure)
{
    (void)closure;
    ((SegmentProgress *)self)->reached.unwritten = false;
    return set_producers(&((SegmentProgress *)self)->producers, producers);
}

static PyObject *get_streamlet_producers(PyObject *self, void *closure)
{
    (void)closure;
    StreamletProgress *streamlet = (StreamletProgress *)self;
    return forget_places(streamlet) ? found(streamlet->producers, "producers") : NULL;
}

static int set_streamlet_producers(PyObject *self, PyObject *producers, void *closure)
{
    (void)closure;
    StreamletProgress *streamlet = (StreamletProgress *)self;
    for (int index = 0; index < PLACES; index++)
        Py_CLEAR(streamlet->places[index].entry);
    return set_producers(&streamlet->producers, producers);
}

// -- types ----------------------------------------------------------------------------------------------------------

static int clear_segment(PyObject *self)
{
    SegmentProgress *segment = (SegmentProgress *)self;
    segment->ends_count = 0;
    segment->reached.unwritten = false;
    Py_CLEAR(segment->chunk_ends);
    Py_CLEAR(segment->producers);
    Py_CLEAR(segment->record_type);
    return 0;
}

static int traverse_segment(PyObject *self, visitproc visit, void *arg)
{
    SegmentProgress *segment = (SegmentProgress *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(segment->chunk_ends);
    Py_VISIT(segment->producers);
    Py_VISIT(segment->record_type);
    return 0;
}

static void let_go_of_segment(PyObject *self)
{
    SegmentProgress *segment = (SegmentProgress *)self;
    PyObject_GC_UnTrack(self);
    clear_segment(self);
    if (segment->known) {
        PyBuffer_Release(&segment->memory_buffer);
        PyBuffer_Release(&segment->row_buffer);
    }
    free_object(self);
}

static int clear_entry(PyObject *self)
{
    Py_CLEAR(((EntryProgress *)self)->tail);
    Py_CLEAR(((EntryProgress *)self)->waiters);
    return 0;
}

static int traverse_entry(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((EntryProgress *)self)->tail);
    Py_VISIT(((EntryProgress *)self)->waiters);
    return 0;
}

static void let_go_of_entry(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    clear_entry(self);
    free_object(self);
}

static int clear_streamlet(PyObject *self)
{
    StreamletProgress *streamlet = (StreamletProgress *)self;
    for (int index = 0; index < PLACES; index++)
        Py_CLEAR(streamlet->places[index].entry);
    Py_CLEAR(streamlet->first_epochs);
    Py_CLEAR(streamlet->producers);
    Py_CLEAR(streamlet->record_type);
    return 0;
}

static int traverse_streamlet(PyObject *self, visitproc visit, void *arg)
{
    StreamletProgress *streamlet = (StreamletProgress *)self;
    Py_VISIT(Py_TYPE(self));
    for (int index = 0; index < PLACES; index++)
        Py_VISIT(streamlet->places[index].entry);
    Py_VISIT(streamlet->first_epochs);
    Py_VISIT(streamlet->producers);
    Py_VISIT(streamlet->record_type);
    return 0;
}

static void let_go_of_streamlet(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    clear_streamlet(self);
    free_object(self);
}

static PyTypeObject *add_type(PyObject *module, const char *name, size_t size, PyType_Slot *slots)
{
    PyTypeObject *type = make_type(name, size, Py_TPFLAGS_BASETYPE, slots);
    if (type != NULL && PyModule_AddObjectRef(module, strrchr(name, '.') + 1, (PyObject *)type) != 0)
        Py_CLEAR(type);
    return type;
}

#define OF(type, kind, field) {#field, kind, offsetof(type, field), 0, NULL}

int progress_init(PyObject *module)
{
    static PyMemberDef of_segment[] = {
        OF(SegmentProgress, T_ULONGLONG, head),
        OF(SegmentProgress, T_ULONGLONG, durable_head),
        OF(SegmentProgress, T_ULONGLONG, record_count),
        OF(SegmentProgress, T_LONGLONG, min_timestamp_us),
        OF(SegmentProgress, T_LONGLONG, max_timestamp_us),
        OF(SegmentProgress, T_LONGLONG, newest_us),
        OF(SegmentProgress, T_LONGLONG, touched_ms),
        OF(SegmentProgress, T_BOOL, closed),
        OF(SegmentProgress, T_BOOL, dropped),
        {0},
    };
    static PyMemberDef of_entry[] = {
        OF(EntryProgress, T_ULONGLONG, next_record),
        OF(EntryProgress, T_LONGLONG, promised_us),
        OF(EntryProgress, T_OBJECT_EX, tail),
        OF(EntryProgress, T_OBJECT_EX, waiters),
        {0},
    };
    static PyMemberDef of_streamlet[] = {
        OF(StreamletProgress, T_ULONGLONG, broker_epoch),
        OF(StreamletProgress, T_ULONGLONG, bytes_appended),
        OF(StreamletProgress, T_ULONGLONG, records_appended),
        OF(StreamletProgress, T_ULONGLONG, timestamp_ahead_us),
        OF(StreamletProgress, T_BOOL, takes_chunks),
        OF(StreamletProgress, T_OBJECT_EX, first_epochs),
        {0},
    };
    static PyGetSetDef by_segment[] = {
        {"chunk_ends", get_chunk_ends, set_chunk_ends, NULL, NULL},
        {"producers", get_segment_producers, set_segment_producers, NULL, NULL},
        {0},
    };
    static PyGetSetDef by_streamlet[] = {
        {"producers", get_streamlet_producers, set_streamlet_producers, NULL, NULL},
        {0},
    };
    static PyType_Slot segment_slots[] = {
        {Py_tp_dealloc, let_go_of_segment}, {Py_tp_traverse, traverse_segment}, {Py_tp_clear, clear_segment},
        {Py_tp_members, of_segment},        {Py_tp_getset, by_segment},         {0, NULL},
    };
    static PyType_Slot entry_slots[] = {
        {Py_tp_dealloc, let_go_of_entry}, {Py_tp_traverse, traverse_entry}, {Py_tp_clear, clear_entry},
        {Py_tp_members, of_entry},        {0, NULL},
    };
    static PyType_Slot streamlet_slots[] = {
        {Py_tp_dealloc, let_go_of_streamlet}, {Py_tp_traverse, traverse_streamlet}, {Py_tp_clear, clear_streamlet},
        {Py_tp_members, of_streamlet},        {Py_tp_getset, by_streamlet},         {0, NULL},
    };
    if (intern_names(names, texts, NAMES_COUNT) != 0)
        return -1;
    segment_type = add_type(module, "kera.core._native.SegmentProgress", sizeof(SegmentProgress), segment_slots);
    entry_type = add_type(module, "kera.core._native.EntryProgress", sizeof(EntryProgress), entry_slots);
    streamlet_type =
        add_type(module, "kera.core._native.StreamletProgress", sizeof(StreamletProgress), streamlet_slots);
    return segment_type == NULL || entry_type == NULL || streamlet_type == NULL ? -1 : 0;
}
