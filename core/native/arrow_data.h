// Arrow's C data interface, as its specification has it, and what lean payloads call its types.
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

// What a column is made of.
typedef struct {
    int kind;
    uint64_t width;  // of FIXED and FIXED_n: bytes of a value; of FIXED_LIST: values of each
    bool is_map;
} Column;

// Whether lean payloads have columns of this type, and here it is known which.
bool read_column(const struct ArrowSchema *schema, Column *column);

#endif
