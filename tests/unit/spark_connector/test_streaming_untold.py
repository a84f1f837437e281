"""The streaming reader for versions of Spark that do not pass the start of a micro-batch."""

import pytest

from kera.core.errors import DataLost, InvalidArgument, Unavailable, UnknownStream
from kera.spark_connector.planning.offsets import Offsets
from kera.spark_connector.reading.streaming_untold import UntoldStreamReader
from tests.unit.spark_connector.fakes import FakeClient, FakeStream
from tests.unit.spark_connector.test_streaming import COLUMNS, NEEDED, read, stored


@pytest.fixture
def reader(cluster: FakeClient) -> UntoldStreamReader:  # noqa: ARG001  # it is what the readers find
    return UntoldStreamReader({**NEEDED, "startingOffsets": "earliest"}, COLUMNS)


def restarted(**options: str) -> UntoldStreamReader:
    return UntoldStreamReader({**NEEDED, **options}, COLUMNS)


def test_micro_batches_follow_each_other(reader: UntoldStreamReader, cluster: FakeClient) -> None:
    start, found = stored(reader.initialOffset()), []
    for streamlet in (0, 1, 1):
        cluster.chunks[streamlet][0] += [3]
        end = stored(reader.latestOffset())
        assert stored(reader.latestOffset()) == end, "nothing is new"
        found += read(reader, start, end)
        start = end
    assert found == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5)]


def test_a_restarted_query_goes_on_with_the_same_cursor(reader: UntoldStreamReader, cluster: FakeClient) -> None:
    start = stored(reader.initialOffset())
    cluster.chunks[0][0] += [3]
    end = stored(reader.latestOffset())
    assert len(read(reader, start, end)) == 3
    cluster.chunks[0][0] += [2]

    again = restarted()
    second = stored(again.latestOffset())
    assert read(again, end, second) == [(0, 3), (0, 4)]
    cluster.chunks[0][0] += [1]
    third = stored(again.latestOffset())
    assert read(again, second, third) == [(0, 5)]
    assert Offsets.from_json(third).group == Offsets.from_json(end).group != ""


def test_a_restarted_query_reports_losses(cluster: FakeClient) -> None:
    cluster.streams["others"] = FakeStream(8, {0: [[1]]})
    both = {"subscribe": "numbers,others", "startingOffsets": "earliest"}
    first = UntoldStreamReader({**NEEDED, **both}, COLUMNS)
    start = stored(first.initialOffset())
    cluster.chunks[0][0] += [3]
    end = stored(first.latestOffset())
    first.partitions(start, end)
    cluster.chunks[0][0] += [2, 2]
    cluster.streams["numbers"].removed[0] = 2

    again = UntoldStreamReader({**NEEDED, **both}, COLUMNS)
    with pytest.raises(DataLost, match="2 records of stream 'numbers'"):
        again.partitions(end, stored(again.latestOffset()))
    del cluster.streams["others"]
    cluster.streams["numbers"].removed[0] = 0
    again = restarted()
    with pytest.raises(UnknownStream, match="'others'"):
        again.partitions(end, stored(again.latestOffset()))


def test_a_restarted_query_refuses_an_end_that_has_gone_back(reader: UntoldStreamReader, cluster: FakeClient) -> None:
    start = stored(reader.initialOffset())
    cluster.chunks[0][0] += [3, 3]
    end = stored(reader.latestOffset())
    reader.partitions(start, end)
    cluster.chunks[0][0].pop()

    again = restarted()
    with pytest.raises(Unavailable, match="does not have all of it again"):
        again.partitions(end, stored(again.latestOffset()))


def test_a_query_from_latest_killed_in_its_first_micro_batch_skips_nothing(cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [5]
    first = restarted()
    start = stored(first.initialOffset())
    cluster.chunks[0][0] += [3]
    end = stored(first.latestOffset())
    cluster.chunks[0][0] += [2]

    second = restarted()
    assert second.initialOffset() != start
    assert read(second, second.initialOffset(), end) == [(0, 5), (0, 6), (0, 7)]


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    "option", ["maxOffsetsPerTrigger", "maxBytesPerTrigger", "minOffsetsPerTrigger", "latencyTarget"]
)
def test_limits_are_refused(option: str) -> None:
    with pytest.raises(InvalidArgument, match="cannot bound the micro-batches"):
        restarted(**{option: "10s" if option == "latencyTarget" else "10"}).latestOffset()


@pytest.mark.usefixtures("cluster")
def test_epochs_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"option epoch: this is Spark .* use Spark 4\.2 or newer"):
        restarted(epoch="10s").latestOffset()
