// See lean_encode.h.

#include "lean_encode.h"

#include "sizes.h"

typedef struct {
    Bytes *nodes, *body;
    uint64_t written_bytes;  // the size of all values when expanded
} Writer;

// Some values of an array. `first` counts from the start of its buffers.
typedef struct {
    const struct ArrowSchema *schema;
    const struct ArrowArray *array;
    uint64_t first, count;
} Values;

static bool add(Writer *writer, const Values *values, int depth);

static Values part_of(const Values *parent, int64_t child, uint64_t first, uint64_t count)
{
    const struct ArrowArray *array = parent->array->children[child];
    return (Values){parent->schema->children[child], array, (uint64_t)array->offset + first, count};
}

static bool add_child(Writer *writer, const Values *parent, int64_t child, uint64_t first, uint64_t count, int depth)
{
    Values values = part_of(parent, child, first, count);
    return add(writer, &values, depth);
}

static const uint8_t *buffer_of(const Values *values, int index)
{
    return values->array->buffers[index];
}

// -- nodes and body --------------------------------------------------------------------------------------------------

static bool put_number(Bytes *bytes, uint64_t number)
{
    for (; number >= 0x80; number >>= 7)
        if (!put_byte(bytes, (uint8_t)(number | 0x80)))
            return false;
    return put_byte(bytes, (uint8_t)number);
}

static bool put_node(Writer *writer, int kind, int flags, int encoding)
{
    return put_byte(writer->nodes, (uint8_t)(kind | flags | encoding << ENCODING_SHIFT));
}

// Pad the body with zeros to the alignment of values of `width` bytes.
static bool align(Writer *writer, uint64_t width)
{
    static const uint8_t zeros[BODY_ALIGNMENT];
    uint64_t step = width < BODY_ALIGNMENT ? width : BODY_ALIGNMENT;
    uint64_t at = (writer->body->size + step - 1) & ~(step - 1);
    return put_bytes(writer->body, zeros, at - writer->body->size);
}

static bool put_body(Writer *writer, const void *from, uint64_t size, uint64_t width)
{
    return align(writer, width) && put_bytes(writer->body, from, size);
}

// -- bits -----------------------------------------------------------------------------------------------------------

static bool bit_at(const uint8_t *bits, uint64_t at)
{
    return bits[at / 8] >> at % 8 & 1;
}

static uint64_t count_ones(const uint8_t *bits, uint64_t first, uint64_t count)
{
    uint64_t ones = 0, at = first, end = first + count;
    for (; at < end && at % 64 != 0; at++)
        ones += bit_at(bits, at);
    for (; end - at >= 64; at += 64)
        ones += (uint64_t)__builtin_popcountll(u64_at(bits + at / 8));
    for (; at < end; at++)
        ones += bit_at(bits, at);
    return ones;
}

// Add bits as new bytes, padded with zero bits.
static bool put_bits(Writer *writer, const uint8_t *bits, uint64_t first, uint64_t count)
{
    const uint8_t *from = bits + first / 8;
    uint64_t size = bytes_of_bits(count), shift = first % 8;
    if (shift == 0) {
        if (!put_bytes(writer->body, from, size))
            return false;
        if (count % 8 != 0)
            writer->body->at[writer->body->size - 1] &= (uint8_t)((1 << count % 8) - 1);
        return true;
    }
    if (!make_room(writer->body, size))
        return false;
    uint8_t *to = writer->body->at + writer->body->size;
    memset(to, 0, size);
    for (uint64_t at = 0; at < count; at++)
        to[at / 8] |= (uint8_t)(bit_at(from, shift + at) << at % 8);
    writer->body->size += size;
    return true;
}

// -- values ---------------------------------------------------------------------------------------------------------

static bool add_bits(Writer *writer, const Values *values, int flags)
{
    const uint8_t *bits = buffer_of(values, 1);
    if (flags == 0 && values->count > 0) {
        uint64_t ones = count_ones(bits, values->first, values->count);
        if (ones == 0 || ones == values->count)
            return put_node(writer, BITS, flags, ONE) && put_byte(writer->nodes, ones > 0);
    }
    return put_node(writer, BITS, flags, PLAIN) &&
           (values->count == 0 || put_bits(writer, bits, values->first, values->count));
}

static bool are_all_one(const uint8_t *raw, uint64_t count, uint64_t width)
{
    // Each value is equal to the one before it.
    return memcmp(raw, raw + (count - 1) * width, width) == 0 && memcmp(raw, raw + width, (count - 1) * width) == 0;
}

static int64_t signed_at(const uint8_t *raw, uint64_t index, uint64_t width)
{
    return width == 4 ? (int32_t)u32_at(raw + 4 * index) : (int64_t)u64_at(raw + 8 * index);
}

// Add values as differences from the least one, if that takes fewer bytes; `*done` tells whether it did.
static bool add_deltas(Writer *writer, const uint8_t *raw, uint64_t count, Column column, int flags, bool *done)
{
    int64_t least = signed_at(raw, 0, column.width), most = least;
    for (uint64_t index = 1; index < count; index++) {
        int64_t value = signed_at(raw, index, column.width);
        least = value < least ? value : least;
        most = value > most ? value : most;
    }
    uint64_t span = (uint64_t)most - (uint64_t)least;
    uint64_t bytes = span < 1 << 8 ? 1 : span < 1 << 16 ? 2 : span < (uint64_t)1 << 32 ? 4 : 8;
    *done = bytes < column.width;
    if (!*done)
        return true;
    if (!put_node(writer, column.kind, flags, DELTAS) || !put_bytes(writer->nodes, &least, column.width) ||
        !put_byte(writer->nodes, (uint8_t)bytes) || !align(writer, bytes) || !make_room(writer->body, count * bytes))
        return false;
    uint8_t *to = writer->body->at + writer->body->size;
    for (uint64_t index = 0; index < count; index++, to += bytes) {
        uint64_t delta = (uint64_t)signed_at(raw, index, column.width) - (uint64_t)least;
        memcpy(to, &delta, bytes);
    }
    writer->body->size += count * bytes;
    return true;
}

static bool add_fixed(Writer *writer, const Values *values, Column column, int flags)
{
    uint64_t count = values->count, width = column.width;
    const uint8_t *raw = buffer_of(values, 1);
    if (!add_times(&writer->written_bytes, count, width ? width : 1))
        return false;
    raw = raw == NULL ? NULL : raw + values->first * width;
    if (column.kind == FIXED)
        return put_node(writer, FIXED, flags, PLAIN) && put_number(writer->nodes, width) &&
               put_bytes(writer->body, raw, count * width);
    if (count > 0 && width <= 8) {
        bool done = false;
        if (are_all_one(raw, count, width))
            return put_node(writer, column.kind, flags, ONE) && put_bytes(writer->nodes, raw, width);
        if ((column.kind == FIXED_4 || column.kind == FIXED_8) && count <= PACKED_VALUES_MAX &&
            !add_deltas(writer, raw, count, column, flags, &done))
            return false;
        if (done)
            return true;
    }
    return put_node(writer, column.kind, flags, PLAIN) && put_body(writer, raw, count * width, width);
}

// -- places ---------------------------------------------------------------------------------------------------------

static int64_t offset_at(const uint8_t *offsets, uint64_t index, uint64_t width)
{
    return signed_at(offsets, index, width);
}

static bool put_lengths(Writer *writer, const uint8_t *offsets, uint64_t count, uint64_t width, uint64_t bytes)
{
    if (!align(writer, bytes) || !make_room(writer->body, count * bytes))
        return false;
    uint8_t *to = writer->body->at + writer->body->size;
    for (uint64_t index = 0; index < count; index++, to += bytes) {
        int64_t length = offset_at(offsets, index + 1, width) - offset_at(offsets, index, width);
        memcpy(to, &length, bytes);
    }
    writer->body->size += count * bytes;
    return true;
}

static bool put_offsets(Writer *writer, const uint8_t *offsets, uint64_t count, uint64_t width)
{
    int64_t first = offset_at(offsets, 0, width);
    if (first == 0)
        return put_body(writer, offsets, (count + 1) * width, width);
    if (!align(writer, width) || !make_room(writer->body, (count + 1) * width))
        return false;
    uint8_t *to = writer->body->at + writer->body->size;
    for (uint64_t index = 0; index <= count; index++, to += width) {
        int64_t offset = offset_at(offsets, index, width) - first;
        memcpy(to, &offset, width);
    }
    writer->body->size += (count + 1) * width;
    return true;
}

// Add the places of values. Sets `*first` to where the first value begins, and `*total` to the bytes or items of all.
static bool add_places(Writer *writer, const Values *values, Column column, int flags, uint64_t *first, uint64_t *total)
{
    uint64_t count = values->count, width = is_large(column.kind) ? 8 : 4;
    const uint8_t *offsets = buffer_of(values, 1);
    int64_t least = 0, most = 0;
    *first = *total = 0;
    if (!add_times(&writer->written_bytes, count + 1, width))
        return false;
    if (count > 0) {
        offsets += values->first * width;
        int64_t start = offset_at(offsets, 0, width), before = start;
        if (start < 0)
            return false;
        least = INT64_MAX;
        for (uint64_t index = 1; index <= count; index++) {
            int64_t offset = offset_at(offsets, index, width);
            if (offset < before)
                return false;
            int64_t length = offset - before;
            least = length < least ? length : least;
            most = length > most ? length : most;
            before = offset;
        }
        *first = (uint64_t)start;
        *total = (uint64_t)(before - start);
    }
    bool packed = count <= PACKED_VALUES_MAX;
    int encoding = least == most                ? SAME
                   : packed && most <= UINT8_MAX  ? LENGTHS_1
                   : packed && most <= UINT16_MAX ? LENGTHS_2
                                                  : OFFSETS;
    if (!put_node(writer, column.kind, flags, encoding) || !put_number(writer->nodes, *total))
        return false;
    switch (encoding) {
    case SAME:
        return true;
    case OFFSETS:
        return put_offsets(writer, offsets, count, width);
    default:
        return put_lengths(writer, offsets, count, width, encoding == LENGTHS_1 ? 1 : 2);
    }
}

static bool add_entries(Writer *writer, const Values *values, uint64_t first, uint64_t total, int depth)
{
    Values entries = part_of(values, 0, first, total);
    // PyArrow's keys of a map ignore an offset of the entries, so Python decides about entries with one.
    if (entries.array->offset != 0 || entries.array->n_children != 2)
        return false;
    return sum_of(writer->written_bytes, total, &writer->written_bytes) && put_node(writer, STRUCT, 0, 0) &&
           put_number(writer->nodes, 2) &&
           add_child(writer, &entries, 0, first, total, depth + 1) &&
           add_child(writer, &entries, 1, first, total, depth + 1);
}

static bool add_with_places(Writer *writer, const Values *values, Column column, int flags, int depth)
{
    uint64_t first, total;
    if (!add_places(writer, values, column, flags, &first, &total))
        return false;
    if (column.is_map)
        return add_entries(writer, values, first, total, depth + 1);
    if (is_list(column.kind))
        return add_child(writer, values, 0, first, total, depth + 1);
    const uint8_t *data = buffer_of(values, 2);
    return sum_of(writer->written_bytes, total, &writer->written_bytes) &&
           (data == NULL || put_bytes(writer->body, data + first, total));
}

// -- nodes ----------------------------------------------------------------------------------------------------------

static bool add_fields(Writer *writer, const Values *values, Column column, int flags, int depth)
{
    if (!sum_of(writer->written_bytes, values->count, &writer->written_bytes))
        return false;
    if (column.kind == FIXED_LIST) {
        uint64_t first, count;
        return product_of(values->first, column.width, &first) && product_of(values->count, column.width, &count) &&
               put_node(writer, FIXED_LIST, flags, 0) && put_number(writer->nodes, column.width) &&
               add_child(writer, values, 0, first, count, depth + 1);
    }
    if (!put_node(writer, STRUCT, flags, 0) || !put_number(writer->nodes, (uint64_t)values->array->n_children))
        return false;
    for (int64_t child = 0; child < values->array->n_children; child++)
        if (!add_child(writer, values, child, values->first, values->count, depth + 1))
            return false;
    return true;
}

// The bytes of a null in Arrow's arrays, including its children; 0: the type is not supported here.
static uint64_t null_bytes(const struct ArrowSchema *schema, int depth)
{
    Column column;
    uint64_t sum = 1;
    if (depth > DEPTH_MAX || !read_column(schema, &column))
        return 0;
    if (has_places(column.kind))
        return is_large(column.kind) ? 8 : 4;
    if (column.kind != FIXED_LIST && column.kind != STRUCT)
        return column.kind == NULLS || column.kind == BITS || column.width == 0 ? 1 : column.width;
    for (int64_t child = 0; child < schema->n_children; child++) {
        uint64_t within = null_bytes(schema->children[child], depth + 1);
        if (within == 0 || !add_times(&sum, column.kind == FIXED_LIST ? column.width : 1, within))
            return 0;
    }
    return sum <= NODE_VALUES_MAX ? sum : 0;
}

static uint64_t count_nulls(const Values *values)
{
    const uint8_t *bits = values->array->n_buffers > 0 ? buffer_of(values, 0) : NULL;
    if (values->array->null_count == 0 || bits == NULL)
        return 0;
    return values->count - count_ones(bits, values->first, values->count);
}

static bool add(Writer *writer, const Values *values, int depth)
{
    Column column;
    if (depth > DEPTH_MAX || values->count > NODE_VALUES_MAX || values->array->dictionary != NULL ||
        !read_column(values->schema, &column))
        return false;
    uint64_t nulls = column.kind == NULLS ? values->count : count_nulls(values);
    if (column.kind == NULLS || (values->count > 0 && nulls == values->count)) {
        uint64_t bytes = null_bytes(values->schema, depth);
        return bytes > 0 && add_times(&writer->written_bytes, values->count, bytes) &&
               put_byte(writer->nodes, NULLS);
    }
    int flags = nulls > 0 ? VALIDITY : 0;
    if (flags && !put_bits(writer, buffer_of(values, 0), values->first, values->count))
        return false;
    if (has_places(column.kind))
        return add_with_places(writer, values, column, flags, depth);
    if (column.kind == FIXED_LIST || column.kind == STRUCT)
        return add_fields(writer, values, column, flags, depth);
    if (column.kind == BITS) {
        return sum_of(writer->written_bytes, values->count, &writer->written_bytes) && add_bits(writer, values, flags);
    }
    return add_fixed(writer, values, column, flags);
}

// -- payloads -------------------------------------------------------------------------------------------------------

static bool begin(Writer *writer)
{
    writer->nodes->size = writer->body->size = 0;
    return put_bytes(writer->nodes, "\0\0", 2);  // the length of the nodes, set by `finish`
}

static bool finish(Writer *writer, uint64_t count, uint64_t bytes_max)
{
    static const uint8_t zeros[BODY_ALIGNMENT];
    Bytes *nodes = writer->nodes;
    size_t nodes_bytes = nodes->size - 2;
    if (nodes_bytes > NODES_BYTES_MAX)
        return false;
    memcpy(nodes->at, &nodes_bytes, 2);
    if (!put_bytes(nodes, zeros, body_at_of(2, nodes_bytes) - nodes->size))
        return false;
    uint64_t bits = 8 * (uint64_t)writer->body->size;
    return count <= (bits > RECORDS_WITHOUT_BYTES ? bits : RECORDS_WITHOUT_BYTES) &&
           writer->written_bytes <= (bits > bytes_max ? bits : bytes_max);
}

bool encode_lean(const struct ArrowSchema *schema, const struct ArrowArray *batch, uint64_t start, uint64_t count,
                 uint64_t bytes_max, Bytes *nodes, Bytes *body)
{
    Writer writer = {.nodes = nodes, .body = body};
    Values all = {schema, batch, start, count};
    if (batch->offset != 0 || batch->n_children != schema->n_children || count > NODE_VALUES_MAX || !begin(&writer))
        return false;
    for (int64_t column = 0; column < batch->n_children; column++)
        if (!add_child(&writer, &all, column, start, count, 0))
            return false;
    return finish(&writer, count, bytes_max);
}

// Add a column that the batch does not have: see `encode_completed`.
static bool add_missing(Writer *writer, int64_t source, int64_t time_us, uint64_t count)
{
    if (source != ONE_TIME) {
        writer->written_bytes += count * (uint64_t)(ONE_TIME - source);
        return put_byte(writer->nodes, NULLS);
    }
    writer->written_bytes += count * sizeof time_us;
    return put_node(writer, FIXED_8, 0, ONE) && put_bytes(writer->nodes, &time_us, sizeof time_us);
}

bool encode_completed(const struct ArrowSchema *schema, const struct ArrowArray *batch, const int64_t *sources,
                      size_t columns, int64_t time_us, uint64_t bytes_max, Bytes *nodes, Bytes *body)
{
    Writer writer = {.nodes = nodes, .body = body};
    uint64_t count = (uint64_t)batch->length;
    Values all = {schema, batch, 0, count};
    if (batch->offset != 0 || batch->n_children != schema->n_children || count == 0 || count > NODE_VALUES_MAX ||
        !begin(&writer))
        return false;
    for (size_t column = 0; column < columns; column++) {
        int64_t source = sources[column];
        if (source >= batch->n_children || source < ONE_TIME - NULL_BYTES_MAX ||
            !(source >= 0 ? add_child(&writer, &all, source, 0, count, 0)
                          : add_missing(&writer, source, time_us, count)))
            return false;
    }
    return finish(&writer, count, bytes_max);
}

static bool add_column(Writer *writer, const char *format, uint64_t count, const void **buffers)
{
    const struct ArrowSchema schema = {.format = format};
    const struct ArrowArray array = {.length = (int64_t)count, .n_buffers = 3, .buffers = buffers};
    return add(writer, &(Values){&schema, &array, 0, count}, 0);
}

// Add a column of null lists or maps.
static bool add_nothing(Writer *writer, uint64_t count)
{
    writer->written_bytes += 4 * count;
    return put_byte(writer->nodes, NULLS);
}

static bool add_keys(Writer *writer, const ValuesAndKeys *records)
{
    if (records->lists == NULL)
        return add_nothing(writer, records->count);
    const void *of_keys[] = {NULL, records->key_offsets, records->key_data}, *of_lists[] = {NULL, records->lists};
    struct ArrowSchema key_schema = {.format = "z"}, *schemas[] = {&key_schema};
    struct ArrowArray keys = {.length = records->lists[records->count], .n_buffers = 3, .buffers = of_keys};
    struct ArrowArray *arrays[] = {&keys};
    const struct ArrowSchema schema = {.format = "+l", .n_children = 1, .children = schemas};
    const struct ArrowArray lists = {
        .length = (int64_t)records->count, .n_buffers = 2, .buffers = of_lists, .n_children = 1, .children = arrays,
    };
    return add(writer, &(Values){&schema, &lists, 0, records->count}, 0);
}

bool encode_values(const ValuesAndKeys *records, uint64_t bytes_max, Bytes *nodes, Bytes *body)
{
    Writer writer = {.nodes = nodes, .body = body};
    uint64_t count = records->count;
    const void *times[] = {NULL, records->times, NULL};
    const void *values[] = {NULL, records->value_offsets, records->value_data};
    return begin(&writer) && add_column(&writer, "tsu:UTC", count, times) && add_keys(&writer, records) &&
           add_column(&writer, "z", count, values) && add_nothing(&writer, count) && finish(&writer, count, bytes_max);
}
