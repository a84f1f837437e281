"""Read sessions of a broker: which ranges an answer has, steps out of order, bounds, cleaning up."""

import asyncio
from typing import Any

import pytest

from kera.broker.serving.fetch import READ_RANGES_AT_ONCE
from kera.broker.serving.limits import PushLimits, ServingLimits
from kera.core.base.ids import EARLIEST, Position
from kera.core.base.turns import Turns
from kera.core.errors import InvalidArgument, SessionLost
from kera.core.rpc import Reply, api
from kera.core.rpc.method import Peer
from kera.v1 import broker_pb2
from tests.unit.broker.support import (
    BROKER_ID,
    CHUNK_BYTES,
    STREAM_ID,
    Broker,
    Engine,
    chunk,
    limited,
    next_of,
    read_range,
    sequences_of,
    stream_info,
)

MINUTE_MS = 60_000
SESSION = 5


@pytest.fixture
async def broker(engine: Engine, limits: ServingLimits) -> Broker:
    """Owns streamlets 0 to 3 of stream 7; not streamlet 4."""
    return Broker(engine, stream_info(owners=(BROKER_ID,) * 4 + (BROKER_ID + 1,)), limits=limits)


def fill(broker: Broker, count: int, streamlet: int = 0, start: int = 0, **fields: Any) -> None:
    chunks = [chunk(10 + streamlet, number, streamlet_id=streamlet, **fields) for number in range(start, start + count)]
    assert not any(status.error.code for status in broker.append(*chunks))


def handled(handle: int, start: Position = EARLIEST, end: Position | None = None, **where: int) -> broker_pb2.ReadRange:
    wanted = read_range(start, end, **where)
    wanted.handle = handle
    return wanted


def step(broker: Broker, number: int, *ranges: broker_pb2.ReadRange, peer: Peer | None = None, **fields: Any) -> Any:
    """Start a step of the session, and return the result of the handler."""
    request = broker_pb2.MultiReadChunksRequest(
        session_id=fields.pop("session_id", SESSION), step=number, ranges=ranges, **fields
    )
    return broker.start(api.MULTI_READ_CHUNKS, request, peer=peer)


async def answered(result: Any) -> Reply[Any]:
    if isinstance(result, Reply):
        return result
    async with asyncio.timeout(20):
        reply: Reply[Any] = await result
        return reply


def told(reply: Reply[Any]) -> list[tuple[int, int, bool]]:
    """The handle, the length and whether the range has ended, of each result."""
    return [(each.handle, each.length_bytes, each.ended) for each in reply.message.results]


def watchers(broker: Broker) -> int:
    streamlets = [broker.streams.get(STREAM_ID).streamlet(number) for number in range(4)]
    return sum(len(entry.waiters) + len(entry.readers) for each in streamlets for entry in each.entries)


async def test_an_answer_has_only_ranges_with_new_chunks(broker: Broker) -> None:
    fill(broker, 2, 1)
    reply = step(broker, 0, *(handled(number, streamlet=number) for number in range(4)), wait_ms=MINUTE_MS)
    assert told(reply) == [(1, 2 * CHUNK_BYTES, False)]
    assert reply.message.session_kept
    fill(broker, 1, 3)
    fill(broker, 1, 1, start=2)
    reply = step(broker, 1, wait_ms=MINUTE_MS)
    assert told(reply) == [(3, CHUNK_BYTES, False), (1, CHUNK_BYTES, False)], "in the order in which they came"
    assert next_of(reply.message.results[1]) == Position(1, 1, 3 * CHUNK_BYTES)
    assert told(step(broker, 2)) == []


async def test_a_step_waits_until_any_range_gets_a_chunk(broker: Broker) -> None:
    waiting = asyncio.ensure_future(step(broker, 0, handled(1), handled(2, streamlet=1), wait_ms=MINUTE_MS))
    await asyncio.sleep(0)
    fill(broker, 1, 1)
    assert told(await answered(waiting)) == [(2, CHUNK_BYTES, False)]
    reply = await answered(step(broker, 1, wait_ms=1))
    assert told(reply) == [], "and no longer than it was asked to"
    fill(broker, 1)
    assert told(await answered(step(broker, 2, wait_ms=MINUTE_MS))) == [(1, CHUNK_BYTES, False)]


async def test_steps_add_and_remove_ranges(broker: Broker) -> None:
    fill(broker, 1, 0)
    fill(broker, 1, 1)
    assert told(step(broker, 0, handled(1))) == [(1, CHUNK_BYTES, False)]
    assert told(step(broker, 1, handled(2, streamlet=1), removed=[1, 99])) == [(2, CHUNK_BYTES, False)]
    fill(broker, 1, 0, start=1)
    assert told(step(broker, 2)) == []
    assert told(step(broker, 3, handled(1, Position(1, 1, CHUNK_BYTES)))) == [(1, CHUNK_BYTES, False)]


async def test_ranges_share_the_byte_budget_in_turn(broker: Broker) -> None:
    for number in range(3):
        fill(broker, 3, number)
    ranges = [handled(number, streamlet=number) for number in range(3)]
    given = [told(step(broker, 0, *ranges, bytes_max=2 * CHUNK_BYTES))]
    given += [told(step(broker, number, bytes_max=2 * CHUNK_BYTES)) for number in range(1, 6)]
    assert [handle for answer in given for handle, _, _ in answer] == [0, 1, 2, 0, 1, 2]
    assert sum(length for answer in given for _, length, _ in answer) == 9 * CHUNK_BYTES


async def test_a_chunk_that_does_not_fit_is_the_first_of_the_next_answer(broker: Broker) -> None:
    fill(broker, 1, 0, size=512)
    fill(broker, 1, 1, size=2048)
    fill(broker, 1, 2, size=512)
    ranges = [handled(number, streamlet=number) for number in range(3)]
    assert told(step(broker, 0, *ranges, bytes_max=1024)) == [(0, 512, False)]
    assert told(step(broker, 1, bytes_max=1024)) == [(1, 2048, False)]
    assert told(step(broker, 2, bytes_max=1024)) == [(2, 512, False)]


async def test_a_range_that_reaches_its_end_leaves_the_session(broker: Broker) -> None:
    fill(broker, 3)
    end = Position(1, 1, 2 * CHUNK_BYTES)
    assert told(step(broker, 0, handled(1, end=end), handled(2, end, end))) == [
        (1, 2 * CHUNK_BYTES, True),
        (2, 0, True),
    ]
    assert watchers(broker) == 0
    assert told(step(broker, 1, handled(1, end))) == [(1, CHUNK_BYTES, False)], "its handle is free"


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (handled(1, stream_id=99), "unknown_stream"),
        (handled(1, streamlet=9), "streamlet_out_of_range"),
        (handled(1, streamlet=4), "not_owner"),
        (handled(1, entry=1), "invalid_cursor"),
        (handled(1, Position(1, 1, 64)), "invalid_cursor"),
    ],
)
async def test_a_range_that_cannot_be_read_ends_alone(broker: Broker, wanted: Any, code: str) -> None:
    fill(broker, 1)
    reply = step(broker, 0, handled(7), wanted, handled(8))
    assert [(each.handle, each.error.code, each.ended) for each in reply.message.results] == [
        (7, "", False),
        (1, code, True),
        (8, "", False),
    ]
    assert reply.message.results[1].next == wanted.start
    assert told(step(broker, 1)) == []


async def test_a_waiting_step_gets_an_error_when_its_stream_is_dropped(broker: Broker) -> None:
    waiting = asyncio.ensure_future(step(broker, 0, handled(1), wait_ms=MINUTE_MS))
    await asyncio.sleep(0)
    await broker.ask(api.DROP_STREAM, api.DROP_STREAM.request(stream_id=STREAM_ID))
    (result,) = (await answered(waiting)).message.results
    assert (result.error.code, result.ended) == ("unknown_stream", True)


@pytest.mark.parametrize("wrong", [1, 2, 4, 2**32 - 1])
async def test_a_step_out_of_order_ends_the_session(broker: Broker, wrong: int) -> None:
    fill(broker, 1)
    for number in range(3):
        step(broker, number, *([handled(1)] if number == 0 else []))
    with pytest.raises(SessionLost, match="step 2"):
        step(broker, wrong)
    assert watchers(broker) == 0
    with pytest.raises(SessionLost, match="there is none"):
        step(broker, 3)
    assert told(step(broker, 0, handled(1))) == [(1, CHUNK_BYTES, False)], "anew, from the place that the reader says"


async def test_a_waiting_step_fails_when_the_session_is_restarted(broker: Broker) -> None:
    waiting = asyncio.ensure_future(step(broker, 0, handled(1), wait_ms=MINUTE_MS))
    await asyncio.sleep(0)
    again = asyncio.ensure_future(step(broker, 0, handled(1), wait_ms=MINUTE_MS))
    with pytest.raises(SessionLost, match="restarted the read session"):
        await answered(waiting)
    fill(broker, 1)
    assert told(await answered(again)) == [(1, CHUNK_BYTES, False)]


async def test_a_step_before_the_answer_to_the_last_one_ends_the_session(broker: Broker) -> None:
    waiting = asyncio.ensure_future(step(broker, 0, handled(1), wait_ms=MINUTE_MS))
    await asyncio.sleep(0)
    with pytest.raises(SessionLost):
        step(broker, 1)
    with pytest.raises(SessionLost):
        await answered(waiting)


async def test_two_ranges_with_one_handle_are_refused_and_leave_no_session(broker: Broker) -> None:
    with pytest.raises(InvalidArgument, match="handle 3"):
        step(broker, 0, handled(3), handled(3, streamlet=1))
    assert (watchers(broker), broker.broker.sessions.ranges) == (0, 0)
    with pytest.raises(SessionLost):
        step(broker, 1)


async def test_sessions_of_different_numbers_or_connections_are_independent(broker: Broker) -> None:
    fill(broker, 1)
    other = Peer("tcp", "other")
    for fields in ({}, {"session_id": 6}, {"peer": other}):
        assert told(step(broker, 0, handled(1), **fields)) == [(1, CHUNK_BYTES, False)]
    assert broker.broker.sessions.ranges == 3
    other.closed()
    assert broker.broker.sessions.ranges == 2
    assert told(step(broker, 1, session_id=6)) == told(step(broker, 1)) == []


@limited(forgotten_at_once=2)
async def test_a_closed_connection_leaves_no_session_behind(broker: Broker) -> None:
    peer = Peer("tcp", "gone")
    waiting = asyncio.ensure_future(
        step(broker, 0, *(handled(number, streamlet=number % 4) for number in range(9)), wait_ms=MINUTE_MS, peer=peer)
    )
    await asyncio.sleep(0)
    assert watchers(broker) > 0
    peer.closed()
    with pytest.raises(SessionLost):
        await answered(waiting)
    for _ in range(5):
        await asyncio.sleep(0)
    assert (watchers(broker), broker.broker.sessions.ranges) == (0, 0)


@pytest.mark.parametrize(
    "limits", [ServingLimits(connection_ranges_max=1), ServingLimits(ranges_max=1), ServingLimits(sessions_max=1)]
)
async def test_a_session_beyond_the_bounds_is_answered_and_not_kept(broker: Broker) -> None:
    fill(broker, 1)
    assert step(broker, 0, handled(1)).message.session_kept
    for _ in range(2):
        reply = step(broker, 0, handled(1), session_id=6)
        assert (told(reply), reply.message.session_kept) == ([(1, CHUNK_BYTES, False)], False)
        with pytest.raises(SessionLost):
            step(broker, 1, session_id=6)
    assert broker.broker.sessions.ranges == 1
    assert told(step(broker, 1)) == []


@limited(session_ranges_max=2)
async def test_a_session_that_grows_beyond_the_bounds_ends(broker: Broker) -> None:
    step(broker, 0, handled(1), handled(2))
    with pytest.raises(SessionLost, match="at most 2"):
        step(broker, 1, handled(3))
    assert (watchers(broker), broker.broker.sessions.ranges) == (0, 0)


@limited(results_max=3)
async def test_an_answer_has_a_limited_number_of_ranges_and_the_next_ones_have_the_rest(broker: Broker) -> None:
    fill(broker, 1)
    step(broker, 0, *(handled(number, Position(1, 1, CHUNK_BYTES)) for number in range(7)))
    await broker.ask(api.DROP_STREAM, api.DROP_STREAM.request(stream_id=STREAM_ID))
    found = [told(step(broker, number, wait_ms=MINUTE_MS)) for number in (1, 2, 3)]
    assert sorted(handle for answer in found for handle, _, ended in answer if ended) == list(range(7))
    assert list(map(len, found)) == [3, 3, 1]


async def test_steps_with_few_ranges_are_handled_at_once_and_those_with_many_in_slices(engine: Engine) -> None:
    broker = Broker(engine, stream_info(), turns=Turns(0.0, now=lambda: 0.0))  # a slice is over after one range
    fill(broker, 1)
    few, many = READ_RANGES_AT_ONCE, 2 * READ_RANGES_AT_ONCE
    assert sequences_of(step(broker, 0, *map(handled, range(few)))) == [0] * few
    assert broker.broker.turns.slices == 0
    reply = await answered(step(broker, 0, *map(handled, range(many))))
    assert [handle for handle, _, _ in told(reply)] == list(range(many))
    fill(broker, 1, start=1)
    assert sequences_of(await answered(step(broker, 1))) == [1] * many
    assert broker.broker.turns.slices >= 3 * many, "one for each new range, and for each range that is read"


@pytest.mark.timeout(60)
async def test_ranges_read_all_their_chunks_from_disk_a_few_ranges_at_a_time(engine: Engine) -> None:
    broker = Broker(engine, stream_info())
    fill(broker, 17)
    engine.run()
    for slot in engine.fill_memory() + [engine.memory.slots.allocate() for _ in range(4)]:
        slot.retire()
    ranges = 2 * PushLimits().loads_at_once
    given: dict[int, list[int]] = {number: [] for number in range(ranges)}
    broker.paused = True
    waiting = asyncio.ensure_future(step(broker, 0, *map(handled, range(ranges))))
    await asyncio.sleep(0)
    assert not waiting.done(), "it waits for the disk, though it was told not to wait for what is not there"
    assert sum(map(len, engine.memory.loads._waiters.values())) == PushLimits().loads_at_once
    broker.resume()
    reply, number = await answered(waiting), 0
    while min(map(len, given.values())) < 17:
        pieces = iter(reply.bulk)
        for result in reply.message.results:
            assert not result.HasField("error")
            left = result.length_bytes
            while left > 0:
                piece = next(pieces)
                left -= len(piece)
                given[result.handle] += sequences_of(Reply(reply.message, [piece]))
        number += 1
        reply = await answered(step(broker, number))
    assert set(map(tuple, given.values())) == {tuple(range(17))}
