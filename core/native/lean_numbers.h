// Expanding the numbers of lean payloads: repeated values, deltas and lengths. There is a loop for each pair of widths,
// as the compiler optimizes loops with constant widths best. Nothing is checked here, but sums are returned.
#ifndef KERA_LEAN_NUMBERS_H
#define KERA_LEAN_NUMBERS_H

#include <stdint.h>

// Write the value of `width` bytes at `one` `count` times.
void repeat_value(uint8_t *to, const uint8_t *one, uint64_t width, uint64_t count);

// Write the sums of `least` and each delta. A delta has 1, 2 or 4 `bytes`, and a sum 4 or 8 (`width`), which is more.
void add_deltas(uint8_t *to, uint64_t least, const uint8_t *deltas, uint64_t bytes, uint64_t width, uint64_t count);

// Write the ends of values, the first of which begins at `begin`, as offsets of 4 or 8 bytes (`width`). The lengths
// have 1 or 2 `bytes`; `lengths` NULL: all are `same`. Returns the last end in 64 bits. As no other is larger, it shows
// whether all of them fit into 4 bytes.
uint64_t write_ends(uint8_t *to, const uint8_t *lengths, uint64_t bytes, uint64_t same, uint64_t width, uint64_t begin,
                    uint64_t count);

#endif
