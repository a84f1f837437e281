// Consecutive lean payloads as one set of Arrow arrays: kera/core/format/joining.py does the same.
#ifndef KERA_LEAN_JOIN_H
#define KERA_LEAN_JOIN_H

#include "lean_arrays.h"

// The columns, which grow with each payload.
typedef struct Joined Joined;

// Returns NULL if there is no memory.
Joined *new_joined(const Type *type);
void free_joined(Joined *joined);

// Append an uncompressed payload of `records` records. Whether texts are UTF-8 is not checked. Returns false if the
// payload does not match the type, would expand to more than `bytes_max` bytes, or has to be decoded by Python; then
// `joined` may be corrupt. Sets `written_bytes` to the expanded size.
bool join_payload(Joined *joined, const Type *type, View payload, uint64_t records, uint64_t bytes_max,
                  uint64_t *written_bytes);

// Turn all columns into a batch that owns them. Returns false if there is no memory: the caller still owns `joined`.
bool finish_joined(Joined *joined, const Type *type, struct ArrowArray *batch);

#endif
