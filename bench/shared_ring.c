// What bench/shared_ring.py measures of bytes: to check them, to copy them, and both in one pass.

#include "crc32c.h"

#include <string.h>

#define BLOCK_BYTES 24576 // stays in the nearest cache, and is what `crc32c` takes in three parts at once

// Check what is there, then copy it: only where nobody else can write to it meanwhile.
uint32_t check_then_copy(uint8_t *to, const uint8_t *from, size_t size)
{
    uint32_t checksum = crc32c(0, from, size);
    memcpy(to, from, size);
    return checksum;
}

// Block by block, copy and check the copy: memory is gone through once, and what was checked is what is kept.
uint32_t copy_and_check(uint8_t *to, const uint8_t *from, size_t size)
{
    uint32_t checksum = 0;
    for (size_t at = 0; at < size; at += BLOCK_BYTES) {
        size_t part = size - at < BLOCK_BYTES ? size - at : BLOCK_BYTES;
        memcpy(to + at, from + at, part);
        checksum = crc32c(checksum, to + at, part);
    }
    return checksum;
}
