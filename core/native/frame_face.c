// See frame_face.h.

#include "frame_face.h"

#include "frame.h"

// As in kera/core/rpc/limits.py.
#define HEAD_BYTES_MAX (4u << 20)

#define FIELDS 5

static PyObject *header_of(PyTypeObject *type, const Frame *frame)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *header = allocate(type, FIELDS);
    const uint64_t fields[FIELDS] = {frame->kind, frame->method, frame->request_id, frame->head_bytes,
                                     frame->bulk_bytes};
    for (Py_ssize_t index = 0; header != NULL && index < FIELDS; index++) {
        PyObject *field = PyLong_FromUnsignedLongLong(fields[index]);
        if (field == NULL)
            Py_CLEAR(header);
        else
            PyTuple_SetItem(header, index, field);
    }
    return header;
}

PyObject *new_frame_header(PyTypeObject *type, PyObject *const *args)
{
    Py_ssize_t at = PyLong_AsSsize_t(args[1]), bulk_bytes_max = PyLong_AsSsize_t(args[2]);
    Py_buffer view;
    if (at < 0 || bulk_bytes_max < 0 || PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) != 0)
        return NULL;
    Frame frame;
    bool good = view.itemsize == 1 &&
                read_frame_header((View){view.buf, (size_t)view.len}, (size_t)at, &frame) &&
                frame.head_bytes <= HEAD_BYTES_MAX && frame.bulk_bytes <= (size_t)bulk_bytes_max;
    PyBuffer_Release(&view);
    return good ? header_of(type, &frame) : NULL;
}

static bool as_number(PyObject *object, uint64_t most, uint64_t *number)
{
    *number = PyLong_AsUnsignedLongLong(object);
    return *number <= most && (*number != UINT64_MAX || PyErr_Occurred() == NULL);
}

PyObject *new_frame(PyObject *const *args)
{
    uint64_t kind, method, request_id, bulk_bytes;
    char *head;
    Py_ssize_t head_bytes;
    if (!as_number(args[1], UINT8_MAX, &kind) || !as_number(args[2], UINT32_MAX, &method) ||
        !as_number(args[3], UINT64_MAX, &request_id) || !as_number(args[4], UINT32_MAX, &bulk_bytes) ||
        !PyBytes_Check(args[0]) || PyBytes_AsStringAndSize(args[0], &head, &head_bytes) != 0 ||
        head_bytes > (Py_ssize_t)UINT32_MAX)
        return NULL;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, FRAME_BYTES + head_bytes);
    if (bytes == NULL)
        return NULL;
    uint8_t *to = (uint8_t *)PyBytes_AsString(bytes);
    Frame frame = {.kind = (uint8_t)kind,
                   .method = (uint32_t)method,
                   .request_id = request_id,
                   .head_bytes = (uint32_t)head_bytes,
                   .bulk_bytes = (uint32_t)bulk_bytes};
    write_frame_header(to, &frame);
    if (head_bytes > 0)
        memcpy(to + FRAME_BYTES, head, (size_t)head_bytes);
    return bytes;
}
