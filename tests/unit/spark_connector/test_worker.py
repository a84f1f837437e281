"""A task reads all records of its partition, and no others, in batches of a good size."""

import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import StructType

from kera.core.base.ids import EntryId
from kera.core.errors import DataLost
from kera.spark_connector.columns import HEADERS_COLUMN, RECORD_COLUMNS, Shaper, columns_of
from kera.spark_connector.options.reading import parse_read_options
from kera.spark_connector.planning import Piece
from kera.spark_connector.planning.offsets import EntryOffset, StreamRecreated
from kera.spark_connector.reading import worker
from kera.spark_connector.reading.partition import KeraPartition
from kera.spark_connector.reading.worker import BATCH_RECORDS, MemoryReused, read_partition
from tests.unit.spark_connector.fakes import SCHEMA, FakeClient, at

COLUMNS = columns_of(SCHEMA, typed=True)
GIVEN = {"kera.bootstrap.servers": "h:1", "subscribe": "numbers"}
OPTIONS = parse_read_options(GIVEN)


def partition(
    chunks: int, records: int, *, first_record: int = 0, stream_id: int = 7, fail_on_data_loss: bool = True
) -> KeraPartition:
    """The first `chunks` chunks of streamlet 0."""
    return KeraPartition(
        Piece(
            stream="numbers",
            entry=EntryId(stream_id, 0, 0),
            start=at(0),
            end=at(chunks),
            first_record=first_record,
            records=records,
            length_bytes=0,
            typed=True,
            broker_id=1,
            node_id="here",
            fail_on_data_loss=fail_on_data_loss,
        )
    )


def read(of: InputPartition, **options: Any) -> list[pa.RecordBatch]:
    return list(read_partition(OPTIONS, of, options.get("columns", COLUMNS)))


def numbers(batches: list[pa.RecordBatch]) -> list[int]:
    return [number for batch in batches for number in batch["n"].to_pylist()]


def test_small_chunks_are_combined_into_batches(cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [BATCH_RECORDS // 2] * 5

    batches = read(partition(5, BATCH_RECORDS // 2 * 5))

    assert [batch.num_rows for batch in batches] == [BATCH_RECORDS, BATCH_RECORDS, BATCH_RECORDS // 2]


def test_records_of_the_first_chunk_before_the_first_record_are_left_out(cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [5, 2, 5]

    assert numbers(read(partition(3, 9, first_record=3))) == [3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert numbers(read(partition(3, 7, first_record=5))) == [5, 6, 7, 8, 9, 10, 11]


def test_a_later_chunk_is_read_completely(cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [5, 2, 5]
    cluster.streams["numbers"].removed[0] = 1

    assert numbers(read(partition(3, 9, first_record=6, fail_on_data_loss=False))) == [5, 6, 7, 8, 9, 10, 11]


def test_a_stream_recreated_during_a_task_is_not_read(cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4]
    cluster.stream_id = 9

    with pytest.raises(StreamRecreated, match="while it was read"):
        read(partition(1, 4))


def test_a_task_that_gets_fewer_records_than_planned_fails(cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [3]

    with pytest.raises(DataLost, match="gave 3 of the 4 records"):
        read(partition(1, 4))
    with pytest.raises(DataLost, match="gave 3 of the 4 records"):  # the loss has no known reason
        read(partition(1, 4, fail_on_data_loss=False))


def test_removed_records_fail_the_task_or_are_skipped_with_one_warning(
    cluster: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.chunks[0][0] += [2, 2, 2]
    cluster.streams["numbers"].removed[0] = 2

    with pytest.raises(DataLost):
        read(partition(3, 6))
    assert numbers(read(partition(3, 6, fail_on_data_loss=False))) == [4, 5]
    (warning,) = caplog.records
    assert "gave 2 of the 6 records" in warning.getMessage()


def test_a_missing_stream_gives_no_records_when_losses_are_tolerated(
    cluster: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.chunks[0][0] += [4]
    assert read(partition(1, 4, stream_id=5, fail_on_data_loss=False)) == []
    del cluster.streams["numbers"]
    assert read(partition(1, 4, fail_on_data_loss=False)) == []

    assert ["gave 0 of the 4 records" in record.getMessage() for record in caplog.records] == [True, True]


def test_memory_reused_while_spark_reads_it_fails_the_task_with_a_retriable_error(cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [4]
    batches = read_partition(OPTIONS, partition(1, 4), COLUMNS)

    assert next(batches).num_rows == 4
    cluster.intact = False
    with pytest.raises(MemoryReused) as caught:
        next(batches)
    assert caught.value.retriable


def test_memory_reused_before_spark_reads_it_is_read_again_as_copies(cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [BATCH_RECORDS, 5, 2, 5]
    cluster.reused = {at(1)}

    found = read(partition(4, BATCH_RECORDS + 9, first_record=3))
    assert numbers(found) == list(range(3, BATCH_RECORDS + 12))
    assert cluster.shared_memory == {"auto", "never"}


def test_a_chunk_that_cannot_be_shaped_after_its_memory_was_reused_is_read_again(
    cluster: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.chunks[0][0] += [4]
    cluster.intact = False
    monkeypatch.setattr(Shaper, "shape", _failing_once(Shaper.shape))

    assert numbers(read(partition(1, 4))) == [0, 1, 2, 3]


def test_an_intact_chunk_that_cannot_be_shaped_is_an_error(
    cluster: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.chunks[0][0] += [4]
    monkeypatch.setattr(Shaper, "shape", _failing_once(Shaper.shape))

    with pytest.raises(pa.ArrowInvalid):
        read(partition(1, 4))


def _failing_once(shape: Any) -> Any:
    failures = [pa.ArrowInvalid("offsets that do not ascend")]

    def failing(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return shape(*arguments)

    return failing


def test_a_piece_that_ends_within_its_last_chunk_gives_only_the_records_before(cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [5, 2, 5]
    of = partition(3, 8, first_record=2)
    of.piece = replace(of.piece, stop=EntryOffset(at(2), 10))
    assert numbers(read(of)) == list(range(2, 10))

    of = partition(1, 2, first_record=2)
    of.piece = replace(of.piece, stop=EntryOffset(at(0), 4))
    assert numbers(read(of)) == [2, 3]


def test_chunks_of_a_typed_stream_can_be_read_as_rows_with_arrow_bytes(cluster: FakeClient) -> None:
    cluster.chunks[0][0] += [5, 2]
    options = parse_read_options({**GIVEN, "onSchemaMismatch": "bytes"})
    wanted = StructType([*RECORD_COLUMNS, HEADERS_COLUMN])
    batches = list(read_partition(options, partition(2, 4, first_record=3), wanted))

    rows = pa.Table.from_batches(batches).to_pylist()
    assert [pa.ipc.open_stream(row["value"]).read_all()["n"].to_pylist() for row in rows] == [[3, 4], [5, 6]]
    assert [(row["key"], row["stream"], row["offset"]) for row in rows] == [(None, "numbers", 3), (None, "numbers", 5)]
    assert rows[0]["headers"] == [{"key": "content-type", "value": b"application/vnd.apache.arrow.stream"}]
    assert cluster.joined_bytes_max == {0}, "which chunks would come together is another matter each time"


def test_a_batch_is_released_before_the_next_is_fetched(cluster: FakeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.chunks[0][0] += [BATCH_RECORDS] * 2
    fetch = worker._fetched

    def fetched(*arguments: Any) -> Iterator[Any]:
        gathered = list(fetch(*arguments))
        while gathered:
            given = weakref.ref(gathered[0][0].batch)
            yield gathered.pop(0)
            assert given() is None, "the batch is still in memory"

    monkeypatch.setattr(worker, "_fetched", fetched)

    # `map` keeps no batch, unlike a loop with a variable.
    assert sum(map(len, read_partition(OPTIONS, partition(2, BATCH_RECORDS * 2), COLUMNS))) == BATCH_RECORDS * 2


def test_the_log_says_how_many_chunks_were_read_from_shared_memory(
    cluster: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.chunks[0][0] += [1, 1, 1]
    with caplog.at_level(logging.DEBUG, logger="kera.spark_connector"):
        read(partition(3, 3))

    assert "3 chunks, 3 of them in the broker's memory" in caplog.text
