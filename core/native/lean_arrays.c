// See lean_arrays.h.

#include "lean_arrays.h"

#include "sizes.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

// -- types ----------------------------------------------------------------------------------------------------------

static void clear_type(Type *type)
{
    for (int64_t child = 0; child < type->children_count; child++)
        clear_type(&type->children[child]);
    free(type->children);
    *type = (Type){0};
}

// Set `null_bytes`. Returns false if it exceeds the maximum number of values in a node.
static bool count_null_bytes(Type *type)
{
    const Column *column = &type->column;
    uint64_t within = 1;
    for (int64_t child = 0; child < type->children_count; child++) {
        uint64_t count = column->kind == FIXED_LIST ? column->width : 1;
        if (!add_times(&within, count, type->children[child].null_bytes))
            return false;
    }
    if (has_places(column->kind))
        type->null_bytes = is_large(column->kind) ? 8 : 4;
    else if (column->kind == STRUCT || column->kind == FIXED_LIST)
        type->null_bytes = within;
    else
        type->null_bytes = column->width ? column->width : 1;
    return type->null_bytes <= NODE_VALUES_MAX;
}

#define NULLABLE 2  // a flag of Arrow's C data interface

// Check the only child of a map: a struct of keys and items.
static bool read_entries(Type *map)
{
    Type *entries = &map->children[0];
    if (entries->column.kind != STRUCT || entries->children_count != 2)
        return false;
    entries->never_null = true;
    entries->children[0].never_null = entries->children[0].column.kind != NULLS;
    return true;
}

#define COLUMNS_DEPTH 0

static bool read_type(const struct ArrowSchema *schema, Type *type, int depth)
{
    if (depth > DEPTH_MAX || !read_column(schema, &type->column) || schema->n_children < 0)
        return false;
    bool nested = is_list(type->column.kind) || type->column.kind == FIXED_LIST;
    if (nested ? schema->n_children != 1 : schema->n_children != 0 && type->column.kind != STRUCT)
        return false;
    if (schema->n_children > 0) {
        type->children = calloc((size_t)schema->n_children, sizeof *type->children);
        if (type->children == NULL)
            return false;
        type->children_count = schema->n_children;
    }
    for (int64_t child = 0; child < schema->n_children; child++) {
        Type *within = &type->children[child];
        if (!read_type(schema->children[child], within, depth + 1))
            return false;
        if (depth == COLUMNS_DEPTH - 1 && !(schema->children[child]->flags & NULLABLE))
            within->never_null = within->column.kind != NULLS;
    }
    return (!type->column.is_map || read_entries(type)) && count_null_bytes(type);
}

Type *new_type(const struct ArrowSchema *schema)
{
    Type *type = calloc(1, sizeof *type);
    if (type != NULL && !(read_type(schema, type, COLUMNS_DEPTH - 1) && type->column.kind == STRUCT)) {
        free_type(type);
        return NULL;
    }
    return type;
}

void free_type(Type *type)
{
    clear_type(type);
    free(type);
}

// -- memory ---------------------------------------------------------------------------------------------------------

// One allocation of a block.
typedef struct Piece {
    struct Piece *before;
    uint64_t unused;  // aligns the memory that follows to 16 bytes
} Piece;

struct Block {
    Piece *pieces;
    Owner owner;
    atomic_long arrays;
};

Block *new_block(Owner owner)
{
    Block *block = calloc(1, sizeof *block);
    if (block != NULL)
        block->owner = owner;
    return block;
}

void *take(Block *block, uint64_t count, uint64_t width)
{
    uint64_t size = sizeof(Piece);
    Piece *piece = add_times(&size, count, width) ? malloc(size) : NULL;
    if (piece == NULL)
        return NULL;
    piece->before = block->pieces;
    block->pieces = piece;
    return piece + 1;
}

void *take_zeros(Block *block, uint64_t count, uint64_t width)
{
    void *zeros = take(block, count, width);
    return zeros == NULL ? NULL : memset(zeros, 0, count * width);  // no overflow: take() checked it
}

void free_block(Block *block)
{
    for (Piece *piece = block->pieces, *before; piece != NULL; piece = before) {
        before = piece->before;
        free(piece);
    }
    free(block);
}

static void release(struct ArrowArray *array)
{
    Block *block = array->private_data;
    for (int64_t child = 0; child < array->n_children; child++)
        if (array->children[child]->release != NULL)
            array->children[child]->release(array->children[child]);
    array->release = NULL;
    if (atomic_fetch_sub(&block->arrays, 1) == 1) {
        Owner owner = block->owner;
        free_block(block);
        owner.let_go(owner.argument);
    }
}

// -- arrays -----------------------------------------------------------------------------------------------------------

#define BUFFERS_MAX 3

bool make_array(Block *block, struct ArrowArray *array, uint64_t length, int64_t buffers, int64_t children)
{
    *array = (struct ArrowArray){
        .length = (int64_t)length,
        .n_buffers = buffers,
        .buffers = take_zeros(block, BUFFERS_MAX, sizeof(void *)),
        .private_data = block,
    };
    if (array->buffers == NULL)
        return false;
    if (children > 0) {
        struct ArrowArray *made = take_zeros(block, (uint64_t)children, sizeof *made);
        array->children = take_zeros(block, (uint64_t)children, sizeof(void *));
        if (made == NULL || array->children == NULL)
            return false;
        for (int64_t child = 0; child < children; child++)
            array->children[child] = &made[child];
        array->n_children = children;
    }
    return true;
}

int64_t buffers_of(const Column *column)
{
    switch (column->kind) {
    case NULLS:
        return 0;
    case STRUCT:
    case FIXED_LIST:
        return 1;
    default:
        return has_places(column->kind) && !is_list(column->kind) ? 3 : 2;
    }
}

void arm(Block *block, struct ArrowArray *array)
{
    array->release = release;
    atomic_fetch_add(&block->arrays, 1);
    for (int64_t child = 0; child < array->n_children; child++)
        arm(block, array->children[child]);
}
