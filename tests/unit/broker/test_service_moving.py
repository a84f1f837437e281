"""Streamlets that move from broker to broker, under producers and readers."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kera.broker.records import EntryRecord, Gap, ProducerRecord, SegmentAddress, SegmentRecord
from kera.broker.serving.limits import ServingLimits
from kera.broker.storage.index_format import put_entry, put_producer, put_segment
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.base.turns import TimeSlices
from kera.core.errors import InvalidArgument, InvalidCursor, NotOwner, StaleEpoch, Unavailable, UnknownStream
from kera.core.format.chunk import iterate_chunks
from kera.core.rpc import Reply, api
from kera.v1 import common_pb2
from tests.unit.broker.moving_support import Cluster, assign, moved
from tests.unit.broker.persistence_support import MakeEngine
from tests.unit.broker.support import STREAM_ID, Broker, Engine, chunk, cursor, next_of, read_range, stream_info
from tests.virtual_loop import run_virtually

PERSISTED = common_pb2.DURABILITY_PERSISTED


@pytest.fixture
async def cluster(make_engine: MakeEngine) -> Cluster:
    """Brokers 1 and 2; the streamlet is at 1."""
    return Cluster(make_engine(16), make_engine(16))


def codes(statuses: Any) -> list[str]:
    return [status.error.code for status in statuses]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


# --- sealing -----------------------------------------------------------------------------------------------


async def test_a_sealed_streamlet_refuses_writes_and_reports_its_end(cluster: Cluster) -> None:
    cluster.send(5)
    cluster.send(1, producer=2)
    state = await cluster.seal(1)

    assert (state.streamlet_id, state.next_group_id, list(state.next_records)) == (0, 2, [6])
    assert {each.producer_id: each.next_sequence for each in state.producers} == {1: 5, 2: 1}
    assert codes(cluster.owner.append(chunk(1, 5))) == ["not_owner"]
    assert cluster.owner.counters.not_owner == 1
    assert await cluster.read_all() == cluster.sent


async def test_a_repeated_seal_has_the_same_state_and_a_newer_assignment_without_a_move_ends_it(
    cluster: Cluster,
) -> None:
    cluster.send(2)
    assert await cluster.seal(1) == await cluster.seal(1)

    await cluster.open(1)  # a late order from before the seal
    (status,) = cluster.owner.append(chunk(1, 2))
    assert status.error.code == NotOwner.code

    cluster.info.assignments_version += 1
    await cluster.open(1)
    cluster.send(2)
    assert (await cluster.seal(1)).next_group_id == 3, "what is sent after a seal begins a new group"
    assert await cluster.read_all() == cluster.sent


async def test_a_seal_that_comes_after_a_newer_assignment_is_refused(cluster: Cluster) -> None:
    cluster.send(2)
    cluster.info.assignments_version = given_in = 7
    await cluster.open(1)
    cluster.info.assignments_version += 1
    await cluster.open(1)  # the sender of the order has got no answer, and has given it up
    with pytest.raises(Unavailable, match="came late"):
        await cluster.seal(1, version=given_in)

    cluster.send(2)
    assert (await cluster.seal(1, version=given_in + 1)).next_group_id == 2


async def test_a_streamlet_of_another_broker_cannot_be_sealed(cluster: Cluster) -> None:
    await cluster.move(2)
    with pytest.raises(NotOwner):
        await cluster.seal(1)


async def test_a_former_owner_reports_again_where_it_ended(cluster: Cluster) -> None:
    """Only the former owner knows it when the metadata of the move are lost."""
    with pytest.raises(InvalidArgument, match="has not moved away"):
        await cluster.where_ended(1)
    cluster.send(3)
    state = await cluster.move(2)
    cluster.send(3)

    assert await cluster.where_ended(1) == state


async def test_a_seal_that_waits_too_long_for_the_disk_fails_and_the_streamlet_goes_on(
    make_engine: MakeEngine,
) -> None:
    cluster = Cluster(make_engine(16), durability=PERSISTED)
    cluster.owner.paused = True
    write = asyncio.ensure_future(cluster.owner.write(chunk(1, 0)))  # type: ignore[arg-type]
    with pytest.raises(
        Unavailable, match=r"1024 bytes of entry 0 of streamlet 0 did not get to disk within 20 ms"
    ) as no:
        await cluster.seal(1, wait_ms=20)

    assert no.value.retriable
    assert no.value.attributes["waits_for"] == "disk"
    again = asyncio.ensure_future(cluster.owner.write(chunk(1, 1)))  # type: ignore[arg-type]
    cluster.owner.resume()
    assert codes((await write).message.statuses) + codes((await again).message.statuses) == ["", ""]


async def test_a_seal_waits_until_the_disk_has_everything(make_engine: MakeEngine) -> None:
    cluster = Cluster(make_engine(16), durability=PERSISTED)
    cluster.owner.paused = True
    write = asyncio.ensure_future(cluster.owner.write(chunk(1, 0)))  # type: ignore[arg-type]
    sealing = asyncio.ensure_future(cluster.seal(1))
    await until(lambda: cluster.owner.streams.get(STREAM_ID).streamlet(0).sealed)
    assert not sealing.done()
    cluster.owner.resume()

    assert list((await sealing).next_records) == [1]
    assert codes((await write).message.statuses) == [""]


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_a_seal_that_is_overtaken_by_an_opening_fails(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """Also before it waits for the disk: it may first give way to other orders."""

    async def step(_: TimeSlices) -> None:
        for _turn in range(turns):
            await asyncio.sleep(0)

    monkeypatch.setattr(TimeSlices, "step", step)
    cluster = Cluster(make_engine(16), durability=PERSISTED)
    cluster.owner.paused = True
    write = asyncio.ensure_future(cluster.owner.write(chunk(1, 0)))  # type: ignore[arg-type]
    sealing = asyncio.ensure_future(cluster.seal(1))
    await until(lambda: cluster.owner.streams.get(STREAM_ID).streamlet(0).sealed)
    cluster.info.assignments_version += 1
    await cluster.open(1)
    with pytest.raises(Unavailable, match="opened again"):
        await sealing

    cluster.owner.resume()
    await write
    assert codes((await cluster.owner.write(chunk(1, 1))).message.statuses) == [""]  # type: ignore[misc]


def test_a_seal_that_fails_leaves_another_seal_under_way_alone(make_engine: MakeEngine) -> None:
    async def seal_twice() -> None:
        cluster = Cluster(make_engine(16), durability=PERSISTED)
        cluster.owner.paused = True
        write = asyncio.ensure_future(cluster.owner.write(chunk(1, 0)))  # type: ignore[arg-type]
        first = asyncio.ensure_future(cluster.seal(1, wait_ms=20))
        await asyncio.sleep(0.01)  # sleep: half of its virtual time
        second = asyncio.ensure_future(cluster.seal(1))
        with pytest.raises(Unavailable):
            await first
        assert cluster.owner.streams.get(STREAM_ID).streamlet(0).sealed
        cluster.owner.resume()

        assert (await second).next_group_id == 2
        await write

    run_virtually(seal_twice())


# --- orders of coordinators --------------------------------------------------------------------------------


async def test_orders_of_a_replaced_coordinator_are_refused(cluster: Cluster) -> None:
    cluster.send(1)
    await cluster.open(1, epoch=5)
    for order in (
        cluster.seal(1, epoch=4),
        cluster.open(1, epoch=4),
        cluster.owner.ask(api.DROP_STREAM, api.DROP_STREAM.request(stream_id=STREAM_ID, coordinator_epoch=4)),
        cluster.owner.ask(api.TAKE_OVER, api.TAKE_OVER.request(coordinator_epoch=4)),
    ):
        with pytest.raises(StaleEpoch, match="since epoch 5"):
            await order

    assert (await cluster.seal(1, epoch=5)).next_group_id == 2
    assert (await cluster.seal(1)).next_group_id == 2, "who does not say is believed"


async def test_assignments_older_than_the_known_ones_change_nothing(cluster: Cluster) -> None:
    cluster.send(3)
    before = cluster.info
    await cluster.move(2)
    await cluster.open(1, info=before)

    assert codes(cluster.brokers[1].append(chunk(1, 3))) == ["not_owner"]
    cluster.send(3)
    assert await cluster.read_all() == cluster.sent


@pytest.mark.parametrize("knows", [False, True])
async def test_assignments_that_do_not_descend_from_the_known_ones_are_refused(
    cluster: Cluster, *, knows: bool
) -> None:
    """A coordinator with an older copy of the metadata would drop data here that may be nowhere else."""
    known, later = (5 << 24) + 1, 6 << 24
    cluster.info.assignments_version = known
    await cluster.open(1)
    cluster.send(3)
    state = await cluster.seal(1)
    other = moved(cluster.info, state, 2)
    other.assignments[0].intervals[0].broker_id = 2  # as if nothing had been at broker 1
    other.assignments_version = later
    other.assignments_lineage.extend([known] * knows + [later])

    if knows:
        await cluster.open(1, info=other)
        assert codes(cluster.brokers[1].append(chunk(1, 3))) == ["not_owner"]
        return
    with pytest.raises(Unavailable, match="may have been restored from an older copy"):
        await cluster.open(1, info=other)
    cluster.info.assignments_version = known + 1
    await cluster.open(1)  # by a coordinator that knows them: nothing has moved, and the seal is over
    cluster.send(1)
    assert await cluster.read_all() == cluster.sent


# --- moving ------------------------------------------------------------------------------------------------


async def test_producers_go_on_at_the_new_owner_and_repeats_are_stored_once(cluster: Cluster) -> None:
    cluster.send(3)
    state = await cluster.move(2)
    repeated, following = cluster.owner.append(chunk(1, 2), chunk(1, 3))

    assert repeated.duplicate
    assert not following.duplicate
    assert (following.group_id, following.first_record) == (state.next_group_id, 3)
    assert codes(cluster.brokers[1].append(chunk(1, 4))) == ["not_owner"]
    assert codes(cluster.owner.append(chunk(1, 9))) == ["out_of_sequence"]


async def test_a_streamlet_that_comes_back_goes_on_where_the_other_broker_stopped(cluster: Cluster) -> None:
    cluster.send(5)
    await cluster.move(2)
    cluster.send(6)
    cluster.send(1, producer=4)
    await cluster.move(1)
    repeated, following = cluster.owner.append(chunk(1, 10), chunk(1, 11))

    assert repeated.duplicate
    assert (following.group_id, following.first_record) == (3, 12)
    cluster.sequences[1] += 1
    cluster.sent.append((1, 11))
    assert await cluster.read_all() == cluster.sent
    assert [each.broker_id for each in cluster.info.assignments[0].intervals] == [1, 2, 1]


async def test_groups_go_on_behind_an_interval_in_which_another_broker_wrote_none(cluster: Cluster) -> None:
    cluster.send(2)
    state = await cluster.seal(1)
    state.next_group_id = 1 << 24  # as after a recovery
    cluster.info = assign(cluster.info, 2, [(1, 1, []), (1 << 24, 2, [2])], first_group_id=1 << 24)
    await cluster.open(2, state)
    await cluster.open(1)
    _, following = await cluster.read_once(EARLIEST)
    assert following == Position(1 << 24, 1, 0)
    await cluster.move(1)

    assert await cluster.read_once(following) == ([], following)
    (status,) = cluster.owner.append(chunk(1, 2))
    assert (status.group_id, status.first_record) == (1 << 24, 2)
    found, _ = await cluster.read_once(following)
    assert found == [(1, 2)]


async def test_a_reader_is_sent_from_interval_to_interval(cluster: Cluster) -> None:
    cluster.send(2)
    await cluster.move(2)
    cluster.send(2)
    await cluster.move(1)

    found, following = await cluster.read_once(EARLIEST)
    assert (found, following) == ([(1, 0), (1, 1)], Position(2, 1, 0))
    assert await cluster.read_once(Position(1, 1, 2048)) == ([], Position(2, 1, 0))
    found, following = await cluster.read_once(following)
    assert (found, following) == ([(1, 2), (1, 3)], Position(3, 1, 0))
    assert await cluster.read_once(following) == ([], following)
    cluster.send(1)
    assert (await cluster.read_once(following))[0] == [(1, 4)]


@pytest.mark.parametrize(("position", "at"), [(Position(2, 1, 0), 1), (Position(1, 1, 0), 2), (EARLIEST, 2)])
async def test_a_position_at_another_broker_is_refused(cluster: Cluster, position: Position, at: int) -> None:
    cluster.send(2)
    await cluster.move(2)
    cluster.send(2)
    with pytest.raises(NotOwner, match="at another broker") as raised:
        await cluster.read_once(position, at=at)

    assert raised.value.retriable
    assert raised.value.attributes == {"streamlet_id": 0, "group_id": position.group_id}


async def test_a_position_that_never_existed_is_an_invalid_cursor(cluster: Cluster) -> None:
    cluster.send(2)
    await cluster.move(2)
    with pytest.raises(InvalidCursor):
        await cluster.read_once(Position(1, 2, 0))


@pytest.mark.parametrize("sent", [0, 3])
async def test_a_waiting_reader_goes_on_when_its_interval_closes(cluster: Cluster, sent: int) -> None:
    cluster.send(sent)
    position = (await cluster.read_once(EARLIEST))[1]
    waiting = asyncio.ensure_future(cluster.read_once(position, wait_ms=60_000))
    await asyncio.sleep(0)
    state = await cluster.seal(1)
    cluster.info = moved(cluster.info, state, 2) if sent else assign(cluster.info, 2, [(1, 1, []), (1, 2, [0])])
    await cluster.open(2, state)
    assert not waiting.done(), "a seal alone is not an end"
    await cluster.open(1)

    async with asyncio.timeout(10):
        assert await waiting == ([], Position(state.next_group_id, 1, 0))


async def test_a_waiting_reader_gets_not_owner_when_no_group_is_left_here(cluster: Cluster) -> None:
    waiting = asyncio.ensure_future(cluster.read_once(EARLIEST, wait_ms=60_000))
    await asyncio.sleep(0)
    await cluster.move(2)

    async with asyncio.timeout(10):
        with pytest.raises(NotOwner):
            await waiting
    assert cluster.brokers[1].streams.get(STREAM_ID).streamlets == {}


async def test_a_reader_skips_intervals_in_which_its_entry_has_no_chunks(make_engine: MakeEngine) -> None:
    cluster = Cluster(make_engine(16), make_engine(16), entries=3)
    cluster.send(2, producer=0)
    await cluster.move(2)
    cluster.send(2, producer=1)
    await cluster.move(1)
    cluster.send(2, producer=2)

    for entry in range(3):
        assert await cluster.read_all(entry=entry) == [(entry, 0), (entry, 1)]


async def test_an_empty_interval_disappears_and_its_neighbours_become_one(cluster: Cluster) -> None:
    cluster.send(2)
    await cluster.move(2)
    await cluster.move(1)
    cluster.send(2)

    (interval,) = cluster.info.assignments[0].intervals
    assert (interval.broker_id, interval.first_group_id) == (1, 1)
    assert await cluster.read_all() == cluster.sent
    assert cluster.brokers[2].streams.get(STREAM_ID).streamlets == {}


async def test_opening_again_with_the_state_handed_over_forgets_no_later_write(cluster: Cluster) -> None:
    cluster.send(3)
    state = await cluster.move(2)
    cluster.send(3)
    await cluster.open(2, state)
    repeated, following = cluster.owner.append(chunk(1, 5), chunk(1, 6))

    assert (repeated.duplicate, following.duplicate) == (True, False)
    assert (following.group_id, following.first_record) == (2, 6)


async def test_a_new_owner_refuses_writes_until_it_has_the_state_handed_over(cluster: Cluster) -> None:
    """A registration may name its streamlets earlier, without the sequences of their producers."""
    cluster.send(3)
    state = await cluster.seal(1)
    cluster.info = moved(cluster.info, state, 2)
    assert await cluster.open(2) == [0], "it says what it lacks"
    assert codes(cluster.owner.append(chunk(1, 3))) == ["not_owner"]
    assert await cluster.open(2, state) == []

    repeated, following = cluster.owner.append(chunk(1, 2), chunk(1, 3))
    assert (repeated.duplicate, following.first_record) == (True, 3)


async def test_a_streamlet_that_comes_back_waits_for_a_flush_under_way(make_engine: MakeEngine) -> None:
    cluster = Cluster(make_engine(16), make_engine(16))
    cluster.send(3)
    await cluster.move(2)
    cluster.send(3)
    first = cluster.brokers[1]
    first.paused = True
    first.engine.memory.segments.close_all()
    jobs = first.engine.memory.plan()
    state = await cluster.seal(2)
    cluster.info = moved(cluster.info, state, 1)
    opening = asyncio.ensure_future(cluster.open(1, state))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not first.streams.get(STREAM_ID).streamlet(0).owned
    for job in jobs:
        first.engine.perform(job)
    first.resume()
    async with asyncio.timeout(10):
        await opening

    assert first.engine.index.producers(STREAM_ID, 0)[1].next_sequence == 6
    cluster.send(1)


async def test_the_state_handed_over_is_in_the_index_before_the_opening_is_answered(cluster: Cluster) -> None:
    cluster.send(3)
    state = await cluster.seal(1)
    cluster.info = moved(cluster.info, state, 2)
    second = cluster.brokers[2]
    second.paused = True
    opening = asyncio.ensure_future(cluster.open(2, state))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not opening.done()
    assert STREAM_ID not in second.streams
    second.resume()
    await opening

    assert second.engine.index.producers(STREAM_ID, 0)[1].next_sequence == 3


async def test_moves_under_load_neither_lose_nor_duplicate_chunks(make_engine: MakeEngine) -> None:
    """Producers have chunks in flight, a reader follows, and the streamlet keeps moving."""
    cluster = Cluster(make_engine(24), make_engine(24))
    stop = False

    async def produce(producer: int) -> int:
        sequence = 0
        while not stop or sequence % 3:
            statuses = cluster.owner.append(*(chunk(producer, each) for each in range(sequence, sequence + 3)))
            taken = sum(not status.error.code for status in statuses)
            assert {status.error.code for status in statuses} <= {
                "",
                "not_owner",
                "unknown_stream",  # the map is known before the new owner gets its order
                "out_of_sequence",
            }
            sequence += taken if taken < 3 or sequence % 2 else 2  # sometimes the answer for the last one is lost
            await asyncio.sleep(0)
        return sequence

    async def read() -> list[tuple[int, int]]:
        position, found = EARLIEST, []
        while True:
            done = stop and all(task.done() for task in producing)
            try:
                some, following = await cluster.read_once(position, wait_ms=5)
            except (NotOwner, UnknownStream):
                await asyncio.sleep(0)
                continue
            found += some
            if done and not some and following == position and cluster.where(position) == cluster.where(following):
                return found
            position = following

    producing = [asyncio.ensure_future(produce(producer)) for producer in (1, 2, 3)]
    reading = asyncio.ensure_future(read())
    for number in range(8):
        for _ in range(3):
            await asyncio.sleep(0)
        await cluster.move(2 - number % 2)
        await asyncio.sleep(0)
        for broker in cluster.brokers.values():
            broker.engine.run()
    stop = True
    async with asyncio.timeout(30):
        sent = await asyncio.gather(*producing)
        found = await reading

    for producer, count in zip((1, 2, 3), sent, strict=True):
        mine = [sequence for each, sequence in found if each == producer]
        assert mine == list(range(len(mine)))
        assert len(mine) >= count


# --- descriptions ------------------------------------------------------------------------------------------


async def describe(cluster: Cluster, number: int) -> tuple[Position, Position, int, int]:
    request = api.DESCRIBE_STREAMLETS.request(stream_id=STREAM_ID)
    (row,) = (await cluster.brokers[number].ask(api.DESCRIBE_STREAMLETS, request)).streamlets[0].entries
    start, end = (Position(each.group_id, each.segment_id, each.position) for each in (row.start, row.end))
    return start, end, row.first_record, row.next_record


async def test_each_broker_reports_whether_it_has_the_oldest_groups(cluster: Cluster) -> None:
    async def leads(number: int) -> bool:
        request = api.DESCRIBE_STREAMLETS.request(stream_id=STREAM_ID)
        return bool((await cluster.brokers[number].ask(api.DESCRIBE_STREAMLETS, request)).streamlets[0].leads)

    cluster.send(2)
    await cluster.move(2)
    assert [await leads(number) for number in (1, 2)] == [True, False]


async def test_each_broker_reports_the_bounds_of_its_groups(cluster: Cluster) -> None:
    cluster.send(2)
    await cluster.move(2)
    first = (Position(1, 1, 0), Position(1, 1, 2048), 0, 2)
    assert await describe(cluster, 1) == first
    assert await describe(cluster, 2) == (Position(2, 1, 0), Position(2, 1, 0), 2, 2)
    cluster.send(3)
    await cluster.move(1)

    assert await describe(cluster, 2) == (Position(2, 1, 0), Position(2, 1, 3072), 2, 5)
    assert await describe(cluster, 1) == (Position(1, 1, 0), Position(3, 1, 0), 0, 5)
    cluster.send(1)
    assert await describe(cluster, 1) == (Position(1, 1, 0), Position(3, 1, 1024), 0, 6)


async def test_a_lag_counts_only_records_at_the_broker(cluster: Cluster) -> None:
    cluster.send(2)
    await cluster.move(2)
    cluster.send(3)
    await cluster.move(1)
    cluster.send(4)
    (result,) = cluster.brokers[1].read(read_range(Position(1, 1, 0)), bytes_max=1024).message.results

    assert (next_of(result), result.lag_records) == (Position(1, 1, 1024), 1 + 4)
    cursors = [cursor(), cursor(Position(1, 1, 1024)), cursor(Position(3, 1, 1024)), cursor(Position(2, 1, 0))]
    answer = await cluster.brokers[1].ask(api.MEASURE_LAG, api.MEASURE_LAG.request(cursors=cursors))
    told = [(lag.records, lag.bytes, lag.oldest_us, lag.next_record) for lag in answer.lags]
    assert told == [(6, 6 * 1024, 5, 0), (5, 5 * 1024, 5, 1), (3, 3 * 1024, 5, 6), (0, 0, 0, 0)]
    assert answer.lags[3].error.code == "not_owner"


async def test_groups_are_listed_up_to_the_interval_of_another_broker(cluster: Cluster) -> None:
    cluster.send(2)
    await cluster.move(2)
    cluster.send(3)
    await cluster.move(1)
    cluster.send(1)
    told = []
    for after in range(4):
        request = api.LIST_GROUPS.request(stream_id=STREAM_ID, after_group_id=after)
        answer = await cluster.brokers[1].ask(api.LIST_GROUPS, request)
        assert answer.complete
        groups = [(g.group_id, g.closed, g.first_record, g.next_record, g.length_bytes) for g in answer.groups]
        told.append((groups, answer.end_group_id))

    assert told == [([(1, True, 0, 2, 2048)], 2), ([], 2), ([(3, False, 5, 6, 1024)], 0), ([], 0)]


async def test_there_are_no_groups_behind_the_last_id(cluster: Cluster) -> None:
    cluster.send(1)
    last = (1 << 64) - 1
    request = api.LIST_GROUPS.request(stream_id=STREAM_ID, after_group_id=last)
    answer = await cluster.brokers[1].ask(api.LIST_GROUPS, request)
    assert (answer.complete, [*answer.groups], answer.end_group_id) == (True, [], last)


async def test_a_truncation_at_a_later_interval_removes_the_older_ones(cluster: Cluster) -> None:
    cluster.send(5)
    await cluster.move(2)
    cluster.send(5)
    await cluster.move(1)
    cluster.send(1)
    cursors = [cursor(Position(2, 1, 1024))]
    for broker in cluster.brokers.values():
        await broker.ask(api.TRUNCATE_STREAMLETS, api.TRUNCATE_STREAMLETS.request(cursors=cursors))

    assert (await describe(cluster, 1))[0::2] == (Position(3, 1, 0), 10)
    assert await cluster.read_once(EARLIEST) == ([], Position(2, 1, 0))
    assert await cluster.read_all(Position(2, 1, 1024)) == cluster.sent[6:]


async def test_a_cursor_in_a_later_interval_can_be_committed_here(cluster: Cluster) -> None:
    cluster.send(5)
    await cluster.move(2)
    cluster.send(5)
    request = api.COMMIT_CURSORS.request(consumer_group="a", cursors=[cursor(Position(2, 1, 1024))])
    for number in (1, 2):
        (result,) = (await cluster.brokers[number].ask(api.COMMIT_CURSORS, request)).results
        assert not result.error.code


async def test_requests_for_groups_of_other_brokers_are_refused(cluster: Cluster) -> None:
    cluster.send(2)
    await cluster.move(2)
    cluster.send(2)
    for number, group_id in ((1, 2), (2, 1)):
        request = api.GET_AVAILABLE_SEGMENTS.request(stream_id=STREAM_ID, streamlet_id=0, group_id=group_id)
        with pytest.raises(NotOwner):
            await cluster.brokers[number].ask(api.GET_AVAILABLE_SEGMENTS, request)


async def test_a_streamlet_without_groups_here_is_removed_with_its_files(cluster: Cluster) -> None:
    cluster.send(5)
    first = cluster.brokers[1]
    await cluster.move(2)
    first.engine.memory.segments.close_all()
    first.engine.run()
    assert list(first.engine.store.physical_ids())
    cluster.info = assign(cluster.info, 2, [(3, 2, [5])])
    await cluster.open(1)
    first.engine.run()

    assert first.streams.get(STREAM_ID).streamlets == {}
    assert list(first.engine.store.physical_ids()) == []
    assert [key[:1] for key in first.engine.index.keys_of_stream(STREAM_ID)] == [b"i"]  # the description of the stream
    with pytest.raises(NotOwner):
        await cluster.read_once(Position(1, 1, 0), at=1)


async def test_a_streamlet_that_left_for_good_can_come_back(cluster: Cluster) -> None:
    cluster.send(5)
    await cluster.move(2)
    first = cluster.brokers[1]
    first.paused = True
    cluster.info = assign(cluster.info, 2, [(cluster.info.assignments[0].intervals[-1].first_group_id, 2, [5])])
    await cluster.open(1)
    state = await cluster.seal(2)
    cluster.info = moved(cluster.info, state, 1)
    opening = asyncio.ensure_future(cluster.open(1, state))
    await asyncio.sleep(0)
    first.resume()
    await opening
    (status,) = first.append(chunk(1, 5))

    assert (status.error.code, status.first_record) == ("", 5)
    reply = first.read(read_range(Position(2, 1, 0)))
    assert isinstance(reply, Reply)
    assert [header.sequence for piece in reply.bulk for header, _ in iterate_chunks(piece)] == [5]


async def test_a_read_of_a_segment_that_is_still_to_come_gets_recovering(engine: Engine) -> None:
    address = SegmentAddress(STREAM_ID, 0, 0, 1, 1)
    record = SegmentRecord(0, 1024, False, 1, 0, 0, 1, 10, 20, 5)
    entry = EntryRecord(Position(1, 1, 0), 0, 1, 1024, 1, 1, 1)
    engine.index.commit([put_segment(address, record), put_entry(EntryId(*address[:3]), entry)])
    broker = Broker(engine, stream_info(), limits=ServingLimits(load_wait_ms=10))
    reply = await broker.read(read_range(Position(1, 1, 0)))

    assert [result.error.code for result in reply.message.results] == ["recovering"]
    lag = await broker.ask(api.MEASURE_LAG, api.MEASURE_LAG.request(cursors=[cursor(Position(1, 1, 0))]))
    assert [(each.records, each.bytes, each.oldest_us) for each in lag.lags] == [(1, 1024, 5)]


async def test_leftovers_of_a_launch_that_lost_its_memory_do_not_come_back(cluster: Cluster) -> None:
    index = cluster.brokers[2].streams.index
    lost = Gap(Position(3, 1, 64), Position(1 << 24, 1, 0))
    record = EntryRecord(Position(3, 1, 0), 40, 50, 64, 1, last_group_id=3, last_segment_id=1, gaps=(lost,))
    index.commit([put_entry(EntryId(STREAM_ID, 0, 0), record), put_producer(STREAM_ID, 0, 1, ProducerRecord(1, 900))])
    cluster.send(3)
    await cluster.move(2)
    cluster.send(3)

    assert await cluster.read_all() == cluster.sent
    await cluster.move(1)
    cluster.send(1)
    assert await cluster.read_all() == cluster.sent
