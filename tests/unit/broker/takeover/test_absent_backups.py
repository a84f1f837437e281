"""Takeovers with absent or unreadable backups: they wait, read from others, or give up a backup that is drained."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from structlog.testing import capture_logs

from kera.backup.engine import Engine as BackupEngine
from kera.broker.log.entry import written_end
from kera.broker.replication import replicator
from kera.broker.storage.unsure import unsure_tail
from kera.core.errors import DiskFull, Recovering, Unavailable
from kera.core.rpc import api
from kera.v1 import broker_pb2
from tests.unit.broker.support import STREAM_ID
from tests.unit.broker.takeover_support import QUICK, Cluster, everything, progress, written


async def test_a_recovery_that_loses_a_backup_reads_from_the_others(world: Cluster) -> None:
    info, stored = await written(world, 30)
    node = world.nodes[2]
    node.limits = QUICK
    world.reads.left = 0
    await node.start(world.epoch())
    await world.take_over(info, 1, 2)
    await node.until(lambda: not world.reads.open.is_set())
    await world.backups[0].stop()
    node.told()
    world.reads.release()
    assert await everything(world, 2) == stored
    await node.until_restored()
    await node.stop()


async def test_a_recovery_reads_from_a_backup_that_comes_back_after_another_is_lost(
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


async def test_an_unsure_tail_stays_hidden_until_it_is_replicated_again(world: Cluster) -> None:
    """The tail would be lost again if the new owner were lost, and that backup away, before new replicas exist."""
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


async def test_a_recovery_gives_up_a_lost_backup_when_it_is_drained(
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


async def test_a_recovery_reports_that_backups_are_missing_for_new_replicas(world: Cluster) -> None:
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


async def test_a_takeover_waits_while_as_many_backups_are_away_as_there_are_replicas(world: Cluster) -> None:
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


async def test_a_backup_with_damaged_headers_counts_as_away_while_another_is_away(world: Cluster) -> None:
    """The absent backup may have the replicas that the other one has lost."""
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


async def test_a_takeover_waits_for_a_backup_whose_disk_cannot_be_read(
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


async def test_a_recovery_gives_up_an_unreadable_disk_when_its_backup_is_drained(
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


async def test_an_unusable_backup_is_logged_once_however_often_it_is_tried(
    world: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup on a read-only file system takes connections, but cannot store which launches to refuse."""
    refused = 0

    async def remember_fence(*_: object) -> None:
        nonlocal refused
        refused += 1
        raise DiskFull("the backup's disk is read-only")

    with monkeypatch.context() as context, capture_logs() as lines:
        context.setattr(BackupEngine, "remember_fence", remember_fence)
        context.setattr(replicator, "RECONNECT_S", 0.01)
        node = world.nodes[1]
        await node.start(world.epoch())
        await node.until(lambda: refused >= 3 * 5)
        context.undo()
        await node.until(lambda: node.engine.replication.backups.up_count == 3)
        await node.stop()
    of_backups = [(line["event"], line["backup_id"]) for line in lines if "backup_id" in line]
    assert sorted(of_backups) == [
        (event, number) for event in ("backup connected", "backup lost") for number in (1, 2, 3)
    ]
