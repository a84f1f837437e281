// How the key of a record determines its streamlet, see kera/client/producing/encoding/partitioner.py.
#ifndef KERA_KEY_HASH_H
#define KERA_KEY_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef uint32_t KeyHash(const uint8_t *at, size_t size);

// To be called once, before anything else here and after crc32c_init.
void key_hash_init(void);

KeyHash hash_crc32c, hash_crc32, hash_murmur2;

typedef struct {
    const char *name;
    KeyHash *hash;
    uint32_t mask;  // the bits of the hash that are used
    bool takes_empty;  // whether an empty key determines the streamlet; if not, it counts as no key
} Partitioner;

// The partitioner of that name; NULL: there is none.
const Partitioner *partitioner_named(const char *name);

#endif
