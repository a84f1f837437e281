"""The streaming reader under the calls that Spark makes, in the order in which it makes them.

Spark's offsets travel as JSON and its readers as pickles; the helpers here do the same to them.
"""

import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import LongType, StructType

from kera.core.errors import DataLost, InvalidArgument, SchemaMismatch
from kera.spark_connector.columns import columns_of
from kera.spark_connector.offsets import StreamRecreated
from kera.spark_connector.planning import KeraPartition
from kera.spark_connector.source import KeraDataSource
from kera.spark_connector.streaming import KeraStreamReader
from tests.unit.spark_connector.fakes import SCHEMA, FakeClient

NEEDED = {"kera.bootstrap.servers": "h:1", "subscribe": "numbers"}
COLUMNS = columns_of(SCHEMA, typed=True)
ALL = ReadAllAvailable()

Launch = Callable[..., KeraStreamReader]


@pytest.fixture
def launch(cluster: FakeClient) -> Iterator[Launch]:  # noqa: ARG001  # it is what the readers find
    """Makes a reader as a launch of the query does."""
    readers = []

    def launch(columns: StructType = COLUMNS, **options: str) -> KeraStreamReader:
        source: KeraDataSource = pickle.loads(pickle.dumps(KeraDataSource({**NEEDED, **options})))
        reader = source.streamReader(columns)
        assert isinstance(reader, KeraStreamReader)
        readers.append(reader)
        return reader

    yield launch
    for reader in readers:
        reader.stop()


def stored(offset: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from the checkpoint."""
    document: dict[str, Any] = json.loads(json.dumps(offset))
    return document


def read(reader: KeraStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[int, int]]:
    """Streamlet and number of each record between the two, read in another process."""
    in_worker = pickle.loads(pickle.dumps(KeraStreamReader(NEEDED, COLUMNS)))
    found = []
    for partition in reader.partitions(stored(start), stored(end)):
        assert isinstance(partition, KeraPartition)
        for batch in in_worker.read(pickle.loads(pickle.dumps(partition))):
            found += [(partition.entry.streamlet_id, number) for number in batch["n"].to_pylist()]
    return found


def test_a_reader_connects_to_nothing_until_it_is_asked(launch: Launch, cluster: FakeClient) -> None:
    reader = launch()

    pickle.loads(pickle.dumps(reader)).stop()
    assert cluster.connected == 0


def test_micro_batches_follow_each_other(launch: Launch, cluster: FakeClient) -> None:
    reader = launch(startingOffsets="earliest")
    start = reader.initialOffset()
    found = []
    for streamlet in (0, 1, 1):
        cluster.chunks[streamlet][0] += [3]
        end = stored(reader.latestOffset(start, ALL))
        found += read(reader, start, end)
        start = end

    assert found == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5)]


def test_nothing_new_gives_the_same_text(launch: Launch, cluster: FakeClient) -> None:
    reader = launch(startingOffsets="earliest")
    cluster.chunks[0][0] += [3]
    first = stored(reader.latestOffset(reader.initialOffset(), ALL))

    assert json.dumps(reader.latestOffset(first, ALL)) == json.dumps(first)
    assert reader.partitions(first, first) == []


def test_a_query_from_latest_killed_in_its_first_micro_batch_skips_nothing(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [5]
    first = launch()
    start = first.initialOffset()
    cluster.chunks[0][0] += [3]
    end = stored(first.latestOffset(start, ALL))
    first.stop()
    cluster.chunks[0][0] += [2]

    second = launch()  # "latest" is further on by now
    assert second.initialOffset() != start

    assert read(second, second.initialOffset(), end) == [(0, 5), (0, 6), (0, 7)]
    following = stored(second.latestOffset(end, ALL))
    assert read(second, end, following) == [(0, 8), (0, 9)]


def test_the_start_of_a_query_does_not_move_while_it_runs(launch: Launch, cluster: FakeClient) -> None:
    reader = launch()
    start = reader.initialOffset()
    cluster.chunks[0][0] += [3]

    assert reader.initialOffset() == start


def test_a_limit_is_met_at_a_chunk_boundary(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4, 4, 4, 4]
    reader = launch(startingOffsets="earliest", maxOffsetsPerTrigger="9")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(9)

    first = reader.latestOffset(reader.initialOffset(), limit)
    second = reader.latestOffset(stored(first), limit)

    assert len(read(reader, reader.initialOffset(), first)) == 8
    assert len(read(reader, first, second)) == 8
    assert cluster.read_ranges_open == 0


def test_a_limit_below_a_chunk_still_makes_progress(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4, 4]
    reader = launch(startingOffsets="earliest")

    end = reader.latestOffset(reader.initialOffset(), ReadMaxRows(1))

    assert len(read(reader, reader.initialOffset(), end)) == 4


def test_spark_may_ask_for_everything_in_spite_of_the_option(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4, 4]
    reader = launch(startingOffsets="earliest", maxOffsetsPerTrigger="1")

    assert len(read(reader, reader.initialOffset(), reader.latestOffset(reader.initialOffset(), ALL))) == 8


def test_the_reported_latest_offset_is_not_limited(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4, 4]
    reader = launch(startingOffsets="earliest")
    assert reader.reportLatestOffset() is None

    reader.latestOffset(reader.initialOffset(), ReadMaxRows(1))

    reported = reader.reportLatestOffset()
    assert reported is not None
    assert reported["streamlets"]["0"][0][3] == 8


def test_available_now_stops_at_what_was_there(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4]
    reader = launch(startingOffsets="earliest")
    reader.prepareForTriggerAvailableNow()
    cluster.chunks[0][0] += [4]

    end = stored(reader.latestOffset(reader.initialOffset(), ALL))

    assert len(read(reader, reader.initialOffset(), end)) == 4
    assert reader.latestOffset(end, ALL) == end


def test_a_checkpoint_of_an_earlier_incarnation_is_refused_wherever_it_appears(
    launch: Launch, cluster: FakeClient
) -> None:
    cluster.chunks[0][0] += [4]
    reader = launch(startingOffsets="earliest")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    cluster.stream_id = 9

    with pytest.raises(StreamRecreated):
        reader.latestOffset(end, ALL)
    with pytest.raises(StreamRecreated):
        launch().partitions(start, end)


def test_a_stream_that_changes_under_a_task_is_not_read(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4]
    reader = launch(startingOffsets="earliest")
    (partition,) = reader.partitions(reader.initialOffset(), reader.latestOffset(reader.initialOffset(), ALL))
    cluster.stream_id = 9

    with pytest.raises(StreamRecreated, match="while it was read"):
        list(reader.read(partition))


def test_a_task_that_gets_fewer_records_than_planned_fails(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4]
    reader = launch(startingOffsets="earliest")
    (partition,) = reader.partitions(reader.initialOffset(), reader.latestOffset(reader.initialOffset(), ALL))
    cluster.chunks[0][0][0] = 3

    with pytest.raises(DataLost, match="gave 3 of the 4 records"):
        list(reader.read(partition))


def test_what_is_wrong_shows_at_the_first_call_and_not_when_the_reader_is_made(launch: Launch) -> None:
    reader = launch(endingOffsets="latest")
    with pytest.raises(InvalidArgument, match="endingOffsets"):
        reader.getDefaultReadLimit()

    reader = launch(StructType().add("m", LongType()))
    with pytest.raises(SchemaMismatch, match="no column 'm'"):
        reader.initialOffset()
