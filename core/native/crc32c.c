// CRC-32C by the processor's instruction if it has one, which is detected at run time, or else by tables.
//
// The instruction takes 8 bytes. One can start in each cycle, but its result takes three cycles. So three parts of a
// long buffer are processed at once. To combine the parts, the checksum of one part is advanced over as many zero bytes
// as the next part has. There is a table for that for each length of a part.

#include "crc32c.h"

#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the chunk format is read in place: this needs a little-endian processor"
#endif

#if defined(__x86_64__)
#include <nmmintrin.h>
#define WITH_INSTRUCTION __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#define WITH_INSTRUCTION __attribute__((target("+crc")))
#endif

#define POLYNOMIAL 0x82f63b78u
#define LONG_PART 8192
#define SHORT_PART 256
#define AHEAD 1024

typedef uint32_t Table[256];

static Table tables[8];  // by the number of bytes behind a byte, among the 8 bytes that are processed at once
static Table over_long[4], over_short[4];  // for each byte of a checksum: its value after a part of zeros

// Advance the register of the checksum over bytes. The checksum is the complement of the register.
static uint32_t go_by_tables(uint32_t state, const uint8_t *at, size_t size)
{
    for (; size >= 8; at += 8, size -= 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        word ^= state;
        state = 0;
        for (int byte = 0; byte < 8; byte++)
            state ^= tables[7 - byte][word >> 8 * byte & 0xff];
    }
    for (; size > 0; at++, size--)
        state = state >> 8 ^ tables[0][(state ^ *at) & 0xff];
    return state;
}

static void fill_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t state = byte;
        for (int bit = 0; bit < 8; bit++)
            state = state & 1 ? state >> 1 ^ POLYNOMIAL : state >> 1;
        tables[0][byte] = state;
    }
    for (int behind = 1; behind < 8; behind++)
        for (int byte = 0; byte < 256; byte++)
            tables[behind][byte] = tables[behind - 1][byte] >> 8 ^ tables[0][tables[behind - 1][byte] & 0xff];
}

// Advancing over zeros is linear: the result for a byte is the sum of the results for its bits.
static void fill_over(Table over[4], size_t zeros)
{
    static const uint8_t none[LONG_PART];
    uint32_t bits[32];
    for (int bit = 0; bit < 32; bit++)
        bits[bit] = go_by_tables(1u << bit, none, zeros);
    for (int place = 0; place < 4; place++)
        for (int byte = 0; byte < 256; byte++) {
            over[place][byte] = 0;
            for (int bit = 0; bit < 8; bit++)
                if (byte >> bit & 1)
                    over[place][byte] ^= bits[8 * place + bit];
        }
}

#ifdef WITH_INSTRUCTION

static bool has_instruction(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2");
#else
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#endif
}

// States have 64 bits, as for the x86 instruction; the upper half is always zero.
WITH_INSTRUCTION static inline uint64_t step_8(uint64_t state, const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, 8);
#if defined(__x86_64__)
    return _mm_crc32_u64(state, word);
#else
    return __crc32cd((uint32_t)state, word);
#endif
}

WITH_INSTRUCTION static inline uint64_t step_4(uint64_t state, const uint8_t *at)
{
    uint32_t word;
    memcpy(&word, at, 4);
#if defined(__x86_64__)
    return _mm_crc32_u32((uint32_t)state, word);
#else
    return __crc32cw((uint32_t)state, word);
#endif
}

WITH_INSTRUCTION static inline uint64_t step_1(uint64_t state, uint8_t byte)
{
#if defined(__x86_64__)
    return _mm_crc32_u8((uint32_t)state, byte);
#else
    return __crc32cb((uint32_t)state, byte);
#endif
}

static inline uint32_t moved(const Table over[4], uint64_t state)
{
    return over[0][state & 0xff] ^ over[1][state >> 8 & 0xff] ^ over[2][state >> 16 & 0xff] ^ over[3][state >> 24];
}

// Process three parts at a time while there are three, and advance `*at` past them.
WITH_INSTRUCTION static inline uint64_t
three_parts(uint64_t state, const uint8_t **at, const uint8_t *end, size_t part, const Table over[4])
{
    while ((size_t)(end - *at) >= 3 * part) {
        uint64_t second = 0, third = 0;
        const uint8_t *first_end = *at + part;
        for (const uint8_t *word = *at; word < first_end; word += 64) {
            __builtin_prefetch(word + AHEAD);
            __builtin_prefetch(word + part + AHEAD);
            __builtin_prefetch(word + 2 * part + AHEAD);
            for (int byte = 0; byte < 64; byte += 8) {
                state = step_8(state, word + byte);
                second = step_8(second, word + part + byte);
                third = step_8(third, word + 2 * part + byte);
            }
        }
        state = moved(over, state) ^ second;
        state = moved(over, state) ^ third;
        *at += 3 * part;
    }
    return state;
}

WITH_INSTRUCTION static uint32_t go_by_instruction(uint32_t begin, const uint8_t *at, size_t size)
{
    uint64_t state = begin;
    const uint8_t *end = at + size;
    state = three_parts(state, &at, end, LONG_PART, over_long);
    state = three_parts(state, &at, end, SHORT_PART, over_short);
    for (; end - at >= 8; at += 8)
        state = step_8(state, at);
    if (end - at >= 4) {  // headers end with 4 bytes
        state = step_4(state, at);
        at += 4;
    }
    for (; at < end; at++)
        state = step_1(state, *at);
    return (uint32_t)state;
}

#endif

static uint32_t (*go)(uint32_t, const uint8_t *, size_t) = go_by_tables;

bool crc32c_init(void)
{
    fill_tables();
    fill_over(over_long, LONG_PART);
    fill_over(over_short, SHORT_PART);
#ifdef WITH_INSTRUCTION
    if (has_instruction())
        go = go_by_instruction;
    return go == go_by_instruction;
#else
    return false;
#endif
}

uint32_t crc32c(uint32_t checksum, const uint8_t *at, size_t size)
{
    return ~go(~checksum, at, size);
}

uint32_t crc32c_by_tables(uint32_t checksum, const uint8_t *at, size_t size)
{
    return ~go_by_tables(~checksum, at, size);
}
