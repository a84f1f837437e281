// Copying some rows of a record batch, in any order, into new arrays.
#ifndef KERA_PICK_H
#define KERA_PICK_H

#include "arrow_data.h"
#include "bytes.h"

// The values last picked from a column. The next call reuses their memory.
typedef struct Picked {
    struct ArrowArray array;
    const void *buffers[3];
    struct ArrowArray **child_arrays;
    struct Picked *children;
    int64_t children_count;
    Bytes validity, fixed, data, ranges;  // `fixed`: values or offsets
} Picked;

// Consecutive values in an array.
typedef struct {
    uint64_t first, count;
} Range;

// Prepare `picked` for a column of this type. Returns false if there is no memory. `free_picked` is due in either case.
bool new_picked(const struct ArrowSchema *schema, Picked *picked);
void free_picked(Picked *picked);

// Copy these ranges of an array, one after the other, into `picked->array`. Returns false if the type is not supported
// here, if the array's offsets are invalid, or if there is no memory.
bool pick(const struct ArrowSchema *schema, const struct ArrowArray *array, const Range *ranges, size_t count,
          Picked *picked);

#endif
