// Frames, and the small messages in their heads: kera/core/rpc/frames.py shows the layout.
#ifndef KERA_FRAME_H
#define KERA_FRAME_H

#include "bytes.h"
#include "chunk.h"

#define FRAME_BYTES 32
#define FRAME_REQUEST 1
#define FRAME_REPLY 2

typedef struct {
    uint8_t kind;
    uint32_t method, head_bytes, bulk_bytes;
    uint64_t request_id;
    View head, bulk;
    size_t bytes;  // the size of the whole frame
} Frame;

// Read the header at `at`, without `head`, `bulk` and `bytes`. Returns whether it is complete and valid.
bool read_frame_header(View view, size_t at, Frame *frame);

// Read the frame at `at`. Returns whether it is complete and valid, with a bulk of at most `bulk_bytes_max` bytes.
bool read_frame(View view, size_t at, uint32_t bulk_bytes_max, Frame *frame);

void write_frame_header(uint8_t *to, const Frame *frame);

// Write the header of a reply without bulk.
void write_reply(uint8_t *to, uint32_t method, uint64_t request_id, uint32_t head_bytes);

// Read a message with only numbers in fields below `fields`, into `numbers` by field; absent fields are 0. Returns
// false if the message has other fields, or is malformed.
bool read_numbers(View message, uint64_t *numbers, uint64_t fields);

static inline uint8_t *put_varint(uint8_t *at, uint64_t number)
{
    for (; number >= 128; number >>= 7)
        *at++ = (uint8_t)number | 128;
    *at++ = (uint8_t)number;
    return at;
}

// Write a field of a message, unless it is 0.
static inline uint8_t *put_number(uint8_t *at, int field, uint64_t number)
{
    if (number == 0)
        return at;
    *at++ = (uint8_t)(field << 3);
    return put_varint(at, number);
}

// The maximum number of bytes that `put_varint` or `put_number` writes.
#define NUMBER_BYTES_MAX 11

#endif
