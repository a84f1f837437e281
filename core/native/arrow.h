// Payloads of version 1, which are Arrow messages: kera/core/format/record_batch.py says what is checked, and why.
#ifndef KERA_ARROW_H
#define KERA_ARROW_H

#include "chunk.h"

// As in kera/core/format/record_batch.py.
#define DECOMPRESSED_BYTES_MAX ((uint64_t)128 << 20)
#define BATCH_RECORDS_WITHOUT_BYTES ((uint64_t)1 << 16)

// Whether a payload is an uncompressed record batch of `records` records whose values its bytes can hold.
bool is_arrow(View payload, uint64_t records);

#endif
