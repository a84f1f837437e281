// Whether readers can trust a lean payload: kera/core/format/lean/layout.py has the format, check.py what is checked.
#ifndef KERA_LEAN_H
#define KERA_LEAN_H

#include "chunk.h"

struct Type;

#define NODE_VALUES_MAX ((uint64_t)1 << 40)
#define DEPTH_MAX 64
#define RECORDS_WITHOUT_BYTES ((uint64_t)1 << 16)

// Whether a payload of so many records is a whole one, all of it, or of a compressed one what is before its body; and
// whether it does not become more than `bytes_max`. Reads each number once, as others may write them. With a `type`
// (NULL: it is not known) its nodes are those of the type, and nothing is null that Arrow lets be no null.
bool is_lean(View payload, uint64_t records, bool compressed, uint64_t bytes_max, const struct Type *type);

#endif
