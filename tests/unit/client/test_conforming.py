"""Batches with the columns of the previous batch: the quick path gives the same rows and, where possible, a chunk."""

from typing import Any

import pyarrow as pa
import pytest

from kera.client.producing.encoding.conforming import Conformer, conform
from kera.client.producing.encoding.payloads import payloads
from kera.core.errors import SchemaMismatch
from kera.core.format.schema import DEFAULT_SCHEMA
from kera.v1 import common_pb2
from tests.unit.client.conftest import MakeCluster, MakeProducer
from tests.unit.client.support import description, stream_info

NOW_US = 1_700_000_000_000_000
CHUNK_BYTES = 1 << 20
KEYS = DEFAULT_SCHEMA.field("keys").type
TIME = DEFAULT_SCHEMA.field("timestamp").type
TYPED = pa.schema(
    [pa.field("id", pa.int64(), nullable=False), pa.field("name", pa.string()), pa.field("at", pa.timestamp("ms"))]
)
VALUES = pa.array([b"a", None, b"ccc"], pa.binary())
OF_STREAMS = {
    "values": ({}, {"value": VALUES}),
    "keys": ({}, {"keys": pa.array([[b"k"], None, [b"l", b"m"]], KEYS), "value": VALUES}),
    "times": ({}, {"value": VALUES, "timestamp": pa.array([3, 1, 2], TIME)}),
    "no columns of the stream": ({}, {"keys": pa.array([[b"k"], None, []], KEYS)}),
    "all columns": ({}, {name: pa.array([None] * 3, DEFAULT_SCHEMA.field(name).type) for name in ("keys", "headers")}),
    "typed": ({"schema": TYPED}, {"id": pa.array([1, 2, 3]), "name": ["x", None, "z"]}),
    "typed, in another order": ({"schema": TYPED}, {"at": pa.array([5, None, 7], pa.timestamp("ms")), "id": [3, 2, 1]}),
    "typed, with times": (
        {"schema": TYPED, "timestamp_column": "at"},
        {"id": pa.array([1, 2, 3]), "at": pa.array([5, None, 7], pa.timestamp("ms"))},
    ),
    "typed, without times": ({"schema": TYPED, "timestamp_column": "at"}, {"id": pa.array([1, 2, 3])}),
}


@pytest.mark.parametrize("kind", OF_STREAMS)
def test_a_batch_like_the_previous_one_gives_the_same_rows_and_payload_as_alone(kind: str) -> None:
    options, columns = OF_STREAMS[kind]
    stream, batch = description(**options), pa.record_batch(columns)
    conformer = Conformer()
    assert conformer.payload(batch, stream, NOW_US, keyless=False) is None, "there was none before it"
    conformer.conform(batch, stream, NOW_US - 1)
    for rows in (batch, batch.slice(1), batch.slice(0, 2)):
        expected = conform(rows, stream, NOW_US)
        assert conformer.conform(rows, stream, NOW_US).equals(expected)
        (whole,) = payloads(expected, stream, CHUNK_BYTES, NOW_US, lean=True)
        assert conformer.payload(rows, stream, NOW_US, keyless=False) == whole


NOT_UTF8 = pa.Array.from_buffers(
    pa.string(), 1, [None, pa.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0])), pa.py_buffer(b"\xff\xfe")]
)


@pytest.mark.parametrize(
    "columns",
    [{"id": pa.array([None], pa.int64()), "name": ["x"]}, {"id": pa.array([1]), "name": NOT_UTF8}],
    ids=["a null where there must be none", "text that is none"],
)
def test_a_bad_batch_after_a_good_one_is_refused_with_the_usual_error(columns: Any) -> None:
    stream, conformer = description(schema=TYPED), Conformer()
    conformer.conform(pa.record_batch({"id": pa.array([1]), "name": ["x"]}), stream, NOW_US)
    batch = pa.record_batch(columns)
    assert conformer.payload(batch, stream, NOW_US, keyless=False) is None
    assert not conformer.takes(batch, stream)
    with pytest.raises(SchemaMismatch) as refused:
        conformer.conform(batch, stream, NOW_US)
    with pytest.raises(SchemaMismatch) as alone:
        conform(batch, stream, NOW_US)
    assert str(refused.value) == str(alone.value)


def test_a_batch_that_needs_conversion_is_converted_each_time() -> None:
    stream, conformer = description(schema=TYPED), Conformer()
    for number in (1, 2):
        batch = pa.record_batch({"id": pa.array([number], pa.int16())})
        assert conformer.conform(batch, stream, NOW_US)["id"].to_pylist() == [number]
        assert not conformer.takes(batch, stream)
        assert conformer.payload(batch, stream, NOW_US, keyless=False) is None


def test_columns_added_to_a_stream_appear_in_the_next_batch() -> None:
    batch, conformer = pa.record_batch({"id": pa.array([1])}), Conformer()
    conformer.conform(batch, description(schema=TYPED), NOW_US)
    wider = description(schema=TYPED.append(pa.field("more", pa.int8())))
    assert not conformer.takes(batch, wider)
    assert conformer.conform(batch, wider, NOW_US).schema == wider.schema


@pytest.mark.parametrize(
    ("options", "columns", "keyless"),
    [
        ({}, {"value": VALUES}, True),
        ({}, {"keys": pa.array([[b"k"], None, []], KEYS)}, False),
        ({"schema": TYPED}, {"id": pa.array([1, 2, 3])}, True),
        ({"schema": TYPED, "key_column": "id"}, {"id": pa.array([1, 2, 3])}, False),
        ({"schema": TYPED, "key_column": "name"}, {"id": pa.array([1, 2, 3])}, False),
    ],
)
def test_the_quick_path_for_rows_without_keys_refuses_rows_with_keys(
    options: Any, columns: Any, *, keyless: bool
) -> None:
    stream, batch, conformer = description(**options), pa.record_batch(columns), Conformer()
    conformer.conform(batch, stream, NOW_US)
    assert (conformer.payload(batch, stream, NOW_US, keyless=True) is not None) == keyless
    assert conformer.payload(batch, stream, NOW_US, keyless=False) is not None


def test_compressed_streams_and_types_of_uncertain_size_take_no_quick_chunk() -> None:
    views = pa.schema([pa.field("id", pa.string_view())])
    for options, column in (
        ({"codec": common_pb2.CODEC_ZSTD}, {"value": VALUES}),
        ({"schema": views}, {"id": pa.array(["a"], pa.string_view())}),
        ({"schema": pa.schema([pa.field("id", pa.null())])}, {"id": pa.nulls(3)}),
    ):
        stream, batch, conformer = description(**options), pa.record_batch(column), Conformer()
        conformer.conform(batch, stream, NOW_US)
        assert conformer.takes(batch, stream)
        assert conformer.payload(batch, stream, NOW_US, keyless=False) is None


async def test_batches_without_keys_go_to_the_streamlets_in_turn(
    make_cluster: MakeCluster, make_producer: MakeProducer
) -> None:
    cluster = make_cluster(stream_info(streamlets=3))
    producer = make_producer(cluster)
    places = []
    for number in range(6):
        (delivery,) = await (await producer.send_batch("s", pa.record_batch({"value": [b"%d" % number] * 3})))
        places.append(delivery.entry.streamlet_id)
    assert sorted(places[:3]) == [0, 1, 2]
    assert places[3:] == places[:3]
    await (await producer.send_batch("s", pa.record_batch({"value": [b"here"]}), streamlet=1))
    assert cluster.values(streamlet=1)[-1] == b"here"


async def test_a_batch_comes_after_records_sent_before_it(cluster: Any, make_producer: MakeProducer) -> None:
    producer = make_producer(cluster, linger_ms=10_000)
    values = [b"%d" % number for number in range(8)]
    big = b"x" * 40_000  # too large to be gathered
    await producer.send_batch("s", pa.record_batch({"value": [big]}))
    producer.send("s", values[0])
    await producer.send_batch("s", pa.record_batch({"value": [big]}))
    await producer.send_batch("s", pa.record_batch({"value": [values[1]]}))
    await producer.send_batch("s", pa.record_batch({"value": [big]}))
    await producer.flush()
    assert cluster.values() == [big, values[0], big, values[1], big]
