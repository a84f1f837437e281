// See lean_join.h. It does not trust the payloads: each number is checked against the payload's size before its use.

#include "lean_join.h"

#include "bytes.h"
#include "lean_numbers.h"
#include "lean_reader.h"

// A column, or a child of one.
struct Joined {
    Bytes validity;  // empty until there is a null
    Bytes values;    // values or offsets
    Bytes data;
    uint64_t length;
    int64_t children_count;
    Joined *children;
};

// -- memory ---------------------------------------------------------------------------------------------------------

static bool put_zeros(Bytes *bytes, size_t size)
{
    if (!make_room(bytes, size))
        return false;
    if (size > 0)
        memset(bytes->at + bytes->size, 0, size);
    bytes->size += size;
    return true;
}

// Extend `numbers` by `count` numbers of `width` bytes, for the caller to write. Returns NULL if there is no memory.
static uint8_t *more_numbers(Bytes *numbers, uint64_t width, uint64_t count)
{
    uint64_t size;
    if (!product_of(count, width, &size) || !make_room(numbers, size))
        return NULL;
    uint8_t *at = numbers->at + numbers->size;
    numbers->size += size;
    return at;
}

// Write a number of 4 or 8 bytes.
static void put_number(uint8_t *numbers, uint64_t index, uint64_t width, uint64_t number)
{
    if (width == 4)
        memcpy(numbers + 4 * index, &number, 4);
    else
        memcpy(numbers + 8 * index, &number, 8);
}

static uint64_t offset_bytes_of(int kind)
{
    return is_large(kind) ? 8 : 4;
}

static void clear(Joined *joined)
{
    for (int64_t child = 0; child < joined->children_count; child++)
        clear(&joined->children[child]);
    free(joined->children);
    free_bytes(&joined->validity);
    free_bytes(&joined->values);
    free_bytes(&joined->data);
}

static bool begin(Joined *joined, const Type *type)
{
    if (has_places(type->column.kind) && !put_zeros(&joined->values, offset_bytes_of(type->column.kind)))
        return false;
    if (type->children_count > 0) {
        joined->children = calloc((size_t)type->children_count, sizeof *joined->children);
        if (joined->children == NULL)
            return false;
        joined->children_count = type->children_count;
    }
    for (int64_t child = 0; child < type->children_count; child++)
        if (!begin(&joined->children[child], &type->children[child]))
            return false;
    return true;
}

Joined *new_joined(const Type *type)
{
    Joined *joined = calloc(1, sizeof *joined);
    if (joined != NULL && !begin(joined, type)) {
        free_joined(joined);
        return NULL;
    }
    return joined;
}

void free_joined(Joined *joined)
{
    clear(joined);
    free(joined);
}

// -- bits -----------------------------------------------------------------------------------------------------------

// Up to eight bits from `index` on, of `count` bits.
static uint32_t bits_at(const uint8_t *bits, uint64_t index, uint64_t count)
{
    uint64_t byte = index / 8, shift = index % 8;
    uint32_t found = (uint32_t)bits[byte] >> shift;
    return shift != 0 && byte + 1 < bytes_of_bits(count) ? found | (uint32_t)bits[byte + 1] << (8 - shift) : found;
}

// Add `count` bits after the first `length` ones; `from` NULL: the bits of `same`, again and again.
static bool put_bits(Bytes *bits, uint64_t length, const uint8_t *from, uint32_t same, uint64_t count)
{
    if (!put_zeros(bits, bytes_of_bits(length + count) - bits->size))
        return false;
    for (uint64_t index = 0, taken; index < count; index += taken) {
        uint64_t at = length + index, shift = at % 8;
        taken = 8 - shift < count - index ? 8 - shift : count - index;
        uint32_t found = from == NULL ? same : bits_at(from, index, count);
        bits->at[at / 8] |= (uint8_t)((found & ((1u << taken) - 1)) << shift);
    }
    return true;
}

// Add the validity bits of `count` more values; `bits` NULL: those of `same`, which is 0 for nulls.
static bool put_validity(Joined *to, const uint8_t *bits, uint32_t same, uint64_t count)
{
    bool without = to->validity.size == 0;
    if (without && bits == NULL && same != 0)
        return true;
    return (!without || put_bits(&to->validity, 0, NULL, 0xff, to->length)) &&
           put_bits(&to->validity, to->length, bits, same, count);
}

// -- values ---------------------------------------------------------------------------------------------------------

static bool put_same_offsets(Joined *to, uint64_t width, uint64_t count)
{
    uint64_t last = offset_at(to->values.at, to->values.size / width - 1, width);
    uint8_t *offsets = more_numbers(&to->values, width, count);
    if (offsets != NULL)
        write_ends(offsets, NULL, 0, 0, width, last, count);
    return offsets != NULL;
}

// Add nulls, of any type. The caller has counted their bytes.
static bool join_nulls(Joined *to, const Type *type, uint64_t count)
{
    const Column *column = &type->column;
    uint64_t within, size = 0;
    bool good = product_of(count, column->kind == FIXED_LIST ? column->width : column->kind == STRUCT, &within) &&
                (column->kind == NULLS || put_validity(to, NULL, 0, count));
    for (int64_t child = 0; good && within > 0 && child < type->children_count; child++)
        good = join_nulls(&to->children[child], &type->children[child], within);
    if (good && has_places(column->kind))
        good = put_same_offsets(to, offset_bytes_of(column->kind), count);
    else if (good && column->kind == BITS)
        good = put_bits(&to->values, to->length, NULL, 0, count);
    else if (good && buffers_of(column) == 2)
        good = product_of(count, column->width, &size) && put_zeros(&to->values, size);
    to->length += count;
    return good;
}

static bool join_one(Reader *reader, const Column *column, uint64_t count, Joined *to)
{
    uint64_t width = column->kind == BITS ? 1 : column->width;
    const uint8_t *one = column->kind == FIXED ? NULL : take_inline(reader, width);
    if (one == NULL)
        return false;
    if (column->kind == BITS)
        return put_bits(&to->values, to->length, NULL, *one ? 0xff : 0, count);
    uint8_t *values = more_numbers(&to->values, width, count);
    if (values != NULL)
        repeat_value(values, one, width, count);
    return values != NULL;
}

static bool join_deltas(Reader *reader, const Column *column, uint64_t count, Joined *to)
{
    uint64_t width = column->width, least = 0, at;
    const uint8_t *one = take_inline(reader, width);
    uint8_t bytes;
    if ((column->kind != FIXED_4 && column->kind != FIXED_8) || one == NULL || !take_byte(reader, &bytes) ||
        (bytes != 1 && bytes != 2 && bytes != 4) || bytes >= width || !take_place(reader, count, bytes, bytes, &at))
        return false;
    uint8_t *values = more_numbers(&to->values, width, count);
    memcpy(&least, one, width);
    if (values != NULL)
        add_deltas(values, least, reader->body + at, bytes, width, count);
    return values != NULL;
}

static bool join_fixed(Reader *reader, const Type *type, int encoding, uint64_t count, Joined *to)
{
    const Column *column = &type->column;
    uint64_t width = column->width, at;
    if (column->kind == FIXED && (!take_varint(reader, &width) || width != column->width))
        return false;
    if (!count_written(reader, count, width ? width : 1))
        return false;
    switch (encoding) {
    case PLAIN:
        if (column->kind == BITS)
            return take_place(reader, bytes_of_bits(count), 1, 1, &at) &&
                   put_bits(&to->values, to->length, reader->body + at, 0, count);
        return take_place(reader, count, width, column->kind == FIXED ? 1 : width, &at) &&
               put_bytes(&to->values, reader->body + at, count * width);
    case ONE:
        return join_one(reader, column, count, to);
    case DELTAS:
        return join_deltas(reader, column, count, to);
    default:
        return false;
    }
}

// -- places ---------------------------------------------------------------------------------------------------------

// Add the offsets of `count` more values with `total` bytes or items together, after `before` existing ones.
static bool join_places(Reader *reader, int kind, int encoding, uint64_t count, uint64_t total, uint64_t before,
                        Joined *to)
{
    uint64_t width = offset_bytes_of(kind), bytes = encoding == OFFSETS ? width : encoding == LENGTHS_1 ? 1 : 2;
    uint64_t end = 0, at = 0;
    if (!is_large(kind) && before + total > SMALL_MAX)
        return false;
    if (encoding != SAME && !take_place(reader, encoding == OFFSETS ? count + 1 : count, bytes, bytes, &at))
        return false;
    const uint8_t *numbers = encoding == SAME ? NULL : reader->body + at;
    uint8_t *offsets = more_numbers(&to->values, width, count);
    if (offsets == NULL)
        return false;
    if (encoding != OFFSETS)
        return write_ends(offsets, numbers, bytes, count ? total / count : 0, width, before, count) == before + total;
    if (offset_at(numbers, 0, width) != 0)
        return false;
    for (uint64_t index = 0; index < count; index++) {
        uint64_t start = end;
        end = offset_at(numbers, index + 1, width);
        if (end < start || end > total)
            return false;
        put_number(offsets, index, width, before + end);
    }
    return end == total;
}

static bool join_node(Reader *reader, const Type *type, uint64_t count, int depth, Joined *to);

static bool join_with_places(Reader *reader, const Type *type, int encoding, uint64_t count, int depth, Joined *to)
{
    int kind = type->column.kind;
    uint64_t total, at, before = is_list(kind) ? to->children[0].length : to->data.size;
    if (!take_varint(reader, &total) || (!is_large(kind) && total > SMALL_MAX) ||
        !count_written(reader, count + 1, offset_bytes_of(kind)) ||
        !join_places(reader, kind, encoding, count, total, before, to))
        return false;
    if (!is_list(kind))
        return count_written(reader, total, 1) && take_place(reader, total, 1, 1, &at) &&
               put_bytes(&to->data, reader->body + at, total);
    return join_node(reader, &type->children[0], total, depth + 1, &to->children[0]);
}

// -- nodes ----------------------------------------------------------------------------------------------------------

static bool join_with_fields(Reader *reader, const Type *type, int encoding, uint64_t count, int depth, Joined *to)
{
    bool is_struct = type->column.kind == STRUCT;
    uint64_t size, within = count;
    if (encoding != 0 || !take_varint(reader, &size) || !count_written(reader, count, 1) ||
        size != (is_struct ? (uint64_t)type->children_count : type->column.width) ||
        (!is_struct && __builtin_mul_overflow(count, size, &within)))
        return false;
    for (int64_t child = 0; child < type->children_count; child++)
        if (!join_node(reader, &type->children[child], within, depth + 1, &to->children[child]))
            return false;
    return true;
}

static bool join_node(Reader *reader, const Type *type, uint64_t count, int depth, Joined *to)
{
    uint8_t first;
    uint64_t at;
    if (depth > DEPTH_MAX || count > NODE_VALUES_MAX || !take_byte(reader, &first) || !may_begin(type, first, count))
        return false;
    int kind = first & KIND_MASK, encoding = first >> ENCODING_SHIFT;
    if (first == NULLS)
        return count_written(reader, count, type->null_bytes) && join_nulls(to, type, count);
    if (kind != type->column.kind || kind == NULLS)
        return false;
    const uint8_t *bits = NULL;
    if (first & VALIDITY) {
        if (!take_place(reader, bytes_of_bits(count), 1, 1, &at))
            return false;
        bits = reader->body + at;
    }
    if (!put_validity(to, bits, 0xff, count))
        return false;
    bool good = has_places(kind)                       ? join_with_places(reader, type, encoding, count, depth, to)
                : kind == FIXED_LIST || kind == STRUCT ? join_with_fields(reader, type, encoding, count, depth, to)
                                                       : join_fixed(reader, type, encoding, count, to);
    to->length += count;
    return good;
}

bool join_payload(Joined *joined, const Type *type, View payload, uint64_t records, uint64_t bytes_max,
                  uint64_t *written_bytes)
{
    Reader reader;
    if (!open_reader(payload, bytes_max, &reader))
        return false;
    for (int64_t column = 0; column < type->children_count; column++)
        if (!join_node(&reader, &type->children[column], records, 0, &joined->children[column]))
            return false;
    joined->length += records;
    *written_bytes = reader.written_bytes;
    return is_read(&reader);
}

// -- arrays ---------------------------------------------------------------------------------------------------------

static const void *start_of(const Bytes *bytes)
{
    static const uint64_t nothing[1];
    return bytes->at == NULL ? nothing : (const void *)bytes->at;
}

static bool make_arrays(Block *block, const Joined *joined, const Type *type, struct ArrowArray *array)
{
    int64_t buffers = buffers_of(&type->column);
    bool has_validity = joined->validity.size > 0;
    if (!make_array(block, array, joined->length, buffers, type->children_count))
        return false;
    array->null_count = buffers == 0 ? (int64_t)joined->length : has_validity ? -1 : 0;  // -1: not counted
    if (has_validity)
        array->buffers[0] = joined->validity.at;
    if (buffers > 1)
        array->buffers[1] = start_of(&joined->values);
    if (buffers > 2)
        array->buffers[2] = start_of(&joined->data);
    for (int64_t child = 0; child < type->children_count; child++)
        if (!make_arrays(block, &joined->children[child], &type->children[child], array->children[child]))
            return false;
    return true;
}

static void let_go(void *joined)
{
    free_joined(joined);
}

bool finish_joined(Joined *joined, const Type *type, struct ArrowArray *batch)
{
    Block *block = new_block((Owner){let_go, joined});
    if (block == NULL)
        return false;
    if (!make_arrays(block, joined, type, batch)) {
        free_block(block);
        return false;
    }
    arm(block, batch);
    return true;
}
