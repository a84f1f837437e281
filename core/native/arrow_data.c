// See arrow_data.h.

#include "arrow_data.h"

#define BITS_OF_DECIMALS 128

// Read a decimal number, and advance `*at` past it. Returns -1 if there is none, or it is larger than Arrow allows.
static int64_t read_number(const char **at)
{
    int64_t number = -1;
    while (**at >= '0' && **at <= '9' && number <= INT32_MAX) {
        number = (number < 0 ? 0 : 10 * number) + (**at - '0');
        (*at)++;
    }
    return number <= INT32_MAX ? number : -1;
}

static int fixed_of(uint64_t width)
{
    switch (width) {
    case 1:
        return FIXED_1;
    case 2:
        return FIXED_2;
    case 4:
        return FIXED_4;
    case 8:
        return FIXED_8;
    case 16:
        return FIXED_16;
    default:
        return FIXED;
    }
}

static bool is_fixed(Column *column, uint64_t width)
{
    column->width = width;
    column->kind = fixed_of(width);
    return true;
}

static bool is_kind(Column *column, int kind)
{
    column->kind = kind;
    return true;
}

// `at`: behind the colon of "d:precision,scale" or "d:precision,scale,bits".
static bool read_decimal(const char *at, Column *column)
{
    int64_t bits = BITS_OF_DECIMALS;
    if (read_number(&at) < 0 || *at++ != ',')
        return false;
    at += *at == '-';
    if (read_number(&at) < 0)
        return false;
    if (*at == ',') {
        at++;
        bits = read_number(&at);
    }
    return *at == '\0' && bits > 0 && bits % 8 == 0 && is_fixed(column, (uint64_t)bits / 8);
}

// Dates, times, timestamps and durations, but not intervals.
static bool read_time(const char *format, Column *column)
{
    switch (format[0]) {
    case 'd':
        return is_fixed(column, format[1] == 'D' ? 4 : 8);
    case 't':
        return is_fixed(column, format[1] == 's' || format[1] == 'm' ? 4 : 8);
    case 's':
    case 'D':
        return is_fixed(column, 8);
    default:
        return false;
    }
}

static bool read_nested(const char *format, Column *column)
{
    switch (format[0]) {
    case 'l':
        return is_kind(column, LIST);
    case 'L':
        return is_kind(column, LARGE_LIST);
    case 's':
        return is_kind(column, STRUCT);
    case 'm':
        column->is_map = true;
        return is_kind(column, LIST);
    case 'w': {
        const char *at = format + 2;
        int64_t size = format[1] == ':' ? read_number(&at) : -1;
        column->width = (uint64_t)size;
        return size >= 0 && is_kind(column, FIXED_LIST);
    }
    default:
        return false;
    }
}

bool read_column(const struct ArrowSchema *schema, Column *column)
{
    const char *format = schema->format, *at = format + 2;
    *column = (Column){0};
    if (schema->dictionary != NULL)
        return false;
    switch (format[0]) {
    case 'n':
        return is_kind(column, NULLS);
    case 'b':
        return is_kind(column, BITS);
    case 'c':
    case 'C':
        return is_fixed(column, 1);
    case 's':
    case 'S':
    case 'e':
        return is_fixed(column, 2);
    case 'i':
    case 'I':
    case 'f':
        return is_fixed(column, 4);
    case 'l':
    case 'L':
    case 'g':
        return is_fixed(column, 8);
    case 'z':
        return is_kind(column, BINARY);
    case 'Z':
        return is_kind(column, LARGE_BINARY);
    case 'u':
        return is_kind(column, TEXT);
    case 'U':
        return is_kind(column, LARGE_TEXT);
    case 'd':
        return format[1] == ':' && read_decimal(at, column);
    case 'w': {
        int64_t width = format[1] == ':' ? read_number(&at) : -1;
        column->width = (uint64_t)width;
        return width >= 0 && is_kind(column, FIXED);
    }
    case 't':
        return format[1] != '\0' && read_time(format + 1, column);
    case '+':
        return read_nested(format + 1, column);
    default:
        return false;
    }
}
