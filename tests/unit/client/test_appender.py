"""Appending under a producer id that the caller chooses: accepted chunks, repeats and retries."""

from typing import Any

import pyarrow as pa
import pytest

from kera.client import Client
from kera.client.producing.appender import Appender, AppendResult
from kera.client.producing.encoding.partitioner import PARTITIONERS, streamlet_of
from kera.client.settings import ClientSettings
from kera.core.base.ids import PRODUCER_IDS, EntryId, Position
from kera.core.base.settings import InvalidSettings
from kera.core.errors import (
    InvalidArgument,
    KeraError,
    NotOwner,
    OutOfSequence,
    ProducerFenced,
    RecordTooLarge,
    SchemaMismatch,
    StreamletOutOfRange,
    UnknownStream,
)
from kera.core.format.chunk import ARROW_VERSION, LEAN_VERSION
from kera.v1 import common_pb2
from tests.unit.client.conftest import MakeCluster
from tests.unit.client.support import BROKER_ID, FakeCluster, Fault, stream_info

NAME = PRODUCER_IDS[5]
TYPED = pa.schema([pa.field("user", pa.string()), pa.field("n", pa.int64(), nullable=False)])


async def appender(cluster: FakeCluster, *, producer_id: int = NAME, epoch: int = 1, **options: Any) -> Appender:
    options.setdefault("chunk_bytes_max", 1 << 20)
    stream = await cluster.stream("s")
    return Appender(cluster, stream, producer_id=producer_id, producer_epoch=epoch, **options)  # type: ignore[arg-type]


def rows(of: Appender, *values: bytes) -> pa.RecordBatch:
    return of.conform(pa.record_batch({"value": pa.array(values, pa.binary())}))


async def append(cluster: FakeCluster, sequence: int, *values: bytes, **options: Any) -> AppendResult:
    made = await appender(cluster, **options)
    return await made.append(0, rows(made, *values), sequence)


async def test_a_chunk_is_stored_under_the_given_producer_id_and_epoch(cluster: FakeCluster) -> None:
    first = await append(cluster, 0, b"a", b"b", epoch=7)
    second = await append(cluster, 1, b"c", epoch=7)

    assert first == AppendResult(2, False, EntryId(7, 0, 0), Position(1, 1, 0))
    assert (second.record_count, second.duplicate) == (1, False)
    assert cluster.values() == [b"a", b"b", b"c"]
    headers = [header for header, _ in cluster.chunks()]
    assert [(each.producer_id, each.producer_epoch, each.sequence) for each in headers] == [(NAME, 7, 0), (NAME, 7, 1)]


@pytest.mark.parametrize("schema", [None, TYPED])
@pytest.mark.parametrize("codec", [common_pb2.CODEC_NONE, common_pb2.CODEC_ZSTD])
async def test_lean_and_arrow_chunks_have_the_same_rows(
    make_cluster: MakeCluster, schema: pa.Schema | None, codec: int
) -> None:
    found = []
    names = [f"{number:0200}" for number in range(100)]
    infos = [stream_info(name, 7 + at, schema=schema, codec=codec) for at, name in enumerate(("lean", "arrow"))]
    cluster: Any = make_cluster(*infos)
    client: Any = Client(cluster)
    for payload, version in (("lean", LEAN_VERSION), ("arrow", ARROW_VERSION)):
        made = await client.appender(payload, producer_id=NAME, producer_epoch=1, chunk_bytes_max=4096, payload=payload)
        columns = {"value": pa.array(names, pa.binary())} if schema is None else {"user": names, "n": range(100)}
        left, sequence, counts = made.conform(pa.record_batch(columns)), 0, []
        while left.num_rows:
            counts.append((await made.append(0, left, sequence)).record_count)
            left, sequence = left.slice(counts[-1]), sequence + 1
        assert {header.version for header, _ in cluster.chunks(payload)} == {version}
        stored = cluster.stored(payload)
        assert len(counts) > 1
        found.append(stored["value" if schema is None else "user"].to_pylist())
    assert found[0] == found[1]


async def test_an_appender_takes_its_payload_format_from_the_producers_setting(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = Client(cluster)  # type: ignore[arg-type]
    options: dict[str, Any] = {"producer_id": NAME, "producer_epoch": 1, "chunk_bytes_max": 1 << 20}
    for sequence, payload in enumerate(("lean", "arrow")):
        monkeypatch.setenv("KERA_PRODUCER_PAYLOAD", payload)
        made = await client.appender("s", **options)
        await made.append(0, rows(made, b"a"), sequence)
    assert [header.version for header, _ in cluster.chunks()] == [LEAN_VERSION, ARROW_VERSION]
    with pytest.raises(InvalidSettings, match="payload"):
        await client.appender("s", payload="thin", **options)


@pytest.mark.parametrize(("cuts", "counts"), [(True, [2, 1, 2]), (False, [5])])
async def test_a_chunk_ends_before_a_later_epoch_only_with_cut_at_epochs(
    make_cluster: MakeCluster, cuts: bool, counts: list[int]
) -> None:
    client: Any = Client(make_cluster(stream_info(epoch_ms=10)))  # type: ignore[arg-type]
    made = await client.appender("s", producer_id=NAME, producer_epoch=1, chunk_bytes_max=4096, cut_at_epochs=cuts)
    times = pa.array([3_000, 9_999, 10_000, 31_000, 5_000], pa.timestamp("us", "UTC"))
    left = made.conform(pa.record_batch({"value": pa.array([b"v"] * 5, pa.binary()), "timestamp": times}))
    found: list[int] = []
    while left.num_rows:
        found.append((await made.append(0, left, len(found))).record_count)
        left = left.slice(found[-1])
    assert found == counts


async def test_a_chunk_without_rows_is_refused(cluster: FakeCluster) -> None:
    with pytest.raises(InvalidArgument, match="chunk 3 would have no rows"):
        await append(cluster, 3)
    assert cluster.loopback.writes == []


async def test_a_repeated_sequence_returns_the_place_of_the_stored_chunk(cluster: FakeCluster) -> None:
    first = await append(cluster, 0, b"a")

    second = await append(cluster, 0, b"quite", b"another", compares=True)

    assert second == first._replace(record_count=2, duplicate=True, same=False)
    assert cluster.values() == [b"a"]


async def test_other_rows_under_a_stored_sequence_are_refused_without_compares(cluster: FakeCluster) -> None:
    await append(cluster, 0, b"a")

    with pytest.raises(ProducerFenced, match="has other rows than these"):
        await append(cluster, 0, b"another")
    assert cluster.values() == [b"a"]


async def test_a_gap_in_sequences_is_refused_without_a_retry(cluster: FakeCluster) -> None:
    with pytest.raises(OutOfSequence):
        await append(cluster, 1, b"a")

    assert len(cluster.loopback.writes) == 1, "nobody else would send what is missing"


async def test_an_older_epoch_is_fenced(cluster: FakeCluster) -> None:
    await append(cluster, 0, b"new", epoch=3)

    with pytest.raises(ProducerFenced):
        await append(cluster, 0, b"old", epoch=2)
    assert cluster.values() == [b"new"]


@pytest.mark.parametrize("fault", [Fault.NOT_SENT, Fault.LOST, Fault.ANSWER_LOST])
async def test_a_failed_write_is_retried_and_stored_once(cluster: FakeCluster, fault: Fault) -> None:
    cluster.loopback.faults.extend([fault, fault])

    appended = await append(cluster, 0, b"a")

    assert cluster.values() == [b"a"]
    assert appended.duplicate is (fault is Fault.ANSWER_LOST)
    assert appended.position == Position(1, 1, 0)
    assert "s" in cluster.forgotten, "somebody else may have it now"


async def test_an_append_is_retried_until_the_timeout(cluster: FakeCluster) -> None:
    cluster.settings = ClientSettings(retry_backoff_ms=1, retry_timeout_ms=20)
    cluster.loopback.refuse = lambda: NotOwner("elsewhere")

    with pytest.raises(NotOwner):
        await append(cluster, 0, b"a")
    assert len(cluster.loopback.writes) > 1


async def test_appending_to_a_stream_that_was_created_again_is_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(stream_info(stream_id=7))
    made = await appender(cluster)
    cluster.infos["s"] = stream_info(stream_id=8)

    with pytest.raises(UnknownStream, match="created again"):
        await made.append(0, rows(made, b"a"), 0)


async def test_a_new_appender_looks_its_stream_up_again(cluster: FakeCluster) -> None:
    client = Client(cluster)  # type: ignore[arg-type]

    made = await client.appender("s", producer_id=NAME, producer_epoch=1, chunk_bytes_max=1 << 20)

    assert (await made.append(0, rows(made, b"a"), 0)).record_count == 1
    assert cluster.forgotten == ["s"], "what was remembered is not trusted"
    with pytest.raises(UnknownStream):
        await client.appender("t", producer_id=NAME, producer_epoch=1, chunk_bytes_max=1 << 20)


async def test_the_same_rows_are_cut_into_the_same_chunks_each_time(cluster: FakeCluster) -> None:
    values = [bytes([number]) * 500 for number in range(100)]
    counts = []
    for _ in range(2):
        made = await appender(cluster, chunk_bytes_max=8 << 10, compares=True)
        left, sequence = rows(made, *values), 0
        while left.num_rows:
            appended = await made.append(0, left, sequence)
            counts.append(appended.record_count)
            left, sequence = left.slice(appended.record_count), sequence + 1

    assert counts[: len(counts) // 2] == counts[len(counts) // 2 :]
    assert len(counts) >= 14
    assert cluster.values() == values
    assert all(header.chunk_bytes <= 9 << 10 for header, _ in cluster.chunks())


async def test_rows_are_split_by_key_as_a_producer_splits_them(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(stream_info(streamlets=4))
    made = await appender(cluster)
    keys = [None if number % 5 == 0 else [b"key-%d" % number] for number in range(50)]
    batch = made.conform(pa.record_batch({"value": [b"%d" % n for n in range(50)], "keys": keys}))

    parts = dict(made.split(batch, keyless=3))

    for streamlet, some in parts.items():
        for row in some.to_pylist():
            assert streamlet == (3 if row["keys"] is None else streamlet_of(row["keys"][0], 4))
    client = Client(cluster)  # type: ignore[arg-type]
    as_java = await client.appender(
        "s", producer_id=NAME, producer_epoch=1, chunk_bytes_max=4096, partitioner="murmur2_random"
    )
    for each in (as_java, as_java.at_epoch(2)):
        for streamlet, some in each.split(batch, keyless=3):
            for row in some.to_pylist():
                decided = row["keys"] and streamlet_of(row["keys"][0], 4, PARTITIONERS["murmur2_random"])
                assert streamlet == (3 if decided is None else decided)
    with pytest.raises(InvalidArgument, match="one of crc32c, murmur2_random, consistent_random"):
        await client.appender("s", producer_id=NAME, producer_epoch=1, chunk_bytes_max=4096, partitioner="murmur3")  # type: ignore[arg-type]
    assert sum(some.num_rows for some in parts.values()) == 50
    assert dict(made.split(batch.slice(0, 0), keyless=3)) == {}


async def test_rows_of_a_typed_stream_are_split_by_its_key_column(make_cluster: MakeCluster) -> None:
    batch = pa.record_batch({"user": ["a", "b", "a", None], "n": [0, 1, 2, 3]}, schema=TYPED)
    cluster = make_cluster(stream_info(streamlets=4, schema=TYPED, key_column="user"))
    by_key = await appender(cluster)
    cluster.infos["s"] = stream_info(streamlets=4, schema=TYPED)
    without = await appender(cluster)

    found = {n: at for at, some in by_key.split(by_key.conform(batch), keyless=2) for n in some["n"].to_pylist()}
    assert found[0] == found[2]
    assert found[3] == 2
    assert [(at, some.num_rows) for at, some in without.split(without.conform(batch), keyless=2)] == [(2, 4)]


@pytest.mark.parametrize(("error", "streamlet", "size"), [(StreamletOutOfRange, 1, 1), (RecordTooLarge, 0, 1 << 20)])
async def test_rows_too_large_or_for_an_unknown_streamlet_are_refused_unsent(
    cluster: FakeCluster, error: type[KeraError], streamlet: int, size: int
) -> None:
    made = await appender(cluster)
    with pytest.raises(error):
        await made.append(streamlet, rows(made, bytes(size)), 0)

    assert cluster.loopback.writes == []


async def test_rows_with_other_columns_than_the_streams_are_refused(cluster: FakeCluster) -> None:
    made = await appender(cluster)

    with pytest.raises(SchemaMismatch):
        made.conform(pa.record_batch({"n": [1]}))


@pytest.mark.parametrize("identity", [{"producer_id": 1}, {"producer_id": 1 << 64}, {"epoch": 0}, {"epoch": 1 << 32}])
async def test_producer_ids_and_epochs_out_of_range_are_refused(cluster: FakeCluster, identity: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        await appender(cluster, **identity)


async def test_an_append_follows_a_moved_streamlet(cluster: FakeCluster) -> None:
    asked = []

    async def channel(_: object, broker_id: int) -> Any:
        asked.append(broker_id)
        return cluster.loopback

    cluster.channel = channel  # type: ignore[method-assign]
    errors = [NotOwner("moved"), None]

    def refuse() -> KeraError | None:
        cluster.infos["s"].assignments[0].broker_id = BROKER_ID + 1
        return errors.pop(0)

    cluster.loopback.refuse = refuse

    assert not (await append(cluster, 0, b"a")).duplicate
    assert asked == [BROKER_ID, BROKER_ID + 1]
