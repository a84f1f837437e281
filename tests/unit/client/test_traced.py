"""Tracing of producers and consumers: contexts in headers, spans, and links."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry import trace as otel

from kera.client.consuming.traced import ConsumerTraces, TracedIteration, _Seen, contexts_of, contexts_of_headers
from kera.client.headers import Header, Headers
from kera.client.producing.open_chunks.accumulator import Accumulator, Pending
from kera.client.producing.outcomes.outcome import BatchDelivery, Outcome
from kera.client.producing.traced import ProducerTraces, with_context
from kera.client.types import Record
from kera.core.errors import BufferFull, Unavailable
from kera.core.tracing import LINKS_MAX, TraceContext
from tests.unit.core.tracing.recorded import Recorded, recorded

HEADERS = pa.map_(pa.string(), pa.binary())


def context(number: int, *, sampled: bool = True) -> TraceContext:
    return TraceContext(f"00-{number:032x}-{number:016x}-{int(sampled):02x}")


class Sent:
    """Stands for `Producer.send`."""

    def __init__(self) -> None:
        self.headers: list[Any] = []
        self.accumulator = Accumulator("s", 0, 0.0)
        self.error: Exception | None = None

    def __call__(self, stream: str, value: Any, *, headers: Any = None, **_: Any) -> Pending:
        assert stream == "s"
        if self.error is not None:
            raise self.error
        self.headers.append(headers)
        return self.accumulator.append(value, 0.0, 1)


def test_a_sampled_record_carries_its_context_in_its_headers() -> None:
    sent = Sent()
    with recorded() as found:
        send = ProducerTraces(found.tracing).sending(sent)
        send("s", b"secret value", headers={"mine": b"kept"})
        span = found.named("create s")

    (headers,) = sent.headers
    assert headers["mine"] == b"kept"
    parsed = TraceContext.parse(headers["traceparent"])
    assert parsed is not None
    assert parsed.span_id == span.context.span_id
    assert span.kind is otel.SpanKind.PRODUCER
    assert dict(span.attributes) == {
        "messaging.system": "kera",
        "messaging.operation.name": "create",
        "messaging.operation.type": "create",
        "messaging.destination.name": "s",
    }
    assert "secret" not in span.to_json()


def test_an_unsampled_record_is_sent_unchanged() -> None:
    sent = Sent()
    with recorded(0.0) as found:
        ProducerTraces(found.tracing).sending(sent)("s", b"1")
        assert found.spans() == []
    assert sent.headers == [None]


def test_a_context_is_added_after_headers_with_repeated_names() -> None:
    sent = Sent()
    with recorded() as found:
        ProducerTraces(found.tracing).sending(sent)("s", b"1", headers=[("a", b"1"), ("a", None)])
    (headers,) = sent.headers
    assert headers.pairs[:2] == (("a", b"1"), ("a", None))
    assert [name for name, _ in headers.pairs[2:]] == ["traceparent"]


def test_a_context_in_the_records_own_headers_is_kept() -> None:
    sent, own = Sent(), {"traceparent": context(7).traceparent.encode()}
    with recorded() as found:
        traces = ProducerTraces(found.tracing)
        traces.sending(sent)("s", b"1", headers=own)
        assert found.spans() == []
        assert traces._of_chunks[sent.accumulator.delivered] == [context(7)]
    assert sent.headers == [own]


@pytest.mark.parametrize("header", [b"nonsense", b"", context(7, sampled=False).traceparent.encode()])
def test_an_invalid_or_unsampled_traceparent_header_is_left_alone(header: bytes) -> None:
    sent = Sent()
    with recorded() as found:
        traces = ProducerTraces(found.tracing)
        traces.sending(sent)("s", b"1", headers={"traceparent": header})
        assert not traces._of_chunks
    assert sent.headers == [{"traceparent": header}]


def test_a_refused_record_gives_a_failed_span() -> None:
    sent = Sent()
    sent.error = BufferFull("full")
    with recorded() as found:
        with pytest.raises(BufferFull):
            ProducerTraces(found.tracing).sending(sent)("s", b"1")
        assert found.named("create s").attributes["error.type"] == "buffer_full"


def test_the_contexts_kept_for_a_chunk_are_bounded_and_freed_with_it() -> None:
    sent = Sent()
    with recorded() as found:
        traces = ProducerTraces(found.tracing)
        send = traces.sending(sent)
        for _ in range(LINKS_MAX + 10):
            send("s", b"1")
        assert len(traces._of_chunks[sent.accumulator.delivered]) == LINKS_MAX
        sent.accumulator = Accumulator("s", 0, 0.0)
        assert not traces._of_chunks


def test_a_batch_without_headers_gets_the_context_in_its_first_record() -> None:
    values = pa.array([b"1", b"2", b"3"])
    for batch in (
        pa.record_batch({"value": values}),
        pa.record_batch({"headers": pa.nulls(3, HEADERS), "value": values}),
    ):
        given = with_context(batch, context(7))
        assert contexts_of(given.column("headers")) == [context(7)]
        assert given.column("headers").null_count == 2
        assert given.column("value") == values
    own = pa.record_batch({"value": values, "headers": headers(None, {"a": b"b"}, None)})
    for as_it_is in (own, own.slice(0, 0), pa.table({"value": values})):
        assert with_context(as_it_is, context(7)) is as_it_is


class Batches:
    """Stands for `Producer.send_batch`."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self.error: Exception | None = None
        self.given: Any = None

    async def __call__(self, stream: str, batch: Any, *, streamlet: int | None = None) -> BatchDelivery:
        assert (stream, streamlet) == ("s", None)
        self.given = batch
        if self.error is not None:
            raise self.error
        return BatchDelivery([self.outcome])


async def untyped(_: str) -> Any:
    return SimpleNamespace(typed=False)


async def typed(_: str) -> Any:
    return SimpleNamespace(typed=True)


async def test_the_span_of_a_batch_ends_with_its_delivery() -> None:
    sent, batch = Batches(), pa.record_batch({"value": pa.array([b"1"])})
    with recorded() as found:
        traces = ProducerTraces(found.tracing)
        delivery = await traces.sending_batches(sent, untyped)("s", batch)
        assert found.spans() == []
        assert len(traces._of_chunks[sent.outcome]) == 1
        sent.outcome.settle(Unavailable("away"))
        with pytest.raises(Unavailable):
            await delivery
        while not found.spans():
            await asyncio.sleep(0)
        span = found.named("send_batch s")
    assert span.attributes["error.type"] == "unavailable"
    assert contexts_of(sent.given.column("headers"))[0].span_id == span.context.span_id


async def test_a_typed_batch_is_sent_unchanged_and_a_refused_one_gives_a_failed_span() -> None:
    sent, batch = Batches(), pa.record_batch({"value": pa.array([b"1"])})
    with recorded() as found:
        send_batch = ProducerTraces(found.tracing).sending_batches(sent, typed)
        await send_batch("s", batch)
        assert sent.given is batch
        sent.error = BufferFull("full")
        with pytest.raises(BufferFull):
            await send_batch("s", batch)
        assert found.named("send_batch s").attributes["error.type"] == "buffer_full"


async def test_an_unsampled_batch_is_sent_unchanged() -> None:
    sent, batch = Batches(), pa.record_batch({"value": pa.array([b"1"])})
    with recorded(0.0) as found:
        await ProducerTraces(found.tracing).sending_batches(sent, untyped)("s", batch)
        assert (sent.given is batch, found.spans()) == (True, [])


# -- consumers -----------------------------------------------------------------------------------------------------


def headers(*rows: dict[str, bytes] | None) -> pa.Array:
    return pa.array([None if row is None else list(row.items()) for row in rows], HEADERS)


def traced(number: int, **more: bytes) -> dict[str, bytes]:
    return {"a": b"b", "traceparent": context(number).traceparent.encode(), **more}


def test_contexts_are_found_in_columns_of_headers() -> None:
    column = headers(
        None, {"x": b"y"}, traced(1, tracestate=b"v=1"), traced(2, other=b""), {"traceparent": b"bad"}, {},
        {"traceparent": context(9, sampled=False).traceparent.encode()},
    )  # fmt: skip
    assert contexts_of(column) == [context(1)._replace(tracestate="v=1"), context(2)]
    assert contexts_of(column.slice(3)) == [context(2)]
    assert contexts_of(column.slice(0, 2)) == []
    assert contexts_of(headers(None, None)) == []
    assert contexts_of(headers()) == []
    assert len(contexts_of(headers(*(traced(number) for number in range(1, 500))))) == LINKS_MAX


def test_the_last_of_repeated_contexts_counts() -> None:
    own, other = context(1).traceparent.encode(), context(2).traceparent.encode()
    rows: list[list[Header]] = [
        [("traceparent", own), ("tracestate", b"v=1"), ("traceparent", other)],
        [("tracestate", b"of another record"), ("traceparent", other), ("traceparent", None)],
        [("traceparent", own)],
    ]
    column = pa.array(rows, HEADERS)
    assert contexts_of(column) == [context(2), context(1)]
    assert contexts_of(column.slice(1)) == [context(1)]
    assert contexts_of_headers(Headers(rows[1])) == []


def test_a_null_or_empty_header_is_not_a_context() -> None:
    assert contexts_of(pa.array([[("traceparent", None)]], HEADERS)) == []
    assert contexts_of_headers({"traceparent": b"", "tracestate": b"x"}) == []


def iteration(found: Recorded, items: list[Any]) -> TracedIteration[Any]:
    async def given() -> AsyncIterator[Any]:
        for item in items:
            yield item

    def look(item: Any) -> _Seen:
        return _Seen("s", 3, 1, [context(number) for number in item])

    return TracedIteration(given(), ConsumerTraces(found.tracing, "billing", {}), look)


async def test_receiving_and_processing_give_spans_with_links() -> None:
    with recorded() as found:
        inside = []
        async for item in iteration(found, [[1, 2], [], [3]]):
            inside.append(otel.get_current_span().get_span_context().span_id)
            assert item is not None
        receives = [each for each in found.spans() if each.name == "receive s"]
        processes = [each for each in found.spans() if each.name == "process s"]

    assert [[link.context.trace_id for link in each.links] for each in receives] == [[1, 2], [3]]
    assert [[link.context.trace_id for link in each.links] for each in processes] == [[1, 2], [3]]
    assert [each.parent.span_id for each in processes] == [each.context.span_id for each in receives]
    assert (receives[0].kind, processes[0].kind) == (otel.SpanKind.CLIENT, otel.SpanKind.CONSUMER)
    assert processes[0].attributes["messaging.consumer.group.name"] == "billing"
    assert inside == [processes[0].context.span_id, 0, processes[1].context.span_id]
    assert not otel.get_current_span().get_span_context().is_valid


async def test_closing_or_dropping_an_iteration_ends_its_process_span() -> None:
    with recorded() as found:
        left = iteration(found, [[1], [2]])
        await anext(left)
        await left.aclose()
        dropped = iteration(found, [[1], [2]])
        await anext(dropped)
        del dropped
        assert found.names().count("process s") == 2


async def test_no_span_stays_current_after_a_loop_is_left() -> None:
    with recorded() as found:
        async for _ in iteration(found, [[1], [2]]):
            assert otel.get_current_span().get_span_context().is_valid
            break
        assert not otel.get_current_span().get_span_context().is_valid
        with contextlib.suppress(ValueError):
            async for _ in iteration(found, [[1], [2]]):
                raise ValueError("of the application")
        assert not otel.get_current_span().get_span_context().is_valid
        assert found.names().count("process s") == 2


async def test_next_records_gives_one_receive_span_for_all_records() -> None:
    given = [
        Record("s", streamlet, 0, 0, 0, None, (), b"1", Headers(context(streamlet + 1).headers), None)
        for streamlet in (0, 1)
    ]

    async def coming(records: list[Record]) -> list[Record]:
        return records

    with recorded() as found:
        traces = ConsumerTraces(found.tracing, "billing", {})
        assert await traces.next_records(coming(given)) == given
        assert await traces.next_records(coming([])) == []
        (span,) = found.spans()
    assert (span.name, len(span.links)) == ("receive s", 2)
    assert span.attributes["messaging.batch.message_count"] == 2
    assert "messaging.destination.partition.id" not in span.attributes


async def test_another_task_may_continue_a_traced_iteration() -> None:
    with recorded() as found:
        shared = iteration(found, [[1], [2]])
        await asyncio.create_task(anext(shared))
        await asyncio.create_task(anext(shared))
        await shared.aclose()
        assert found.names().count("process s") == 2
