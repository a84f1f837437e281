"""Converts users' columns to record batches of a stream's types: from Arrow, pandas, polars, and others with Arrow.

Promise: a conversion changes only the form of values and never the values, so that reading returns what was written:

    large_…, views                ->  the plain form of the same text or bytes; the same for lists
    dictionary, run-end encoded   ->  the values
    integers, floats              ->  wider types, which have all values of the narrower type
    timestamps, times, durations  ->  another unit, if no value loses precision; another zone, with the same instants.
                                      Refused between times with and without a zone: the meaning would be a guess
    decimals                      ->  types with at least as many digits before and behind the point

Columns of the right type are not copied. Whether a conversion is accepted depends on the types, and for units of time
also on the values. `conform` in `kera.client.producing.encoding.conforming` handles nulls, and missing or extra
columns.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from kera.core.errors import InvalidArgument

if TYPE_CHECKING:
    import pandas

Columns: TypeAlias = Any
"""The argument of `record_batches`; pyarrow, pandas and polars have no common type for it."""
INDEX_PREFIX = "__index_level_"
"""The prefix of a column that is made from an index of pandas without a name."""


def record_batches(data: Any) -> list[pa.RecordBatch]:
    """Return `data` as record batches, with its own types. Reads a reader to its end. Raises `InvalidArgument`."""
    try:
        return _opened(data)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{_name(data)} cannot be read as columns: {error}") from error


def _opened(data: Any) -> list[pa.RecordBatch]:
    if isinstance(data, pa.RecordBatch):
        return [data]
    if isinstance(data, pa.Table):
        return data.to_batches()  # type: ignore[no-any-return]
    if isinstance(data, pa.RecordBatchReader):
        return list(data)
    if type(data).__module__.partition(".")[0] == "pandas" and hasattr(data, "columns"):
        # Not by its PyCapsule interface: that leaves out the index, whose name may be that of a column.
        named = any(name is not None for name in data.index.names)
        made = pa.Table.from_pandas(data, preserve_index=named)
        for name, column in data.items():
            if column.dtype == object and name in made.schema.names:
                _check_times(column, str(name), made.schema.field(name).type)
        return [_without_index(each) for each in made.to_batches()]
    if hasattr(data, "__arrow_c_stream__"):
        return list(pa.RecordBatchReader.from_stream(data))
    if hasattr(data, "__arrow_c_array__"):
        return [pa.record_batch(data)]
    raise InvalidArgument(
        "send_batch takes a RecordBatch, Table or RecordBatchReader of pyarrow, a DataFrame of pandas or polars, or"
        f" another object with Arrow's PyCapsule interface, not {_name(data)}"
    )


def _check_times(column: pandas.Series, name: str, kind: pa.DataType) -> None:
    """Raise `ValueError` for a time that `kind` would change: Arrow decides by the type of the first object."""
    fits = _OBJECTS_OF.get(kind.id)
    if fits is None:
        return
    zones = set()
    for row, (value, is_null) in enumerate(zip(column, column.isna(), strict=True)):
        if is_null:
            continue
        if not fits(value):
            raise ValueError(f"column {name!r} is {kind}, and has {value!r} in row {row}")
        zones.add(getattr(value, "tzinfo", None) is None)
        if len(zones) > 1:
            raise ValueError(f"column {name!r} has times with a time zone and without, such as {value!r} in row {row}")


_OBJECTS_OF: dict[int, Callable[[Any], bool]] = {
    pa.date32().id: lambda value: not isinstance(value, datetime.datetime),
    pa.time64("us").id: lambda value: getattr(value, "tzinfo", None) is None,
    pa.timestamp("us").id: lambda value: not isinstance(value, int),
    pa.duration("us").id: lambda value: not isinstance(value, int),
}
"""Decides which Python objects become values of a type unchanged; for other types, all do."""


def _without_index(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Remove the columns of unnamed indexes, which only number the rows; an index with a name stays."""
    kept = [name for name in batch.schema.names if not name.startswith(INDEX_PREFIX)]
    return batch if len(kept) == len(batch.schema.names) else batch.select(kept)


def _name(data: Any) -> str:
    kind = type(data)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__.partition('.')[0]}.{kind.__name__}"


class NotTheSame(ValueError):
    """A column cannot be converted to the wanted type without loss; the text names the loss, as far as known."""


def null_column(count: int, kind: pa.DataType) -> pa.Array:
    """Return `count` nulls of any type. Not made by `pa.nulls`, whose nested columns make chunks grow."""
    return _nulls(kind, 1 << (count - 1).bit_length() if count else 1).slice(0, count)


@functools.lru_cache(maxsize=64)
def _nulls(kind: pa.DataType, count: int) -> pa.Array:
    try:
        return pa.array([None] * count, kind)
    except pa.ArrowNotImplementedError:  # for unions and run-end encoded types
        if not (types.is_union(kind) or types.is_run_end_encoded(kind)):
            raise  # `pa.nulls` makes invalid columns of such types within others, which can crash readers
        return pa.nulls(count, kind)


def as_type(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Convert `column` to another type with the same values. Raises `NotTheSame`."""
    kind = column.type
    if kind == wanted:
        return column
    if types.is_null(kind):
        return null_column(len(column), wanted)
    if types.is_dictionary(kind):
        values = as_type(column.dictionary, wanted)  # first, because Arrow cannot decode a dictionary of views
        return pa.DictionaryArray.from_arrays(column.indices, values).dictionary_decode()
    if types.is_run_end_encoded(kind):
        return as_type(pc.run_end_decode(column), wanted)
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return as_type(_plain_list(column), wanted)
    if not _same(kind, wanted):
        raise NotTheSame(_zone_hint(kind, wanted))
    try:
        found = pc.cast(column, wanted, safe=True)
    except pa.ArrowException as error:
        raise NotTheSame(f"it cannot be converted without loss: {error}") from error
    if _hidden_nulls(found):
        raise NotTheSame("it has nulls in a part that must have none")
    return found


def _plain_list(column: pa.Array) -> pa.Array:
    """Convert a list view to a list. Arrow's own conversion makes invalid lists of views with nulls (pyarrow 26)."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).cast(pa.int64())
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(lengths)])
    kind = pa.large_list(column.type.value_field)
    return pa.LargeListArray.from_arrays(offsets, column.flatten(), type=kind, mask=column.is_null())


def _zone_hint(kind: pa.DataType, wanted: pa.DataType) -> str:
    if types.is_timestamp(kind) and types.is_timestamp(wanted):
        return "say in which time zone it is" if wanted.tz else "take its time zone away"
    return ""


def _same(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether all values of `kind` are also values of `wanted`, as far as the types show."""
    if kind == wanted:
        return True
    if types.is_dictionary(kind):
        return _same(kind.value_type, wanted)
    for group, more in _GROUPS:
        if group(kind) and group(wanted):
            return more(kind, wanted)
    return types.is_unsigned_integer(kind) and types.is_signed_integer(wanted) and kind.bit_width < wanted.bit_width  # type: ignore[no-any-return]


def _wider(kind: pa.DataType, wanted: pa.DataType) -> bool:
    return bool(kind.bit_width <= wanted.bit_width)


def _always(_kind: pa.DataType, _wanted: pa.DataType) -> bool:
    return True


def _zones_go_together(kind: pa.DataType, wanted: pa.DataType) -> bool:
    return (kind.tz is None) == (wanted.tz is None)


def _more_digits(kind: pa.DataType, wanted: pa.DataType) -> bool:
    before = kind.precision - kind.scale <= wanted.precision - wanted.scale
    return bool(before and kind.scale <= wanted.scale)


def _same_children(kind: pa.DataType, wanted: pa.DataType) -> bool:
    return _same(kind.value_type, wanted.value_type)


def _same_items(kind: pa.DataType, wanted: pa.DataType) -> bool:
    return _same(kind.key_type, wanted.key_type) and _same(kind.item_type, wanted.item_type)


def _same_fields(kind: pa.DataType, wanted: pa.DataType) -> bool:
    return [field.name for field in kind] == [field.name for field in wanted] and all(
        _same(one.type, other.type) for one, other in zip(kind, wanted, strict=True)
    )


def _is_text(kind: pa.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)  # type: ignore[no-any-return]


def _is_bytes(kind: pa.DataType) -> bool:
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)  # type: ignore[no-any-return]


def _is_list(kind: pa.DataType) -> bool:
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)  # type: ignore[no-any-return]


_GROUPS: list[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType, pa.DataType], bool]]] = [
    (_is_text, _always),
    (_is_bytes, _always),
    (types.is_signed_integer, _wider),
    (types.is_unsigned_integer, _wider),
    (types.is_floating, _wider),
    (types.is_timestamp, _zones_go_together),
    (types.is_time, _always),
    (types.is_duration, _always),
    (types.is_date, _always),
    (types.is_decimal, _more_digits),
    (_is_list, _same_children),
    (types.is_map, _same_items),
    (types.is_struct, _same_fields),
]
"""Kinds of types, and the test whether a type of a kind has all values of another type of this kind."""


def _hidden_nulls(column: pa.Array) -> bool:
    """Return whether a child has nulls that its field does not allow: Arrow's conversion does not check."""
    kind = column.type
    if types.is_map(kind):
        return bool(column.keys.null_count) or _bad(kind.item_field, column.items) or _hidden_nulls(column.items)
    if _is_list(kind):
        child = column.flatten()
        return _bad(kind.value_field, child) or _hidden_nulls(child)
    if types.is_struct(kind):
        there = column.filter(column.is_valid()) if column.null_count else column
        return any(
            _bad(kind.field(at), there.field(at)) or _hidden_nulls(there.field(at)) for at in range(kind.num_fields)
        )
    return False


def _bad(field: pa.Field, child: pa.Array) -> bool:
    return bool(not field.nullable and child.null_count)
