// Reading the nodes of a lean payload one by one.
#ifndef KERA_LEAN_READER_H
#define KERA_LEAN_READER_H

#include "lean_format.h"
#include "sizes.h"

// The nodes, how far they have been read, and the body that they describe.
typedef struct {
    View nodes;
    size_t at;
    const uint8_t *body;  // NULL: it is compressed, and not read
    uint64_t body_bytes;
    uint64_t body_end;  // the end of the part that the nodes so far describe
    uint64_t written_bytes;  // the expanded size of the nodes so far
    uint64_t room;  // the maximum of `written_bytes`, see `count_written`
} Reader;

// Begin to read an uncompressed payload. It may expand to `bytes_max` bytes, or to one byte for each bit of its body.
static inline bool open_reader(View payload, uint64_t bytes_max, Reader *reader)
{
    if (payload.size < 2)
        return false;
    size_t nodes_bytes = u16_at(payload.at), body_at = body_at_of(2, nodes_bytes);
    if (body_at > payload.size)
        return false;
    uint64_t body_bytes = payload.size - body_at;
    *reader = (Reader){
        .nodes = {payload.at + 2, nodes_bytes},
        .body = payload.at + body_at,
        .body_bytes = body_bytes,
        .room = bytes_max > 8 * body_bytes ? bytes_max : 8 * body_bytes,
    };
    return true;
}

// Whether all nodes have been read, and describe exactly this body.
static inline bool is_read(const Reader *reader)
{
    return reader->at == reader->nodes.size && reader->body_end == reader->body_bytes;
}

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

// Read `size` bytes that are stored among the nodes. Returns NULL if there are fewer.
static inline const uint8_t *take_inline(Reader *reader, size_t size)
{
    const uint8_t *at = reader->nodes.at + reader->at;
    return skip(reader, size) ? at : NULL;
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

static inline uint64_t offset_at(const uint8_t *offsets, uint64_t index, uint64_t width)
{
    return width == 4 ? u32_at(offsets + 4 * index) : u64_at(offsets + 8 * index);
}

// Locate the next `count` values of `width` bytes in the body, aligned to `alignment` bytes. Sets `*at`.
static inline bool take_place(Reader *reader, uint64_t count, uint64_t width, uint64_t alignment, uint64_t *at)
{
    uint64_t size;
    if (!product_of(count, width, &size))
        return false;
    if (alignment > BODY_ALIGNMENT)
        alignment = BODY_ALIGNMENT;
    *at = (reader->body_end + alignment - 1) & ~(alignment - 1);
    if (*at > reader->body_bytes || size > reader->body_bytes - *at)
        return false;
    reader->body_end = *at + size;
    return true;
}

// Count `count` more expanded values of `width` bytes. Returns false if they exceed the room.
static inline bool count_written(Reader *reader, uint64_t count, uint64_t width)
{
    uint64_t bytes;
    if (!product_of(count, width, &bytes) || bytes > reader->room - reader->written_bytes)
        return false;
    reader->written_bytes += bytes;
    return true;
}

#endif
