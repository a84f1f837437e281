"""The option ``metadata`` lists streams and partitions instead of reading records."""

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

from kera.core.base.ids import EntryId
from kera.core.base.process import node_id
from kera.core.errors import SchemaMismatch, UnknownStream
from kera.spark_connector.planning import Piece
from kera.spark_connector.reading.metadata import COLUMNS, KeraMetadataReader, access
from kera.spark_connector.source import KeraDataSource
from tests.unit.spark_connector.fakes import FakeClient, FakeStream, at

BOOTSTRAP = {"kera.bootstrap.servers": "h:1"}


def rows(kind: str, **options: str) -> list[dict[str, object]]:
    source = KeraDataSource({**BOOTSTRAP, "metadata": kind, **options})
    columns = source.schema()
    reader = source.reader(columns)
    assert isinstance(reader, KeraMetadataReader)
    (partition,) = reader.partitions()
    return [row for batch in reader.read(partition) for row in batch.to_pylist()]


def test_all_streams_or_only_subscribed_ones_are_listed(cluster: FakeClient) -> None:
    cluster.chunks = {0: [[2, 3]], 1: [[1]]}
    cluster.streams["plain"] = FakeStream(8, {0: [[]]}, typed=False)

    numbers, plain = rows("streams")

    assert numbers == {
        "name": "numbers",
        "stream_id": 7,
        "streamlets": 2,
        "entries": 1,
        "durability": "leader",
        "replication": 0,
        "records": 6,
        "bytes": 3 * 64,
        "typed": True,
        "schema": "n: int64",
    }
    assert (plain["name"], plain["typed"]) == ("plain", False)
    assert [row["name"] for row in rows("streams", subscribe="plain")] == ["plain"]


def test_a_stream_deleted_during_the_listing_is_left_out_unless_it_was_requested(
    cluster: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.streams["plain"] = FakeStream(8, {0: [[]]}, typed=False)
    bounds = cluster.bounds

    async def gone(stream: str) -> object:
        if stream == "plain":
            raise UnknownStream("no stream is called 'plain'")
        return await bounds(stream)

    monkeypatch.setattr(cluster, "bounds", gone)
    assert [row["name"] for row in rows("streams")] == ["numbers"]
    with pytest.raises(UnknownStream):
        rows("streams", subscribe="plain")


def test_partitions_are_listed_as_a_batch_would_read_them(cluster: FakeClient) -> None:
    cluster.chunks = {0: [[2, 3]], 1: [[1]]}

    first, second = rows("partitions", subscribe="numbers")

    assert first == {
        "stream": "numbers",
        "streamlet": 0,
        "entry": 0,
        "start": [1, 1, 0],
        "end": [1, 1, 128],
        "records": 5,
        "bytes": 128,
        "broker": 1,
        "node": "here",
        "access": "pull",
    }
    assert second["streamlet"] == 1


def test_a_broker_on_the_same_node_pushes_unless_shared_memory_is_never() -> None:
    piece = Piece(
        stream="s",
        entry=EntryId(1, 0, 0),
        start=at(0),
        end=at(1),
        first_record=0,
        records=1,
        length_bytes=64,
        typed=False,
        broker_id=1,
        node_id=node_id(),
        fail_on_data_loss=True,
    )

    assert access(piece, "auto", node_id()) == "push"
    assert access(piece, "auto", "elsewhere") == "pull"
    assert access(piece, "never", node_id()) == "pull"
    assert access(piece, "always", "elsewhere") == "push"


@pytest.mark.usefixtures("cluster")
def test_a_subset_of_the_columns_may_be_requested_but_no_others() -> None:
    source = KeraDataSource({**BOOTSTRAP, "metadata": "streams"})
    reader = source.reader(StructType([StructField("records", LongType()), StructField("name", StringType())]))
    assert isinstance(reader, KeraMetadataReader)
    (partition,) = reader.partitions()

    assert [batch.to_pylist() for batch in reader.read(partition)] == [[{"records": 0, "name": "numbers"}]]
    with pytest.raises(SchemaMismatch, match="metadata=streams has no column 'stream'"):
        source.reader(COLUMNS["partitions"])
