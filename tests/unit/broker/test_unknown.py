"""Heartbeats report the streams that a broker holds to a new coordinator."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from kera.broker.heartbeat import HeartbeatReport
from kera.broker.ownership.unknown import UnknownReport
from kera.v1 import coordinator_pb2
from tests.unit.broker.support import BROKER_ID, CHUNK_BYTES, Broker, Engine, chunk, stream_info


class Held(dict[int, Any]):
    """Streams that are open, by id."""

    unknown: dict[int, Any]

    def __iter__(self) -> Any:
        return iter(self.values())


@pytest.fixture
def streams() -> Held:
    held = Held()
    for number in range(1, 6):
        held[number] = SimpleNamespace(stream_id=number, assignments_version=10 * number, config_version=number)
    held.unknown = {}
    return held


class Heartbeats:
    """Heartbeats of one broker, to the leading coordinator."""

    def __init__(self, streams: Held) -> None:
        self.leader = 7
        self.report = UnknownReport(cast(Any, streams), lambda: self.leader, held_max=2)

    def beat(self, answered_by: int | None = None) -> tuple[list[int], bool]:
        request = coordinator_pb2.HeartbeatRequest()
        self.report.fill(request)
        self.report.answered(coordinator_pb2.HeartbeatResponse(coordinator_epoch=answered_by or self.leader))
        return [one.stream_id for one in request.held_streams], request.held_streams_told


def test_streams_are_named_over_several_heartbeats_once_per_leader(streams: Held) -> None:
    beats = Heartbeats(streams)

    assert [beats.beat() for _ in range(4)] == [([1, 2], False), ([3, 4], False), ([5], True), ([], False)]
    beats.leader = 8
    assert beats.beat() == ([1, 2], False)


def test_a_coordinator_that_begins_to_lead_meanwhile_gets_all_streams(streams: Held) -> None:
    beats = Heartbeats(streams)

    assert beats.beat() == ([1, 2], False)
    assert beats.beat(answered_by=8) == ([3, 4], False)
    beats.leader = 8
    assert [beats.beat() for _ in range(3)] == [([1, 2], False), ([3, 4], False), ([5], True)]


def test_a_broker_without_streams_reports_that_it_has_named_all(streams: Held) -> None:
    streams.clear()
    beats = Heartbeats(streams)

    assert [beats.beat() for _ in range(2)] == [([], True), ([], False)]


def test_one_heartbeat_describes_only_a_few_large_streams(streams: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    described = coordinator_pb2.UnknownStream()
    described.stream.schemas.add(arrow_schema=bytes(1000))
    monkeypatch.setattr(UnknownReport, "_described", lambda *_: described)
    monkeypatch.setattr(UnknownReport, "_is_being_written", lambda *_: False)
    told_bytes = 2 * described.ByteSize()
    report, told = UnknownReport(cast(Any, streams), lambda: 7, held_max=2, told_bytes=told_bytes), []
    for _ in range(7):
        request = coordinator_pb2.HeartbeatRequest()
        report.fill(request)
        named = [one.stream_id for one in request.held_streams]
        report.answered(coordinator_pb2.HeartbeatResponse(coordinator_epoch=7, unknown_stream_ids=named))
        told.append(len(request.unknown_streams))
    assert told == [0, 0, 0, 2, 2, 1, 0], "all are named first"


async def test_a_stream_is_described_again_when_it_changes_meanwhile(engine: Engine) -> None:
    info = stream_info()
    broker = Broker(engine, info)
    broker.append(chunk(1, 0))
    engine.run()
    report = HeartbeatReport(engine.streams, list, unknown=UnknownReport(engine.streams, lambda: 7))
    told: list[coordinator_pb2.UnknownStream] = []
    for _ in range(4):
        request = coordinator_pb2.HeartbeatRequest()
        report.fill(request)
        if len(request.unknown_streams) == 1 and not told:
            info.assignments_version += 1
            engine.streams.open(info, BROKER_ID)
        told += request.unknown_streams
        named = [one.stream_id for one in request.held_streams]
        report.answered(coordinator_pb2.HeartbeatResponse(coordinator_epoch=7, unknown_stream_ids=named))
        engine.run()

    assert [one.stream.assignments_version for one in told] == [info.assignments_version - 1, info.assignments_version]
    assert {(one.stream.name, one.records, one.bytes) for one in told} == {(info.name, 1, CHUNK_BYTES)}
