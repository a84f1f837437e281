// Chunks in memory: kera/core/format/chunk.py shows the layout of a header, and explains each check.
//
// Others may write to the memory while these functions read it. So they read each number once, and check it against the
// size of the memory. None of them reports what is wrong: Python finds that out.
#ifndef KERA_CHUNK_H
#define KERA_CHUNK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MAGIC "KERA"
#define VERSION_MIN 1
#define VERSION_MAX 2
#define LEAN_VERSION 2
#define HEADER_BYTES 128
#define ALIGNMENT_BYTES 64
#define PAYLOAD_BYTES_MAX (1u << 30)

// Offsets of fields in the header.
#define VERSION_AT 4
#define FLAGS_AT 5
#define HEADER_BYTES_AT 6
#define PAYLOAD_BYTES_AT 8
#define PAYLOAD_CRC_AT 80
#define HEADER_CRC_AT 84
#define PLACEMENT_AT 88
#define PLACEMENT_CRC_AT 124

// The flag of a chunk without records.
#define PUNCTUATION 4

// A borrowed piece of memory.
typedef struct {
    const uint8_t *at;
    size_t size;
} View;

// What a broker writes into the header of a chunk, besides the ordinal of its first record.
typedef struct {
    uint64_t group_id;
    uint32_t segment_id;
    uint32_t entry;
    uint64_t broker_epoch;
    uint32_t durable_head;
} Placement;

static inline uint16_t u16_at(const uint8_t *at)
{
    uint16_t number;
    memcpy(&number, at, sizeof number);
    return number;
}

static inline uint32_t u32_at(const uint8_t *at)
{
    uint32_t number;
    memcpy(&number, at, sizeof number);
    return number;
}

static inline uint64_t u64_at(const uint8_t *at)
{
    uint64_t number;
    memcpy(&number, at, sizeof number);
    return number;
}

// Whether the `size` bytes at `at` are within a view.
static inline bool is_within(View view, size_t at, size_t size)
{
    return at <= view.size && size <= view.size - at;
}

static inline uint64_t padded(uint32_t payload_bytes)
{
    return ((uint64_t)payload_bytes + ALIGNMENT_BYTES - 1) & ~(uint64_t)(ALIGNMENT_BYTES - 1);
}

// Whether the 128 bytes are a header of a known version with right checksums. The placement may be missing.
bool is_header(const uint8_t *header);

// Whether the broker's fields of a header are still empty.
bool is_unplaced_header(const uint8_t *header);

// Whether the payload of the chunk at `at` is complete and has this checksum.
bool is_payload(View view, size_t at, uint32_t payload_bytes, uint32_t checksum);

// Whether there is a complete placed chunk at `*at`. If so, advance `*at` to its end, and extend `*checksum` over it.
bool pass_placed(View view, size_t *at, uint32_t *checksum);

// Extend the checksum over checksums by a placed chunk.
uint32_t chained(const uint8_t *header, uint32_t checksum);

// Count the chunks in a view, up to `most`, by the lengths in their headers. An incomplete chunk counts as one.
size_t count_chunks(View view, size_t most);

// Write a placement and its checksum into a header.
void place(uint8_t *header, const Placement *placement, uint64_t first_record);

#endif
