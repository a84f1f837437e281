"""The batch reader plans what is there once, and reads exactly that."""

import json
import pickle

import pytest
from pyspark.sql.datasource import InputPartition

from kera.core.errors import InvalidArgument, UnknownStream
from kera.spark_connector.batch import KeraBatchReader
from kera.spark_connector.columns import columns_of
from kera.spark_connector.planning import KeraPartition
from kera.spark_connector.source import KeraDataSource
from tests.unit.spark_connector.fakes import CHUNK_BYTES, SCHEMA, FakeClient

NEEDED = {"kera.bootstrap.servers": "h:1", "path": "numbers"}
COLUMNS = columns_of(SCHEMA, typed=True)


def reader(**options: str) -> KeraBatchReader:
    made = KeraDataSource({**NEEDED, **options}).reader(COLUMNS)
    assert isinstance(made, KeraBatchReader)
    return made


def read(made: KeraBatchReader) -> list[int]:
    """Each partition read by a task of its own."""
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


def test_the_columns_are_asked_of_the_cluster(cluster: FakeClient) -> None:
    assert KeraDataSource(NEEDED).schema() == COLUMNS
    assert cluster.closed
    with pytest.raises(UnknownStream):
        KeraDataSource({**NEEDED, "path": "nothing"}).schema()


def test_everything_that_is_there_is_read(cluster: FakeClient) -> None:
    cluster.chunks = {0: [[2, 3]], 1: [[1]]}

    assert read(reader()) == [0, 1, 2, 3, 4, 0]


def test_given_offsets_bound_what_is_read_and_their_records_are_counted(cluster: FakeClient) -> None:
    cluster.chunks = {0: [[2, 3, 4]], 1: [[1]]}
    made = reader(startingOffsets=places(1, 0), endingOffsets=places(2, 1))

    assert [part.records for part in made.partitions() if isinstance(part, KeraPartition)] == [3, 1]
    assert read(made) == [2, 3, 4, 0]
    assert cluster.read_ranges_open == 0


@pytest.mark.usefixtures("cluster")
def test_an_empty_stream_has_no_partition_and_sparks_own_gives_nothing() -> None:
    made = reader()

    assert made.partitions() == []
    assert list(made.read(InputPartition(None))) == []


@pytest.mark.usefixtures("cluster")
def test_offsets_that_do_not_fit_the_stream_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="startingOffsets: must name each streamlet"):
        reader(startingOffsets=places(0)).partitions()
