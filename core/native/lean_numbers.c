// See lean_numbers.h.

#include "lean_numbers.h"

#include <string.h>

#define PUT(to, index, value) memcpy((to) + sizeof(value) * (index), &(value), sizeof(value))

void repeat_value(uint8_t *to, const uint8_t *one, uint64_t width, uint64_t count)
{
    if (width == 8)
        for (uint64_t index = 0; index < count; index++)
            memcpy(to + 8 * index, one, 8);
    else
        for (uint64_t index = 0; index < count; index++)
            memcpy(to + width * index, one, width);
}

#define ADD(Value, Delta)                                                                                              \
    for (uint64_t index = 0; index < count; index++) {                                                                 \
        Delta delta;                                                                                                   \
        memcpy(&delta, deltas + sizeof delta * index, sizeof delta);                                                   \
        Value value = (Value)(least + delta);                                                                          \
        PUT(to, index, value);                                                                                         \
    }

void add_deltas(uint8_t *to, uint64_t least, const uint8_t *deltas, uint64_t bytes, uint64_t width, uint64_t count)
{
    if (width == 8 && bytes == 4)
        ADD(uint64_t, uint32_t)
    else if (width == 8 && bytes == 2)
        ADD(uint64_t, uint16_t)
    else if (width == 8)
        ADD(uint64_t, uint8_t)
    else if (bytes == 2)
        ADD(uint32_t, uint16_t)
    else
        ADD(uint32_t, uint8_t)
}

#define WRITE_ENDS(Offset, length)                                                                                     \
    for (uint64_t index = 0; index < count; index++) {                                                                 \
        end += length;                                                                                                 \
        Offset offset = (Offset)end;                                                                                   \
        PUT(to, index, offset);                                                                                        \
    }

static uint64_t write_same(uint8_t *to, uint64_t same, uint64_t width, uint64_t end, uint64_t count)
{
    if (width == 4)
        WRITE_ENDS(uint32_t, same)
    else
        WRITE_ENDS(uint64_t, same)
    return end;
}

static uint64_t write_bytes(uint8_t *to, const uint8_t *lengths, uint64_t width, uint64_t end, uint64_t count)
{
    if (width == 4)
        WRITE_ENDS(uint32_t, lengths[index])
    else
        WRITE_ENDS(uint64_t, lengths[index])
    return end;
}

static inline uint64_t short_at(const uint8_t *lengths, uint64_t index)
{
    uint16_t length;
    memcpy(&length, lengths + 2 * index, 2);
    return length;
}

static uint64_t write_shorts(uint8_t *to, const uint8_t *lengths, uint64_t width, uint64_t end, uint64_t count)
{
    if (width == 4)
        WRITE_ENDS(uint32_t, short_at(lengths, index))
    else
        WRITE_ENDS(uint64_t, short_at(lengths, index))
    return end;
}

uint64_t write_ends(uint8_t *to, const uint8_t *lengths, uint64_t bytes, uint64_t same, uint64_t width, uint64_t begin,
                    uint64_t count)
{
    if (lengths == NULL)
        return write_same(to, same, width, begin, count);
    return (bytes == 1 ? write_bytes : write_shorts)(to, lengths, width, begin, count);
}
