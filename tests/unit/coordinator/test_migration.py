import asyncio
import gc

import pytest

from kera.coordinator.operations.migration import Migration, MigrationLimits
from kera.core.errors import InvalidArgument, StreamletOutOfRange, Unavailable, Uncertain, UnknownStream
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2
from tests.unit.coordinator.fake_cluster import FIRST_VERSION, Cluster, until


@pytest.fixture
async def two(cluster: Cluster) -> Cluster:
    """Two brokers; the stream ``orders`` has two streamlets on the first one."""
    await cluster.register("a")
    await cluster.create("orders", streamlets=2)
    await cluster.register("b")
    return cluster


def places(cluster: Cluster, streamlet_id: int = 0) -> list[tuple[int, int, list[int]]]:
    assignment = cluster.coordinator.state.catalog.named("orders").assignments[streamlet_id]
    return [(one.broker_id, one.first_group_id, list(one.first_records)) for one in assignment.intervals]


def owner(cluster: Cluster, streamlet_id: int = 0) -> int:
    return cluster.coordinator.state.catalog.named("orders").assignments[streamlet_id].broker_id


async def moves(cluster: Cluster) -> list[str]:
    return list(await cluster.store.list("moves/"))


class Watched:
    """A hook that notes the outcomes of moves."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def __call__(self, outcome: str, stall_s: float) -> None:
        self.seen.append((outcome, stall_s))


async def test_a_streamlet_moves_and_its_older_groups_stay(two: Cluster) -> None:
    two.brokers.ends[1, 0] = common_pb2.StreamletState(
        streamlet_id=0,
        next_group_id=57,
        next_records=[1000],
        producers=[common_pb2.ProducerState(producer_id=7, producer_epoch=1, next_sequence=9)],
    )

    moved = await two.coordinator.migration.move("orders", 0, 2)

    assert moved.stream == two.coordinator.state.catalog.named("orders")
    assert moved.stream.assignments_version == FIRST_VERSION + 1
    assert places(two) == [(1, 1, []), (2, 57, [1000])]
    assignment = moved.stream.assignments[0]
    assert (assignment.broker_id, assignment.broker_epoch, assignment.first_group_id) == (2, 2, 57)
    assert two.brokers.sealed == [(1, 1, 0)]
    assert two.brokers.handed_over[2, 1, 0].producers[0].next_sequence == 9
    assert two.brokers.opened[-2:] == [(2, "orders"), (1, "orders")]
    assert two.brokers.streams[1, 1] == moved.stream
    assert await moves(two) == []
    assert list(await two.store.list("handover/")) == ["handover/0000000000000001/00000000"]
    assert (await two.restart()).state.catalog.named("orders") == moved.stream
    assert [one.broker_id for one in two.coordinator.state.brokers_of(moved.stream)] == [1, 2]


async def test_a_move_to_the_current_owner_changes_nothing(two: Cluster) -> None:
    moved = await two.coordinator.migration.move("orders", 0, 1)

    assert (moved.stall_us, moved.stream.assignments_version, two.brokers.sealed) == (0, FIRST_VERSION, [])


async def test_a_streamlet_that_moves_back_unwritten_has_one_interval_again(two: Cluster) -> None:
    await two.coordinator.migration.move("orders", 0, 2)
    await two.coordinator.migration.move("orders", 0, 1)

    assert (owner(two), places(two)) == (1, [])


async def test_the_starts_of_entries_at_an_owner_that_wrote_nothing_are_deleted(two: Cluster) -> None:
    """Otherwise a recovery would take the older groups of the previous owner for removed ones."""

    def start(group_id: int) -> coordinator_pb2.HeartbeatRequest:
        cursor = common_pb2.Cursor(stream_id=1, streamlet_id=0, entry=0, group_id=group_id, segment_id=1)
        return coordinator_pb2.HeartbeatRequest(starts=[common_pb2.EntryStart(start=cursor, first_record=10)])

    two.brokers.ends[1, 0] = common_pb2.StreamletState(streamlet_id=0, next_group_id=4, next_records=[10])
    await two.coordinator.migration.move("orders", 0, 2)
    await two.heartbeat(2, starts=start(4).starts)
    assert len(await two.store.list("starts/")) == 1
    await two.coordinator.migration.move("orders", 0, 1)
    assert (owner(two), places(two)) == (1, [])
    assert await two.store.list("starts/") == {}

    await two.heartbeat(2, starts=start(4).starts)  # a late report
    assert await two.store.list("starts/") == {}
    await two.heartbeat(1, starts=start(2).starts)
    assert len(await two.store.list("starts/")) == 1


async def test_an_impossible_move_is_refused_before_any_seal(two: Cluster) -> None:
    move = two.coordinator.migration.move
    with pytest.raises(UnknownStream):
        await move("other", 0, 2)
    with pytest.raises(StreamletOutOfRange, match="has 2 streamlets, no 2"):
        await move("orders", 2, 2)
    with pytest.raises(InvalidArgument, match="there is no broker 9"):
        await move("orders", 0, 9)
    await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=2))
    with pytest.raises(InvalidArgument, match="is being emptied"):
        await move("orders", 0, 2)
    await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=2, undo=True))
    await two.silence(2)
    with pytest.raises(Unavailable, match="broker 2 is not alive"):
        await move("orders", 0, 2)

    assert (two.brokers.sealed, await moves(two)) == ([], [])


@pytest.mark.parametrize("failure", [Unavailable("nothing got to disk in time"), Uncertain("no answer in 3 s")])
async def test_a_move_is_undone_when_its_seal_fails(two: Cluster, failure: Exception) -> None:
    two.brokers.failures[1] = failure
    move = asyncio.create_task(two.coordinator.migration.move("orders", 0, 2))
    with pytest.raises(type(failure), match=str(failure)):
        await move
    assert owner(two) == 1
    assert len(await moves(two)) == 1  # the streamlet may be sealed
    with pytest.raises(Unavailable, match="is being moved"):
        await two.coordinator.migration.move("orders", 0, 2)

    two.brokers.failures.clear()
    await two.settle()

    assert await moves(two) == []
    told = two.brokers.streams[1, 1]
    assert (told.assignments[0].broker_id, told.assignments_version) > (
        1,
        FIRST_VERSION,
    )  # a later version undoes the seal
    await two.coordinator.migration.move("orders", 0, 2)
    assert owner(two) == 2


async def test_a_streamlet_goes_back_when_its_new_owner_refuses_it(two: Cluster) -> None:
    two.brokers.failures[2] = InvalidArgument("the group is larger than the arena")

    with pytest.raises(InvalidArgument, match="larger than the arena"):
        await two.coordinator.migration.move("orders", 0, 2)

    assert (owner(two), places(two), await moves(two)) == (1, [], [])
    assert two.brokers.streams[1, 1] == two.coordinator.state.catalog.named("orders")


async def test_a_handover_is_repeated_until_the_new_owner_answers(two: Cluster) -> None:
    two.brokers.failures[2] = Unavailable("nobody there")
    with pytest.raises(Unavailable):
        await two.coordinator.migration.move("orders", 0, 2)
    assert owner(two) == 2
    await two.settle()
    assert len(await moves(two)) == 1

    two.brokers.failures.clear()
    await two.settle()

    assert await moves(two) == []
    assert (2, 1, 0) in two.brokers.handed_over
    assert two.brokers.streams[1, 1] == two.coordinator.state.catalog.named("orders")


async def test_an_unreachable_old_owner_learns_of_the_move_later(two: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(_: int, streamlet_id: int) -> common_pb2.StreamletState:
        two.brokers.failures[1] = Uncertain("no answer")
        return common_pb2.StreamletState(streamlet_id=streamlet_id, next_group_id=2, next_records=[10])

    monkeypatch.setattr(two.brokers, "end", end)
    await two.coordinator.migration.move("orders", 0, 2)
    assert len(await moves(two)) == 1

    two.brokers.failures.clear()
    await two.settle()
    assert await moves(two) == []
    assert two.brokers.streams[1, 1] == two.coordinator.state.catalog.named("orders")


async def test_a_streamlet_under_recovery_cannot_move(cluster: Cluster) -> None:
    for launch in "abc":
        await cluster.register(launch)
    await cluster.register_backup("x")
    await cluster.create("orders", streamlets=3, replication=1)
    lost = owner(cluster)
    cluster.brokers.waits_for = ["a backup"]
    await cluster.silence(lost)
    await cluster.register("again", broker_id=lost, lost_memory=True)
    move = cluster.coordinator.migration.move
    with pytest.raises(Unavailable, match=f"a takeover of the data of broker {lost} is under way"):
        await move("orders", 1, lost)

    cluster.brokers.waits_for = []
    await cluster.settle()
    await cluster.settle()
    assert owner(cluster) != lost
    (other,) = {1, 2, 3} - {lost, owner(cluster)}
    with pytest.raises(Unavailable, match="streamlet 0 of stream 'orders' is being recovered"):
        await move("orders", 0, other)


async def test_a_streamlet_returns_when_its_new_owner_is_lost_before_it_opened_it(cluster: Cluster) -> None:
    for launch in "ab":
        await cluster.register(launch)
    await cluster.register_backup("x")
    await cluster.create("orders", replication=1)
    before = owner(cluster)
    after = 3 - before
    cluster.brokers.failures[after] = Unavailable("nobody there")
    with pytest.raises(Unavailable):
        await cluster.coordinator.migration.move("orders", 0, after)
    cluster.brokers.waits_for = ["a backup"]
    await cluster.silence(after)
    assert (owner(cluster), len(await moves(cluster))) == (after, 1)

    cluster.brokers.waits_for = []
    await cluster.settle()
    await cluster.settle()
    assert (owner(cluster), await moves(cluster)) == (before, [])


async def test_the_next_coordinator_finishes_or_undoes_an_unfinished_move(two: Cluster) -> None:
    two.brokers.failures[1] = Uncertain("no answer")
    with pytest.raises(Uncertain):
        await two.coordinator.migration.move("orders", 0, 2)
    two.brokers.failures = {2: Unavailable("nobody there")}
    with pytest.raises(Unavailable):
        await two.coordinator.migration.move("orders", 1, 2)
    assert len(await moves(two)) == 2

    two.brokers.failures.clear()
    await two.restart()
    await two.settle()

    assert await moves(two) == []
    assert (owner(two, 0), owner(two, 1)) == (1, 2)
    assert (2, 1, 1) in two.brokers.handed_over
    assert (2, 1, 0) not in two.brokers.handed_over


async def test_a_broker_that_restarts_during_a_move_keeps_the_streamlet(two: Cluster) -> None:
    move = await two.brokers.hold_up(two.coordinator.migration.move("orders", 0, 2))
    await two.register("a2", broker_id=1)
    two.brokers.answering.set()

    with pytest.raises(Unavailable, match="a broker was lost meanwhile"):
        await move
    assert (owner(two), await moves(two)) == (1, [])


async def test_a_broker_that_loses_its_memory_during_a_move_does_not_get_the_streamlet(cluster: Cluster) -> None:
    """Its older groups of the streamlet must be recovered first; the new groups would begin after a gap."""
    for launch in "ab":
        await cluster.register(launch)
    await cluster.register_backup("x")
    await cluster.create("orders", streamlets=1, replication=1)
    await cluster.coordinator.migration.move("orders", 0, 2)
    cluster.brokers.ends[1, 0] = common_pb2.StreamletState(streamlet_id=0, next_group_id=3, next_records=[19])
    move = await cluster.brokers.hold_up(cluster.coordinator.migration.move("orders", 0, 1))
    await cluster.register("a2", broker_id=1, lost_memory=True)
    cluster.brokers.answering.set()

    with pytest.raises(Unavailable, match="the data of broker 1 must be recovered first"):
        await move
    assert (owner(cluster), await moves(cluster)) == (2, [])


async def test_brokers_get_no_update_of_a_stream_between_seal_and_open(two: Cluster) -> None:
    """The old owner would take an update for the order to go on."""
    move = await two.brokers.hold_up(two.coordinator.migration.move("orders", 0, 2))
    opened = len(two.brokers.opened)
    alteration = asyncio.create_task(two.alter("orders", retention_ms=5))
    other = asyncio.create_task(two.coordinator.migration.move("orders", 1, 2))
    await until(lambda: two.coordinator.state.catalog.named("orders").config_version, "the stream is altered")
    assert len(two.brokers.opened) == opened
    assert len(two.brokers.epochs) == 2  # the creation's and the seal's

    two.brokers.answering.set()
    await asyncio.gather(move, alteration, other)

    assert two.brokers.sealed == [(1, 1, 0), (1, 1, 1)]
    assert two.brokers.streams[1, 1] == two.brokers.streams[2, 1] == two.coordinator.state.catalog.named("orders")


async def test_a_caller_that_gives_up_does_not_stop_a_move_halfway(two: Cluster) -> None:
    move = await two.brokers.hold_up(two.coordinator.migration.move("orders", 0, 2))
    move.cancel()
    with pytest.raises(asyncio.CancelledError):
        await move
    two.brokers.answering.set()
    await two.coordinator.close()

    assert (owner(two), await moves(two)) == (2, [])


async def test_the_failure_of_a_move_whose_caller_is_gone_is_logged(
    two: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    unseen: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context["message"]))
    move = await two.brokers.hold_up(two.coordinator.migration.move("orders", 0, 2))
    move.cancel()
    with pytest.raises(asyncio.CancelledError):
        await move
    two.brokers.failures[1] = Unavailable("nothing got to disk in time")
    two.brokers.answering.set()
    await two.coordinator.state.close()
    del move
    gc.collect()

    assert unseen == []
    assert "an operation whose caller is gone has failed" in capsys.readouterr().err


def migration(cluster: Cluster, **limits: int) -> Migration:
    """Another migration of the same cluster, with these limits."""
    coordinator = cluster.coordinator
    return Migration(coordinator.state, coordinator.recoveries.records, limits=MigrationLimits(**limits))


async def test_a_move_that_makes_a_stream_description_too_large_is_refused(two: Cluster) -> None:
    limited = migration(two, stream_bytes_max=two.coordinator.state.catalog.named("orders").ByteSize())

    with pytest.raises(InvalidArgument, match="groups at several brokers"):
        await limited.move("orders", 0, 2)
    assert (owner(two), await moves(two)) == (1, [])


async def test_a_move_that_makes_all_stream_descriptions_too_large_is_refused(
    two: Cluster,
) -> None:
    await two.coordinator.migration.move("orders", 0, 2)
    limited = migration(two, catalog_bytes_max=two.coordinator.state.catalog.named("orders").ByteSize())

    with pytest.raises(InvalidArgument, match="the descriptions of all streams would take more"):
        await limited.move("orders", 1, 2)
    await limited.move("orders", 0, 1)  # it has one interval again
    assert (owner(two), places(two), owner(two, 1)) == (1, [], 1)


async def test_a_streamlet_with_too_many_producers_to_hand_over_does_not_move(two: Cluster) -> None:
    state = common_pb2.StreamletState(streamlet_id=0, next_group_id=2, next_records=[10])
    for number in range(60_000):
        state.producers.add(producer_id=(1 << 63) + number, producer_epoch=1, next_sequence=1)
    two.brokers.ends[1, 0] = state

    with pytest.raises(InvalidArgument, match="the state of its 60000 producers takes more than"):
        await two.coordinator.migration.move("orders", 0, 2)
    assert (owner(two), await moves(two)) == (1, [])
    assert two.brokers.streams[1, 1] == two.coordinator.state.catalog.named("orders")  # unsealed again


async def test_the_number_of_moves_in_flight_is_limited(cluster: Cluster) -> None:
    cluster.settings = cluster.settings.model_copy(update={"moves_in_flight_max": 2})
    await cluster.restart()
    await cluster.register("a")
    for name in "pqr":
        await cluster.create(name)
    await cluster.register("b")
    cluster.brokers.answering.clear()
    calls = len(cluster.brokers.epochs)
    tasks = [asyncio.create_task(cluster.coordinator.migration.move(name, 0, 2)) for name in "pqr"]
    await until(lambda: len(cluster.brokers.epochs) - calls == 2, "two moves are under way")
    for _ in range(20):
        await asyncio.sleep(0)
    assert (len(await moves(cluster)), len(cluster.brokers.epochs) - calls) == (2, 2)

    cluster.brokers.answering.set()
    await asyncio.gather(*tasks)
    assert {cluster.coordinator.state.catalog.named(name).assignments[0].broker_id for name in "pqr"} == {2}


async def test_a_closing_coordinator_begins_no_more_moves(two: Cluster) -> None:
    two.settings = two.settings.model_copy(update={"moves_in_flight_max": 1})
    await two.restart()
    first = await two.brokers.hold_up(two.coordinator.migration.move("orders", 0, 2))
    second = asyncio.create_task(two.coordinator.migration.move("orders", 1, 2))
    await asyncio.sleep(0)
    closing = asyncio.create_task(two.coordinator.close())
    await asyncio.sleep(0)
    two.brokers.answering.set()
    await closing

    assert (await first).stream.assignments[0].broker_id == 2
    with pytest.raises(Unavailable, match="this coordinator is ending"):
        await second
    assert two.brokers.sealed == [(1, 1, 0)]


async def test_the_number_of_waiting_moves_is_limited(two: Cluster) -> None:
    two.settings = two.settings.model_copy(update={"moves_in_flight_max": 1})
    await two.restart()
    limited = migration(two, moves_waiting_max=1)
    first = await two.brokers.hold_up(limited.move("orders", 0, 2))
    second = asyncio.create_task(limited.move("orders", 1, 2))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="1 moves wait for their turn"):
        await limited.move("orders", 1, 2)

    two.brokers.answering.set()
    await asyncio.gather(first, second)
    assert (owner(two, 0), owner(two, 1)) == (2, 2)


async def test_a_move_of_a_stream_deleted_meanwhile_leaves_no_record(two: Cluster) -> None:
    async with two.coordinator.state.changing:
        deletion = asyncio.create_task(two.coordinator.streams.delete("orders"))
        for _ in range(3):
            await asyncio.sleep(0)
        move = asyncio.create_task(two.coordinator.migration.move("orders", 0, 2))
        for _ in range(5):
            await asyncio.sleep(0)
    await deletion
    with pytest.raises(UnknownStream):
        await move
    assert await moves(two) == []


async def test_a_broker_that_is_drained_during_a_move_does_not_get_the_streamlet(two: Cluster) -> None:
    move = await two.brokers.hold_up(two.coordinator.migration.move("orders", 0, 2))
    assert (await two.coordinator.drains.drain(coordinator_pb2.DrainRequest(broker_id=2))).done
    two.brokers.answering.set()

    with pytest.raises(Unavailable, match="broker 2 is being drained"):
        await move
    assert (owner(two), await moves(two)) == (1, [])


async def test_each_move_is_observed_with_its_outcome_and_stall(two: Cluster) -> None:
    watched = Watched()
    two.observe_move = watched
    await two.restart()
    await two.coordinator.migration.move("orders", 0, 2)
    with pytest.raises(InvalidArgument):
        await two.coordinator.migration.move("orders", 0, 9)
    two.brokers.failures[1] = RuntimeError("a defect")
    with pytest.raises(RuntimeError):
        await two.coordinator.migration.move("orders", 1, 2)

    assert watched.seen == [("ok", 0.0), ("invalid_argument", 0.0), ("internal", 0.0)]  # the clock stands still


async def test_an_emptied_interval_is_removed_from_the_assignment(two: Cluster) -> None:
    await two.coordinator.migration.move("orders", 0, 2)
    start = common_pb2.EntryStart(start=common_pb2.Cursor(stream_id=1, group_id=1), first_record=3)
    await two.heartbeat(1, starts=[start])
    _, following = two.coordinator.state.catalog.named("orders").assignments[0].intervals
    empty = coordinator_pb2.EmptyInterval(
        stream_id=1, streamlet_id=0, first_group_id=1, end_group_id=following.first_group_id
    )
    await two.heartbeat(2, empty_intervals=[empty])  # another broker's interval
    assert len(places(two)) == 2
    for nowhere in ({"stream_id": 9}, {"stream_id": 1, "streamlet_id": 9}):
        await two.heartbeat(1, empty_intervals=[coordinator_pb2.EmptyInterval(**nowhere)])

    await two.heartbeat(1, empty_intervals=[empty])
    await two.coordinator.idle()

    assert places(two) == []
    assert two.brokers.streams[2, 1] == two.coordinator.state.catalog.named("orders")
    assert [
        broker.broker_id for broker in two.coordinator.state.brokers_of(two.coordinator.state.catalog.named("orders"))
    ] == [1, 2]
    (told,) = (await two.store.list("starts/")).values()
    (start,) = broker_pb2.TakeOverStream.FromString(told.value).starts
    assert (start.start.group_id, [start.first_record]) == (following.first_group_id, list(following.first_records))


async def test_an_interval_stays_until_the_next_owner_has_the_handed_over_state(two: Cluster) -> None:
    """If the owner's interval joined its earlier one, its start would be lost and group ids would be given twice."""
    await two.coordinator.migration.move("orders", 0, 2)
    two.brokers.failures[1] = Unavailable("nobody there")
    two.brokers.ends[1, 0] = common_pb2.StreamletState(streamlet_id=0, next_group_id=3, next_records=[19])
    with pytest.raises(Unavailable):
        await two.coordinator.migration.move("orders", 0, 1)
    before = places(two)
    empty = coordinator_pb2.EmptyInterval(
        stream_id=1, streamlet_id=0, first_group_id=before[1][1], end_group_id=before[2][1]
    )

    await two.heartbeat(2, empty_intervals=[empty])
    assert places(two) == before

    two.brokers.failures.clear()
    await two.settle()
    await two.heartbeat(2, empty_intervals=[empty])
    assert places(two) == []


async def test_the_new_owner_of_a_streamlet_of_two_lost_brokers_gets_both_sources(cluster: Cluster) -> None:
    """One lost broker had older groups of the other's streamlet, and a streamlet that the new owner gets first."""
    for launch in "ab":
        await cluster.register(launch)
    await cluster.register_backup("x")
    await cluster.create("orders", streamlets=2, brokers=1, replication=1)
    (old,) = {one.broker_id for one in cluster.coordinator.state.catalog.named("orders").assignments}
    await cluster.coordinator.migration.move("orders", 0, 3 - old)
    await cluster.register("c")
    await cluster.silence(1, 2)
    for _ in range(5):
        await cluster.settle()

    stream = cluster.coordinator.state.catalog.named("orders")
    assert [(one.broker_id, len(one.intervals)) for one in stream.assignments] == [(3, 0), (3, 0)]
    assert {source.broker_id for source in stream.assignments[0].sources} == {1, 2}
    told = cluster.brokers.streams[3, 1].assignments
    assert [one.sources for one in told] == [one.sources for one in stream.assignments]
    assert not any(one.HasField("handed_over") for one in stream.assignments)
    assert [one.handed_over.next_group_id for one in told] == [2, 0], "what was given to a lost one"


# --- spreading a stream ------------------------------------------------------------------------------------------


async def test_a_stream_spreads_over_more_brokers_and_shrinks_again(two: Cluster) -> None:
    await two.register("c")
    stream = await two.alter("orders", brokers=2)
    assert (stream.config.brokers, stream.config_version) == (2, 1)
    assert sorted(one.broker_id for one in stream.assignments) == [1, 2]

    shrunk = await two.alter("orders", brokers=1)
    assert len({one.broker_id for one in shrunk.assignments}) == 1
    same = await two.alter("orders", retention_ms=3)
    assert [one.broker_id for one in same.assignments] == [one.broker_id for one in shrunk.assignments]
    with pytest.raises(InvalidArgument, match="brokers must be between 0 and 2, not 3"):
        await two.alter("orders", brokers=3)


async def test_a_stream_cannot_spread_over_more_brokers_than_exist(cluster: Cluster) -> None:
    await cluster.register("a")
    await cluster.create("orders", streamlets=2)

    with pytest.raises(Unavailable, match="is to be on 2 brokers, and 1 can take streamlets"):
        await cluster.alter("orders", brokers=2)
    assert (await cluster.alter("orders", brokers=0)).config.brokers == 0
