// A growing buffer of bytes.
#ifndef KERA_BYTES_H
#define KERA_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint8_t *at;
    size_t size, room;
} Bytes;

// Make room for `more` bytes at the end. Returns false if there is no memory.
static inline bool make_room(Bytes *bytes, size_t more)
{
    if (bytes->room - bytes->size >= more)
        return true;
    if (more > SIZE_MAX / 4 || bytes->size > SIZE_MAX / 4)
        return false;
    size_t room = 2 * (bytes->size + more);
    uint8_t *at = realloc(bytes->at, room);
    if (at == NULL)
        return false;
    bytes->at = at;
    bytes->room = room;
    return true;
}

static inline bool put_bytes(Bytes *bytes, const void *from, size_t size)
{
    if (!make_room(bytes, size))
        return false;
    if (size > 0)
        memcpy(bytes->at + bytes->size, from, size);
    bytes->size += size;
    return true;
}

static inline bool put_byte(Bytes *bytes, uint8_t byte)
{
    return put_bytes(bytes, &byte, 1);
}

static inline void free_bytes(Bytes *bytes)
{
    free(bytes->at);
    *bytes = (Bytes){0};
}

#endif
