"""What became of a chunk, for one who asks, for many, and for nobody."""

import asyncio

import pytest

from kera.client.producing.open_chunks.accumulator import Accumulator
from kera.client.producing.outcomes.deliveries import Stored
from kera.client.producing.outcomes.outcome import Outcome
from kera.core.base.ids import EntryId, Position
from kera.core.errors import ClosedError, Unavailable
from kera.v1 import broker_pb2, common_pb2


def stored() -> Stored:
    status = broker_pb2.ChunkStatus(
        entry=1,
        group_id=2,
        segment_id=3,
        position=64,
        first_record=9,
        durability=common_pb2.DURABILITY_REPLICATED,
        virtual_segment_id=5,
    )
    return Stored("s", 7, 4, 10, status, (1, 2))


@pytest.mark.parametrize("records", [1, 10])
async def test_of_a_repeat_whose_place_the_broker_does_not_know_neither_place_nor_record_is_told(records: int) -> None:
    status = broker_pb2.ChunkStatus(entry=1, durability=common_pb2.DURABILITY_LEADER, duplicate=True)
    accumulator = Accumulator("s", 4, 0.0)
    pending = [accumulator.append(b"x", 0.0, 1) for _ in range(records)]
    accumulator.delivered.settle(Stored("s", 7, 4, records, status, ()))
    for each in pending:
        delivery = await each
        assert (delivery.position, delivery.record, delivery.record_count) == (None, None, 1)
        assert (delivery.entry, delivery.duplicate) == (EntryId(7, 4, 1), True)


async def test_a_delivery_says_what_the_broker_has_said() -> None:
    outcome = Outcome()
    outcome.settle(stored())
    delivery = await outcome
    assert (delivery.stream, delivery.entry, delivery.position) == ("s", EntryId(7, 4, 1), Position(2, 3, 64))
    assert (delivery.record, delivery.record_count, delivery.durability) == (9, 10, "replicated")
    assert (delivery.virtual_segment, delivery.backups, delivery.duplicate) == (5, (1, 2), False)
    assert await outcome is delivery


async def test_who_waits_is_woken_and_who_gave_up_is_not() -> None:
    outcome = Outcome()
    waiting = [asyncio.ensure_future(outcome.settled()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.sleep(0)
    assert not outcome.done()
    outcome.settle(stored())
    await asyncio.gather(waiting[0], waiting[2])
    assert waiting[1].cancelled()


async def test_the_first_word_counts() -> None:
    outcome = Outcome()
    outcome.settle(ClosedError("closed"))
    outcome.settle(stored())
    with pytest.raises(ClosedError):
        outcome.result()


async def test_an_error_is_raised_to_all_and_does_not_grow() -> None:
    outcome = Outcome()
    outcome.settle(Unavailable("away"))
    depths = []
    for _ in range(3):
        with pytest.raises(Unavailable) as raised:
            await outcome
        depths.append(len(raised.traceback))
    assert len(set(depths)) == 1
    await outcome.settled()


def test_what_is_not_known_has_no_result() -> None:
    with pytest.raises(asyncio.InvalidStateError):
        Outcome().result()
