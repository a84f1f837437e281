"""Backups that are drained, restart or are forgotten: virtual segments leave them in time, if there are others."""

from tests.unit.broker.replication_support import DELAY_MS, Repairer, Replicated


def empty_out(world: Replicated, *backup_ids: int) -> None:
    for backup_id, backup in world.wire.backups.items():
        backup.info.draining = backup_id in backup_ids
    world.replication.backups.update([backup.info for backup in world.wire.backups.values()])


def test_replicas_of_a_drained_backup_are_made_anew_elsewhere_and_freed(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 3)
    world.finish()
    (place,) = world.replication.logs.opened.values()
    drained = place.backups[0]
    empty_out(world, drained)
    world.wire.tick(1)
    world.finish()
    assert drained not in {id_ for place in world.replication.logs.opened.values() for id_ in place.backups}
    (old,) = world.replication.coverage.segments.values()
    assert old in world.replication.coverage.deficient
    assert world.wire.backups[drained].replicas, "until there are others"
    world.append(stream, 3)
    world.finish()
    repairer = Repairer(world.engine, world.engine.streams.entry, world.wire)
    for _ in range(20):
        repairer.step()
        world.finish()
    assert world.wire.backups[drained].replicas == {}
    assert not world.replication.coverage.deficient


def test_drained_backups_stay_in_use_when_there_are_too_few_others(world: Replicated) -> None:
    stream = world.open()
    empty_out(world, 1, 2)
    world.append(stream, 2)
    world.wire.tick(1)
    world.finish()
    (place,) = world.replication.logs.opened.values()
    assert len(place.backups) == stream.replication
    world.append(stream, 2)
    world.finish()
    assert list(world.replication.logs.opened.values()) == [place], "it stays where it is"


def restart_soon(world: Replicated, backup_id: int, *, alive: bool = True) -> None:
    info = world.wire.backups[backup_id].info
    info.restarting, info.alive = True, alive
    world.replication.backups.update([backup.info for backup in world.wire.backups.values()])


def test_replicas_on_a_restarting_backup_are_closed_and_count_during_the_grace(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 3)
    world.finish()
    (place,) = world.replication.logs.opened.values()
    leaving = place.backups[0]
    restart_soon(world, leaving)
    world.wire.tick(1)
    world.finish()
    assert not world.replication.logs.opened
    assert [replica.closed for replica in world.wire.backups[leaving].replicas.values()] == [True]
    assert not world.replication.coverage.deficient
    world.append(stream, 3)
    world.finish()
    assert leaving not in {id_ for place in world.replication.logs.opened.values() for id_ in place.backups}

    restart_soon(world, leaving, alive=False)
    world.wire.lose(leaving)
    world.wire.tick(DELAY_MS + 1)
    world.finish()
    assert not world.replication.coverage.deficient, "its replicas are there, for the grace"
    assert not world.replication.unneeded_backups()

    world.wire.backups[leaving].info.restarting = False
    restart_over = [backup.info for backup in world.wire.backups.values()]
    world.replication.backups.update(restart_over)
    world.wire.tick(1)
    assert world.replication.coverage.deficient, "the grace is over"


def test_virtual_segments_stay_on_restarting_backups_when_there_are_too_few_others(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 2)
    world.finish()
    (place,) = world.replication.logs.opened.values()
    for backup_id in place.backups:
        restart_soon(world, backup_id)
    world.wire.tick(1)
    world.append(stream, 2)
    world.finish()
    assert list(world.replication.logs.opened.values()) == [place]


def test_a_forgotten_backup_is_neither_up_nor_used(world: Replicated) -> None:
    world.wire.lose(1)
    world.replication.backups.update([world.wire.backups[backup_id].info for backup_id in (2, 3)])
    assert not world.replication.backups.is_up(1)
    assert 1 not in world.replication.unneeded_backups()
    stream = world.open()
    world.append(stream, 2)
    world.finish()
    assert {id_ for place in world.replication.logs.opened.values() for id_ in place.backups} == {2, 3}
