"""Rows of an epoch in total order, compared with a sorted list."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kera.client.chunk_batch import ChunkBatch
from kera.client.epochs.epoch import Epoch, in_order
from kera.client.epochs.sorting import OrderedBatch, OrderedRows
from kera.client.types import Record, StreamDescription
from kera.core.base.ids import EntryId
from kera.core.errors import InvalidArgument
from tests.unit.client.epoch_support import chunk
from tests.unit.client.support import stream_info

TYPED = pa.schema([("at", pa.timestamp("us", "UTC")), ("user", pa.int32())])


def described(name: str, stream_id: int, *, typed: bool = False) -> StreamDescription:
    info = stream_info(name, stream_id)
    if typed:
        info = stream_info(name, stream_id, schema=TYPED, timestamp_column="at", key_column="user")
        info.schemas[0].typed = True
    return StreamDescription.from_message(info)


STREAMS = {7: described("a", 7), 8: described("b", 8), 9: described("t", 9, typed=True)}
ORDER = {8: 0, 7: 1, 9: 2}
"""The caller's order of the streams."""


def written(log: dict[EntryId, list[list[int]]]) -> Epoch:
    chunks: dict[EntryId, list[ChunkBatch]] = {}
    for entry, parts in log.items():
        first = 0
        for times in parts:
            made = chunk(times, first)._replace(entry=entry)
            if entry.stream_id == 9:
                made = made._replace(
                    batch=pa.record_batch([pa.array(times, TYPED[0].type), pa.array(times, pa.int32())], schema=TYPED)
                )
            chunks.setdefault(entry, []).append(made)
            first += len(times)
    return Epoch(0, 0, 100, in_order(chunks, ORDER), STREAMS)


def expected(log: dict[EntryId, list[list[int]]]) -> list[tuple[int, str, int, int, int]]:
    rows = []
    for entry, parts in log.items():
        times = [at for part in parts for at in part]
        for offset, at in enumerate(times):
            rows.append((at, ORDER[entry.stream_id], entry.streamlet_id, entry.entry, offset))
    names = {number: STREAMS[stream_id].name for stream_id, number in ORDER.items()}
    return [(at, names[stream], *place) for at, stream, *place in sorted(rows)]  # type: ignore[misc]


def batches(rows: OrderedRows, rows_max: int) -> list[OrderedBatch]:
    found: list[OrderedBatch] = []
    while not found or not found[-1].ends_epoch:
        found.append(rows.batch(sum(each.batch.num_rows for each in found), rows_max))
    return found


def seen(records: list[Record]) -> list[tuple[int, str, int, int, int]]:
    return [(each.timestamp_us, each.stream, each.streamlet, each.entry, each.offset) for each in records]


ENTRIES = st.builds(EntryId, st.sampled_from(sorted(STREAMS)), st.integers(0, 2), st.integers(0, 1))
CHUNKS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=4)


@given(log=st.dictionaries(ENTRIES, CHUNKS, min_size=1, max_size=5), rows_max=st.integers(1, 20))
def test_rows_come_in_the_order_of_a_sorted_list(log: dict[EntryId, list[list[int]]], rows_max: int) -> None:
    rows = OrderedRows(written(log))
    found = batches(rows, rows_max)
    records = [record for each in found for record in each.records()]
    assert seen(records) == expected(log)
    assert len(rows) == len(records)
    for each in found:
        assert 1 <= each.batch.num_rows <= rows_max
        assert each.epoch == 0
        origins = [tuple(row.values()) for row in each.origins.to_pylist()]
        assert [(at, *place) for *place, at in origins] == seen(list(each.records()))
        column = "at" if each.stream.typed else "timestamp"
        assert each.batch[column].cast(pa.int64()).to_pylist() == each.origins["timestamp_us"].to_pylist()
    assert all(int(record.value) == record.timestamp_us for record in records if record.row is None)
    assert all(record.row["user"] == record.timestamp_us for record in records if record.row is not None)
    assert all(record.key == b"%d" % record.timestamp_us for record in records if record.row is not None)


def test_a_batch_ends_before_rows_with_other_columns() -> None:
    log = {EntryId(7, 0, 0): [[1, 2, 5]], EntryId(8, 0, 0): [[3]], EntryId(9, 0, 0): [[4, 6]]}
    found = batches(OrderedRows(written(log)), 100)
    assert [(each.stream.name, each.batch.num_rows, each.ends_epoch) for each in found] == [
        ("a", 3, False),
        ("t", 1, False),
        ("a", 1, False),
        ("t", 1, True),
    ]
    assert found[0].origins["stream"].to_pylist() == ["a", "a", "b"]


def test_the_order_does_not_depend_on_how_the_chunks_were_cut() -> None:
    generator = random.Random(3)
    times = [generator.randrange(50) for _ in range(200)]
    whole = {EntryId(7, 0, 0): [times[:120]], EntryId(7, 1, 0): [times[120:]]}
    cut: dict[EntryId, Any] = {
        EntryId(7, 0, 0): [times[at : at + 7] for at in range(0, 119, 7)] + [times[119:120]],
        EntryId(7, 1, 0): [[at] for at in times[120:]],
    }
    first, second = (batches(OrderedRows(written(log)), 1000)[0] for log in (whole, cut))
    assert first.batch.equals(second.batch)
    assert first.origins.equals(second.origins)


def test_a_stream_without_a_time_cannot_be_sorted() -> None:
    info = stream_info("n", 9, schema=pa.schema([("x", pa.int32())]))
    info.schemas[0].typed = True
    made = chunk([1])._replace(entry=EntryId(9, 0, 0), batch=pa.record_batch({"x": pa.array([1], pa.int32())}))
    with pytest.raises(InvalidArgument, match="no timestamp column"):
        OrderedRows(Epoch(0, 0, 9, (made,), {9: StreamDescription.from_message(info)}))
