"""`kera.client.OrderedConsumer` over given epochs. Tests with daemons are in tests/integration."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kera.client.epochs import ordered_consumer
from kera.client.epochs.epoch import Epoch
from kera.client.epochs.ordered_consumer import OrderedConsumer
from kera.core.base.ids import EntryId, Position
from tests.unit.client.epoch_support import ENTRY, STREAM, chunk


class Given(AsyncIterator[Epoch]):
    """Epochs, each ending at the position of its number, and errors between them."""

    def __init__(self, *epochs: Epoch | Exception) -> None:
        self._left = list(epochs)
        self._passed = 0
        self.committed: list[Any] = []

    async def start(self) -> None:
        pass

    def streams(self) -> dict[int, Any]:
        return {7: STREAM}

    async def __anext__(self) -> Epoch:
        if not self._left:
            raise StopAsyncIteration
        epoch = self._left.pop(0)
        if isinstance(epoch, Exception):
            raise epoch
        self._passed += 1
        return epoch

    def cursors(self) -> dict[EntryId, Position]:
        return {ENTRY: Position(1, 1, self._passed)}

    async def commit_up_to(self, cursors: dict[EntryId, Position]) -> None:
        self.committed.append(cursors[ENTRY].offset)


def consumer_of(*epochs: Epoch | Exception) -> tuple[OrderedConsumer, Given]:
    given: Any = Given(*epochs)
    return OrderedConsumer(given, is_bounded=True), given


def epoch(number: int, *times: int) -> Epoch:
    made = chunk(list(times) or [1])
    if not times:
        made = made._replace(batch=made.batch.slice(0, 0))  # like an unreadable chunk that is skipped
    return Epoch(number, 0, 100, (made,), {7: STREAM})


async def test_an_epoch_without_readable_records_is_passed_over() -> None:
    for face in ("batches", "records"):
        consumer, given = consumer_of(epoch(0), epoch(1, 5, 3), epoch(2))
        if face == "batches":
            found = [(each.epoch, each.batch["value"].to_pylist()) async for each in consumer.batches()]
            assert found == [(1, [b"3", b"5"])]
        else:
            assert [record.value async for record in consumer] == [b"3", b"5"]
        await consumer.commit()
        assert given.committed == [3], "also what could not be read counts as delivered"


async def test_an_epoch_counts_as_delivered_with_its_last_record() -> None:
    consumer, given = consumer_of(epoch(0, 4, 2), epoch(1, 5))
    for expected in (0, 1, 2):
        await anext(aiter(consumer))
        await consumer.commit()
        assert given.committed[-1] == expected
    assert await consumer.next_records() == []


async def test_next_records_ends_before_the_last_record_of_an_epoch() -> None:
    consumer, given = consumer_of(epoch(0, 4, 2, 3))
    assert [record.timestamp_us for record in await consumer.next_records()] == [2, 3]
    await consumer.commit()
    assert [record.timestamp_us for record in await consumer.next_records()] == [4]
    await consumer.commit()
    assert given.committed == [0, 1]


async def test_the_epochs_of_a_failed_table_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered_consumer, "BATCH_ROWS_MAX", 2)
    for face in ("batches", "records", "table"):
        consumer, given = consumer_of(
            epoch(0, 3, 1, 2), TimeoutError("first"), epoch(1, 5, 4), TimeoutError("second"), epoch(2), epoch(3, 6)
        )
        values = (await anext(consumer.batches())).batch["value"].to_pylist()
        for which in ("first", "second"):
            with pytest.raises(TimeoutError, match=which):
                await consumer.to_arrow()
            await consumer.commit()
        assert given.committed == [0, 0]
        if face == "batches":
            values += [value async for each in consumer.batches() for value in each.batch["value"].to_pylist()]
        elif face == "records":
            values += [record.value async for record in consumer]
        else:
            values += (await consumer.to_arrow())["value"].to_pylist()
        assert values == [b"1", b"2", b"3", b"4", b"5", b"6"]
        await consumer.commit()
        assert given.committed[-1] == 4
