// See arrow.h.

#include "arrow.h"

#define CONTINUATION 0xFFFFFFFFu
#define METADATA_AT 8
#define RECORD_BATCH 3
#define BITS 8
// The sizes of vtables that have all fields which are read here. Smaller ones are valid as well, but left to Python.
#define MESSAGE_VTABLE_BYTES 12
#define BATCH_VTABLE_BYTES 10
#define COMPRESSION_AT 10
#define NODE_BYTES 16

// The offset of the vtable, of at least `bytes` bytes, that belongs to the table at `table`; 0: there is none.
static size_t vtable_of(View payload, size_t table, size_t bytes)
{
    if (!is_within(payload, table, 4))
        return 0;
    int64_t vtable = (int64_t)table - (int32_t)u32_at(payload.at + table);
    if (vtable < METADATA_AT || !is_within(payload, (size_t)vtable, bytes) || u16_at(payload.at + vtable) < bytes)
        return 0;
    return (size_t)vtable;
}

// The target of the offset at `field`; 0: there is none.
static size_t target_of(View payload, size_t field)
{
    if (!is_within(payload, field, 4))
        return 0;
    return field + u32_at(payload.at + field);
}

// Read a 64-bit field of the table at `table`; an absent field has its default, 0.
static bool read_field(View payload, size_t table, size_t vtable, size_t at, uint64_t *value)
{
    size_t offset = u16_at(payload.at + vtable + at);
    *value = 0;
    if (offset == 0)
        return true;
    if (!is_within(payload, table + offset, 8))
        return false;
    *value = u64_at(payload.at + table + offset);
    return true;
}

// Whether all fields of the batch together have at most `most` values.
static bool has_values(View payload, size_t batch, size_t offset, uint64_t most)
{
    if (offset == 0)
        return true;
    size_t nodes = target_of(payload, batch + offset);
    if (nodes == 0 || !is_within(payload, nodes, 4))
        return false;
    size_t count = u32_at(payload.at + nodes);
    if (!is_within(payload, nodes + 4, count * NODE_BYTES))
        return false;
    uint64_t values = 0;
    for (const uint8_t *node = payload.at + nodes + 4; count > 0; count--, node += NODE_BYTES) {
        uint64_t length = u64_at(node);
        if (length > most - values)
            return false;
        values += length;
    }
    return true;
}

bool is_arrow(View payload, uint64_t records)
{
    if (!is_within(payload, 0, METADATA_AT + 4) || u32_at(payload.at) != CONTINUATION)
        return false;
    uint64_t metadata_bytes = u32_at(payload.at + 4), found, body_bytes;
    if (metadata_bytes == 0 || metadata_bytes > payload.size - METADATA_AT)
        return false;
    size_t body_at = METADATA_AT + metadata_bytes;
    size_t table = METADATA_AT + (size_t)u32_at(payload.at + METADATA_AT);
    size_t vtable = vtable_of(payload, table, MESSAGE_VTABLE_BYTES);
    if (vtable == 0)
        return false;
    size_t type = u16_at(payload.at + vtable + 6), header = u16_at(payload.at + vtable + 8);
    if (type == 0 || header == 0 || !is_within(payload, table + type, 1) || payload.at[table + type] != RECORD_BATCH)
        return false;
    size_t batch = target_of(payload, table + header);
    size_t of_batch = vtable_of(payload, batch, BATCH_VTABLE_BYTES);
    if (of_batch == 0)
        return false;
    if (u16_at(payload.at + of_batch) > COMPRESSION_AT &&
        (!is_within(payload, of_batch + COMPRESSION_AT, 2) || u16_at(payload.at + of_batch + COMPRESSION_AT) != 0))
        return false;
    if (!read_field(payload, table, vtable, 10, &body_bytes) || !read_field(payload, batch, of_batch, 4, &found) ||
        body_bytes > payload.size - body_at || found != records)
        return false;
    uint64_t bits = BITS * body_bytes;
    return records <= (bits > BATCH_RECORDS_WITHOUT_BYTES ? bits : BATCH_RECORDS_WITHOUT_BYTES) &&
           has_values(payload, batch, u16_at(payload.at + of_batch + 6),
                      bits > DECOMPRESSED_BYTES_MAX ? bits : DECOMPRESSED_BYTES_MAX);
}
