// See frame.h.

#include "frame.h"

#include "crc32c.h"

#define FRAME_MAGIC "KF"
#define FRAME_VERSION 1
#define COVERED_BYTES 28

bool read_frame_header(View view, size_t at, Frame *frame)
{
    if (!is_within(view, at, FRAME_BYTES))
        return false;
    const uint8_t *header = view.at + at;
    *frame = (Frame){
        .kind = header[3],
        .method = u32_at(header + 4),
        .request_id = u64_at(header + 8),
        .head_bytes = u32_at(header + 16),
        .bulk_bytes = u32_at(header + 20),
    };
    return memcmp(header, FRAME_MAGIC, 2) == 0 && header[2] == FRAME_VERSION &&
           crc32c(0, header, COVERED_BYTES) == u32_at(header + COVERED_BYTES);
}

bool read_frame(View view, size_t at, uint32_t bulk_bytes_max, Frame *frame)
{
    if (!read_frame_header(view, at, frame) || frame->bulk_bytes > bulk_bytes_max)
        return false;
    const uint8_t *header = view.at + at;
    size_t rest = view.size - at - FRAME_BYTES;
    if (frame->head_bytes > rest || frame->bulk_bytes > rest - frame->head_bytes)
        return false;
    frame->head = (View){header + FRAME_BYTES, frame->head_bytes};
    frame->bulk = (View){header + FRAME_BYTES + frame->head_bytes, frame->bulk_bytes};
    frame->bytes = FRAME_BYTES + (size_t)frame->head_bytes + frame->bulk_bytes;
    return true;
}

void write_frame_header(uint8_t *to, const Frame *frame)
{
    memset(to, 0, FRAME_BYTES);
    memcpy(to, FRAME_MAGIC, 2);
    to[2] = FRAME_VERSION;
    to[3] = frame->kind;
    memcpy(to + 4, &frame->method, sizeof frame->method);
    memcpy(to + 8, &frame->request_id, sizeof frame->request_id);
    memcpy(to + 16, &frame->head_bytes, sizeof frame->head_bytes);
    memcpy(to + 20, &frame->bulk_bytes, sizeof frame->bulk_bytes);
    uint32_t checksum = crc32c(0, to, COVERED_BYTES);
    memcpy(to + COVERED_BYTES, &checksum, sizeof checksum);
}

void write_reply(uint8_t *to, uint32_t method, uint64_t request_id, uint32_t head_bytes)
{
    Frame frame = {.kind = FRAME_REPLY, .method = method, .request_id = request_id, .head_bytes = head_bytes};
    write_frame_header(to, &frame);
}

static bool read_varint(View message, size_t *at, uint64_t *number)
{
    *number = 0;
    for (unsigned shift = 0; shift < 63 && *at < message.size; shift += 7) {
        uint8_t byte = message.at[(*at)++];
        *number |= (uint64_t)(byte & 127) << shift;
        if (byte < 128)
            return true;
    }
    if (*at >= message.size || message.at[*at] > 1)
        return false;
    *number |= (uint64_t)message.at[(*at)++] << 63;
    return true;
}

bool read_numbers(View message, uint64_t *numbers, uint64_t fields)
{
    memset(numbers, 0, (size_t)fields * sizeof *numbers);
    uint64_t number;
    for (size_t at = 0; at < message.size;) {
        uint8_t tag = message.at[at++];  // one byte: protobuf may reject a longer tag
        if ((tag & (128 | 7)) != 0 || tag >> 3 == 0 || tag >> 3 >= fields || !read_varint(message, &at, &number))
            return false;
        numbers[tag >> 3] = number;
    }
    return true;
}
