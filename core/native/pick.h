// Some rows of a record batch, in any order, as arrays of their own.
#ifndef KERA_PICK_H
#define KERA_PICK_H

#include "arrow_data.h"
#include "bytes.h"

// Of a column: what was picked last, in memory that is used again.
typedef struct Picked {
    struct ArrowArray array;
    const void *buffers[3];
    struct ArrowArray **child_arrays;
    struct Picked *children;
    int64_t children_count;
    Bytes validity, fixed, data, ranges;  // `fixed`: values, or where they are
} Picked;

// Values that follow each other in an array.
typedef struct {
    uint64_t first, count;
} Range;

// For columns of a type; false: there is no memory.
bool new_picked(const struct ArrowSchema *schema, Picked *picked);
void free_picked(Picked *picked);

// `picked->array` has these values of an array, one after the other: false where the type is not known here, where
// places of values are none, or where there is no memory.
bool pick(const struct ArrowSchema *schema, const struct ArrowArray *array, const Range *ranges, size_t count,
          Picked *picked);

#endif
