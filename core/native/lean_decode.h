// Lean payloads as Arrow arrays: kera/core/format/lean/decode.py does the same.
#ifndef KERA_LEAN_DECODE_H
#define KERA_LEAN_DECODE_H

#include "lean_arrays.h"

// Decode an uncompressed payload of `records` records into `batch`. Values that are stored as in Arrow's arrays stay in
// the payload, which `owner` keeps. The values themselves are not checked. Returns false if the payload is invalid,
// would expand to more than `bytes_max` bytes, or has to be decoded by Python; then the owner is not called.
bool decode_lean(View payload, const Type *type, uint64_t records, uint64_t bytes_max, Owner owner,
                 struct ArrowArray *batch);

#endif
