"""Makes Arrow arrays from parsed JSON: the reverse of `writing`.

Types without parts are in `leaves`. For lists, maps, structs and unions, this module takes the values apart, makes the
arrays of their parts, and puts them together again, exactly in the wanted type.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyarrow import types

from kera.client.json_form.leaves import LEAVES, Build, Misfit, Values, uuids
from kera.client.json_form.texts import shown
from kera.client.json_form.writing import UUID_TYPE, has_names_twice, is_list


def array_of(kind: pa.DataType, values: Values) -> pa.Array:
    """Make an array of a type. Raises `Misfit`."""
    if isinstance(kind, pa.BaseExtensionType):
        make = uuids if kind.extension_name == UUID_TYPE else array_of
        return pa.ExtensionArray.from_storage(kind, make(kind.storage_type, values))
    for is_one, build in _BUILDERS:
        if is_one(kind):
            return build(kind, values)
    raise Misfit(0, f"JSON has no form for values of type {kind}")


def column_of(field: pa.Field, values: Values) -> pa.Array:
    """Make the array of a field, which may forbid nulls. Raises `Misfit`."""
    if not field.nullable and None in values:
        raise Misfit(values.index(None), "null, which it may not be")
    return array_of(field.type, values)


def _validity(values: Values) -> pa.Buffer | None:
    return pa.array([value is not None for value in values], pa.bool_()).buffers()[1] if None in values else None


def _flat(values: Values) -> tuple[list[Any], list[int]]:
    """Return the elements of all lists in one, and the offsets at which each list begins and the last one ends."""
    found: list[Any] = []
    offsets = [0]
    for at, value in enumerate(values):
        if value is not None:
            if not isinstance(value, list):
                raise Misfit(at, f"{shown(value)}, not a list")
            found += value
        offsets.append(len(found))
    return found, offsets


def _within(offsets: Sequence[int], error: Misfit, part: str = "") -> Misfit:
    """Convert the error of an element to one of its list."""
    at = bisect_right(offsets, error.at) - 1
    return Misfit(at, error.reason, f"[{error.at - offsets[at]}]{part}{error.path}")


def _buffer(numbers: Sequence[int], kind: pa.DataType) -> pa.Buffer:
    return pa.array(numbers, kind).buffers()[1]


def _lists(kind: pa.DataType, values: Values) -> pa.Array:
    if types.is_fixed_size_list(kind):
        return _fixed_lists(kind, values)
    found, offsets = _flat(values)
    try:
        inner = column_of(kind.value_field, found)
    except Misfit as error:
        raise _within(offsets, error) from None
    large = types.is_large_list(kind) or types.is_large_list_view(kind)
    number = pa.int64() if large else pa.int32()
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        sizes = [end - begin for begin, end in pairwise(offsets)]
        buffers = [_validity(values), _buffer(offsets[:-1], number), _buffer(sizes, number)]
    else:
        buffers = [_validity(values), _buffer(offsets, number)]
    return pa.Array.from_buffers(kind, len(values), buffers, children=[inner])


def _fixed_lists(kind: pa.DataType, values: Values) -> pa.Array:
    size = kind.list_size
    found: list[Any] = []
    for at, value in enumerate(values):
        if value is None:
            continue
        if not isinstance(value, list):
            raise Misfit(at, f"{shown(value)}, not a list")
        if len(value) != size:
            raise Misfit(at, f"a list of {len(value)} values, and {kind} has {size}")
        found += value
    return pa.Array.from_buffers(kind, len(values), [_validity(values)], children=[_parts(kind, values, found)])


def _parts(kind: pa.DataType, values: Values, found: Values) -> pa.Array:
    """Return the values of lists of one size: a null needs a place for its values, too, with arbitrary contents."""
    size, field = kind.list_size, kind.value_field
    there = [at for at, value in enumerate(values) if value is not None]
    try:
        inner = column_of(field, found)
    except Misfit as error:
        raise Misfit(there[error.at // size], error.reason, f"[{error.at % size}]{error.path}") from None
    if len(there) == len(values):
        return inner
    unseen = [filler_of(field.type)] * size
    return array_of(field.type, [each for value in values for each in (unseen if value is None else value)])


def filler_of(kind: pa.DataType) -> Any:
    """Return the JSON of an invisible value: null, or for a union, which has no nulls, a null of its first type."""
    return [kind.type_codes[0], None] if types.is_union(kind) else None


def _maps(kind: pa.DataType, values: Values) -> pa.Array:
    entries = [list(value.items()) if isinstance(value, dict) else value for value in values]
    found, offsets = _flat(entries)
    for at, entry in enumerate(found):
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise _within(offsets, Misfit(at, f"{shown(entry)}, not a list of key and value"))
    sides = []
    for side, field in enumerate((kind.key_field, kind.item_field)):
        try:
            sides.append(column_of(field, [entry[side] for entry in found]))
        except Misfit as error:
            raise _within(offsets, error, f"[{side}]") from None
    struct = pa.struct([kind.key_field, kind.item_field])
    inner = pa.Array.from_buffers(struct, len(found), [None], children=sides)
    return pa.Array.from_buffers(kind, len(values), [_validity(values), _buffer(offsets, pa.int32())], children=[inner])


def _structs(kind: pa.DataType, values: Values) -> pa.Array:
    fields = [kind.field(at) for at in range(kind.num_fields)]
    get = _by_place if has_names_twice(kind) else _by_name
    rows = [get(at, value, fields) for at, value in enumerate(values)]
    children = []
    for number, field in enumerate(fields):
        own = [None if row is None else row[number] for row in rows]
        try:
            if not field.nullable:
                _check_nulls(number, rows)
            children.append(array_of(field.type, _with_fillers(field.type, own, rows)))
        except Misfit as error:
            raise Misfit(error.at, error.reason, f".{field.name}{error.path}") from None
    return pa.Array.from_buffers(kind, len(values), [_validity(values)], children=children)


def _check_nulls(number: int, rows: Sequence[list[Any] | None]) -> None:
    """Raise `Misfit` if a field is null in a struct that is not null itself."""
    for at, row in enumerate(rows):
        if row is not None and row[number] is None:
            raise Misfit(at, "null, which it may not be")


def _with_fillers(kind: pa.DataType, own: Values, rows: Values) -> Values:
    """Fill in values of a union within null structs, because a union has no nulls."""
    if not types.is_union(kind):
        return own
    return [filler_of(kind) if row is None else value for value, row in zip(own, rows, strict=True)]


def _by_name(at: int, value: Any, fields: Sequence[pa.Field]) -> list[Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise Misfit(at, f"{shown(value)}, not an object")
    names = [field.name for field in fields]
    unknown = value.keys() - set(names)
    if unknown:
        raise Misfit(
            at, f"an object with the field {min(unknown)!r}, which the type does not have ({', '.join(names)})"
        )
    return [value.get(name) for name in names]


def _by_place(at: int, value: Any, fields: Sequence[pa.Field]) -> list[Any] | None:
    if value is not None and (not isinstance(value, list) or len(value) != len(fields)):
        raise Misfit(at, f"{shown(value)}, not a list of {len(fields)} values: names of the struct repeat")
    return value


def _unions(kind: pa.DataType, values: Values) -> pa.Array:
    codes: list[int] = kind.type_codes
    for at, value in enumerate(values):
        known = isinstance(value, list) and len(value) == 2 and not isinstance(value[0], bool) and value[0] in codes
        if not known:
            raise Misfit(at, f"{shown(value)}, not a list of a type code ({', '.join(map(str, codes))}) and a value")
    own_codes = [value[0] for value in values]
    children, places = [], [0] * len(values)
    for number, code in enumerate(codes):
        at_own = [at for at, each in enumerate(own_codes) if each == code]
        field = kind.field(number)
        own = [values[at][1] for at in at_own]
        try:
            if kind.mode == "dense":
                for place, at in enumerate(at_own):
                    places[at] = place
                children.append(column_of(field, own))
            else:
                column_of(field, own)
                unseen = filler_of(field.type)
                children.append(array_of(field.type, [value[1] if value[0] == code else unseen for value in values]))
        except Misfit as error:
            at = at_own[error.at] if error.at < len(at_own) else 0
            raise Misfit(at, error.reason, f"[1]{error.path}") from None
    buffers = [None, pa.array(own_codes, pa.int8()).buffers()[1]]
    if kind.mode == "dense":
        buffers.append(_buffer(places, pa.int32()))
    return pa.Array.from_buffers(kind, len(values), buffers, children=children)


def _runs(kind: pa.DataType, values: Values) -> pa.Array:
    """Make a run for each change of the value; `kera.core` writes runs in its own way anyway."""
    begins: list[int] = []
    for at, value in enumerate(values):
        if at == 0 or not _same(values[at - 1], value):
            begins.append(at)
    ends = [*begins[1:], len(values)] if begins else []
    try:
        inner = array_of(kind.value_type, [values[at] for at in begins])
    except Misfit as error:
        raise Misfit(begins[error.at], error.reason, error.path) from None
    if ends and ends[-1] >= 1 << kind.run_end_type.bit_width - 1:
        raise Misfit(len(values) - 1, f"in row {len(values)} of a block, and {kind.run_end_type} counts no more rows")
    return pa.RunEndEncodedArray.from_arrays(pa.array(ends, kind.run_end_type), inner, type=kind)


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and not isinstance(one, list | dict) and bool(one == other)


def _dictionaries(kind: pa.DataType, values: Values) -> pa.Array:
    return array_of(kind.value_type, values).dictionary_encode().cast(kind)


_BUILDERS: list[tuple[Callable[[pa.DataType], bool], Build]] = [
    *LEAVES,
    (types.is_map, _maps),
    (is_list, _lists),
    (types.is_struct, _structs),
    (types.is_union, _unions),
    (types.is_run_end_encoded, _runs),
    (types.is_dictionary, _dictionaries),
]
