"""Backups that are too few, full or slow: waiting writers get an error, and writes go on when backups return."""

import pytest

from kera.broker.ownership.stream import Stream
from kera.broker.replication.backups import FAILED_MS, FULL_MS
from kera.broker.replication.virtual_log import Close
from kera.broker.replication.virtual_logs import IDLE_MS_MIN
from kera.core.errors import NotReplicated, TooFewBackups
from kera.core.format.chunk import ChunkHeader, verify_header
from kera.v1 import common_pb2
from tests.unit.broker.replication_support import Replicated, durable, nothing_pinned, restarted
from tests.unit.broker.support import CHUNK_BYTES, SLOT_BYTES, Engine, chunk

LEADER = common_pb2.DURABILITY_LEADER


def test_too_few_backups_are_an_error_before_anything_is_appended(engine: Engine) -> None:
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


def test_a_backup_that_has_lost_a_replica_can_be_used_for_others(world: Replicated) -> None:
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


def test_without_backups_a_write_fails_but_its_replication_completes_when_they_return(world: Replicated) -> None:
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


def test_a_full_backup_is_replaced_by_another(world: Replicated) -> None:
    for backup_id in (1, 2):
        world.wire.backups[backup_id].full = True
    stream = world.open(replication=1)
    outcome = world.append(stream)
    world.finish()

    assert outcome.calls == [None]
    assert [len(ids) for ids in world.replicas().values()] == [0, 0, 1]


def test_full_backups_make_idle_virtual_segments_close_and_writes_resume_with_room(world: Replicated) -> None:
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


def test_the_error_of_a_write_that_waits_too_long_names_the_full_backup(world: Replicated) -> None:
    world.wire.backups[1].full = True
    outcome = world.append(world.open(replication=3))
    for _ in range(200):
        world.finish()
        world.wire.tick(100)
    (error,) = outcome.calls
    assert isinstance(error, NotReplicated)
    assert error.message.endswith("these have no room: 1")
    assert error.attributes["full_backup_ids"] == [1]


def test_a_log_reports_that_it_lags_and_later_that_there_is_room(engine: Engine) -> None:
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


def test_waiting_writes_fail_when_a_newer_launch_has_taken_over(world: Replicated) -> None:
    outcome = world.append(world.open())
    error = NotReplicated("a newer launch has taken over")
    world.replication.logs.fail(error)

    assert outcome.calls == [error]


# --- level leader ------------------------------------------------------------------------------------------


def test_data_that_level_leader_cannot_send_is_shed_and_replicated_later(engine: Engine) -> None:
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
