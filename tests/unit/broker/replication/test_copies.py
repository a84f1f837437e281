"""Copies of chunks: each chunk gets to enough backups, and a restart sends only chunks outside closed replicas."""

from typing import Any

import pytest

from kera.broker.ownership.stream import Stream
from kera.broker.replication.virtual_index import virtual_segments
from kera.broker.replication.virtual_log import Send
from kera.core.base.ids import Position
from tests.unit.broker.replication_support import FIRST_ID, Replicated, durable, nothing_pinned, restarted
from tests.unit.broker.support import BROKER_ID, CHUNK_BYTES, STREAM_ID, Engine, stream_info


def drain(world: Replicated, stream: Stream) -> None:
    """Put all of the stream on disk, and unpin all memory."""
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


def test_a_closed_virtual_segment_is_in_the_index_and_not_sent_again_after_a_restart(world: Replicated) -> None:
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


def test_a_restart_sends_only_chunks_outside_closed_virtual_segments(world: Replicated) -> None:
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


def test_a_restart_sends_in_batches_within_the_request_limit(
    engine: Engine,
) -> None:
    world = Replicated(engine, request_bytes_max=2 * CHUNK_BYTES + 1)
    stream = world.open()
    world.append(stream, 3)
    world.wire.run()
    (log,) = restarted(world).logs.streams[STREAM_ID].logs
    assert [batch.length for batch in log._queue] == [2 * CHUNK_BYTES, CHUNK_BYTES]


def test_retention_frees_virtual_segments_without_live_chunks(world: Replicated) -> None:
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


# --- the number of virtual logs changes --------------------------------------------------------------------


@pytest.mark.parametrize("virtual_logs", [1, 2])
def test_the_durable_head_waits_for_the_old_virtual_logs_when_their_number_changes(
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


def test_appends_between_changes_of_the_virtual_logs_are_all_acknowledged(world: Replicated) -> None:
    stream = world.open(entries=2, virtual_logs=1)
    outcomes = []
    for virtual_logs in (2, 1, 2):
        outcomes.append(world.append(stream))
        alter(world, stream, virtual_logs, entries=2)
    world.finish()

    assert [outcome.calls for outcome in outcomes] == [[None]] * 3
