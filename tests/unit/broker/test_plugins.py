"""Hooks of a broker: when they are called, and that a broker works without them."""

from typing import Any

import pytest

from kera.broker.counters import Counters
from kera.broker.serving.hooks import ReadCall, RequestHooks, Write, WriteCall
from kera.broker.serving.pending_write import PendingWrite
from kera.broker.serving.service import BrokerService
from kera.core.rpc import Call, Reply, api
from kera.core.rpc.method import Peer
from kera.v1 import broker_pb2, latency_pb2
from tests.unit.broker.support import BROKER_ID, EVERYTHING, STREAM_ID, Engine, chunk, read_range, stream_info

HERE = Peer("unix", "")


class Noted(RequestHooks):
    """Notes its calls in a list that it shares with other hooks."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name = name
        self._calls = calls

    def around_write(self, write: Write) -> Write:
        def around(call: WriteCall) -> Any:
            self._calls.append(f"{self._name} around")
            return write(call)

        return around

    def on_write(self, call: WriteCall) -> None:
        self._calls.append(f"{self._name} write {call.message.chunk_count}")

    def on_written(self, write: PendingWrite) -> None:
        self._calls.append(f"{self._name} written {len(write.statuses)}")

    def on_read(self, call: ReadCall) -> None:
        self._calls.append(f"{self._name} read {len(call.message.ranges)}")

    def on_read_answered(self, call: ReadCall, response: broker_pb2.MultiReadChunksResponse) -> None:  # noqa: ARG002
        self._calls.append(f"{self._name} answered {len(response.results)}")


def service_of(engine: Engine, *hooks: RequestHooks) -> Any:
    service = BrokerService(
        engine.streams,
        engine.memory,
        engine.replication,
        Counters(),
        pump=lambda: None,
        read_bytes_max=EVERYTHING,
        check_payloads=False,
        hooks=hooks,
    )
    service.registered(BROKER_ID, [stream_info()])
    return service.service()


def write(service: Any, **fields: Any) -> Any:
    request = broker_pb2.MultiWriteChunksRequest(chunk_count=1, **fields)
    return service[api.MULTI_WRITE_CHUNKS](Call(request, memoryview(chunk(1, 0)), HERE))


async def test_hooks_are_called_around_before_and_after_a_request(engine: Engine) -> None:
    calls: list[str] = []
    service = service_of(engine, Noted("inner", calls), Noted("outer", calls))
    write(service)
    assert calls == [
        "outer around",
        "inner around",
        "inner write 1",
        "outer write 1",
        "inner written 1",
        "outer written 1",
    ]
    calls.clear()
    request = broker_pb2.MultiReadChunksRequest(ranges=[read_range()])
    service[api.MULTI_READ_CHUNKS](Call(request, memoryview(b""), HERE))
    assert calls == ["inner read 1", "outer read 1", "inner answered 1", "outer answered 1"]


async def test_a_failing_hook_changes_no_answer_and_stops_no_other_hook(
    engine: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    class Failing(RequestHooks):
        def on_written(self, write: PendingWrite) -> None:
            raise RuntimeError(f"{len(write.statuses)} statuses")

    calls: list[str] = []
    reply = write(service_of(engine, Failing(), Noted("other", calls)))
    assert [status.HasField("error") for status in reply.message.statuses] == [False]
    assert calls[-1] == "other written 1"
    assert "RuntimeError: 1 statuses" in capfd.readouterr().err


async def test_a_broker_without_hooks_accepts_reports_and_traces_and_ignores_them(engine: Engine) -> None:
    report = latency_pb2.LatencyReport(samples=[latency_pb2.HopSample(stream_id=STREAM_ID)])
    reply = write(service_of(engine), latency=report, traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    assert isinstance(reply, Reply)
    assert [status.HasField("error") for status in reply.message.statuses] == [False]
    assert (list(reply.message.advice), reply.message.broker_time_us) == ([], 0)
