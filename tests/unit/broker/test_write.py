"""Writing to a broker: one status per chunk, and which chunks are refused."""

import asyncio
import errno
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from kera.broker.serving.limits import ServingLimits
from kera.broker.storage.jobs import RETRY_MS
from kera.core.base.ids import EARLIEST, PRODUCER_IDS, Position
from kera.core.errors import InvalidArgument, Unavailable
from kera.core.format.chunk import HEADER_BYTES
from kera.core.rpc import Reply, api
from kera.core.rpc.limits import REQUEST_CHUNKS_MAX
from kera.core.rpc.wire import error_from_message
from kera.v1 import common_pb2
from tests.unit.broker.support import (
    BROKER_ID,
    CHUNK_BYTES,
    SLOT_BYTES,
    Broker,
    Engine,
    chunk,
    limited,
    read_range,
    sequences_of,
    stream_info,
)

PERSISTED = common_pb2.DURABILITY_PERSISTED


@pytest.fixture
async def broker(engine: Engine) -> Broker:
    """Owns streamlets 0 and 2 of stream 7, and not 1."""
    return Broker(engine, stream_info(owners=(BROKER_ID, BROKER_ID + 1, BROKER_ID)))


def codes(statuses: Iterable[Any]) -> list[str]:
    """The error of each status; empty for one without."""
    return [status.error.code for status in statuses]


def stored(broker: Broker) -> list[int]:
    return sequences_of(broker.read(read_range(EARLIEST)))


def damaged(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


async def test_every_method_of_the_broker_is_served(broker: Broker) -> None:
    assert set(broker.service) == set(api.BROKER_METHODS)


# --- accepted chunks ---------------------------------------------------------------------------------------


async def test_each_chunk_has_a_status_with_its_place(broker: Broker) -> None:
    chunks = [chunk(1, sequence, record_count=10) for sequence in range(5)]
    statuses = broker.append(*chunks, chunk(1, streamlet_id=2))

    assert codes(statuses) == [""] * 6
    assert not any(status.HasField("error") for status in statuses)
    assert [(s.entry, s.group_id, s.segment_id, s.position, s.first_record) for s in statuses] == [
        (0, 1, 1, 0, 0),
        (0, 1, 1, 1024, 10),
        (0, 1, 1, 2048, 20),
        (0, 1, 1, 3072, 30),
        (0, 1, 2, 0, 40),
        (0, 1, 1, 0, 0),
    ]
    assert {(s.durability, s.duplicate) for s in statuses} == {(common_pb2.DURABILITY_LEADER, False)}


@pytest.mark.parametrize("durability", [common_pb2.DURABILITY_UNSPECIFIED, common_pb2.DURABILITY_LEADER])
async def test_acknowledged_chunks_can_be_read_at_once(broker: Broker, durability: int) -> None:
    broker.append(chunk(1, 0), chunk(1, 1), durability=durability)

    assert stored(broker) == [0, 1]


async def test_a_repeat_in_a_later_or_the_same_request_gets_its_first_place(broker: Broker) -> None:
    (first,) = broker.append(chunk(1, 0))
    again, second, second_again = broker.append(chunk(1, 0), chunk(1, 1), chunk(1, 1))

    assert [status.duplicate for status in (first, again, second, second_again)] == [False, True, False, True]
    assert (again.group_id, again.segment_id, again.position) == (1, 1, 0)
    assert (second_again.segment_id, second_again.position, second_again.first_record) == (1, 1024, 1)
    assert stored(broker) == [0, 1]


async def test_a_request_without_chunks_has_no_statuses(broker: Broker) -> None:
    assert broker.append() == []


async def test_the_memory_of_a_request_may_be_used_again_when_the_handler_returns(broker: Broker) -> None:
    memory = bytearray(chunk(1, 0, fill=b"a"))
    broker.start(api.MULTI_WRITE_CHUNKS, api.MULTI_WRITE_CHUNKS.request(chunk_count=1), memory)
    memory[:] = bytes(len(memory))
    (piece,) = broker.read(read_range()).bulk

    assert bytes(piece[128:]) == b"a" * 896


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
    statuses = broker.append(chunk(1, 0, size=4096)[:CHUNK_BYTES], chunk(2, 0))

    assert codes(statuses) == ["corrupt_chunk", "corrupt_chunk"]
    assert stored(broker) == []


@pytest.mark.parametrize("count", [0, 1, 2, REQUEST_CHUNKS_MAX])
async def test_no_more_statuses_are_made_than_the_bytes_have_room_for(broker: Broker, count: int) -> None:
    """A number that a client claims must not fill the broker's memory."""
    statuses = broker.append(damaged(chunk(1, 0), 40), chunk(1, 1), count=count)

    assert max(1, min(count, 2)) <= len(statuses) <= 2 * CHUNK_BYTES // 128
    assert set(codes(statuses)) == {"corrupt_chunk"}


@pytest.mark.parametrize("count", [REQUEST_CHUNKS_MAX + 1, 2**32 - 1])
async def test_more_chunks_than_a_request_may_have_are_refused(broker: Broker, count: int) -> None:
    with pytest.raises(InvalidArgument, match=f"at most {REQUEST_CHUNKS_MAX} chunks"):
        broker.append(chunk(1, 0), count=count)
    assert stored(broker) == []


async def test_chunks_beyond_the_limit_are_refused_though_the_request_claims_fewer(broker: Broker) -> None:
    chunks = [chunk(1, 0)] * (REQUEST_CHUNKS_MAX + 3)
    statuses = broker.append(*chunks, count=REQUEST_CHUNKS_MAX)
    assert [status.error.code for status in statuses[REQUEST_CHUNKS_MAX - 1 :]] == ["", "invalid_argument"]
    assert len(statuses) == REQUEST_CHUNKS_MAX + 1


@pytest.mark.parametrize(
    ("fields", "code", "attributes"),
    [
        ({"stream_id": 99}, "unknown_stream", {"stream_id": 99}),
        ({"streamlet_id": 3}, "streamlet_out_of_range", {"stream": "stream-7", "streamlet_id": 3, "streamlets": 3}),
        ({"streamlet_id": 1}, "not_owner", {"stream": "stream-7", "streamlet_id": 1}),
        ({"schema_id": 0}, "schema_mismatch", {"stream": "stream-7", "schema_id": 0}),
        ({"schema_id": 2}, "unavailable", {"stream": "stream-7", "schema_id": 2}),  # the broker may learn of it later
        (
            {"sequence": 5},
            "out_of_sequence",
            {"producer_id": 2, "streamlet_id": 0, "sequence": 5, "expected_sequence": 0},
        ),
        ({"size": SLOT_BYTES + 64}, "record_too_large", {"chunk_bytes": SLOT_BYTES + 64, "limit": SLOT_BYTES}),
    ],
)
async def test_a_chunk_that_does_not_belong_here_fails_alone(
    broker: Broker, fields: dict[str, Any], code: str, attributes: dict[str, Any]
) -> None:
    statuses = broker.append(chunk(1, 0), chunk(2, **fields), chunk(1, 1))

    assert codes(statuses) == ["", code, ""]
    assert error_from_message(statuses[1].error).attributes == attributes
    assert stored(broker) == [0, 1]


async def test_a_fenced_producer_is_refused(broker: Broker) -> None:
    statuses = broker.append(chunk(1, 0, producer_epoch=2), chunk(1, 0, producer_epoch=1))

    assert codes(statuses) == ["", "producer_fenced"]


async def test_other_records_with_a_stored_sequence_are_not_acknowledged_as_a_repeat(broker: Broker) -> None:
    broker.append(chunk(1, 0), chunk(1, 1))
    statuses = broker.append(chunk(1, 1, fill=b"y"), chunk(1, 1), chunk(1, 2))

    assert codes(statuses) == ["producer_fenced", "", ""]
    assert [status.duplicate for status in statuses] == [False, True, False]
    assert stored(broker) == [0, 1, 2]


async def test_other_records_under_a_chosen_id_are_answered_as_a_duplicate(broker: Broker) -> None:
    own = PRODUCER_IDS[5]
    broker.append(chunk(own, 0))
    (status,) = broker.append(chunk(own, 0, fill=b"y"))

    assert status.duplicate, "it reads that, and goes by it"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"record_count": 0}, "record_count"),
        ({"size": HEADER_BYTES}, "payload_bytes"),
        ({"min_timestamp_us": 21}, "min_timestamp_us"),
    ],
)
async def test_an_invalid_header_is_refused_and_its_neighbours_are_not(
    broker: Broker, fields: dict[str, Any], field: str
) -> None:
    statuses = broker.append(chunk(1, 0), chunk(2, **fields), chunk(1, 1))

    assert codes(statuses) == ["", "invalid_argument", ""]
    assert error_from_message(statuses[1].error).attributes["field"] == field
    assert stored(broker) == [0, 1]


async def test_a_chunk_that_has_a_place_already_is_refused(broker: Broker) -> None:
    broker.append(chunk(1, 0))
    (piece,) = broker.read(read_range()).bulk
    statuses = broker.append(bytes(piece), chunk(1, 1))

    assert codes(statuses) == ["invalid_argument", ""]


# --- no room -----------------------------------------------------------------------------------------------


@pytest.fixture
async def small(make_engine: Callable[..., Engine], limits: ServingLimits) -> Broker:
    """Has memory for two segments, and its disk is slow."""
    broker = Broker(make_engine(slots=2), stream_info(), stream_info(8), limits=limits)
    broker.paused = True
    return broker


def waits(result: Any) -> asyncio.Future[Reply[Any]]:
    """A write that is not answered at once, as the transport makes it."""
    assert not isinstance(result, Reply)
    future: asyncio.Future[Reply[Any]] = asyncio.ensure_future(result)
    return future


async def settle() -> None:
    """Let the loop do all that it can do without waiting."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_write_that_finds_no_room_goes_on_when_the_disk_has_made_some(small: Broker) -> None:
    chunks = [chunk(1, sequence) for sequence in range(10)]
    write = waits(small.write(*chunks))
    await settle()
    assert not write.done()
    small.resume()
    statuses = (await write).message.statuses

    assert codes(statuses) == [""] * 10
    assert [(s.group_id, s.segment_id, s.first_record) for s in statuses] == (
        [(1, 1, n) for n in range(4)] + [(1, 2, n) for n in range(4, 8)] + [(2, 1, n) for n in range(8, 10)]
    )


async def test_a_write_that_waits_keeps_its_own_bytes(small: Broker) -> None:
    memory = bytearray(b"".join(chunk(1, sequence, fill=b"a") for sequence in range(9)))
    write = waits(small.start(api.MULTI_WRITE_CHUNKS, api.MULTI_WRITE_CHUNKS.request(chunk_count=9), memory))
    memory[:] = bytes(len(memory))
    small.resume()
    assert codes((await write).message.statuses) == [""] * 9

    (piece,) = small.read(read_range(Position(2, 1, 0))).bulk
    assert bytes(piece[128:]) == b"a" * 896


async def test_waiting_writes_go_on_in_order_and_later_ones_wait_behind_them(small: Broker) -> None:
    assert codes(small.append(chunk(1, 0, stream_id=8))) == [""], "its segment has room for more"
    first = waits(small.write(*(chunk(1, sequence) for sequence in range(5))))
    other = waits(small.write(chunk(1, 1, stream_id=8)))
    second = waits(small.write(chunk(2, 0)))
    writes, order = [first, other, second], list[Any]()
    for write in writes:
        write.add_done_callback(order.append)
    await settle()
    assert order == []
    small.resume()

    assert [codes(reply.message.statuses) for reply in await asyncio.gather(*writes)] == [[""] * 5, [""], [""]]
    assert order == writes


@limited(room_wait_ms=10)
async def test_a_write_that_finds_no_room_in_time_stores_its_first_chunks_and_refuses_the_rest(
    small: Broker,
) -> None:
    statuses = (await waits(small.write(*(chunk(1, sequence) for sequence in range(10))))).message.statuses

    assert codes(statuses) == [""] * 8 + ["arena_full"] * 2
    assert [status.error.retriable for status in statuses[8:]] == [True, True]
    assert stored(small) == list(range(8))
    assert small.counters.chunks_refused == 2


@limited(room_bytes_max=2 * CHUNK_BYTES)
async def test_a_write_is_refused_at_once_when_enough_others_wait(small: Broker) -> None:
    waiting = waits(small.write(*(chunk(1, sequence) for sequence in range(10))))

    assert codes(small.append(chunk(1, 10))) == ["arena_full"]
    small.resume()
    assert codes((await waiting).message.statuses) == [""] * 10
    assert codes(small.append(chunk(1, 10))) == [""]


async def test_a_cancelled_write_lets_those_behind_it_go_on(small: Broker) -> None:
    first = waits(small.write(*(chunk(1, sequence) for sequence in range(9))))
    second = waits(small.write(chunk(1, 0, stream_id=8)))
    await settle()
    first.cancel()
    await settle()
    small.resume()

    assert codes((await second).message.statuses) == [""]


async def test_an_unexpected_error_of_a_waiting_write_does_not_stop_those_behind_it(
    small: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = waits(small.write(*(chunk(1, sequence) for sequence in range(9))))
    second = waits(small.write(chunk(1, 0, stream_id=8)))
    await settle()
    get, calls = small.streams.get, iter([RuntimeError("a defect")])

    def fails_once(stream_id: int) -> Any:
        for error in calls:
            raise error
        return get(stream_id)

    monkeypatch.setattr(small.streams, "get", fails_once)
    small.resume()

    with pytest.raises(RuntimeError, match="a defect"):
        await first
    assert codes((await second).message.statuses) == [""]


async def test_a_write_gets_disk_full_when_memory_waits_for_a_full_disk(small: Broker) -> None:
    assert codes(small.append(*(chunk(1, sequence) for sequence in range(5)))) == [""] * 5
    small.engine.disk.write_error = errno.ENOSPC
    small.resume()
    small.append(*(chunk(1, sequence) for sequence in range(5, 8)))
    (status,) = small.append(chunk(1, 8))

    assert (status.error.code, status.error.retriable) == ("disk_full", True)
    small.engine.disk.write_error = 0
    small.engine.memory.tick(RETRY_MS, idle_close_ms=60_000)
    await settle()
    assert codes(small.append(chunk(1, 8))) == [""]


# --- durability --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("durability", "name"),
    [
        (99, "99"),  # of a newer client
        (-1, "-1"),
    ],
)
async def test_an_unknown_durability_level_is_refused_before_anything_is_stored(
    broker: Broker, durability: int, name: str
) -> None:
    with pytest.raises(InvalidArgument, match="not known") as raised:
        broker.append(chunk(1, 0), durability=durability)

    assert raised.value.attributes == {"durability": name}
    assert stored(broker) == []


async def test_level_replicated_of_a_stream_without_replicas_is_refused_before_anything_is_stored(
    broker: Broker,
) -> None:
    (status,) = broker.append(chunk(1, 0), durability=common_pb2.DURABILITY_REPLICATED)

    assert status.error.code == "invalid_argument"
    assert "not replicated" in status.error.message
    assert stored(broker) == []


@pytest.fixture
async def persisted(engine: Engine) -> Broker:
    """Chunks are acknowledged and readable when they are on disk. The disk does nothing until the test resumes it."""
    broker = Broker(engine, stream_info(durability=PERSISTED))
    broker.paused = True
    return broker


async def test_chunks_of_level_persisted_are_acknowledged_and_readable_when_on_disk(persisted: Broker) -> None:
    write = waits(persisted.write(chunk(1, 0), chunk(1, 1)))
    await settle()
    assert not write.done()
    assert stored(persisted) == []
    persisted.resume()
    statuses = (await write).message.statuses

    assert [(status.error.code, status.durability) for status in statuses] == [("", PERSISTED)] * 2
    assert stored(persisted) == [0, 1]
    assert persisted.engine.store.path(1).read_bytes()[:CHUNK_BYTES] == bytes(
        persisted.arena.slot(0).view[:CHUNK_BYTES]
    )


async def test_a_producer_may_ask_for_a_lower_level_and_readers_still_see_only_chunks_on_disk(
    persisted: Broker,
) -> None:
    (status,) = persisted.append(chunk(1, 0), durability=common_pb2.DURABILITY_LEADER)
    assert (status.error.code, status.durability) == ("", common_pb2.DURABILITY_LEADER)
    assert stored(persisted) == []
    persisted.resume()

    assert stored(persisted) == [0]


async def test_a_producer_may_ask_for_a_higher_level_than_that_of_its_stream(broker: Broker) -> None:
    broker.paused = True
    write = waits(broker.write(chunk(1, 0), durability=PERSISTED))
    await settle()
    assert not write.done()
    assert stored(broker) == [0], "readers see what has reached the level of the stream"
    broker.resume()

    assert codes((await write).message.statuses) == [""]


async def test_a_repeat_waits_for_the_disk_as_the_first_attempt_does(persisted: Broker) -> None:
    first, again = waits(persisted.write(chunk(1, 0))), waits(persisted.write(chunk(1, 0)))
    await settle()
    assert (first.done(), again.done()) == (False, False)
    persisted.resume()

    assert [(await write).message.statuses[0].duplicate for write in (first, again)] == [False, True]
    assert persisted.append(chunk(1, 0))[0].duplicate, "now it is there already"


async def test_a_chunk_that_the_disk_did_not_take_is_persisted_before_a_later_repeat(
    persisted: Broker,
) -> None:
    write = waits(persisted.write(chunk(1, 0), chunk(9, 5)))
    persisted.engine.disk.write_error = errno.EIO
    persisted.resume()
    statuses = (await write).message.statuses
    assert codes(statuses) == ["not_persisted", "out_of_sequence"]
    assert not statuses[0].group_id
    assert codes(persisted.append(chunk(1, 1))) == ["disk_full"], "refused before it is appended"

    persisted.engine.disk.write_error = 0
    persisted.engine.memory.tick(RETRY_MS, idle_close_ms=60_000)
    persisted.paused = True
    persisted.engine.run()
    (status,) = persisted.append(chunk(1, 0))

    assert (status.duplicate, status.durability) == (True, PERSISTED)
    assert stored(persisted) == [0]


async def test_a_write_that_waits_for_the_disk_fails_when_its_stream_is_dropped(persisted: Broker) -> None:
    write = waits(persisted.write(chunk(1, 0)))
    await settle()
    persisted.streams.drop(7)

    assert codes((await write).message.statuses) == ["not_persisted"]


# --- counters, and streams that come and go ----------------------------------------------------------------


async def test_requests_chunks_records_and_bytes_are_counted(broker: Broker) -> None:
    broker.append(
        chunk(1, 0, record_count=5), chunk(1, 0, record_count=5), chunk(1, 7), damaged(chunk(1, 1), 40), chunk(1, 2)
    )
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


async def test_a_broker_that_does_not_know_its_streams_yet_gives_a_retriable_error(engine: Engine) -> None:
    """If the stream were unknown, a producer from before the broker's restart would give up."""
    broker = Broker(engine)
    for method in api.BROKER_METHODS:
        if method not in {api.OPEN_STREAMLETS, api.DROP_STREAM}:
            with pytest.raises(Unavailable) as raised:
                broker.start(method, method.request(), chunk(1, 0))
            assert raised.value.retriable
    broker.broker.registered(BROKER_ID, [stream_info()])

    reply = broker.start(api.MULTI_WRITE_CHUNKS, api.MULTI_WRITE_CHUNKS.request(chunk_count=1), chunk(1, 0))
    assert codes(reply.message.statuses) == [""]


@pytest.mark.parametrize("dropped", [False, True])
async def test_orders_that_arrive_before_the_answer_to_the_registration_are_carried_out_after_it(
    engine: Engine, dropped: bool
) -> None:
    broker = Broker(engine)
    ask = functools.partial(asyncio.ensure_future)
    opening = ask(broker.ask(api.OPEN_STREAMLETS, api.OPEN_STREAMLETS.request(stream=stream_info(8))))
    dropping = ask(broker.ask(api.DROP_STREAM, api.DROP_STREAM.request(stream_id=7))) if dropped else None
    await asyncio.sleep(0)
    assert len(broker.streams) == 0

    broker.broker.registered(BROKER_ID, [stream_info(7)])  # the answer is older than the orders
    await opening
    if dropping is not None:
        await dropping

    assert [stream.stream_id for stream in broker.streams] == ([8] if dropped else [7, 8])
