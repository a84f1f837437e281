"""Spans of writes that belong to a trace; other writes have none."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace as otel

from kera.broker.serving.traced import TracedWrites
from kera.core.errors import ArenaFull, InvalidArgument
from kera.core.rpc import Call, Peer, Reply
from kera.core.rpc.wire import error_to_message
from kera.core.tracing import TraceContext
from kera.v1 import broker_pb2
from tests.unit.broker.support import STREAM_ID, Broker, Engine, chunk, stream_info
from tests.unit.core.tracing.recorded import recorded

PARENT = TraceContext(f"00-{'a' * 32}-{'b' * 16}-01", "v=1")
STREAMS: Any = SimpleNamespace(by_id={STREAM_ID: SimpleNamespace(name="orders", replication=1)})


def call(traceparent: str = "", tracestate: str = "", bulk: bytes | None = None) -> Any:
    request = broker_pb2.MultiWriteChunksRequest(chunk_count=1, traceparent=traceparent, tracestate=tracestate)
    return Call(request, memoryview(chunk(1, 0) if bulk is None else bulk), Peer("frames", ""))


def reply(*errors: Exception) -> Reply[broker_pb2.MultiWriteChunksResponse]:
    response = broker_pb2.MultiWriteChunksResponse()
    for error in errors:
        response.statuses.add(error=error_to_message(error))
    return Reply(response)


def test_an_append_is_a_span_in_the_trace_of_its_request() -> None:
    with recorded() as found:
        TracedWrites(found.tracing, STREAMS).around_write(lambda _: reply())(call(*PARENT))
        span = found.named("append orders")

    assert (span.parent.span_id, span.context.trace_id) == (PARENT.span_id, PARENT.trace_id)
    assert span.kind is otel.SpanKind.SERVER
    assert span.attributes["messaging.destination.name"] == "orders"
    assert "error.type" not in span.attributes


async def test_waiting_for_backups_is_a_separate_span() -> None:
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    with recorded() as found:
        assert TracedWrites(found.tracing, STREAMS).around_write(lambda _: answer)(call(*PARENT)) is answer
        assert found.names() == ["append orders"]
        answer.set_result(reply())
        await asyncio.sleep(0)
        append, replicate = found.named("append orders"), found.named("replicate orders")
    assert replicate.parent.span_id == append.context.span_id


@pytest.mark.parametrize("later", [False, True])
async def test_a_refused_write_has_a_failed_span(later: bool) -> None:
    answer: Any = reply(ArenaFull("full"))
    if later:
        answer, made = asyncio.get_running_loop().create_future(), answer
        asyncio.get_running_loop().call_soon(answer.set_result, made)
    with recorded() as found:
        TracedWrites(found.tracing, STREAMS).around_write(lambda _: answer)(call(*PARENT))
        while not found.spans() or found.spans()[-1].attributes.get("error.type") is None:
            await asyncio.sleep(0)
        assert found.spans()[-1].attributes["error.type"] == "arena_full"


def test_an_invalid_request_ends_its_span_with_the_error_and_is_refused() -> None:
    def write(_: Any) -> Any:
        raise InvalidArgument("no")

    with recorded() as found:
        with pytest.raises(InvalidArgument):
            TracedWrites(found.tracing, STREAMS).around_write(write)(call(*PARENT))
        assert found.named("append orders").attributes["error.type"] == "invalid_argument"


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'a' * 32}-{'b' * 16}-00", "x" * 100_000])
def test_a_write_that_is_not_traced_has_no_span(traceparent: str) -> None:
    with recorded() as found:
        TracedWrites(found.tracing, STREAMS).around_write(lambda _: reply())(call(traceparent))
        assert found.spans() == []


@pytest.mark.parametrize("bulk", [b"", b"x" * 10, b"\0" * 4096])
def test_malformed_chunks_have_a_span_without_a_stream(bulk: bytes) -> None:
    with recorded() as found:
        TracedWrites(found.tracing, STREAMS).around_write(lambda _: reply())(call(*PARENT, bulk=bulk))
        assert found.names() == ["append"]


async def test_without_tracing_the_service_calls_the_writer_directly(engine: Engine) -> None:
    service = Broker(engine, stream_info()).broker
    assert service._write == service.writer.write
