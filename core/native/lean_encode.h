// Record batches as lean payloads: kera/core/format/lean/encode.py does the same, byte by byte.
#ifndef KERA_LEAN_ENCODE_H
#define KERA_LEAN_ENCODE_H

#include "arrow_data.h"
#include "bytes.h"

// A column with more values is stored as in Arrow's arrays, so that readers can use it in place.
#define PACKED_VALUES_MAX 1024
#define NODES_BYTES_MAX 0xffff

// Encode `count` rows of a batch from `start` on as a payload without compression: `nodes`, followed by `body`. Returns
// false if Python has to encode them, or if there is no memory. The next call reuses the memory of `nodes` and `body`.
bool encode_lean(const struct ArrowSchema *schema, const struct ArrowArray *batch, uint64_t start, uint64_t count,
                 uint64_t bytes_max, Bytes *nodes, Bytes *body);

// Encode all rows of a batch with columns that it does not have: `sources` has the source of each column. A number from
// 0 on is a column of the batch; `ONE_TIME` is the same time for all rows; a lower number means nulls of
// `ONE_TIME - source` bytes each.
#define ONE_TIME (-1)
#define NULL_BYTES_MAX ((int64_t)1 << 20)
bool encode_completed(const struct ArrowSchema *schema, const struct ArrowArray *batch, const int64_t *sources,
                      size_t columns, int64_t time_us, uint64_t bytes_max, Bytes *nodes, Bytes *body);

// Records of the default schema with only times, values and keys: see kera/core/format/schema.py.
typedef struct {
    uint64_t count;
    const int64_t *times;
    const int32_t *value_offsets;
    const uint8_t *value_data;
    const int32_t *lists;  // where the keys of each record begin, and the last ones end; NULL: there are no keys
    const int32_t *key_offsets;
    const uint8_t *key_data;
} ValuesAndKeys;

bool encode_values(const ValuesAndKeys *records, uint64_t bytes_max, Bytes *nodes, Bytes *body);

#endif
