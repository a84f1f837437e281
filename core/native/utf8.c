// UTF-8 as Python accepts it: no surrogates, nothing above U+10FFFF, no overlong encodings.

#include "utf8.h"

#include <stdbool.h>
#include <string.h>

// The index of the first byte from `from` on that is not ASCII, or `size`.
static size_t skip_ascii(const uint8_t *at, size_t from, size_t size)
{
    while (size - from >= 8) {
        uint64_t word;
        memcpy(&word, at + from, 8);
        if (word & 0x8080808080808080u)
            break;
        from += 8;
    }
    while (from < size && at[from] < 0x80)
        from++;
    return from;
}

static inline bool goes_on(uint8_t byte)
{
    return (byte & 0xc0) == 0x80;
}

// The length of the character, not an ASCII one, that begins at `at`, where `left` bytes are left. 0: it is invalid.
static inline size_t bytes_of_character(const uint8_t *at, size_t left)
{
    uint8_t first = at[0];
    if (left < 2 || !goes_on(at[1]))
        return 0;
    if (first < 0xe0)
        return first >= 0xc2 ? 2 : 0;
    if (left < 3 || !goes_on(at[2]))
        return 0;
    if (first < 0xf0)  // neither overlong nor a surrogate
        return (first != 0xe0 || at[1] >= 0xa0) && (first != 0xed || at[1] < 0xa0) ? 3 : 0;
    if (left < 4 || !goes_on(at[3]) || first > 0xf4)
        return 0;
    return (first != 0xf0 || at[1] >= 0x90) && (first != 0xf4 || at[1] < 0x90) ? 4 : 0;
}

enum text_is text_is(const uint8_t *at, size_t size)
{
    size_t from = skip_ascii(at, 0, size);
    if (from == size)
        return ASCII;
    while (from < size) {
        if (at[from] < 0x80) {
            from = skip_ascii(at, from + 1, size);
            continue;
        }
        size_t bytes = bytes_of_character(at + from, size - from);
        if (bytes == 0)
            return NO_UTF8;
        from += bytes;
    }
    return UTF8;
}
