// Checking whether bytes are valid UTF-8.
#ifndef KERA_UTF8_H
#define KERA_UTF8_H

#include <stddef.h>
#include <stdint.h>

enum text_is { NO_UTF8, UTF8, ASCII };

// Whether the bytes are ASCII, other UTF-8, or neither.
enum text_is text_is(const uint8_t *at, size_t size);

#endif
