"""Takeovers: another broker goes on where the lost one ended, for producers and readers, also after more losses."""

from __future__ import annotations

import pytest

from kera.core.base.ids import EARLIEST, Position
from kera.core.rpc import api
from kera.v1 import broker_pb2, common_pb2
from tests.unit.broker.support import STREAM_ID, chunk, read_range
from tests.unit.broker.takeover_support import (
    IN_FILES,
    Cluster,
    acknowledged,
    arriving,
    everything,
    owned_by,
    payloads,
    progress,
    written,
)


async def test_another_broker_goes_on_where_the_lost_one_ended(world: Cluster) -> None:
    info, stored = await written(world, 20)
    node = world.nodes[2]
    await node.start(world.epoch())
    response, after = await world.take_over(info, 1, 2)
    assert list(response.waits_for) == []
    assert response.records_lost == 0
    (taken,) = response.streamlets
    assert sum(taken.state.next_records) == len(stored)
    assert response.bytes_total == sum(map(len, stored))

    last = world.sequences[0] - 1
    status, other = await node.write(world.chunk(0, last), chunk(0, last, size=1024))
    assert status.duplicate, status
    assert other.error.code == "producer_fenced", "it is not what backups have"
    new = world.chunks(0, 3)
    assert not any(status.error.code or status.duplicate for status in await node.write(*new))

    found = await everything(world, 2)
    assert [data for data in found if data in stored] == stored, "byte for byte"
    assert sorted(payloads(found)) == sorted(payloads(stored) + payloads(new))

    await node.until_restored()
    for backup in world.backups:
        await backup.free(1, after.assignments[0].sources[0].before_epoch)
        assert backup.replicas(1) == []
    (told,) = progress(node)
    assert told.bytes_recovered == told.bytes_restored == told.bytes_total
    await node.stop()


async def test_readers_go_on_from_their_old_positions(world: Cluster) -> None:
    node = world.nodes[1]
    info = owned_by(1, world.epoch(), entries=1)
    await node.start(info.assignments[0].broker_epoch, info)
    await node.until(lambda: node.engine.replication.backups.up_count == 3)
    positions: list[Position] = [EARLIEST]
    for _ in range(12):
        await acknowledged(node, *world.chunks(0, 2))
        positions.append((await node.read())[1])
    stored, end = await node.read()
    await node.kill(memory=True)
    other = world.nodes[2]
    await other.start(world.epoch())
    await world.take_over(info, 1, 2)
    await acknowledged(other, *world.chunks(0, 2))
    for number, position in enumerate(positions):
        found, _ = await other.read(position)
        assert found[:-2] == stored[2 * number :]
    found, _ = await other.read(end)
    assert len(found) == 2
    await other.until_restored()
    await other.stop()


@pytest.mark.parametrize("memory", [False, True])
async def test_a_new_owner_killed_during_recovery_goes_on_after_its_restart(world: Cluster, memory: bool) -> None:
    info, stored = await written(world, 30)
    node = world.nodes[2]
    node.limits = IN_FILES
    await node.start(world.epoch())
    world.reads.left = 10
    _, after = await world.take_over(info, 1, 2)
    new = world.chunks(0, 3)
    await acknowledged(node, *new)
    await node.until(lambda: not world.reads.open.is_set() and node.engine.takeovers.totals.segments_recovered > 0)
    assert list(arriving(node).iterdir()), "more has come in part"
    await node.kill(memory=memory)
    world.reads.release()
    epoch = world.epoch()
    if memory:
        await node.start(epoch, after)
        _, after = await world.take_over(after, 2, 2)
    else:
        after.assignments[0].broker_epoch = epoch
        await node.start(epoch, after)
    found = await everything(world, 2)
    assert sorted(payloads(found)) == sorted(payloads(stored) + payloads(new))
    assert [data for data in found if data in stored] == stored
    await node.until_restored()
    assert node.engine.takeovers.totals.segments_recovered > 0
    await node.stop()


async def test_a_third_broker_recovers_from_the_replicas_of_both(world: Cluster) -> None:
    info, stored = await written(world, 15)
    second, third = world.nodes[2], world.nodes[3]
    await second.start(world.epoch())
    _, after = await world.take_over(info, 1, 2)
    new = world.chunks(1, 5)
    await acknowledged(second, *new)
    await second.until(lambda: bool(second.engine.takeovers.totals.segments_recovered))
    await second.kill(memory=True)
    await third.start(world.epoch())
    response, after = await world.take_over(after, 2, 3)
    assert len(after.assignments[0].sources) == 2
    assert response.records_lost == 0
    found = await everything(world, 3)
    assert [data for data in found if data in stored] == stored
    assert sorted(payloads(found)) == sorted(payloads(stored) + payloads(new))
    await third.until_restored()
    await third.stop()


async def test_a_broker_that_comes_back_does_not_free_replicas_that_others_recover_from(world: Cluster) -> None:
    node = world.nodes[1]
    info = owned_by(1, world.epoch())
    await node.start(info.assignments[0].broker_epoch, info)
    await node.until(lambda: node.engine.replication.backups.up_count == 3)
    await node.write(*world.chunks(0, 20))
    stored = await everything(world, 1)
    await node.kill()
    other = world.nodes[2]
    world.reads.open.clear()
    await other.start(world.epoch())
    response, _ = await world.take_over(info, 1, 2)
    assert not response.waits_for
    lists = world.reads.lists
    await node.start(world.epoch(), recovered_before_epoch=world.last_epoch - 1, elsewhere=[STREAM_ID])
    await node.until(lambda: world.reads.lists == lists + len(world.backups))  # it knows of all its old replicas
    node.engine.replication.backlog.rest()
    world.reads.release()
    assert await everything(world, 2) == stored
    await other.until_restored()
    await other.stop()
    await node.stop()


async def test_later_launches_do_not_reuse_group_ids_of_a_streamlet_recovered_empty(
    world: Cluster,
) -> None:
    """Readers were sent to the start of these groups."""
    info = owned_by(1, world.epoch(), entries=1, durability=common_pb2.DURABILITY_LEADER)
    other = world.nodes[2]
    await other.start(world.epoch())
    response, after = await world.take_over(info, 1, 2)
    next_group_id = response.streamlets[0].state.next_group_id
    await other.until_restored()
    del after.assignments[0].sources[:]
    after.assignments_version += 1
    await other.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=after))
    await other.stop()

    after.assignments[0].broker_epoch = world.epoch()
    await other.start(after.assignments[0].broker_epoch, after)
    assert next_group_id > 1
    assert other.engine.streams.get(STREAM_ID).streamlet(0).next_group_id >= next_group_id
    await other.stop()


async def test_a_broker_that_is_being_emptied_takes_writes_during_the_takeover(world: Cluster) -> None:
    node, other = world.nodes[1], world.nodes[2]
    info = owned_by(1, world.epoch())
    await node.start(info.assignments[0].broker_epoch, info)
    await other.start(world.epoch())
    await node.until(lambda: node.engine.replication.backups.up_count == 3)
    await node.write(*world.chunks(0, 2))
    request = broker_pb2.TakeOverRequest(
        source=common_pb2.RecoverySource(broker_id=1, before_epoch=world.epoch()),
        streams=[broker_pb2.TakeOverStream(stream=info, streamlet_ids=[0])],
        backups=[backup.info for backup in world.backups],
    )
    assert not (await other.ask(api.TAKE_OVER, request)).message.waits_for

    (status,) = await node.write(*world.chunks(0, 1))
    assert not status.error.code, status
    await node.stop()
    await other.stop()


async def test_a_launch_that_lost_its_memory_has_no_losses_in_streams_it_gets_later(world: Cluster) -> None:
    node = world.nodes[2]
    await node.start(world.epoch(), owned_by(2, world.last_epoch, replication=0, durability=1))
    await node.kill(memory=True)
    await node.start(world.epoch())
    await node.until(lambda: node.engine.replication.backups.up_count == 3)
    assert node.engine.restart.found.lost_memory
    info = owned_by(2, node.epoch)
    info.stream_id += 1
    info.assignments[0].first_group_id = 1 + (1 << 24)  # from a launch of the previous owner, which wrote nothing
    state = common_pb2.StreamletState(next_group_id=1, next_records=[0, 0])
    await node.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=info, handed_over=[state]))
    (status,) = await node.write(chunk(0, 0, stream_id=info.stream_id))
    assert not status.error.code, status

    reply = await node.ask(
        api.MULTI_READ_CHUNKS, broker_pb2.MultiReadChunksRequest(ranges=[read_range(stream_id=info.stream_id)])
    )
    assert sum(map(len, reply.bulk)) > 0
    await node.stop()
