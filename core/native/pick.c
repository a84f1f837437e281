// See pick.h. A null gets no bytes and no items, and zeros as its value, as in the result of Arrow's `take`.

#include "pick.h"

#include "sizes.h"

bool new_picked(const struct ArrowSchema *schema, Picked *picked)
{
    *picked = (Picked){.children_count = schema->n_children};
    if (schema->n_children == 0)
        return true;
    picked->children = calloc((size_t)schema->n_children, sizeof *picked->children);
    picked->child_arrays = calloc((size_t)schema->n_children, sizeof *picked->child_arrays);
    if (picked->children == NULL || picked->child_arrays == NULL)
        picked->children_count = 0;
    bool good = picked->children_count > 0;
    for (int64_t child = 0; child < picked->children_count; child++) {
        good = new_picked(schema->children[child], &picked->children[child]) && good;
        picked->child_arrays[child] = &picked->children[child].array;
    }
    return good;
}

void free_picked(Picked *picked)
{
    for (int64_t child = 0; child < picked->children_count; child++)
        free_picked(&picked->children[child]);
    free(picked->children);
    free(picked->child_arrays);
    free_bytes(&picked->validity);
    free_bytes(&picked->fixed);
    free_bytes(&picked->data);
    free_bytes(&picked->ranges);
}

// -- kinds of columns ------------------------------------------------------------------------------------------------

// A column to pick from, and the ranges to pick.
typedef struct {
    const struct ArrowSchema *schema;
    const struct ArrowArray *array;
    const Range *ranges;
    size_t count;
    Column column;
    const uint8_t *valid;  // NULL: there are no nulls
} Source;

static bool bit_at(const uint8_t *bits, uint64_t at)
{
    return bits[at / 8] >> at % 8 & 1;
}

static bool is_null(const Source *source, uint64_t at)
{
    return source->valid != NULL && !bit_at(source->valid, (uint64_t)source->array->offset + at);
}

static uint64_t values_of(const Source *source)
{
    uint64_t values = 0;
    for (size_t index = 0; index < source->count; index++)
        values += source->ranges[index].count;
    return values;
}

// Pick bits of a buffer, with 0 for nulls. Sets `*zeros` to the number of zero bits.
static bool pick_bits(const Source *source, const uint8_t *bits, uint64_t values, Bytes *to, uint64_t *zeros)
{
    size_t size = bytes_of_bits(values);
    to->size = 0;
    *zeros = 0;
    if (!make_room(to, size + 1))
        return false;
    memset(to->at, 0, size);
    uint64_t at = 0;
    for (size_t index = 0; index < source->count; index++) {
        uint64_t from = (uint64_t)source->array->offset + source->ranges[index].first;
        for (uint64_t value = 0; value < source->ranges[index].count; value++, at++) {
            bool is_set = bit_at(bits, from + value) && !is_null(source, source->ranges[index].first + value);
            to->at[at / 8] |= (uint8_t)(is_set << at % 8);
            *zeros += !is_set;
        }
    }
    to->size = size;
    return true;
}

// Copy values of `width` bytes. If `width` is a constant, the compiler inlines the copies.
static inline __attribute__((always_inline)) void copy_values(const Source *source, const uint8_t *raw, uint8_t *to,
                                                              uint64_t width)
{
    for (size_t index = 0; index < source->count; index++) {
        Range range = source->ranges[index];
        if (range.count == 1)
            memcpy(to, raw + range.first * width, width);
        else
            memcpy(to, raw + range.first * width, range.count * width);
        for (uint64_t value = 0; source->valid != NULL && value < range.count; value++)
            if (is_null(source, range.first + value))
                memset(to + value * width, 0, width);
        to += range.count * width;
    }
}

static bool pick_fixed(const Source *source, uint64_t values, Bytes *to)
{
    uint64_t width = source->column.width;
    const uint8_t *raw = source->array->buffers[1];
    to->size = 0;
    if (width == 0 || values == 0)
        return make_room(to, 1);
    if (raw == NULL || values > SIZE_MAX / 4 / width || !make_room(to, values * width))
        return false;
    raw += (uint64_t)source->array->offset * width;
    if (width == 8)
        copy_values(source, raw, to->at, 8);
    else if (width == 4)
        copy_values(source, raw, to->at, 4);
    else
        copy_values(source, raw, to->at, width);
    to->size = values * width;
    return true;
}

static inline int64_t place_at(const uint8_t *places, uint64_t index, uint64_t width)
{
    return width == 4 ? (int32_t)u32_at(places + 4 * index) : (int64_t)u64_at(places + 8 * index);
}

static inline __attribute__((always_inline)) bool copy_places(const Source *source, const uint8_t *places, uint8_t *to,
                                                              Range *ranges, uint64_t *total, uint64_t width)
{
    uint64_t sum = 0;
    places += (uint64_t)source->array->offset * width;
    memset(to, 0, width);
    for (size_t index = 0; index < source->count; index++) {
        uint64_t end_of_range = source->ranges[index].first + source->ranges[index].count;
        for (uint64_t at = source->ranges[index].first; at < end_of_range; at++) {
            int64_t start = place_at(places, at, width), end = place_at(places, at + 1, width);
            if (start < 0 || end < start)
                return false;
            *ranges = (Range){(uint64_t)start, is_null(source, at) ? 0 : (uint64_t)(end - start)};
            sum += ranges++->count;
            if (width == 4 && sum > SMALL_MAX)
                return false;
            to += width;
            memcpy(to, &sum, width);
        }
    }
    *total = sum;
    return true;
}

// Locate values of variable length: their ranges in the data go into `ranges`, their new offsets into `fixed`, and
// their total length into `*total`.
static bool pick_places(const Source *source, uint64_t values, Picked *picked, uint64_t *total)
{
    uint64_t width = is_large(source->column.kind) ? 8 : 4;
    const uint8_t *places = source->array->buffers[1];
    picked->fixed.size = picked->ranges.size = 0;
    if (values > SIZE_MAX / 64 || (values > 0 && places == NULL) || !make_room(&picked->fixed, (values + 1) * width) ||
        !make_room(&picked->ranges, values * sizeof(Range) + 1))
        return false;
    Range *ranges = (Range *)picked->ranges.at;
    return width == 4 ? copy_places(source, places, picked->fixed.at, ranges, total, 4)
                      : copy_places(source, places, picked->fixed.at, ranges, total, 8);
}

// Small values are copied in blocks of this size, which is faster than calling memcpy.
#define BLOCK_BYTES ((uint64_t)32)
#define BLOCKS_MAX ((uint64_t)8)

// Copy the data of values of variable length. `end`: where the data of all values ends.
static bool pick_data(const uint8_t *data, const Range *ranges, size_t count, uint64_t total, uint64_t end, Bytes *to)
{
    if (!make_room(to, total + BLOCK_BYTES) || (total > 0 && data == NULL))
        return false;
    uint8_t *at = to->at;
    for (size_t index = 0; index < count; index++) {
        const uint8_t *from = data + ranges[index].first;
        uint64_t bytes = ranges[index].count, blocks = (bytes + BLOCK_BYTES - 1) / BLOCK_BYTES;
        if (blocks <= BLOCKS_MAX && ranges[index].first + blocks * BLOCK_BYTES <= end)
            for (uint64_t block = 0; block < blocks; block++)
                memcpy(at + block * BLOCK_BYTES, from + block * BLOCK_BYTES, BLOCK_BYTES);
        else if (bytes > 0)
            memcpy(at, from, bytes);
        at += bytes;
    }
    to->size = total;
    return true;
}

static bool pick_child(const Source *source, int64_t child, const Range *ranges, size_t count, Picked *picked)
{
    return child < picked->children_count && child < source->array->n_children &&
           pick(source->schema->children[child], source->array->children[child], ranges, count,
                &picked->children[child]);
}

static bool pick_with_places(const Source *source, uint64_t values, Picked *picked)
{
    uint64_t total;
    if (!pick_places(source, values, picked, &total))
        return false;
    const Range *ranges = (const Range *)picked->ranges.at;
    picked->buffers[1] = picked->fixed.at;
    if (is_list(source->column.kind)) {
        picked->array.n_buffers = 2;
        return pick_child(source, 0, ranges, values, picked);
    }
    const struct ArrowArray *array = source->array;
    int64_t end = values == 0 ? 0 : place_at(array->buffers[1], (uint64_t)(array->offset + array->length),
                                             is_large(source->column.kind) ? 8 : 4);
    picked->data.size = 0;
    if (!pick_data(array->buffers[2], ranges, values, total, end < 0 ? 0 : (uint64_t)end, &picked->data))
        return false;
    picked->array.n_buffers = 3;
    picked->buffers[2] = picked->data.at;
    return true;
}

// Pick the items of lists of the same length.
static bool pick_fixed_lists(const Source *source, Picked *picked)
{
    uint64_t width = source->column.width;
    picked->ranges.size = 0;
    for (size_t index = 0; index < source->count; index++) {
        Range range = source->ranges[index];
        Range items;
        if (!product_of((uint64_t)source->array->offset + range.first, width, &items.first) ||
            !product_of(range.count, width, &items.count) || !put_bytes(&picked->ranges, &items, sizeof items))
            return false;
    }
    return pick_child(source, 0, (const Range *)picked->ranges.at, source->count, picked);
}

static bool pick_fields(const Source *source, Picked *picked)
{
    picked->ranges.size = 0;
    for (size_t index = 0; index < source->count; index++) {
        Range values = source->ranges[index];
        values.first += (uint64_t)source->array->offset;
        if (!put_bytes(&picked->ranges, &values, sizeof values))
            return false;
    }
    for (int64_t child = 0; child < source->array->n_children; child++)
        if (!pick_child(source, child, (const Range *)picked->ranges.at, source->count, picked))
            return false;
    return true;
}

static bool pick_values(const Source *source, uint64_t values, Picked *picked)
{
    uint64_t zeros;
    int kind = source->column.kind;
    picked->array.n_buffers = kind == NULLS ? 0 : kind == STRUCT || kind == FIXED_LIST ? 1 : 2;
    if (kind == NULLS)
        return true;
    if (has_places(kind))
        return pick_with_places(source, values, picked);
    if (kind == STRUCT)
        return pick_fields(source, picked);
    if (kind == FIXED_LIST)  // Arrow does not define the items of null lists: leave those to Python
        return picked->buffers[0] == NULL && pick_fixed_lists(source, picked);
    picked->buffers[1] = NULL;
    bool good = kind == BITS ? values == 0 || (source->array->buffers[1] != NULL &&
                                               pick_bits(source, source->array->buffers[1], values, &picked->fixed,
                                                         &zeros))
                             : pick_fixed(source, values, &picked->fixed);
    picked->buffers[1] = picked->fixed.at;
    return good;
}

bool pick(const struct ArrowSchema *schema, const struct ArrowArray *array, const Range *ranges, size_t count,
          Picked *picked)
{
    Source source = {.schema = schema, .array = array, .ranges = ranges, .count = count};
    if (array->dictionary != NULL || !read_column(schema, &source.column))
        return false;
    uint64_t values = values_of(&source), nulls = 0;
    picked->buffers[0] = NULL;
    if (source.column.kind != NULLS && array->null_count != 0 && array->n_buffers > 0 && array->buffers[0] != NULL) {
        source.valid = array->buffers[0];
        if (!pick_bits(&source, source.valid, values, &picked->validity, &nulls))
            return false;
        picked->buffers[0] = nulls > 0 ? picked->validity.at : NULL;
    }
    picked->array = (struct ArrowArray){
        .length = (int64_t)values,
        .null_count = source.column.kind == NULLS ? (int64_t)values : (int64_t)nulls,
        .n_children = schema->n_children,
        .buffers = picked->buffers,
        .children = picked->child_arrays,
    };
    return pick_values(&source, values, picked);
}
