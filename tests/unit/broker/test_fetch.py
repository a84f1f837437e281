"""Reading from a broker: results per range, budgets, waiting, leases of bytes that are being sent."""

import asyncio
import errno
import gc
from collections.abc import Callable
from typing import Any

import pytest

from kera.broker.serving import fetch
from kera.broker.serving.fetch import READ_RANGES_MAX
from kera.broker.serving.limits import ServingLimits
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import InvalidArgument
from kera.core.format.chunk import verify_chunk
from kera.core.rpc import Reply, api
from kera.core.rpc.method import Peer
from kera.core.rpc.wire import error_from_message
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


@pytest.fixture
async def broker(engine: Engine) -> Broker:
    """A broker that owns streamlets 0 and 1 of stream 7, each with two entries, but not streamlet 2."""
    return Broker(engine, stream_info(owners=(BROKER_ID, BROKER_ID, BROKER_ID + 1), entries=2))


def fill(broker: Broker, count: int, producer: int = 2, **fields: Any) -> None:
    """Append chunks of one producer, from sequence 0. Even producers write to entry 0."""
    assert not any(status.error.code for status in broker.append(*(chunk(producer, n, **fields) for n in range(count))))


def waits(result: Any) -> asyncio.Future[Reply[Any]]:
    """The future of a read that found nothing, as the transport makes it."""
    assert not isinstance(result, Reply)
    future: asyncio.Future[Reply[Any]] = asyncio.ensure_future(result)
    return future


async def drop(broker: Broker) -> None:
    await broker.ask(api.DROP_STREAM, api.DROP_STREAM.request(stream_id=STREAM_ID))


def waiting_readers(broker: Broker) -> int:
    return sum(len(entry.waiters) for entry in broker.streams.get(STREAM_ID).streamlet(0).entries)


# --- results -----------------------------------------------------------------------------------------------


async def test_each_range_has_a_result_and_its_bytes_follow_in_order(broker: Broker) -> None:
    fill(broker, 6, producer=2, record_count=10)
    fill(broker, 3, producer=1)
    reply = broker.read(read_range(), read_range(entry=1), read_range(Position(1, 1, 2048), Position(1, 2, 1024)))
    first, second, third = reply.message.results

    assert [result.length_bytes for result in (first, second, third)] == [6 * 1024, 3 * 1024, 3 * 1024]
    assert sequences_of(reply) == [0, 1, 2, 3, 4, 5, 0, 1, 2, 2, 3, 4]
    assert [next_of(result) for result in (first, second, third)] == [(1, 2, 2048), (2, 1, 3072), (1, 2, 1024)]
    assert [result.lag_records for result in (first, second, third)] == [0, 0, 10]
    assert {(result.next.stream_id, result.next.streamlet_id) for result in (first, second, third)} == {(7, 0)}
    assert [result.next.entry for result in (first, second, third)] == [0, 1, 0]


async def test_chunks_arrive_as_they_were_stored(broker: Broker) -> None:
    fill(broker, 1, fill=b"a")
    (piece,) = broker.read(read_range()).bulk
    header = verify_chunk(piece)

    assert bytes(piece[128:]) == b"a" * 896
    assert (header.group_id, header.segment_id, header.broker_epoch) == (1, 1, 9)


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (read_range(stream_id=99), "unknown_stream"),
        (read_range(streamlet=3), "streamlet_out_of_range"),
        (read_range(streamlet=2), "not_owner"),
        (read_range(entry=2), "invalid_cursor"),
        (read_range(Position(1, 0, 0)), "invalid_cursor"),
        (read_range(Position(1, 1, 64)), "invalid_cursor"),
        (read_range(Position(1, 1, 0), Position(1, 1, 64)), "invalid_cursor"),
    ],
)
async def test_a_range_that_cannot_be_read_fails_alone_and_keeps_its_place(
    broker: Broker, wanted: Any, code: str
) -> None:
    fill(broker, 2)
    reply = broker.read(read_range(), wanted, read_range(), wait_ms=MINUTE_MS)

    assert [result.error.code for result in reply.message.results] == ["", code, ""]
    assert reply.message.results[1].next == wanted.start
    assert sequences_of(reply) == [0, 1, 0, 1]


async def test_a_read_of_a_loss_fails_with_the_limits_of_the_loss(engine: Engine) -> None:
    info = stream_info()
    info.assignments[0].first_group_id = 100
    broker = Broker(engine, info)
    fill(broker, 1)
    (result,) = broker.read(read_range(Position(4, 1, 0))).message.results

    error = error_from_message(result.error)
    assert (error.code, error.attributes["lost_from"]) == ("data_lost", [4, 1, 0])
    assert error.attributes["available_from"] == [100, 1, 0]


async def test_too_many_ranges_are_refused(broker: Broker) -> None:
    with pytest.raises(InvalidArgument, match=str(READ_RANGES_MAX)):
        broker.read(*([read_range()] * (READ_RANGES_MAX + 1)))


# --- budgets -----------------------------------------------------------------------------------------------


async def test_the_budget_is_for_the_whole_response(broker: Broker) -> None:
    fill(broker, 4, producer=2)
    fill(broker, 4, producer=1)
    reply = broker.read(read_range(), read_range(entry=1), read_range(), bytes_max=6 * CHUNK_BYTES)

    assert [result.length_bytes for result in reply.message.results] == [4 * 1024, 2 * 1024, 0]
    assert next_of(reply.message.results[2]) == EARLIEST, "where it stood"


async def test_a_chunk_over_the_budget_is_sent_only_alone(broker: Broker) -> None:
    fill(broker, 1, producer=2, size=2048)
    fill(broker, 1, producer=1, size=512)
    fill(broker, 1, producer=2, size=4096, streamlet_id=1)
    large, small = read_range(streamlet=1), read_range(entry=1)

    assert [r.length_bytes for r in broker.read(large, small, bytes_max=1024).message.results] == [4096, 0]
    assert [r.length_bytes for r in broker.read(small, large, bytes_max=1024).message.results] == [512, 0]
    assert [r.length_bytes for r in broker.read(small, large, read_range(), bytes_max=2560).message.results] == [
        512,
        0,
        2048,
    ], "a range that needs less takes what is left"


@pytest.mark.parametrize("asked", [0, 2**32 - 1])
async def test_a_response_is_never_larger_than_the_transports_can_send(engine: Engine, asked: int) -> None:
    broker = Broker(engine, stream_info(), read_bytes_max=2 * CHUNK_BYTES)
    fill(broker, 5)

    assert sequences_of(broker.read(read_range(), bytes_max=asked)) == [0, 1]


# --- waiting -----------------------------------------------------------------------------------------------


async def test_a_read_without_a_wait_time_gets_an_empty_answer_at_once(broker: Broker) -> None:
    reply = broker.read(read_range())

    assert isinstance(reply, Reply)
    assert [(next_of(r), r.length_bytes) for r in reply.message.results] == [(EARLIEST, 0)]


async def test_a_read_that_finds_something_does_not_wait(broker: Broker) -> None:
    fill(broker, 1)

    assert isinstance(broker.read(read_range(entry=1), read_range(), wait_ms=MINUTE_MS), Reply)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("producer", [1, 2])
async def test_a_waiting_read_is_answered_by_an_append_to_any_of_its_entries(broker: Broker, producer: int) -> None:
    read = waits(broker.read(read_range(), read_range(entry=1), wait_ms=MINUTE_MS))
    while not waiting_readers(broker):
        await asyncio.sleep(0)
    fill(broker, 2, producer=producer)
    reply = await read

    assert sequences_of(reply) == [0, 1]
    assert [result.length_bytes for result in reply.message.results] == ([0, 2048] if producer == 1 else [2048, 0])
    assert waiting_readers(broker) == 0


@pytest.mark.timeout(20)
async def test_an_append_between_the_check_and_the_wait_is_not_missed(broker: Broker) -> None:
    """Requests that arrive together are handled one after the other, before any task begins to wait."""
    read = waits(broker.read(read_range(), wait_ms=MINUTE_MS))
    fill(broker, 1)

    assert sequences_of(await read) == [0]


@pytest.mark.timeout(20)
async def test_a_drop_between_the_check_and_the_wait_is_not_missed(broker: Broker) -> None:
    read = waits(broker.read(read_range(), wait_ms=MINUTE_MS))
    broker.streams.drop(STREAM_ID)

    assert [result.error.code for result in (await read).message.results] == ["unknown_stream"]


async def test_an_append_elsewhere_does_not_wake_a_waiting_read(broker: Broker) -> None:
    read = waits(broker.read(read_range(), wait_ms=MINUTE_MS))
    while not waiting_readers(broker):
        await asyncio.sleep(0)
    fill(broker, 1, producer=1)
    fill(broker, 1, producer=2, streamlet_id=1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not read.done()

    fill(broker, 1)

    assert sequences_of(await read) == [0]


@pytest.mark.timeout(20)
async def test_a_waiting_read_fails_when_its_stream_is_dropped(broker: Broker) -> None:
    read = waits(broker.read(read_range(), wait_ms=MINUTE_MS))
    while not waiting_readers(broker):
        await asyncio.sleep(0)
    await drop(broker)

    assert [result.error.code for result in (await read).message.results] == ["unknown_stream"]


async def test_a_waiting_read_ends_with_an_empty_answer_when_its_time_is_up(broker: Broker) -> None:
    fill(broker, 1)
    here = Position(1, 1, 1024)
    reply = await waits(broker.read(read_range(here), wait_ms=20))

    assert [(next_of(r), r.length_bytes, r.lag_records) for r in reply.message.results] == [(here, 0, 0)]
    assert waiting_readers(broker) == 0


async def test_a_cancelled_read_waits_no_longer(broker: Broker) -> None:
    read = waits(broker.read(read_range(), wait_ms=MINUTE_MS))
    while not waiting_readers(broker):
        await asyncio.sleep(0)
    read.cancel()
    await asyncio.wait([read])

    assert read.cancelled()
    assert waiting_readers(broker) == 0


# --- leases of bytes that are being sent -------------------------------------------------------------------


async def test_bytes_being_sent_keep_their_slots_until_the_last_view_is_gone(broker: Broker) -> None:
    fill(broker, 5, fill=b"a")
    reply = broker.read(read_range())
    kept = reply.bulk[1]
    await drop(broker)
    assert broker.arena.free_slots == 6, "both slots are on their way"

    del reply
    gc.collect()
    assert broker.arena.free_slots == 7, "the first has left"
    assert bytes(kept[128:]) == b"a" * 896

    del kept
    gc.collect()
    assert broker.arena.free_slots == 8


# --- what is on disk ---------------------------------------------------------------------------------------


@pytest.fixture
async def stored(engine: Engine, limits: ServingLimits) -> Broker:
    """Chunks 0 to 15 in four segments on disk only, and chunk 16 in memory. The disk works."""
    broker = Broker(engine, stream_info(), limits=limits)
    fill(broker, 17)
    engine.run()
    slots = engine.fill_memory()
    slots += [engine.memory.slots.allocate() for _ in range(4)]
    for slot in slots:
        slot.retire()
    assert sorted(broker.streams.get(STREAM_ID).streamlet(0).entries[0].resident) == [(3, 1)]
    return broker


async def answer(result: Any) -> Reply[Any]:
    return result if isinstance(result, Reply) else await waits(result)


async def test_a_read_from_disk_waits_for_the_load_even_without_a_wait_time(stored: Broker) -> None:
    stored.paused = True
    read = waits(stored.read(read_range()))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not read.done()
    stored.resume()
    reply = await read

    assert sequences_of(reply)[:4] == [0, 1, 2, 3]
    assert next_of(reply.message.results[0])[:2] >= (1, 2)
    assert [result.error.code for result in reply.message.results] == [""]


async def test_a_reader_that_goes_on_gets_all_chunks_from_disk_and_memory(stored: Broker) -> None:
    found, here = list[int](), EARLIEST
    while here < (3, 1, 1024):
        reply = await answer(stored.read(read_range(here)))
        found += sequences_of(reply)
        here = next_of(reply.message.results[0])

    assert found == list(range(17))


async def test_the_memory_of_a_loaded_segment_can_be_reused_once_it_is_read(stored: Broker) -> None:
    here = EARLIEST
    while here < (3, 1, 1024):
        here = next_of((await answer(stored.read(read_range(here)))).message.results[0])
    await asyncio.sleep(0)  # the loop lets go of the last answer
    gc.collect()
    engine = stored.engine
    slots = engine.fill_memory()

    while engine.streams.get(STREAM_ID).streamlet(0).entries[0].resident.keys() - {(3, 1)}:
        slots.append(engine.memory.slots.allocate())
    assert len(slots) == engine.arena.slot_count - 1


async def test_a_range_in_memory_does_not_wait_for_a_range_on_disk(stored: Broker) -> None:
    stored.paused = True
    reply = stored.read(read_range(), read_range(Position(3, 1, 0)))
    assert isinstance(reply, Reply)
    assert [result.length_bytes for result in reply.message.results] == [0, 1024]
    assert next_of(reply.message.results[0]) == Position(1, 1, 0)
    stored.resume()

    again = stored.read(read_range(Position(1, 1, 0)), read_range(Position(3, 1, 1024)))
    assert isinstance(again, Reply), "it was loaded meanwhile"
    assert sequences_of(again)[:4] == [0, 1, 2, 3]


async def test_an_unreadable_disk_is_an_error_of_the_range(stored: Broker) -> None:
    stored.engine.disk.read_error = errno.EIO
    reply = await waits(stored.read(read_range()))
    assert [result.error.code for result in reply.message.results] == ["disk_failed"]
    stored.engine.disk.read_error = 0

    assert sequences_of(await waits(stored.read(read_range())))[:4] == [0, 1, 2, 3]


async def test_damage_on_disk_is_an_error_with_its_limits_and_other_chunks_are_read(stored: Broker) -> None:
    with stored.engine.store.path(1).open("r+b") as file:
        file.seek(CHUNK_BYTES + 200)
        file.write(b"\xff")
    assert sequences_of(await waits(stored.read(read_range()))) == [0]
    (result,) = stored.read(read_range(Position(1, 1, CHUNK_BYTES))).message.results
    error = error_from_message(result.error)

    assert (error.code, error.attributes["lost_from"]) == ("data_lost", [1, 1, 1024])
    assert error.attributes["available_from"] == [1, 1, 2048]
    assert sequences_of(stored.read(read_range(Position(1, 1, 2048))))[:2] == [2, 3]


@pytest.mark.timeout(20)
@limited(load_wait_ms=10)
async def test_a_load_that_finds_no_room_in_time_is_a_retriable_error(stored: Broker) -> None:
    slots = stored.engine.fill_memory()
    (result,) = (await waits(stored.read(read_range()))).message.results
    assert (result.error.code, result.error.retriable) == ("unavailable", True)
    slots[0].retire()

    assert sequences_of(await answer(stored.read(read_range())))[:4] == [0, 1, 2, 3]


async def test_untaken_answers_do_not_block_loads_when_disk_and_memory_are_full(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine(reserve_slots=1)
    broker = Broker(engine, stream_info())
    broker.append(*(chunk(sequence=number) for number in range(16)))
    engine.memory.segments.close_all()
    engine.run()
    engine.disk.write_error = errno.ENOSPC
    for number in range(16, 16 + 4 * engine.arena.slot_count):
        if any(status.HasField("error") for status in broker.append(chunk(sequence=number))):
            break
        engine.run()
    else:
        pytest.fail("the memory is not full")

    held = []
    for number in range(16):
        place = Position(1 + number // 8, 1 + number // 4 % 2, number % 4 * CHUNK_BYTES)
        reply = broker.read(read_range(place), bytes_max=CHUNK_BYTES, peer=Peer("tcp", str(number)))
        held.append(reply if isinstance(reply, Reply) else await waits(reply))
        assert sequences_of(held[-1]) == [number]


async def test_a_read_that_waits_for_the_disk_fails_when_its_stream_is_dropped(stored: Broker) -> None:
    stored.paused = True
    read = waits(stored.read(read_range()))
    for _ in range(10):
        await asyncio.sleep(0)
    stored.streams.drop(STREAM_ID)

    assert [result.error.code for result in (await read).message.results] == ["unknown_stream"]


@pytest.mark.timeout(20)
async def test_entries_that_a_connection_reads_no_longer_are_forgotten(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "READERS_KEPT_S", 0.01)
    fill(broker, 6)
    peer = Peer("unix", "one")
    entry = broker.streams.get(STREAM_ID).streamlet(0).entries[0]
    broker.read(read_range(), peer=peer)
    assert list(entry.readers.values()) == [(1, 2)]
    while entry.readers:
        await asyncio.sleep(0.001)
    broker.read(read_range(), peer=peer)
    assert list(entry.readers.values()) == [(1, 2)]
    peer.closed()

    assert not entry.readers


async def test_positions_of_readers_are_known_until_their_connections_end(broker: Broker) -> None:
    fill(broker, 6)
    one, two = Peer("unix", "one"), Peer("unix", "two")
    entry = broker.streams.get(STREAM_ID).streamlet(0).entries[0]
    broker.read(read_range(), bytes_max=CHUNK_BYTES, peer=one)
    broker.read(read_range(), peer=two)
    assert sorted(entry.readers.values()) == [(1, 1), (1, 2)]
    one.closed()

    assert list(entry.readers.values()) == [(1, 2)]
