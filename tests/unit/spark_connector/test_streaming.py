"""The streaming reader under Spark's calls, in Spark's order.

Spark's offsets travel as JSON and its readers as pickles; the helpers here do the same to them.
"""

import json
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows, ReadMinRows
from pyspark.sql.types import LongType, StructType

from kera.core.base.ids import EntryId
from kera.core.errors import DataLost, InvalidArgument, SchemaMismatch, Unavailable, UnknownStream
from kera.spark_connector.columns import columns_of
from kera.spark_connector.planning.offsets import StreamRecreated
from kera.spark_connector.reading.cursor import SIGN_OF_LIFE_S
from kera.spark_connector.reading.partition import KeraPartition
from kera.spark_connector.reading.streaming import KeraStreamReader
from kera.spark_connector.source import KeraDataSource
from tests.unit.spark_connector.fakes import SCHEMA, FakeClient, FakeStream, at

BOOTSTRAP = {"kera.bootstrap.servers": "h:1"}
NEEDED = {**BOOTSTRAP, "subscribe": "numbers"}
COLUMNS = columns_of(SCHEMA, typed=True)
ALL = ReadAllAvailable()

Launch = Callable[..., KeraStreamReader]


@pytest.fixture
def launch(cluster: FakeClient) -> Iterator[Launch]:  # noqa: ARG001  # it is what the readers find
    """Make a reader as a launch of the query does."""
    readers = []

    def launch(
        columns: StructType = COLUMNS, now_s: Callable[[], float] | None = None, **options: str
    ) -> KeraStreamReader:
        source: KeraDataSource = pickle.loads(
            pickle.dumps(KeraDataSource({**(BOOTSTRAP if "subscribePattern" in options else NEEDED), **options}))
        )
        reader = (
            source.streamReader(columns) if now_s is None else KeraStreamReader(source.options, columns, now_s=now_s)
        )
        assert isinstance(reader, KeraStreamReader)
        readers.append(reader)
        return reader

    yield launch
    for reader in readers:
        reader.stop()


def stored(offset: dict[str, Any]) -> dict[str, Any]:
    """The offset as it comes back from the checkpoint."""
    document: dict[str, Any] = json.loads(json.dumps(offset))
    return document


def read(reader: KeraStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[int, int]]:
    """Streamlet and number of each record between the two, read in another process."""
    in_worker = pickle.loads(pickle.dumps(KeraStreamReader(NEEDED, COLUMNS)))
    found = []
    for partition in reader.partitions(stored(start), stored(end)):
        assert isinstance(partition, KeraPartition)
        for batch in in_worker.read(pickle.loads(pickle.dumps(partition))):
            found += [(partition.piece.entry.streamlet_id, number) for number in batch["n"].to_pylist()]
    return found


def test_a_reader_does_not_connect_before_its_first_call(launch: Launch, cluster: FakeClient) -> None:
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


def test_the_offset_is_unchanged_without_new_records(launch: Launch, cluster: FakeClient) -> None:
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


def test_the_reported_latest_offset_ignores_the_limit(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4, 4]
    reader = launch(startingOffsets="earliest")
    assert reader.reportLatestOffset() is None

    reader.latestOffset(reader.initialOffset(), ReadMaxRows(1))

    reported = reader.reportLatestOffset()
    assert reported is not None
    assert reported["streams"]["numbers"]["streamlets"]["0"][0][3] == 8


def test_available_now_stops_at_the_records_present_at_its_start(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4]
    reader = launch(startingOffsets="earliest")
    reader.prepareForTriggerAvailableNow()
    cluster.chunks[0][0] += [4]

    end = stored(reader.latestOffset(reader.initialOffset(), ALL))

    assert len(read(reader, reader.initialOffset(), end)) == 4
    assert reader.latestOffset(end, ALL) == end


def test_a_checkpoint_of_a_deleted_stream_is_refused_in_each_call(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4]
    reader = launch(startingOffsets="earliest")
    start = reader.initialOffset()
    end = reader.latestOffset(start, ALL)
    cluster.stream_id = 9

    with pytest.raises(StreamRecreated):
        reader.latestOffset(end, ALL)
    with pytest.raises(StreamRecreated):
        launch().partitions(start, end)


def test_wrong_options_and_columns_fail_in_the_first_call(launch: Launch) -> None:
    reader = launch(endingOffsets="latest")
    with pytest.raises(InvalidArgument, match="endingOffsets"):
        reader.getDefaultReadLimit()

    reader = launch(StructType().add("m", LongType()))
    with pytest.raises(SchemaMismatch, match="no column 'm'"):
        reader.initialOffset()


# -- limits ------------------------------------------------------------------------------------------------------


def test_spark_gets_one_read_limit_but_all_of_them_hold(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4, 4, 4, 4]
    assert launch(maxBytesPerTrigger="128").getDefaultReadLimit() == ReadMaxBytes(128)
    assert launch(minOffsetsPerTrigger="9").getDefaultReadLimit() == ReadMinRows(9)
    reader = launch(startingOffsets="earliest", maxOffsetsPerTrigger="12", maxBytesPerTrigger="128")

    end = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())

    assert len(read(reader, reader.initialOffset(), end)) == 8  # two chunks of 64 bytes


def test_a_micro_batch_waits_for_enough_records_or_long_enough(launch: Launch, cluster: FakeClient) -> None:
    now_s = 1000.0
    reader = launch(now_s=lambda: now_s, startingOffsets="earliest", minOffsetsPerTrigger="10", maxTriggerDelay="5m")
    limit = reader.getDefaultReadLimit()
    start = stored(reader.latestOffset(reader.initialOffset(), limit))

    cluster.chunks[0][0] += [9]
    assert reader.latestOffset(start, limit) == start
    now_s += 301
    late = stored(reader.latestOffset(start, limit))
    assert len(read(reader, start, late)) == 9
    cluster.chunks[0][0] += [9]
    assert reader.latestOffset(late, limit) == late
    cluster.chunks[1][0] += [1]
    assert len(read(reader, late, reader.latestOffset(late, limit))) == 10


def test_available_now_does_not_wait_for_enough_records(launch: Launch, cluster: FakeClient) -> None:
    reader = launch(startingOffsets="earliest", minOffsetsPerTrigger="10")
    reader.prepareForTriggerAvailableNow()
    limit = reader.getDefaultReadLimit()
    start = stored(reader.latestOffset(reader.initialOffset(), limit))
    cluster.chunks[0][0] += [9]
    reader.prepareForTriggerAvailableNow()

    assert len(read(reader, start, reader.latestOffset(start, limit))) == 9


# -- new and removed streams ---------------------------------------------------------------------------------------


def test_a_new_matching_stream_is_read_from_its_first_record_even_after_a_restart(
    launch: Launch, cluster: FakeClient
) -> None:
    cluster.chunks[0][0] += [1]
    reader = launch(subscribePattern="numbers.*")  # from latest
    first = stored(reader.latestOffset(reader.initialOffset(), ALL))
    cluster.streams["numbers-2"] = FakeStream(8, {0: [[2]]})
    second = stored(reader.latestOffset(first, ALL))
    cluster.streams["numbers-2"].chunks[0][0] += [2]

    assert read(reader, first, second) == [(0, 0), (0, 1)]
    again = launch(subscribePattern="numbers.*")
    assert read(again, first, second) == [(0, 0), (0, 1)]
    assert read(again, second, again.latestOffset(second, ALL)) == [(0, 2), (0, 3)]


def test_available_now_leaves_out_streams_that_come_later(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [1]
    reader = launch(subscribePattern="numbers.*", startingOffsets="earliest")
    reader.prepareForTriggerAvailableNow()
    cluster.streams["numbers-2"] = FakeStream(8, {0: [[2]]})

    end = stored(reader.latestOffset(reader.initialOffset(), ALL))
    end = stored(reader.latestOffset(end, ALL))

    assert reader.latestOffset(end, ALL) == end
    assert read(reader, reader.initialOffset(), end) == [(0, 0)]


def test_a_loss_ends_a_query_or_is_skipped_with_one_warning(
    launch: Launch, cluster: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.chunks[0][0] += [2, 2, 2]
    strict, lenient = launch(startingOffsets="earliest"), launch(startingOffsets="earliest", failOnDataLoss="false")
    start = strict.initialOffset()
    assert lenient.initialOffset()["streams"] == start["streams"]
    first = strict.latestOffset(start, ReadMaxRows(2))
    cluster.streams["numbers"].removed[0] = 2

    with pytest.raises(DataLost):
        strict.latestOffset(first, ALL)
    second = stored(lenient.latestOffset(first, ALL))
    assert lenient.latestOffset(first, ALL) == second
    assert read(lenient, first, second) == [(0, 4), (0, 5)]
    assert caplog.text.count("failOnDataLoss=false: 2 records of stream 'numbers'") == 1

    del cluster.streams["numbers"]
    with pytest.raises(UnknownStream):
        strict.latestOffset(second, ALL)
    gone = lenient.latestOffset(second, ALL)
    assert lenient.partitions(second, stored(gone)) == []


def test_a_recreated_stream_is_read_anew_when_losses_are_tolerated(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4]
    reader = launch(startingOffsets="earliest", failOnDataLoss="false")
    first = stored(reader.latestOffset(reader.initialOffset(), ALL))
    cluster.streams["numbers"] = FakeStream(9, {0: [[3]], 1: [[]]})

    second = stored(reader.latestOffset(first, ALL))

    assert read(reader, first, second) == [(0, 0), (0, 1), (0, 2)]


# -- the named cursor ----------------------------------------------------------------------------------------------


def test_finished_micro_batches_are_committed_under_a_stable_name(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4]
    reader = launch(startingOffsets="earliest", groupIdPrefix="etl")
    end = stored(reader.latestOffset(reader.initialOffset(), ALL))
    assert cluster.committed == {}

    reader.commit(end)
    reader.stop()  # which waits for it

    ((group, stream), positions), *_ = cluster.committed.items()
    assert (group[:4], len(group), stream) == ("etl-", 12, "numbers")
    assert positions == {EntryId(7, 0, 0): at(1), EntryId(7, 1, 0): at(0)}
    again = launch(startingOffsets="earliest", groupIdPrefix="another")
    cluster.chunks[1][0] += [1]
    again.commit(stored(again.latestOffset(end, ALL)))
    again.stop()
    assert {name for name, _ in cluster.committed} == {group}


def test_a_given_group_id_is_used_unchanged(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4]
    reader = launch(startingOffsets="earliest", **{"kera.group.id": "etl"})

    reader.commit(stored(reader.latestOffset(reader.initialOffset(), ALL)))
    reader.stop()

    assert set(cluster.committed) == {("etl", "numbers")}
    assert cluster.unnamed == {"etl": False}


def test_the_cursor_of_a_query_without_a_group_id_is_marked_as_unnamed(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4]
    reader = launch(startingOffsets="earliest", groupIdPrefix="etl")

    reader.commit(stored(reader.latestOffset(reader.initialOffset(), ALL)))
    reader.stop()

    assert list(cluster.unnamed.values()) == [True]


def test_an_idle_query_commits_its_cursor_again_as_a_sign_of_life(launch: Launch, cluster: FakeClient) -> None:
    now_s = 1000.0
    cluster.chunks[0][0] += [4]
    reader = launch(now_s=lambda: now_s, startingOffsets="earliest")
    end = stored(reader.latestOffset(reader.initialOffset(), ALL))
    reader.commit(end)
    for _ in range(3):
        reader.latestOffset(end, ALL)
    assert cluster.commits == 1
    now_s += SIGN_OF_LIFE_S
    for _ in range(3):
        reader.latestOffset(end, ALL)
    reader.stop()
    assert cluster.commits == 2


def test_the_last_micro_batch_is_committed_though_spark_never_does_it(launch: Launch, cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4]
    reader = launch(startingOffsets="earliest", **{"kera.group.id": "etl"})
    reader.prepareForTriggerAvailableNow()
    end = stored(reader.latestOffset(reader.initialOffset(), ALL))

    for _ in range(3):
        assert reader.latestOffset(end, ALL) == end

    assert cluster.committed["etl", "numbers"][EntryId(7, 0, 0)] == at(1)
    assert cluster.commits == 1


def test_a_cursor_that_cannot_be_committed_is_one_warning_and_is_retried(
    launch: Launch, cluster: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 1000.0
    cluster.chunks[0][0] += [4]
    cluster.commit_error = Unavailable("nobody is there")
    reader = launch(now_s=lambda: now_s, startingOffsets="earliest", **{"kera.group.id": "etl"})
    end = stored(reader.latestOffset(reader.initialOffset(), ALL))

    reader.commit(end)
    for _ in range(3):
        assert reader.latestOffset(end, ALL) == end

    assert [record.getMessage() for record in caplog.records] == [
        "cursor 'etl' of stream 'numbers' was not stored, the query goes on: nobody is there"
    ]
    cluster.commit_error = None
    now_s += 11
    reader.latestOffset(end, ALL)
    assert cluster.committed["etl", "numbers"][EntryId(7, 0, 0)] == at(1)


def test_real_time_mode_refuses_epochs(launch: Launch) -> None:
    reader = launch(epoch="1s")

    with pytest.raises(InvalidArgument, match="option epoch: in real-time mode records are given out as they come"):
        reader.real_time_pieces({})
