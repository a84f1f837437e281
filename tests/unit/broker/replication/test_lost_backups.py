"""Lost backups: virtual segments get new replicas, without needless copies."""

import errno
from functools import partial
from typing import Any

from kera.broker.heartbeat import HeartbeatReport
from kera.broker.ownership.stream import Stream
from kera.broker.replication.backups import FAILED_MS
from kera.broker.replication.virtual_index import virtual_segments
from kera.broker.replication.virtual_log import Send
from kera.broker.replication.virtual_logs import priority_of
from kera.broker.replication.virtual_segment import VirtualSegment
from kera.core.base.ids import Position
from kera.core.format.chunk import verify_header
from kera.v1 import coordinator_pb2
from tests.unit.broker.replication_support import DELAY_MS, FIRST_ID, Replicated, nothing_pinned
from tests.unit.broker.support import BROKER_ID, CHUNK_BYTES, SLOT_BYTES, STREAM_ID, Engine, chunk, stream_info


def deficient_one(world: Replicated, stream: Stream) -> int:
    """Put a closed virtual segment with four chunks on two backups, and lose one of them for good; return that one."""
    world.append(stream, 4)
    world.finish()
    world.close_all()
    ((failed, *_),) = [each.backups for each in world.replication.coverage.segments.values()]
    world.wire.lose(failed, memory=True)
    world.wire.tick(DELAY_MS)
    return failed


def test_a_deficient_virtual_segment_is_repaired_and_then_retired(world: Replicated) -> None:
    stream = world.open()
    deficient_one(world, stream)
    assert len(world.replication.coverage.deficient) == 1
    assert world.copies(stream) == [1] * 4
    world.repair()

    assert not world.replication.coverage.deficient
    assert world.copies(stream) == [2] * 4
    assert [each.virtual_segment_id for each in virtual_segments(world.engine.index)] == [FIRST_ID + 1]
    assert world.replication.totals.virtual_segments_repaired == 1
    assert nothing_pinned(world.engine)


def test_streams_of_higher_priority_are_replicated_and_repaired_first(world: Replicated) -> None:
    streams = [
        world.open(STREAM_ID + number, replication_priority=priority) for number, priority in enumerate((0, 7, 3))
    ]
    logs = world.replication.logs
    for stream in streams:
        assert stream.logs is not None
        segment = (
            stream.streamlets[0]
            .append(memoryview(data := chunk(0, 0, stream_id=stream.stream_id)), verify_header(data))
            .segment
        )
        assert segment is not None
        logs.append(stream.logs.of(0, 0), segment, 0, segment.head)
    sent = [effect.place.stream_id - STREAM_ID for effect in logs.pump() if isinstance(effect, Send)]
    assert sent == [1, 1, 2, 2, 0, 0]

    coverage = world.replication.coverage
    segments = [
        VirtualSegment(FIRST_ID + 50 + number, STREAM_ID + number, 0, backups, 0)
        for number, backups in ((0, [1]), (1, [1]), (2, [1]), (0, []))
    ]
    order = []
    coverage.deficient.update(dict.fromkeys(segments))
    while (found := coverage.next_deficient(3, partial(priority_of, logs.streams))) is not None:
        del coverage.deficient[found]
        order.append((found.stream_id - STREAM_ID, len(found.backups)))
    assert order == [(0, 0), (1, 1), (2, 1), (0, 1)], "what has no replica left is in most danger"

    info = stream_info(streams[0].stream_id, replication=2, replication_priority=9, memory_priority=5)
    info.config_version = 1
    world.engine.streams.open(info, BROKER_ID)
    assert priority_of(logs.streams, streams[0].stream_id) == 9
    assert streams[0].streamlets[0].entries[0].memory_priority == 5
    assert priority_of(logs.streams, 4711) == 0


def test_a_dead_backup_is_unneeded_once_its_replicas_are_repaired(world: Replicated) -> None:
    stream = world.open()
    failed = deficient_one(world, stream)
    assert not world.replication.unneeded_backups(), "it may come back"
    world.wire.backups[failed].info.alive = False
    world.replication.backups.update([world.wire.backups[failed].info])
    assert not world.replication.unneeded_backups()
    world.repair()

    assert world.replication.unneeded_backups() == {failed}


def test_a_drained_backup_that_stopped_is_unneeded(world: Replicated) -> None:
    info = world.wire.backups[1].info
    world.wire.lose(1, memory=True)
    info.alive, info.restarting = False, True
    world.replication.backups.update([info])
    assert not world.replication.unneeded_backups(), "it will be back"
    info.draining = True
    world.replication.backups.update([info])
    assert world.replication.unneeded_backups() == {1}


def test_a_backup_reported_as_unneeded_is_not_used_until_a_heartbeat_takes_that_back(world: Replicated) -> None:
    stream = world.open()
    world.wire.lose(1, memory=True)
    world.wire.backups[1].info.alive = False
    world.replication.backups.update([world.wire.backups[1].info])
    report = HeartbeatReport(world.engine.streams, replication=world.replication)

    def heartbeat() -> coordinator_pb2.HeartbeatRequest:
        request = coordinator_pb2.HeartbeatRequest()
        report.fill(request)
        return request

    assert list(heartbeat().unneeded_backup_ids) == [1]
    world.wire.connect(1)
    world.wire.run()
    world.wire.lose(2)  # so that backup 1 is needed
    world.wire.tick(FAILED_MS)
    world.append(stream)
    world.wire.run()
    assert not world.replicas()[1], "the heartbeat may have arrived"

    assert not heartbeat().unneeded_backup_ids
    report.answered(coordinator_pb2.HeartbeatResponse())
    world.wire.tick(FAILED_MS)
    world.finish()
    assert world.replicas()[1]


def test_a_deficient_virtual_segment_is_kept_until_its_replacement_is_in_the_index(world: Replicated) -> None:
    stream = world.open()
    deficient_one(world, stream)
    for _ in range(10):
        world.repairer.step()
        world.wire.run()  # without the disk
    assert world.copies(stream) == [3 - 1] * 4
    assert len(world.replication.coverage.segments) == 2
    world.engine.run()
    world.wire.run()

    assert len(world.replication.coverage.segments) == 1


def test_backups_that_are_away_briefly_cause_no_repair(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 4)
    world.finish()
    world.close_all()
    for backup_id in (1, 2, 3):
        world.wire.lose(backup_id)
    world.wire.tick(DELAY_MS - 1)
    world.wire.connect()
    world.wire.run()
    world.wire.tick(DELAY_MS)

    assert not world.replication.coverage.deficient
    assert world.copies(stream) == [2] * 4


def test_a_backup_that_comes_back_late_with_its_replicas_makes_copies_needless(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 4)
    world.finish()
    world.close_all()
    ((one, _),) = [each.backups for each in world.replication.coverage.segments.values()]
    world.wire.lose(one)
    world.wire.tick(DELAY_MS)
    assert len(world.replication.coverage.deficient) == 1
    world.wire.connect(one)
    world.wire.run()

    assert not world.replication.coverage.deficient
    assert world.copies(stream) == [2] * 4
    assert world.replication.totals.bytes_repaired == 0


def test_a_replica_that_differs_from_the_closed_one_is_made_anew_and_freed(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 4)
    world.finish()
    world.close_all()
    ((one, _),) = [each.backups for each in world.replication.coverage.segments.values()]
    world.wire.lose(one)
    world.wire.backups[one].replicas[FIRST_ID].cut(3 * CHUNK_BYTES)
    world.wire.connect(one)
    world.wire.run()
    assert FIRST_ID in world.wire.backups[one].replicas
    assert len(world.replication.coverage.deficient) == 1
    world.wire.tick(FAILED_MS)
    world.repair()

    assert world.copies(stream) == [2] * 4
    assert FIRST_ID not in world.wire.backups[one].replicas


def test_a_virtual_segment_that_loses_a_backup_while_open_is_repaired(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 1)
    world.finish()
    place = next(iter(world.replication.logs.opened.values()))
    failed = place.backups[0]
    world.append(stream, 1)
    world.wire.lose(failed, carried_out=1)
    world.finish()
    world.wire.connect(failed)
    world.finish()
    world.wire.tick(FAILED_MS)
    world.repair()

    assert world.copies(stream) == [2, 2]
    assert not world.replication.coverage.deficient


def test_a_backup_that_comes_back_while_its_virtual_segment_closes_counts(
    world: Replicated,
) -> None:
    stream = world.open()
    world.append(stream, 1)
    world.finish()
    (place,) = world.replication.logs.opened.values()
    failed, other = place.backups
    world.wire.lose(failed)
    assert world.wire.backups[other].requests  # the other backup is slow to close its replica
    world.wire.connect(failed)
    world.wire.run(failed)
    world.finish()

    assert sorted(place.backups) == sorted((failed, other))
    assert world.wire.backups[failed].replicas[FIRST_ID].closed
    assert not world.replication.coverage.deficient


def test_an_unrepairable_virtual_segment_does_not_delay_other_repairs(engine: Engine) -> None:
    world = Replicated(engine, repair_delay_ms=DELAY_MS)
    three, two = world.open(replication=3), world.open(8)
    world.append(three)
    world.finish()
    world.wire.lose(2, memory=True)
    world.append(two)
    world.finish()
    world.close_all()
    world.wire.lose(1, memory=True)
    world.wire.connect(2)
    world.wire.tick(DELAY_MS)
    world.finish()
    assert (world.copies(three), world.copies(two)) == ([1], [1])
    world.repair()

    assert world.copies(two) == [2]


def test_an_old_virtual_segment_is_kept_while_its_replacement_is_deficient(engine: Engine) -> None:
    world = Replicated(engine, backups=4, repair_delay_ms=DELAY_MS)
    stream = world.open()
    deficient_one(world, stream)
    (old,) = world.replication.coverage.deficient
    segment = stream.streamlets[0].entries[0].resident[1, 1]
    batch = world.replication.backlog.cover(segment, 0, SLOT_BYTES, lambda _: None)
    world.finish()
    assert batch is not None
    assert batch.place is not None
    new = batch.place
    world.wire.lose(next(each for each in new.backups if each not in old.backups), memory=True)
    world.finish()
    assert new in world.replication.coverage.deficient
    assert new.written
    world.replication.coverage.replaced(old, {new})

    assert old.virtual_segment_id in world.replication.coverage.segments


def test_retention_during_a_repair_does_not_keep_the_old_virtual_segment(world: Replicated) -> None:
    stream = world.open(group_segments=8)
    replication, entry = world.replication, stream.streamlets[0].entries[0]
    world.append(stream, 2)
    world.finish()
    world.engine.memory.segments.close_all()
    world.append(stream, 2)
    world.finish()
    world.close_all()
    (old,) = replication.coverage.segments.values()
    world.wire.lose(old.backups[0], memory=True)
    world.wire.connect()
    world.wire.run()
    world.wire.tick(DELAY_MS)
    assert list(replication.coverage.deficient) == [old]
    new: set[Any] = set()
    for _, segment in sorted(entry.resident.items()):  # each in its own virtual segment
        batch = replication.backlog.cover(segment, 0, segment.head, lambda _: None)
        world.wire.run()
        assert batch is not None
        new.add(batch.place)
        replication.logs.close_open()
        world.wire.pump()
    assert len(new) == 2
    replication.coverage.replaced(old, new)
    entry.start, entry.start_record = Position(2, 1, 0), 2
    world.engine.memory.removals.collect(entry)
    for job in world.engine.memory.plan():  # the first part goes before its new virtual segment is closed
        world.engine.perform(job)
    world.finish()
    world.repair()

    assert not replication.coverage.deficient
    assert old.virtual_segment_id not in replication.coverage.segments
    assert world.copies(stream) == [2, 2]


def test_a_repair_completes_after_a_failed_write_to_the_index(world: Replicated) -> None:
    stream = world.open()
    deficient_one(world, stream)
    commit, fails = world.engine.index.commit, [True]

    def failing(changes: Any, meta: Any = None) -> None:
        if fails and any(key[:1] == b"v" for key, _ in changes):
            fails.clear()
            raise OSError(errno.EIO, "no")
        commit(changes, meta)

    world.engine.index.commit = failing  # type: ignore[method-assign]
    for _ in range(5):
        world.repairer.step()
        world.wire.run()
    world.engine.run()
    assert not fails
    world.engine.memory.tick(60_000, idle_close_ms=1 << 30)
    world.wire.tick(1000)
    world.finish()
    world.repair()

    assert not world.replication.coverage.deficient
    assert [each.written for each in world.replication.coverage.segments.values()] == [True]
