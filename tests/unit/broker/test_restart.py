"""What a launch finds of the one before: memory, files, index, and what is lost with each of them."""

import errno
import shutil
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kera.broker.log.arena import Arena
from kera.broker.log.bounds import lag_records
from kera.broker.log.intervals import NO_END, Interval
from kera.broker.log.read_plan import ReadPlan, plan_read
from kera.broker.log.streamlet import Streamlet
from kera.broker.ownership.handover import HandedOver
from kera.broker.ownership.opener import removed_between, still_missing, until
from kera.broker.records import EntryRecord, Gap
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import delete_segment, put_entry, put_removal
from kera.broker.storage.index_repair import StartFindings
from kera.broker.storage.restart import LOST_GROUPS_MAX, Restart
from kera.broker.storage.segment_files import SegmentStore
from kera.core.checksum import crc32c
from kera.core.chunk import HEADER_CRC_AT, VERSIONS, verify_header
from kera.core.errors import DataLost, InvalidCursor, StartError
from kera.core.ids import EARLIEST, Position
from kera.v1 import common_pb2
from tests.unit.broker.support import (
    ADDRESS,
    BROKER_ID,
    CHUNK_BYTES,
    SLOT_BYTES,
    STREAM_ID,
    Engine,
    FailingDisk,
    Log,
    Outcome,
    chunk,
    headers,
    stream_info,
)

SEGMENT = 4
"""Chunks that fill one."""


class Launches:
    """One broker with one streamlet, launch after launch."""

    def __init__(self, shm_dir: Path, root: Path) -> None:
        self.shm_dir = shm_dir
        self.root = root
        self.engine: Engine
        self.found: StartFindings
        self.running = False

    def start(self, *, index_whole: bool = True, was_closed: bool = False, slot_bytes: int = SLOT_BYTES) -> Engine:
        index = SegmentIndex.open(self.root / "index", durable=False)
        index.was_closed = was_closed
        arena = Arena.attach(self.shm_dir, self.root)
        restart = Restart(arena, index, SegmentStore(self.root, FailingDisk(self.root), index))
        try:
            restart.look(index_whole=index_whole, slot_bytes=slot_bytes)
        except StartError:
            index.close()
            if arena is not None:
                arena.close(keep=True)
            raise
        self.found = restart.found
        arena = arena or Arena.create(
            self.shm_dir, arena_bytes=8 * SLOT_BYTES, slot_bytes=SLOT_BYTES, data_dir=self.root, ephemeral=False
        )
        self.engine = Engine(arena, self.root, restart)
        self.running = True
        return self.engine

    def log(self, **options: Any) -> Log:
        return Log(self.engine, streamlet_id=0, **options)

    def begin(self) -> Log:
        """The first launch, or another one that finds what was left."""
        self.start()
        return self.log()

    def kill(self) -> None:
        """The process dies. The machine does not."""
        self.engine.index.close()
        self.engine.arena.close(keep=True)
        self.running = False

    def lose_host(self) -> None:
        """The machine dies: what was in memory is gone."""
        self.kill()
        self.engine.arena.path.unlink()

    def stop(self) -> None:
        """The process ends as it should."""
        self.engine.memory.segments.close_all()
        self.engine.run()
        self.engine.index.commit([], dict(self.engine.memory.ids.meta, clean=True))
        self.lose_host()


@pytest.fixture
def launches(shm_dir: Path, root: Path) -> Iterator[Launches]:
    launches = Launches(shm_dir, root)
    yield launches
    if launches.running:
        launches.kill()
    for path in shm_dir.iterdir():
        path.unlink()


def commit(log: Log) -> None:
    """Put everything on disk, open segments included."""
    outcome = Outcome()
    log.engine.memory.commits.persist([(segment, segment.head) for segment in log.entry.tail], outcome)
    log.engine.run()
    assert outcome.calls == [None]


def publish(log: Log) -> None:
    for segment in log.entry.tail:
        segment.advance_durable_head(segment.head)


def read_all(log: Log) -> tuple[list[int], list[Position]]:
    """Sequences of all chunks, and where a reader of them all is told of a loss, and goes on behind it."""
    sequences: list[int] = []
    losses: list[Position] = []
    position, following = Position(-1, 0, 0), EARLIEST
    while following != position:
        position = following
        try:
            found, following = log.read(position)
            sequences += found
        except DataLost:
            losses.append(position)
            following = lost(log, position)
    return sequences, losses


def lost(log: Log, position: Position) -> Position:
    """Where to read on from, as the error says that a read of `position` gets."""
    with pytest.raises(DataLost) as raised:
        log.read(position)
    assert raised.value.attributes["lost_from"] == list(position)
    return Position(*raised.value.attributes["available_from"])


# --- the first launch --------------------------------------------------------------------------------------


def test_the_first_launch_finds_nothing(launches: Launches) -> None:
    log = launches.begin()

    assert launches.found == StartFindings()
    assert log.read() == ([], Position(0, 0, 0))
    assert log.streamlet.next_group_id == 1


def test_a_streamlet_that_was_somewhere_before_tells_that_what_was_there_is_lost(launches: Launches) -> None:
    launches.start()
    log = launches.log(first_group_id=500)

    assert lost(log, Position(4, 1, 0)) == Position(500, 1, 0)
    assert log.append().group_id == 500


# --- a process that was killed -----------------------------------------------------------------------------


def test_a_killed_process_loses_nothing_that_was_appended(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(2 * SEGMENT + 2, record_count=10)
    launches.kill()
    log = launches.begin()

    assert (launches.found.attached, launches.found.lost_memory, launches.found.segments_in_memory) == (True, False, 3)
    assert launches.found.bytes_in_memory == (2 * SEGMENT + 2) * CHUNK_BYTES
    assert log.read_all() == list(range(2 * SEGMENT + 2))
    assert lag_records(log.streamlet, log.entry, Position(1, 1, 0)) == 100
    appended = log.append()
    assert appended[:6] == (0, 2, 1, 2 * CHUNK_BYTES, 100, False), "it goes on in the very segment"
    assert log.append(sequence=1).duplicate
    assert log.append(sequence=1)[1:4] == (1, 1, CHUNK_BYTES)


def test_what_was_flushed_and_what_was_not_are_one_log_again(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(3 * SEGMENT)
    launches.engine.run()
    log.append_many(2 * SEGMENT)
    assert log.entry.last_stored == (1, 2)
    launches.kill()
    log = launches.begin()

    assert log.entry.last_stored == (1, 2)
    assert [segment.key for segment in log.entry.tail] == [(2, 1), (2, 2), (3, 1)]
    assert launches.engine.arena.free_slots == 5, "what is on disk need not stay in memory"
    assert log.read_all() == list(range(5 * SEGMENT))
    launches.engine.memory.segments.close_all()
    launches.engine.run()
    assert log.read_all() == list(range(5 * SEGMENT))


def test_a_process_may_be_killed_again_and_again(launches: Launches) -> None:
    for launch in range(6):
        log = launches.begin()
        assert log.read_all() == list(range(3 * launch))
        log.append_many(3)
        if launch % 2:
            launches.engine.run()
        launches.kill()

    assert launches.begin().read_all() == list(range(18))


def test_readers_see_no_more_after_a_restart_than_before(launches: Launches) -> None:
    log = launches.begin()
    log.append()
    log.append(publish=False)
    launches.kill()
    log = launches.begin()

    assert log.entry.end == Position(1, 1, CHUNK_BYTES)
    assert log.entry.tail[0].head == 2 * CHUNK_BYTES


@pytest.mark.parametrize("durability", [common_pb2.DURABILITY_LEADER, common_pb2.DURABILITY_PERSISTED])
def test_what_was_found_reaches_the_level_of_its_stream(launches: Launches, durability: int) -> None:
    log = launches.begin()
    log.append_many(2, publish=False)
    launches.kill()
    engine = launches.start()
    engine.streams.open(stream_info(durability=durability), BROKER_ID)
    entry = engine.streams.get(STREAM_ID).streamlet(0).entries[0]
    at_once = durability == common_pb2.DURABILITY_LEADER

    assert (entry.end == Position(1, 1, 2 * CHUNK_BYTES)) == at_once
    engine.run()
    assert entry.end == Position(1, 1, 2 * CHUNK_BYTES)


def test_damage_in_memory_is_a_hole_and_the_rest_is_served(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(3)
    log.entry.tail[0].slot.view[CHUNK_BYTES + 300] ^= 1
    launches.kill()
    log = launches.begin()

    assert launches.found.chunks_damaged == 1
    assert log.read() == ([0], Position(1, 1, CHUNK_BYTES))
    assert lost(log, Position(1, 1, CHUNK_BYTES)) == Position(1, 1, 2 * CHUNK_BYTES)
    assert log.read(Position(1, 1, 2 * CHUNK_BYTES))[0] == [2]


def test_a_slot_in_which_nothing_was_written_is_free(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(SEGMENT)
    with pytest.raises(Exception, match="larger than a segment"):
        log.append(size=SLOT_BYTES + 64)
    log.entry.tail[0].slot.write_head(0)
    launches.kill()
    log = launches.begin()

    assert launches.engine.arena.free_slots == 8
    assert log.entry.tail == []


def test_a_file_that_was_begun_is_left_to_the_next_launch_and_goes_when_there_is_another(launches: Launches) -> None:
    log = launches.begin()
    log.append()
    commit(log)
    log.append()
    launches.kill()
    log = launches.begin()
    assert launches.found.open_files == 0, "memory has all that is in there"
    assert list(launches.engine.store.physical_ids()) == [1]
    ids = launches.engine.memory.ids
    assert ids.meta["first_unsettled_id"] == 1, "who starts once there is another one looks for it"
    launches.engine.memory.segments.close_all()
    launches.engine.run()

    assert list(launches.engine.store.physical_ids()) == [2]
    assert ids.meta["first_unsettled_id"] == ids.meta["next_physical_id"]
    assert log.read_all() == [0, 1]


def test_what_retention_has_taken_does_not_come_back_from_memory(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(2 * SEGMENT + 1)
    log.entry.start, log.entry.start_record = Position(2, 1, 0), 8
    launches.engine.index.commit([put_entry(log.entry.log_id, log.entry.record())])
    launches.kill()
    log = launches.begin()

    assert [segment.key for segment in log.entry.tail] == [(2, 1)]
    assert launches.engine.arena.free_slots == 7
    assert log.read_all() == [8]


def test_memory_of_streams_that_are_gone_is_freed(launches: Launches) -> None:
    log, other = launches.begin(), Log(launches.engine, streamlet_id=1)
    log.append()
    other.append()
    launches.kill()
    launches.start()
    restart = launches.engine.restart
    launches.log()
    assert {entry.streamlet_id for entry in restart.leftovers()} == {1}
    restart.drop_leftovers(lambda stream_id, _: stream_id != STREAM_ID)
    assert launches.engine.arena.free_slots == 6
    restart.drop_leftovers(lambda stream_id, _: stream_id == STREAM_ID)

    assert launches.engine.arena.free_slots == 7


def test_cursors_that_were_committed_are_known_again(launches: Launches) -> None:
    log = launches.begin()
    log.append()
    launches.engine.memory.index_writer.commit_cursor(log.entry, "a", Position(1, 1, CHUNK_BYTES), Outcome())
    launches.engine.run()
    launches.kill()

    assert launches.begin().entry.committed == {"a": Position(1, 1, CHUNK_BYTES)}


# --- a clean end -------------------------------------------------------------------------------------------


def test_after_a_clean_end_everything_is_on_disk_and_nothing_is_lost(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(SEGMENT + 2)
    launches.stop()
    log = launches.begin()

    assert (launches.found.attached, launches.found.lost_memory) == (False, False)
    assert log.read_all() == list(range(SEGMENT + 2))
    assert log.entry.gaps == []
    assert log.append().group_id == 2, "ids of groups go on by one"
    assert log.append(sequence=0).duplicate
    assert log.read_all() == list(range(SEGMENT + 3))


# --- a host that was lost ----------------------------------------------------------------------------------


def test_a_lost_host_loses_what_was_not_on_disk_and_the_gap_is_known(launches: Launches) -> None:
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
def test_who_sees_only_what_is_on_disk_and_was_at_the_end_has_missed_nothing(
    launches: Launches, written_down: bool
) -> None:
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
    sent = Position(2, 1, 0)  # to where an interval began of which nothing is left
    assert plan_read(streamlet, 0, sent, None, 1) == ReadPlan([], sent)
    with pytest.raises(DataLost):
        plan_read(streamlet, 0, sent._replace(offset=CHUNK_BYTES), None, 1)
    data = chunk(sequence=1)
    streamlet.publish(streamlet.append(memoryview(data), verify_header(data)))
    assert [header.sequence for header in headers(plan_read(streamlet, 0, end, None, 1))] == [1]


def test_an_older_interval_that_is_whole_has_lost_nothing_with_the_memory(launches: Launches) -> None:
    """A start without memory takes what is behind the stored part for lost; where the next owner goes on says more."""
    log = launches.begin()
    log.append_many(SEGMENT + 1)
    launches.engine.run()
    for _ in range(2):
        launches.lose_host()
        log = launches.begin()
    gaps, end = log.entry.gaps, log.entry.stored_end
    assert [gap.start for gap in gaps] == [end, end]

    whole = Interval(0, 2, end_records=(SEGMENT,))
    assert still_missing(log.entry, [whole]) == []
    more = whole._replace(end_records=(SEGMENT + 1,))
    assert still_missing(log.entry, [more]) == [Gap(end, more.following)] * 2
    later = Interval(7, leads=False)
    assert still_missing(log.entry, [whole, later]) == [Gap(later.start, gap.end) for gap in gaps]
    by_disk = still_missing(log.entry, [whole, later], persisted=True)
    assert all(gap.start > later.start for gap in by_disk), "who is where it begins has seen all that was visible"
    assert still_missing(log.entry, [Interval(0)]) == gaps
    assert still_missing(log.entry, until([Interval(0)], HandedOver(2, (SEGMENT,)))) == [], "handed over just now"
    missing = still_missing(log.entry, until([Interval(0)], HandedOver(2, (SEGMENT + 1,))))
    assert missing == [Gap(end, Position(2, 1, 0))] * 2


def test_what_was_between_two_intervals_that_are_one_now_was_removed() -> None:
    before = (Interval(3, 4, (8, 1), (12, 1)), Interval(5, first_records=(15, 1), leads=False))
    assert removed_between(0, before, [Interval(0)]) == (Position(5, 1, 0), 15)
    assert removed_between(1, before, [Interval(0)]) is None, "the entry had nothing there"
    assert removed_between(0, before, before) is None
    assert removed_between(0, before[1:], [Interval(0)]) == (Position(5, 1, 0), 15), "nothing is left before it"
    assert removed_between(0, before[1:], before[1:]) is None


def test_what_was_behind_an_interval_that_goes_on_now_was_removed_and_so_is_all_of_it() -> None:
    before = (Interval(3, 4, (8, 1), (12, 1)), Interval(5, 7, (15, 1), (20, 1), leads=False))
    grown = before[1]._replace(end_group_id=9, end_records=(26, 1))
    assert removed_between(0, before, [before[0], grown]) == (Position(9, 1, 0), 26)
    assert removed_between(1, before, [before[0], grown]) is None, "the entry had nothing there"
    assert removed_between(0, before, [Interval(3, 9, (8, 1), (26, 1))]) == (Position(9, 1, 0), 26)
    owned = before[1]._replace(end_group_id=NO_END, end_records=())
    assert removed_between(0, before, [before[0], owned]) is None, "it has come back to its owner"


def test_what_was_committed_of_an_open_segment_is_there_after_the_loss_of_the_host(launches: Launches) -> None:
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
    assert log.append(sequence=1).duplicate


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


def test_damage_before_what_was_committed_is_a_hole_and_no_torn_tail(launches: Launches) -> None:
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
def test_damage_in_what_a_tick_has_noted_is_a_hole_also_if_nothing_follows(launches: Launches, number: int) -> None:
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


def test_an_open_file_in_which_nothing_is_whole_is_removed(launches: Launches) -> None:
    log = launches.begin()
    log.append()
    commit(log)
    launches.engine.store.path(1).write_bytes(bytes(SLOT_BYTES))
    launches.lose_host()
    log = launches.begin()

    following = lost(log, Position(1, 1, 0))
    assert log.read(following) == ([], following)
    assert launches.engine.index.segment(ADDRESS) is None
    assert 1 in launches.engine.index.removals() or list(launches.engine.store.physical_ids()) == []


def test_an_entry_of_which_nothing_was_on_disk_starts_behind_what_is_lost(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(2)
    launches.lose_host()
    launches.start()
    log = launches.log(first_group_id=100)

    assert lost(log, Position(1, 1, 0)) == Position(100, 1, 0)
    assert log.read() == ([], Position(100, 1, 0))
    assert log.entry.end == Position(100, 1, 0)
    assert log.append(sequence=0).group_id == 100


def test_each_loss_is_a_gap_of_its_own(launches: Launches) -> None:
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


def test_a_position_that_never_was_is_no_loss(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(SEGMENT)
    launches.stop()
    log = launches.begin()

    with pytest.raises(InvalidCursor):
        log.read(Position(1, 2, CHUNK_BYTES))


# --- files and index that do not agree ---------------------------------------------------------------------


def test_files_that_were_to_be_removed_are_removed_by_the_next_launch(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(2 * SEGMENT)
    launches.engine.memory.segments.close_all()
    launches.engine.run()
    launches.engine.index.commit([delete_segment(ADDRESS), put_removal(1)])
    launches.kill()
    launches.start()

    assert list(launches.engine.store.physical_ids()) == [2]
    assert launches.engine.index.removals() == []


def test_a_segment_that_was_written_and_is_not_in_the_index_yet_is_taken_into_it(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = launches.begin()
    log.append_many(SEGMENT)
    launches.engine.run()
    launches.engine.memory.segments.close_all()

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "the machine is gone")

    (job,) = launches.engine.memory.plan()
    with monkeypatch.context() as context:
        context.setattr(launches.engine.index, "commit", fail)
        launches.engine.store.perform(job)
    assert job.error is not None
    assert launches.engine.index.segment(ADDRESS) is None
    launches.lose_host()
    log = launches.begin()

    assert read_all(log) == (list(range(SEGMENT)), [Position(1, 1, SLOT_BYTES)])
    assert log.append(sequence=3).duplicate


def test_a_file_that_does_not_go_on_where_the_log_ends_is_removed(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(3 * SEGMENT)
    launches.engine.memory.segments.close_all()
    launches.engine.run()
    launches.engine.index.commit([], {"next_physical_id": 4, "slot_bytes": SLOT_BYTES})
    store = launches.engine.store
    shutil.copy(store.path(1), store.path(9))
    launches.lose_host()
    log = launches.begin()

    assert list(launches.engine.store.physical_ids()) == [1, 2, 3]
    assert read_all(log) == (list(range(3 * SEGMENT)), [Position(2, 1, SLOT_BYTES)])


def test_new_files_never_get_the_number_of_one_that_is_there(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(SEGMENT)
    launches.engine.memory.segments.close_all()
    launches.engine.run()
    store = launches.engine.store
    shutil.copy(store.path(1), store.path(77))
    launches.kill()
    log = launches.begin()
    log.append()
    commit(log)

    assert max(launches.engine.store.physical_ids()) > 77


def test_an_index_that_is_gone_is_made_anew_from_the_files(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(5 * SEGMENT, record_count=10)
    launches.stop()
    shutil.rmtree(launches.root / "index")
    log = launches.begin()

    assert launches.found.repaired
    assert read_all(log) == (list(range(5 * SEGMENT)), [Position(3, 1, SLOT_BYTES)]), "it knew of the clean end"
    assert lag_records(log.streamlet, log.entry, log.entry.start) == 50 * SEGMENT
    assert log.append(sequence=0).duplicate
    assert log.append().first_record == 50 * SEGMENT
    assert launches.engine.memory.ids.meta["next_physical_id"] > 5


def test_an_index_that_is_gone_with_the_process_loses_nothing(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(3 * SEGMENT + 1)
    launches.engine.run()
    log.append()
    launches.kill()
    shutil.rmtree(launches.root / "index")
    log = launches.begin()

    assert (launches.found.repaired, launches.found.attached) == (True, True)
    assert log.read_all() == list(range(3 * SEGMENT + 2))


@pytest.mark.parametrize("was_closed", [False, True])
def test_a_damaged_index_gets_back_what_was_lost_of_it(launches: Launches, was_closed: bool) -> None:
    log = launches.begin()
    log.append_many(4 * SEGMENT)
    launches.stop()
    index = SegmentIndex.open(launches.root / "index", durable=False)
    entry = index.entry(log.entry.log_id)
    assert entry is not None
    index.commit(
        [
            delete_segment(ADDRESS._replace(segment_id=2)),
            (put_entry(log.entry.log_id, EntryRecord())[0], None),
        ]
    )
    index.close()
    launches.start(index_whole=False, was_closed=was_closed)
    log = launches.log()

    assert launches.found.lost_memory != was_closed
    assert read_all(log) == (list(range(4 * SEGMENT)), [] if was_closed else [Position(2, 2, SLOT_BYTES)])
    assert launches.engine.index.entry(log.entry.log_id)._replace(gaps=()) == entry  # type: ignore[union-attr]


def test_a_repair_does_not_bring_back_what_was_removed(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(3 * SEGMENT)
    log.entry.start, log.entry.start_record = Position(1, 2, 0), SEGMENT
    launches.engine.memory.segments.close_all()
    launches.engine.run()
    launches.engine.index.commit([delete_segment(ADDRESS), put_removal(1)])
    launches.engine.index.commit([put_entry(log.entry.log_id, log.entry.record())])
    launches.lose_host()
    launches.start(index_whole=False)
    log = launches.log()

    assert read_all(log) == (list(range(SEGMENT, 3 * SEGMENT)), [Position(2, 1, SLOT_BYTES)])
    assert list(launches.engine.store.physical_ids()) == [2, 3]


def of_newer_version(segment: memoryview | bytearray, at: int) -> None:
    """Make the chunk at `at` one that a newer program has written."""
    segment[at + 4] = max(VERSIONS) + 1
    struct.pack_into("<I", segment, at + HEADER_CRC_AT, crc32c(bytes(segment[at : at + HEADER_CRC_AT])))


@pytest.mark.parametrize("at", [0, CHUNK_BYTES, 2 * CHUNK_BYTES])
def test_chunks_of_a_newer_version_in_memory_stop_the_start_and_stay(launches: Launches, at: int) -> None:
    log = launches.begin()
    log.append_many(3)
    of_newer_version(log.entry.tail[0].slot.view, at)
    launches.kill()
    before = launches.engine.arena.path.read_bytes()

    with pytest.raises(StartError, match="newer program: it has chunks of format version 3"):
        launches.start()
    assert launches.engine.arena.path.read_bytes() == before


@pytest.mark.parametrize("index", ["whole", "gone"])
@pytest.mark.parametrize("at", [0, CHUNK_BYTES, 2 * CHUNK_BYTES])
def test_chunks_of_a_newer_version_in_a_file_stop_the_start_and_stay(launches: Launches, at: int, index: str) -> None:
    log = launches.begin()
    log.append_many(3)
    commit(log)
    launches.lose_host()
    path = launches.engine.store.path(1)
    content = bytearray(path.read_bytes())
    of_newer_version(content, at)
    path.write_bytes(content)
    if index == "gone":
        shutil.rmtree(launches.root / "index")

    for _ in range(2):
        with pytest.raises(StartError, match="newer program: it has chunks of format version 3"):
            launches.start()
        assert path.read_bytes() == content


def test_segments_that_are_larger_than_those_of_this_launch_stop_the_start(launches: Launches) -> None:
    log = launches.begin()
    log.append()
    launches.kill()

    with pytest.raises(StartError, match="--segment-bytes 4096"):
        launches.start(slot_bytes=2048)
    assert launches.begin().read_all() == [0], "nothing has changed"
