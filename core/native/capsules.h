// Record batches through the Arrow PyCapsule interface.
#ifndef KERA_CAPSULES_H
#define KERA_CAPSULES_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include "arrow_data.h"

// `capsules`: the tuple of schema and data that `__arrow_c_array__` returned; NULL: the call failed.
static inline bool open_batch(PyObject *capsules, struct ArrowSchema **schema, struct ArrowArray **array)
{
    if (capsules == NULL || !PyTuple_Check(capsules) || PyTuple_Size(capsules) != 2)
        return false;
    *schema = PyCapsule_GetPointer(PyTuple_GetItem(capsules, 0), "arrow_schema");
    *array = PyCapsule_GetPointer(PyTuple_GetItem(capsules, 1), "arrow_array");
    return *schema != NULL && *array != NULL && (*schema)->release != NULL && (*array)->release != NULL;
}

#endif
