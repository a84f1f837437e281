"""Recoveries of the same streamlet, at once or one after the other, neither undo nor skip each other's results."""

from __future__ import annotations

from kera.coordinator.cluster.intervals import taken_over
from kera.core.base.ids import Position
from kera.core.rpc import api
from kera.v1 import broker_pb2, common_pb2
from tests.unit.broker.support import STREAM_ID
from tests.unit.broker.takeover_support import Cluster, everything, moved_from_second_to_first, order, progress, written


async def test_a_recovery_waits_until_groups_that_an_earlier_one_took_over_are_open(world: Cluster) -> None:
    """Otherwise it would skip the results of the earlier one, which is about other groups of the streamlet."""
    moved, state, (stored, _, newer) = await moved_from_second_to_first(world)
    for number in (1, 2):
        await world.nodes[number].kill(memory=True)
    third = world.nodes[3]
    await third.start(world.epoch())

    async def find(info: common_pb2.StreamInfo, lost: int, epoch: int) -> tuple[list[str], common_pb2.StreamInfo]:
        source = common_pb2.RecoverySource(broker_id=lost, before_epoch=epoch)
        asked = broker_pb2.TakeOverStream(stream=info, streamlet_ids=[0], handed_over=[state])
        request = broker_pb2.TakeOverRequest(
            source=source, streams=[asked], backups=[backup.info for backup in world.backups]
        )
        response = (await third.ask(api.TAKE_OVER, request)).message
        after = common_pb2.StreamInfo()
        after.CopyFrom(info)
        after.assignments_version += 1
        (assignment,) = info.assignments
        next_group_id = max([each.state.next_group_id for each in response.streamlets], default=1)
        after.assignments[0].CopyFrom(taken_over(assignment, lost, 3, third.epoch, next_group_id=next_group_id))
        after.assignments[0].sources.append(source)
        return list(response.waits_for), after

    newest, oldest = world.epoch(), world.epoch()
    waits, partly = await find(moved, 1, newest)
    assert not waits
    waits, _ = await find(partly, 2, oldest)
    assert ["has yet to be opened here" in each for each in waits] == [True]
    await third.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=partly))
    waits, whole = await find(partly, 2, oldest)
    assert not waits
    await third.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=whole))

    assert (await third.read())[0] == stored + newer
    await third.until_restored()
    await third.stop()


async def test_groups_that_a_lost_owner_had_not_opened_yet_are_taken_over_too(world: Cluster) -> None:
    """The owner's next launch has nothing to open: a recovery must not wait for that."""
    info, stored = await written(world, 5)
    third = world.nodes[3]
    for lost in (1, 3):
        await third.start(world.epoch())
        source = common_pb2.RecoverySource(broker_id=lost, before_epoch=third.epoch)
        request = broker_pb2.TakeOverRequest(
            source=source,
            streams=[broker_pb2.TakeOverStream(stream=info, streamlet_ids=[0])],
            backups=[backup.info for backup in world.backups],
        )
        response = (await third.ask(api.TAKE_OVER, request)).message
        assert not response.waits_for
        (streamlet,) = response.streamlets
        changed = taken_over(info.assignments[0], lost, 3, third.epoch, next_group_id=streamlet.state.next_group_id)
        info.assignments_version += 1
        info.assignments[0].CopyFrom(changed)
        info.assignments[0].sources.append(source)
        if lost == 1:
            await third.kill(memory=True)
    await third.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=info))

    await third.until_restored()
    assert [data for entry in range(info.config.entries) for data in (await third.read(entry=entry))[0]] == stored
    await third.stop()


async def test_another_recovery_does_not_bring_back_records_removed_since_the_first(
    world: Cluster,
) -> None:
    """The other one was ordered before the first was stored, and knew nothing of the removal."""
    info, stored = await written(world, 20, entries=1)
    node = world.nodes[2]
    await node.start(world.epoch())
    sources = [common_pb2.RecoverySource(broker_id=1, before_epoch=world.epoch()) for _ in range(2)]
    for source in sources:
        await node.ask(api.TAKE_OVER, order(world, info, source))
        info.assignments[0].sources.append(source)
    (assignment,) = info.assignments
    assignment.broker_id, assignment.broker_epoch = 2, node.epoch
    del assignment.sources[1:]
    info.assignments_version += 1
    await node.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=info))
    streams = node.engine.streams
    entry = streams.get(STREAM_ID).streamlet(0).entries[0]
    keys = [key for key, _ in entry.segments()]
    start, record = Position(*keys[4], 0), entry.find(keys[4]).first_record  # type: ignore[union-attr]
    streams.move_start(entry, start, record)
    streams.moved_starts.told(entry)
    await node.until(lambda: entry.find(keys[0]) is None)

    assignment.sources.append(sources[1])
    info.assignments_version += 1
    await node.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=info))
    assert (entry.start, entry.start_record) == (start, record)
    assert entry.find(keys[0]) is None
    found, _ = await node.read()
    assert found == stored[-len(found) :]
    await node.until_restored()

    streams.moved_starts.forget(entry)
    del assignment.sources[:]
    info.assignments_version += 1
    await node.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=info))
    assert list(streams.moved_starts) == [entry], "the coordinator has kept earlier starts, too"
    await node.stop()


async def test_results_of_one_recovery_are_not_used_for_another(world: Cluster) -> None:
    info, stored = await written(world, 4)
    node = world.nodes[2]
    await node.start(world.epoch())
    sources = [common_pb2.RecoverySource(broker_id=1, before_epoch=world.epoch()) for _ in range(2)]
    for source in sources:
        await node.ask(api.TAKE_OVER, order(world, info, source))
    (assignment,) = info.assignments
    assignment.broker_id, assignment.broker_epoch = 2, node.epoch
    assignment.sources.append(sources[0])
    info.assignments_version += 1
    await node.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=info))

    assert await everything(world, 2) == stored
    (told,) = progress(node)
    assert told.source == sources[0]
    await node.stop()
