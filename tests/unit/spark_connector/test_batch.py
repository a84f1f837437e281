"""The batch reader plans once, and reads exactly the planned records."""

import json
import pickle

import pytest
from pyspark.sql.datasource import InputPartition

from kera.core.errors import DataLost, InvalidArgument, SchemaMismatch, UnknownStream
from kera.spark_connector.columns import HEADERS_COLUMN, RECORD_COLUMNS, columns_of
from kera.spark_connector.reading.batch import KeraBatchReader
from kera.spark_connector.reading.partition import KeraPartition
from kera.spark_connector.source import KeraDataSource
from tests.unit.spark_connector.fakes import CHUNK_BYTES, SCHEMA, FakeClient, FakeStream, at

BOOTSTRAP = {"kera.bootstrap.servers": "h:1"}
NEEDED = {**BOOTSTRAP, "path": "numbers"}
COLUMNS = columns_of(SCHEMA, typed=True)


def reader(**options: str) -> KeraBatchReader:
    named = {"subscribe", "subscribePattern", "assign"} & set(options)
    made = KeraDataSource({**(BOOTSTRAP if named else NEEDED), **options}).reader(COLUMNS)
    assert isinstance(made, KeraBatchReader)
    return made


def read(made: KeraBatchReader) -> list[int]:
    """Read each partition in its own task."""
    in_worker: KeraBatchReader = pickle.loads(pickle.dumps(made))
    return [
        number
        for partition in made.partitions()
        for batch in in_worker.read(pickle.loads(pickle.dumps(partition)))
        for number in batch["n"].to_pylist()
    ]


def places(*chunks: int) -> str:
    """The start of the chunk with this number, for each streamlet."""
    return json.dumps(
        {"numbers": {str(streamlet): [[1, 1, number * CHUNK_BYTES]] for streamlet, number in enumerate(chunks)}}
    )


def test_the_columns_come_from_the_cluster(cluster: FakeClient) -> None:
    assert KeraDataSource(NEEDED).schema() == COLUMNS
    assert cluster.closed
    with pytest.raises(UnknownStream):
        KeraDataSource({**NEEDED, "path": "nothing"}).schema()


def test_headers_are_a_column_on_request(cluster: FakeClient) -> None:
    cluster.streams["plain"] = FakeStream(8, {0: [[]]}, typed=False)
    plain = {**NEEDED, "path": "plain"}

    assert KeraDataSource(plain).schema() == RECORD_COLUMNS
    assert KeraDataSource({**plain, "includeHeaders": "true"}).schema()[-1] == HEADERS_COLUMN
    with pytest.raises(InvalidArgument, match="includeHeaders: a typed stream"):
        KeraDataSource({**NEEDED, "includeHeaders": "true"}).schema()


def test_a_batch_reads_all_records(cluster: FakeClient) -> None:
    cluster.chunks = {0: [[2, 3]], 1: [[1]]}

    assert read(reader()) == [0, 1, 2, 3, 4, 0]


def test_several_streams_are_read_as_one(cluster: FakeClient) -> None:
    cluster.chunks = {0: [[2]], 1: [[1]]}
    cluster.streams["numbers-2"] = FakeStream(8, {0: [[3]]})
    cluster.streams["others"] = FakeStream(9, {0: [[9]]}, typed=False)

    assert read(reader(subscribe="numbers,numbers-2")) == [0, 1, 0, 0, 1, 2]
    assert read(reader(subscribePattern="numbers.*")) == [0, 1, 0, 0, 1, 2]
    assert read(reader(assign='{"numbers": [1], "numbers-2": [0]}')) == [0, 0, 1, 2]


def test_streams_with_different_columns_are_refused(cluster: FakeClient) -> None:
    cluster.streams["others"] = FakeStream(9, {0: [[9]]}, typed=False)
    made = reader(subscribe="numbers,others")

    with pytest.raises(SchemaMismatch, match="stream 'others' has no column 'n'"):
        made.partitions()
    with pytest.raises(SchemaMismatch, match="'numbers' and 'others'"):
        KeraDataSource({**BOOTSTRAP, "subscribe": "numbers,others"}).schema()


def test_the_error_names_a_missing_stream_and_suggests_another(cluster: FakeClient) -> None:
    cluster.streams["clicks"] = FakeStream(9, {0: [[9]]})

    with pytest.raises(UnknownStream, match=r"clikcs.*did you mean '?clicks"):
        reader(subscribe="numbers,clikcs").partitions()


def test_offsets_bound_the_read_and_the_records_of_each_partition_are_counted(cluster: FakeClient) -> None:
    cluster.chunks = {0: [[2, 3, 4]], 1: [[1]]}
    made = reader(startingOffsets=places(1, 0), endingOffsets=places(2, 1))

    assert [part.piece.records for part in made.partitions() if isinstance(part, KeraPartition)] == [3, 1]
    assert read(made) == [2, 3, 4, 0]
    assert cluster.read_ranges_open == 0


def test_timestamps_bound_the_read(cluster: FakeClient) -> None:
    cluster.chunks = {0: [[2000, 3000, 4000]], 1: [[1000, 5000]]}
    made = reader(startingTimestamp="2", endingTimestamp="5")  # ms; a record's time is its number in µs

    (partition,) = made.partitions()  # of the other streamlet, both times are in one chunk
    assert isinstance(partition, KeraPartition)
    assert (partition.piece.start, partition.piece.end, partition.piece.records) == (at(1), at(2), 3000)


def test_starting_at_a_time_of_lost_records_is_data_loss(cluster: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.chunks = {0: [[2000, 3000, 4000]]}
    numbers = cluster.streams["numbers"]
    locate = numbers.locate
    monkeypatch.setattr(numbers, "locate", lambda query: locate(query)._replace(lost_from=at(1)))

    with pytest.raises(DataLost, match=r"option startingTimestamp: what .* is lost, and may have been of that time"):
        reader(startingTimestamp="5").partitions()
    (partition,) = reader(startingTimestamp="5", failOnDataLoss="false").partitions()
    assert isinstance(partition, KeraPartition)
    assert partition.piece.start == at(2)
    reader(endingTimestamp="5").partitions()


def test_tasks_get_the_shared_memory_option(cluster: FakeClient) -> None:
    cluster.chunks = {0: [[2]], 1: [[1]]}

    read(reader())
    read(reader(sharedMemory="never"))

    assert cluster.shared_memory == {"auto", "never"}


@pytest.mark.usefixtures("cluster")
def test_an_empty_stream_has_no_partitions_and_sparks_own_partition_gives_no_rows() -> None:
    made = reader()

    assert made.partitions() == []
    assert list(made.read(InputPartition(None))) == []


@pytest.mark.usefixtures("cluster")
def test_offsets_that_do_not_fit_the_stream_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="startingOffsets: must name each streamlet"):
        reader(startingOffsets=places(0)).partitions()
