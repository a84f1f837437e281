"""`kera.client.json_form`: records and rows of any type are written as JSON and read back equal."""

import json
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import types

from kera.client.json_form import record_lines, records_of_lines, row_lines, rows_of_lines
from kera.client.json_form.reading import _by_line
from kera.core.errors import SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA
from tests.property.batches import DEFAULT_BATCHES, slices


def integers(bits: int) -> st.SearchStrategy[int]:
    """Integers of `bits` bits, with those at the edges."""
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    return st.sampled_from([low, -1, 0, 1, high]) | st.integers(low, high)


TEXT = st.text(max_size=8) | st.sampled_from(["", "null", '"\\\n\t\x00', "\u2028\U0001f600", '{"base64": "AA=="}'])
BYTES = st.binary(max_size=8) | TEXT.map(str.encode)
UNITS = ("s", "ms", "us", "ns")
INTEGERS = [
    (kind, st.integers(*(int(each) for each in (np.iinfo(name).min, np.iinfo(name).max))) | st.just(np.iinfo(name).max))
    for name, kind in ((str(kind), kind) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64()))
] + [(kind, st.integers(0, 2**kind.bit_width - 1)) for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())]


def decimals(kind: pa.DataType) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    most = 10**kind.precision - 1
    return kind, st.integers(-most, most).map(lambda unscaled: decimal_of(unscaled, kind.scale))


DECIMALS = [
    decimals(kind)
    for kind in (
        pa.decimal32(9, 2),
        pa.decimal64(18, 18),
        pa.decimal128(38, 10),
        pa.decimal128(20, -3),
        pa.decimal256(76, 40),
    )
]
LEAVES: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    *INTEGERS,
    (pa.null(), st.none()),
    (pa.bool_(), st.booleans()),
    (pa.float16(), st.floats(width=16).map(np.float16)),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats() | st.sampled_from([2.0**53, -0.0, 5e-324, 1e15, 0.1])),
    *((kind, TEXT) for kind in (pa.string(), pa.large_string(), pa.string_view())),
    *((kind, BYTES) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.uuid(), st.binary(min_size=16, max_size=16)),
    *((pa.timestamp(unit, zone), integers(64)) for unit in UNITS for zone in (None, "UTC", "Europe/Paris")),
    *((pa.duration(unit), integers(64)) for unit in UNITS),
    (pa.date32(), integers(32)),
    (pa.date64(), st.integers(-(10**9), 10**9).map(lambda days: days * 86_400_000)),
    *((pa.time32(unit), st.integers(0, 86_399)) for unit in ("s", "ms")),
    *((pa.time64(unit), st.integers(0, 86_399_999_999)) for unit in ("us", "ns")),
    (pa.month_day_nano_interval(), st.tuples(integers(32), integers(32), integers(64))),
    *DECIMALS,
]


def decimal_of(unscaled: int, scale: int) -> Decimal:
    return Decimal((int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -scale))


def is_time(kind: pa.DataType) -> bool:
    return bool(types.is_temporal(kind)) and not types.is_interval(kind)


@st.composite
def arrays(draw: st.DrawFn, count: int, depth: int = 2) -> pa.Array:
    """An array of `count` values of any type."""
    if depth and draw(st.booleans()):
        return draw(st.sampled_from(NESTED))(draw, count, depth - 1)
    kind, values = draw(st.sampled_from(LEAVES))
    found = draw(st.lists(st.none() | values, min_size=count, max_size=count))
    if is_time(kind):
        return pa.array(found, pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, pa.array(found, kind.storage_type))
    return pa.array(found, kind)


def masks(draw: st.DrawFn, count: int) -> pa.Array:
    return pa.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), pa.bool_())


def lists(draw: st.DrawFn, count: int, depth: int) -> pa.Array:
    lengths = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    inner = draw(arrays(int(offsets[-1]), depth))
    mask = masks(draw, count)
    if draw(st.booleans()):
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), inner, mask=mask)
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), inner, mask=mask)


def list_views(draw: st.DrawFn, count: int, depth: int) -> pa.Array:
    inner = draw(arrays(4, depth))
    offsets = pa.array(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)), pa.int32())
    sizes = pa.array(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)), pa.int32())
    return pa.ListViewArray.from_arrays(offsets, sizes, inner, mask=masks(draw, count))


def fixed_lists(draw: st.DrawFn, count: int, depth: int) -> pa.Array:
    size = draw(st.integers(1, 3))
    return pa.FixedSizeListArray.from_arrays(draw(arrays(count * size, depth)), size, mask=masks(draw, count))


def maps(draw: st.DrawFn, count: int, depth: int) -> pa.Array:
    lengths = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(offsets[-1])
    keys = pa.array(draw(st.lists(BYTES, min_size=total, max_size=total)), pa.binary())
    return pa.MapArray.from_arrays(pa.array(offsets), keys, draw(arrays(total, depth)), mask=masks(draw, count))


def structs(draw: st.DrawFn, count: int, depth: int) -> pa.Array:
    names = draw(st.lists(st.sampled_from(["a", "b", "é"]), min_size=1, max_size=3))
    parts = [draw(arrays(count, depth)) for _ in names]
    return pa.StructArray.from_arrays(parts, names=names, mask=masks(draw, count))


def unions(draw: st.DrawFn, count: int, depth: int) -> pa.Array:
    codes = draw(st.lists(st.sampled_from([3, 5]), min_size=count, max_size=count))
    code_array = pa.array(codes, pa.int8())
    if draw(st.booleans()):
        children = [draw(arrays(count, depth)) for _ in range(2)]
        return pa.UnionArray.from_sparse(code_array, children, ["x", "x"], [3, 5])
    places = [codes[:at].count(code) for at, code in enumerate(codes)]
    children = [draw(arrays(codes.count(code), depth)) for code in (3, 5)]
    return pa.UnionArray.from_dense(code_array, pa.array(places, pa.int32()), children, ["x", "y"], [3, 5])


def runs(draw: st.DrawFn, count: int, _depth: int) -> pa.Array:
    if not count:
        return pa.RunEndEncodedArray.from_arrays(pa.array([], pa.int32()), pa.array([], pa.string()))
    ends = sorted(draw(st.sets(st.integers(1, count), max_size=3)) | {count})
    found = draw(st.lists(st.none() | TEXT, min_size=len(ends), max_size=len(ends)))
    return pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), pa.array(found, pa.string()))


NESTED = [lists, list_views, fixed_lists, maps, structs, unions, runs]


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    count = draw(st.integers(0, 4))
    columns = [draw(arrays(count)) for _ in range(draw(st.integers(1, 3)))]
    return pa.RecordBatch.from_arrays(columns, names=[f"c{at}" for at in range(len(columns))])


def plain(column: pa.Array) -> list[Any]:
    """The values in a form that can be compared: nulls are None, and a NaN is a text."""
    if types.is_run_end_encoded(column.type):
        at = np.searchsorted(column.run_ends, np.arange(len(column)) + column.offset, side="right")
        return [plain(column.values)[each] for each in at]
    if types.is_struct(column.type):
        parts = zip(*(plain(column.field(at)) for at in range(column.type.num_fields)), strict=True)
        return [each if valid else None for each, valid in zip(parts, column.is_valid().to_pylist(), strict=True)]
    return [scalar_of(column[at]) for at in range(len(column))]


def scalar_of(scalar: pa.Scalar) -> Any:  # noqa: PLR0911 - a case per kind of type
    kind = scalar.type
    if isinstance(scalar, pa.ExtensionScalar):
        return scalar_of(scalar.value) if scalar.is_valid else None
    if types.is_union(kind):
        return scalar.type_code, None if scalar.value is None else scalar_of(scalar.value)
    if types.is_run_end_encoded(kind):
        return scalar.as_py()
    if not scalar.is_valid:
        return None
    if is_time(kind):
        return scalar.value
    if types.is_floating(kind):
        return repr(float(scalar.as_py()))
    if types.is_map(kind):
        entries = scalar.values
        return [plain(entries.field(side)) for side in range(2)]
    if types.is_struct(kind):
        return tuple(scalar_of(scalar[at]) for at in range(kind.num_fields))
    if types.is_nested(kind):
        return plain(scalar.values)
    return scalar.as_py()


def _refused(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


@given(batches())
def test_rows_of_every_type_are_read_back_equal(batch: pa.RecordBatch) -> None:
    lines = row_lines(batch)
    for line in lines.decode().split("\n")[:-1]:
        json.loads(line, parse_constant=_refused)
    assert lines.count(b"\n") == batch.num_rows
    for read in (rows_of_lines, _by_line):
        found = read(lines, batch.schema, 1)
        found.validate(full=True)
        assert found.schema.equals(batch.schema)
        assert [plain(column) for column in found.columns] == [plain(column) for column in batch.columns]


@given(slices(batches()))
def test_a_slice_of_rows_is_written_as_its_rows(batch: pa.RecordBatch) -> None:
    found = rows_of_lines(row_lines(batch), batch.schema)
    assert [plain(column) for column in found.columns] == [plain(column) for column in batch.columns]


@given(DEFAULT_BATCHES | slices(DEFAULT_BATCHES))
def test_records_are_read_back_equal(batch: pa.RecordBatch) -> None:
    lines = record_lines(batch)
    for line in lines.decode().split("\n")[:-1]:
        json.loads(line)
    assert records_of_lines(lines).equals(batch)


NUMBERS = st.from_regex(r"-?(0|[1-9][0-9]{0,22})(\.[0-9]{1,25})?([eE][-+]?[0-9]{1,3})?", fullmatch=True)
KINDS = [pa.int64(), pa.uint64(), pa.int8(), pa.float64(), pa.float32(), pa.decimal128(20, 5), pa.decimal256(70, 30)]


@given(NUMBERS, st.sampled_from(KINDS))
def test_a_number_is_stored_exactly_or_refused(text: str, kind: pa.DataType) -> None:
    schema = pa.schema([("v", kind)])
    try:
        found = rows_of_lines(f'{{"v": {text}}}\n'.encode(), schema)
    except SchemaMismatch:
        return
    assert found.equals(_by_line(f'{{"v": {text}}}\n'.encode(), schema, 1))
    (value,) = found.column(0).to_pylist()
    number = Decimal(text)
    if not types.is_floating(kind):
        assert Decimal(value) == number
        return
    assert math.isfinite(value)
    if number == number.to_integral_value() and "." not in text and "e" not in text.lower():
        assert Decimal(value) == number
    elif number:
        digits = len(number.normalize().as_tuple().digits)
        assert value
        assert digits <= 17 or Decimal(f"{value:.{digits - 1}e}") == number


JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS.map(lambda text: ("number", text)) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(st.tuples(st.text(max_size=2), inner), max_size=3).map(lambda pairs: ("object", pairs))
    ),
    max_leaves=6,
)


def written(value: Any) -> str:
    """JSON as others write it: numbers in any form, and duplicate names."""
    match value:
        case ("number", text):
            return str(text)
        case ("object", pairs):
            return "{" + ",".join(f"{json.dumps(name)}: {written(each)}" for name, each in pairs) + "}"
        case list():
            return "[ " + " ,".join(map(written, value)) + "]"
    return json.dumps(value)


@given(JSON, JSON)
def test_json_that_passes_through_stays_byte_for_byte(value: Any, header: Any) -> None:
    own, other = written(value), written(header)
    line = f'{{"value": {own}, "keys": [{other}], "headers": [["h", {other}], ["h", null]]}}'
    found = records_of_lines(line.encode())

    def stored(each: Any, text: str) -> bytes | None:
        return None if each is None else each.encode() if isinstance(each, str) else text.encode()

    assert found.column("value").to_pylist() == [stored(value, own)]
    assert found.column("keys").to_pylist() == [[stored(header, other)]]
    assert found.column("headers").to_pylist() == [[("h", stored(header, other)), ("h", None)]]
    assert records_of_lines(record_lines(found)).equals(found)


def test_the_schema_of_records_is_that_of_streams() -> None:
    assert records_of_lines(b"{}").schema == DEFAULT_SCHEMA
