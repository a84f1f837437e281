// The checksum of chunks that follow each other, made of the checksums that are in their headers.
#ifndef KERA_COMBINE_H
#define KERA_COMBINE_H

#include "chunk.h"

// Once, after `crc32c_init`.
void combine_init(void);

// `*checksum`, taken on over the chunks from `start` on, of which each ends where the next begins: at `ends`, `count`
// numbers of 4 bytes. False, and nothing has changed, if they are not one behind the other and within the view.
bool combine(View view, size_t start, const uint8_t *ends, size_t count, uint32_t *checksum);

#endif
