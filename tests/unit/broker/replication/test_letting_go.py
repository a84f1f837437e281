"""Memory of replication: chunks stay until they are replicated or no longer wanted, and then all of it is freed."""

from kera.broker.records import Hole
from kera.broker.replication.virtual_index import virtual_segments
from kera.core.base.ids import Position
from kera.core.errors import NotReplicated
from tests.unit.broker.persistence_support import MakeEngine
from tests.unit.broker.replication_support import Replicated, nothing_pinned, restarted
from tests.unit.broker.support import CHUNK_BYTES, STREAM_ID


def test_dropping_a_stream_with_batches_in_flight_leaves_nothing(make_engine: MakeEngine) -> None:
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


def test_dropping_a_stream_leaves_nothing_on_a_backup_that_came_back(world: Replicated) -> None:
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


def test_segments_removed_while_they_are_sent_are_freed_afterwards(world: Replicated) -> None:
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


def test_a_closed_segment_with_damage_at_its_end_does_not_wait_for_replicas(world: Replicated) -> None:
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
