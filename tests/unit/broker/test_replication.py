"""Where replicas are, how many there are, and what is done about it, with backups that keep bytes."""

import errno
from collections.abc import Container
from functools import partial
from typing import Any

import pytest

from kera.broker.heartbeat import HeartbeatReport
from kera.broker.log.entry import Entry
from kera.broker.log.events import Events
from kera.broker.ownership.moved_starts import MovedStarts
from kera.broker.ownership.stream import Stream
from kera.broker.records import Hole
from kera.broker.replication.backups import FAILED_MS, FULL_MS
from kera.broker.replication.manager import Replication
from kera.broker.replication.virtual_index import dropped_streams, virtual_segments
from kera.broker.replication.virtual_log import Close, Send
from kera.broker.replication.virtual_logs import IDLE_MS_MIN, priority_of
from kera.broker.replication.virtual_segment import Free, VirtualSegment
from kera.core.chunk import ChunkHeader, verify_header
from kera.core.done import Done
from kera.core.errors import NotOwner, NotReplicated, TooFewBackups
from kera.core.ids import Position
from kera.v1 import common_pb2, coordinator_pb2
from tests.unit.broker.persistence_support import MakeEngine
from tests.unit.broker.replication_support import EPOCH, FIRST_ID, Repairer, Replicated, durable, nothing_pinned
from tests.unit.broker.support import BROKER_ID, CHUNK_BYTES, SLOT_BYTES, STREAM_ID, Engine, chunk, stream_info

LEADER = common_pb2.DURABILITY_LEADER
DELAY_MS = 2000


@pytest.fixture
def world(engine: Engine) -> Replicated:
    """Three backups, all up."""
    return Replicated(engine, repair_delay_ms=DELAY_MS, wait_ms_max=5000)


def drain(world: Replicated, stream: Stream) -> None:
    """All of the stream is on disk, and nothing in memory is kept."""
    world.close_all()
    world.engine.memory.segments.close_all()
    world.finish()
    assert stream.streamlets[0].entries[0].tail == []
    assert nothing_pinned(world.engine)


# --- in good times -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("replication", [1, 2, 3])
def test_each_chunk_is_on_as_many_backups_as_the_stream_wants(world: Replicated, replication: int) -> None:
    stream = world.open(replication=replication)
    outcome = world.append(stream, 3)
    assert (outcome.calls, durable(stream)) == ([], 0)
    world.finish()

    assert (outcome.calls, durable(stream)) == ([None], 3 * CHUNK_BYTES)
    assert world.copies(stream) == [replication] * 3
    assert {send.place.virtual_segment_id for send in world.wire.sent if isinstance(send, Send)} == {FIRST_ID}


def test_a_closed_virtual_segment_is_written_down_and_a_restart_has_nothing_to_send(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 4)
    world.finish()
    assert list(virtual_segments(world.engine.index)) == []
    world.close_all()
    (segment,) = virtual_segments(world.engine.index)
    (replica,) = {bytes(b.replicas[FIRST_ID].data) for b in world.wire.backups.values() if b.replicas}

    assert (segment.virtual_segment_id, segment.stream_id, segment.log_id) == (FIRST_ID, STREAM_ID, 0)
    assert (segment.head, segment.wanted, len(segment.backups)) == (len(replica), 2, 2)
    assert not restarted(world).backlog.extents
    assert restarted(world).logs.pump() == []


def restarted(
    world: Replicated, *, epoch: int = EPOCH + 1, recover_before_epoch: int = 0, spared: Container[int] = ()
) -> Replication:
    """Another launch's replication, that finds the same log."""
    replication = Replication(
        world.replication.limits,
        lambda _changes, done: done(None),
        Events(),
        exists=world.engine.streams.exists,
        spared=lambda stream_id: stream_id in spared,
    )
    replication.begin(epoch, virtual_segments(world.engine.index), recover_before_epoch=recover_before_epoch)
    logs = replication.logs.open_stream(STREAM_ID, replication=2, entries=1, virtual_logs=1, by_replicas=True)
    replication.backlog.restore(logs, world.engine.streams.get(STREAM_ID).streamlets[0].entries[0])
    return replication


def test_a_restart_sends_what_no_closed_virtual_segment_has(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 3)
    world.finish()
    world.close_all()
    world.append(stream, 3)
    world.wire.run()
    replication = restarted(world)
    (log,) = replication.logs.streams[STREAM_ID].logs

    assert log.lag_bytes == 3 * CHUNK_BYTES
    assert not replication.backlog.extents


def test_what_a_restart_sends_goes_in_pieces_that_a_backup_takes(
    engine: Engine,
) -> None:
    world = Replicated(engine, request_bytes_max=2 * CHUNK_BYTES + 1)
    stream = world.open()
    world.append(stream, 3)
    world.wire.run()
    (log,) = restarted(world).logs.streams[STREAM_ID].logs
    assert [batch.length for batch in log._queue] == [2 * CHUNK_BYTES, CHUNK_BYTES]


def test_retention_retires_what_has_nothing_left(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 8)
    world.finish()
    drain(world, stream)
    assert world.replication.virtual_segments == {"open": 0, "closed": 2}
    before = set(world.replicas()[1] + world.replicas()[2] + world.replicas()[3])
    entry = stream.streamlets[0].entries[0]
    entry.start, entry.start_record = Position(1, 2, 0), 4
    world.engine.memory.removals.collect(entry)
    world.finish()

    after = set(world.replicas()[1] + world.replicas()[2] + world.replicas()[3])
    assert after < before
    assert {id_ - FIRST_ID for id_ in world.replication.coverage.segments} == after
    assert {each.virtual_segment_id - FIRST_ID for each in virtual_segments(world.engine.index)} == after


# --- too few backups, full ones ----------------------------------------------------------------------------


def test_too_few_backups_are_told_of_before_anything_is_appended(engine: Engine) -> None:
    world = Replicated(engine, up=False)
    stream = world.open()
    world.wire.connect(1)
    assert stream.logs is not None
    with pytest.raises(TooFewBackups) as raised:
        world.replication.backups.check(stream.replication, "s")

    assert raised.value.attributes["backups"] == 1
    world.wire.connect(2)
    world.replication.backups.check(stream.replication, "s")


def test_backups_whose_segments_are_too_small_do_not_count(world: Replicated) -> None:
    stream = world.open()
    replication = restarted(world)
    for backup_id in (7, 8):
        replication.backups.update([common_pb2.BackupInfo(backup_id=backup_id, segment_bytes=SLOT_BYTES // 2)])
        replication.backup_up(backup_id)
    assert stream.logs is not None
    with pytest.raises(TooFewBackups, match="2 backups, and 0 can be used"):
        replication.backups.check(stream.replication, "s")


def test_a_backup_that_does_not_know_a_replica_any_more_can_be_used_for_others(world: Replicated) -> None:
    world.append(world.open())
    world.finish()
    (place,) = world.replication.logs.opened.values()
    failed, other = place.backups
    world.wire.lose(failed, memory=True)
    world.wire.connect(failed)
    world.wire.run(failed)
    world.wire.tick(FAILED_MS)
    world.finish()
    stream = world.open(8, replication=3)
    outcome = world.append(stream)
    world.finish()

    assert other != failed
    assert outcome.calls == [None]


def test_without_backups_who_waits_is_told_and_when_they_come_back_everything_completes(world: Replicated) -> None:
    stream = world.open()
    outcome = world.append(stream, 2)
    for backup_id in (1, 2, 3):
        world.wire.lose(backup_id)
    world.wire.tick(5000)
    world.wire.tick(1)
    assert [type(call) for call in outcome.calls] == [NotReplicated]
    world.wire.connect(1, 3)
    world.wire.tick(FAILED_MS)
    world.finish()

    assert durable(stream) == 2 * CHUNK_BYTES
    assert world.copies(stream) == [2, 2]
    assert len(outcome.calls) == 1


def test_a_full_backup_is_left_for_another_one(world: Replicated) -> None:
    for backup_id in (1, 2):
        world.wire.backups[backup_id].full = True
    stream = world.open(replication=1)
    outcome = world.append(stream)
    world.finish()

    assert outcome.calls == [None]
    assert [len(ids) for ids in world.replicas().values()] == [0, 0, 1]


def test_when_all_backups_are_full_idle_virtual_segments_close_and_it_goes_on_by_itself(world: Replicated) -> None:
    idle, stream = world.open(8), world.open(replication=3)
    world.append(idle)
    world.finish()
    world.wire.tick(IDLE_MS_MIN)
    for backup in world.wire.backups.values():
        backup.full = True
    outcome = world.append(stream)
    world.finish()
    assert outcome.calls == []
    assert {close.place.stream_id for close in world.wire.sent if isinstance(close, Close)} == {8}
    for backup in world.wire.backups.values():
        backup.full = False
    world.wire.tick(FULL_MS)
    world.finish()

    assert outcome.calls == [None]


def test_who_waits_too_long_for_a_full_backup_is_told_that_it_has_no_room(world: Replicated) -> None:
    world.wire.backups[1].full = True
    outcome = world.append(world.open(replication=3))
    for _ in range(200):
        world.finish()
        world.wire.tick(100)
    (error,) = outcome.calls
    assert isinstance(error, NotReplicated)
    assert error.message.endswith("these have no room: 1")
    assert error.attributes["full_backup_ids"] == [1]


def test_a_log_that_lags_is_told_of_and_so_is_room(engine: Engine) -> None:
    world = Replicated(engine, lag_bytes_max=2 * CHUNK_BYTES)
    room: list[bool] = []
    world.engine.events.room.listen(lambda: room.append(True))
    stream = world.open()
    assert stream.logs is not None
    log = stream.logs.of(0, 0)
    lagged = []
    for _ in range(2):
        world.append(stream)
        lagged.append(log.lags)
    world.finish()

    assert [*lagged, log.lags] == [False, True, False]
    assert room == [True]


def test_after_a_newer_launch_has_taken_over_who_waits_is_told(world: Replicated) -> None:
    outcome = world.append(world.open())
    error = NotReplicated("a newer launch has taken over")
    world.replication.logs.fail(error)

    assert outcome.calls == [error]


# --- backups that fail -------------------------------------------------------------------------------------


def deficient_one(world: Replicated, stream: Stream) -> int:
    """A closed virtual segment with four chunks on two backups, of which one has failed for good; returns which."""
    world.append(stream, 4)
    world.finish()
    world.close_all()
    ((failed, *_),) = [each.backups for each in world.replication.coverage.segments.values()]
    world.wire.lose(failed, memory=True)
    world.wire.tick(DELAY_MS)
    return failed


def test_what_has_too_few_replicas_is_covered_again_and_then_retired(world: Replicated) -> None:
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


def test_streams_with_a_higher_priority_go_to_backups_first_and_get_replicas_anew_first(world: Replicated) -> None:
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


def test_a_backup_that_is_gone_is_not_needed_once_all_that_it_had_is_elsewhere(world: Replicated) -> None:
    stream = world.open()
    failed = deficient_one(world, stream)
    assert not world.replication.unneeded_backups(), "it may come back"
    world.wire.backups[failed].info.alive = False
    world.replication.backups.update([world.wire.backups[failed].info])
    assert not world.replication.unneeded_backups()
    world.repair()

    assert world.replication.unneeded_backups() == {failed}


def test_a_backup_that_was_drained_and_is_stopped_is_not_needed_either(world: Replicated) -> None:
    info = world.wire.backups[1].info
    world.wire.lose(1, memory=True)
    info.alive, info.restarting = False, True
    world.replication.backups.update([info])
    assert not world.replication.unneeded_backups(), "it will be back"
    info.draining = True
    world.replication.backups.update([info])
    assert world.replication.unneeded_backups() == {1}


def test_a_backup_that_was_said_not_to_be_needed_is_not_used_before_that_is_taken_back(world: Replicated) -> None:
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
    world.wire.lose(2)  # so that it is needed
    world.wire.tick(FAILED_MS)
    world.append(stream)
    world.wire.run()
    assert not world.replicas()[1], "the heartbeat may have arrived"

    assert not heartbeat().unneeded_backup_ids
    report.answered(coordinator_pb2.HeartbeatResponse())
    world.wire.tick(FAILED_MS)
    world.finish()
    assert world.replicas()[1]


def test_what_is_to_be_repaired_stays_where_it_is_until_the_new_replicas_are_written_down(world: Replicated) -> None:
    stream = world.open()
    deficient_one(world, stream)
    for _ in range(10):
        world.repairer.step()
        world.wire.run()  # and nothing comes back from the disk
    assert world.copies(stream) == [3 - 1] * 4
    assert len(world.replication.coverage.segments) == 2
    world.engine.run()
    world.wire.run()

    assert len(world.replication.coverage.segments) == 1


def test_a_backup_that_is_away_for_a_short_time_costs_nothing(world: Replicated) -> None:
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


def test_a_backup_that_comes_back_late_with_what_it_had_heals_it_without_a_copy(world: Replicated) -> None:
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


def test_a_replica_that_is_not_what_was_closed_is_made_anew_and_then_freed(world: Replicated) -> None:
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


def test_a_sealed_virtual_segment_is_repaired_and_nothing_stays_on_the_backup_that_left(world: Replicated) -> None:
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


def test_a_backup_that_comes_back_while_its_virtual_segment_closes_without_it_counts_when_it_is_closed(
    world: Replicated,
) -> None:
    stream = world.open()
    world.append(stream, 1)
    world.finish()
    (place,) = world.replication.logs.opened.values()
    failed, other = place.backups
    world.wire.lose(failed)
    assert world.wire.backups[other].requests  # to close it: it takes its time
    world.wire.connect(failed)
    world.wire.run(failed)
    world.finish()

    assert sorted(place.backups) == sorted((failed, other))
    assert world.wire.backups[failed].replicas[FIRST_ID].closed
    assert not world.replication.coverage.deficient


def test_what_cannot_be_repaired_for_want_of_backups_does_not_hold_up_the_rest(engine: Engine) -> None:
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


def test_an_old_virtual_segment_is_kept_while_what_covers_it_is_deficient_itself(engine: Engine) -> None:
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


def test_retention_of_part_of_what_was_covered_again_does_not_keep_the_old_one(world: Replicated) -> None:
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
    for _, segment in sorted(entry.resident.items()):  # each in a virtual segment of its own
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


def test_a_virtual_segment_that_could_not_be_written_down_at_first_counts_when_it_is(world: Replicated) -> None:
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


# --- the number of virtual logs changes --------------------------------------------------------------------


@pytest.mark.parametrize("virtual_logs", [1, 2])
def test_the_durable_head_waits_for_the_old_logs_when_their_number_changes(
    world: Replicated, virtual_logs: int
) -> None:
    stream = world.open(entries=2, virtual_logs=3 - virtual_logs)
    for producer in (0, 1):
        world.append(stream, 1, producer=producer)
    alter(world, stream, virtual_logs, entries=2)
    outcomes = [world.append(stream, 1, producer=producer) for producer in (0, 1)]
    entries = stream.streamlets[0].entries
    assert [entry.length_bytes for entry in entries] == [0, 0]
    sent = [each for each in world.wire.sent if isinstance(each, Send)]
    assert {each.batch.length for each in sent} <= {CHUNK_BYTES}
    world.finish()

    assert [entry.length_bytes for entry in entries] == [2 * CHUNK_BYTES] * 2
    assert [outcome.calls for outcome in outcomes] == [[None]] * 2
    assert stream.logs is not None
    assert len(stream.logs.logs) == virtual_logs
    assert all(log.settled for log in stream.logs.draining)
    assert nothing_pinned(world.engine)


def alter(world: Replicated, stream: Stream, virtual_logs: int, **config: Any) -> None:
    info = stream_info(
        stream.stream_id, replication=2, durability=stream.durability, virtual_logs=virtual_logs, **config
    )
    info.config_version = stream.config_version + 1
    world.engine.streams.open(info, BROKER_ID)
    world.wire.pump()


def test_two_changes_in_a_row_wait_for_nothing_but_each_other(world: Replicated) -> None:
    stream = world.open(entries=2, virtual_logs=1)
    outcomes = []
    for virtual_logs in (2, 1, 2):
        outcomes.append(world.append(stream))
        alter(world, stream, virtual_logs, entries=2)
    world.finish()

    assert [outcome.calls for outcome in outcomes] == [[None]] * 3


# --- level leader ------------------------------------------------------------------------------------------


def test_what_level_leader_cannot_send_is_shed_and_covered_later(engine: Engine) -> None:
    world = Replicated(engine, up=False, lag_bytes_max=2 * CHUNK_BYTES)
    stream = world.open(durability=LEADER)
    assert stream.logs is not None
    log = stream.logs.of(0, 0)
    batch = None
    for _ in range(6):
        if log.lags:
            world.replication.backlog.shed(stream.logs)
        appended = stream.streamlets[0].append(*_next_chunk(world, stream))
        stream.streamlets[0].publish(appended)
        assert appended.segment is not None
        batch = world.replication.logs.append(log, appended.segment, appended.position, appended.end)
    assert batch is not None
    assert durable(stream) == 6 * CHUNK_BYTES
    assert sum(extent.end - extent.start for extent in world.replication.backlog.extents) == 4 * CHUNK_BYTES
    world.wire.connect()
    world.finish()
    world.repair()

    assert world.copies(stream) == [2] * 6
    assert not world.replication.backlog.extents
    assert nothing_pinned(engine)


def _next_chunk(world: Replicated, stream: Stream) -> tuple[memoryview, ChunkHeader]:
    data = chunk(0, world.sequences[stream.stream_id, 0])
    world.sequences[stream.stream_id, 0] += 1
    return memoryview(data), verify_header(data)


# --- strangers ---------------------------------------------------------------------------------------------


def test_replicas_of_earlier_launches_are_freed_only_when_all_is_covered(world: Replicated) -> None:
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
def test_replicas_that_others_recovered_from_are_freed_when_they_have_everything(
    world: Replicated, listed_first: bool
) -> None:
    """A broker that was started again while it was being emptied knows of them from backups only."""
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


def test_replicas_of_a_stream_that_was_dropped_while_their_backup_was_away_are_freed_later(
    world: Replicated,
) -> None:
    """Which others may have recovered from by then: it knows of them only that they were dropped."""
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


def test_a_damaged_replica_stays_until_what_it_has_is_made_anew(world: Replicated) -> None:
    """Who recovers, and cannot reach the other replica, must see that there was something."""
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


def test_a_stream_that_is_dropped_before_it_is_covered_does_not_keep_strangers(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 4)
    world.finish()
    replication = restarted(world)
    replication.backlog.add_stranger(1, FIRST_ID, STREAM_ID)
    replication.drop_stream(STREAM_ID, NotReplicated("gone"))
    replication.backlog.rest()

    assert Free(1, (FIRST_ID,)) in replication.logs.pump()


def test_replicas_of_earlier_launches_are_kept_of_streams_that_nobody_knows(world: Replicated) -> None:
    world.open()
    spared = {STREAM_ID}
    replication = restarted(world, spared=spared)
    replication.backlog.add_stranger(1, FIRST_ID, STREAM_ID)
    replication.backlog.rest()
    assert Free(1, (FIRST_ID,)) not in replication.logs.pump()
    spared.clear()
    replication.backlog.rest()

    assert Free(1, (FIRST_ID,)) in replication.logs.pump()


# --- the end of streams ------------------------------------------------------------------------------------


def test_a_stream_that_is_dropped_with_batches_in_flight_leaves_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    free = engine.arena.free_slots
    world = Replicated(engine)
    stream = world.open()
    world.append(stream, 4)
    world.finish()
    outcome = world.append(stream, 4)
    engine.streams.drop(STREAM_ID)
    world.wire.pump()
    world.finish()

    assert [type(call) for call in outcome.calls] == [NotReplicated]
    assert nothing_pinned(engine)
    assert engine.arena.free_slots == free
    assert list(world.replicas().values()) == [[], [], []]
    assert list(virtual_segments(engine.index)) == []
    assert world.replication.virtual_segments == {"open": 0, "closed": 0}


def test_a_stream_that_is_dropped_leaves_nothing_on_a_backup_that_had_left_and_is_back(world: Replicated) -> None:
    world.append(world.open())
    world.finish()
    (place,) = world.replication.logs.opened.values()
    failed = place.backups[0]
    world.wire.lose(failed)
    world.wire.connect(failed)
    world.wire.run(failed)  # the other one is slow to close its replica
    world.engine.streams.drop(STREAM_ID)
    world.wire.pump()
    world.finish()

    assert list(world.replicas().values()) == [[], [], []]


def test_segments_that_go_while_they_are_sent_are_freed_when_that_is_over(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 5)
    entry = stream.streamlets[0].entries[0]
    entry.start, entry.start_record = Position(1, 2, 0), 4
    world.engine.memory.removals.collect(entry)
    world.engine.run()
    assert not nothing_pinned(world.engine)
    world.finish()

    assert nothing_pinned(world.engine)
    assert world.engine.arena.free_slots == 8 - len(entry.resident)
    world.close_all()
    assert {each.live for each in world.replication.coverage.segments.values()} <= {1}


def test_a_segment_that_waits_for_replicas_does_not_go_to_disk(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 5)
    world.engine.run()
    assert stream.streamlets[0].entries[0].stored_segments == 0
    world.finish()

    assert stream.streamlets[0].entries[0].stored_segments == 1


# --- damage ------------------------------------------------------------------------------------------------


def test_a_closed_segment_that_ends_with_damage_does_not_wait_for_ever(world: Replicated) -> None:
    stream = world.open()
    world.append(stream, 3)
    world.finish()
    world.close_all()
    segment = stream.streamlets[0].entries[0].resident[1, 1]
    world.append(stream)  # killed here, and the chunk is damaged in memory
    segment.close()
    replication = restarted(world)
    (log,) = replication.logs.streams[STREAM_ID].logs
    assert log.lag_bytes == CHUNK_BYTES
    segment.holes.append(Hole(3 * CHUNK_BYTES, 4 * CHUNK_BYTES, "test"))
    replication = restarted(world)
    (log,) = replication.logs.streams[STREAM_ID].logs

    assert log.lag_bytes == 0
    assert not segment.waits_for_replicas


# --- backups that are to be empty --------------------------------------------------------------------------


def empty_out(world: Replicated, *backup_ids: int) -> None:
    for backup_id, backup in world.wire.backups.items():
        backup.info.draining = backup_id in backup_ids
    world.replication.backups.update([backup.info for backup in world.wire.backups.values()])


def test_a_backup_that_is_drained_is_left_and_what_it_had_is_made_anew_and_freed(world: Replicated) -> None:
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


def test_too_few_backups_besides_those_that_are_drained_are_no_reason_to_stop(world: Replicated) -> None:
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


def test_what_is_open_on_a_backup_that_restarts_is_closed_there_and_goes_on_elsewhere(world: Replicated) -> None:
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


def test_what_is_open_on_a_backup_that_restarts_stays_if_there_are_too_few_others(world: Replicated) -> None:
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


def test_a_backup_that_was_forgotten_is_not_there_any_more(world: Replicated) -> None:
    world.wire.lose(1)
    world.replication.backups.update([world.wire.backups[backup_id].info for backup_id in (2, 3)])
    assert not world.replication.backups.is_up(1)
    assert 1 not in world.replication.unneeded_backups()
    stream = world.open()
    world.append(stream, 2)
    world.finish()
    assert {id_ for place in world.replication.logs.opened.values() for id_ in place.backups} == {2, 3}


def told(report: HeartbeatReport) -> list[int]:
    request = coordinator_pb2.HeartbeatRequest()
    report.fill(request)
    return [each.first_record for each in request.starts]


def test_what_is_removed_from_a_replicated_stream_goes_once_the_coordinator_knows(world: Replicated) -> None:
    """A recovery that did not know would find it missing on backups."""
    streams, stream = world.engine.streams, world.open()
    world.append(stream)
    world.finish()
    entry, report, gone = stream.streamlets[0].entries[0], HeartbeatReport(world.engine.streams), list[object]()
    streams.move_start(entry, entry.end, entry.next_record, gone.append)
    assert streams.moved_starts.hurry.is_set()
    world.engine.run()
    assert not gone

    assert told(report) == [entry.next_record]
    world.engine.run()
    assert not gone, "nobody has answered"
    streams.moved_starts.when_removed(entry, gone.append)
    report.answered(coordinator_pb2.HeartbeatResponse())
    world.engine.run()
    assert gone == [None, None]
    assert told(report) == []
    streams.moved_starts.when_removed(entry, gone.append)
    world.engine.run()
    assert gone == [None] * 3, "nobody need be told"

    world.append(stream)
    world.finish()
    streams.move_start(entry, entry.end, entry.next_record, gone.append)
    streams.drop(stream.stream_id)
    assert isinstance(gone[-1], NotOwner)
    assert told(report) == []


def test_nothing_is_removed_of_what_others_recover_from_its_replicas(world: Replicated) -> None:
    streams, stream = world.engine.streams, world.open()
    world.append(stream)
    world.finish()
    entry, report, gone = stream.streamlets[0].entries[0], HeartbeatReport(world.engine.streams), list[object]()
    streams.move_start(entry, entry.end, entry.next_record, gone.append)

    for _ in range(2):
        assert told(report) == [entry.next_record]
        refused = [common_pb2.StreamletRef(stream_id=stream.stream_id)]
        report.answered(coordinator_pb2.HeartbeatResponse(starts_refused=refused))
        world.engine.run()
        assert isinstance(gone.pop(), NotOwner)
        streams.moved_starts.when_removed(entry, gone.append)

    assert told(report) == [entry.next_record]
    report.answered(coordinator_pb2.HeartbeatResponse())
    world.engine.run()
    assert gone == [None]


def test_who_waits_for_a_removal_that_is_refused_is_told_and_it_is_carried_out_when_it_may_be(
    world: Replicated,
) -> None:
    removed, gone = list[Entry](), list[object]()
    entry = world.open().streamlets[0].entries[0]

    def remove(entry: Entry, done: Done) -> None:
        removed.append(entry)
        done(None)

    moved = MovedStarts(remove)
    moved.note([entry])
    moved.refused(entry)
    moved.told(entry)
    assert not removed, "it was only to be told"

    moved.move(entry, Position(1, 1, 64), 1, gone.append, replicated=True)
    moved.refused(entry)
    assert (len(gone), removed, list(moved)) == (1, [], [entry])
    moved.told(entry)
    assert removed == [entry]
    assert list(moved) == []
    moved.refused(entry)
    assert list(moved) == [], "a streamlet that has gone is not told of"
