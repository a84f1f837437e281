// Arithmetic with sizes from untrusted input. The functions return false if the result does not fit into 64 bits.
#ifndef KERA_SIZES_H
#define KERA_SIZES_H

#include <stdbool.h>
#include <stdint.h>

static inline bool product_of(uint64_t count, uint64_t width, uint64_t *size)
{
    return !__builtin_mul_overflow(count, width, size);
}

static inline bool sum_of(uint64_t size, uint64_t more, uint64_t *sum)
{
    return !__builtin_add_overflow(size, more, sum);
}

// Add the size of `count` values of `width` bytes.
static inline bool add_times(uint64_t *sum, uint64_t count, uint64_t width)
{
    uint64_t size;
    return product_of(count, width, &size) && sum_of(*sum, size, sum);
}

#endif
