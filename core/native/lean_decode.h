// Lean payloads as Arrow arrays: kera/core/lean/decode.py does the same.
#ifndef KERA_LEAN_DECODE_H
#define KERA_LEAN_DECODE_H

#include "arrow_data.h"

// What columns are made of, as a schema says, with what is within them.
typedef struct Type {
    Column column;
    uint64_t null_bytes;  // what a null takes as Arrow has it, with what is within it
    int64_t children_count;
    struct Type *children;
} Type;

// Who keeps the memory of a payload as long as arrays are in it: called once, on any thread.
typedef struct {
    void (*let_go)(void *);
    void *argument;
} Owner;

// NULL: of a type that is not known here, or there is no memory.
Type *new_type(const struct ArrowSchema *schema);
void free_type(Type *type);

// The columns of a payload of so many records without compression: those in place that are written so. What the values
// are is not looked at. False where it is none, where it would become more than `bytes_max`, or where Python knows more
// about it: then the owner has nothing to let go of.
bool decode_lean(View payload, const Type *type, uint64_t records, uint64_t bytes_max, Owner owner,
                 struct ArrowArray *batch);

#endif
