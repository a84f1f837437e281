// See chunk.h.

#include "chunk.h"

#include "crc32c.h"

#define PLACEMENT_BYTES (PLACEMENT_CRC_AT - PLACEMENT_AT)

_Static_assert(sizeof(size_t) == 8, "lengths of 32 bits are added without a look at whether they fit");
_Static_assert(HEADER_BYTES % ALIGNMENT_BYTES == 0, "so that a chunk is as long as header and padded payload");

static bool is_of_known_format(const uint8_t *header)
{
    return memcmp(header, MAGIC, 4) == 0 && header[VERSION_AT] >= VERSION_MIN && header[VERSION_AT] <= VERSION_MAX &&
           u16_at(header + HEADER_BYTES_AT) == HEADER_BYTES;
}

static bool has_right_header_crc(const uint8_t *header)
{
    return crc32c(0, header, HEADER_CRC_AT) == u32_at(header + HEADER_CRC_AT);
}

static bool has_right_placement_crc(const uint8_t *header)
{
    return crc32c(0, header + PLACEMENT_AT, PLACEMENT_BYTES) == u32_at(header + PLACEMENT_CRC_AT);
}

bool is_unplaced_header(const uint8_t *header)
{
    static const uint8_t zeros[HEADER_BYTES - PLACEMENT_AT];
    return memcmp(header + PLACEMENT_AT, zeros, sizeof zeros) == 0;
}

bool is_header(const uint8_t *header)
{
    return is_of_known_format(header) && has_right_header_crc(header) &&
           (is_unplaced_header(header) || has_right_placement_crc(header));
}

bool is_payload(View view, size_t at, uint32_t payload_bytes, uint32_t checksum)
{
    uint64_t size = padded(payload_bytes);
    return size <= PAYLOAD_BYTES_MAX && is_within(view, at, HEADER_BYTES) &&
           is_within(view, at + HEADER_BYTES, size) && crc32c(0, view.at + at + HEADER_BYTES, size) == checksum;
}

bool pass_placed(View view, size_t *at, uint32_t *checksum)
{
    if (!is_within(view, *at, HEADER_BYTES))
        return false;
    const uint8_t *header = view.at + *at;
    uint64_t size = padded(u32_at(header + PAYLOAD_BYTES_AT));
    if (!is_within(view, *at + HEADER_BYTES, size) || !is_of_known_format(header) ||
        u64_at(header + PLACEMENT_AT) == 0 || !has_right_header_crc(header) || !has_right_placement_crc(header) ||
        crc32c(0, header + HEADER_BYTES, size) != u32_at(header + PAYLOAD_CRC_AT))
        return false;
    *checksum = chained(header, *checksum);
    *at += HEADER_BYTES + size;
    return true;
}

uint32_t chained(const uint8_t *header, uint32_t checksum)
{
    return crc32c(checksum, header + PAYLOAD_CRC_AT, PLACEMENT_CRC_AT - PAYLOAD_CRC_AT);
}

size_t count_chunks(View view, size_t most)
{
    size_t count = 0;
    for (size_t at = 0; count < most && at < view.size; count++)
        at += HEADER_BYTES + (is_within(view, at, HEADER_BYTES) ? padded(u32_at(view.at + at + PAYLOAD_BYTES_AT)) : 0);
    return count;
}

static void put_u64(uint8_t *to, uint64_t number)
{
    memcpy(to, &number, sizeof number);
}

// The checksum is computed from a copy, and each word is written and read as a whole. Reading parts of words that were
// just stored would defeat store forwarding: the processor would wait until the stores reach the segment's memory,
// which is not cached.
void place(uint8_t *header, const Placement *placement, uint64_t first_record)
{
    uint64_t group = placement->group_id, where = placement->segment_id | (uint64_t)placement->entry << 32;
    uint64_t epoch = placement->broker_epoch, head = placement->durable_head;
    const uint64_t words[] = {group, where, first_record, epoch, head};
    uint64_t checksum = crc32c(0, (const uint8_t *)words, PLACEMENT_BYTES);
    put_u64(header + PLACEMENT_AT, group);
    put_u64(header + PLACEMENT_AT + 8, where);
    put_u64(header + PLACEMENT_AT + 16, first_record);
    put_u64(header + PLACEMENT_AT + 24, epoch);
    put_u64(header + PLACEMENT_AT + 32, head | checksum << 32);
}
