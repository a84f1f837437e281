"""Restarts after the loss of the host: only data that was not on disk is lost, and readers see each loss's limits."""

from itertools import pairwise

import pytest

from kera.broker.log.read_plan import ReadPlan, plan_read
from kera.broker.log.streamlet import Streamlet
from kera.broker.storage.restart import LOST_GROUPS_MAX
from kera.core.base.ids import EARLIEST, Position
from kera.core.errors import DataLost, InvalidCursor
from kera.core.format.chunk import verify_header
from kera.v1 import common_pb2
from tests.unit.broker.restart_support import SEGMENT, Launches, commit, lost, read_all
from tests.unit.broker.support import (
    ADDRESS,
    BROKER_ID,
    CHUNK_BYTES,
    SLOT_BYTES,
    STREAM_ID,
    Engine,
    chunk,
    headers,
    stream_info,
)


def test_a_lost_host_leaves_a_gap_behind_the_chunks_on_disk(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(SEGMENT + 2)
    launches.engine.run()
    launches.lose_host()
    log = launches.begin()

    assert launches.found.lost_memory
    end = Position(1, 1, SLOT_BYTES)
    assert read_all(log) == (list(range(SEGMENT)), [end])
    following = lost(log, Position(1, 2, 2 * CHUNK_BYTES))
    assert lost(log, end) == following, "who was there has missed what he never saw"
    assert log.append(sequence=SEGMENT).group_id > LOST_GROUPS_MAX
    assert log.read(following)[0] == [SEGMENT]
    assert lost(log, Position(1, 2, 0)) == lost(log, end) == (*log.entry.tail[0].key, 0)
    assert read_all(log) == (list(range(SEGMENT + 1)), [end])


@pytest.mark.parametrize(
    "written_down",
    [
        False,
        True,
    ],
)
def test_a_reader_at_the_end_of_a_persisted_stream_has_missed_nothing(launches: Launches, written_down: bool) -> None:
    def streamlet_of(engine: Engine) -> Streamlet:
        engine.streams.open(stream_info(durability=common_pb2.DURABILITY_PERSISTED), BROKER_ID)
        return engine.streams.get(STREAM_ID).streamlet(0)

    log = launches.begin()
    log.append()
    commit(log)
    end = log.entry.end
    launches.lose_host()
    streamlet = streamlet_of(launches.start())
    assert plan_read(streamlet, 0, end, None, 1) == ReadPlan([], end)
    if written_down:
        launches.engine.run()
    launches.kill()
    streamlet = streamlet_of(launches.start())

    assert plan_read(streamlet, 0, end, None, 1) == ReadPlan([], end)
    with pytest.raises(DataLost):
        plan_read(streamlet, 0, end._replace(offset=2 * CHUNK_BYTES), None, 1)
    sent = Position(2, 1, 0)  # the start of an interval that has nothing left
    assert plan_read(streamlet, 0, sent, None, 1) == ReadPlan([], sent)
    with pytest.raises(DataLost):
        plan_read(streamlet, 0, sent._replace(offset=CHUNK_BYTES), None, 1)
    data = chunk(sequence=1)
    streamlet.publish(streamlet.append(memoryview(data), verify_header(data)))
    assert [header.sequence for header in headers(plan_read(streamlet, 0, end, None, 1))] == [1]


def test_committed_chunks_of_an_open_segment_survive_the_loss_of_the_host(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(2, record_count=10)
    commit(log)
    log.append()
    launches.lose_host()
    log = launches.begin()

    assert (launches.found.open_files, launches.found.torn_tails) == (1, 0)
    assert log.entry.end == Position(1, 1, 2 * CHUNK_BYTES)
    assert read_all(log) == ([0, 1], [log.entry.end])
    assert log.append(sequence=2)[4] == 20
    assert log.append(sequence=1, record_count=10).duplicate


@pytest.mark.parametrize("written", [64, 200, CHUNK_BYTES - 64])
def test_a_torn_tail_of_a_file_is_cut_at_the_end_of_a_chunk(launches: Launches, written: int) -> None:
    log = launches.begin()
    log.append()
    commit(log)
    log.append(publish=False)
    part = bytes(log.entry.tail[0].slot.view[CHUNK_BYTES : CHUNK_BYTES + written])
    with launches.engine.store.path(1).open("r+b") as file:
        file.seek(CHUNK_BYTES)
        file.write(part)
    launches.lose_host()
    log = launches.begin()

    assert (launches.found.torn_tails, launches.found.chunks_damaged) == (1, 0)
    assert 0 < launches.found.torn_bytes <= written
    assert read_all(log) == ([0], [Position(1, 1, CHUNK_BYTES)])
    record = launches.engine.index.segment(ADDRESS)
    assert record is not None
    assert (record.length, record.open) == (CHUNK_BYTES, False)


def test_damage_in_committed_chunks_is_a_hole_and_no_torn_tail(launches: Launches) -> None:
    log = launches.begin()
    for _ in range(3):
        log.append(publish=False)
        commit(log)
    with launches.engine.store.path(1).open("r+b") as file:
        file.seek(300)
        file.write(b"\xff")
    launches.lose_host()
    log = launches.begin()

    assert (launches.found.chunks_damaged, launches.found.torn_tails) == (1, 0)
    assert lost(log, Position(1, 1, 0)) == Position(1, 1, CHUNK_BYTES)
    assert log.read(Position(1, 1, CHUNK_BYTES))[0] == [1, 2]


@pytest.mark.parametrize(
    "number",
    [
        0,
        1,
    ],
)
def test_damage_in_chunks_noted_by_a_tick_is_a_hole_even_in_the_last_one(launches: Launches, number: int) -> None:
    log = launches.begin()
    log.append_many(2, publish=False)
    commit(log)
    launches.engine.memory.tick(0, idle_close_ms=1)
    launches.engine.run()
    with launches.engine.store.path(1).open("r+b") as file:
        file.seek(number * CHUNK_BYTES + 300)
        file.write(b"\xff")
    launches.lose_host()
    log = launches.begin()

    assert (launches.found.chunks_damaged, launches.found.torn_tails) == (1, 0)
    assert lost(log, Position(1, 1, number * CHUNK_BYTES)) == Position(1, 1, (number + 1) * CHUNK_BYTES)
    assert log.entry.end == Position(1, 1, 2 * CHUNK_BYTES)


def test_an_open_file_without_whole_chunks_is_removed(launches: Launches) -> None:
    log = launches.begin()
    log.append()
    commit(log)
    launches.engine.store.path(1).write_bytes(bytes(SLOT_BYTES))
    launches.lose_host()
    log = launches.begin()

    following = lost(log, Position(1, 1, 0))
    assert log.read(following) == ([], following)
    assert launches.engine.index.segment(ADDRESS) is None
    launches.kill()
    launches.begin()
    assert list(launches.engine.store.physical_ids()) == []


def test_an_entry_without_data_on_disk_starts_behind_the_loss(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(2)
    launches.lose_host()
    launches.start()
    log = launches.log(first_group_id=100)

    assert lost(log, Position(1, 1, 0)) == Position(100, 1, 0)
    assert lost(log, EARLIEST) == Position(100, 1, 0), (
        "nobody knows whether a reader from the beginning misses something"
    )
    assert log.read(Position(100, 1, 0)) == ([], Position(100, 1, 0))
    assert log.entry.end == Position(100, 1, 0)
    assert log.append(sequence=0).group_id == 100


def test_each_loss_is_a_separate_gap(launches: Launches) -> None:
    ends = []
    for launch in range(3):
        log = launches.begin()
        log.append(sequence=launch)
        commit(log)
        ends.append(log.entry.end)
        log.append(sequence=launch + 1)
        launches.lose_host()
    log = launches.begin()

    assert read_all(log) == ([0, 1, 2], ends)
    for end, following in pairwise(ends):
        assert lost(log, end) == following._replace(offset=0)
        assert lost(log, end._replace(offset=end.offset + CHUNK_BYTES)) == following._replace(offset=0)


def test_a_gap_is_still_known_after_a_clean_end(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(SEGMENT + 1)
    launches.engine.run()
    launches.lose_host()
    log = launches.begin()
    log.append(sequence=SEGMENT)
    launches.stop()
    log = launches.begin()

    assert read_all(log) == (list(range(SEGMENT + 1)), [Position(1, 1, SLOT_BYTES)])
    assert lost(log, Position(1, 2, CHUNK_BYTES)) == Position(1 + LOST_GROUPS_MAX, 1, 0)


def test_a_position_that_never_existed_is_an_invalid_cursor_and_no_loss(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(SEGMENT)
    launches.stop()
    log = launches.begin()

    with pytest.raises(InvalidCursor):
        log.read(Position(1, 2, CHUNK_BYTES))
