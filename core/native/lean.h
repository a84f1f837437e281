// Whether readers can trust a lean payload: kera/core/format/lean/layout.py has the format, check.py lists the checks.
#ifndef KERA_LEAN_H
#define KERA_LEAN_H

#include "chunk.h"

struct Type;

#define NODE_VALUES_MAX ((uint64_t)1 << 40)
#define DEPTH_MAX 64
#define RECORDS_WITHOUT_BYTES ((uint64_t)1 << 16)

// Whether a payload of `records` records is valid, and expands to at most `bytes_max` bytes. Of a compressed payload,
// this checks only the part before the body. It reads each number of the nodes once, as others may write to the memory.
// If the `type` is known (not NULL), the nodes also have to match it, and no value may be null that Arrow forbids.
bool is_lean(View payload, uint64_t records, bool compressed, uint64_t bytes_max, const struct Type *type);

#endif
