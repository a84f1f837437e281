// Going through the nodes of a lean payload.
#ifndef KERA_LEAN_READER_H
#define KERA_LEAN_READER_H

#include "lean_format.h"

// The nodes, as far as they have been read, and the body that they are of.
typedef struct {
    View nodes;
    size_t at;
    const uint8_t *body;  // NULL: it is compressed, and nothing of it is looked at
    uint64_t body_bytes;
    uint64_t body_end;  // as far as the nodes say
    uint64_t written_bytes;  // what it takes with each value written out
} Reader;

static inline bool take_byte(Reader *reader, uint8_t *byte)
{
    if (!is_within(reader->nodes, reader->at, 1))
        return false;
    *byte = reader->nodes.at[reader->at++];
    return true;
}

static inline bool skip(Reader *reader, size_t size)
{
    if (!is_within(reader->nodes, reader->at, size))
        return false;
    reader->at += size;
    return true;
}

static inline bool take_varint(Reader *reader, uint64_t *number)
{
    *number = 0;
    for (int place = 0; place < VARINT_BYTES_MAX; place++) {
        uint8_t byte;
        if (!take_byte(reader, &byte))
            return false;
        *number |= (uint64_t)(byte & 0x7f) << 7 * place;
        if (byte < 0x80)
            return *number <= NODE_VALUES_MAX;
    }
    return false;
}

// Room for `count` values of `width` bytes each in the body, aligned to `alignment` bytes.
static inline bool take_place(Reader *reader, uint64_t count, uint64_t width, uint64_t alignment, uint64_t *at)
{
    uint64_t size;
    if (__builtin_mul_overflow(count, width, &size))
        return false;
    if (alignment > BODY_ALIGNMENT)
        alignment = BODY_ALIGNMENT;
    *at = (reader->body_end + alignment - 1) & ~(alignment - 1);
    if (*at > reader->body_bytes || size > reader->body_bytes - *at)
        return false;
    reader->body_end = *at + size;
    return true;
}

#endif
