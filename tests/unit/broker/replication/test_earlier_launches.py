"""Replicas of earlier launches: they are freed when their chunks are elsewhere or no longer wanted, and no sooner."""

import pytest

from kera.broker.log.events import Events
from kera.broker.replication.manager import Replication
from kera.broker.replication.virtual_index import dropped_streams
from kera.broker.replication.virtual_log import Send
from kera.broker.replication.virtual_segment import Free
from kera.core.errors import NotReplicated
from tests.unit.broker.replication_support import EPOCH, FIRST_ID, Replicated, restarted
from tests.unit.broker.support import STREAM_ID


def test_replicas_of_earlier_launches_are_freed_only_when_all_chunks_are_covered(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 4)
    world.finish()  # open: the index does not know it
    replication = restarted(world)
    replication.backups.update([backup.info for backup in world.wire.backups.values()])
    for backup_id, backup in world.wire.backups.items():
        replication.backup_up(backup_id)
        replication.listed(backup_id, backup.list())
    sends = replication.logs.pump()
    replication.backlog.rest()
    assert {type(effect) for effect in [*sends, *replication.logs.pump()]} == {Send}
    for send in sends:
        assert isinstance(send, Send)
        assert send.batch.persist, "what is freed was on disk"
        replication.logs.acknowledged(send)
    replication.backlog.rest()

    freed = [effect for effect in replication.logs.pump() if isinstance(effect, Free)]
    assert {id_ for effect in freed for id_ in effect.virtual_segment_ids} == {FIRST_ID}
    assert len(freed) == 2


def test_replicas_of_earlier_launches_stay_when_memory_was_lost(world: Replicated) -> None:
    world.append(world.open())
    world.finish()
    replication = restarted(world, recover_before_epoch=EPOCH + 1)
    replication.backups.update([backup.info for backup in world.wire.backups.values()])
    for backup_id, backup in world.wire.backups.items():
        replication.backup_up(backup_id)
        replication.listed(backup_id, backup.list())
    for effect in replication.logs.pump():
        assert isinstance(effect, Send)
        replication.logs.acknowledged(effect)
    replication.backlog.rest()

    assert not any(isinstance(effect, Free) for effect in replication.logs.pump())


@pytest.mark.parametrize("listed_first", [True, False])
def test_replicas_that_others_recovered_from_are_freed_when_their_stream_is_released(
    world: Replicated, listed_first: bool
) -> None:
    """A broker that restarts while it is being emptied knows these replicas only from the lists of the backups."""
    world.append(world.open())
    world.finish()
    replication = restarted(world, recover_before_epoch=EPOCH + 1)
    replication.backups.update([backup.info for backup in world.wire.backups.values()])

    def freed() -> list[Free]:
        return [effect for effect in replication.logs.pump() if isinstance(effect, Free)]

    def tell() -> None:
        for backup_id, backup in world.wire.backups.items():
            replication.backup_up(backup_id)
            replication.listed(backup_id, backup.list())

    if listed_first:
        tell()
    replication.release(STREAM_ID + 1)
    assert freed() == []
    replication.release(STREAM_ID)
    if not listed_first:
        tell()
    there = sorted(backup_id for backup_id, backup in world.wire.backups.items() if backup.list())
    assert len(there) == 2
    assert sorted(effect.backup_id for effect in freed() if effect.virtual_segment_ids == (FIRST_ID,)) == there
    replication.release(STREAM_ID)
    assert freed() == []


def test_replicas_of_a_dropped_stream_are_freed_when_their_backup_comes_back(
    world: Replicated,
) -> None:
    """Others may have recovered from the replicas by then; the new launch knows only that the stream was dropped."""
    world.append(world.open())
    world.finish()
    there = sorted(backup_id for backup_id, backup in world.wire.backups.items() if backup.list())
    listed = {backup_id: world.wire.backups[backup_id].list() for backup_id in there}
    away = there[0]
    world.wire.lose(away)
    world.replication.drop_stream(STREAM_ID, NotReplicated("the stream was deleted"))
    world.engine.run()
    assert dropped_streams(world.engine.index)[STREAM_ID] >= {away}

    replication = Replication(world.replication.limits, world.engine.memory.index_writer.note, Events())
    dropped = dropped_streams(world.engine.index)
    replication.begin(EPOCH + 1, [], recover_before_epoch=EPOCH + 1, dropped=dropped)
    replication.backups.update([backup.info for backup in world.wire.backups.values()])
    for backup_id in world.wire.backups:
        replication.backup_up(backup_id)
        replication.listed(backup_id, listed.get(backup_id, []) if backup_id == away else [])
    freed = [effect for effect in replication.logs.pump() if isinstance(effect, Free)]
    assert [(effect.backup_id, effect.virtual_segment_ids) for effect in freed] == [(away, (FIRST_ID,))]
    world.engine.run()
    assert dropped_streams(world.engine.index) == {}


def test_a_damaged_replica_is_not_freed_before_its_repair(world: Replicated) -> None:
    """A recovery that cannot reach the other replica must see that there was data."""
    world.append(world.open(), 3)
    world.finish()
    world.close_all()
    replication = restarted(world)
    replication.backups.update([backup.info for backup in world.wire.backups.values()])
    (segment,) = replication.coverage.segments.values()
    damaged_at = segment.backups[0]  # the other backup is away
    replication.backup_up(damaged_at)
    listed = world.wire.backups[damaged_at].list()
    for replica in listed:
        replica.chunks_damaged = 1
    replication.listed(damaged_at, listed)

    assert not any(isinstance(effect, Free) for effect in replication.logs.pump())
    assert segment in replication.coverage.deficient


def test_stranger_replicas_of_a_dropped_stream_are_freed(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 4)
    world.finish()
    replication = restarted(world)
    replication.backlog.add_stranger(1, FIRST_ID, STREAM_ID)
    replication.drop_stream(STREAM_ID, NotReplicated("gone"))
    replication.backlog.rest()

    assert Free(1, (FIRST_ID,)) in replication.logs.pump()


def test_stranger_replicas_of_an_unknown_stream_are_kept_while_it_is_spared(world: Replicated) -> None:
    world.open()
    spared = {STREAM_ID}
    replication = restarted(world, spared=spared)
    replication.backlog.add_stranger(1, FIRST_ID, STREAM_ID)
    replication.backlog.rest()
    assert Free(1, (FIRST_ID,)) not in replication.logs.pump()
    spared.clear()
    replication.backlog.rest()

    assert Free(1, (FIRST_ID,)) in replication.logs.pump()
