"""Lean payloads that do not fit the schema."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from kera.core.errors import CorruptChunk
from kera.core.format.lean import check, decode, encode, known_of
from kera.core.format.lean.layout import ENCODING_SHIFT, VALIDITY, Kind, Places, Values, put_prefix, put_varint

BYTES_MAX = 1 << 20


def batch(*arrays: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(list(arrays), [f"c{at}" for at in range(len(arrays))])


def decoded(payload: bytes, schema: pa.Schema, codec: str | None = None, records: int = 2) -> pa.RecordBatch:
    return decode(pa.py_buffer(payload), schema, records=records, codec=codec, bytes_max=BYTES_MAX, trusted=False)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (pa.array([1, 2], pa.int32()), pa.int64()),
        (pa.array(["a", "b"]), pa.binary()),
        (pa.array([b"a", b"b"]), pa.string()),
        (pa.array([b"ab", b"cd"], pa.binary(2)), pa.binary(3)),
        (pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2)), pa.list_(pa.int8(), 3)),
        (pa.array([[1], [3]], pa.list_(pa.int8())), pa.map_(pa.int8(), pa.int8())),
        (pa.array([{"a": 1}, {"a": 2}]), pa.struct([("a", pa.int64()), ("b", pa.int8())])),
        (pa.array([1, 2], pa.int32()), pa.string_view()),
    ],
    ids=str,
)
def test_columns_of_other_types_are_refused(written: pa.Array, read: pa.DataType) -> None:
    payload = encode(batch(written), None, bytes_max=BYTES_MAX)
    assert payload is not None
    with pytest.raises(CorruptChunk, match="where the schema has"):
        decoded(payload, pa.schema([("c0", read)]))


def test_more_or_fewer_columns_are_refused() -> None:
    payload = encode(batch(pa.array([1, 2]), pa.array([1, 2])), None, bytes_max=BYTES_MAX)
    assert payload is not None
    for schema in (pa.schema([("c0", pa.int64())]), pa.schema([(f"c{at}", pa.int64()) for at in range(3)])):
        with pytest.raises(CorruptChunk, match="2 columns, the schema has"):
            decoded(payload, schema)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_damaged_compressed_body_is_refused_or_has_the_same_values(codec: str) -> None:
    made = batch(pa.array(range(1000), pa.int64()))
    payload = encode(made, codec, bytes_max=BYTES_MAX)
    assert payload is not None
    assert decoded(payload, made.schema, codec, 1000).equals(made)
    for broken in (payload[:-9], payload[:-1] + bytes([payload[-1] ^ 1]), payload[: len(payload) // 2] + bytes(99)):
        try:
            found = decoded(broken, made.schema, codec, 1000)
        except CorruptChunk:
            continue
        assert found.equals(made), "a checksum of the codec's own frame was hit, and nothing else"


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
@pytest.mark.parametrize("beyond", [-1, 1, 60])
def test_a_compressed_body_with_a_wrong_length_is_refused(codec: str, beyond: int) -> None:
    node, body = bytes([Kind.FIXED_1]), bytes(1000)
    prefix = put_prefix(node, len(body) + beyond, compressed=True)
    payload = prefix + pa.compress(body, codec, asbytes=True)
    with pytest.raises(CorruptChunk, match=r"its body cannot be decompressed|bytes where \d+ were announced"):
        decoded(payload, pa.schema([("a", pa.int8())]), codec, len(body) + beyond)


def test_columns_of_nulls_only_are_encoded_for_any_type() -> None:
    made = batch(
        pa.nulls(2, pa.list_(pa.string())), pa.nulls(2, pa.int8()), pa.nulls(2, pa.map_(pa.string(), pa.int8()))
    )
    payload = encode(made, None, bytes_max=BYTES_MAX)
    assert payload is not None
    assert len(payload) == 8
    assert decoded(payload, made.schema).equals(made)


@pytest.mark.parametrize(
    "kind",
    [
        pa.binary(10_000),
        pa.list_(pa.int64(), 1000),
        pa.struct([("a", pa.list_(pa.decimal256(50, 1), 1000))]),
        pa.list_(pa.struct([(str(at), pa.int64()) for at in range(1000)]), 2),
    ],
    ids=str,
)
def test_nulls_that_become_too_large_are_refused_and_never_written(kind: pa.DataType) -> None:
    nulls = put_prefix(bytes([Kind.NULL]), 0, compressed=False)
    with pytest.raises(CorruptChunk, match="when each is written out"):
        decoded(nulls, pa.schema([("a", kind)]), records=1000)
    within = pa.schema([("a", pa.list_(kind, 10))])
    with pytest.raises(CorruptChunk, match="when each is written out"):
        decoded(put_prefix(bytes([Kind.FIXED_LIST, 10, Kind.NULL]), 0, compressed=False), within, records=100)
    assert encode(batch(pa.nulls(1000, kind)), None, bytes_max=BYTES_MAX) is None
    few = batch(pa.nulls(2, kind))
    payload = encode(few, None, bytes_max=BYTES_MAX)
    assert payload is not None
    assert decoded(payload, few.schema).equals(few)


@pytest.mark.parametrize(
    ("kind", "value"), [(pa.decimal128(3, 1), (1 << 70).to_bytes(16, "little")), (pa.time32("s"), b"\xff" * 4)], ids=str
)
def test_values_outside_the_range_of_the_type_are_refused(kind: pa.DataType, value: bytes) -> None:
    one = {4: Kind.FIXED_4, 16: Kind.FIXED_16}[len(value)] | Values.ONE << ENCODING_SHIFT
    payload = put_prefix(bytes([one]) + value, 0, compressed=False)
    with pytest.raises(CorruptChunk, match="do not fit the schema"):
        decoded(payload, pa.schema([("a", kind)]))


MAP = pa.map_(pa.string(), pa.int8())
ENTRIES = pa.list_(pa.struct([("key", pa.string()), ("value", pa.int8())]))
HUGE = pa.list_(pa.list_(pa.int8(), 1 << 30), 1 << 30)


def with_nulls(made: pa.Array, kind: pa.DataType) -> tuple[bytes, pa.Schema]:
    """The payload of lists that look like maps, and a schema with maps."""
    payload = encode(batch(made), None, bytes_max=BYTES_MAX)
    assert payload is not None
    return payload, pa.schema([("c0", kind)])


def validity_of_all(key: int) -> bytes:
    """Two maps of one pair each, with validity bits that are set for each key."""
    nodes = [
        Kind.LIST | Places.SAME << ENCODING_SHIFT,
        2,
        Kind.STRUCT,
        2,
        key | VALIDITY | Values.ONE << ENCODING_SHIFT,
    ]
    return put_prefix(bytes([*nodes, 7, Kind.FIXED_1 | Values.ONE << ENCODING_SHIFT, 1]), 0, compressed=False) + b"\x03"


NUMBERS = pa.schema([("c0", pa.map_(pa.int8(), pa.int8()))])
NULLS_IN_MAPS = {
    "a key": with_nulls(pa.array([[{"key": None, "value": 1}], [{"key": "a", "value": 2}]], ENTRIES), MAP),
    "all keys": with_nulls(pa.array([[{"key": None, "value": 1}], [{"key": None, "value": 2}]], ENTRIES), MAP),
    "an entry": with_nulls(pa.array([[None], [{"key": "a", "value": 2}]], ENTRIES), MAP),
    "all entries": with_nulls(pa.array([[None], [None]], ENTRIES), MAP),
    "bits that say there is none": (validity_of_all(Kind.FIXED_1), NUMBERS),
    "a key in a list": with_nulls(pa.array([[[{"key": None, "value": 1}]], []], pa.list_(ENTRIES)), pa.list_(MAP)),
    "a key in a value": with_nulls(
        pa.array(
            [[{"key": 1, "value": [{"key": None, "value": 1}]}], []],
            pa.list_(pa.struct([("key", pa.int8()), ("value", ENTRIES)])),
        ),
        pa.map_(pa.int8(), MAP),
    ),
}


@pytest.mark.usefixtures("either_core")
@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("case", NULLS_IN_MAPS)
def test_a_map_with_null_keys_or_entries_is_refused_before_arrow_ends_the_process(case: str, trusted: bool) -> None:
    payload, schema = NULLS_IN_MAPS[case]
    with pytest.raises(CorruptChunk, match="nulls among the keys or entries"):
        decode(pa.py_buffer(payload), schema, records=2, codec=None, bytes_max=BYTES_MAX, trusted=trusted)
    with pytest.raises(CorruptChunk, match="nulls among the keys or entries"):
        check(memoryview(payload), known_of(schema), 2, compressed=False, bytes_max=BYTES_MAX)


@pytest.mark.usefixtures("either_core")
@pytest.mark.parametrize("trusted", [False, True])
def test_a_null_larger_than_any_memory_is_refused(trusted: bool) -> None:
    schema = pa.schema([("c0", HUGE)])
    for nodes in ([Kind.NULL], [Kind.FIXED_LIST, *put_varint(1 << 30), Kind.NULL]):
        payload = put_prefix(bytes(nodes), 0, compressed=False)
        with pytest.raises(CorruptChunk):
            decode(pa.py_buffer(payload), schema, records=1, codec=None, bytes_max=BYTES_MAX, trusted=trusted)
        with pytest.raises(CorruptChunk):
            check(memoryview(payload), known_of(schema), 1, compressed=False, bytes_max=BYTES_MAX)


@pytest.mark.usefixtures("either_core")
@pytest.mark.parametrize("within", [[Kind.NULL], [Kind.STRUCT, 2, Kind.NULL, Kind.NULL]], ids=["entries", "keys"])
def test_nulls_for_the_keys_of_maps_that_are_all_empty_are_accepted(within: list[int]) -> None:
    nodes = bytes([Kind.LIST | Places.SAME << ENCODING_SHIFT, 0, *within])
    payload = put_prefix(nodes, 0, compressed=False)
    assert decoded(payload, pa.schema([("c0", MAP)])).to_pydict() == {"c0": [[], []]}


# -- columns that are not nullable -------------------------------------------------------------------------------------

REQUIRED = pa.schema([pa.field("c0", pa.int64(), nullable=False)])


@pytest.mark.usefixtures("either_core")
@pytest.mark.parametrize("codec", [None, "zstd"])
@pytest.mark.parametrize("values", [[None, 1], [None, None]], ids=["some", "all"])
def test_nulls_of_a_column_that_is_not_nullable_are_refused_by_brokers_and_readers(
    codec: str | None, values: list[int | None]
) -> None:
    payload = encode(batch(pa.array(values, pa.int64())), codec, bytes_max=BYTES_MAX)
    assert payload is not None
    with pytest.raises(CorruptChunk, match="nulls among the values of column 'c0', which is not nullable"):
        check(memoryview(payload), known_of(REQUIRED), 2, compressed=codec is not None, bytes_max=BYTES_MAX)
    with pytest.raises(CorruptChunk, match="which is not nullable"):
        decoded(payload, REQUIRED, codec)


@pytest.mark.usefixtures("either_core")
def test_children_below_nulls_may_be_null_even_if_not_nullable() -> None:
    """Below a null of a struct or a list a child may have any value, so the check is for whole columns only."""
    kind = pa.struct([pa.field("a", pa.int64(), nullable=False)])
    schema = pa.schema([pa.field("c0", kind), pa.field("c1", pa.list_(pa.int8()), nullable=False)])
    made = pa.RecordBatch.from_arrays(
        [pa.array([None, {"a": 1}], kind), pa.array([[None], []], schema.types[1])], schema=schema
    )
    payload = encode(made, None, bytes_max=BYTES_MAX)
    assert payload is not None
    assert decoded(payload, schema).equals(made)


# -- values below nulls ------------------------------------------------------------------------------------------------


def below_nulls(within: pa.DataType, value: int, rows: list[bool]) -> pa.RecordBatch:
    """Lists of one value each; the list is null where a row is False, and still has its value below."""
    numbers = np.full(len(rows), value, np.int64)
    values = pa.Array.from_buffers(within, len(rows), [None, pa.py_buffer(numbers)])
    offsets = pa.py_buffer(np.arange(len(rows) + 1, dtype=np.int32))
    bits = pa.py_buffer(np.packbits(rows, bitorder="little"))
    return batch(pa.Array.from_buffers(pa.list_(within), len(rows), [bits, offsets], -1, 0, [values]))


def list_payload(made: pa.RecordBatch) -> bytes:
    """The batch's payload with validity bits for its lists: an honest writer has a node of nulls if all are null."""
    bits, _, _, values = made.column(0).buffers()
    nodes = [Kind.LIST | VALIDITY | Places.SAME << ENCODING_SHIFT, made.num_rows, Kind.FIXED_8]
    return put_prefix(bytes(nodes), 0, compressed=False) + bytes(bits).ljust(8, b"\0") + bytes(values)


@pytest.mark.usefixtures("either_core")
@pytest.mark.parametrize("rows", [[True, False], [False, False]], ids=["some", "all"])
def test_values_below_nulls_are_checked_like_others(rows: list[bool]) -> None:
    """An invalid time of day would come out of `flatten` or `values`."""
    good, wrong = (below_nulls(pa.time64("us"), value, rows) for value in (5, 1 << 60))
    assert decoded(list_payload(good), good.schema).column(0).values.to_pylist()[1].microsecond == 5
    with pytest.raises(CorruptChunk, match="do not fit the schema"):
        decoded(list_payload(wrong), wrong.schema)
