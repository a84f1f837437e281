// What columns of lean payloads are made of, and the memory of the arrays that are made of them.
#ifndef KERA_LEAN_ARRAYS_H
#define KERA_LEAN_ARRAYS_H

#include "arrow_data.h"

// What columns are made of, as a schema says, with what is within them.
typedef struct Type {
    Column column;
    uint64_t null_bytes;  // what a null takes as Arrow has it, with what is within it
    bool never_null;      // the entries of a map, and their keys, over which Arrow ends the process; and columns that
                          // are not nullable
    int64_t children_count;
    struct Type *children;
} Type;

// NULL: of a type that is not known here, or there is no memory.
Type *new_type(const struct ArrowSchema *schema);
void free_type(Type *type);

// Whether a node of this type, of so many values, may begin with that byte.
static inline bool may_begin(const Type *type, uint8_t first, uint64_t count)
{
    return !type->never_null || (!(first & VALIDITY) && (first != NULLS || count == 0));
}

// How many buffers Arrow has of a column.
int64_t buffers_of(const Column *column);

// Who keeps what arrays refer to as long as they are there: called once, on any thread.
typedef struct {
    void (*let_go)(void *);
    void *argument;
} Owner;

// What the arrays of one batch have in common; gone when the last of them is released.
typedef struct Block Block;

// These give NULL, or false, where there is no memory, or so many values of that width would be too much for any.
Block *new_block(Owner owner);
void *take(Block *block, uint64_t count, uint64_t width);
void *take_zeros(Block *block, uint64_t count, uint64_t width);

// An array with room for its buffers and children, which have no children of their own yet.
bool make_array(Block *block, struct ArrowArray *array, uint64_t length, int64_t buffers, int64_t children);

// They are whole: let each be released.
void arm(Block *block, struct ArrowArray *array);

// Of arrays that were not armed. The owner is not called.
void free_block(Block *block);

#endif
