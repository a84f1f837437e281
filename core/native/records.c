// See records.h.

#include "records.h"

#include "capsules.h"

#define FIELDS 10
#define COLUMNS 4
enum { TIMESTAMP, KEYS, VALUE, HEADERS };

// A batch, which its capsules keep alive, and how many of its rows were returned.
typedef struct {
    PyObject_HEAD
    PyObject *capsules, *type, *stream, *streamlet, *entry, *no_headers;
    struct ArrowArray *const *columns;
    int64_t first_row;  // the index of the batch's first row in its columns
    int64_t next, count;
    uint64_t first;  // ordinal of the first row
} Records;

static PyTypeObject *records_type;
static PyObject *pairs_name;  // the name of the attribute of headers that has their pairs

// -- values of columns -----------------------------------------------------------------------------------------------

static bool is_null(const struct ArrowArray *array, int64_t index)
{
    const uint8_t *bits = array->buffers[0];
    int64_t at = array->offset + index;
    return bits != NULL && !(bits[at / 8] >> at % 8 & 1);
}

static const int32_t *places_of(const struct ArrowArray *array)
{
    return (const int32_t *)array->buffers[1] + array->offset;
}

// Whether offsets ascend from 0 or more up to at most `most`.
static bool are_places(const struct ArrowArray *array, int64_t most)
{
    if (array->buffers[1] == NULL)
        return array->length == 0;
    const int32_t *places = places_of(array);
    bool good = places[0] >= 0 && places[array->length] <= most;
    for (int64_t index = 0; index < array->length; index++)
        good &= places[index] <= places[index + 1];
    return good;
}

static PyObject *bytes_at(const struct ArrowArray *array, int64_t index)
{
    if (is_null(array, index))
        return Py_NewRef(Py_None);
    const int32_t *places = places_of(array);
    const char *data = array->buffers[2];
    int32_t start = places[index], size = places[index + 1] - start;
    return PyBytes_FromStringAndSize(size > 0 ? data + start : "", size);
}

static PyObject *text_at(const struct ArrowArray *array, int64_t index)
{
    const int32_t *places = places_of(array);
    const char *data = array->buffers[2];
    int32_t start = places[index], size = places[index + 1] - start;
    return PyUnicode_DecodeUTF8(size > 0 ? data + start : "", size, NULL);
}

static PyObject *keys_at(const struct ArrowArray *lists, int64_t index)
{
    if (is_null(lists, index))
        return PyTuple_New(0);
    const int32_t *places = places_of(lists);
    int32_t start = places[index], count = places[index + 1] - start;
    PyObject *keys = PyTuple_New(count);
    for (int32_t key = 0; keys != NULL && key < count; key++) {
        PyObject *found = bytes_at(lists->children[0], start + key);
        if (found == NULL)
            Py_CLEAR(keys);
        else
            PyTuple_SetItem(keys, key, found);
    }
    return keys;
}

// A header as a pair of name and value.
static PyObject *header_at(const struct ArrowArray *items, int64_t at)
{
    PyObject *name = text_at(items->children[0], items->offset + at);
    PyObject *content = bytes_at(items->children[1], items->offset + at);
    PyObject *pair = name == NULL || content == NULL ? NULL : PyTuple_Pack(2, name, content);
    Py_XDECREF(name);
    Py_XDECREF(content);
    return pair;
}

static PyObject *headers_at(const struct ArrowArray *maps, int64_t index, PyObject *no_headers)
{
    const int32_t *places = places_of(maps);
    if (is_null(maps, index) || places[index] == places[index + 1])
        return Py_NewRef(no_headers);
    int32_t start = places[index], count = places[index + 1] - start;
    PyObject *pairs = PyTuple_New(count);
    for (int32_t at = 0; pairs != NULL && at < count; at++) {
        PyObject *pair = header_at(maps->children[0], start + at);
        if (pair == NULL)
            Py_CLEAR(pairs);
        else
            PyTuple_SetItem(pairs, at, pair);
    }
    PyTypeObject *type = Py_TYPE(no_headers);
    PyObject *headers = pairs == NULL ? NULL : ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (headers != NULL && PyObject_SetAttr(headers, pairs_name, pairs) != 0)
        Py_CLEAR(headers);
    Py_XDECREF(pairs);
    return headers;
}

static PyObject *time_at(const struct ArrowArray *times, int64_t index)
{
    return PyLong_FromLongLong(((const int64_t *)times->buffers[1])[times->offset + index]);
}

// -- records --------------------------------------------------------------------------------------------------------

static PyObject *next_record(PyObject *self)
{
    Records *records = (Records *)self;
    if (records->next >= records->count)
        return NULL;
    int64_t at = records->next++, row = records->first_row + at;  // now: the code below may run any Python code
    PyTypeObject *type = (PyTypeObject *)records->type;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *keys = keys_at(records->columns[KEYS], row);
    PyObject *record = keys == NULL ? NULL : allocate(type, FIELDS);
    if (record == NULL) {
        Py_XDECREF(keys);
        return NULL;
    }
    PyObject *fields[FIELDS] = {
        Py_NewRef(records->stream),
        Py_NewRef(records->streamlet),
        Py_NewRef(records->entry),
        PyLong_FromUnsignedLongLong(records->first + (uint64_t)at),
        time_at(records->columns[TIMESTAMP], row),
        Py_NewRef(PyTuple_Size(keys) > 0 ? PyTuple_GetItem(keys, 0) : Py_None),
        keys,
        bytes_at(records->columns[VALUE], row),
        headers_at(records->columns[HEADERS], row, records->no_headers),
        Py_NewRef(Py_None),
    };
    bool good = true;
    for (int field = 0; field < FIELDS; field++) {
        good &= fields[field] != NULL;
        PyTuple_SetItem(record, field, fields[field]);
    }
    if (!good) {
        Py_DECREF(record);
        return NULL;
    }
    return record;
}

static bool has_format(const struct ArrowSchema *schema, const char *format, int64_t children)
{
    return strcmp(schema->format, format) == 0 && schema->n_children == children && schema->dictionary == NULL;
}

// Whether the columns are those of the default schema in kera/core/format/schema.py.
static bool are_default(const struct ArrowSchema *schema)
{
    if (schema->n_children != COLUMNS)
        return false;
    struct ArrowSchema *const *columns = schema->children;
    if (!has_format(columns[TIMESTAMP], "tsu:UTC", 0) || !has_format(columns[KEYS], "+l", 1) ||
        !has_format(columns[KEYS]->children[0], "z", 0) || !has_format(columns[VALUE], "z", 0) ||
        !has_format(columns[HEADERS], "+m", 1) || !has_format(columns[HEADERS]->children[0], "+s", 2))
        return false;
    struct ArrowSchema *const *items = columns[HEADERS]->children[0]->children;
    return has_format(items[0], "u", 0) && has_format(items[1], "z", 0);
}

// Whether the columns have all rows, and all offsets are valid, as far as Arrow's arrays allow to check it: they do not
// tell where the bytes of a buffer end.
static bool are_whole(const struct ArrowArray *batch)
{
    struct ArrowArray *const *columns = batch->children;
    for (int column = 0; column < COLUMNS; column++)
        if (columns[column]->length < batch->offset + batch->length)
            return false;
    const struct ArrowArray *times = columns[TIMESTAMP], *keys = columns[KEYS], *maps = columns[HEADERS];
    const struct ArrowArray *key = keys->children[0], *items = maps->children[0];
    const struct ArrowArray *name = items->children[0], *content = items->children[1];
    int64_t items_end = items->offset + items->length;
    return times->buffers[0] == NULL && name->buffers[0] == NULL && are_places(columns[VALUE], INT32_MAX) &&
           are_places(keys, key->length) && are_places(key, INT32_MAX) && are_places(maps, items->length) &&
           name->length >= items_end && content->length >= items_end && are_places(name, INT32_MAX) &&
           are_places(content, INT32_MAX);
}

PyObject *new_records(PyTypeObject *type, PyObject *const *args)
{
    uint64_t first = PyLong_AsUnsignedLongLong(args[4]);
    if (!PyUnicode_CheckExact(args[1]) || (first == UINT64_MAX && PyErr_Occurred() != NULL))
        return NULL;
    PyObject *capsules = PyObject_CallMethod(args[0], "__arrow_c_array__", NULL);
    struct ArrowSchema *schema;
    struct ArrowArray *batch;
    allocfunc allocate = (allocfunc)PyType_GetSlot(records_type, Py_tp_alloc);
    Records *records = NULL;
    if (open_batch(capsules, &schema, &batch) && are_default(schema) && are_whole(batch))
        records = (Records *)allocate(records_type, 0);
    if (records == NULL) {
        Py_XDECREF(capsules);
        return NULL;
    }
    records->capsules = capsules;
    records->type = Py_NewRef((PyObject *)type);
    records->stream = Py_NewRef(args[1]);
    records->streamlet = Py_NewRef(args[2]);
    records->entry = Py_NewRef(args[3]);
    records->no_headers = Py_NewRef(args[5]);
    records->columns = batch->children;
    records->first_row = batch->offset;
    records->count = batch->length;
    records->first = first;
    return (PyObject *)records;
}

// -- the type -------------------------------------------------------------------------------------------------------

static void let_go(PyObject *self)
{
    Records *records = (Records *)self;
    PyTypeObject *type = Py_TYPE(self);
    freefunc free_object = (freefunc)PyType_GetSlot(type, Py_tp_free);
    Py_XDECREF(records->capsules);
    Py_XDECREF(records->type);
    Py_XDECREF(records->stream);
    Py_XDECREF(records->streamlet);
    Py_XDECREF(records->entry);
    Py_XDECREF(records->no_headers);
    free_object(self);
    Py_DECREF(type);
}

int records_init(void)
{
    static PyType_Slot slots[] = {
        {Py_tp_dealloc, let_go},
        {Py_tp_iter, PyObject_SelfIter},
        {Py_tp_iternext, next_record},
        {0, NULL},
    };
    static PyType_Spec spec = {
        .name = "kera.core._native.Records",
        .basicsize = sizeof(Records),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = slots,
    };
    records_type = (PyTypeObject *)PyType_FromSpec(&spec);
    pairs_name = PyUnicode_InternFromString("_pairs");
    return records_type == NULL || pairs_name == NULL ? -1 : 0;
}
