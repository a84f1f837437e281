// See lean_decode.h.

#include "lean_decode.h"

#include "lean_numbers.h"
#include "lean_reader.h"

// -- arrays ---------------------------------------------------------------------------------------------------------

typedef struct {
    Reader reader;
    Block *block;
} Decoder;

static bool zeros(Decoder *decoder, struct ArrowArray *array, int buffer, uint64_t count, uint64_t width)
{
    return (array->buffers[buffer] = take_zeros(decoder->block, count, width)) != NULL;
}

// Make an array of nulls, of any type. The caller has counted its bytes.
static bool make_nulls(Decoder *decoder, const Type *type, uint64_t count, struct ArrowArray *array)
{
    const Column *column = &type->column;
    if (!make_array(decoder->block, array, count, buffers_of(column), type->children_count))
        return false;
    array->null_count = (int64_t)count;
    if (column->kind != NULLS && !zeros(decoder, array, 0, bytes_of_bits(count), 1))
        return false;
    uint64_t within = 0;
    if (!product_of(count, column->kind == FIXED_LIST ? column->width : column->kind == STRUCT, &within))
        return false;
    for (int64_t child = 0; child < type->children_count; child++)
        if (!make_nulls(decoder, &type->children[child], within, array->children[child]))
            return false;
    if (has_places(column->kind))
        return zeros(decoder, array, 1, count + 1, is_large(column->kind) ? 8 : 4) &&
               (is_list(column->kind) || zeros(decoder, array, 2, 0, 1));
    if (column->kind == BITS)
        return zeros(decoder, array, 1, bytes_of_bits(count), 1);
    return buffers_of(column) < 2 || zeros(decoder, array, 1, count, column->width);
}

static const uint8_t *in_body(const Decoder *decoder, uint64_t at)
{
    return decoder->reader.body + at;
}

// -- values ---------------------------------------------------------------------------------------------------------

static bool decode_one(Decoder *decoder, const Column *column, uint64_t count, struct ArrowArray *array)
{
    uint64_t width = column->kind == BITS ? 1 : column->width;
    const uint8_t *one = column->kind == FIXED ? NULL : take_inline(&decoder->reader, width);
    if (one == NULL)
        return false;
    uint64_t values = column->kind == BITS ? bytes_of_bits(count) : count;
    uint8_t *to = take(decoder->block, values, width);
    if (to == NULL)
        return false;
    array->buffers[1] = to;
    if (column->kind == BITS)
        memset(to, *one ? 0xff : 0, values);
    else
        repeat_value(to, one, width, count);
    return true;
}

static bool decode_deltas(Decoder *decoder, const Column *column, uint64_t count, struct ArrowArray *array)
{
    uint64_t width = column->width, least = 0, at;
    const uint8_t *one = take_inline(&decoder->reader, width);
    uint8_t bytes;
    if ((column->kind != FIXED_4 && column->kind != FIXED_8) || one == NULL || !take_byte(&decoder->reader, &bytes) ||
        (bytes != 1 && bytes != 2 && bytes != 4) || bytes >= width ||
        !take_place(&decoder->reader, count, bytes, bytes, &at))
        return false;
    memcpy(&least, one, width);
    uint8_t *to = take(decoder->block, count, width);
    if (to == NULL)
        return false;
    array->buffers[1] = to;
    add_deltas(to, least, in_body(decoder, at), bytes, width, count);
    return true;
}

static bool decode_fixed(Decoder *decoder, const Type *type, int encoding, uint64_t count, struct ArrowArray *array)
{
    const Column *column = &type->column;
    uint64_t width = column->width, at;
    if (column->kind == FIXED && (!take_varint(&decoder->reader, &width) || width != column->width))
        return false;
    if (!count_written(&decoder->reader, count, width ? width : 1))
        return false;
    switch (encoding) {
    case PLAIN:
        if (column->kind == BITS ? !take_place(&decoder->reader, bytes_of_bits(count), 1, 1, &at)
                                 : !take_place(&decoder->reader, count, width, column->kind == FIXED ? 1 : width, &at))
            return false;
        array->buffers[1] = in_body(decoder, at);
        return true;
    case ONE:
        return decode_one(decoder, column, count, array);
    case DELTAS:
        return decode_deltas(decoder, column, count, array);
    default:
        return false;
    }
}

// -- places ---------------------------------------------------------------------------------------------------------

// Write the offsets of values with these `lengths`, of `bytes` bytes each; `lengths` NULL: all have the same length.
static bool write_offsets(Decoder *decoder, const uint8_t *lengths, uint64_t bytes, uint64_t count, uint64_t total,
                          uint64_t width, struct ArrowArray *array)
{
    uint8_t *offsets = take(decoder->block, count + 1, width);
    if (offsets == NULL)
        return false;
    array->buffers[1] = offsets;
    memset(offsets, 0, width);
    return write_ends(offsets + width, lengths, bytes, count ? total / count : 0, width, 0, count) == total;
}

static bool decode_places(Decoder *decoder, int kind, int encoding, uint64_t count, uint64_t total,
                          struct ArrowArray *array)
{
    uint64_t width = is_large(kind) ? 8 : 4, at;
    switch (encoding) {
    case SAME:
        return write_offsets(decoder, NULL, 0, count, total, width, array);
    case OFFSETS:
        if (!take_place(&decoder->reader, count + 1, width, width, &at))
            return false;
        array->buffers[1] = in_body(decoder, at);
        // Arrow takes the last offset for the length of the values.
        return offset_at(in_body(decoder, at), 0, width) == 0 && offset_at(in_body(decoder, at), count, width) == total;
    default: {
        uint64_t bytes = encoding == LENGTHS_1 ? 1 : 2;
        return take_place(&decoder->reader, count, bytes, bytes, &at) &&
               write_offsets(decoder, in_body(decoder, at), bytes, count, total, width, array);
    }
    }
}

static bool decode_node(Decoder *decoder, const Type *type, uint64_t count, int depth, struct ArrowArray *array);

static bool decode_with_places(Decoder *decoder, const Type *type, int encoding, uint64_t count, int depth,
                               struct ArrowArray *array)
{
    int kind = type->column.kind;
    uint64_t total, at;
    if (!take_varint(&decoder->reader, &total) || (!is_large(kind) && total > SMALL_MAX) ||
        !count_written(&decoder->reader, count + 1, is_large(kind) ? 8 : 4) ||
        !decode_places(decoder, kind, encoding, count, total, array))
        return false;
    if (!is_list(kind)) {
        if (!count_written(&decoder->reader, total, 1) || !take_place(&decoder->reader, total, 1, 1, &at))
            return false;
        array->buffers[2] = in_body(decoder, at);
        return true;
    }
    return decode_node(decoder, &type->children[0], total, depth + 1, array->children[0]);
}

// -- nodes ----------------------------------------------------------------------------------------------------------

static bool decode_with_fields(Decoder *decoder, const Type *type, int encoding, uint64_t count, int depth,
                               struct ArrowArray *array)
{
    bool is_struct = type->column.kind == STRUCT;
    uint64_t size, within = count;
    if (encoding != 0 || !take_varint(&decoder->reader, &size) || !count_written(&decoder->reader, count, 1) ||
        size != (is_struct ? (uint64_t)type->children_count : type->column.width) ||
        (!is_struct && __builtin_mul_overflow(count, size, &within)))
        return false;
    for (int64_t child = 0; child < type->children_count; child++)
        if (!decode_node(decoder, &type->children[child], within, depth + 1, array->children[child]))
            return false;
    return true;
}

static bool decode_node(Decoder *decoder, const Type *type, uint64_t count, int depth, struct ArrowArray *array)
{
    uint8_t first;
    uint64_t at;
    if (depth > DEPTH_MAX || count > NODE_VALUES_MAX || !take_byte(&decoder->reader, &first) ||
        !may_begin(type, first, count))
        return false;
    int kind = first & KIND_MASK, encoding = first >> ENCODING_SHIFT;
    if (first == NULLS)
        return count_written(&decoder->reader, count, type->null_bytes) && make_nulls(decoder, type, count, array);
    if (kind != type->column.kind || kind == NULLS ||
        !make_array(decoder->block, array, count, buffers_of(&type->column), type->children_count))
        return false;
    if (first & VALIDITY) {
        if (!take_place(&decoder->reader, bytes_of_bits(count), 1, 1, &at))
            return false;
        array->buffers[0] = in_body(decoder, at);
        array->null_count = -1;  // not counted: Arrow does it if needed
    }
    if (has_places(kind))
        return decode_with_places(decoder, type, encoding, count, depth, array);
    if (kind == FIXED_LIST || kind == STRUCT)
        return decode_with_fields(decoder, type, encoding, count, depth, array);
    return decode_fixed(decoder, type, encoding, count, array);
}

static bool decode_columns(Decoder *decoder, const Type *type, uint64_t records, struct ArrowArray *batch)
{
    if (!make_array(decoder->block, batch, records, 1, type->children_count))
        return false;
    for (int64_t column = 0; column < type->children_count; column++)
        if (!decode_node(decoder, &type->children[column], records, 0, batch->children[column]))
            return false;
    return is_read(&decoder->reader);
}

bool decode_lean(View payload, const Type *type, uint64_t records, uint64_t bytes_max, Owner owner,
                 struct ArrowArray *batch)
{
    Reader reader;
    if (!open_reader(payload, bytes_max, &reader))
        return false;
    Block *block = new_block(owner);
    if (block == NULL)
        return false;
    Decoder decoder = {.reader = reader, .block = block};
    if (!decode_columns(&decoder, type, records, batch)) {
        free_block(block);
        return false;
    }
    arm(block, batch);
    return true;
}
