"""Consumers that share one group of segments in parts, and entries that are read in order."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Self

import pytest

from kera.client import GroupConsumer
from kera.client.consuming.groups import work_pace
from kera.coordinator.consumer_groups import members
from kera.coordinator.consumer_groups.progress import StreamletProgress
from kera.core.errors import InvalidArgument
from tests.unit.client.conftest import MakeMember
from tests.unit.client.group_support import GroupCluster, take
from tests.unit.client.support import until

COUNT = 24
"""Records of 4 KB each: less than a group."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "SPLIT_BYTES", 8_000)


class Readers:
    """Several consumers, each in a task that lets the others run after each record."""

    def __init__(self, consumers: list[GroupConsumer]) -> None:
        self.taken: list[list[int]] = [[] for _ in consumers]
        self.in_turn: list[int] = []
        """The records of all consumers, in order."""
        self._tasks = [asyncio.create_task(self._read(*each)) for each in zip(consumers, self.taken, strict=True)]

    async def _read(self, consumer: GroupConsumer, taken: list[int]) -> None:
        async for record in consumer:
            taken.append(int((record.value or b"")[:6]))
            self.in_turn.append(taken[-1])
            await asyncio.sleep(0.01)  # sleep: the work of a consumer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks)

    async def have(self, count: int) -> None:
        await until(lambda: len(self.in_turn) >= count)


async def started(make_member: MakeMember, count: int, **settings: Any) -> list[GroupConsumer]:
    consumers = [make_member(**settings) for _ in range(count)]
    for consumer in consumers:
        await consumer.start()
    return consumers


@pytest.mark.parametrize("joined_bytes_max", [0, pytest.param(1 << 18, marks=pytest.mark.slow)])
async def test_consumers_share_one_group_that_was_written_before(
    make_member: MakeMember, fill_groups: Any, joined_bytes_max: int
) -> None:
    await fill_groups(COUNT)
    async with Readers(await started(make_member, 3, joined_bytes_max=joined_bytes_max)) as readers:
        await readers.have(COUNT)
    assert sorted(readers.in_turn) == list(range(COUNT)), "each record once"
    assert min(map(len, readers.taken)) > 0


async def test_consumers_share_one_group_while_it_is_written(make_member: MakeMember, fill_groups: Any) -> None:
    async with Readers(await started(make_member, 3)) as readers:
        for sent in range(6, 5 * COUNT + 1, 6):
            await fill_groups(6)
            await readers.have(sent)
    assert sorted(readers.in_turn) == list(range(5 * COUNT))
    assert min(map(len, readers.taken)) > 0


async def test_slow_consumers_share_a_stream_that_is_smaller_than_the_usual_part(
    make_member: MakeMember, fill_groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a part takes 20 ms instead of a second."""
    monkeypatch.setattr(members, "SPLIT_BYTES", 1 << 20)
    monkeypatch.setattr(work_pace, "PART_MAX_S", 0.02)
    monkeypatch.setattr(work_pace, "PART_MIN_S", 0.0)
    await fill_groups(COUNT)
    async with Readers(await started(make_member, 2, joined_bytes_max=0, commit_interval_ms=50)) as readers:
        await readers.have(COUNT)
    assert sorted(readers.in_turn) == list(range(COUNT))
    assert min(map(len, readers.taken)) > 0


async def test_lost_answers_do_not_split_a_group_twice(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    await fill_groups(COUNT)
    groups.lose_answers = 1000
    async with Readers(await started(make_member, 3)) as readers:
        await readers.have(COUNT)
    assert sorted(readers.in_turn) == list(range(COUNT))


async def test_the_next_member_goes_on_in_all_parts(make_member: MakeMember, fill_groups: Any) -> None:
    await fill_groups(COUNT)
    consumers = await started(make_member, 3, commit_interval_ms=0)
    async with Readers(consumers) as readers:
        await until(lambda: all(readers.taken))
    for consumer in consumers:
        await consumer.commit()
        await consumer.close()
    async with Readers(await started(make_member, 1)) as last:
        await until(lambda: {*readers.in_turn, *last.in_turn} == set(range(COUNT)))
    assert len(set(readers.in_turn) & set(last.in_turn)) <= 3, "of a chunk that was begun, and no others"


async def test_a_group_is_read_to_its_end_when_the_coordinator_refuses_a_split(
    make_member: MakeMember, fill_groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    def split(*_: object) -> bool:
        nonlocal asked
        asked += 1
        return False

    monkeypatch.setattr(StreamletProgress, "split", split)
    await fill_groups(COUNT)
    async with Readers(await started(make_member, 2)) as readers:
        await readers.have(COUNT)
    assert sorted(readers.in_turn) == list(range(COUNT))
    assert asked


async def test_a_consumer_drops_a_lease_that_the_coordinator_split_late(
    make_member: MakeMember, fill_groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first split is refused, and made with the next request, when its consumer has gone on reading."""
    split, late = StreamletProgress.split, list[Any]()

    def split_late(*request: Any) -> bool:
        late.append(request)
        if len(late) == 1:
            return False
        if len(late) == 2:
            assert split(*late[0]), "nothing behind it is committed yet"
        return split(*request)

    monkeypatch.setattr(StreamletProgress, "split", split_late)
    await fill_groups(COUNT)
    lost: list[Any] = []
    async with Readers(await started(make_member, 2, on_lost=lost.extend, commit_interval_ms=60_000)) as readers:
        await until(lambda: set(readers.in_turn) == set(range(COUNT)))
    assert [(each.streamlet, each.entry) for each in lost] == [(0, 0)]


async def test_an_entry_is_read_from_start_to_end_with_in_order(make_member: MakeMember, fill_groups: Any) -> None:
    await fill_groups(4 * COUNT)
    async with Readers(await started(make_member, 3, in_order=True)) as readers:
        await readers.have(4 * COUNT)
    assert readers.in_turn == list(range(4 * COUNT))


async def test_in_order_is_refused_when_the_coordinator_does_not_support_it(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    def older(answer: Any) -> None:
        answer.in_order = False

    groups.spoil = older
    await fill_groups(1)
    with pytest.raises(InvalidArgument, match="upgrade the coordinators"):
        await take(make_member(in_order=True), 1)
