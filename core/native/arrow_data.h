// Arrow's C data interface, as in its specification, and how its types map to the columns of lean payloads.
#ifndef KERA_ARROW_DATA_H
#define KERA_ARROW_DATA_H

#include "lean_format.h"

struct ArrowSchema {
    const char *format;
    const char *name;
    const char *metadata;
    int64_t flags;
    int64_t n_children;
    struct ArrowSchema **children;
    struct ArrowSchema *dictionary;
    void (*release)(struct ArrowSchema *);
    void *private_data;
};

struct ArrowArray {
    int64_t length;
    int64_t null_count;
    int64_t offset;
    int64_t n_buffers;
    int64_t n_children;
    const void **buffers;
    struct ArrowArray **children;
    struct ArrowArray *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};

// How a column is stored in a lean payload.
typedef struct {
    int kind;
    uint64_t width;  // FIXED and FIXED_n: the bytes of a value; FIXED_LIST: the values of each list
    bool is_map;
} Column;

// Find how a column of this type is stored. Returns false if lean payloads, or this code, do not support the type.
bool read_column(const struct ArrowSchema *schema, Column *column);

#endif
