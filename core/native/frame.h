// Frames, and the small messages that are their heads: kera/core/rpc/frames.py has the picture.
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
    size_t bytes;  // of all of it
} Frame;

// Whether there is a header at `at`: `head`, `bulk` and `bytes` are not set.
bool read_frame_header(View view, size_t at, Frame *frame);

// Whether there is a whole frame at `at`, with a bulk of so many bytes at most.
bool read_frame(View view, size_t at, uint32_t bulk_bytes_max, Frame *frame);

void write_frame_header(uint8_t *to, const Frame *frame);

// Write the header of a reply without bulk.
void write_reply(uint8_t *to, uint32_t method, uint64_t request_id, uint32_t head_bytes);

// The numbers of a message that has no other fields, by field; what is not there is 0. False: it has, or is none.
bool read_numbers(View message, uint64_t *numbers, uint64_t fields);

static inline uint8_t *put_varint(uint8_t *at, uint64_t number)
{
    for (; number >= 128; number >>= 7)
        *at++ = (uint8_t)number | 128;
    *at++ = (uint8_t)number;
    return at;
}

// A field of a message, if it is not 0.
static inline uint8_t *put_number(uint8_t *at, int field, uint64_t number)
{
    if (number == 0)
        return at;
    *at++ = (uint8_t)(field << 3);
    return put_varint(at, number);
}

// At most so many bytes are put by either of them.
#define NUMBER_BYTES_MAX 11

#endif
