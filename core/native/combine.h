// The checksum of consecutive chunks, computed from the checksums in their headers.
#ifndef KERA_COMBINE_H
#define KERA_COMBINE_H

#include "chunk.h"

// To be called once, after `crc32c_init`.
void combine_init(void);

// Extend `*checksum` over the consecutive chunks from `start` on, which end at `ends`: `count` numbers of 4 bytes.
// Returns false, and changes nothing, if the ends do not ascend or are outside the view.
bool combine(View view, size_t start, const uint8_t *ends, size_t count, uint32_t *checksum);

#endif
