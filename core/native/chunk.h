// Chunks in memory: kera/core/format/chunk.py has the picture of a header, and says what each check is for.
//
// All functions look at memory that others may write at the same time: each number is read once, and what it says is
// checked against the memory that there is. None of them says what is wrong: that is asked of Python.
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

// Where fields begin.
#define VERSION_AT 4
#define FLAGS_AT 5
#define HEADER_BYTES_AT 6
#define PAYLOAD_BYTES_AT 8
#define PAYLOAD_CRC_AT 80
#define HEADER_CRC_AT 84
#define PLACEMENT_AT 88
#define PLACEMENT_CRC_AT 124

// Of the flags: a chunk without records.
#define PUNCTUATION 4

// A view of memory.
typedef struct {
    const uint8_t *at;
    size_t size;
} View;

// Where a broker puts chunks.
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

// Whether `size` bytes from `at` on are within a view.
static inline bool is_within(View view, size_t at, size_t size)
{
    return at <= view.size && size <= view.size - at;
}

static inline uint64_t padded(uint32_t payload_bytes)
{
    return ((uint64_t)payload_bytes + ALIGNMENT_BYTES - 1) & ~(uint64_t)(ALIGNMENT_BYTES - 1);
}

// Whether the 128 bytes are a header of a known version whose checksums are right; without a placement, too.
bool is_header(const uint8_t *header);

// Whether no broker has written its fields of a header.
bool is_unplaced_header(const uint8_t *header);

// Whether the payload of the chunk at `at` is whole and has this checksum.
bool is_payload(View view, size_t at, uint32_t payload_bytes, uint32_t checksum);

// Whether there is a whole placed chunk at `*at`: then `*at` is its end, and `*checksum` is taken on over it.
bool pass_placed(View view, size_t *at, uint32_t *checksum);

// The checksum over checksums, taken on over a placed chunk.
uint32_t chained(const uint8_t *header, uint32_t checksum);

// How many chunks there are from the start on, at most `most`, if all is as they say; a piece of one counts as one.
size_t count_chunks(View view, size_t most);

// Write a placement and its checksum into a header.
void place(uint8_t *header, const Placement *placement, uint64_t first_record);

#endif
