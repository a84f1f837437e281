"""Stored bytes of each principal's streams: reports to the coordinator, and refusal once a principal is full."""

from __future__ import annotations

import pytest

from kera.broker.heartbeat import HeartbeatReport
from kera.broker.ownership.stored import StoredBytes
from kera.core.base.ids import Position
from kera.core.errors import QuotaExceeded
from kera.core.rpc import api
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.broker.support import BROKER_ID, STREAM_ID, Broker, Engine, chunk, cursor, stream_info

ALICE = "user:alice"


def info(*, stream_id: int = STREAM_ID, name: str = "test", created_by: str = ALICE) -> common_pb2.StreamInfo:
    made: common_pb2.StreamInfo = stream_info(owners=(BROKER_ID,) * 3)
    made.stream_id, made.name, made.created_by = stream_id, name, created_by
    return made


@pytest.fixture
async def broker(engine: Engine) -> Broker:
    return Broker(engine, info())


def filled(report: HeartbeatReport | StoredBytes) -> coordinator_pb2.HeartbeatRequest:
    request = coordinator_pb2.HeartbeatRequest()
    report.fill(request)
    return request


def told(request: coordinator_pb2.HeartbeatRequest) -> dict[str, int]:
    return {each.principal: each.bytes for each in request.stored}


def full(*principals: str, incomplete: bool = False) -> coordinator_pb2.HeartbeatResponse:
    return coordinator_pb2.HeartbeatResponse(
        full_principals=[
            coordinator_pb2.FullPrincipal(principal=each, stored_bytes=2000, quota_bytes=1500) for each in principals
        ],
        full_principals_incomplete=incomplete,
    )


async def test_appended_bytes_count_with_the_next_heartbeat(broker: Broker) -> None:
    report = HeartbeatReport(broker.streams)
    assert told(filled(report)) == {ALICE: 0}
    broker.append(*(chunk(1, sequence, streamlet_id=streamlet) for streamlet in range(2) for sequence in range(3)))
    assert told(filled(report)) == {ALICE: 6 * 1024}
    assert told(filled(report)) == {ALICE: 6 * 1024}


async def test_streams_without_a_creator_count_for_no_principal(broker: Broker) -> None:
    broker.streams.open(info(stream_id=STREAM_ID + 1, name="other", created_by=""), BROKER_ID)
    broker.append(chunk(1, 0, stream_id=STREAM_ID + 1))
    report = HeartbeatReport(broker.streams)
    for _ in range(2):
        assert told(filled(report)) == {ALICE: 0}


async def test_removed_bytes_no_longer_count(broker: Broker) -> None:
    report = HeartbeatReport(broker.streams)
    broker.append(*(chunk(1, sequence) for sequence in range(3)))
    assert told(filled(report)) == {ALICE: 3 * 1024}
    await broker.ask(api.TRUNCATE_STREAMLETS, api.TRUNCATE_STREAMLETS.request(cursors=[cursor(Position(1, 1, 2048))]))
    assert told(filled(report)) == {ALICE: 1024}
    broker.streams.drop(STREAM_ID)
    assert told(filled(report)) == {}


async def test_one_heartbeat_counts_a_limited_number_of_streamlets(broker: Broker) -> None:
    """Reports are marked incomplete until all were counted once; later appends count at once."""
    broker.append(*(chunk(1, 0, streamlet_id=streamlet) for streamlet in range(3)))
    stored = StoredBytes(broker.streams, streamlets_at_once=2)
    first, second = filled(stored), filled(stored)
    assert (first.stored_incomplete, told(first)) == (True, {})
    assert (second.stored_incomplete, told(second)) == (False, {ALICE: 3 * 1024})
    stored.appended(broker.streams.get(STREAM_ID), 1024)
    assert told(filled(stored)) == {ALICE: 4 * 1024}


async def test_one_heartbeat_makes_only_one_round_over_the_streamlets(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = StoredBytes(broker.streams)
    notes = 0

    def note(*_: object) -> None:
        nonlocal notes
        notes += 1

    monkeypatch.setattr(stored, "_note", note)
    filled(stored)
    assert notes == 1


async def test_streams_of_a_full_principal_refuse_writes(broker: Broker) -> None:
    known = broker.streams.full
    changes = 0

    def changed() -> None:
        nonlocal changes
        changes += 1

    known.changed.listen(changed)
    stream = broker.streams.get(STREAM_ID)
    report = HeartbeatReport(broker.streams)
    report.answered(full("user:bob"))
    known.check(stream)
    report.answered(full(ALICE))
    with pytest.raises(QuotaExceeded) as raised:
        known.check(stream)
    assert raised.value.message == (
        f"user:alice has stored 2000 bytes in its streams, as {stream.name!r}, and its quota of stored bytes is 1500;"
        " an administrator can raise it: kera quota set alice --stored-bytes MORE"
    )
    assert raised.value.attributes == {"quota": "stored_bytes", "value": 1500, "principal": ALICE}
    assert not raised.value.retriable
    report.answered(full(ALICE))
    report.answered(full("user:bob", incomplete=True))
    with pytest.raises(QuotaExceeded):
        known.check(stream)
    report.answered(full())
    known.check(stream)
    assert changes == 4
