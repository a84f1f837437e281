"""Truncation, and cursors that consumer groups commit."""

import asyncio
import errno
from typing import Any

import pytest

from kera.broker.serving.cursors import CHANGES_MAX
from kera.broker.serving.limits import CONSUMER_GROUP_BYTES_MAX, ServingLimits
from kera.broker.storage.jobs import IndexJob
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import InvalidArgument
from kera.core.rpc import api
from kera.core.rpc.wire import error_from_message
from kera.v1 import broker_pb2
from tests.unit.broker.support import (
    BROKER_ID,
    CHUNK_BYTES,
    SLOT_BYTES,
    STREAM_ID,
    Broker,
    Engine,
    chunk,
    cursor,
    limited,
    read_range,
    stream_info,
)


@pytest.fixture(params=["memory", "disk"])
async def broker(request: pytest.FixtureRequest, engine: Engine, limits: ServingLimits) -> Broker:
    """Eleven chunks in segments (1, 1), (1, 2) and (2, 1); the closed segments may be on disk only."""
    broker = Broker(engine, stream_info(owners=(BROKER_ID, BROKER_ID + 1)), limits=limits)
    broker.paused = True
    broker.append(*(chunk(1, sequence) for sequence in range(11)))
    if request.param == "disk":
        engine.run()
        for slot in [*engine.fill_memory(), engine.memory.slots.allocate(), engine.memory.slots.allocate()]:
            slot.retire()
    broker.paused = False
    return broker


def entry_of(broker: Broker) -> Any:
    return broker.streams.get(STREAM_ID).streamlet(0).entries[0]


async def truncate(broker: Broker, *cursors: Any) -> Any:
    request = api.TRUNCATE_STREAMLETS.request(cursors=cursors)
    return (await broker.ask(api.TRUNCATE_STREAMLETS, request)).results


async def commit(broker: Broker, *cursors: Any, consumer_group: str = "a") -> Any:
    request = api.COMMIT_CURSORS.request(consumer_group=consumer_group, cursors=cursors)
    return (await broker.ask(api.COMMIT_CURSORS, request)).results


def place(of: Any) -> Position:
    return Position(of.group_id, of.segment_id, of.position)


def in_index(broker: Broker) -> list[tuple[int, int]]:
    broker.engine.run()
    return [(each.group_id, each.segment_id) for each, _ in broker.engine.index.segments((STREAM_ID, 0, 0))]


# --- truncation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "start", "record"),
    [
        (EARLIEST, Position(1, 1, 0), 0),
        (Position(1, 1, 0), Position(1, 1, 0), 0),
        (Position(1, 1, CHUNK_BYTES), Position(1, 1, CHUNK_BYTES), 1),
        (Position(1, 2, 0), Position(1, 2, 0), 4),
        (Position(1, 2, 3 * CHUNK_BYTES), Position(1, 2, 3 * CHUNK_BYTES), 7),
        (Position(2, 1, 0), Position(2, 1, 0), 8),
        (Position(2, 1, 3 * CHUNK_BYTES), Position(2, 1, 3 * CHUNK_BYTES), 11),
    ],
)
async def test_a_truncation_removes_records_before_its_cursor(
    broker: Broker, position: Position, start: Position, record: int
) -> None:
    (result,) = await truncate(broker, cursor(position))

    assert (result.error.code, place(result.start)) == ("", start)
    assert (entry_of(broker).start, entry_of(broker).start_record) == (start, record)
    kept = [key for key in ((1, 1), (1, 2)) if key >= start[:2]]
    assert in_index(broker) == kept
    (described,) = (await broker.ask(api.DESCRIBE_STREAMLETS, api.DESCRIBE_STREAMLETS.request(stream_id=7))).streamlets
    (entry,) = described.entries
    assert (place(entry.start), entry.first_record, entry.next_record) == (start, record, 11)
    assert entry.length_bytes == (11 - record) * CHUNK_BYTES


@pytest.mark.parametrize("session_id", [0, 1])
async def test_a_read_of_the_oldest_record_reports_its_position_in_its_segment(broker: Broker, session_id: int) -> None:
    await truncate(broker, cursor(Position(1, 1, CHUNK_BYTES)))
    for start, begins_at in ((EARLIEST, CHUNK_BYTES), (Position(1, 1, CHUNK_BYTES), 0), (Position(1, 2, 0), 0)):
        request = broker_pb2.MultiReadChunksRequest(ranges=[read_range(start)], session_id=session_id)
        (result,) = (await broker.ask(api.MULTI_READ_CHUNKS, request)).results
        assert (result.length_bytes > 0, result.begins_at) == (True, begins_at)


async def test_truncating_again_or_to_a_removed_position_is_no_error(broker: Broker) -> None:
    await truncate(broker, cursor(Position(1, 2, 0)))
    results = await truncate(broker, cursor(Position(1, 1, CHUNK_BYTES)), cursor(Position(1, 2, 0)))

    assert [(result.error.code, place(result.start)) for result in results] == [("", Position(1, 2, 0))] * 2


@pytest.mark.parametrize(
    ("at", "code"),
    [
        (cursor(Position(1, 0, 0)), "invalid_cursor"),
        (cursor(Position(2, 0, 0)), "invalid_cursor"),
        (cursor(Position(1, 1, 100)), "invalid_cursor"),
        (cursor(Position(1, 2, 100)), "invalid_cursor"),
        (cursor(Position(2, 1, SLOT_BYTES)), "invalid_cursor"),
        (cursor(Position(9, 1, 0)), "invalid_cursor"),
        (cursor(Position(1, 2, 0), stream_id=99), "unknown_stream"),
        (cursor(Position(1, 2, 0), streamlet=1), "not_owner"),
        (cursor(Position(1, 2, 0), entry=1), "invalid_cursor"),
    ],
)
async def test_a_truncation_at_an_invalid_cursor_removes_nothing_and_fails_alone(
    broker: Broker, at: Any, code: str
) -> None:
    bad, good = await truncate(broker, at, cursor(Position(1, 1, CHUNK_BYTES)))

    assert (bad.error.code, good.error.code) == (code, "")
    assert entry_of(broker).start == Position(1, 1, CHUNK_BYTES)


async def test_a_truncation_is_answered_once_it_is_durable(broker: Broker) -> None:
    broker.paused = True
    asked = asyncio.ensure_future(truncate(broker, cursor(Position(2, 1, 0))))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not asked.done()
    broker.resume()
    await asked

    record = broker.engine.index.entry(entry_of(broker).log_id)
    assert record is not None
    assert record.start == Position(2, 1, 0)
    assert list(broker.engine.store.physical_ids()) == []


@limited(load_wait_ms=10)
@pytest.mark.parametrize("broker", ["disk"], indirect=True)
@pytest.mark.timeout(20)
async def test_a_truncation_that_waits_too_long_for_memory_gets_a_retriable_error(broker: Broker) -> None:
    slots = broker.engine.fill_memory()
    late, good = await truncate(broker, cursor(Position(1, 2, CHUNK_BYTES)), cursor(Position(1, 2, 0)))
    assert (late.error.code, late.error.retriable, good.error.code) == ("unavailable", True, "")
    for slot in slots:
        slot.retire()
    (result,) = await truncate(broker, cursor(Position(1, 2, CHUNK_BYTES)))

    assert (result.error.code, place(result.start)) == ("", Position(1, 2, CHUNK_BYTES))


async def test_a_truncated_group_is_gone_and_later_groups_are_available(broker: Broker) -> None:
    await truncate(broker, cursor(Position(2, 1, 0)))
    request = api.GET_AVAILABLE_GROUPS.request(stream_id=STREAM_ID)
    answer = await broker.ask(api.GET_AVAILABLE_GROUPS, request)

    assert (answer.first_group_id, answer.last_group_id) == (2, 2)


# --- cursors -----------------------------------------------------------------------------------------------


async def test_a_commit_is_answered_once_its_cursor_is_on_disk(broker: Broker) -> None:
    broker.paused = True
    asked = asyncio.ensure_future(commit(broker, cursor(Position(1, 2, CHUNK_BYTES))))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not asked.done()
    broker.resume()
    (result,) = await asked

    assert (result.error.code, place(result.start)) == ("", Position(1, 1, 0))
    assert broker.engine.index.cursors(entry_of(broker).log_id) == {"a": Position(1, 2, CHUNK_BYTES)}


async def test_the_cursors_of_a_request_are_written_to_disk_together(broker: Broker) -> None:
    broker.paused = True
    asked = asyncio.ensure_future(commit(broker, cursor(Position(1, 1, 0)), cursor(Position(1, 2, 0))))
    for _ in range(10):
        await asyncio.sleep(0)
    jobs = broker.engine.memory.plan()
    (change,) = [job for job in jobs if isinstance(job, IndexJob)]
    assert len(change.done) == 2
    for job in jobs:
        broker.engine.perform(job)
    broker.resume()

    assert [result.error.code for result in await asked] == ["", ""]
    assert entry_of(broker).committed == {"a": Position(1, 2, 0)}


async def test_each_consumer_group_has_its_own_cursor(broker: Broker) -> None:
    await commit(broker, cursor(Position(1, 2, 0)), consumer_group="a")
    await commit(broker, cursor(Position(1, 1, CHUNK_BYTES)), consumer_group="b")
    await commit(broker, cursor(Position(2, 1, 0)), consumer_group="a")

    assert entry_of(broker).committed == {"a": Position(2, 1, 0), "b": Position(1, 1, CHUNK_BYTES)}


async def test_a_cursor_beyond_the_durable_head_is_refused(broker: Broker) -> None:  # invariant 9
    end = entry_of(broker).end
    beyond, at_the_end = await commit(broker, cursor(end._replace(offset=end.offset + 1)), cursor(end))

    assert error_from_message(beyond.error).code == "invalid_argument"
    assert at_the_end.error.code == ""
    assert entry_of(broker).committed == {"a": end}


async def test_committing_the_earliest_position_stores_no_cursor(broker: Broker) -> None:
    (result,) = await commit(broker, cursor(EARLIEST))

    assert (result.error.code, entry_of(broker).committed) == ("", {})


async def test_a_cursor_that_cannot_be_committed_fails_alone(broker: Broker) -> None:
    wrong = (cursor(EARLIEST, stream_id=99), cursor(EARLIEST, entry=1), cursor(Position(1, 0, 0)))
    results = await commit(broker, *wrong, cursor(Position(1, 2, 0)))

    assert [result.error.code for result in results] == ["unknown_stream", "invalid_cursor", "invalid_cursor", ""]


@pytest.mark.parametrize("consumer_group", ["", "a" * (CONSUMER_GROUP_BYTES_MAX + 1), "ä" * CONSUMER_GROUP_BYTES_MAX])
async def test_an_empty_or_too_long_name_of_a_consumer_group_is_refused(broker: Broker, consumer_group: str) -> None:
    with pytest.raises(InvalidArgument, match=str(CONSUMER_GROUP_BYTES_MAX)):
        await commit(broker, cursor(Position(1, 1, 0)), consumer_group=consumer_group)


@limited(consumer_groups_max=2)
async def test_the_number_of_consumer_groups_is_limited(broker: Broker) -> None:
    codes = [
        (await commit(broker, cursor(Position(1, 1, 0)), consumer_group=name))[0].error.code
        for name in ("a", "b", "c", "a")
    ]

    assert codes == ["", "", "invalid_argument", ""]


async def test_a_commit_fails_when_the_disk_does_not_take_the_cursor(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    broker.engine.run()
    with monkeypatch.context() as context:
        context.setattr(broker.engine.index, "commit", fail)
        (result,) = await commit(broker, cursor(Position(1, 1, 0)))

    assert result.error.code == "disk_failed"


@pytest.mark.parametrize("method", [api.COMMIT_CURSORS, api.TRUNCATE_STREAMLETS], ids=lambda method: method.name)
async def test_a_request_with_too_many_cursors_is_refused(broker: Broker, method: Any) -> None:
    request = method.request(cursors=[cursor(EARLIEST)] * (CHANGES_MAX + 1))
    if method is api.COMMIT_CURSORS:
        request.consumer_group = "reader"

    with pytest.raises(InvalidArgument, match=f"at most {CHANGES_MAX} cursors"):
        await broker.ask(method, request)
