// Going through the nodes of a lean payload.
#ifndef KERA_LEAN_READER_H
#define KERA_LEAN_READER_H

#include "lean_format.h"
#include "sizes.h"

// The nodes, as far as they have been read, and the body that they are of.
typedef struct {
    View nodes;
    size_t at;
    const uint8_t *body;  // NULL: it is compressed, and nothing of it is looked at
    uint64_t body_bytes;
    uint64_t body_end;  // as far as the nodes say
    uint64_t written_bytes;  // what it takes with each value written out
    uint64_t room;  // what it may take, see `count_written`
} Reader;

// Begin with a payload without compression that is to become `bytes_max` at most, or as much as its bytes may be.
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

// Whether all nodes have been read, and are of this body.
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

// So many bytes that are among the nodes; NULL: they are not there.
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

// Room for `count` values of `width` bytes each in the body, aligned to `alignment` bytes.
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

// So many bytes more, as Arrow has them.
static inline bool count_written(Reader *reader, uint64_t count, uint64_t width)
{
    uint64_t bytes;
    if (!product_of(count, width, &bytes) || bytes > reader->room - reader->written_bytes)
        return false;
    reader->written_bytes += bytes;
    return true;
}

#endif
