"""The accumulator: records of an open chunk, and the delivery of each record."""

import asyncio
from typing import Any

import pytest

from kera.client.producing.open_chunks.accumulator import Accumulator
from kera.client.producing.outcomes.outcome import Outcome
from kera.client.types import Delivery
from kera.core.base.ids import EntryId, Position
from kera.core.errors import ClosedError

ENTRY = EntryId(1, 2, 0)


def accumulator() -> Accumulator:
    return Accumulator("s", 2, 0.0)


def delivery(first: int, count: int, offset: int = 0) -> Delivery:
    return Delivery("s", ENTRY, Position(1, 1, offset), first, count, "leader", duplicate=False)


def append(to: Accumulator, value: bytes = b"v", **fields: Any) -> Any:
    pending = to.append(value, fields.get("time_s", 0.0), size=10)
    to.describe_last(fields.get("keys"), fields.get("timestamp_us"), fields.get("headers"))
    return pending


async def test_each_record_gets_its_own_ordinal() -> None:
    open_chunk = accumulator()
    pending = [append(open_chunk) for _ in range(3)]
    open_chunk.split([3], [open_chunk.delivered])
    open_chunk.delivered.settle(delivery(100, 3))
    assert [await each for each in pending] == [delivery(100 + index, 1) for index in range(3)]


async def test_records_awaited_before_the_chunk_is_split_get_their_ordinals() -> None:
    open_chunk = accumulator()
    waiting = [asyncio.ensure_future(append(open_chunk)) for _ in range(4)]
    await asyncio.sleep(0)
    later = Outcome()
    open_chunk.split([1, 3], [open_chunk.delivered, later])
    open_chunk.delivered.settle(delivery(7, 1))
    later.settle(delivery(20, 3, offset=64))
    assert [each.record for each in await asyncio.gather(*waiting)] == [7, 20, 21, 22]


async def test_records_of_a_split_chunk_succeed_or_fail_with_their_part() -> None:
    open_chunk = accumulator()
    pending = [append(open_chunk) for _ in range(2)]
    later = Outcome()
    open_chunk.split([1, 1], [open_chunk.delivered, later])
    open_chunk.delivered.settle(delivery(0, 1))
    later.settle(ClosedError("closed"))
    assert (await pending[0]).record == 0
    with pytest.raises(ClosedError):
        await pending[1]


async def test_a_cancelled_waiter_leaves_the_other_waiters() -> None:
    open_chunk = accumulator()
    impatient, patient = [asyncio.ensure_future(append(open_chunk)) for _ in range(2)]
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.sleep(0)
    open_chunk.delivered.settle(delivery(0, 2))
    assert (await patient).record == 1
    assert impatient.cancelled()


async def test_a_failure_of_the_chunk_fails_its_records_and_unawaited_ones_do_not_warn() -> None:
    open_chunk = accumulator()
    pending = append(open_chunk)
    append(open_chunk)  # not awaited: this must not warn (warnings are errors here)
    open_chunk.fail(ClosedError("closed"))
    with pytest.raises(ClosedError):
        await pending


async def test_columns_appear_with_their_first_value() -> None:
    open_chunk = accumulator()
    append(open_chunk, b"a", time_s=5e-6)
    assert (open_chunk.keys, open_chunk.headers, open_chunk.timestamps_us) == (None, None, None)
    append(open_chunk, b"b", keys=(b"k",))
    append(open_chunk, b"c", headers={"h": b"x"}, timestamp_us=-7)
    assert open_chunk.values == [b"a", b"b", b"c"]
    assert (open_chunk.times_s, open_chunk.timestamps_us) == ([5e-6, 0.0, 0.0], {2: -7})
    assert open_chunk.created_us == 5
    assert open_chunk.keys == [None, (b"k",), None]
    assert open_chunk.headers == [None, None, {"h": b"x"}]
    assert open_chunk.size == 30
