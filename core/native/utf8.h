// Whether bytes are text.
#ifndef KERA_UTF8_H
#define KERA_UTF8_H

#include <stddef.h>
#include <stdint.h>

enum text_is { NO_UTF8, UTF8, ASCII };

// What the bytes are: text in UTF-8, such of which each byte is a character, or neither.
enum text_is text_is(const uint8_t *at, size_t size);

#endif
