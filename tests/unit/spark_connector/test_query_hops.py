"""A query's reports about its micro-batches of streams with a latency constraint."""

from collections.abc import Iterator

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from kera.core.base.ids import EntryId
from kera.spark_connector.columns import columns_of
from kera.spark_connector.reading.latency.created import ENTRIES_MAX
from kera.spark_connector.reading.streaming import KeraStreamReader
from tests.unit.spark_connector.fakes import SCHEMA, FakeClient

OPTIONS = {
    "kera.bootstrap.servers": "h:1", "subscribe": "numbers", "startingOffsets": "earliest", "kera.group.id": "app",
}  # fmt: skip


@pytest.fixture
def reader(cluster: FakeClient) -> Iterator[KeraStreamReader]:  # noqa: ARG001  # it is what the reader finds
    made = KeraStreamReader(OPTIONS, columns_of(SCHEMA, typed=True))
    yield made
    made.stop()


def micro_batch(reader: KeraStreamReader, start: dict[str, object]) -> dict[str, object]:
    end = reader.latestOffset(start, ReadAllAvailable())
    reader.pieces(start, end)
    return end


def finish(reader: KeraStreamReader) -> None:
    """Wait until the work begun before has ended."""

    async def nothing(_: object) -> None:
        pass

    reader.portal.call(nothing)


def test_without_a_latency_constraint_no_record_is_read(reader: KeraStreamReader, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [3]
    end = micro_batch(reader, reader.initialOffset())
    reader.commit(end)
    finish(reader)

    assert cluster.latency.groups == ["app"]
    assert cluster.latency.told == [["numbers"]]
    assert [taken for taken, _ in cluster.latency.done_batches] == [[]]
    assert not cluster.shared_memory, "nothing was looked at"


def test_each_finished_micro_batch_is_reported_once_with_its_entries(
    reader: KeraStreamReader, cluster: FakeClient
) -> None:
    cluster.latency.watched, cluster.created_us = {cluster.stream_id}, 77
    cluster.chunks[0][0] += [3]
    cluster.chunks[1][0] += [3]
    end = micro_batch(reader, reader.initialOffset())
    finish(reader)
    assert cluster.latency.done_batches == []

    reader.lag(end)
    assert reader.latestOffset(end, ReadAllAvailable()) == end
    reader.commit(end)
    finish(reader)

    ((taken, took_s),) = cluster.latency.done_batches
    assert sorted(taken) == [("numbers", EntryId(cluster.stream_id, streamlet, 0), 77) for streamlet in (0, 1)]
    assert took_s >= 0


def test_a_report_covers_only_a_few_entries(reader: KeraStreamReader, cluster: FakeClient) -> None:
    cluster.latency.watched = {cluster.stream_id}
    cluster.chunks = {streamlet: [[1]] for streamlet in range(3 * ENTRIES_MAX)}
    reader.commit(micro_batch(reader, reader.initialOffset()))
    finish(reader)

    ((taken, _),) = cluster.latency.done_batches
    assert len(taken) == ENTRIES_MAX
