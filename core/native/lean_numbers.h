// Numbers of lean payloads, written out: one value again and again, deltas, lengths. A loop for each pair of widths, as
// the compiler makes the most of those that it knows; nothing is checked here but what a sum comes to.
#ifndef KERA_LEAN_NUMBERS_H
#define KERA_LEAN_NUMBERS_H

#include <stdint.h>

// The value of `width` bytes at `one`, so often.
void repeat_value(uint8_t *to, const uint8_t *one, uint64_t width, uint64_t count);

// The sums of `least` and each delta of 1, 2 or 4 `bytes`, of `width` bytes (4 or 8, and more than deltas have).
void add_deltas(uint8_t *to, uint64_t least, const uint8_t *deltas, uint64_t bytes, uint64_t width, uint64_t count);

// Ends of values with lengths of 1 or 2 `bytes`, or (`lengths` NULL) all of `same`, of which the first begins at
// `begin`; offsets of `width` bytes, 4 or 8. Returns the last, in 64 bits: whether offsets of 4 bytes can say all of
// them is seen by it, as none is larger.
uint64_t write_ends(uint8_t *to, const uint8_t *lengths, uint64_t bytes, uint64_t same, uint64_t width, uint64_t begin,
                    uint64_t count);

#endif
