// See send.h.
//
// Once it has looked up a chunk, this code creates no objects that may start a garbage collection: a collection may run
// any Python code, which may close the chunk.

#include "send.h"

#include <stddef.h>
#include <structmember.h>
#include <time.h>

#include "key_hash.h"
#include "twin.h"
#include "types.h"

// As in kera/client/producing/open_chunks/records.py.
#define RECORD_OVERHEAD_BYTES 32
#define KEY_OVERHEAD_BYTES 8

typedef struct {
    PyObject_HEAD
    Py_ssize_t left_bytes;
} Room;

typedef struct {
    PyObject_HEAD
    PyObject *values, *times_s, *keys, *headers;
    Py_ssize_t size;
    double epoch_end_s;
} Gathered;

typedef struct {
    PyObject_HEAD
    PyObject *accumulator;
    Py_ssize_t index;
} Accepted;

typedef struct {
    PyObject_HEAD
    PyObject *twin, *filling, *open_chunks, *room, *accepted;
    Py_ssize_t chunk_bytes_max;
    const Partitioner *partitioner;
} Sender;

static PyTypeObject *room_type, *gathered_type, *accepted_type, *sender_type;

// -- a record -------------------------------------------------------------------------------------------------------

// A record that may be accepted, and the objects that are created for it beforehand.
typedef struct {
    PyObject *stream, *value;
    PyObject *key;  // NULL: there is none
    PyObject *keys, *time_s, *accepted;
    double at_s;
    Py_ssize_t size;
} Record;

// Whether a record has only a stream, a value and at most one key.
static bool read_record(PyObject *const *args, Py_ssize_t count, PyObject *names, Record *record)
{
    *record = (Record){0};
    if (count != 2 || !PyUnicode_CheckExact(args[0]) || !PyBytes_CheckExact(args[1]))
        return false;
    record->stream = args[0];
    record->value = args[1];
    record->size = RECORD_OVERHEAD_BYTES + PyBytes_Size(args[1]);
    if (names == NULL || PyTuple_Size(names) == 0)
        return true;
    if (PyTuple_Size(names) != 1 || PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), "keys") != 0 ||
        !PyBytes_CheckExact(args[2]))
        return false;
    record->key = args[2];
    record->size += KEY_OVERHEAD_BYTES + PyBytes_Size(args[2]);
    return true;
}

// The same as time.time().
static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)((int64_t)now.tv_sec * 1000000000 + now.tv_nsec) / 1e9;
}

static bool make_rest(const Sender *sender, Record *record)
{
    PyTypeObject *type = (PyTypeObject *)sender->accepted;
    record->accepted = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    record->at_s = now_s();
    record->time_s = PyFloat_FromDouble(record->at_s);
    if (record->key != NULL && (record->keys = PyTuple_New(1)) != NULL)
        PyTuple_SetItem(record->keys, 0, Py_NewRef(record->key));
    return record->accepted != NULL && record->time_s != NULL && (record->key == NULL || record->keys != NULL);
}

static void let_go_of_rest(Record *record)
{
    Py_XDECREF(record->accepted);
    Py_XDECREF(record->time_s);
    Py_XDECREF(record->keys);
}

// -- the chunk of a record -------------------------------------------------------------------------------------------

// The open chunk of the streamlet that the key determines. NULL: there is none, or the key determines no streamlet.
static PyObject *chunk_of_key(const Sender *sender, const Record *record)
{
    PyObject *of_stream = PyDict_GetItemWithError(sender->open_chunks, record->stream);
    if (of_stream == NULL || !PyTuple_Check(of_stream) || PyTuple_Size(of_stream) != 2)
        return NULL;
    unsigned long streamlets = PyLong_AsUnsignedLong(PyTuple_GetItem(of_stream, 0));
    PyObject *chunks = PyTuple_GetItem(of_stream, 1);
    if (streamlets == 0 || PyErr_Occurred() != NULL || !PyDict_CheckExact(chunks))
        return NULL;
    const Partitioner *partitioner = sender->partitioner;
    size_t size = (size_t)PyBytes_Size(record->key);
    if (size == 0 && !partitioner->takes_empty)
        return NULL;
    uint32_t hash = partitioner->hash((const uint8_t *)PyBytes_AsString(record->key), size) & partitioner->mask;
    PyObject *streamlet = PyLong_FromUnsignedLong(hash % streamlets);
    PyObject *chunk = streamlet == NULL ? NULL : PyDict_GetItemWithError(chunks, streamlet);
    Py_XDECREF(streamlet);
    return chunk;
}

static bool is_list_of(PyObject *object, Py_ssize_t count)
{
    return object != NULL && PyList_CheckExact(object) && PyList_Size(object) == count;
}

// Whether a chunk has the same kinds of lists as this record, has not expired, and would not be full with the record,
// and whether the record fits into the room.
static bool takes(const Sender *sender, const Gathered *chunk, const Record *record)
{
    if (chunk->values == NULL || !PyList_CheckExact(chunk->values) || chunk->headers != Py_None)
        return false;
    Py_ssize_t count = PyList_Size(chunk->values);
    const Room *room = (const Room *)sender->room;
    return is_list_of(chunk->times_s, count) &&
           (record->key == NULL ? chunk->keys == Py_None : is_list_of(chunk->keys, count)) &&
           record->at_s < chunk->epoch_end_s &&
           chunk->size < sender->chunk_bytes_max && record->size < sender->chunk_bytes_max - chunk->size &&
           record->size <= room->left_bytes;
}

// Append a record to a chunk. Changes nothing on failure.
static bool append(Gathered *chunk, const Record *record)
{
    PyObject *lists[] = {chunk->values, chunk->times_s, chunk->keys};
    PyObject *items[] = {record->value, record->time_s, record->keys};
    Py_ssize_t count = PyList_Size(chunk->values);
    int needed = record->key == NULL ? 2 : 3, done = 0;
    while (done < needed && PyList_Append(lists[done], items[done]) == 0)
        done++;
    if (done == needed)
        return true;
    while (done-- > 0)
        PyList_SetSlice(lists[done], count, count + 1, NULL);
    return false;
}

static PyObject *accept(const Sender *sender, const Record *record)
{
    PyObject *found = record->key == NULL ? PyDict_GetItemWithError(sender->filling, record->stream)
                                          : chunk_of_key(sender, record);
    if (found == NULL || !PyObject_TypeCheck(found, gathered_type))
        return NULL;
    Gathered *chunk = (Gathered *)found;
    if (!takes(sender, chunk, record) || !append(chunk, record))
        return NULL;
    chunk->size += record->size;
    ((Room *)sender->room)->left_bytes -= record->size;
    Accepted *accepted = (Accepted *)record->accepted;
    accepted->accumulator = Py_NewRef(found);
    accepted->index = PyList_Size(chunk->values) - 1;
    return Py_NewRef(record->accepted);
}

static PyObject *send(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    const Sender *sender = (const Sender *)self;
    Record record;
    PyObject *accepted = NULL;
    if (read_record(args, count, names, &record)) {
        if (make_rest(sender, &record))
            accepted = accept(sender, &record);
        let_go_of_rest(&record);
    }
    if (accepted == NULL && sender->twin == NULL)
        return PyErr_Format(PyExc_ReferenceError, "the producer is gone");  // garbage collection has cleared it
    return accepted != NULL ? accepted : ask_twin(sender->twin, args, count, names);
}

const char sender_doc[] = PyDoc_STR(
    "sender(twin, accepted, filling, open_chunks, room, chunk_bytes_max, partitioner): `Producer.send` of a producer,\n"
    "which calls `twin` for every unusual record. It returns objects of the type `accepted`. `partitioner`: the name\n"
    "of the partitioner. See kera.client.producing.open_chunks.records.");

PyObject *sender(PyObject *module, PyObject *args)
{
    static PyMethodDef method = {
        "send", (PyCFunction)(void (*)(void))send, METH_FASTCALL | METH_KEYWORDS, NULL,
    };
    (void)module;
    PyObject *twin, *accepted, *filling, *open_chunks, *room;
    Py_ssize_t chunk_bytes_max;
    const char *name;
    if (!PyArg_ParseTuple(args, "OOO!O!O!ns", &twin, &accepted, &PyDict_Type, &filling, &PyDict_Type, &open_chunks,
                          room_type, &room, &chunk_bytes_max, &name))
        return NULL;
    const Partitioner *partitioner = partitioner_named(name);
    if (partitioner == NULL)
        return PyErr_Format(PyExc_LookupError, "there is no partitioner %s", name);
    if (!PyType_Check(accepted) || !PyType_IsSubtype((PyTypeObject *)accepted, accepted_type))
        return PyErr_Format(PyExc_TypeError, "%R is not the type of an accepted record", accepted);
    Sender *made = (Sender *)((allocfunc)PyType_GetSlot(sender_type, Py_tp_alloc))(sender_type, 0);
    if (made == NULL)
        return NULL;
    made->twin = Py_NewRef(twin);
    made->accepted = Py_NewRef(accepted);
    made->filling = Py_NewRef(filling);
    made->open_chunks = Py_NewRef(open_chunks);
    made->room = Py_NewRef(room);
    made->chunk_bytes_max = chunk_bytes_max;
    made->partitioner = partitioner;
    PyObject *function = PyCFunction_NewEx(&method, (PyObject *)made, NULL);
    Py_DECREF(made);
    return function;
}

// -- types ----------------------------------------------------------------------------------------------------------

static int clear_gathered(PyObject *self)
{
    Gathered *chunk = (Gathered *)self;
    Py_CLEAR(chunk->values);
    Py_CLEAR(chunk->times_s);
    Py_CLEAR(chunk->keys);
    Py_CLEAR(chunk->headers);
    return 0;
}

static int traverse_gathered(PyObject *self, visitproc visit, void *arg)
{
    Gathered *chunk = (Gathered *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(chunk->values);
    Py_VISIT(chunk->times_s);
    Py_VISIT(chunk->keys);
    Py_VISIT(chunk->headers);
    return 0;
}

static void let_go_of_gathered(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    clear_gathered(self);
    free_object(self);
}

static int clear_accepted(PyObject *self)
{
    Py_CLEAR(((Accepted *)self)->accumulator);
    return 0;
}

static int traverse_accepted(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((Accepted *)self)->accumulator);
    return 0;
}

static void let_go_of_accepted(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    clear_accepted(self);
    free_object(self);
}

static int clear_sender(PyObject *self)
{
    Sender *sender = (Sender *)self;
    Py_CLEAR(sender->twin);
    return 0;
}

static int traverse_sender(PyObject *self, visitproc visit, void *arg)
{
    Sender *sender = (Sender *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(sender->twin);
    Py_VISIT(sender->accepted);
    Py_VISIT(sender->filling);
    Py_VISIT(sender->open_chunks);
    Py_VISIT(sender->room);
    return 0;
}

static void let_go_of_sender(PyObject *self)
{
    Sender *sender = (Sender *)self;
    PyObject_GC_UnTrack(self);
    Py_XDECREF(sender->twin);
    Py_XDECREF(sender->accepted);
    Py_XDECREF(sender->filling);
    Py_XDECREF(sender->open_chunks);
    Py_XDECREF(sender->room);
    free_object(self);
}

static int traverse_room(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static void let_go_of_room(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    free_object(self);
}

int send_init(PyObject *module)
{
    static PyMemberDef of_room[] = {{"left_bytes", T_PYSSIZET, offsetof(Room, left_bytes), 0, NULL}, {0}};
    static PyMemberDef of_gathered[] = {
        {"values", T_OBJECT_EX, offsetof(Gathered, values), 0, NULL},
        {"times_s", T_OBJECT_EX, offsetof(Gathered, times_s), 0, NULL},
        {"keys", T_OBJECT_EX, offsetof(Gathered, keys), 0, NULL},
        {"headers", T_OBJECT_EX, offsetof(Gathered, headers), 0, NULL},
        {"size", T_PYSSIZET, offsetof(Gathered, size), 0, NULL},
        {"epoch_end_s", T_DOUBLE, offsetof(Gathered, epoch_end_s), 0, NULL},
        {0},
    };
    static PyMemberDef of_accepted[] = {
        {"_accumulator", T_OBJECT_EX, offsetof(Accepted, accumulator), 0, NULL},
        {"_index", T_PYSSIZET, offsetof(Accepted, index), 0, NULL},
        {0},
    };
    static PyType_Slot room_slots[] = {
        {Py_tp_dealloc, let_go_of_room}, {Py_tp_traverse, traverse_room}, {Py_tp_members, of_room}, {0, NULL},
    };
    static PyType_Slot gathered_slots[] = {
        {Py_tp_dealloc, let_go_of_gathered},
        {Py_tp_traverse, traverse_gathered},
        {Py_tp_clear, clear_gathered},
        {Py_tp_members, of_gathered},
        {0, NULL},
    };
    static PyType_Slot accepted_slots[] = {
        {Py_tp_dealloc, let_go_of_accepted},
        {Py_tp_traverse, traverse_accepted},
        {Py_tp_clear, clear_accepted},
        {Py_tp_members, of_accepted},
        {0, NULL},
    };
    static PyType_Slot sender_slots[] = {
        {Py_tp_dealloc, let_go_of_sender},
        {Py_tp_traverse, traverse_sender},
        {Py_tp_clear, clear_sender},
        {0, NULL},
    };
    room_type = make_type("kera.core._native.Room", sizeof(Room), Py_TPFLAGS_BASETYPE, room_slots);
    gathered_type = make_type("kera.core._native.Gathered", sizeof(Gathered), Py_TPFLAGS_BASETYPE, gathered_slots);
    accepted_type = make_type("kera.core._native.Accepted", sizeof(Accepted), Py_TPFLAGS_BASETYPE, accepted_slots);
    sender_type =
        make_type("kera.core._native.Sender", sizeof(Sender), Py_TPFLAGS_DISALLOW_INSTANTIATION, sender_slots);
    if (room_type == NULL || gathered_type == NULL || accepted_type == NULL || sender_type == NULL)
        return -1;
    return PyModule_AddObjectRef(module, "Room", (PyObject *)room_type) ||
                   PyModule_AddObjectRef(module, "Gathered", (PyObject *)gathered_type) ||
                   PyModule_AddObjectRef(module, "Accepted", (PyObject *)accepted_type)
               ? -1
               : 0;
}
