"""Writing to a broker: one status per chunk, and what is refused."""

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from kera.broker.arena import Arena
from kera.core.errors import InvalidArgument, OutOfSequence, Unavailable
from kera.core.ids import EARLIEST
from kera.core.rpc import api
from kera.core.rpc.wire import error_from_message
from kera.v1 import common_pb2
from tests.unit.broker.support import (
    BROKER_ID,
    CHUNK_BYTES,
    SLOT_BYTES,
    Broker,
    chunk,
    read_range,
    sequences_of,
    stream_info,
)


@pytest.fixture
async def broker(arena: Arena) -> Broker:
    """Owns streamlets 0 and 2 of stream 7, and not 1."""
    return Broker(arena, stream_info(owners=(BROKER_ID, BROKER_ID + 1, BROKER_ID)))


def codes(statuses: list[Any]) -> list[str]:
    """The error of each status; empty for one without."""
    return [status.error.code for status in statuses]


def stored(broker: Broker) -> list[int]:
    return sequences_of(broker.read(read_range(EARLIEST)))


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


async def test_every_method_of_the_broker_is_served(broker: Broker) -> None:
    assert tuple(broker.service) == api.BROKER_METHODS


# --- what is taken -----------------------------------------------------------------------------------------


async def test_each_chunk_has_a_status_that_says_where_it_is(broker: Broker) -> None:
    chunks = [chunk(1, sequence, record_count=10) for sequence in range(5)]
    statuses = broker.append(*chunks, chunk(1, streamlet_id=2))

    assert codes(statuses) == [""] * 6
    assert not any(status.HasField("error") for status in statuses)
    assert [(s.entry, s.group_id, s.segment_id, s.position, s.first_record) for s in statuses] == [
        (0, 1, 1, 0, 0),
        (0, 1, 1, 256, 10),
        (0, 1, 1, 512, 20),
        (0, 1, 1, 768, 30),
        (0, 1, 2, 0, 40),
        (0, 1, 1, 0, 0),
    ]
    assert {(s.durability, s.duplicate) for s in statuses} == {(common_pb2.DURABILITY_LEADER, False)}


@pytest.mark.parametrize("durability", [common_pb2.DURABILITY_UNSPECIFIED, common_pb2.DURABILITY_LEADER])
async def test_what_is_acknowledged_can_be_read_at_once(broker: Broker, durability: int) -> None:
    broker.append(chunk(1, 0), chunk(1, 1), durability=durability)

    assert stored(broker) == [0, 1]


async def test_a_repeat_in_a_later_request_and_in_the_same_one_is_told_its_first_place(broker: Broker) -> None:
    (first,) = broker.append(chunk(1, 0))
    again, second, second_again = broker.append(chunk(1, 0), chunk(1, 1), chunk(1, 1))

    assert [status.duplicate for status in (first, again, second, second_again)] == [False, True, False, True]
    assert (again.group_id, again.segment_id, again.position) == (1, 1, 0)
    assert (second_again.segment_id, second_again.position, second_again.first_record) == (1, 256, 1)
    assert stored(broker) == [0, 1]


async def test_a_request_without_chunks_has_no_statuses(broker: Broker) -> None:
    assert broker.append() == []


async def test_the_memory_of_a_request_may_be_used_again_when_the_handler_returns(broker: Broker) -> None:
    memory = bytearray(chunk(1, 0, fill=b"a"))
    broker.start(api.MULTI_WRITE_CHUNKS, api.MULTI_WRITE_CHUNKS.request(chunk_count=1), memory)
    memory[:] = bytes(len(memory))
    (piece,) = broker.read(read_range()).bulk

    assert bytes(piece[128:]) == b"a" * 128


# --- chunks that are refused, and their neighbours ---------------------------------------------------------


async def test_a_damaged_payload_fails_alone(broker: Broker) -> None:
    bad = damaged(chunk(2, 0), 200)
    statuses = broker.append(chunk(1, 0), bad, chunk(1, 1))

    assert codes(statuses) == ["", "corrupt_chunk", ""]
    assert error_from_message(statuses[1].error).attributes["offset"] == CHUNK_BYTES
    assert stored(broker) == [0, 1]


async def test_a_damaged_header_fails_itself_and_all_chunks_behind_it(broker: Broker) -> None:
    statuses = broker.append(chunk(1, 0), damaged(chunk(1, 1), 40), chunk(1, 2), chunk(1, 3))

    assert codes(statuses) == ["", "corrupt_chunk", "corrupt_chunk", "corrupt_chunk"]
    assert stored(broker) == [0]


@pytest.mark.parametrize("cut", [1, CHUNK_BYTES - 128, CHUNK_BYTES - 127, CHUNK_BYTES - 1])
async def test_a_chunk_that_is_cut_short_is_refused(broker: Broker, cut: int) -> None:
    statuses = broker.append(chunk(1, 0), chunk(1, 1)[:-cut])

    assert codes(statuses) == ["", "corrupt_chunk"]
    assert stored(broker) == [0]


async def test_a_chunk_that_claims_the_bytes_of_those_behind_it_fails_with_them(broker: Broker) -> None:
    statuses = broker.append(chunk(1, 0, size=1024)[:CHUNK_BYTES], chunk(2, 0))

    assert codes(statuses) == ["corrupt_chunk", "corrupt_chunk"]
    assert stored(broker) == []


@pytest.mark.parametrize("count", [0, 1, 2, 2**32 - 1])
async def test_no_more_statuses_are_made_than_the_bytes_have_room_for(broker: Broker, count: int) -> None:
    """A number that a client claims must not fill the broker's memory."""
    statuses = broker.append(damaged(chunk(1, 0), 40), chunk(1, 1), count=count)

    assert max(1, min(count, 2)) <= len(statuses) <= 2 * CHUNK_BYTES // 128
    assert set(codes(statuses)) == {"corrupt_chunk"}


@pytest.mark.parametrize(
    ("fields", "code", "attributes"),
    [
        ({"stream_id": 99}, "unknown_stream", {"stream_id": 99}),
        ({"streamlet_id": 3}, "streamlet_out_of_range", {"stream": "stream-7", "streamlet_id": 3, "streamlets": 3}),
        ({"streamlet_id": 1}, "not_owner", {"stream": "stream-7", "streamlet_id": 1}),
        ({"schema_id": 2}, "schema_mismatch", {"stream": "stream-7", "schema_id": 2}),
        ({"sequence": 5}, "out_of_sequence", None),
        ({"size": SLOT_BYTES + 64}, "record_too_large", {"chunk_bytes": SLOT_BYTES + 64, "limit": SLOT_BYTES}),
    ],
)
async def test_a_chunk_that_does_not_belong_here_fails_alone(
    broker: Broker, fields: dict[str, Any], code: str, attributes: dict[str, Any] | None
) -> None:
    statuses = broker.append(chunk(1, 0), chunk(2, **fields), chunk(1, 1))

    assert codes(statuses) == ["", code, ""]
    assert attributes is None or error_from_message(statuses[1].error).attributes == attributes
    assert stored(broker) == [0, 1]


async def test_a_gap_names_the_sequence_that_is_expected(broker: Broker) -> None:
    _, status = broker.append(chunk(1, 0), chunk(1, 2))
    error = error_from_message(status.error)

    assert isinstance(error, OutOfSequence)
    assert error.attributes["expected_sequence"] == 1


async def test_a_fenced_producer_is_refused(broker: Broker) -> None:
    statuses = broker.append(chunk(1, 0, producer_epoch=2), chunk(1, 0, producer_epoch=1))

    assert codes(statuses) == ["", "producer_fenced"]


async def test_a_chunk_that_has_a_place_already_is_refused(broker: Broker) -> None:
    broker.append(chunk(1, 0))
    (piece,) = broker.read(read_range()).bulk
    statuses = broker.append(bytes(piece), chunk(1, 1))

    assert codes(statuses) == ["invalid_argument", ""]


async def test_a_full_arena_refuses_chunks_and_not_requests(make_arena: Callable[..., Arena]) -> None:
    broker = Broker(make_arena(slots=1), stream_info())
    statuses = broker.append(*(chunk(1, sequence) for sequence in range(6)))

    assert codes(statuses) == ["", "", "", "", "arena_full", "out_of_sequence"]
    assert [status.error.retriable for status in statuses[4:]] == [True, True]


# --- durability --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("durability", "name"),
    [
        (common_pb2.DURABILITY_REPLICATED, "DURABILITY_REPLICATED"),
        (common_pb2.DURABILITY_PERSISTED, "DURABILITY_PERSISTED"),
        (99, "99"),  # of a newer client
        (-1, "-1"),
    ],
)
async def test_a_level_that_cannot_be_reached_is_refused_before_anything_is_stored(
    broker: Broker, durability: int, name: str
) -> None:
    with pytest.raises(InvalidArgument, match="level leader only") as raised:
        broker.append(chunk(1, 0), durability=durability)

    assert raised.value.attributes == {"durability": name}
    assert stored(broker) == []


# --- counters, and streams that come and go ----------------------------------------------------------------


async def test_counters_tell_what_has_happened(broker: Broker) -> None:
    broker.append(chunk(1, 0, record_count=5), chunk(1, 0), chunk(1, 7), damaged(chunk(1, 1), 40), chunk(1, 2))
    stored(broker)
    counters = broker.counters

    assert (counters.write_requests, counters.chunks_appended, counters.records_appended) == (1, 1, 5)
    assert (counters.bytes_appended, counters.chunks_duplicate, counters.chunks_refused) == (CHUNK_BYTES, 1, 3)
    assert (counters.read_requests, counters.bytes_read) == (1, CHUNK_BYTES)


async def test_a_stream_is_opened_written_and_dropped(broker: Broker) -> None:
    request = api.OPEN_STREAMLETS.request(stream=stream_info(8))
    await broker.ask(api.OPEN_STREAMLETS, request)
    assert codes(broker.append(chunk(1, 0, stream_id=8))) == [""]
    await broker.ask(api.OPEN_STREAMLETS, request)
    assert codes(broker.append(chunk(1, 1, stream_id=8))) == [""], "opened again, and nothing forgotten"

    await broker.ask(api.DROP_STREAM, api.DROP_STREAM.request(stream_id=8))

    assert codes(broker.append(chunk(1, 2, stream_id=8))) == ["unknown_stream"]
    assert broker.arena.free_slots == broker.arena.slot_count


async def test_a_broker_that_does_not_know_its_streams_yet_asks_to_try_again(arena: Arena) -> None:
    """Told that the stream is unknown, a producer who was here before the broker's restart would give up."""
    broker = Broker(arena)
    for method in api.BROKER_METHODS:
        if method not in {api.OPEN_STREAMLETS, api.DROP_STREAM}:
            with pytest.raises(Unavailable) as raised:
                broker.start(method, method.request(), chunk(1, 0))
            assert raised.value.retriable
    broker.broker.registered(BROKER_ID, [stream_info()])

    reply = broker.start(api.MULTI_WRITE_CHUNKS, api.MULTI_WRITE_CHUNKS.request(chunk_count=1), chunk(1, 0))
    assert codes(reply.message.statuses) == [""]


@pytest.mark.parametrize("dropped", [False, True])
async def test_what_the_coordinator_asks_before_the_registration_is_answered_is_done_after_it(
    arena: Arena, dropped: bool
) -> None:
    broker = Broker(arena)
    ask = functools.partial(asyncio.ensure_future)
    opening = ask(broker.ask(api.OPEN_STREAMLETS, api.OPEN_STREAMLETS.request(stream=stream_info(8))))
    dropping = ask(broker.ask(api.DROP_STREAM, api.DROP_STREAM.request(stream_id=7))) if dropped else None
    await asyncio.sleep(0)
    assert len(broker.streams) == 0

    broker.broker.registered(BROKER_ID, [stream_info(7)])  # the answer is older than what was asked
    await opening
    if dropping is not None:
        await dropping

    assert [stream.stream_id for stream in broker.streams] == ([8] if dropped else [7, 8])
