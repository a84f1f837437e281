"""The consumer of a consumer group against a real broker service and a real coordinator's state, without processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kera.broker.log.read_plan import ordinal_of
from kera.client.admin.consumer_groups import ConsumerLag, describe_consumer_group, reset_consumer_group
from kera.client.consuming.group_consumer import GroupConsumer
from kera.client.consuming.group_consumer_settings import GroupConsumerSettings
from kera.client.consuming.leases import STEPS_MAX
from kera.core.clock import SystemClock
from kera.core.errors import ClosedError, DataLost, InvalidArgument, LeaseLost, Unavailable, Uncertain, UnknownStream
from kera.core.ids import EntryId, Position
from kera.core.settings import InvalidSettings
from kera.v1 import broker_pb2
from tests.unit.client.conftest import MakeProducer
from tests.unit.client.group_support import GroupCluster
from tests.unit.client.support import WAIT_S, Fault, until
from tests.unit.coordinator.fake_cluster import Cluster

ROW = bytes(4000)
GROUPS = 8
ROWS = 30 * GROUPS
"""Of 4 KB: so many groups of two segments of 64 KiB, about."""

MakeConsumer = Callable[..., GroupConsumer]


def numbered(number: int) -> bytes:
    return b"%06d" % number + ROW


@pytest.fixture
async def groups(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[GroupCluster]:
    """With a stream of one streamlet, or of as many as a test is parametrized with."""
    coordinator = Cluster()
    coordinator.clock = SystemClock()  # type: ignore[assignment]
    await coordinator.restart()
    cluster = GroupCluster(tmp_path, coordinator, entries=1, streamlets=getattr(request, "param", 1))
    yield cluster
    await cluster.close()
    cluster.arena.close()


@pytest.fixture
async def make_consumer(groups: GroupCluster) -> AsyncIterator[MakeConsumer]:
    async with AsyncExitStack() as stack:

        def make(*, on_lost: Any = None, steps_max: int = STEPS_MAX, **settings: Any) -> GroupConsumer:
            given = {"fetch_wait_ms": 20, "heartbeat_interval_ms": 20, "commit_interval_ms": 20, **settings}
            consumer = GroupConsumer(
                groups,  # type: ignore[arg-type]
                "app",
                ["s"],
                GroupConsumerSettings(**given),
                on_lost=on_lost,
                steps_max=steps_max,
            )
            stack.push_async_callback(consumer.close)
            return consumer

        yield make


@pytest.fixture
async def fill(groups: GroupCluster, make_producer: MakeProducer) -> Callable[..., Any]:
    producer = make_producer(groups, chunk_bytes_max=10_000)
    sent = 0

    async def send(count: int = ROWS) -> None:
        nonlocal sent
        values = [numbered(number) for number in range(sent, sent + count)]
        sent += count
        await producer.send_batch("s", pa.record_batch({"value": values}))
        await producer.flush()

    return send


async def take(consumer: GroupConsumer, count: int) -> list[int]:
    """So many records; leaves the loop as a caller may."""
    taken: list[int] = []
    async with asyncio.timeout(WAIT_S):
        async for record in consumer:
            assert record.value is not None
            taken.append(int(record.value[:6]))
            if len(taken) == count:
                break
    return taken


async def take_batches(consumer: GroupConsumer, count: int) -> list[int]:
    taken: list[int] = []
    async with asyncio.timeout(WAIT_S):
        async for chunk in consumer.batches():
            taken += [int(value[:6]) for value in chunk.batch["value"].to_pylist()]
            if len(taken) >= count:
                break
    return taken


async def test_all_groups_are_read_once_each_in_its_order(
    groups: GroupCluster, make_consumer: MakeConsumer, fill: Any
) -> None:
    await fill()
    consumer = make_consumer()
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
    make_consumer: MakeConsumer, fill: Any, count: int
) -> None:
    await fill()
    consumer = make_consumer()
    taken: list[int] = []
    while len(taken) < ROWS:
        taken += await take(consumer, min(count, ROWS - len(taken)))
    assert sorted(taken) == list(range(ROWS))


async def test_records_and_batches_may_take_turns(make_consumer: MakeConsumer, fill: Any) -> None:
    await fill(40)
    consumer = make_consumer()
    taken = await take(consumer, 3)
    rest = await take_batches(consumer, 38)
    assert (taken, rest) == ([0, 1, 2], list(range(2, 40))), "the chunk that was begun comes whole"


async def test_whoever_comes_next_goes_on_behind_the_last_commit(make_consumer: MakeConsumer, fill: Any) -> None:
    await fill()
    first = make_consumer()
    taken = await take_batches(first, 50)
    await first.commit()
    await first.close()
    rest = await take_batches(make_consumer(), ROWS - len(taken))
    assert sorted(taken + rest) == list(range(ROWS))


async def test_without_commits_nothing_is_left_out(make_consumer: MakeConsumer, fill: Any) -> None:
    await fill()
    first = make_consumer(commit_interval_ms=0)
    assert len(await take(first, ROWS)) == ROWS, "it gets groups, though it holds some that it has read"
    await first.close()
    second = make_consumer(commit_interval_ms=0)
    assert sorted(await take(second, ROWS)) == list(range(ROWS))
    await second.commit()
    await second.close()
    await fill(5)
    assert await take(make_consumer(), 5) == list(range(ROWS, ROWS + 5))


async def test_the_last_chunk_that_was_delivered_is_not_processed(make_consumer: MakeConsumer, fill: Any) -> None:
    await fill(30)
    first = make_consumer()
    taken = await take_batches(first, 10)
    await first.close()
    rest = await take_batches(make_consumer(), 30 - len(taken) + 1)
    assert set(taken) & set(rest) == set(taken[-len(set(taken) & set(rest)) :])
    assert set(taken) | set(rest) == set(range(30))
    assert set(taken) & set(rest)


async def test_two_consumers_share_a_backlog_of_one_entry(make_consumer: MakeConsumer, fill: Any) -> None:
    await fill()
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

    consumers = [make_consumer() for _ in range(2)]
    for consumer in consumers:
        await consumer.start()
    tasks = [asyncio.create_task(read(consumer)) for consumer in consumers]
    await until(lambda: len(taken) >= ROWS)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert sorted(taken) == list(range(ROWS))
    assert min(shares) > 0


async def test_what_goes_wrong_for_a_while_is_tried_again(
    groups: GroupCluster, make_consumer: MakeConsumer, fill: Any
) -> None:
    await fill()
    groups.failures.extend([Unavailable("away"), Uncertain("no answer"), Unavailable("away")])
    groups.connects.append(Unavailable("nobody there"))
    groups.loopback.read_faults.extend([Fault.LOST, Fault.NONE, Fault.NOT_SENT])
    groups.lose_answers = 20
    consumer = make_consumer()
    assert sorted(await take(consumer, ROWS)) == list(range(ROWS))
    await consumer.commit()


async def test_a_new_coordinator_changes_nothing(groups: GroupCluster, make_consumer: MakeConsumer, fill: Any) -> None:
    await fill()
    consumer = make_consumer()
    taken = await take(consumer, ROWS // 2)
    await groups.restart_coordinator()
    taken += await take(consumer, ROWS - ROWS // 2)
    await consumer.commit()
    assert sorted(taken) == list(range(ROWS))


async def test_commits_of_lost_groups_are_refused(groups: GroupCluster, make_consumer: MakeConsumer, fill: Any) -> None:
    await fill(10)
    consumer = make_consumer(commit_interval_ms=0)
    await take(consumer, 10)
    await groups.expel(consumer.member_id)
    with pytest.raises(LeaseLost) as caught:
        await consumer.commit()
    assert caught.value.attributes["groups"] == [["s", 0, 0, 1]]
    assert await take(consumer, 10) == list(range(10)), "it takes part again"
    await consumer.commit()


def truncate(groups: GroupCluster, group_id: int) -> int:
    """What is before a group is gone; the ordinal of its first record."""
    (entry,) = groups.streams.get(groups.info.stream_id).streamlet(0).entries
    start = Position(group_id, 1, 0)
    record = ordinal_of(entry, start)
    groups.streams.move_start(entry, start, record)
    return record


async def test_a_gap_that_nobody_had_found_is_told_until_it_is_committed(
    groups: GroupCluster, make_consumer: MakeConsumer, fill: Any
) -> None:
    first = make_consumer()
    await first.start()
    async with asyncio.timeout(WAIT_S):
        while not (await groups.described()).streamlets:
            await asyncio.sleep(0.001)
    await first.close()
    await fill()
    gone = truncate(groups, 4)
    for commit in (False, True):
        consumer = make_consumer(commit_interval_ms=0)
        with pytest.raises(DataLost, match="before any consumer had found them") as caught:
            await take(consumer, 1)
        assert caught.value.attributes["lost_records"] == [[0, gone]]
        if commit:
            await consumer.commit()
        await consumer.close()
    assert await take(make_consumer(), ROWS - gone) == list(range(gone, ROWS))


async def test_each_group_tells_its_own_part_of_a_gap(
    groups: GroupCluster, make_consumer: MakeConsumer, fill: Any
) -> None:
    """Of groups that a consumer has found, and of one that nobody has: no record is told to be lost twice."""
    await fill()
    consumer = make_consumer()
    taken = await take(consumer, 1)
    await consumer.close()
    (streamlet,) = (await groups.described()).streamlets
    last = max(group.next.group_id for group in streamlet.groups)
    await fill()
    gone = truncate(groups, last + 3)
    consumer = make_consumer()
    told: list[int] = []
    while len(taken) < 2 * ROWS - gone + 1:
        try:
            taken += await take(consumer, 1)
        except DataLost as error:
            told.append(error.attributes["available_from"][0])
    assert sorted(taken[1:]) == list(range(gone, 2 * ROWS))
    assert sorted(told) == [*range(2, last + 1), last + 3], "the last one did not end where it was when it was found"


async def test_what_is_much_to_commit_is_told_in_several_rounds(
    groups: GroupCluster, make_consumer: MakeConsumer, fill: Any
) -> None:
    await fill()
    consumer = make_consumer(commit_interval_ms=0, steps_max=2)
    assert sorted(await take_batches(consumer, ROWS)) == list(range(ROWS))
    before = len(groups.steps)
    await consumer.commit()
    told = groups.steps[before:]
    assert max(told) == 2
    assert sum(told) > 4, "one of each group"
    await consumer.close()
    await fill(5)
    assert await take(make_consumer(), 5) == list(range(ROWS, ROWS + 5)), "all was committed when the commit returned"


@pytest.mark.parametrize("groups", [5], indirect=True)
async def test_who_leaves_with_much_to_tell_does_so_in_several_requests(
    groups: GroupCluster, make_consumer: MakeConsumer, fill: Any
) -> None:
    for _ in range(10):
        await fill(5)
    consumer = make_consumer(commit_interval_ms=60_000, steps_max=1)
    taken = await take_batches(consumer, 50)
    before = len(groups.steps)
    await consumer.close()
    assert groups.steps[before:-1] == [1] * (len(groups.steps) - before - 1)
    assert sum(groups.steps[before:]) in (4, 5), "of each streamlet, but for one whose only chunk came last"
    again = await take_batches(make_consumer(), 1)
    assert again == taken[-len(again) :], "nothing else is left than the chunk that was taken last"


async def test_a_commit_while_the_coordinator_is_away_fails(
    groups: GroupCluster, make_consumer: MakeConsumer, fill: Any
) -> None:
    await fill(10)
    consumer = make_consumer()
    await take(consumer, 10)
    groups.failures.extend([Unavailable("away")] * 1000)
    with pytest.raises(Unavailable, match="away"):
        await consumer.commit()
    groups.failures.clear()
    await consumer.commit()


async def test_nothing_is_handed_out_when_nobody_has_heard_of_us_for_too_long(
    groups: GroupCluster, make_consumer: MakeConsumer, fill: Any
) -> None:
    await fill(40)
    consumer = make_consumer(session_timeout_ms=100)
    assert len(await take(consumer, 5)) == 5
    groups.failures.extend([Unavailable("away")] * 1000)
    loop = asyncio.get_running_loop()
    away_s = loop.time()
    await until(lambda: loop.time() > away_s + 0.1)
    waiting = asyncio.ensure_future(take(consumer, 35))
    rounds = groups.rounds
    await until(lambda: groups.rounds > rounds + 3)
    assert not waiting.done()
    groups.failures.clear()
    with pytest.raises(LeaseLost):
        await waiting
    assert len(set(await take(consumer, 36))) == 36


async def test_who_comes_back_too_late_is_handed_nothing_before_the_coordinator_has_answered(
    groups: GroupCluster, make_consumer: MakeConsumer, fill: Any
) -> None:
    """Others may have its groups by then, and read what was fetched ahead."""
    await fill(40)
    for taking in (take, take_batches):
        consumer = make_consumer(progress_timeout_ms=100)
        await taking(consumer, 1)
        groups.failures.extend([Unavailable("away")] * 10_000)
        await until(lambda consumer=consumer: consumer.busy_ms > 100)  # type: ignore[misc]
        waiting = asyncio.ensure_future(taking(consumer, 1))
        rounds = groups.rounds
        await until(lambda rounds=rounds: groups.rounds > rounds + 3)  # type: ignore[misc]
        assert not waiting.done()
        groups.failures.clear()
        with contextlib.suppress(LeaseLost):
            await waiting
        await consumer.close()


async def test_who_does_not_come_for_more_is_in_its_code_whatever_ended_the_wait(
    make_consumer: MakeConsumer, fill: Any
) -> None:
    """Else its groups would be with nobody who reads them, for as long as its process lives."""
    await fill(10)
    gone = make_consumer(progress_timeout_ms=200)
    await take(gone, 10)
    await gone.commit()
    waiting = asyncio.ensure_future(take(gone, 1))
    await until(lambda: gone.busy_ms == 0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await fill(10)
    assert await take(make_consumer(), 10) == list(range(10, 20))


async def test_who_is_told_of_a_loss_is_in_its_code(
    groups: GroupCluster, make_consumer: MakeConsumer, fill: Any
) -> None:
    await fill(10)
    consumer = make_consumer()
    await take(consumer, 5)
    await groups.expel(consumer.member_id)
    with pytest.raises(LeaseLost):
        await take(consumer, 1000)
    await until(lambda: consumer.busy_ms > 0)


async def test_a_commit_ends_also_when_the_callback_fails(
    groups: GroupCluster, make_consumer: MakeConsumer, fill: Any
) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("the caller's")

    await fill(10)
    consumer = make_consumer(commit_interval_ms=0, on_lost=broken)
    await take(consumer, 10)
    await groups.expel(consumer.member_id)
    with pytest.raises(RuntimeError, match="the caller's"):
        async with asyncio.timeout(WAIT_S):
            await consumer.commit()


@pytest.mark.parametrize("steps", range(1, 9))
async def test_a_close_that_is_cancelled_goes_on(
    groups: GroupCluster, make_consumer: MakeConsumer, fill: Any, steps: int
) -> None:
    """At whatever it waits for: others are to get the groups at once, and the broker's memory is to be given back."""
    await fill(10)
    consumer = make_consumer()
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


async def test_a_stream_that_is_gone_is_told(groups: GroupCluster, make_consumer: MakeConsumer, fill: Any) -> None:
    await fill(10)
    consumer = make_consumer()
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
async def test_a_consumer_group_is_put_nowhere_by_a_place_that_there_is_not(
    groups: GroupCluster, to: Any, meant: str
) -> None:
    with pytest.raises(InvalidArgument, match=meant):
        await reset_consumer_group(groups, "app", "s", to, force=False)  # type: ignore[arg-type]


async def test_a_consumer_group_is_not_put_behind_the_end(
    groups: GroupCluster, make_consumer: MakeConsumer, fill: Any
) -> None:
    """What comes then would be passed over, up to there."""
    await fill(10)
    ((bounds,),) = (await groups.bounds("s")).values()
    for beyond in (bounds.end._replace(offset=bounds.end.offset + 64), Position(99, 1, 0)):
        with pytest.raises(InvalidArgument, match="behind the end"):
            await reset_consumer_group(groups, "app", "s", {0: [beyond]}, force=False)  # type: ignore[arg-type]
    await reset_consumer_group(groups, "app", "s", {0: [bounds.end]}, force=False)  # type: ignore[arg-type]
    await fill(5)
    assert await take(make_consumer(), 5) == list(range(10, 15))


@pytest.mark.parametrize("groups", [5], indirect=True)
async def test_a_consumer_group_of_many_streamlets_is_put_elsewhere_in_several_requests(
    groups: GroupCluster, make_consumer: MakeConsumer, fill: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kera.client.consuming.committed.CURSORS_MAX", 2)
    for _ in range(10):
        await fill(5)
    consumer = make_consumer()
    first = await take_batches(consumer, 50)
    await consumer.commit()
    await consumer.close()
    await reset_consumer_group(groups, "app", "s", "earliest", force=False)  # type: ignore[arg-type]
    assert groups.reset == [2, 2, 1]
    assert sorted(await take_batches(make_consumer(), 50)) == sorted(first)


async def test_brokers_are_told_where_a_consumer_group_was_put(groups: GroupCluster, fill: Any) -> None:
    """Else retention would go by where it was, and remove what it is to read again."""
    await fill()
    truncate(groups, 3)
    ((bounds,),) = (await groups.bounds("s")).values()
    middle = Position(5, 1, 0)
    expected: list[tuple[Any, Position]] = [("earliest", bounds.start), ("latest", bounds.end), ({0: [middle]}, middle)]
    for to, told in expected:
        await reset_consumer_group(groups, "app", "s", to, force=False)  # type: ignore[arg-type]
        assert groups.committed[-1] == ("app", "s", {EntryId(groups.info.stream_id, 0, 0): told})


async def test_the_lag_of_who_is_behind_retention_is_what_is_left(
    groups: GroupCluster, make_consumer: MakeConsumer, fill: Any
) -> None:
    """It is then that people look."""
    await fill()
    consumer = make_consumer()
    await take(consumer, 1)
    await consumer.close()
    for group_id in (4, 6):  # in groups that are known
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


async def test_brokers_are_told_cursors(groups: GroupCluster, make_consumer: MakeConsumer, fill: Any) -> None:
    await fill(10)
    consumer = make_consumer()
    await take(consumer, 10)
    await consumer.commit()
    await until(lambda: bool(groups.committed))
    consumer_group, stream, positions = groups.committed[-1]
    assert (consumer_group, stream) == ("app", "s")
    (at,) = positions.values()
    await until(lambda: next(iter(groups.committed[-1][2].values())) == consumer.positions()[0, at.group_id])


async def test_who_waits_is_told_that_the_consumer_is_closed(groups: GroupCluster, make_consumer: MakeConsumer) -> None:
    consumer = make_consumer()
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


def test_heartbeats_have_to_come_well_before_the_session_ends() -> None:
    with pytest.raises(InvalidSettings, match="heartbeat_interval_ms"):
        GroupConsumerSettings.load(session_timeout_ms=1000, heartbeat_interval_ms=600)
    assert GroupConsumerSettings.load(session_timeout_ms=1000, heartbeat_interval_ms=500).section == "group_consumer"


@pytest.mark.parametrize("groups", [2], indirect=True)
async def test_groups_of_one_streamlet_do_not_wait_for_the_broker_of_another_that_stands_still(
    groups: GroupCluster, make_consumer: MakeConsumer, make_producer: MakeProducer
) -> None:
    def asks_of_the_first(request: Any) -> bool:
        if isinstance(request, broker_pb2.DescribeStreamletsRequest):
            return 0 in request.streamlet_ids
        return isinstance(request, broker_pb2.ListGroupsRequest) and request.streamlet_id == 0

    groups.loopback.stands_still = asks_of_the_first
    producer = make_producer(groups)
    await producer.send_batch("s", pa.record_batch({"value": [numbered(7)]}), streamlet=1)
    await producer.flush()
    assert await take(make_consumer(), 1) == [7]
