// Read and set attributes of Python objects. They are the daemon's own objects, so a missing attribute, or a value of
// another type than expected, is an error.
#ifndef KERA_ATTRIBUTES_H
#define KERA_ATTRIBUTES_H

#define PY_SSIZE_T_CLEAN
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

// Intern attribute names. Returns 0, or -1 with an error set.
static inline int intern_names(PyObject **names, const char *const *texts, int count)
{
    for (int index = 0; index < count; index++)
        if ((names[index] = PyUnicode_InternFromString(texts[index])) == NULL)
            return -1;
    return 0;
}

// The next three functions steal the reference to `object`. If it is NULL, an error is set already, and they fail.

static inline bool number_of(PyObject *object, uint64_t *number)
{
    if (object == NULL)
        return false;
    *number = PyLong_AsUnsignedLongLong(object);
    Py_DECREF(object);
    return *number != UINT64_MAX || PyErr_Occurred() == NULL;
}

static inline bool signed_of(PyObject *object, int64_t *number)
{
    if (object == NULL)
        return false;
    *number = PyLong_AsLongLong(object);
    Py_DECREF(object);
    return *number != -1 || PyErr_Occurred() == NULL;
}

static inline bool is_true(PyObject *object, bool *truth)
{
    if (object == NULL)
        return false;
    int found = PyObject_IsTrue(object);
    Py_DECREF(object);
    *truth = found > 0;
    return found >= 0;
}

// Set an attribute. Steals the reference to `value`. If it is NULL, an error is set already, and this fails.
static inline bool set_to(PyObject *object, PyObject *name, PyObject *value)
{
    if (value == NULL)
        return false;
    int failed = PyObject_SetAttr(object, name, value);
    Py_DECREF(value);
    return failed == 0;
}

static inline bool set_number(PyObject *object, PyObject *name, uint64_t value)
{
    return set_to(object, name, PyLong_FromUnsignedLongLong(value));
}

static inline bool add_number(PyObject *object, PyObject *name, uint64_t value)
{
    uint64_t before;
    return number_of(PyObject_GetAttr(object, name), &before) && set_number(object, name, before + value);
}

// Look up a number in a dict. Returns a new reference; NULL without an error: the dict does not have the key.
static inline PyObject *value_of(PyObject *dict, uint64_t number)
{
    PyObject *key = PyLong_FromUnsignedLongLong(number);
    if (key == NULL)
        return NULL;
    PyObject *found = PyDict_GetItemWithError(dict, key);
    Py_DECREF(key);
    return Py_XNewRef(found);
}

#endif
