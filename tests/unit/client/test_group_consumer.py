"""`GroupConsumer` against a real broker service and a real coordinator's state, without processes."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import pyarrow as pa
import pytest

from kera.client.admin.consumer_groups import ConsumerLag, describe_consumer_group
from kera.client.admin.resetting import reset_consumer_group
from kera.client.consuming.group_consumer import GroupConsumer
from kera.client.consuming.groups.settings import GroupConsumerSettings
from kera.core.base.clock import FakeClock
from kera.core.base.ids import EntryId, Position
from kera.core.base.settings import InvalidSettings
from kera.core.errors import ClosedError, InvalidArgument, UnknownStream
from kera.v1 import broker_pb2
from tests.unit.client.conftest import MakeMember, MakeProducer
from tests.unit.client.group_support import GROUPS, ROWS, GroupCluster, numbered, take, take_batches, truncate
from tests.unit.client.support import WAIT_S, until


async def test_every_group_is_read_once_and_in_order(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    await fill_groups()
    consumer = make_member()
    by_group: dict[int, list[int]] = {}
    seen = 0
    async with asyncio.timeout(WAIT_S):
        async for chunk in consumer.batches():
            values = [int(value[:6]) for value in chunk.batch["value"].to_pylist()]
            by_group.setdefault(chunk.start.group_id, []).extend(values)
            seen += len(values)
            if seen == ROWS:
                break
    assert len(by_group) > GROUPS / 2
    assert sorted(chain.from_iterable(by_group.values())) == list(range(ROWS))
    assert all(values == sorted(values) for values in by_group.values())
    assert groups.rounds > 2


@pytest.mark.parametrize("count", [1, 7, ROWS // 2])
async def test_a_new_loop_goes_on_where_the_last_one_stopped(
    make_member: MakeMember, fill_groups: Any, count: int
) -> None:
    await fill_groups()
    consumer = make_member()
    taken: list[int] = []
    while len(taken) < ROWS:
        taken += await take(consumer, min(count, ROWS - len(taken)))
    assert sorted(taken) == list(range(ROWS))


async def test_records_and_batches_may_take_turns(make_member: MakeMember, fill_groups: Any) -> None:
    await fill_groups(40)
    consumer = make_member()
    taken = await take(consumer, 3)
    rest = await take_batches(consumer, 38)
    assert (taken, rest) == ([0, 1, 2], list(range(2, 40))), "the chunk that was begun comes whole"


async def test_several_tasks_share_the_batches_of_one_consumer(make_member: MakeMember, fill_groups: Any) -> None:
    await fill_groups()
    consumer = make_member()
    taken: list[int] = []
    all_there = asyncio.Event()

    async def read() -> None:
        async for chunk in consumer.batches():
            taken.extend(int(value[:6]) for value in chunk.batch["value"].to_pylist())
            if len(taken) >= ROWS:
                all_there.set()
            await asyncio.sleep(0)  # let the other tasks run

    readers = [asyncio.create_task(read()) for _ in range(3)]
    async with asyncio.timeout(WAIT_S):
        await all_there.wait()
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    assert sorted(taken) == list(range(ROWS))


async def test_the_next_member_goes_on_after_the_last_commit(make_member: MakeMember, fill_groups: Any) -> None:
    await fill_groups()
    first = make_member()
    taken = await take_batches(first, 50)
    await first.commit()
    await first.close()
    rest = await take_batches(make_member(), ROWS - len(taken))
    assert sorted(taken + rest) == list(range(ROWS))


@pytest.mark.parametrize("records_max", [1, 500])
async def test_the_next_member_goes_on_after_the_last_committed_poll(
    make_member: MakeMember, fill_groups: Any, records_max: int
) -> None:
    await fill_groups()
    first = make_member(commit_interval_ms=0)
    taken: list[int] = []
    while len(taken) < 50:
        records = await first.poll(WAIT_S, records_max=records_max)
        assert 0 < len(records) <= records_max
        taken += [int(record.value[:6]) for record in records]
        await first.commit()
    await first.close()
    rest = await take(make_member(), ROWS - len(taken))
    assert sorted(taken + rest) == list(range(ROWS))


async def test_records_of_a_poll_count_as_processed_with_the_next_poll(
    make_member: MakeMember, fill_groups: Any
) -> None:
    await fill_groups(30)
    first = make_member()
    polled = [[int(record.value[:6]) for record in await first.poll(WAIT_S)] for _ in range(3)]
    await first.close()
    rest = await take(make_member(), 30 - len(polled[0] + polled[1]))
    assert set(rest) == set(range(30)) - {*polled[0], *polled[1]}


async def test_uncommitted_records_are_read_again_by_the_next_member(make_member: MakeMember, fill_groups: Any) -> None:
    await fill_groups()
    first = make_member(commit_interval_ms=0)
    assert len(await take(first, ROWS)) == ROWS, "it gets groups, though it holds some that it has read"
    await first.close()
    second = make_member(commit_interval_ms=0)
    assert sorted(await take(second, ROWS)) == list(range(ROWS))
    await second.commit()
    await second.close()
    await fill_groups(5)
    assert await take(make_member(), 5) == list(range(ROWS, ROWS + 5))


async def test_the_last_delivered_chunk_does_not_count_as_processed(make_member: MakeMember, fill_groups: Any) -> None:
    await fill_groups(30)
    first = make_member()
    taken = await take_batches(first, 10)
    await first.close()
    rest = await take_batches(make_member(), 30 - len(taken) + 1)
    assert set(taken) & set(rest) == set(taken[-len(set(taken) & set(rest)) :])
    assert set(taken) | set(rest) == set(range(30))
    assert set(taken) & set(rest)


async def test_two_consumers_share_a_backlog_of_one_entry(make_member: MakeMember, fill_groups: Any) -> None:
    await fill_groups()
    taken: list[int] = []
    shares: list[int] = []

    async def read(consumer: GroupConsumer) -> None:
        shares.append(0)
        at = len(shares) - 1
        async for record in consumer:
            assert record.value is not None
            taken.append(int(record.value[:6]))
            shares[at] += 1
            if shares[at] % 5 == 0:
                await asyncio.sleep(0)

    consumers = [make_member() for _ in range(2)]
    for consumer in consumers:
        await consumer.start()
    tasks = [asyncio.create_task(read(consumer)) for consumer in consumers]
    await until(lambda: len(taken) >= ROWS)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(taken) == list(range(ROWS))
    assert min(shares) > 0


async def test_a_member_that_stops_asking_for_records_loses_its_groups(
    members_clock: FakeClock, make_member: MakeMember, fill_groups: Any
) -> None:
    """Otherwise its groups would stay unread for as long as its process lives."""
    await fill_groups(10)
    gone = make_member(progress_timeout_ms=60_000)
    await take(gone, 10)
    await gone.commit()
    waiting = asyncio.ensure_future(take(gone, 1))
    await until(lambda: gone.busy_ms == 0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    members_clock.advance(61)
    await fill_groups(10)
    assert await take(make_member(), 10) == list(range(10, 20))


@pytest.mark.parametrize("steps", range(1, 9))
async def test_a_cancelled_close_still_leaves_the_group(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any, steps: int
) -> None:
    """At each of its waits: other members get the groups at once, and the broker gets its memory back."""
    await fill_groups(10)
    consumer = make_member()
    await take(consumer, 10)
    closing = asyncio.ensure_future(consumer.close())
    for _ in range(steps):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    async with asyncio.timeout(WAIT_S):
        while (await groups.described()).members:
            await asyncio.sleep(0.001)
    await until(lambda: not [task for task in asyncio.all_tasks() if "/kera/client/" in repr(task)])
    await consumer.close()


async def test_reads_and_commits_of_a_deleted_stream_fail(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    await fill_groups(10)
    consumer = make_member()
    await take(consumer, 10)
    del groups.infos["s"]
    with pytest.raises(UnknownStream):
        await take(consumer, 1)
    with pytest.raises(UnknownStream):
        await consumer.commit()


@pytest.mark.parametrize(
    ("to", "meant"),
    [
        ("Latest", "did you mean 'latest'"),
        (0, "a time"),
        (None, "a time"),
        (("earliest",), "a time"),
        ({0: 5}, "positions are"),
    ],
)
async def test_resetting_a_group_to_an_invalid_place_is_refused(groups: GroupCluster, to: Any, meant: str) -> None:
    with pytest.raises(InvalidArgument, match=meant):
        await reset_consumer_group(groups, "app", "s", to, force=False)  # type: ignore[arg-type]


async def test_resetting_a_group_beyond_the_end_is_refused(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    """The group would skip later records up to that position."""
    await fill_groups(10)
    ((bounds,),) = (await groups.bounds("s")).values()
    for beyond in (bounds.end._replace(offset=bounds.end.offset + 64), Position(99, 1, 0)):
        with pytest.raises(InvalidArgument, match="beyond the end"):
            await reset_consumer_group(groups, "app", "s", {0: [beyond]}, force=False)  # type: ignore[arg-type]
    await reset_consumer_group(groups, "app", "s", {0: [bounds.end]}, force=False)  # type: ignore[arg-type]
    await fill_groups(5)
    assert await take(make_member(), 5) == list(range(10, 15))


@pytest.mark.parametrize("groups", [5], indirect=True)
async def test_a_reset_of_many_streamlets_takes_several_requests(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kera.client.consuming.committed.CURSORS_MAX", 2)
    for _ in range(10):
        await fill_groups(5)
    consumer = make_member()
    first = await take_batches(consumer, 50)
    await consumer.commit()
    await consumer.close()
    await reset_consumer_group(groups, "app", "s", "earliest", force=False)  # type: ignore[arg-type]
    assert groups.reset == [2, 2, 1]
    assert sorted(await take_batches(make_member(), 50)) == sorted(first)


async def test_brokers_get_the_new_cursors_of_a_reset_group(groups: GroupCluster, fill_groups: Any) -> None:
    """Otherwise retention would use the old position and remove records that the group is to read again."""
    await fill_groups()
    truncate(groups, 3)
    ((bounds,),) = (await groups.bounds("s")).values()
    middle = Position(5, 1, 0)
    expected: list[tuple[Any, Position]] = [("earliest", bounds.start), ("latest", bounds.end), ({0: [middle]}, middle)]
    for to, told in expected:
        await reset_consumer_group(groups, "app", "s", to, force=False)  # type: ignore[arg-type]
        assert groups.committed[-1] == ("app", "s", {EntryId(groups.info.stream_id, 0, 0): told})


async def test_the_lag_of_a_group_behind_retention_counts_only_remaining_records(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    """Operators look at the lag in just this case."""
    await fill_groups()
    consumer = make_member()
    await take(consumer, 1)
    await consumer.close()
    for group_id in (4, 6):  # groups that the coordinator knows
        gone = truncate(groups, group_id)
        (entry,) = (await describe_consumer_group(groups, "app")).entries  # type: ignore[arg-type]
        assert entry.lag is not None
        assert entry.lag.records == ROWS - gone
        assert entry.lag.bytes > 0
        assert entry.lag.oldest_us > 0
    ((bounds,),) = (await groups.bounds("s")).values()
    (log_entry,) = groups.streams.get(groups.info.stream_id).streamlet(0).entries
    groups.streams.move_start(log_entry, bounds.end, ROWS)
    (entry,) = (await describe_consumer_group(groups, "app")).entries  # type: ignore[arg-type]
    assert entry.lag == ConsumerLag(0, 0, 0), "all is gone"


async def test_brokers_get_the_cursors_of_a_commit(
    groups: GroupCluster, make_member: MakeMember, fill_groups: Any
) -> None:
    await fill_groups(10)
    consumer = make_member()
    await take(consumer, 10)
    await consumer.commit()
    await until(lambda: bool(groups.committed))
    consumer_group, stream, positions = groups.committed[-1]
    assert (consumer_group, stream) == ("app", "s")
    (at,) = positions.values()
    await until(lambda: next(iter(groups.committed[-1][2].values())) == consumer.positions()[0, at.group_id])


async def test_closing_a_consumer_ends_waiting_reads_with_an_error(
    groups: GroupCluster, make_member: MakeMember
) -> None:
    consumer = make_member()
    waiting = asyncio.ensure_future(take(consumer, 1))
    await until(lambda: groups.rounds > 0)
    await consumer.close()
    with pytest.raises(ClosedError):
        await waiting
    for use in (consumer.commit(), take(consumer, 1)):
        with pytest.raises(ClosedError):
            await use


async def test_a_consumer_needs_a_stream_and_a_consumer_group(groups: GroupCluster) -> None:
    for consumer_group, streams in (("", ["s"]), ("app", [])):
        with pytest.raises(InvalidArgument):
            GroupConsumer(groups, consumer_group, streams, GroupConsumerSettings())  # type: ignore[arg-type]
    with pytest.raises(UnknownStream):
        await GroupConsumer(groups, "app", ["none"], GroupConsumerSettings()).start()  # type: ignore[arg-type]


def test_a_heartbeat_interval_above_half_of_the_session_timeout_is_refused() -> None:
    with pytest.raises(InvalidSettings, match="heartbeat_interval_ms"):
        GroupConsumerSettings.load(session_timeout_ms=1000, heartbeat_interval_ms=600)
    assert GroupConsumerSettings.load(session_timeout_ms=1000, heartbeat_interval_ms=500).section == "group_consumer"


@pytest.mark.parametrize("groups", [2], indirect=True)
async def test_groups_of_one_streamlet_do_not_wait_for_a_stuck_broker_of_another(
    groups: GroupCluster, make_member: MakeMember, make_producer: MakeProducer
) -> None:
    def asks_of_the_first(request: Any) -> bool:
        if isinstance(request, broker_pb2.DescribeStreamletsRequest):
            return 0 in request.streamlet_ids
        return isinstance(request, broker_pb2.ListGroupsRequest) and request.streamlet_id == 0

    groups.loopback.stands_still = asks_of_the_first
    producer = make_producer(groups)
    await producer.send_batch("s", pa.record_batch({"value": [numbered(7)]}), streamlet=1)
    await producer.flush()
    assert await take(make_member(), 1) == [7]


async def test_a_consumer_closed_during_its_start_does_not_join(
    groups: GroupCluster, make_member: MakeMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up, go_on = groups.stream, asyncio.Event()

    async def slowly(name: str) -> Any:
        await go_on.wait()
        return await look_up(name)

    monkeypatch.setattr(groups, "stream", slowly)
    consumer = make_member()
    starting = asyncio.create_task(consumer.start())
    await asyncio.sleep(0)
    await consumer.close()
    go_on.set()
    with pytest.raises(ClosedError):
        await starting
    assert not len(consumer._tasks)
