// See one_by_one.h.

#include "one_by_one.h"

#include <stdbool.h>
#include <stddef.h>

// What is awaited for a record that is at hand: it is its own iterator, and has the record until that is taken.
typedef struct {
    PyObject_HEAD
    PyObject *record;
} AtHand;

typedef struct {
    PyObject_HEAD
    PyObject *more, *records;
    PyObject *spare;  // an AtHand, to be used again if nobody else has it
} OneByOne;

static PyTypeObject *at_hand_type;

// As Py_XSETREF, which is not in the stable ABI.
static void replace(PyObject **place, PyObject *by)
{
    PyObject *before = *place;
    *place = by;
    Py_XDECREF(before);
}

// -- a record at hand -----------------------------------------------------------------------------------------------

static PySendResult send_record(PyObject *self, PyObject *argument, PyObject **result)
{
    (void)argument;
    AtHand *at_hand = (AtHand *)self;
    *result = at_hand->record;
    at_hand->record = NULL;
    if (*result != NULL)
        return PYGEN_RETURN;
    PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited __anext__()");  // as a generator's says it
    return PYGEN_ERROR;
}

// For who awaits it in another way, a task above all.
static PyObject *next_of_at_hand(PyObject *self)
{
    PyObject *record;
    if (send_record(self, NULL, &record) == PYGEN_RETURN) {
        PyObject *stop = PyObject_CallFunctionObjArgs(PyExc_StopIteration, record, NULL);
        if (stop != NULL)
            PyErr_SetObject(PyExc_StopIteration, stop);
        Py_XDECREF(stop);
        Py_DECREF(record);
    }
    return NULL;
}

static int traverse_at_hand(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((AtHand *)self)->record);
    return 0;
}

static int clear_at_hand(PyObject *self)
{
    Py_CLEAR(((AtHand *)self)->record);
    return 0;
}

static void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static void let_go_of_at_hand(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    clear_at_hand(self);
    free_object(self);
}

// -- one by one -----------------------------------------------------------------------------------------------------

static PyObject *new_at_hand(OneByOne *self, PyObject *record)
{
    AtHand *at_hand = (AtHand *)self->spare;
    if (at_hand == NULL || Py_REFCNT(self->spare) > 1) {
        at_hand = (AtHand *)((allocfunc)PyType_GetSlot(at_hand_type, Py_tp_alloc))(at_hand_type, 0);
        if (at_hand == NULL) {
            Py_DECREF(record);
            return NULL;
        }
        replace(&self->spare, (PyObject *)at_hand);
    }
    replace(&at_hand->record, record);
    return Py_NewRef((PyObject *)at_hand);
}

static PyObject *anext_of(PyObject *object)
{
    OneByOne *self = (OneByOne *)object;
    PyObject *records = Py_XNewRef(self->records);  // `take` may be called on the way
    PyObject *record = records == NULL ? NULL : PyIter_Next(records);
    Py_XDECREF(records);
    if (record != NULL)
        return new_at_hand(self, record);
    if (PyErr_Occurred() == NULL && self->more == NULL)
        PyErr_SetNone(PyExc_StopAsyncIteration);  // it was never begun, or is being collected
    return PyErr_Occurred() == NULL ? PyObject_CallNoArgs(self->more) : NULL;
}

static PyObject *take(PyObject *object, PyObject *records)
{
    OneByOne *self = (OneByOne *)object;
    if (!PyIter_Check(records))
        return PyErr_Format(PyExc_TypeError, "%R is no iterator", records);
    replace(&self->records, Py_NewRef(records));
    Py_RETURN_NONE;
}

static int init(PyObject *object, PyObject *args, PyObject *named)
{
    static char *names[] = {"more", NULL};
    PyObject *more;
    if (!PyArg_ParseTupleAndKeywords(args, named, "O", names, &more))
        return -1;
    replace(&((OneByOne *)object)->more, Py_NewRef(more));
    return 0;
}

static int traverse(PyObject *object, visitproc visit, void *arg)
{
    OneByOne *self = (OneByOne *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->more);
    Py_VISIT(self->records);
    Py_VISIT(self->spare);
    return 0;
}

static int clear(PyObject *object)
{
    OneByOne *self = (OneByOne *)object;
    Py_CLEAR(self->more);
    Py_CLEAR(self->records);
    Py_CLEAR(self->spare);
    return 0;
}

static void let_go(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    clear(object);
    free_object(object);
}

int one_by_one_init(PyObject *module)
{
    static PyType_Slot at_hand_slots[] = {
        {Py_tp_dealloc, let_go_of_at_hand},
        {Py_tp_traverse, traverse_at_hand},
        {Py_tp_clear, clear_at_hand},
        {Py_tp_iter, PyObject_SelfIter},
        {Py_tp_iternext, next_of_at_hand},
        {Py_am_await, PyObject_SelfIter},
        {Py_am_send, send_record},
        {0, NULL},
    };
    static PyType_Spec at_hand_spec = {
        .name = "kera.core._native.AtHand",
        .basicsize = sizeof(AtHand),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = at_hand_slots,
    };
    static PyMethodDef methods[] = {{"take", take, METH_O, NULL}, {NULL, NULL, 0, NULL}};
    static PyType_Slot slots[] = {
        {Py_tp_init, init},
        {Py_tp_dealloc, let_go},
        {Py_tp_traverse, traverse},
        {Py_tp_clear, clear},
        {Py_tp_methods, methods},
        {Py_am_aiter, PyObject_SelfIter},
        {Py_am_anext, anext_of},
        {0, NULL},
    };
    static PyType_Spec spec = {
        .name = "kera.core._native.OneByOne",
        .basicsize = sizeof(OneByOne),
        .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
        .slots = slots,
    };
    at_hand_type = (PyTypeObject *)PyType_FromSpec(&at_hand_spec);
    PyObject *type = at_hand_type == NULL ? NULL : PyType_FromSpec(&spec);
    int added = type == NULL ? -1 : PyModule_AddObjectRef(module, "OneByOne", type);
    Py_XDECREF(type);
    return added;
}
