"""Records as batches, and batches as payloads of chunks."""

from array import array
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kera.client.arrow_input import as_type, null_column
from kera.client.producing.encoding.conforming import conform
from kera.client.producing.encoding.partition_payloads import Payloads, one_by_one, partition_payloads
from kera.client.producing.encoding.partitioner import Partition
from kera.client.producing.encoding.payloads import (
    Payload,
    check_rows,
    payloads,
    record_payloads,
    records_to_batch,
)
from kera.client.producing.encoding.record_message import write_message
from kera.client.types import StreamDescription
from kera.core.errors import RecordTooLarge, SchemaMismatch
from kera.core.format.chunk import (
    ARROW_VERSION,
    HEADER_BYTES,
    LEAN_VERSION,
    chunk_bytes_of,
    encode_chunk,
    padded,
    verify_chunk,
)
from kera.core.format.lean import known_of
from kera.core.format.payload import check_payload, open_payload
from kera.core.format.record_batch import decode_payload
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.v1 import common_pb2
from tests.chaos.growing import growing
from tests.unit.client.support import SEGMENT_BYTES, description

NOW_US = 1_700_000_000_000_000
CHUNK_BYTES = 8 << 10
KEYS = DEFAULT_SCHEMA.field("keys").type
HEADERS = DEFAULT_SCHEMA.field("headers").type
TYPED = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string()), pa.field("at", pa.timestamp("ms"))]
)


OF_ALL_KINDS = [
    pa.null(),
    pa.bool_(),
    pa.uint8(),
    pa.float16(),
    pa.decimal32(5, 2),
    pa.decimal256(50, 3),
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary_view(),
    pa.large_binary(),
    pa.binary(5),
    pa.date32(),
    pa.time64("ns"),
    pa.timestamp("us", "UTC"),
    pa.duration("s"),
    pa.month_day_nano_interval(),
    pa.list_(pa.string_view()),
    pa.list_(pa.field("item", pa.string_view(), nullable=False)),
    pa.large_list(pa.string()),
    pa.list_(pa.string_view(), 2),
    pa.list_view(pa.int32()),
    pa.large_list_view(pa.binary_view()),
    pa.map_(pa.string_view(), pa.list_view(pa.binary_view())),
    pa.struct([("a", pa.string_view()), ("b", pa.struct([("c", pa.list_view(pa.int8()))]))]),
    pa.struct([pa.field("a", pa.int8(), nullable=False)]),
    pa.struct([]),
    pa.run_end_encoded(pa.int32(), pa.string()),
    pa.dense_union([pa.field("a", pa.int8()), pa.field("b", pa.string_view())]),
    pa.sparse_union([pa.field("a", pa.int8()), pa.field("b", pa.string_view())]),
    pa.uuid(),
    pa.json_(),
]


def values(*sizes: int) -> pa.RecordBatch:
    batch = pa.record_batch({"value": pa.array([b"x" * size for size in sizes], pa.binary())})
    return conform(batch, description(), NOW_US)


def pieces(batch: pa.RecordBatch, stream: StreamDescription, chunk_bytes_max: int = CHUNK_BYTES) -> list[int]:
    """The sizes of the chunks, after a check that their rows are the batch's."""
    made = list(payloads(batch, stream, chunk_bytes_max, NOW_US))
    assert sum(payload.record_count for payload in made) == batch.num_rows
    decoded = [decode_payload(payload.payload, stream.schema) for payload in made]
    assert pa.Table.from_batches(decoded, stream.schema).equals(pa.Table.from_batches([batch], stream.schema))
    return [HEADER_BYTES + padded(len(payload.payload)) for payload in made]


class TestConform:
    def test_columns_are_reordered_to_the_schema(self) -> None:
        batch = pa.record_batch({"name": ["a"], "at": pa.array([5], pa.timestamp("ms")), "id": [1]})
        conforming = conform(batch, description(schema=TYPED), NOW_US)
        assert conforming.schema == TYPED
        assert conforming.to_pylist() == [{"id": 1, "name": "a", "at": batch["at"][0].as_py()}]

    def test_nullable_columns_can_be_left_out(self) -> None:
        conforming = conform(pa.record_batch({"id": [1, 2]}), description(schema=TYPED), NOW_US)
        assert conforming.to_pydict() == {"id": [1, 2], "name": [None] * 2, "at": [None] * 2}

    @pytest.mark.parametrize("kind", OF_ALL_KINDS, ids=str)
    def test_a_column_of_any_type_can_be_left_out(self, kind: pa.DataType) -> None:
        stream = description(schema=pa.schema([pa.field("id", pa.int64()), pa.field("other", kind)]))
        batch = pa.record_batch({})
        for count in (0, 1, 5):
            batch = conform(pa.record_batch({"id": pa.array([1] * count, pa.int64())}), stream, NOW_US)
            batch.validate(full=True)
            assert batch["other"].to_pylist() == [None] * count
            assert as_type(pa.nulls(count), kind).equals(batch["other"])
        (payload,) = payloads(batch, stream, CHUNK_BYTES, NOW_US)
        decoded = decode_payload(payload.payload, stream.schema)
        assert decoded.to_pydict() == {"id": [1] * 5, "other": [None] * 5}

    @pytest.mark.parametrize(
        "kind",
        [
            pa.list_(pa.dense_union([pa.field("a", pa.int8())])),
            pa.struct([("a", pa.run_end_encoded(pa.int32(), pa.string()))]),
        ],
        ids=str,
    )
    def test_columns_of_types_without_nulls_in_arrow_cannot_be_left_out(self, kind: pa.DataType) -> None:
        stream = description(schema=pa.schema([pa.field("id", pa.int64()), pa.field("other", kind)]))
        with pytest.raises(SchemaMismatch, match="needs column 'other'"):
            conform(pa.record_batch({"id": [1]}), stream, NOW_US)

    def test_records_without_a_timestamp_get_the_current_time(self) -> None:
        batch = conform(pa.record_batch({"value": [b"a"]}), description(), NOW_US)
        assert batch["timestamp"].cast(pa.int64()).to_pylist() == [NOW_US]
        assert batch.to_pydict()["keys"] == [None]

    def test_conforming_does_not_copy_values(self) -> None:
        value = pa.array([b"a"] * 100, pa.binary())
        batch = conform(pa.record_batch({"value": value}), description(), NOW_US)
        assert batch["value"].buffers()[2].address == value.buffers()[2].address

    @pytest.mark.parametrize(
        ("columns", "text"),
        [
            ({"id": [1], "extra": [1]}, "no column 'extra'"),
            ({"name": ["a"]}, "needs column 'id'"),
            ({"id": pa.array([1], pa.uint64())}, "column 'id' is int64, the batch has uint64"),
            ({"id": pa.array([1, None], pa.int64())}, "column 'id' takes no nulls, the batch has 1"),
        ],
    )
    def test_the_error_names_a_column_that_differs_from_the_schema(self, columns: dict[str, Any], text: str) -> None:
        with pytest.raises(SchemaMismatch, match=text) as caught:
            conform(pa.record_batch(columns), description(schema=TYPED), NOW_US)
        assert caught.value.attributes["stream"] == "s"

    def test_nulls_in_a_column_that_claims_to_have_none_are_refused(self) -> None:
        """Arrow does not enforce the schema of a batch."""
        columns = [pa.array([None], pa.int64()), pa.array(["a"]), pa.array([None], pa.timestamp("ms"))]
        batch = pa.RecordBatch.from_arrays(columns, schema=TYPED)
        with pytest.raises(SchemaMismatch, match="takes no nulls"):
            conform(batch, description(schema=TYPED), NOW_US)

    def test_two_columns_of_one_name_are_refused(self) -> None:
        """A lookup by name does not find such a column: it would be stored as nulls."""
        batch = pa.RecordBatch.from_arrays([pa.array([b"a"]), pa.array([b"b"])], names=["value", "value"])
        with pytest.raises(SchemaMismatch, match="several columns 'value'"):
            conform(batch, description(), NOW_US)


class TestPayloads:
    def test_a_batch_that_fits_becomes_one_chunk(self) -> None:
        assert len(pieces(values(*[100] * 10), description())) == 1

    def test_chunks_have_about_the_requested_size(self) -> None:
        sizes = pieces(values(*[100] * 2000), description())
        assert len(sizes) > 20
        assert all(CHUNK_BYTES * 0.7 < size <= CHUNK_BYTES * 1.1 for size in sizes[:-1])

    def test_no_chunk_is_larger_than_a_segment_whatever_the_rows(self) -> None:
        rows = [100] * 500 + [SEGMENT_BYTES - 1024] + [60_000, 10] * 3 + [100] * 500
        sizes = pieces(values(*rows), description(), chunk_bytes_max=SEGMENT_BYTES * 4)
        assert max(sizes) <= SEGMENT_BYTES

    def test_a_row_too_large_for_a_segment_is_refused_with_the_limit(self) -> None:
        batch = values(100, SEGMENT_BYTES, 100)
        with pytest.raises(RecordTooLarge, match=str(SEGMENT_BYTES)) as caught:
            list(payloads(batch, description(), CHUNK_BYTES, NOW_US))
        assert caught.value.attributes["limit"] == SEGMENT_BYTES
        with pytest.raises(RecordTooLarge):
            check_rows(batch, description())

    def test_many_rows_that_each_fit_into_a_segment_pass_the_check(self) -> None:
        assert check_rows(values(*[SEGMENT_BYTES - 1024] * 3, *[1] * 1000), description()) > 2 * SEGMENT_BYTES

    @pytest.mark.parametrize("codec", [common_pb2.CODEC_LZ4, common_pb2.CODEC_ZSTD])
    def test_chunks_of_incompressible_rows_fit_into_a_segment(self, codec: int) -> None:
        """Compression makes noise larger: a chunk that would just have filled a segment is cut."""
        stream = description(codec=codec)
        noise = np.random.default_rng(1).bytes(4 * SEGMENT_BYTES)
        rows = pa.array([noise[at : at + 512] for at in range(0, len(noise), 512)], pa.binary())
        batch = conform(pa.record_batch({"value": rows}), stream, NOW_US)
        assert max(pieces(batch, stream, chunk_bytes_max=SEGMENT_BYTES)) <= SEGMENT_BYTES

    @pytest.mark.parametrize("codec", [common_pb2.CODEC_LZ4, common_pb2.CODEC_ZSTD])
    def test_a_row_too_large_when_compressed_is_refused_beforehand(self, codec: int) -> None:
        size = SEGMENT_BYTES - chunk_bytes_of(values(64)) + 64
        noise = pa.array([b"small", np.random.default_rng(1).bytes(size)], pa.binary())
        batch, stream = conform(pa.record_batch({"value": noise}), description(), NOW_US), description(codec=codec)
        with pytest.raises(RecordTooLarge, match=str(SEGMENT_BYTES)):
            check_rows(batch, stream)
        check_rows(batch, description())
        check_rows(values(5, size), stream)
        check_rows(batch, stream, lean=True)  # the lean form is smaller
        assert sum(payload.record_count for payload in payloads(batch, stream, CHUNK_BYTES, NOW_US, lean=True)) == 2

    @pytest.mark.parametrize("codec", [common_pb2.CODEC_LZ4, common_pb2.CODEC_ZSTD])
    def test_compressible_rows_are_compressed(self, codec: int) -> None:
        (size,) = pieces(values(*[100] * 60), description(codec=codec))
        assert size < 2000

    def test_each_chunk_carries_the_times_of_its_rows(self) -> None:
        times = pa.array(range(1000)).cast(pa.timestamp("us", "UTC"))
        batch = conform(pa.record_batch({"timestamp": times, "value": [b"x" * 100] * 1000}), description(), NOW_US)
        ranges = [(made.min_timestamp_us, made.max_timestamp_us) for made in payloads(batch, description(), 8192, 0)]
        assert len(ranges) > 5
        assert ranges[0][0] == 0
        assert ranges[-1][1] == 999
        assert all(last + 1 == first for (_, last), (first, _) in pairwise(ranges))

    def test_chunk_times_come_from_the_timestamp_column_in_microseconds(self) -> None:
        stream = description(schema=TYPED, timestamp_column="at")
        columns = {"id": [1, 2, 3], "at": pa.array([7, None, 5], pa.timestamp("ms"))}
        (made,) = payloads(conform(pa.record_batch(columns), stream, NOW_US), stream, CHUNK_BYTES, NOW_US)
        assert (made.min_timestamp_us, made.max_timestamp_us) == (5000, 7000)

    @pytest.mark.parametrize("timestamp_column", ["", "at"])
    def test_chunks_of_rows_without_times_carry_the_current_time(self, timestamp_column: str) -> None:
        stream = description(schema=TYPED, timestamp_column=timestamp_column)
        (made,) = payloads(conform(pa.record_batch({"id": [1]}), stream, NOW_US), stream, CHUNK_BYTES, NOW_US)
        assert (made.min_timestamp_us, made.max_timestamp_us) == (NOW_US, NOW_US)


class TestHollowColumns:
    """Arrow's writer puts the offsets of the whole list column into each slice without values."""

    ROWS = 200_000

    def test_left_out_columns_do_not_enlarge_chunks(self) -> None:
        batch = conform(pa.record_batch({"value": pa.array([b"x" * 10] * self.ROWS)}), description(), NOW_US)
        sizes = [
            HEADER_BYTES + padded(len(made.payload)) for made in payloads(batch, description(), CHUNK_BYTES, NOW_US)
        ]
        assert max(sizes) <= CHUNK_BYTES * 1.1

    @pytest.mark.parametrize(
        "keys",
        [
            pa.nulls(ROWS, KEYS),
            pa.array([[b"k"]] * (ROWS // 2) + [[]] * (ROWS // 4) + [None] * (ROWS // 4), KEYS),
        ],
        ids=["all null", "the second half without keys"],
    )
    def test_empty_list_columns_of_the_caller_do_not_enlarge_chunks(self, keys: pa.Array) -> None:
        columns = {"value": pa.array([b"x" * 10] * self.ROWS), "keys": keys, "headers": pa.nulls(self.ROWS, HEADERS)}
        batch = conform(pa.record_batch(columns), description(), NOW_US)
        assert max(pieces(batch, description())) <= CHUNK_BYTES * 1.5
        check_rows(batch, description())

    def test_empty_nested_lists_do_not_enlarge_chunks(self) -> None:
        kind = pa.struct([("tags", pa.list_(pa.list_(pa.string())))])
        rows = [{"tags": [["a"]]}] * 50_000 + [{"tags": [[]]}] * 50_000
        stream = description(schema=pa.schema([pa.field("row", kind)]))
        assert max(pieces(pa.record_batch({"row": pa.array(rows, kind)}), stream)) <= CHUNK_BYTES * 1.5

    @pytest.mark.parametrize("kind", [KEYS, HEADERS, pa.int8(), pa.string(), pa.struct([("a", KEYS)])])
    @pytest.mark.parametrize("count", [0, 1, 2, 1000])
    def test_a_column_of_nulls_is_valid_and_small(self, kind: pa.DataType, count: int) -> None:
        column = null_column(count, kind)
        column.validate(full=True)
        assert (len(column), column.null_count, column.type) == (count, count, kind)
        assert chunk_bytes_of(pa.record_batch({"a": column})) < 1024 + 20 * count


class TestRecords:
    def test_lists_become_columns(self) -> None:
        batch = records_to_batch([b"a", None], [1, -1], [None, (b"k", b"l")], [(("h", b"v"), ("h", None)), None])
        batch.validate(full=True)
        assert batch.schema == DEFAULT_SCHEMA
        assert batch["timestamp"].cast(pa.int64()).to_pylist() == [1, -1]
        assert batch["value"].to_pylist() == [b"a", None]
        assert batch["keys"].to_pylist() == [None, [b"k", b"l"]]
        assert batch["headers"].to_pylist() == [[("h", b"v"), ("h", None)], None]

    def test_columns_of_absent_keys_and_headers_are_null(self) -> None:
        batch = records_to_batch([b"a"] * 3, [0] * 3, None, None)
        assert (batch["keys"].null_count, batch["headers"].null_count) == (3, 3)

    @pytest.mark.parametrize("count", [100, 101, 1000])
    def test_values_beyond_the_range_of_offsets_are_refused(self, count: int) -> None:
        class Long(bytes):
            def __len__(self) -> int:
                return (2 << 30) // count + 1

        with pytest.raises(OverflowError):
            write_message(np.zeros(count, np.int64), [Long()] * count, None)


class TestValuesInTheSameBytes:
    """Readers refuse chunks whose values would take gigabytes when written out, so writers must not make them."""

    def test_rows_with_shared_bytes_are_cut_into_chunks_that_readers_accept(self) -> None:
        batch = growing("views").slice(0, 1_000)
        stream = description(schema=batch.schema, segment_bytes=8 << 20)
        assert check_rows(batch, stream) < 2 << 20
        made = list(payloads(batch, stream, 8 << 20, NOW_US))
        assert len(made) > 7
        rows = [decode_payload(payload.payload, batch.schema).num_rows for payload in made]
        assert (sum(rows), max(rows)) == (1_000, 125)

    @pytest.mark.parametrize("name", ["list of nulls", "runs of list views"])
    def test_a_row_that_readers_would_refuse_is_refused_by_the_writer(self, name: str) -> None:
        batch = growing(name)
        stream = description(schema=batch.schema, segment_bytes=8 << 20)
        with pytest.raises(RecordTooLarge, match="several records"):
            check_rows(batch.slice(0, 1) if name == "list of nulls" else batch, stream)

    def test_only_the_slice_of_an_array_counts(self) -> None:
        runs = growing("runs")
        batch = pa.RecordBatch.from_arrays([runs.column(0).slice(10, 20)], schema=runs.schema)
        stream = description(schema=batch.schema, segment_bytes=8 << 20)
        (made,) = payloads(batch, stream, 8 << 20, NOW_US)
        assert decode_payload(made.payload, batch.schema).num_rows == 20


# --- version 2 ---------------------------------------------------------------------------------------------


def opened(payload: Payload, schema: pa.Schema) -> pa.RecordBatch:
    """The rows that readers of a chunk with this payload get."""
    chunk = memoryview(encode_chunk(
        payload.payload,
        record_count=payload.record_count,
        stream_id=1,
        streamlet_id=0,
        schema_id=payload.schema_id,
        producer_id=1,
        producer_epoch=1,
        sequence=0,
        created_us=NOW_US,
        min_timestamp_us=payload.min_timestamp_us,
        max_timestamp_us=payload.max_timestamp_us,
        version=payload.version,
    ).to_bytes())  # fmt: skip
    header = verify_chunk(chunk)
    check_payload(chunk, 0, header, known_of(schema))
    return open_payload(chunk[HEADER_BYTES:][: header.payload_bytes], schema, header)


def test_records_are_encoded_lean_on_request() -> None:
    records, times = [b"a", None, b"ccc"], array("q", [NOW_US, NOW_US + 5, NOW_US])
    keys = [None, [b"k", b"l"], None]
    (lean,) = record_payloads(records, times, keys, None, description(), CHUNK_BYTES, lean=True)
    (arrow,) = record_payloads(records, times, keys, None, description(), CHUNK_BYTES)
    assert (lean.version, arrow.version) == (LEAN_VERSION, ARROW_VERSION)
    assert lean[1:-1] == arrow[1:-1], "the header says the same of both"
    assert opened(lean, DEFAULT_SCHEMA).equals(opened(arrow, DEFAULT_SCHEMA))
    assert len(lean.payload) < 100 < len(arrow.payload)


@pytest.mark.parametrize("chunk_bytes_max", [1 << 10, 4 << 10, 128 << 10])
@pytest.mark.parametrize("ends", [(2000,), (3, 4, 1500, 2000)], ids=["one streamlet", "several"])
def test_small_lean_chunks_are_nearly_full(chunk_bytes_max: int, ends: tuple[int, ...]) -> None:
    batch, stream = values(*[100] * 2000), description(segment_bytes=1 << 20)
    partition = Partition(batch, np.arange(7, 7 + len(ends)), np.array(ends))
    size = check_rows(batch, stream)
    made: dict[int, list[Payload]] = {}
    for parts in partition_payloads(partition, stream, chunk_bytes_max, NOW_US, size, lean=True):
        for place, payload in one_by_one(parts):
            made.setdefault(place, []).append(payload)
    for place, start, end in zip(partition.streamlets, (0, *ends), ends, strict=False):
        sizes = [HEADER_BYTES + padded(len(payload.payload)) for payload in made[place]]
        assert max(sizes) <= chunk_bytes_max
        assert all(size > 0.75 * chunk_bytes_max for size in sizes[:-1])
        rows = pa.Table.from_batches([opened(payload, DEFAULT_SCHEMA) for payload in made[place]])
        assert rows.equals(pa.Table.from_batches([batch.slice(start, end - start)]))


def test_small_chunks_beside_a_large_one_are_found_in_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    passes, ends_of = 0, Payloads.ends

    def counted(made: Payloads) -> Any:
        nonlocal passes
        passes += 1
        return ends_of(made)

    monkeypatch.setattr(Payloads, "ends", counted)
    count = 100
    batch = values(*[10] * count, 2 * CHUNK_BYTES)
    partition = Partition(batch, np.arange(count + 1), np.arange(1, count + 2), sized=True)
    made = list(
        partition_payloads(partition, description(), CHUNK_BYTES, NOW_US, check_rows(batch, description()), lean=True)
    )
    chunks = [chunk for each in made for chunk in one_by_one(each)]
    assert [place for place, _ in chunks] == [*range(count + 1)]
    rows = pa.Table.from_batches([opened(payload, DEFAULT_SCHEMA) for _, payload in chunks])
    assert rows.equals(pa.Table.from_batches([batch]))
    assert passes < 5


def test_batches_are_encoded_lean_if_their_schema_allows_it() -> None:
    batch = values(*range(500))
    made = list(payloads(batch, description(), CHUNK_BYTES, NOW_US, lean=True))
    assert len(made) > 1
    assert {each.version for each in made} == {LEAN_VERSION}
    assert pa.Table.from_batches([opened(each, DEFAULT_SCHEMA) for each in made]).equals(pa.Table.from_batches([batch]))
    views = description(schema=pa.schema([("name", pa.string_view())]))
    batch = pa.RecordBatch.from_arrays([pa.array(["a", "b"], pa.string_view())], schema=views.schema)
    (made_of_views,) = payloads(batch, views, CHUNK_BYTES, NOW_US, lean=True)
    assert made_of_views.version == ARROW_VERSION
    assert opened(made_of_views, views.schema).equals(batch)
