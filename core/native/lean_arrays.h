// The types of columns in lean payloads, and the memory of the arrays that they are decoded into.
#ifndef KERA_LEAN_ARRAYS_H
#define KERA_LEAN_ARRAYS_H

#include "arrow_data.h"

// The type of a column in a schema, with its children.
typedef struct Type {
    Column column;
    uint64_t null_bytes;  // the bytes of a null in Arrow's arrays, including its children
    bool never_null;      // a column that is not nullable, or the entries of a map or their keys: with nulls in those,
                          // Arrow ends the process
    int64_t children_count;
    struct Type *children;
} Type;

// Make the type of a schema. Returns NULL if it has a type that is not supported here, or if there is no memory.
Type *new_type(const struct ArrowSchema *schema);
void free_type(Type *type);

// Whether a node of this type with `count` values may begin with the byte `first`.
static inline bool may_begin(const Type *type, uint8_t first, uint64_t count)
{
    return !type->never_null || (!(first & VALIDITY) && (first != NULLS || count == 0));
}

// The number of buffers that Arrow has for a column.
int64_t buffers_of(const Column *column);

// The owner of the memory that arrays refer to. `let_go` is called once, on any thread, after the last array's release.
typedef struct {
    void (*let_go)(void *);
    void *argument;
} Owner;

// The memory that the arrays of a batch share. It is freed when the last of them is released.
typedef struct Block Block;

// These functions return NULL or false if there is no memory, or `count` values of `width` bytes exceed any memory.
Block *new_block(Owner owner);
void *take(Block *block, uint64_t count, uint64_t width);
void *take_zeros(Block *block, uint64_t count, uint64_t width);

// Initialize an array with room for its buffers and children. The children are not initialized.
bool make_array(Block *block, struct ArrowArray *array, uint64_t length, int64_t buffers, int64_t children);

// Make all arrays releasable, once they are complete.
void arm(Block *block, struct ArrowArray *array);

// Free the block of arrays that were not armed, without calling the owner.
void free_block(Block *block);

#endif
