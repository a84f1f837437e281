"""What became of a chunk, for one who asks, for many, and for nobody."""

import asyncio

import pytest

from kera.client.outcome import Outcome, Stored
from kera.client.types import RECORD_UNKNOWN
from kera.core.errors import ClosedError, Unavailable
from kera.core.ids import EntryId, Position
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


async def test_a_delivery_says_what_the_broker_has_said() -> None:
    outcome = Outcome()
    outcome.settle(stored())
    delivery = await outcome
    assert (delivery.stream, delivery.entry, delivery.position) == ("s", EntryId(7, 4, 1), Position(2, 3, 64))
    assert (delivery.record, delivery.record_count, delivery.durability) == (9, 10, "replicated")
    assert (delivery.virtual_segment, delivery.backups, delivery.duplicate) == (5, (1, 2), False)
    assert await outcome is delivery


async def test_a_delivery_whose_place_nobody_knows_is_not_record_0() -> None:
    status = broker_pb2.ChunkStatus(entry=1, durability=common_pb2.DURABILITY_LEADER, duplicate=True)
    delivery = Stored("s", 7, 4, 10, status, ()).delivery()
    assert (delivery.has_place, delivery.record, delivery.duplicate) == (False, RECORD_UNKNOWN, True)
    assert stored().delivery().has_place


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
