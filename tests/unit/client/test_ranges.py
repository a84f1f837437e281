"""Groups of segments that a broker pushes: their ends, cancellation, and faults."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kera.client.consuming.fetching.fetcher import Fetcher
from kera.client.consuming.fetching.ranges import Arrived, Range, rest_of_group
from kera.client.settings import ConsumerSettings
from kera.core.base.ids import EntryId, Position
from kera.core.errors import DataLost, InvalidCursor
from tests.unit.client.fake_support import STREAM_ID, MakeFleet
from tests.unit.client.push_broker import SOON, PushFleet, Reason, position_of
from tests.unit.client.support import WAIT_S, until
from tests.unit.client.test_fetcher import put
from tests.unit.client.test_push import log_of, opened

START, LAST = Position(1, 1, 0), (1 << 32) - 1
ENTRY = EntryId(STREAM_ID, 0, 0)


@pytest.fixture
async def fleet(make_fleet: MakeFleet, tmp_path: Path) -> AsyncIterator[PushFleet]:
    """Broker 1 pushes; it has group 1 with three chunks, and group 2 with two."""
    fleet = PushFleet(await make_fleet(timing=SOON), tmp_path)
    put(fleet, b"0", b"1", b"2")
    fleet.s.move(0, 1)
    put(fleet, b"3", b"4")
    await fleet.pushing.start(fleet.info.push_unix_path)
    yield fleet
    await fleet.pushing.close()


@dataclass
class Groups:
    """A fetcher, and group 1 as its range."""

    fetcher: Fetcher
    group: Range


@pytest.fixture
async def groups(fleet: PushFleet) -> AsyncIterator[Groups]:
    fetcher = Fetcher(fleet.cluster, ConsumerSettings())
    group = fetcher.add(await fleet.cluster.stream("s"), rest_of_group(ENTRY, START), is_group=True)
    yield Groups(fetcher, group)
    await fetcher.close()


async def taken(groups: Groups) -> Arrived:
    async with asyncio.timeout(WAIT_S):
        found = await groups.fetcher.take()
    assert found is not None
    assert found.range is groups.group
    return found


def ended(found: Arrived) -> bool:
    return found.fetched is None and found.gap is None


def place(found: Arrived) -> tuple[Position, Position]:
    assert found.fetched is not None
    return found.fetched.start, found.fetched.next


async def test_a_group_ends_where_the_next_one_of_its_entry_begins(fleet: PushFleet, groups: Groups) -> None:
    lane, log = await opened(fleet), log_of(fleet)
    reader = fleet.pushing.reader
    assert position_of(reader.subscribed[0].end) == Position(1, LAST, LAST)
    reader.push(lane, log[:2], 0)
    reader.push(lane, log[2:3], 0)
    reader.end(lane, Reason.REACHED, Position(2, 1, 0))
    assert place(await taken(groups)) == (START, log[1].end)
    assert place(await taken(groups)) == (log[1].end, log[2].end)
    assert ended(await taken(groups))
    await until(lambda: reader.held == 0 and reader.outstanding_bytes == 0)
    assert fleet.pulled == 0


async def test_an_open_group_ends_with_the_first_chunk_of_the_next_group(fleet: PushFleet, groups: Groups) -> None:
    """The end of an open group is unknown, so the broker refuses a lane with that end."""
    lane, log = await opened(fleet), log_of(fleet)
    reader = fleet.pushing.reader
    reader.push(lane, log[:1], 0)
    reader.end(lane, Reason.FAILED, log[0].end, InvalidCursor("such an end will not come"))
    lane = await opened(fleet, 2)
    assert not reader.subscribed[-1].HasField("end")
    assert position_of(reader.subscribed[-1].start) == log[0].end
    reader.push(lane, log[1:3], 0)
    reader.push(lane, log[3:4], 1)  # the entry's next group, which belongs to another consumer
    reader.push(lane, log[4:5], 1)
    assert place(await taken(groups)) == (START, log[0].end)
    assert place(await taken(groups)) == (log[0].end, log[2].end)
    assert ended(await taken(groups))
    await until(lambda: reader.cancelled == [lane] and reader.held == 0 and reader.outstanding_bytes == 0)
    assert fleet.pulled == 0


async def test_removing_a_group_cancels_its_lane_and_frees_late_chunks(fleet: PushFleet, groups: Groups) -> None:
    lane, log = await opened(fleet), log_of(fleet)
    reader = fleet.pushing.reader
    reader.push(lane, log[:1], 0)
    assert place(await taken(groups)) == (START, log[0].end)
    groups.fetcher.remove(groups.group)
    reader.push(lane, log[1:2], 0)  # still on its way
    await until(lambda: reader.cancelled == [lane] and reader.held == 0 and reader.outstanding_bytes == 0)


async def test_a_group_is_pulled_when_the_broker_says_so(fleet: PushFleet, groups: Groups) -> None:
    lane, log = await opened(fleet), log_of(fleet)
    reader = fleet.pushing.reader
    reader.push(lane, log[:1], 0)
    reader.end(lane, Reason.PULL, log[0].end)
    assert place(await taken(groups)) == (START, log[0].end)
    found = await taken(groups)
    assert found.fetched is not None
    assert (found.fetched.slot, found.fetched.start) == (None, log[0].end)
    assert fleet.pulled > 0


@pytest.mark.parametrize("fault", ["lost", "failed"])
async def test_a_group_goes_on_after_a_fault(fleet: PushFleet, groups: Groups, fault: str) -> None:
    lane, log = await opened(fleet), log_of(fleet)
    reader = fleet.pushing.reader
    reader.push(lane, log[:1], 0)
    assert place(await taken(groups)) == (START, log[0].end)
    if fault == "lost":
        reader.lose()
    else:
        gap: Any = DataLost("gone", available_from=list(log[2].start))
        reader.end(lane, Reason.FAILED, log[0].end, gap)
        assert (await taken(groups)).gap is not None
    lane = await opened(fleet, 2)
    start = position_of(fleet.pushing.reader.subscribed[-1].start)
    assert start == (log[1].start if fault == "lost" else log[2].start)
    fleet.pushing.reader.push(lane, log[2:3], 1)
    assert place(await taken(groups)) == (log[2].start, log[2].end)
