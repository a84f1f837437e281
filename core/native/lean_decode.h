// Lean payloads as Arrow arrays: kera/core/format/lean/decode.py does the same.
#ifndef KERA_LEAN_DECODE_H
#define KERA_LEAN_DECODE_H

#include "lean_arrays.h"

// The columns of a payload of so many records without compression: those in place that are written so. What the values
// are is not looked at. False where it is none, where it would become more than `bytes_max`, or where Python knows more
// about it: then the owner has nothing to let go of.
bool decode_lean(View payload, const Type *type, uint64_t records, uint64_t bytes_max, Owner owner,
                 struct ArrowArray *batch);

#endif
