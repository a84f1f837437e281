// The constants of lean payloads, as in kera/core/format/lean/layout.py, which explains the format.
#ifndef KERA_LEAN_FORMAT_H
#define KERA_LEAN_FORMAT_H

#include "lean.h"

enum { KIND_MASK = 0x1f, VALIDITY = 0x20, ENCODING_SHIFT = 6, BODY_ALIGNMENT = 8, VARINT_BYTES_MAX = 9 };

enum {
    NULLS, BITS, FIXED_1, FIXED_2, FIXED_4, FIXED_8, FIXED_16, FIXED,
    BINARY, TEXT, LARGE_BINARY, LARGE_TEXT, LIST, LARGE_LIST, FIXED_LIST, STRUCT, KINDS
};

enum { PLAIN, ONE, DELTAS };
enum { OFFSETS, SAME, LENGTHS_1, LENGTHS_2 };

#define SMALL_MAX (((uint64_t)1 << 31) - 1)  // the maximum of an offset of 4 bytes

static inline uint64_t bytes_of_bits(uint64_t count)
{
    return (count + 7) / 8;
}

static inline bool is_large(int kind)
{
    return kind == LARGE_BINARY || kind == LARGE_TEXT || kind == LARGE_LIST;
}

static inline bool is_list(int kind)
{
    return kind == LIST || kind == LARGE_LIST;
}

static inline bool has_places(int kind)
{
    return kind >= BINARY && kind <= LARGE_LIST;
}

// The bytes of a value of FIXED_n; 1 for other kinds.
static inline uint64_t width_of(int kind)
{
    return kind >= FIXED_1 && kind <= FIXED_16 ? (uint64_t)1 << (kind - FIXED_1) : 1;
}

// The offset of the body, after `nodes_bytes` bytes of nodes at `nodes_at`.
static inline size_t body_at_of(size_t nodes_at, size_t nodes_bytes)
{
    return (nodes_at + nodes_bytes + BODY_ALIGNMENT - 1) & ~(size_t)(BODY_ALIGNMENT - 1);
}

#endif
