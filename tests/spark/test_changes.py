"""Queries whose streams change: streams come and go, are truncated, move, or lose a broker.

Each loss is an error, or with ``failOnDataLoss=false`` the query goes on with the remaining records. A move, and the
loss of a broker whose chunks are on backups, change nothing.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from kera.client import Client
from kera.core.base.ids import Position
from kera.local.cluster import LocalCluster, RunningCluster
from tests.spark.support import Kera, Sent, columnar_first, sent, start, wait_until

pytestmark = columnar_first

STRICT = {"startingOffsets": "earliest"}
LENIENT = {**STRICT, "failOnDataLoss": "false"}


def ends(kera: Kera, stream: str) -> dict[int, list[Position]]:
    """The ends of a stream's entries."""

    async def ask(client: Client) -> dict[int, list[Position]]:
        bounds = await client.bounds(stream)
        return {streamlet: [entry.end for entry in entries] for streamlet, entries in bounds.items()}

    return kera.run(ask)


@contextlib.contextmanager
def running(kera: Kera, checkpoint: Path, **options: str) -> Iterator[tuple[StreamingQuery, dict[int, list[Sent]]]]:
    """Run a query; yield it and the records of each micro-batch so far."""
    found: dict[int, list[Sent]] = {}
    query = start(kera.stream(**options), checkpoint, found)
    try:
        yield query, found
    finally:
        query.stop()


def wait_for(query: StreamingQuery, found: dict[int, list[Sent]], records: Sequence[Sent]) -> None:
    """Wait for the records; the query must have found each of them once."""
    wait_until(lambda: query.exception() or sum(map(len, found.values())) >= len(records), "the records")
    assert query.exception() is None
    query.processAllAvailable()  # a micro-batch that is not committed would run again after a stop
    assert sorted(record for batch in found.values() for record in batch) == sorted(records)


# -- new streams ---------------------------------------------------------------------------------------------------


def test_a_stream_created_while_a_query_runs_is_read_from_its_first_record(
    kera: Kera, stream: str, tmp_path: Path
) -> None:
    kera.create(stream)
    kera.send(stream, range(50))
    with running(kera, tmp_path / "checkpoint", subscribePattern=f"{stream}.*") as (query, found):  # from latest
        wait_until(lambda: query.exception() or 0 in found, "the first micro-batch")
        produced = kera.send(stream, range(50, 60))
        wait_for(query, found, produced)
        kera.create(f"{stream}-new")
        produced += kera.send(f"{stream}-new", range(20))
        wait_for(query, found, produced)

    both = kera.send(stream, range(60, 70)) + kera.send(f"{stream}-new", range(20, 30))
    again, _ = kera.read_new(None, tmp_path / "checkpoint", subscribePattern=f"{stream}.*")
    assert sorted(again) == sorted(both)


# -- deletion and truncation ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stream_deleted_while_a_query_runs_ends_it_or_is_left_out(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    other = f"{stream}-other"
    kera.create(other)
    produced = kera.send(stream, range(10)) + kera.send(other, range(10))
    named = {"subscribe": f"{stream},{other}"}
    with (
        running(kera, tmp_path / "strict", **named, **STRICT) as (strict, found_by_strict),
        running(kera, tmp_path / "lenient", **named, **LENIENT) as (lenient, found_by_lenient),
    ):
        wait_for(strict, found_by_strict, produced)
        wait_for(lenient, found_by_lenient, produced)

        kera.delete(other)
        wait_until(strict.exception, "the error")
        produced += kera.send(stream, range(10, 20))
        wait_for(lenient, found_by_lenient, produced)

    assert other in str(strict.exception())
    more = kera.send(stream, range(20, 30))
    found, _ = kera.read_new(None, tmp_path / "lenient", **named, **LENIENT)
    assert sorted(found) == sorted(more)


@pytest.mark.slow
def test_a_recreated_stream_is_read_anew_when_losses_are_tolerated(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream, streamlets=2)
    kera.send(stream, range(10))
    kera.read_new(stream, tmp_path / "checkpoint", **STRICT)
    kera.delete(stream)
    kera.create(stream)
    produced = kera.send(stream, range(30))

    with pytest.raises(StreamingQueryException, match=r"deleted and created again.*new checkpointLocation"):
        kera.read_new(stream, tmp_path / "checkpoint", **STRICT)
    found, _ = kera.read_new(stream, tmp_path / "checkpoint", **LENIENT)
    assert sorted(found) == sorted(produced)


@pytest.mark.slow
def test_only_a_truncation_of_unread_records_is_a_loss(kera: Kera, stream: str, tmp_path: Path) -> None:
    kera.create(stream)
    kera.send(stream, range(40), flush_every=10)
    kera.read_new(stream, tmp_path / "checkpoint", **STRICT)
    kera.run(lambda client: client.admin.truncate_stream(stream, "latest"))
    following = kera.send(stream, range(40, 50))
    found, _ = kera.read_new(stream, tmp_path / "checkpoint", **STRICT)
    assert found == following

    kera.send(stream, range(50, 100), flush_every=10)
    middle = ends(kera, stream)
    rest = kera.send(stream, range(100, 140), flush_every=10)
    kera.run(lambda client: client.admin.truncate_stream(stream, middle))

    with pytest.raises(StreamingQueryException, match=stream):
        kera.read_new(stream, tmp_path / "checkpoint", **STRICT)
    found, _ = kera.read_new(stream, tmp_path / "checkpoint", **LENIENT)
    assert found == rest
    found, _ = kera.read_new(stream, tmp_path / "checkpoint", **STRICT)
    assert found == []


def test_a_batch_from_a_removed_position_fails_or_begins_behind_it(kera: Kera, stream: str) -> None:
    kera.create(stream)
    kera.send(stream, range(40), flush_every=10)
    middle = ends(kera, stream)
    rest = kera.send(stream, range(40, 60))
    kera.run(lambda client: client.admin.truncate_stream(stream, middle))
    gone = {"startingOffsets": f'{{"{stream}": {{"0": [[1, 1, 0]]}}}}'}

    with pytest.raises(Exception, match=stream):
        kera.read(stream, **gone).collect()
    assert sent(kera.read(stream, failOnDataLoss="false", **gone)) == rest


# -- moves ---------------------------------------------------------------------------------------------------------


def test_a_query_follows_streamlets_that_move(kera: Kera, cluster: RunningCluster, stream: str, tmp_path: Path) -> None:
    kera.create(stream, streamlets=2)
    ids = sorted(int(ready["broker_id"]) for name, ready in cluster.ready.items() if name.startswith("broker"))

    def move() -> None:
        async def exchange(client: Client) -> None:
            for streamlet, assignment in (await client.admin.describe_stream(stream)).assignments.items():
                await client.admin.move_streamlet(
                    stream, streamlet, next(each for each in ids if each != assignment.broker_id)
                )

        kera.run(exchange)

    produced = kera.send(stream, range(100), flush_every=20)
    with running(kera, tmp_path / "running", subscribe=stream, **STRICT) as (query, found):
        wait_for(query, found, produced)
        for first in (100, 200):
            move()
            produced += kera.send(stream, range(first, first + 100), flush_every=20)
            wait_for(query, found, produced)

    limited, _ = kera.read_new(stream, tmp_path / "limited", **STRICT, maxOffsetsPerTrigger="60")
    assert sorted(limited) == sorted(produced)
    assert sorted(sent(kera.read(stream))) == sorted(produced)
    planned = kera.read(stream, metadata="partitions").collect()
    assert {row.broker for row in planned} == set(ids)
    assert len(planned) > 2  # records from before a move stay at their broker


# -- loss of a broker ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def replicated() -> Iterator[RunningCluster]:
    """Two brokers and a backup; a broker is dead after 5 s of silence, as Spark leaves brokers little CPU time."""
    settings: dict[str, Any] = {"heartbeat_interval_ms": 250, "heartbeats_missed_max": 20}
    with LocalCluster.running(
        brokers=2,
        backups=1,
        arena_bytes=32 << 20,
        backup_memory_bytes=32 << 20,
        segment_bytes=1 << 20,
        coordinator_settings=settings,
    ) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_query_survives_the_loss_of_a_broker_with_replicas(
    spark: SparkSession, replicated: RunningCluster, engine: str, stream: str, tmp_path: Path
) -> None:
    kera = Kera(spark, replicated.bootstrap, engine)
    kera.create(stream, streamlets=2, replication=1)
    produced = kera.send(stream, range(200), flush_every=20)
    first, _ = kera.read_new(stream, tmp_path / "later", **STRICT, maxOffsetsPerTrigger="100")
    assert sorted(first) == sorted(produced)
    with running(kera, tmp_path / "running", subscribe=stream, **STRICT) as (query, found):
        wait_for(query, found, produced)
        replicated.kill("broker-1")
        more = kera.send(stream, range(200, 300), flush_every=20)
        wait_for(query, found, produced + more)

    later, _ = kera.read_new(stream, tmp_path / "later", **STRICT)
    assert sorted(later) == sorted(more)
    assert sorted(sent(kera.read(stream))) == sorted(produced + more)
    replicated.restart("broker-1")


@pytest.mark.slow
def test_records_lost_with_a_broker_end_a_query_or_are_left_out(
    spark: SparkSession, replicated: RunningCluster, engine: str, stream: str, tmp_path: Path
) -> None:
    kera = Kera(spark, replicated.bootstrap, engine)
    kera.create(stream, streamlets=2)
    produced = kera.send(stream, range(100), flush_every=20)
    found, _ = kera.read_new(stream, tmp_path / "checkpoint", **STRICT)
    assert sorted(found) == sorted(produced)
    unread = kera.send(stream, range(100, 200), flush_every=20)
    lost = {
        streamlet
        for streamlet, assignment in kera.run(lambda c: c.admin.describe_stream(stream)).assignments.items()
        if assignment.broker_id == replicated.ready["broker-1"]["broker_id"]
    }
    assert len(lost) == 1
    replicated.kill("broker-1")
    replicated.restart("broker-1")  # it comes back without its chunks

    with pytest.raises(StreamingQueryException, match="are gone before they were read"):
        kera.read_new(stream, tmp_path / "checkpoint", **STRICT)
    found, _ = kera.read_new(stream, tmp_path / "checkpoint", **LENIENT)
    assert sorted(found) == sorted(record for record in unread if record.streamlet not in lost)
    more = kera.send(stream, range(200, 250), flush_every=20)
    found, _ = kera.read_new(stream, tmp_path / "checkpoint", **STRICT)
    assert sorted(found) == sorted(more)
