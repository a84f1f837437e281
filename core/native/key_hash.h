// How the key of a record decides its streamlet, see kera/client/producing/encoding/partitioner.py.
#ifndef KERA_KEY_HASH_H
#define KERA_KEY_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint32_t KeyHash(const uint8_t *at, size_t size);

// Once, before anything else here, and after crc32c_init.
void key_hash_init(void);

KeyHash hash_crc32c, hash_crc32, hash_murmur2;

typedef struct {
    const char *name;
    KeyHash *hash;
    uint32_t mask;  // the bits of the hash that count
    bool takes_empty;  // whether an empty key decides; if not, it is as good as none
} Partitioner;

// NULL: there is none of that name.
const Partitioner *partitioner_named(const char *name);

#endif
