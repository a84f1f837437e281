"""The extension in C against its twins in Python, over honest, spoilt and hostile bytes: results, effects and errors.

``make fuzz-native`` runs this with any number of examples, `make test-native-asan` with the sanitizers of the
compiler.
"""

from __future__ import annotations

import decimal
import struct
from array import array
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kera.client.headers import NO_HEADERS, Headers
from kera.client.types import Record
from kera.core.errors import CorruptChunk
from kera.core.format import lean
from kera.core.format.chunk import HEADER_BYTES, Placement, encode_chunk, padded, place_chunk, read_header
from kera.core.format.lean.layout import (
    ENCODING_SHIFT,
    LARGE,
    NODES_BYTES_MAX,
    TEXTS,
    VALIDITY,
    WIDTHS,
    Kind,
    Places,
    aligned,
    body_at_of,
    put_prefix,
    put_varint,
    read_layout,
)
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.core.rpc.frames import with_header
from tests.examples import fuzz_examples
from tests.native_twins import MODULES, Outcome, accelerated, alone, needs_native, outcome, python_only, twin_of
from tests.property.batches import BATCHES, BATCHES_AND_SLICES, BYTES, INT64, RECORDS, default_batch
from tests.unit.core.format.lean.support import known_for

pytestmark = needs_native

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
ODD = st.sampled_from((0, 1, 2, 0x7F, 0x80, 0xFF)) | st.integers(0, 255)
BYTES_MAX = 1 << 20
TIME = DEFAULT_SCHEMA.field("timestamp").type


def compare(name: str, *arguments: Any, asks: bool = False, **named: Any) -> Outcome:
    """Check that a function has its twin's outcome, and return it. `asks`: it may call the twin for valid arguments."""
    function = accelerated(*MODULES)[name]
    twin = twin_of(function)
    assert twin is not None
    with python_only():
        expected = outcome(twin, *arguments, **named)
    assert outcome(function, *arguments, **named) == expected
    by_itself = outcome(alone(name), *arguments, **named)
    if expected.error is not None:
        assert by_itself.error is not None, "it takes what is wrong"
    elif not asks:
        assert by_itself == expected, "it does not know what is good"
    return expected


# --- records -----------------------------------------------------------------------------------------------


@settings(max_examples=fuzz_examples(400, 60))
@given(RECORDS.map(default_batch), st.integers(0, 12), st.integers(0, 12), st.integers(0, 2**64 - 20))
def test_records_agree_with_python(batch: pa.RecordBatch, start: int, rows: int, first: int) -> None:
    moved = pa.RecordBatch.from_arrays([column.slice(start) for column in batch.columns], schema=batch.schema)
    for part in (batch, batch.slice(start, rows), moved.slice(0, rows)):
        function = accelerated(*MODULES)["records"]
        twin = twin_of(function)
        assert twin is not None
        expected = list(twin(part, "s", 3, 1, first, NO_HEADERS))
        for each in (function, alone("records")):
            found = list(each(part, "s", 3, 1, first, NO_HEADERS))
            assert found == expected
            assert [type(record) for record in found] == [Record] * part.num_rows
            assert {type(record.headers) for record in found} <= {Headers}


@settings(max_examples=fuzz_examples(200, 30))
@given(st.sampled_from(("keys", "value", "headers")), st.lists(st.integers(-2, 6), min_size=4, max_size=4))
def test_invalid_places_are_left_to_the_twin(column: str, places: list[int]) -> None:
    rows = default_batch([{"timestamp": 0, "keys": [b"k"], "value": b"v", "headers": [("h", b"c")]}] * 3)
    at = rows.schema.get_field_index(column)
    whole = rows.column(at)
    buffers, children = [None, pa.py_buffer(struct.pack("<4i", *places))], None
    if column == "value":
        buffers.append(whole.buffers()[2])
    else:
        children = [whole.values]
    try:
        spoilt = pa.Array.from_buffers(whole.type, 3, buffers, children=children)
    except pa.ArrowInvalid:  # Arrow refuses to make it
        return
    batch = rows.set_column(at, rows.schema.field(at), spoilt)
    known = outcome(alone("records"), batch, "s", 0, 0, 0, NO_HEADERS).error is None
    assert known == (places == sorted(places) and places[0] >= 0 and (column == "value" or places[-1] <= 3))


# --- encoding ----------------------------------------------------------------------------------------------


@settings(max_examples=fuzz_examples(400, 60))
@given(BATCHES_AND_SLICES, st.data())
def test_payloads_agree_with_python(batch: pa.RecordBatch, data: st.DataObject) -> None:
    assume(lean.is_lean(batch.schema))
    rows = batch.num_rows
    cuts = data.draw(st.lists(st.integers(0, rows), max_size=4))
    compare("begin_chunks", batch, None, array("I", [*sorted(cuts), rows]), BYTES_MAX, asks=any_map(batch.schema))
    compare("encode_plain", batch, BYTES_MAX, asks=any_map(batch.schema))
    order = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=12)) if rows else [], np.int64)
    cuts = data.draw(st.lists(st.integers(0, len(order)), max_size=4))
    # Below nulls of lists of fixed length Arrow puts unspecified values.
    compare("begin_chunks", batch, order, array("I", [*sorted(cuts), len(order)]), BYTES_MAX, asks=True)


@settings(max_examples=fuzz_examples(400, 60))
@given(BATCHES_AND_SLICES, INT64, st.data())
def test_payloads_completed_with_missing_columns_agree_with_python(
    batch: pa.RecordBatch, time_us: int, data: st.DataObject
) -> None:
    assume(lean.is_lean(batch.schema) and batch.num_rows)
    missing = st.just(lean.ONE_TIME) | st.sampled_from([*batch.schema.types, pa.string()]).map(lean.no_values)
    given_columns = [st.integers(0, batch.num_columns - 1)] if batch.num_columns else []
    sources = tuple(data.draw(st.lists(st.one_of(missing, *given_columns), max_size=6)))
    compare("encode_completed", batch, sources, time_us, BYTES_MAX, asks=any_map(batch.schema))
    payload = lean.encode_completed(batch, sources, time_us, BYTES_MAX)
    if not sources or payload is None:
        return
    columns = [
        batch.column(source)
        if source >= 0
        else pa.repeat(pa.scalar(time_us, TIME), batch.num_rows)
        if source == lean.ONE_TIME
        else pa.nulls(batch.num_rows)
        for source in sources
    ]
    whole = pa.RecordBatch.from_arrays(columns, [str(at) for at in range(len(columns))])
    assert payload == lean.encode(whole, None, bytes_max=BYTES_MAX)


@settings(max_examples=fuzz_examples(400, 60))
@given(
    st.lists(st.tuples(st.none() | BYTES, INT64, st.none() | st.lists(BYTES, max_size=3).map(tuple)), max_size=12),
    st.booleans(),
)
def test_payloads_of_records_agree_with_python(
    records: list[tuple[bytes | None, int, tuple[bytes, ...] | None]], keyed: bool
) -> None:
    values, times, keys = [record[0] for record in records], array("q", [record[1] for record in records]), None
    if keyed:
        keys = [record[2] for record in records]
    good = values and None not in values and None not in (keys or ())
    compare("encode_records", values, times, keys, BYTES_MAX, asks=not good)


def any_map(schema: pa.Schema) -> bool:
    """Whether a schema has maps: for maps within other types the function calls its twin."""
    return any(pa.types.is_map(kind) for kind in schema.types)


NUMBERS = st.sampled_from((0, 1, 200, 255, 256, 300, 65535, 65536, 70_000, 2**32 - 1, 2**32, 2**40))


@settings(max_examples=fuzz_examples(100, 10))
@given(
    st.integers(1, 3000),
    st.integers(0, 20),
    st.integers(0, 2**32),
    NUMBERS,
    st.integers(0, 400),
    st.floats(0, 1),
)
def test_payloads_of_many_rows_agree_with_python(
    rows: int, first: int, seed: int, span: int, length: int, nulls: float
) -> None:
    random = Random(seed)

    def column(kind: pa.DataType, value: Callable[[], Any], some_nulls: float) -> pa.Array:
        return pa.array([None if random.random() < some_nulls else value() for _ in range(rows + first)], kind)

    def text() -> bytes:
        return bytes(random.randrange(length + 1))

    columns = [
        column(pa.int64(), lambda: 10**15 + random.randint(0, span), 0),
        column(pa.timestamp("us"), lambda: random.randint(0, span), nulls / 2),
        column(pa.int32(), lambda: random.randint(0, span) % 2**31, nulls / 3),
        column(pa.binary(), text, nulls / 2),
        column(pa.large_string(), lambda: text().decode(), 0),
        column(pa.list_(pa.binary()), lambda: [text()[:9]] * random.randrange(3), nulls),
        column(pa.bool_(), lambda: random.random() < nulls, nulls / 3),
        column(pa.decimal128(9, 2), lambda: decimal.Decimal(random.randrange(999)) / 4, 0),
    ]
    batch = pa.RecordBatch.from_arrays(columns, [str(at) for at in range(len(columns))]).slice(first)
    ends = sorted(random.randrange(rows + 1) for _ in range(3))
    compare("begin_chunks", batch, None, array("I", [*ends, rows]), 1 << 30)
    order = np.array([random.randrange(rows) for _ in range(rows)])
    compare("begin_chunks", batch, order, array("I", [*ends, rows]), 1 << 30)


NUMBERS_OF_HEADERS = st.one_of(st.integers(-2, 2**65), st.integers(-(2**64), 2**64), NUMBERS)


@settings(max_examples=fuzz_examples(400))
@given(st.binary(max_size=300), st.tuples(*[NUMBERS_OF_HEADERS] * 13))
def test_headers_agree_with_python(payload: bytes, fields: tuple[int, ...]) -> None:
    compare("encode_header", payload, *fields)


COLUMNS = st.sampled_from("qqqqlQIid")


@settings(max_examples=fuzz_examples(400))
@given(st.data())
def test_sealed_chunks_agree_with_python(data: st.DataObject) -> None:
    payloads = data.draw(st.lists(st.binary(max_size=200), min_size=1, max_size=5))
    made: list[array[int]] = []
    for _ in range(6):
        kind = data.draw(COLUMNS)
        low, high = (0, 2**16) if data.draw(st.booleans()) or kind in "QIid" else (-(2**63), 2**63 - 1)
        count = max(0, len(payloads) + data.draw(st.sampled_from((0,) * 12 + (-1, 1))))
        numbers = data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
        made.append(array(kind, numbers))
    columns: list[Any] = [np.array(column) if at % 2 else column for at, column in enumerate(made)]
    number = data.draw(st.sampled_from((st.integers(0, 255), NUMBERS_OF_HEADERS)))
    common = data.draw(st.lists(number, min_size=7, max_size=7))
    signed = all(column.typecode in "ql" for column in made)
    sizes = array("q", map(len, payloads))
    if data.draw(st.integers(0, 9)) == 0:
        sizes[-1] += data.draw(st.sampled_from((1, 64, -1, -300, 2**62)))
    blank = bytearray().join(bytes(HEADER_BYTES) + payload.ljust(padded(len(payload)), b"\0") for payload in payloads)
    function = accelerated(*MODULES)["seal_chunks"]
    twin, of_twin = twin_of(function), bytearray(blank)
    assert twin is not None
    with python_only():
        expected = outcome(twin, of_twin, sizes, *columns, *common)
    both, by_itself = bytearray(blank), bytearray(blank)
    assert outcome(function, both, sizes, *columns, *common) == expected
    alone_found = outcome(alone("seal_chunks"), by_itself, sizes, *columns, *common)
    if expected.error is not None:
        assert alone_found.error is not None, "it takes what is wrong"
        return
    assert both == of_twin
    if signed:
        assert alone_found == expected, "it does not know what is good"
        assert by_itself == of_twin


# --- decoding ----------------------------------------------------------------------------------------------


def read(payload: bytes, batch: pa.RecordBatch, *, trusted: bool) -> list[str]:
    """The contents of the payload. As text: a NaN is not equal to itself."""
    found = lean.decode(
        pa.py_buffer(payload),
        batch.schema,
        records=batch.num_rows,
        codec=None,
        bytes_max=BYTES_MAX,
        trusted=trusted,
    )
    return [str(found.schema), *(column.to_string(window=found.num_rows) for column in found.columns)]


@settings(max_examples=fuzz_examples(400))
@given(st.data(), BATCHES, st.booleans())
def test_decoded_batches_agree_with_python(data: st.DataObject, batch: pa.RecordBatch, trusted: bool) -> None:
    assume(lean.is_lean(batch.schema))
    payload = bytearray(lean.encode(batch, None, bytes_max=BYTES_MAX) or b"")
    for _ in range(data.draw(st.integers(0, 3)) if not trusted else 0):
        payload[data.draw(st.integers(0, min(len(payload), 64) - 1))] = data.draw(ODD)
    with python_only():
        expected = outcome(read, bytes(payload), batch, trusted=trusted)
    assert outcome(read, bytes(payload), batch, trusted=trusted) == expected


def touch(payload: bytes, batch: pa.RecordBatch) -> int:
    """Read each byte of the buffers of a trusted payload. Their contents are not validated with Arrow."""
    found = lean.decode(
        pa.py_buffer(payload),
        batch.schema,
        records=batch.num_rows,
        codec=None,
        bytes_max=BYTES_MAX,
        trusted=True,
    )
    return sum(sum(memoryview(buffer)) for column in found.columns for buffer in column.buffers() if buffer is not None)


@settings(max_examples=fuzz_examples(400))
@given(st.data(), BATCHES)
def test_any_trusted_payload_is_a_batch_or_refused(data: st.DataObject, batch: pa.RecordBatch) -> None:
    assume(lean.is_lean(batch.schema))
    payload = bytearray(lean.encode(batch, None, bytes_max=BYTES_MAX) or b"")
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, min(len(payload), 64) - 1))] = data.draw(ODD)
    found = outcome(touch, bytes(payload), batch)
    assert found.error is None or found.error[0] is CorruptChunk


# --- chunks ------------------------------------------------------------------------------------------------

HEADERS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "record_count": U32,
        "stream_id": U64,
        "streamlet_id": U32,
        "schema_id": U32,
        "producer_id": U64,
        "producer_epoch": U32,
        "sequence": U64,
        "created_us": st.integers(-(2**63), 2**63 - 1),
        "min_timestamp_us": st.integers(-(2**63), 2**63 - 1),
        "max_timestamp_us": st.integers(-(2**63), 2**63 - 1),
        "typed": st.booleans(),
        "version": st.integers(1, 2),
    }
)
PLACEMENTS = st.tuples(st.integers(0, 3) | U64, U32, U32, U64, U64, U32)


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    """Whole chunks, most of them placed, of arbitrary bytes as payloads."""
    payload = draw(st.binary(max_size=300) | st.integers(0, 100_000).map(bytes))
    chunk = bytearray(encode_chunk(pa.py_buffer(payload), **draw(HEADERS)).to_bytes())
    placement = draw(st.none() | PLACEMENTS)
    if placement is not None:
        place_chunk(chunk, 0, placement)
    return bytes(chunk)


def repair(chunk: bytearray, at: int, checksums: set[str]) -> None:
    """Correct these checksums of the chunk at `at`."""
    if len(chunk) - at < HEADER_BYTES:
        return
    payload = chunk[at + HEADER_BYTES :][: padded(read_header(chunk, at).payload_bytes)]
    for name, place, covered in (
        ("payload", 80, bytes(payload)),
        ("header", 84, None),
        ("placement", 124, bytes(chunk[at + 88 : at + 124])),
    ):
        if name in checksums:
            checksum = crc32c(bytes(chunk[at : at + 84]) if covered is None else covered)
            chunk[at + place : at + place + 4] = struct.pack("<I", checksum)


REPAIRED = st.sets(st.sampled_from(("payload", "header", "placement")))


@st.composite
def spoilt(draw: st.DrawFn, data: bytes, starts: list[int]) -> bytearray:
    """Bytes of chunks at `starts`, with some bytes changed and some checksums repaired; cut or not."""
    found = bytearray(data)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.sampled_from(starts))
        at = start + draw(st.integers(0, HEADER_BYTES - 1) | st.sampled_from((0, 4, 6, 8, 9, 10, 11, 88, 96, 127)))
        if at < len(found):
            found[at] = draw(ODD)
        repair(found, start, draw(REPAIRED))
    if draw(st.booleans()):
        del found[draw(st.integers(0, len(found))) :]
    return found


@st.composite
def runs(draw: st.DrawFn) -> tuple[bytearray, list[int]]:
    """Consecutive chunks, spoilt or not, and the start of each."""
    each = draw(st.lists(chunks(), min_size=1, max_size=4))
    starts = [sum(map(len, each[:number])) for number in range(len(each))]
    return draw(spoilt(b"".join(each), starts)), starts


AS_BUFFER: list[Callable[[bytearray], Any]] = [bytes, bytearray, memoryview, pa.py_buffer]


@settings(max_examples=fuzz_examples(300))
@given(runs(), st.data())
def test_checks_of_headers_payloads_and_chunks_agree_with_python(
    run: tuple[bytearray, list[int]], data: st.DataObject
) -> None:
    found, starts = run
    buffer = data.draw(st.sampled_from(AS_BUFFER))(found)
    offset = data.draw(st.sampled_from(starts) | st.integers(-200, 400))
    compare("verify_header", buffer, offset, asks=offset < 0)
    compare("verify_chunk", buffer, offset, asks=offset < 0)
    read = outcome(read_header, buffer, offset)
    if read.error is None and offset >= 0:
        header = read.value[1]._replace(**data.draw(st.sampled_from(({}, {}, {"payload_bytes": 7}))))
        compare("verify_payload", buffer, offset, header)


@settings(max_examples=fuzz_examples(300))
@given(runs(), st.data())
def test_checks_of_runs_of_placed_chunks_agree_with_python(
    run: tuple[bytearray, list[int]], data: st.DataObject
) -> None:
    found, starts = run
    view = memoryview(found)
    checksum = data.draw(U32)
    compare("verify_placed", view, data.draw(st.sampled_from(starts) | st.integers(0, 400)), checksum)
    compare("verify_run", view, data.draw(st.integers(0, 9) | U32), checksum, data.draw(st.integers(0, 5)))
    ends = array("I", data.draw(st.just([*starts[1:], len(found)]) | st.lists(st.integers(0, 1000) | U32)))
    compare("chained_checksums", view, data.draw(st.just(0) | U32), ends, checksum, asks=True)
    compare("combined_checksum", view, data.draw(st.just(0) | U32), ends, checksum)


@settings(max_examples=fuzz_examples(200))
@given(st.lists(chunks(), max_size=5), st.data())
def test_checks_of_tables_of_headers_agree_with_python(each: list[bytes], data: st.DataObject) -> None:
    headers = b"".join(chunk[:HEADER_BYTES] for chunk in each)
    starts = [HEADER_BYTES * number for number in range(len(each))] or [0]
    found = data.draw(spoilt(headers, starts))
    del found[len(found) // HEADER_BYTES * HEADER_BYTES :]
    compare("check_headers", memoryview(found))


@settings(max_examples=fuzz_examples(200))
@given(st.binary(max_size=400), st.integers(-300, 400), st.tuples(*[st.integers(-1, 3) | U64] * 6) | PLACEMENTS)
def test_placing_agrees_with_python(before: bytes, offset: int, numbers: tuple[int, ...]) -> None:
    function = accelerated(*MODULES)["place_chunk"]
    found, expected = bytearray(before), bytearray(before)
    with python_only():
        wanted = outcome(twin_of(function) or function, expected, offset, Placement(*numbers))
    assert outcome(function, found, offset, Placement(*numbers)) == wanted
    assert found == expected
    if offset >= 0 and wanted.error is None:
        assert outcome(alone("place_chunk"), found, offset, numbers) == wanted
        assert found == expected


@settings(max_examples=fuzz_examples(300))
@given(st.tuples(st.binary(max_size=9), U32 | ODD, U32 | U64, U64, U32 | U64), st.integers(-1, 3), st.data())
def test_headers_of_frames_agree_with_python(fields: tuple[Any, ...], at: int, data: st.DataObject) -> None:
    made = compare("with_header", *fields)
    if made.error is None:
        frame = bytearray(bytes(max(at, 0)) + with_header(*fields))
        if data.draw(st.booleans()):
            place = data.draw(st.integers(0, len(frame) - 1))
            frame[place] ^= data.draw(st.integers(1, 255))
        if data.draw(st.booleans()):
            struct.pack_into("<I", frame, len(frame) - len(fields[0]) - 4, crc32c(frame[max(at, 0) :][:28]))
        compare("decode_header", memoryview(frame), at, data.draw(U32))


@settings(max_examples=fuzz_examples(200))
@given(st.binary(max_size=100), st.integers(0, 70_000), U32)
def test_checksums_agree_with_the_package(data: bytes, zeros: int, before: int) -> None:
    for part in (data, data + bytes(zeros) + data):
        expected = crc32c(part, before)
        for name in ("crc32c", "crc32c_by_tables"):
            assert alone(name)(part, before) == expected


@settings(max_examples=fuzz_examples(200))
@given(st.lists(st.binary(max_size=40), max_size=20), st.binary(max_size=5))
def test_hashes_of_keys_agree_with_python(keys: list[bytes], before: bytes) -> None:
    bounds = array("i", [len(before)])
    for key in keys:
        bounds.append(bounds[-1] + len(key))
        compare("murmur2", key)
    for name in ("crc32_each", "murmur2_each"):
        compare(name, before + b"".join(keys), bounds)


# --- lean payloads -----------------------------------------------------------------------------------------

TEXT = st.text(max_size=6) | st.sampled_from(("é", "€", "\U0001f600", "\0", "\x7f", "\u07ff", "\ud7ff", "\uffff"))
HARD = st.sampled_from(
    (b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x80\x80\x80",
     b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xff", b"\x80", b"\xc3", b"\xe2\x82",
     b"\xf0\x9f\x98")
)  # fmt: skip


class Payload:
    """A payload under construction: its nodes and its growing body."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.nodes = bytearray()
        self.body = bytearray()

    def seldom(self) -> bool:
        """Whether to do something wrong."""
        return self.draw(st.integers(0, 39)) == 0

    def put(self, data: bytes, width: int) -> None:
        """Add a buffer."""
        self.body += bytes(aligned(len(self.body), width) - len(self.body)) + data
        if self.seldom():
            self.body += b"\0"

    def numbers(self, kind: str, numbers: list[int]) -> None:
        """Add a buffer of numbers of a kind of the struct module."""
        if numbers and self.seldom():
            numbers[self.draw(st.integers(0, len(numbers) - 1))] += self.draw(st.sampled_from((-1, 1, 3)))
        size = struct.calcsize(kind)
        self.put(b"".join((number % 256**size).to_bytes(size, "little") for number in numbers), size)

    def node(self, count: int, depth: int) -> None:
        """Add a node for `count` values, with its inner nodes."""
        kind = self.draw(st.sampled_from(Kind if depth < 3 else [each for each in Kind if each < Kind.LIST]))
        encoding = self.draw(st.integers(0, 3))
        validity = VALIDITY if kind and self.draw(st.booleans()) else 0
        if kind in (Kind.FIXED_LIST, Kind.STRUCT, Kind.FIXED, Kind.NULL) and not self.seldom():
            encoding = 0
        self.nodes.append(kind | validity | encoding << ENCODING_SHIFT)
        if validity:
            self.put(self.draw(st.binary(min_size=-(-count // 8), max_size=-(-count // 8))), 1)
        if kind == Kind.STRUCT:
            fields = self.draw(st.integers(0, 2))
            self.nodes += put_varint(fields + self.seldom())
            for _ in range(fields):
                self.node(count, depth + 1)
        elif kind == Kind.FIXED_LIST:
            size = self.draw(st.integers(0, 3))
            self.nodes += put_varint(size)
            self.node(count * size, depth + 1)
        elif kind >= Kind.BINARY:
            self.with_places(kind, encoding, count, depth)
        else:
            self.fixed(kind, encoding, count)

    def fixed(self, kind: Kind, encoding: int, count: int) -> None:
        """Add values of fixed width."""
        width = self.draw(st.integers(0, 5)) if kind == Kind.FIXED else WIDTHS.get(kind, 1)
        if kind == Kind.FIXED:
            self.nodes += put_varint(width)
        if encoding == 0 and kind:
            self.put(bytes(-(-count // 8) if kind == Kind.BITS else count * width), 1 if kind == Kind.FIXED else width)
        elif encoding == 1:
            self.nodes += bytes(max(width, 1) - 1) + bytes([self.draw(st.integers(0, 1) | ODD)])
        elif encoding == 2:
            delta = self.draw(st.sampled_from((1, 2, 4)) | ODD)
            self.nodes += bytes(width) + bytes([delta])
            self.put(bytes(count * delta), delta or 1)

    def with_places(self, kind: Kind, encoding: int, count: int, depth: int) -> None:
        """Add values of several lengths, and their places."""
        values = [
            (self.draw(HARD) if self.seldom() else self.draw(TEXT).encode("utf-8", "replace")) for _ in range(count)
        ]
        if encoding == Places.SAME and values:
            values = values[:1] * count
        if kind in TEXTS and self.seldom():  # whole as a text, but cut within a character
            values = [b"\xe2\x82", b"\xac" + b"".join(values), *[b""] * (count - 2)][:count]
        lengths = [len(value) for value in values]
        ends = [sum(lengths[:number]) for number in range(count + 1)]
        self.nodes += put_varint(max(0, ends[-1] + self.draw(st.sampled_from((-1, 1))) * self.seldom()))
        if encoding == Places.OFFSETS:
            self.numbers("q" if kind in LARGE else "i", ends)
        elif encoding != Places.SAME:
            self.numbers("B" if encoding == Places.LENGTHS_1 else "H", lengths)
        if kind in (Kind.LIST, Kind.LARGE_LIST):
            self.node(ends[-1], depth + 1)
        else:
            self.put(b"".join(values), 1)


@st.composite
def payloads(draw: st.DrawFn) -> tuple[bytes, int, bool]:
    """Payloads of any nodes, most of them valid; the number of records, and whether they are marked compressed."""
    records, compressed = draw(st.integers(0, 5)), draw(st.booleans())
    made = Payload(draw)
    for _ in range(draw(st.integers(0, 3))):
        made.node(records, 0)
    assume(len(made.nodes) <= NODES_BYTES_MAX)
    data = bytearray(put_prefix(bytes(made.nodes), len(made.body), compressed=compressed) + made.body)
    if made.seldom():
        data[draw(st.integers(0, min(len(data), 40) - 1))] = draw(ODD)
    return bytes(data), records, compressed


def check(payload: bytes, records: int, *, compressed: bool, bytes_max: int = BYTES_MAX) -> Outcome:
    known = known_for(payload, records, compressed=compressed, bytes_max=max(bytes_max, BYTES_MAX))
    return compare("check", memoryview(payload), known, records, compressed=compressed, bytes_max=bytes_max)


@settings(max_examples=fuzz_examples(1000, 100))
@given(payloads(), st.just(BYTES_MAX) | st.integers(0, 200))
def test_checks_of_payloads_of_any_nodes_agree_with_python(made: tuple[bytes, int, bool], bytes_max: int) -> None:
    payload, records, compressed = made
    if check(payload, records, compressed=compressed, bytes_max=bytes_max).error is None:
        layout = read_layout(payload, records, compressed=compressed, body_bytes_max=BYTES_MAX)
        for least in (layout.written_bytes, layout.body_bytes, layout.body_bytes * 8):
            for most in (least - 1, least):
                check(payload, records, compressed=compressed, bytes_max=max(0, most))


@settings(max_examples=fuzz_examples(300))
@given(BATCHES_AND_SLICES | BATCHES, st.sampled_from((None, "lz4")), st.data())
def test_checks_of_payloads_of_batches_agree_with_python(
    batch: pa.RecordBatch, codec: str | None, data: st.DataObject
) -> None:
    assume(lean.is_lean(batch.schema))
    payload = bytearray(lean.encode(batch, codec, bytes_max=1 << 27) or b"")
    found = check(bytes(payload), batch.num_rows, compressed=codec is not None, bytes_max=1 << 27)
    assert found.error is None
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, min(len(payload), 64) - 1) | st.integers(0, len(payload) - 1))] = data.draw(
            ODD
        )
    del payload[data.draw(st.just(len(payload)) | st.integers(0, len(payload))) :]
    records = data.draw(st.just(batch.num_rows) | st.integers(0, 1 << 20))
    check(bytes(payload), records, compressed=codec is not None, bytes_max=1 << 27)


VARINT = st.integers(0, 300) | st.sampled_from([(1 << bits) + one for bits in (31, 40, 62) for one in (-1, 0, 1)])
EDGES = [
    (bytes([Kind.FIXED_LIST]) * 70, b"", 1),
    (bytes([Kind.LIST | 1 << 6, 0]) * 66, b"", 0),
    (bytes([Kind.LIST | 1 << 6, 0]) * 64 + bytes(1), b"", 0),
    (bytes([Kind.LIST | 1 << 6, 0]) * 65 + bytes(1), b"", 0),
    (bytes([Kind.TEXT | Places.LENGTHS_1 << 6, 0]), b"", 0),
    (bytes([Kind.LIST | Places.LENGTHS_2 << 6, 0, 0]), b"", 0),
    (bytes([Kind.BITS]), bytes(8193), 8 * 8193),
    (bytes([Kind.BITS | 1 << 6, 0, Kind.BITS]), bytes(8193), 8 * 8193 - 7),
    (bytes([Kind.BITS | 1 << 6, 0]), b"", 1 << 16),
    (bytes([Kind.BITS | 1 << 6, 0]), b"", (1 << 16) + 1),
    (bytes([Kind.LIST | 1 << 6, 0, Kind.BINARY, 0]) * 2000, bytes(8000), (1 << 16) + 1),
    (bytes([Kind.LIST | 1 << 6, 0, Kind.BINARY, 0]) * 2100, bytes(8400), (1 << 16) + 1),
    (bytes([Kind.FIXED, 0]), b"", 1 << 16),
    (bytes([Kind.FIXED_1, Kind.FIXED_16]), bytes(24), 1),
    (bytes([Kind.FIXED_1, Kind.FIXED_16]), bytes(32), 1),
    *[
        (bytes([kind, total]) + bytes(kind == Kind.LIST), struct.pack("<3i", *ends) + b"abc" * (kind != Kind.LIST), 2)
        for kind in (Kind.BINARY, Kind.TEXT, Kind.LIST)
        for total in (2, 3, 4)
        for ends in ((0, 1, 3), (0, 3, 3), (0, 3, 2), (1, 1, 3), (0, -1, 3), (0, 0, 0))
    ],
    (bytes([Kind.STRUCT, 1, Kind.FIXED_LIST]) + put_varint(9) + bytes([Kind.FIXED_1]), bytes(9 * 7300), 7300),
    *[
        (bytes([kind]) + put_varint((1 << bits) + one) + rest, b"", records)
        for bits in (31, 40)
        for one in (-1, 0, 1)
        for kind, rest, records in (
            (Kind.FIXED, b"", 0),
            (Kind.FIXED, b"", 1),
            (Kind.FIXED_LIST, bytes([Kind.NULL]), 0),
            (Kind.FIXED_LIST, bytes([Kind.NULL]), 1),
            (Kind.FIXED_LIST, bytes([Kind.FIXED_LIST]) + put_varint(1 << 40) + bytes([Kind.FIXED, 0]), 2),
            (Kind.FIXED_LIST, bytes([Kind.FIXED]) + put_varint(1 << 40), 1),
            (Kind.LIST | 1 << 6, bytes([Kind.NULL]), 1),
            (Kind.LARGE_LIST | 1 << 6, bytes([Kind.NULL]), 1),
            (Kind.LARGE_BINARY, b"", 1),
        )
    ],
]


@pytest.mark.parametrize("bytes_max", [BYTES_MAX, 1 << 62])
@pytest.mark.parametrize("compressed", [False, True])
def test_checks_of_payloads_at_the_limits_agree_with_python(*, compressed: bool, bytes_max: int) -> None:
    for nodes, body, records in EDGES:
        prefix = put_prefix(nodes, len(body), compressed=compressed)
        assert len(prefix) == body_at_of(len(nodes), compressed=compressed)
        check(prefix + body, records, compressed=compressed, bytes_max=bytes_max)


@settings(max_examples=fuzz_examples(1000, 100))
@given(
    st.lists(st.binary(max_size=3) | VARINT.map(put_varint), max_size=12).map(b"".join),
    st.binary(max_size=40),
    st.integers(0, 40) | st.integers(0, 1 << 42),
    st.booleans(),
    st.sampled_from((BYTES_MAX, 1 << 62)),
)
def test_checks_of_payloads_of_any_bytes_agree_with_python(
    nodes: bytes, body: bytes, records: int, compressed: bool, bytes_max: int
) -> None:
    check(
        put_prefix(nodes, len(body), compressed=compressed) + body, records, compressed=compressed, bytes_max=bytes_max
    )
    check(nodes + body, records, compressed=compressed, bytes_max=bytes_max)


@settings(max_examples=fuzz_examples(1000, 100))
@given(st.lists(TEXT.map(lambda text: text.encode("utf-8", "replace")) | HARD | st.binary(max_size=3), max_size=12))
def test_the_check_of_utf_8_agrees_with_python(pieces: list[bytes]) -> None:
    text = b"".join(pieces)
    payload = put_prefix(
        bytes([Kind.TEXT | Places.SAME << ENCODING_SHIFT]) + put_varint(len(text)), 0, compressed=False
    )
    found = check(payload + text, 1, compressed=False)
    assert (found.error is None) == (text.decode("utf-8", "ignore").encode() == text)
