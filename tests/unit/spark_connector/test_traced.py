"""The span of a micro-batch: when it exists, what it contains, and when it ends."""

import asyncio
import pickle
from collections.abc import AsyncGenerator
from typing import Any, cast

import pyarrow as pa
import pytest

from kera.core.base.ids import EntryId, Position
from kera.core.errors import DataLost
from kera.core.tracing import OFF, Tracing
from kera.spark_connector.planning import Piece
from kera.spark_connector.reading import traced as module
from kera.spark_connector.reading.traced import ENTRIES_MAX, MicroBatchTraces
from tests.unit.core.tracing.recorded import recorded

HEADERS = pa.schema([("headers", pa.map_(pa.string(), pa.binary()))])


def piece(streamlet: int, records: int = 5, *, typed: bool = False, start: int = 0) -> Piece:
    return Piece(
        "orders", EntryId(7, streamlet, 0), Position(1, 1, start), Position(1, 1, 9), 0, records, 0, typed, 0, "", True
    )


class Chunk:
    def __init__(self, number: int) -> None:
        header = f"00-{number:032x}-{number:016x}-01".encode()
        self.batch = pa.record_batch({"headers": pa.array([[("traceparent", header)]], HEADERS.field(0).type)}, HEADERS)


class Read:
    """A client that remembers the ranges read from it."""

    def __init__(self, tracing: Tracing) -> None:
        self.tracing = tracing
        self.ranges: list[tuple[int, Position]] = []
        self.error: Exception | None = None
        self.hold: asyncio.Event | None = None

    async def read_range(
        self, stream: str, streamlet_id: int, entry: int, start: Position, end: Position
    ) -> AsyncGenerator[Any, None]:
        assert (stream, entry, end) == ("orders", 0, Position(1, 1, 9))
        self.ranges.append((streamlet_id, start))
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        yield Chunk(streamlet_id + 1)
        raise AssertionError("only the first chunk is read")


async def planned(traces: MicroBatchTraces, client: Read, pieces: list[Piece], end: str = "end") -> None:
    await traces.planned(cast("Any", client), pieces, end, "loader")


async def test_the_span_of_a_micro_batch_links_to_records_of_a_few_entries() -> None:
    traces = MicroBatchTraces()
    with recorded() as found:
        client = Read(found.tracing)
        pieces = [piece(number) for number in range(ENTRIES_MAX + 3)]
        await planned(traces, client, [*pieces, piece(0, start=5)])
        await planned(traces, client, pieces)  # Spark may plan a micro-batch twice
        assert found.spans() == []
        traces.done("another end")
        assert found.spans() == []
        traces.done("end")
        span = found.named("process orders")

    assert [link.context.trace_id for link in span.links] == list(range(1, ENTRIES_MAX + 1))
    assert client.ranges == [(number, Position(1, 1, 0)) for number in range(ENTRIES_MAX)]
    assert span.attributes["messaging.batch.message_count"] == 5 * (ENTRIES_MAX + 4)
    assert span.attributes["messaging.consumer.group.name"] == "loader"


async def test_a_new_micro_batch_or_the_end_of_the_query_ends_the_span() -> None:
    traces = MicroBatchTraces()
    with recorded() as found:
        client = Read(found.tracing)
        await planned(traces, client, [piece(0)], "first")
        await planned(traces, client, [piece(0)], "second")
        assert found.names() == ["process orders"]
        traces.finish()
        assert found.names() == ["process orders"] * 2


@pytest.mark.parametrize("pieces", [[], [piece(0, typed=True)], [piece(0, records=0)]], ids=["none", "typed", "empty"])
async def test_without_contexts_there_is_no_span(pieces: list[Piece]) -> None:
    traces = MicroBatchTraces()
    with recorded() as found:
        client = Read(found.tracing)
        await planned(traces, client, pieces)
        traces.finish()
        assert (found.spans(), client.ranges) == ([], [])


async def test_without_tracing_no_record_is_read() -> None:
    client = Read(OFF)
    await planned(MicroBatchTraces(), client, [piece(0)])
    assert client.ranges == []


async def test_a_micro_batch_whose_records_cannot_be_read_in_time_has_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    traces = MicroBatchTraces()
    with recorded() as found:
        gone, slow = Read(found.tracing), Read(found.tracing)
        gone.error, slow.hold = DataLost("it is gone"), asyncio.Event()
        for client in (gone, slow):
            await planned(traces, client, [piece(0)])
            traces.finish()
        assert found.spans() == []


async def test_a_pickled_copy_has_no_open_span() -> None:
    traces = MicroBatchTraces()
    with recorded() as found:
        await planned(traces, Read(found.tracing), [piece(0)])
        copy = pickle.loads(pickle.dumps(traces))
        copy.finish()
        assert found.spans() == []
        traces.finish()
