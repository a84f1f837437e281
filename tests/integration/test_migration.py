"""Streamlets move between brokers while producers and consumers run: no record is lost, repeated or out of order."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from kera.client import Client, DrainStatus, StreamletMove
from kera.core.base.settings import MIB
from kera.core.errors import InvalidArgument, StreamletOutOfRange
from tests.integration.control_support import (
    TIMEOUT_S,
    Reader,
    Writer,
    broker_id_of,
    broker_name,
    broker_names,
    check_log,
    connect,
    control_cluster,
    now_us,
    reader,
    settle,
    streamlets_of,
    until_recovered,
    until_safe,
    writer,
)
from tests.integration.shared_cluster import SharedCluster
from tests.integration.support import until_found


@pytest.fixture
async def client(members: SharedCluster) -> AsyncIterator[Client]:
    async with await connect(members) as connected:
        yield connected


async def owners(client: Client, stream: str) -> dict[int, int]:
    """The broker of each streamlet."""
    assignments = (await client.admin.describe_stream(stream)).assignments
    return {number: assignment.broker_id for number, assignment in assignments.items()}


async def check(client: Client, stream: str, writers: list[Writer], followers: list[Reader]) -> None:
    """Check that the followers, and a new reader, see everything."""
    await settle(writers)
    for follower in followers:
        await follower.catch_up(writers)
    assert await check_log(client, stream, writers) == sum(each.acknowledged for each in writers)


@pytest.mark.parametrize("replication", [pytest.param(0, marks=pytest.mark.slow), 1])
async def test_a_streamlet_moves_back_and_forth_under_producers_and_consumers(client: Client, replication: int) -> None:
    await client.admin.create_stream("s", streamlets=2, brokers=2, entries=2, group_segments=2, replication=replication)
    ids = sorted((await owners(client, "s")).values())
    async with (
        writer(client, "s", 0, pause_s=0.005) as one,
        writer(client, "s", 1, pause_s=0.005) as two,
        reader(client, "s") as follower,
        reader(client, "s", shared_memory="never") as another,
    ):
        for number in range(12):
            await one.go_on(count=20)
            at = (await owners(client, "s"))[0]
            moved = await client.admin.move_streamlet("s", 0, next(each for each in ids if each != at))
            assert moved.stream.assignments[0].broker_id != at
            assert moved.stall_us > 0  # bench/migration.py measures its length
            await one.go_on([0], count=5)
            if number % 3 == 0:
                another.reopen()
        await check(client, "s", [one, two], [follower, another])
        assignment = (await client.admin.describe_stream("s")).assignments[0]
        assert len(assignment.intervals) >= 2, "what was written before a move has not moved"
        assert set(assignment.broker_ids) == set(ids)


@pytest.mark.slow
async def test_each_interval_of_a_moved_streamlet_stays_on_its_broker(members: SharedCluster, client: Client) -> None:
    await client.admin.create_stream("s", group_segments=1, replication=1)
    ids = [broker_id_of(members, name) for name in broker_names(members)]
    async with writer(client, "s", pause_s=0.002) as load:
        for broker_id in (*ids, *ids):
            await load.go_on(count=150)
            await client.admin.move_streamlet("s", 0, broker_id)  # first to its current owner: nothing to do
        await check(client, "s", [load], [])
        intervals = (await client.admin.describe_stream("s")).assignments[0].intervals
        assert len(intervals) >= 5
        assert [each.first_group_id for each in intervals] == sorted({each.first_group_id for each in intervals})
        assert all(one.broker_id != next_.broker_id for one, next_ in itertools.pairwise(intervals))
        bounds = (await client.bounds("s"))[0][0]
        assert (bounds.first_record, bounds.next_record) == (0, load.acknowledged)


@pytest.mark.slow
async def test_old_intervals_of_a_broker_that_dies_are_recovered(members: SharedCluster, client: Client) -> None:
    await client.admin.create_stream("s", group_segments=1, replication=1)
    async with writer(client, "s", pause_s=0.002) as load, reader(client, "s") as follower:
        first = (await owners(client, "s"))[0]
        others = [broker_id_of(members, name) for name in broker_names(members)]
        others.remove(first)
        for broker_id in (others[0], first, others[1]):
            await load.go_on(count=150)
            await client.admin.move_streamlet("s", 0, broker_id)
        await load.go_on(count=50)
        begun_us = now_us()
        await members.kill(broker_name(members, first))  # it owns no streamlet, and has two older intervals
        await until_recovered(client, [first], begun_us)
        await load.go_on(count=50)
        await check(client, "s", [load], [follower])
        assert first not in (await client.admin.describe_stream("s")).assignments[0].broker_ids


async def test_a_stream_spreads_over_more_brokers_and_a_drained_one_can_stop(
    members: SharedCluster, client: Client
) -> None:
    await client.admin.create_stream("s", streamlets=6, brokers=1, group_segments=2, replication=1)
    async with (
        writer(client, "s", 0) as one,
        writer(client, "s", 1) as two,
        reader(client, "s") as follower,
    ):
        await one.go_on(count=50)
        await client.admin.alter_stream("s", brokers=3)
        assert sorted((await owners(client, "s")).values()) == [1, 1, 2, 2, 3, 3]
        await one.go_on()

        async def drained() -> DrainStatus | None:
            status = await client.admin.drain_broker(1)
            assert status.done or status.reasons, "it says what it waits for"
            return status if status.done else None

        status = await until_found(drained)
        assert (status.streamlets_owned, status.streamlets_held) == (0, 0)
        assert 1 not in (await owners(client, "s")).values()
        await one.go_on()
        await members.kill(broker_name(members, 1))  # its streamlets are elsewhere
        await one.go_on()
        await check(client, "s", [one, two], [follower])
        await until_safe(members)


async def test_a_dry_run_of_rebalancing_moves_nothing_and_a_real_run_does(client: Client) -> None:
    await client.admin.create_stream("s", streamlets=4, brokers=1, replication=1)
    (busy,) = set((await owners(client, "s")).values())
    async with writer(client, "s", pause_s=0.005) as load, reader(client, "s") as follower:
        await load.go_on(count=100)

        async def planned() -> Sequence[StreamletMove]:
            return (await client.admin.rebalance(dry_run=True)).moves

        moves = await until_found(planned)  # loads are reported with a heartbeat
        assert all(move.reason and move.from_broker_id == busy != move.to_broker_id for move in moves)
        assert set((await owners(client, "s")).values()) == {busy}, "a dry run moves nothing"

        async with asyncio.timeout(TIMEOUT_S):
            while len(await streamlets_of(client, "s", busy)) != 2:
                done = await client.admin.rebalance()
                assert all(move.error is None for move in done.moves)
                await load.go_on()
        await check(client, "s", [load], [follower])


@pytest.mark.slow
async def test_a_joining_broker_gets_its_share_of_small_streamlets_automatically(tmp_path: Path) -> None:
    settings = {"rebalance_interval_ms": 200, "move_rest_ms": 500}
    async with (
        control_cluster(tmp_path, brokers=3, backups=1, arena_bytes=32 * MIB, coordinator_settings=settings) as cluster,
        await connect(cluster) as client,
    ):
        ids = [broker_id_of(cluster, name) for name in broker_names(cluster)]
        joining = ids[-1]
        assert (await client.admin.drain_broker(joining)).done, "as if it was not there yet"
        await client.admin.create_stream("s", streamlets=30, replication=1)
        assert joining not in (await owners(client, "s")).values()
        async with writer(client, "s", pause_s=0.005) as load, reader(client, "s") as follower:
            await load.go_on(count=100)
            await client.admin.drain_broker(joining, undo=True)
            async with asyncio.timeout(TIMEOUT_S):
                while len(await streamlets_of(client, "s", joining)) < 9:
                    await load.go_on()
            await check(client, "s", [load], [follower])


async def test_an_impossible_move_is_refused_and_changes_nothing(client: Client) -> None:
    await client.admin.create_stream("s", replication=1)
    async with writer(client, "s") as load:
        before = (await client.admin.describe_stream("s")).assignments
        with pytest.raises(InvalidArgument):
            await client.admin.move_streamlet("s", 0, 99)
        with pytest.raises(StreamletOutOfRange):
            await client.admin.move_streamlet("s", 7, 1)
        await load.go_on()
        assert (await client.admin.describe_stream("s")).assignments == before
