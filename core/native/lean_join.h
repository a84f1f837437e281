// Lean payloads that follow each other as one set of Arrow arrays: kera/core/format/joining.py has what does the same.
#ifndef KERA_LEAN_JOIN_H
#define KERA_LEAN_JOIN_H

#include "lean_arrays.h"

// Columns that grow with each payload.
typedef struct Joined Joined;

// NULL: there is no memory.
Joined *new_joined(const Type *type);
void free_joined(Joined *joined);

// Take on a payload of so many records without compression. What values of text are is not looked at. False where it is
// none of the type, where it would become more than `bytes_max`, or where Python knows more about it: then all there is
// may be spoilt. `written_bytes`: what it takes with each value written out.
bool join_payload(Joined *joined, const Type *type, View payload, uint64_t records, uint64_t bytes_max,
                  uint64_t *written_bytes);

// All columns as a batch that owns them; false: there is no memory, and `joined` is still the caller's.
bool finish_joined(Joined *joined, const Type *type, struct ArrowArray *batch);

#endif
