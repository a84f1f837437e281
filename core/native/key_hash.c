// See key_hash.h. CRC-32 is the one of zlib and librdkafka, MurmurHash2 the one of Kafka's Java client, with the same
// seed, factor and shifts: with other ones, keys would go to other streamlets.

#include "key_hash.h"

#include <string.h>

#include "crc32c.h"

#define CRC32_POLYNOMIAL 0xedb88320u
#define MURMUR2_SEED 0x9747b28cu
#define MURMUR2_FACTOR 0x5bd1e995u
#define MURMUR2_SHIFT 24

static uint32_t crc32_of_byte[256];

void key_hash_init(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t state = byte;
        for (int bit = 0; bit < 8; bit++)
            state = state & 1 ? state >> 1 ^ CRC32_POLYNOMIAL : state >> 1;
        crc32_of_byte[byte] = state;
    }
}

uint32_t hash_crc32c(const uint8_t *at, size_t size)
{
    return crc32c(0, at, size);
}

uint32_t hash_crc32(const uint8_t *at, size_t size)
{
    uint32_t state = ~0u;
    for (; size > 0; at++, size--)
        state = state >> 8 ^ crc32_of_byte[(state ^ *at) & 0xff];
    return ~state;
}

uint32_t hash_murmur2(const uint8_t *at, size_t size)
{
    uint32_t hash = MURMUR2_SEED ^ (uint32_t)size;
    for (; size >= 4; at += 4, size -= 4) {
        uint32_t word;
        memcpy(&word, at, 4);
        word *= MURMUR2_FACTOR;
        word ^= word >> MURMUR2_SHIFT;
        word *= MURMUR2_FACTOR;
        hash = hash * MURMUR2_FACTOR ^ word;
    }
    if (size > 0) {
        uint32_t rest = 0;
        memcpy(&rest, at, size);
        hash = (hash ^ rest) * MURMUR2_FACTOR;
    }
    hash ^= hash >> 13;
    hash *= MURMUR2_FACTOR;
    return hash ^ hash >> 15;
}

const Partitioner *partitioner_named(const char *name)
{
    static const Partitioner known[] = {
        {"crc32c", hash_crc32c, ~0u, true},
        {"murmur2_random", hash_murmur2, 0x7fffffff, true},
        {"consistent_random", hash_crc32, ~0u, false},
    };
    for (size_t index = 0; index < sizeof known / sizeof known[0]; index++)
        if (strcmp(known[index].name, name) == 0)
            return &known[index];
    return NULL;
}
