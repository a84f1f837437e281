// Creating Python types.
#ifndef KERA_TYPES_H
#define KERA_TYPES_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

// Free an object of one of these types, or of a Python class derived from it.
static inline void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

// Create a type. `flags`: in addition to the flags that all of these types have.
static inline PyTypeObject *make_type(const char *name, size_t size, unsigned long flags, PyType_Slot *slots)
{
    PyType_Spec spec = {
        .name = name,
        .basicsize = (int)size,
        .flags = (unsigned int)(Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | flags),
        .slots = slots,
    };
    return (PyTypeObject *)PyType_FromSpec(&spec);
}

#endif
