// CRC-32C (Castagnoli), as the chunk format has it.
#ifndef KERA_CRC32C_H
#define KERA_CRC32C_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Once, before anything else here. Whether the processor has an instruction for it.
bool crc32c_init(void);

// The checksum of `size` bytes behind those that have `checksum`: 0 if there are none.
uint32_t crc32c(uint32_t checksum, const uint8_t *at, size_t size);

// The same without the instruction, whatever the processor has.
uint32_t crc32c_by_tables(uint32_t checksum, const uint8_t *at, size_t size);

#endif
