// CRC-32C (Castagnoli), the checksum of the chunk format.
#ifndef KERA_CRC32C_H
#define KERA_CRC32C_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// To be called once, before the other functions. Returns whether the processor has an instruction for CRC-32C.
bool crc32c_init(void);

// Extend `checksum`, that of the bytes before (0: none), over the `size` bytes at `at`.
uint32_t crc32c(uint32_t checksum, const uint8_t *at, size_t size);

// The same, always without the instruction.
uint32_t crc32c_by_tables(uint32_t checksum, const uint8_t *at, size_t size);

#endif
