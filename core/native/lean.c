// See lean.h. This goes through the nodes once, and checks a node's buffers as soon as it has located them.

#include "lean_arrays.h"
#include "lean_reader.h"
#include "utf8.h"

// A node with places: where each of its values begins.
typedef struct {
    int kind;
    int encoding;
    uint64_t count;
    uint64_t total;  // the size of all values together
    uint64_t places_at;
    uint64_t data_at;
} Placed;

static bool read_node(Reader *reader, const Type *type, uint64_t count, int depth);

// A child of a type, or NULL if the type is not known.
static const Type *within(const Type *type, uint64_t child)
{
    return type == NULL ? NULL : &type->children[child];
}

static bool is_text(int kind)
{
    return kind == TEXT || kind == LARGE_TEXT;
}

// -- values ---------------------------------------------------------------------------------------------------------

static bool read_one(Reader *reader, int kind, uint64_t width)
{
    uint8_t bit;
    if (kind != BITS)
        return kind != FIXED && skip(reader, width);
    return take_byte(reader, &bit) && (bit <= 1 || reader->body == NULL);
}

static bool read_deltas(Reader *reader, int kind, uint64_t count, uint64_t width)
{
    uint8_t delta_bytes;
    uint64_t at;
    if ((kind != FIXED_4 && kind != FIXED_8) || !skip(reader, width) || !take_byte(reader, &delta_bytes))
        return false;
    if ((delta_bytes != 1 && delta_bytes != 2 && delta_bytes != 4) || delta_bytes >= width)
        return false;
    return take_place(reader, count, delta_bytes, delta_bytes, &at);
}

static bool read_fixed(Reader *reader, const Type *type, int kind, int encoding, uint64_t count)
{
    uint64_t width = width_of(kind), at;
    if (kind == FIXED && (!take_varint(reader, &width) || (type != NULL && width != type->column.width)))
        return false;
    if (kind == NULLS && type != NULL)
        width = type->null_bytes;
    if (!count_written(reader, count, width ? width : 1))
        return false;
    if (kind == NULLS)
        return true;
    switch (encoding) {
    case PLAIN:
        if (kind == BITS)
            return take_place(reader, bytes_of_bits(count), 1, 1, &at);
        return take_place(reader, count, width, kind == FIXED ? 1 : width, &at);
    case ONE:
        return read_one(reader, kind, width);
    case DELTAS:
        return read_deltas(reader, kind, count, width);
    default:
        return false;
    }
}

// -- places ---------------------------------------------------------------------------------------------------------

static uint64_t number_at(const uint8_t *numbers, uint64_t index, int width)
{
    const uint8_t *at = numbers + index * (uint64_t)width;
    switch (width) {
    case 1:
        return *at;
    case 2:
        return u16_at(at);
    case 4:
        return u32_at(at);
    default:
        return u64_at(at);
    }
}

static bool begins_within_character(const uint8_t *text, uint64_t at, uint64_t size)
{
    return at < size && (text[at] & 0xc0) == 0x80;
}

// `text`: NULL if values may begin at any byte.
static bool are_offsets(const uint8_t *numbers, const Placed *node, const uint8_t *text)
{
    int width = is_large(node->kind) ? 8 : 4;
    uint64_t before = 0;
    for (uint64_t index = 0; index <= node->count; index++) {
        uint64_t offset = number_at(numbers, index, width);
        // As an unsigned number, a negative offset is larger than any total.
        if (offset < before || offset > node->total || (index == 0 && offset != 0))
            return false;
        if (text != NULL && begins_within_character(text, offset, node->total))
            return false;
        before = offset;
    }
    return before == node->total;
}

static bool are_lengths(const uint8_t *numbers, const Placed *node, const uint8_t *text)
{
    int width = node->encoding == LENGTHS_1 ? 1 : 2;
    uint64_t start = 0;
    for (uint64_t index = 0; index < node->count; index++) {
        if (text != NULL && begins_within_character(text, start, node->total))
            return false;
        start += number_at(numbers, index, width);
        if (start > node->total)
            return false;
    }
    return start == node->total;
}

static bool are_same(const Placed *node, const uint8_t *text)
{
    uint64_t length = node->count ? node->total / node->count : 0;
    if (text == NULL || length == 0)
        return true;
    for (uint64_t start = 0; start < node->total; start += length)
        if (begins_within_character(text, start, node->total))
            return false;
    return true;
}

static bool check_places(const Reader *reader, const Placed *node)
{
    const uint8_t *text = NULL;
    if (is_text(node->kind)) {
        text = reader->body + node->data_at;
        enum text_is found = text_is(text, node->total);
        if (found == NO_UTF8)
            return false;
        if (found == ASCII)
            text = NULL;  // each byte is a character
    }
    const uint8_t *numbers = reader->body + node->places_at;
    switch (node->encoding) {
    case SAME:
        return are_same(node, text);
    case OFFSETS:
        return are_offsets(numbers, node, text);
    default:
        return are_lengths(numbers, node, text);
    }
}

static bool take_places(Reader *reader, Placed *node)
{
    uint64_t offset_bytes = is_large(node->kind) ? 8 : 4;
    if (!count_written(reader, node->count + 1, offset_bytes))
        return false;
    switch (node->encoding) {
    case SAME:
        return node->count ? node->total % node->count == 0 : node->total == 0;
    case OFFSETS:
        return take_place(reader, node->count + 1, offset_bytes, offset_bytes, &node->places_at);
    case LENGTHS_1:
        return take_place(reader, node->count, 1, 1, &node->places_at);
    default:
        return take_place(reader, node->count, 2, 2, &node->places_at);
    }
}

static bool read_placed(Reader *reader, const Type *type, int kind, int encoding, uint64_t count, int depth)
{
    Placed node = {.kind = kind, .encoding = encoding, .count = count};
    if (!take_varint(reader, &node.total) || (!is_large(kind) && node.total > SMALL_MAX))
        return false;
    if (!take_places(reader, &node))
        return false;
    if (!is_list(kind) &&
        !(count_written(reader, node.total, 1) && take_place(reader, node.total, 1, 1, &node.data_at)))
        return false;
    if (reader->body != NULL && !check_places(reader, &node))
        return false;
    return !is_list(kind) || read_node(reader, within(type, 0), node.total, depth + 1);
}

// -- nested nodes ----------------------------------------------------------------------------------------------------

static bool read_with_fields(Reader *reader, const Type *type, int kind, int encoding, uint64_t count, int depth)
{
    uint64_t size;
    if (encoding != 0 || !take_varint(reader, &size))
        return false;
    if (type != NULL && size != (kind == STRUCT ? (uint64_t)type->children_count : type->column.width))
        return false;
    if (!count_written(reader, count, 1))
        return false;
    if (kind == FIXED_LIST) {
        uint64_t values;
        return product_of(count, size, &values) && read_node(reader, within(type, 0), values, depth + 1);
    }
    if (size > reader->nodes.size)
        return false;
    for (uint64_t field = 0; field < size; field++)
        if (!read_node(reader, within(type, field), count, depth + 1))
            return false;
    return true;
}

static bool read_node(Reader *reader, const Type *type, uint64_t count, int depth)
{
    uint8_t first;
    uint64_t validity_at;
    if (depth > DEPTH_MAX || count > NODE_VALUES_MAX || !take_byte(reader, &first))
        return false;
    int kind = first & KIND_MASK, encoding = first >> ENCODING_SHIFT;
    if (kind >= KINDS || (kind == NULLS && first != NULLS))
        return false;
    if (type != NULL && (!may_begin(type, first, count) || (kind != NULLS && kind != type->column.kind)))
        return false;
    if (first & VALIDITY && !take_place(reader, bytes_of_bits(count), 1, 1, &validity_at))
        return false;
    if (has_places(kind))
        return read_placed(reader, type, kind, encoding, count, depth);
    if (kind == FIXED_LIST || kind == STRUCT)
        return read_with_fields(reader, type, kind, encoding, count, depth);
    return read_fixed(reader, type, kind, encoding, count);
}

bool is_lean(View payload, uint64_t records, bool compressed, uint64_t bytes_max, const Type *type)
{
    size_t nodes_at = compressed ? 6 : 2;
    if (payload.size < nodes_at)
        return false;
    size_t nodes_bytes = u16_at(payload.at);
    size_t body_at = body_at_of(nodes_at, nodes_bytes);
    if (body_at > payload.size)
        return false;
    uint64_t body_bytes = compressed ? u32_at(payload.at + 2) : payload.size - body_at;
    if (compressed && body_bytes > bytes_max)
        return false;
    if (records > RECORDS_WITHOUT_BYTES && records > 8 * body_bytes)
        return false;
    Reader reader = {
        .nodes = {payload.at + nodes_at, nodes_bytes},
        .body = compressed ? NULL : payload.at + body_at,
        .body_bytes = body_bytes,
        .room = compressed || bytes_max > 8 * body_bytes ? bytes_max : 8 * body_bytes,
    };
    int64_t columns = 0;
    for (; reader.at < nodes_bytes; columns++)
        if ((type != NULL && columns >= type->children_count) ||
            !read_node(&reader, within(type, (uint64_t)columns), records, 0))
            return false;
    if (type != NULL && columns != type->children_count)
        return false;
    return reader.body_end == body_bytes;
}
