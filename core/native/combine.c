// The checksum of data with more bytes appended is the data's checksum, multiplied by a power of x modulo the
// polynomial, plus the checksum of those bytes. kera/core/format/combined_checksum.py has the Python twin, and explains
// which parts of a header need not be read.

#include "combine.h"

#include "crc32c.h"

#define POLYNOMIAL 0x82f63b78u
#define ONE 0x80000000u  // bits are reflected: the highest one is the coefficient of 1
#define BYTE 0x00800000u  // x to the eighth: the factor for each byte that follows

static uint32_t powers[4][256];  // powers of BYTE, by the bytes of the exponent
static uint32_t header_checksum;  // the checksum of any placed header whose own checksums are right

static uint32_t product(uint32_t a, uint32_t b)
{
    uint32_t sum = 0;
    for (int bit = 31; bit >= 0; bit--) {
        sum ^= b & -(a >> bit & 1);
        b = b >> 1 ^ (POLYNOMIAL & -(b & 1));
    }
    return sum;
}

static uint32_t power(uint32_t bytes)
{
    uint32_t found = powers[0][bytes & 0xff];
    for (int place = 1; place < 4; place++)
        if (bytes >> 8 * place & 0xff)
            found = product(found, powers[place][bytes >> 8 * place & 0xff]);
    return found;
}

void combine_init(void)
{
    static const uint8_t none[4];
    uint32_t base = BYTE;
    for (int place = 0; place < 4; place++) {
        powers[place][0] = ONE;
        for (int digit = 1; digit < 256; digit++)
            powers[place][digit] = product(powers[place][digit - 1], base);
        base = product(powers[place][255], base);
    }
    uint32_t with_own = crc32c(0, none, sizeof none);  // the checksum of nothing followed by its own checksum
    header_checksum = product(with_own, power(HEADER_BYTES - PLACEMENT_AT)) ^ with_own;
}

bool combine(View view, size_t start, const uint8_t *ends, size_t count, uint32_t *checksum)
{
    uint32_t combined = *checksum, header = 0, over = 0;
    size_t chunk_bytes = 0;
    for (size_t index = 0; index < count; index++) {
        size_t end = u32_at(ends + 4 * index);
        if (end > view.size || end < start || end - start < HEADER_BYTES)
            return false;
        if (end - start != chunk_bytes) {  // most chunks of a segment have the same length
            chunk_bytes = end - start;
            over = power((uint32_t)chunk_bytes);
            header = product(header_checksum, power((uint32_t)chunk_bytes - HEADER_BYTES));
        }
        combined = product(over, combined) ^ header ^ u32_at(view.at + start + PAYLOAD_CRC_AT);
        start = end;
    }
    *checksum = combined;
    return true;
}
