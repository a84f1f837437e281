// Record batches as lean payloads: kera/core/format/lean/encode.py does the same, byte by byte.
#ifndef KERA_LEAN_ENCODE_H
#define KERA_LEAN_ENCODE_H

#include "arrow_data.h"
#include "bytes.h"

// A column of more is left as it is, for readers to have it in place.
#define PACKED_VALUES_MAX 1024
#define NODES_BYTES_MAX 0xffff

// The payload of some rows of a batch, without compression, into `payload`: false where Python knows more about it, or
// where there is no memory. The memory of `nodes` and `body` is used again by the next one.
bool encode_lean(const struct ArrowSchema *schema, const struct ArrowArray *batch, uint64_t start, uint64_t count,
                 uint64_t bytes_max, Bytes *nodes, Bytes *body);

// The same of all rows of a batch, with columns that it does not have: `sources` says where each column comes from. By
// its number, it is one of the batch's; `ONE_TIME`: the same time for all rows; below that: nulls, of which each takes
// `ONE_TIME - source` bytes.
#define ONE_TIME (-1)
#define NULL_BYTES_MAX ((int64_t)1 << 20)
bool encode_completed(const struct ArrowSchema *schema, const struct ArrowArray *batch, const int64_t *sources,
                      size_t columns, int64_t time_us, uint64_t bytes_max, Bytes *nodes, Bytes *body);

// Records of the default schema that have nothing but a time, a value and keys: see kera/core/format/schema.py.
typedef struct {
    uint64_t count;
    const int64_t *times;
    const int32_t *value_offsets;
    const uint8_t *value_data;
    const int32_t *lists;  // where the keys of each record begin, and of the last one end; NULL: no record has any
    const int32_t *key_offsets;
    const uint8_t *key_data;
} ValuesAndKeys;

bool encode_values(const ValuesAndKeys *records, uint64_t bytes_max, Bytes *nodes, Bytes *body);

#endif
