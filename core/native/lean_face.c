// See lean_face.h.

#include "lean_face.h"

#include "lean_decode.h"

// From so many bytes on other threads may run meanwhile.
#define LARGE ((size_t)64 << 10)

static const char type_name[] = "kera.core._native.lean_type";

static void let_go_of_type(PyObject *capsule)
{
    free_type(PyCapsule_GetPointer(capsule, type_name));
}

const char lean_type_doc[] =
    PyDoc_STR("lean_type(schema): what `decode_in_place` knows of a schema; None: it cannot decode payloads of it.");

PyObject *lean_type(PyObject *module, PyObject *schema)
{
    (void)module;
    PyObject *capsule = PyObject_CallMethod(schema, "__arrow_c_schema__", NULL);
    if (capsule == NULL)
        return NULL;
    struct ArrowSchema *found = PyCapsule_GetPointer(capsule, "arrow_schema");
    Type *type = found == NULL ? NULL : new_type(found);
    Py_DECREF(capsule);
    if (found == NULL)
        return NULL;
    if (type == NULL)
        Py_RETURN_NONE;
    PyObject *result = PyCapsule_New(type, type_name, let_go_of_type);
    if (result == NULL)
        free_type(type);
    return result;
}

// The last array of a payload has gone, on whatever thread.
static void let_go(void *argument)
{
    PyGILState_STATE state = PyGILState_Ensure();
    Py_buffer *held = argument;
    PyBuffer_Release(held);
    PyMem_Free(held);
    PyGILState_Release(state);
}

static PyObject *import(PyObject *importer, PyObject *schema, struct ArrowArray *batch)
{
    PyObject *result = PyObject_CallFunction(importer, "KO", (unsigned long long)(uintptr_t)batch, schema);
    if (batch->release != NULL)  // nobody has taken it
        batch->release(batch);
    return result;
}

const char decode_in_place_doc[] = PyDoc_STR(
    "decode_in_place(payload, type, schema, records, bytes_max, importer)\n"
    "\n"
    "The record batch in a payload that is not compressed; None where Python knows more about it. What the values are\n"
    "is not looked at. `type`: see `lean_type`. importer(address, schema) makes one of Arrow's C data interface.");

PyObject *decode_in_place(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    (void)module;
    if (count != 6)
        return PyErr_Format(PyExc_TypeError, "decode_in_place takes 6 arguments, not %zd", count);
    const Type *type = PyCapsule_GetPointer(args[1], type_name);
    uint64_t records = PyLong_AsUnsignedLongLong(args[3]), bytes_max = PyLong_AsUnsignedLongLong(args[4]);
    if (type == NULL || PyErr_Occurred() != NULL)
        return NULL;
    Py_buffer *held = PyMem_Malloc(sizeof *held);
    if (held == NULL)
        return PyErr_NoMemory();
    if (PyObject_GetBuffer(args[0], held, PyBUF_SIMPLE) != 0) {
        PyMem_Free(held);
        return NULL;
    }
    struct ArrowArray batch;
    View payload = {held->buf, (size_t)held->len};
    PyThreadState *state = payload.size < LARGE ? NULL : PyEval_SaveThread();
    bool decoded = payload.at != NULL && decode_lean(payload, type, records, bytes_max, (Owner){let_go, held}, &batch);
    if (state != NULL)
        PyEval_RestoreThread(state);
    if (decoded)
        return import(args[5], args[2], &batch);
    PyBuffer_Release(held);
    PyMem_Free(held);
    Py_RETURN_NONE;
}
