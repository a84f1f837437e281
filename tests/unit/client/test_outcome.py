"""The outcome of a chunk, for one waiter, for many, and for none."""

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
async def test_a_repeat_with_an_unknown_place_has_neither_position_nor_record(records: int) -> None:
    status = broker_pb2.ChunkStatus(entry=1, durability=common_pb2.DURABILITY_LEADER, duplicate=True)
    accumulator = Accumulator("s", 4, 0.0)
    pending = [accumulator.append(b"x", 0.0, 1) for _ in range(records)]
    accumulator.delivered.settle(Stored("s", 7, 4, records, status, ()))
    for each in pending:
        delivery = await each
        assert (delivery.position, delivery.record, delivery.record_count) == (None, None, 1)
        assert (delivery.entry, delivery.duplicate) == (EntryId(7, 4, 1), True)


async def test_a_delivery_carries_the_fields_of_the_brokers_answer() -> None:
    outcome = Outcome()
    outcome.settle(stored())
    delivery = await outcome
    assert (delivery.stream, delivery.entry, delivery.position) == ("s", EntryId(7, 4, 1), Position(2, 3, 64))
    assert (delivery.record, delivery.record_count, delivery.durability) == (9, 10, "replicated")
    assert (delivery.virtual_segment, delivery.backups, delivery.duplicate) == (5, (1, 2), False)
    assert await outcome is delivery


async def test_settling_wakes_waiters_and_leaves_cancelled_ones() -> None:
    outcome = Outcome()
    waiting = [asyncio.ensure_future(outcome.settled()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await asyncio.sleep(0)
    assert not outcome.done()
    outcome.settle(stored())
    await asyncio.gather(waiting[0], waiting[2])
    assert waiting[1].cancelled()


async def test_the_first_outcome_counts() -> None:
    outcome = Outcome()
    outcome.settle(ClosedError("closed"))
    outcome.settle(stored())
    with pytest.raises(ClosedError):
        outcome.result()


async def test_an_error_is_raised_to_every_waiter_and_its_traceback_does_not_grow() -> None:
    outcome = Outcome()
    outcome.settle(Unavailable("away"))
    depths = []
    for _ in range(3):
        with pytest.raises(Unavailable) as raised:
            await outcome
        depths.append(len(raised.traceback))
    assert len(set(depths)) == 1
    await outcome.settled()


def test_the_result_of_an_unsettled_outcome_raises() -> None:
    with pytest.raises(asyncio.InvalidStateError):
        Outcome().result()
