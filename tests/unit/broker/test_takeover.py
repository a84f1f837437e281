"""A broker is gone, and another one goes on with its streams: nothing acknowledged is lost, nothing is there twice."""

from __future__ import annotations

import errno
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kera.backup import reading
from kera.broker.log.entry import written_end
from kera.broker.ownership.stream_records import stream_record
from kera.broker.records import EntryRecord
from kera.broker.recovery.rebuild import RebuildLimits
from kera.broker.recovery.scan import VirtualKey
from kera.broker.storage.index_format import put_entry
from kera.broker.storage.unsure import unsure_tail
from kera.coordinator.cluster.intervals import taken_over
from kera.core.chunk import ChunkHeader, verify_payload
from kera.core.errors import CorruptChunk, DataLost, Recovering, Unavailable
from kera.core.ids import EARLIEST, EntryId, Position
from kera.core.rpc import api
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2
from tests.unit.broker.support import STREAM_ID, chunk, cursor, read_range, stream_info
from tests.unit.broker.takeover_support import QUICK, Cluster, Node, cluster, header_of, payloads


@pytest.fixture
async def world(tmp_path: Path, shm_dir: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path, shm_dir, 3) as found:
        yield found


def owned_by(broker_id: int, epoch: int, **config: Any) -> common_pb2.StreamInfo:
    settings = {"replication": 2, "durability": common_pb2.DURABILITY_REPLICATED, "entries": 2} | config
    info: common_pb2.StreamInfo = stream_info(owners=[broker_id], **settings)
    for assignment in info.assignments:
        assignment.broker_epoch = epoch
    info.assignments_version = 1
    return info


async def written(world: Cluster, count: int, **config: Any) -> tuple[common_pb2.StreamInfo, list[bytes]]:
    """A stream of broker 1 with chunks of two producers, as they are stored; the broker is gone."""
    node = world.nodes[1]
    info = owned_by(1, world.epoch(), **config)
    await node.start(info.assignments[0].broker_epoch, info)
    await node.until(lambda: node.engine.replication.backups.up_count == 3)
    for _ in range(count):
        for producer in (0, 1):
            await acknowledged(node, *world.chunks(producer, 2))
    stored = [data for entry in range(info.config.entries) for data in (await node.read(entry=entry))[0]]
    await node.kill(memory=True)
    return info, stored


async def acknowledged(node: Node, *chunks: bytes) -> None:
    await node.until(lambda: node.engine.replication.backups.up_count >= 2)
    statuses = await node.write(*chunks)
    assert not any(status.error.code for status in statuses), statuses


def progress(node: Node) -> list[coordinator_pb2.RecoveryProgress]:
    return node.engine.takeovers.progress()


IN_FILES = RebuildLimits(parallel_max=1, read_bytes_max=4096, assembled_bytes_max=0)
"""What comes is put into files piece by piece."""


def arriving(node: Node) -> Path:
    """Where the files are that are not complete."""
    return node.engine.restart.store.arriving_path(0).parent


def order(world: Cluster, info: common_pb2.StreamInfo, source: common_pb2.RecoverySource) -> broker_pb2.TakeOverRequest:
    return broker_pb2.TakeOverRequest(
        source=source,
        streams=[broker_pb2.TakeOverStream(stream=info, streamlet_ids=[0])],
        backups=[backup.info for backup in world.backups],
    )


async def everything(world: Cluster, broker_id: int, entries: int = 2) -> list[bytes]:
    return [data for entry in range(entries) for data in (await world.nodes[broker_id].read(entry=entry))[0]]


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

    repeated = chunk(0, world.sequences[0] - 1, size=1024)
    (status,) = await node.write(repeated)
    assert status.duplicate, status
    new = world.chunks(0, 3)
    assert not any(status.error.code or status.duplicate for status in await node.write(*new))

    found = await everything(world, 2)
    assert [data for data in found if data in stored] == stored, "byte for byte"
    assert payloads(found)[len(found) // 2 :] is not None
    assert sorted(payloads(found)) == sorted(payloads(stored) + payloads(new))

    await node.until_restored()
    for backup in world.backups:
        await backup.free(1, after.assignments[0].sources[0].before_epoch)
        assert backup.replicas(1) == []
    (told,) = progress(node)
    assert told.bytes_recovered == told.bytes_restored == told.bytes_total
    await node.stop()


@pytest.mark.parametrize("assembled_bytes_max", [0, 4096, 40 << 10])
async def test_what_has_no_room_in_memory_is_put_together_in_its_file(world: Cluster, assembled_bytes_max: int) -> None:
    info, stored = await written(world, 20)
    node = world.nodes[2]
    node.limits = RebuildLimits(assembled_bytes_max=assembled_bytes_max, read_bytes_max=4096)
    await node.start(world.epoch())
    await world.take_over(info, 1, 2)
    assert await everything(world, 2) == stored
    await node.until_restored()
    assert await everything(world, 2) == stored
    await node.stop()


async def test_readers_go_on_from_positions_of_before(world: Cluster) -> None:
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
async def test_a_new_owner_that_ends_in_the_middle_goes_on_after_its_start(world: Cluster, memory: bool) -> None:
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


async def test_a_backup_that_is_lost_in_the_middle_is_replaced_by_others(world: Cluster) -> None:
    info, stored = await written(world, 30)
    node = world.nodes[2]
    await node.start(world.epoch())
    source = common_pb2.RecoverySource(broker_id=1, before_epoch=world.last_epoch)
    assert source.before_epoch
    _, _ = await world.take_over(info, 1, 2)
    await world.backups[0].stop()
    node.told()
    found = await everything(world, 2)
    assert found == stored
    await node.until_restored()
    await node.stop()


async def test_a_backup_that_was_away_and_is_back_is_read_when_the_others_are_gone(
    world: Cluster,
) -> None:
    info, stored = await written(world, 30)
    node = world.nodes[2]
    node.limits = QUICK
    world.reads.open.clear()
    await node.start(world.epoch())
    await world.backups[2].stop()
    response, _ = await world.take_over(info, 1, 2)
    assert not response.waits_for, "one of two replicas is enough"

    await world.backups[2].start()
    await world.backups[0].stop()
    node.told()
    world.reads.release()

    await node.until_restored()
    assert await everything(world, 2) == stored
    await node.stop()


async def test_nobody_is_told_of_what_only_one_backup_may_have_until_it_has_its_replicas(world: Cluster) -> None:
    """It may be lost once more: when that backup is away, and the new owner lost, before it was replicated again."""
    info, stored = await written(world, 15, entries=1)
    node = world.nodes[2]
    node.limits = QUICK
    world.reads.open.clear()
    await node.start(world.epoch())
    away = next(each for each in world.backups if any(not replica.closed for replica in each.replicas(1)))
    await away.stop()
    _, after = await world.take_over(info, 1, 2)

    entry = node.engine.streams.get(STREAM_ID).streamlets[0].entries[0]
    tail = entry.unsure
    assert tail is not None
    assert 0 < tail.record < entry.next_record
    assert entry.end == tail.position < written_end(entry)
    with pytest.raises(Recovering, match="entry 0 of streamlet 0 has just been recovered"):
        await node.ask(api.DESCRIBE_STREAMLETS, api.DESCRIBE_STREAMLETS.request(stream_id=STREAM_ID))
    groups = await node.ask(api.LIST_GROUPS, api.LIST_GROUPS.request(stream_id=STREAM_ID, streamlet_id=0))
    assert (groups.message.groups[-1].next_record, groups.message.groups[-1].closed) == (tail.record, False)
    world.sequences[0] -= 1
    (repeated,) = world.chunks(0, 1)
    (status,) = await node.write(repeated)
    assert status.error.code == "recovering"
    seal = broker_pb2.SealStreamletsRequest(coordinator_epoch=1, stream_id=STREAM_ID, streamlet_ids=[0], wait_ms=1)
    with pytest.raises(Unavailable, match="did not get to backups within 1 ms"):
        await node.ask(api.SEAL_STREAMLETS, seal)

    await node.kill()
    epoch = world.epoch()
    after.assignments[0].broker_epoch = epoch
    await node.start(epoch, after)
    entry = node.engine.streams.get(STREAM_ID).streamlets[0].entries[0]
    assert entry.unsure == tail, "a restart knows of it"

    world.reads.release()
    await node.until_restored()
    assert entry.end == written_end(entry)
    assert await everything(world, 2, entries=1) == stored
    (status,) = await node.write(repeated)
    assert status.duplicate
    await node.kill()
    del after.assignments[0].sources[:]
    await node.start(world.epoch(), after)
    assert unsure_tail(node.engine.restart.index, entry.log_id) is None
    await node.stop()


async def test_a_backup_that_is_lost_for_good_in_the_middle_is_given_up_when_it_is_drained(
    world: Cluster,
) -> None:
    info, _ = await written(world, 12, replication=1, entries=1)
    node = world.nodes[2]
    node.limits = QUICK
    world.reads.open.clear()
    await node.start(world.epoch())
    response, _ = await world.take_over(info, 1, 2)
    assert not response.waits_for

    await world.backups[1].stop()
    node.told()
    world.reads.release()
    await node.until(lambda: any("backup 2" in reason for each in progress(node) for reason in each.waits_for))
    world.backups[1].draining = True
    await node.until(lambda: all(each.readable for each in progress(node)))

    assert node.engine.takeovers.totals.chunks_lost
    assert not any(each.waits_for for each in progress(node))
    await node.until_restored()
    await node.stop()


@pytest.mark.parametrize("failing", [False, True])
async def test_what_consumer_groups_have_yet_to_read_comes_first(world: Cluster, failing: bool) -> None:
    """In all entries, whichever replicas it is in; also when reading fails for a while."""
    info, stored = await written(world, 30)
    halves = [len(stored) // 6, len(stored) // 2 + len(stored) // 3]
    cursors = {header.entry: header for header in (header_of(stored[at]) for at in halves)}
    assert len(cursors) == 2
    tried: Counter[VirtualKey] = Counter()

    def fail(key: VirtualKey) -> bool:
        tried[key] += 1
        return failing and tried[key] <= 2  # on both backups

    world.reads.fail = fail
    node = world.nodes[2]
    node.limits = replace(QUICK, parallel_max=1)
    await node.start(world.epoch())
    at = [cursor(Position(header.group_id, header.segment_id, 0), entry=entry) for entry, header in cursors.items()]
    await world.take_over(info, 1, 2, cursors=at)
    await node.until(lambda: all(each.readable for each in progress(node)))

    def wanted(header: ChunkHeader) -> bool:
        start = cursors[header.entry]
        return (header.group_id, header.segment_id) >= (start.group_id, start.segment_id)

    order = [any(map(wanted, headers)) for headers in world.reads.chunks.values()]
    assert True in order
    assert False in order
    assert order == sorted(order, reverse=True)
    assert await everything(world, 2) == stored
    await node.stop()


async def test_what_nobody_has_read_yet_is_not_given_up_when_it_is_looked_for(world: Cluster) -> None:
    """A look for what is lacking may come before the replicas that have it are brought into order, or read."""
    info, stored = await written(world, 10)
    node = world.nodes[2]
    node.limits = replace(QUICK, order_rest_s=0.5)
    await node.start(world.epoch())
    await world.take_over(info, 1, 2)
    lists = world.reads.lists
    await node.until(lambda: world.reads.lists > lists)
    assert not world.reads.chunks
    await node.until(lambda: all(each.readable for each in progress(node)))

    assert node.engine.takeovers.totals.chunks_lost == 0
    assert await everything(world, 2) == stored
    await node.until_restored()
    await node.stop()


async def test_a_disk_that_takes_nothing_is_what_a_recovery_waits_for_and_says_so(world: Cluster) -> None:
    info, stored = await written(world, 10)
    node = world.nodes[2]
    node.limits = QUICK
    await node.start(world.epoch())
    arriving(node).write_bytes(b"")  # where files that come are to be there is none of them
    await world.take_over(info, 1, 2)
    await node.until(lambda: any("broker's disk" in reason for each in progress(node) for reason in each.waits_for))
    assert not any(each.readable for each in progress(node))

    arriving(node).unlink()
    await node.until(lambda: all(each.readable for each in progress(node)))
    assert not any(each.waits_for for each in progress(node))
    assert await everything(world, 2) == stored
    await node.until_restored()
    await node.stop()


async def test_what_cannot_be_replicated_again_says_that_backups_are_missing(world: Cluster) -> None:
    info, _ = await written(world, 10, replication=3)
    for backup in world.backups[:2]:
        await backup.stop()
    node = world.nodes[2]
    await node.start(world.epoch())
    await world.take_over(info, 1, 2)
    await node.until(lambda: all(each.readable for each in progress(node)))
    await node.until(lambda: any("replicated on 3 backups, and 1" in each for each in progress(node)[0].waits_for))

    for backup in world.backups[:2]:
        await backup.start()
    await node.until_restored()
    assert not progress(node)[0].waits_for
    await node.stop()


async def test_files_of_a_stream_that_is_deleted_while_it_comes_go_with_it(world: Cluster) -> None:
    info, _ = await written(world, 10)
    node = world.nodes[2]
    node.limits = IN_FILES
    await node.start(world.epoch())
    world.reads.left = 2
    await world.take_over(info, 1, 2)
    await node.until(lambda: not world.reads.open.is_set())
    assert list(arriving(node).iterdir())

    await node.ask(api.DROP_STREAM, broker_pb2.DropStreamRequest(stream_id=STREAM_ID))
    assert progress(node) == []
    await node.until(lambda: not list(arriving(node).iterdir()))
    world.reads.release()
    await node.stop()


async def test_as_many_backups_away_as_there_are_replicas_are_waited_for(world: Cluster) -> None:
    info, stored = await written(world, 5, replication=1)
    node = world.nodes[2]
    await node.start(world.epoch())
    await world.backups[1].stop()
    response, _ = await world.take_over(info, 1, 2)
    assert "backup 2" in response.waits_for[0]
    await world.backups[1].start()
    node.told()
    response, _ = await world.take_over(info, 1, 2)
    assert list(response.waits_for) == []
    assert await everything(world, 2) == stored
    await node.until_restored()
    await node.stop()


async def test_a_backup_that_has_lost_replicas_counts_as_away_while_another_one_is(world: Cluster) -> None:
    """What the one has lost may be at the other."""
    info, stored = await written(world, 5, replication=2)
    node = world.nodes[2]
    await node.start(world.epoch())
    damaged = world.backups[0].engine
    assert damaged is not None
    damaged.found.headers_damaged = 1
    await world.backups[1].stop()
    response, _ = await world.take_over(info, 1, 2)
    assert "headers are damaged" in response.waits_for[0]
    await world.backups[1].start()
    node.told()
    response, _ = await world.take_over(info, 1, 2)
    assert list(response.waits_for) == []
    assert await everything(world, 2) == stored
    await node.until_restored()
    await node.stop()


async def failing_read(*_: Any, **__: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


async def test_a_disk_of_a_backup_that_cannot_be_read_is_waited_for_like_a_backup_that_is_away(
    world: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, stored = await written(world, 12, replication=1)
    node = world.nodes[2]
    await node.start(world.epoch())

    with monkeypatch.context() as patch:
        patch.setattr(world.backups[1].reader, "read", failing_read)
        response, _ = await world.take_over(info, 1, 2)
        assert "backup 2" in response.waits_for[0]
        assert not response.streamlets, "nobody can say where it ends"

    response, _ = await world.take_over(info, 1, 2)
    assert not response.waits_for
    assert await everything(world, 2) == stored
    await node.until_restored()
    await node.stop()


async def test_a_disk_of_a_backup_that_can_never_be_read_again_is_given_up_when_that_is_drained(
    world: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, _ = await written(world, 12, replication=1, entries=1)
    node = world.nodes[2]
    node.limits = QUICK
    world.reads.open.clear()
    await node.start(world.epoch())
    response, _ = await world.take_over(info, 1, 2)
    assert not response.waits_for

    monkeypatch.setattr(world.backups[1].reader, "read", failing_read)
    world.reads.release()
    await node.until(lambda: any("backup 2" in reason for each in progress(node) for reason in each.waits_for))
    world.backups[1].draining = True
    await node.until(lambda: all(each.readable for each in progress(node)))
    assert node.engine.takeovers.totals.chunks_lost
    await node.until_restored()
    await node.stop()


async def test_what_a_backup_that_is_gone_for_good_had_is_told_as_lost(world: Cluster) -> None:
    info, stored = await written(world, 12, replication=1, entries=1)
    node = world.nodes[2]
    await node.start(world.epoch())
    await world.backups[1].stop()
    world.backups[1].draining = True
    response, _ = await world.take_over(info, 1, 2)
    assert list(response.waits_for) == []
    assert response.records_lost or sum(response.streamlets[0].state.next_records) < len(stored)
    await node.until(lambda: all(len(each.readable) == 1 for each in node.engine.takeovers.progress()))
    await node.stop()


async def test_what_no_backup_has_of_a_chunk_is_a_hole_that_readers_are_told_of(
    world: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, stored = await written(world, 10, entries=2)
    node = world.nodes[2]
    await node.start(world.epoch())
    verify = verify_payload

    def damaged(buffer: Any, offset: int, header: ChunkHeader) -> None:
        if header.sequence == 7:
            raise CorruptChunk("a flipped bit")
        verify(buffer, offset, header)

    monkeypatch.setattr(reading, "verify_payload", damaged)
    response, _ = await world.take_over(info, 1, 2)
    assert response.records_lost == 0, "only payloads tell"
    await node.until(lambda: node.engine.takeovers.totals.chunks_lost == 2)
    await node.until_restored()
    with pytest.raises(DataLost):
        await node.read()
    found, _ = await node.read(skip_lost=True)
    whole = [data for data in stored[: len(stored) // 2] if header_of(data).sequence != 7]
    assert found == whole
    await node.stop()


async def test_readers_of_level_leader_are_told_that_something_may_be_lost(world: Cluster) -> None:
    leader = common_pb2.DURABILITY_LEADER
    node = world.nodes[1]
    info = owned_by(1, world.epoch(), entries=1, durability=leader)
    await node.start(info.assignments[0].broker_epoch, info)
    await node.until(lambda: node.engine.replication.backups.up_count == 3)
    await node.write(*world.chunks(0, 10))
    await node.until(lambda: not any(lag.lag_bytes for lag in node.engine.replication.logs.lag()))
    stored, end = await node.read()
    await node.kill(memory=True)
    other = world.nodes[2]
    await other.start(world.epoch())
    response, _ = await world.take_over(info, 1, 2)
    assert response.streamlets[0].state.next_group_id > 1 << 24
    await other.write(*world.chunks(0, 2))
    assert len(stored) == 10
    with pytest.raises(DataLost):
        await other.read(end)
    assert len((await other.read(Position(response.streamlets[0].state.next_group_id, 1, 0)))[0]) == 2
    await other.until_restored()
    await other.stop()


async def test_what_is_on_a_broker_that_comes_back_is_not_freed_by_it(world: Cluster) -> None:
    node = world.nodes[1]
    info = owned_by(1, world.epoch())
    await node.start(info.assignments[0].broker_epoch, info)
    await node.until(lambda: node.engine.replication.backups.up_count == 3)
    await node.write(*world.chunks(0, 20))
    stored = await everything(world, 1)
    await node.kill()
    other = world.nodes[2]
    await other.start(world.epoch())
    response, _ = await world.take_over(info, 1, 2)
    assert not response.waits_for
    await node.start(world.epoch(), recovered_before_epoch=world.last_epoch - 1)
    await node.until(lambda: node.engine.replication.backups.up_count == 3)
    node.engine.replication.backlog.rest()
    assert await everything(world, 2) == stored
    await other.until_restored()
    assert any(backup.replicas(1) for backup in world.backups)
    await other.stop()
    await node.stop()


async def test_groups_of_a_streamlet_in_which_nothing_was_found_are_not_given_again_at_later_launches(
    world: Cluster,
) -> None:
    """Readers were sent to where they begin."""
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


async def moved_from_second_to_first(world: Cluster) -> tuple[common_pb2.StreamInfo, common_pb2.StreamletState, Any]:
    """A streamlet whose older group is at broker 2 and whose newer one at broker 1, with what both have."""
    first, second = world.nodes[1], world.nodes[2]
    info = owned_by(2, world.epoch(), entries=1)
    await second.start(info.assignments[0].broker_epoch, info)
    await second.until(lambda: second.engine.replication.backups.up_count == 3)
    await second.write(*world.chunks(0, 10))
    stored, end = await second.read()
    streamlet = second.engine.streams.get(STREAM_ID).streamlet(0)
    state = common_pb2.StreamletState(
        next_group_id=streamlet.next_group_id,
        next_records=[10],
        producers=[common_pb2.ProducerState(producer_id=0, next_sequence=10)],
    )
    moved = common_pb2.StreamInfo()
    moved.CopyFrom(info)
    moved.assignments_version = 2
    (assignment,) = moved.assignments
    assignment.intervals.add(first_group_id=0, broker_id=2)
    assignment.intervals.add(first_group_id=state.next_group_id, broker_id=1, first_records=[10])
    assignment.broker_id, assignment.broker_epoch = 1, world.epoch()
    await second.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=moved))
    await first.start(assignment.broker_epoch)
    await first.until(lambda: first.engine.replication.backups.up_count == 3)
    await first.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=moved, handed_over=[state]))
    assert not any(status.error.code for status in await first.write(*world.chunks(0, 10)))
    newer = (await first.read(Position(state.next_group_id, 1, 0)))[0]
    assert len(newer) == 10
    return moved, state, (stored, end, newer)


async def test_what_was_lost_of_an_older_interval_is_not_there_at_later_launches_either(world: Cluster) -> None:
    """Its owner recovers it: till then nobody is told that it is lost."""
    moved, _, _ = await moved_from_second_to_first(world)
    second = world.nodes[2]
    await second.kill(memory=True)
    for has_holes in (False, True):  # the first of them knows by itself that it has lost its memory
        await second.start(world.epoch(), moved, has_holes=has_holes)
        assert not second.engine.streams.get(STREAM_ID).streamlets
        await second.kill()
    await second.start(world.epoch(), moved)
    assert second.engine.streams.get(STREAM_ID).streamlets, "nothing is to be recovered, and the loss is told"
    await second.stop()
    await world.nodes[1].stop()


async def test_a_recovery_waits_for_what_another_one_has_taken_over_to_be_opened(world: Cluster) -> None:
    """Else what the former has found out would be passed over: the latter is about other groups of the streamlet."""
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


async def test_what_an_owner_that_was_lost_had_yet_to_open_is_taken_over_with_the_rest(world: Cluster) -> None:
    """Its next launch has nothing to open: the streamlet was lost with that owner, and would wait for ever."""
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


async def test_a_streamlet_with_older_groups_here_grows_by_those_that_are_recovered(world: Cluster) -> None:
    first, second = world.nodes[1], world.nodes[2]
    moved, state, (stored, end, newer) = await moved_from_second_to_first(world)
    await first.kill(memory=True)

    response, _ = await world.take_over(moved, 1, 2, handed_over=[state])
    assert list(response.streamlets[0].state.next_records) == [20]
    assert response.records_lost == 0
    (status,) = await second.write(chunk(0, 19, size=1024))
    assert status.duplicate
    await second.write(*world.chunks(0, 3))
    found, _ = await second.read()
    assert found[:20] == stored + newer
    assert [header_of(data).first_record for data in found] == list(range(23))
    assert (await second.read(end))[0] == found[10:]
    await second.until_restored()
    await second.stop()


async def test_what_was_removed_at_a_later_owner_is_removed_when_that_is_taken_over(world: Cluster) -> None:
    """Whoever had nothing left goes on behind what the lost one had removed, and gives no ordinal once more."""
    first, second = world.nodes[1], world.nodes[2]
    moved, state, (_, end, newer) = await moved_from_second_to_first(world)
    older = second.engine.streams.get(STREAM_ID).streamlet(0).entries[0]
    second.engine.streams.move_start(older, Position(state.next_group_id, 1, 0), 10)
    second.engine.streams.moved_starts.told(older)
    await second.until(lambda: older.stored_segments == 0 and not older.tail)
    await first.kill(memory=True)
    start = common_pb2.EntryStart(first_record=20, removed=True)
    start.start.group_id, start.start.segment_id = state.next_group_id, 1
    start.start.position = sum(map(len, newer))

    response, _ = await world.take_over(moved, 1, 2, handed_over=[state], starts=[start])
    assert list(response.streamlets[0].state.next_records) == [20]
    (status,) = await second.write(chunk(0, 20, size=1024))
    assert status.first_record == 20
    available = state.next_group_id, 1, start.start.position
    with pytest.raises(DataLost, match=re.escape(f"up to {available} is gone: it was removed")):
        await second.read(end)
    await second.stop()


async def test_what_is_older_than_what_the_owner_has_removed_does_not_come_back(world: Cluster) -> None:
    """Truncated at its owner, it was still on backups when the broker was lost that had it."""
    first, second = world.nodes[1], world.nodes[2]
    moved, state, (_, _, newer) = await moved_from_second_to_first(world)
    entry = first.engine.streams.get(STREAM_ID).streamlet(0).entries[0]
    start = Position(state.next_group_id, 1, len(newer[0]))
    first.engine.streams.move_start(entry, start, 11)
    await second.kill(memory=True)

    response, _ = await world.take_over(moved, 2, 1, handed_over=[state])
    assert (response.bytes_total, response.records_lost) == (0, 0)
    assert (entry.start, entry.start_record) == (start, 11)
    assert (await first.read())[0] == newer[1:]
    await first.stop()


async def test_where_an_entry_of_an_owner_once_started_is_not_what_it_has_removed(world: Cluster) -> None:
    """The streamlet had been here before, had gone with all that there was, and came back."""
    first, second = world.nodes[1], world.nodes[2]
    moved, state, (stored, _, newer) = await moved_from_second_to_first(world)
    entry = first.engine.streams.get(STREAM_ID).streamlet(0).entries[0]
    entry.start, entry.start_record = Position(1, 2, 0), 5
    await second.kill(memory=True)

    response, _ = await world.take_over(moved, 2, 1, handed_over=[state])
    assert response.records_lost == 0
    assert (await first.read())[0] == stored + newer
    await first.until_restored()
    await first.stop()


async def test_what_is_taken_over_and_was_handed_over_before_goes_on_behind_all_its_groups(world: Cluster) -> None:
    """A move had been written, and was told once more after the broker that had it was lost."""
    info, stored = await written(world, 20)
    node = world.nodes[2]
    await node.start(world.epoch())
    state = common_pb2.StreamletState(streamlet_id=0, next_group_id=1, next_records=[0] * info.config.entries)
    await world.take_over(info, 1, 2, given=[state])

    streamlet = node.engine.streams.get(STREAM_ID).streamlets[0]
    assert streamlet.next_group_id > max(entry.last_stored[0] for entry in streamlet.entries)
    assert await everything(world, 2) == stored
    await node.stop()


async def test_where_an_entry_once_started_here_leaves_out_nothing_that_another_broker_had(world: Cluster) -> None:
    """The streamlet had been here, and had gone to the broker that is lost now, with all that there was."""
    info, stored = await written(world, 20)
    node = world.nodes[2]
    await node.start(world.epoch())
    node.engine.restart.index.commit(
        [
            put_entry(EntryId(STREAM_ID, 0, entry), EntryRecord(Position(1, 2, 0), 5, 10))
            for entry in range(info.config.entries)
        ]
    )
    response, _ = await world.take_over(info, 1, 2)
    assert (response.records_lost, response.bytes_total) == (0, sum(map(len, stored)))
    assert await everything(world, 2) == stored
    await node.stop()


async def test_an_owner_that_was_told_nothing_before_finds_out_by_itself(world: Cluster) -> None:
    info, stored = await written(world, 10)
    epoch = world.epoch()
    info.assignments_version += 1
    info.assignments[0].broker_id, info.assignments[0].broker_epoch = 2, epoch
    info.assignments[0].sources.add(broker_id=1, before_epoch=epoch)
    node = world.nodes[2]
    await node.start(epoch, info)
    await node.until(lambda: STREAM_ID in node.engine.streams and bool(node.engine.streams.get(STREAM_ID).streamlets))
    assert await everything(world, 2) == stored
    await node.until_restored()
    await node.stop()


async def test_an_owner_that_finds_out_by_itself_goes_on_behind_what_was_removed(world: Cluster) -> None:
    """Of which nothing may be left: then the next records would have the numbers of those that were there."""
    info, _ = await written(world, 20, entries=1)
    info = owned_by(2, world.epoch(), entries=1)
    info.assignments[0].sources.add(broker_id=1, before_epoch=info.assignments[0].broker_epoch)
    start = common_pb2.Cursor(stream_id=STREAM_ID, group_id=90, segment_id=2, position=64)
    info.assignments[0].starts.add(start=start, first_record=400)
    node = world.nodes[2]
    await node.start(info.assignments[0].broker_epoch, info)
    await node.until(lambda: STREAM_ID in node.engine.streams and bool(node.engine.streams.get(STREAM_ID).streamlets))

    entry = node.engine.streams.get(STREAM_ID).streamlet(0).entries[0]
    assert (entry.start, entry.start_record, entry.next_record) == (Position(90, 2, 64), 400, 400)
    written_down = stream_record(node.engine.restart.index, STREAM_ID)
    assert written_down is not None
    assert not written_down.assignments[0].starts, "that is for now only"
    await node.stop()


async def test_an_owner_that_cannot_find_out_says_for_whom_it_waits(world: Cluster) -> None:
    info, stored = await written(world, 10, replication=1)
    epoch = world.epoch()
    info.assignments_version += 1
    info.assignments[0].broker_id, info.assignments[0].broker_epoch = 2, epoch
    info.assignments[0].sources.add(broker_id=1, before_epoch=epoch)
    node = world.nodes[2]
    await world.backups[1].stop()
    await node.start(epoch, info)
    await node.until(lambda: any("backup 2" in reason for each in progress(node) for reason in each.waits_for))
    assert [each.source for each in progress(node)] == list(info.assignments[0].sources)

    await world.backups[1].start()
    await node.until(lambda: bool(node.engine.streams.get(STREAM_ID).streamlets))
    assert await everything(world, 2) == stored
    await node.until_restored()
    assert not any(each.waits_for for each in progress(node))
    await node.stop()


async def test_what_is_recovered_can_be_removed_before_it_is_here(world: Cluster) -> None:
    info, stored = await written(world, 20, entries=1)
    node = world.nodes[2]
    await node.start(world.epoch())
    world.reads.open.clear()
    await world.take_over(info, 1, 2)
    entry = node.engine.streams.get(STREAM_ID).streamlet(0).entries[0]
    keys = [key for key, _ in entry.segments()]
    assert entry.recovering(keys[0])
    entry.start, entry.start_record = Position(*keys[4], 0), entry.find(keys[4]).first_record  # type: ignore[union-attr]
    node.engine.memory.removals.collect(entry)
    await node.until(lambda: entry.find(keys[0]) is None)
    world.reads.release()
    found, _ = await node.read()
    assert found == stored[-len(found) :]
    assert header_of(found[0]).segment_id == keys[4][1]
    await node.until_restored()
    await node.stop()


async def test_what_was_removed_since_it_was_taken_over_does_not_come_back_with_another_recovery(
    world: Cluster,
) -> None:
    """The other one was asked for before the first was written down, and knew nothing of the removal."""
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


async def test_a_broker_that_is_being_emptied_goes_on_while_its_groups_are_looked_for(world: Cluster) -> None:
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


async def test_what_is_found_for_one_recovery_is_not_taken_for_that_of_another(world: Cluster) -> None:
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


async def test_a_launch_without_memory_has_lost_nothing_of_what_it_is_given_later(world: Cluster) -> None:
    node = world.nodes[2]
    await node.start(world.epoch(), owned_by(2, world.last_epoch, replication=0, durability=1))
    await node.kill(memory=True)
    await node.start(world.epoch())
    await node.until(lambda: node.engine.replication.backups.up_count == 3)
    assert node.engine.restart.found.lost_memory
    info = owned_by(2, node.epoch)
    info.stream_id += 1
    info.assignments[0].first_group_id = 1 + (1 << 24)  # of a launch of the owner before, which wrote nothing
    state = common_pb2.StreamletState(next_group_id=1, next_records=[0, 0])
    await node.ask(api.OPEN_STREAMLETS, broker_pb2.OpenStreamletsRequest(stream=info, handed_over=[state]))
    (status,) = await node.write(chunk(0, 0, stream_id=info.stream_id))
    assert not status.error.code, status

    reply = await node.ask(
        api.MULTI_READ_CHUNKS, broker_pb2.MultiReadChunksRequest(ranges=[read_range(stream_id=info.stream_id)])
    )
    assert sum(map(len, reply.bulk)) > 0
    await node.stop()
