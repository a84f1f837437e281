"""Restarts after a kill or a clean end: the next launch loses nothing and goes on."""

from collections.abc import Callable

import pytest

from kera.broker.log.bounds import lag_records
from kera.broker.log.read_plan import plan_read
from kera.broker.log.watermarks import watermark_of
from kera.broker.storage.index_format import put_entry
from kera.broker.storage.index_repair import StartFindings
from kera.core.base.ids import EARLIEST, Position
from kera.core.format.chunk import verify_header
from kera.core.format.punctuation import is_punctuation
from kera.v1 import common_pb2
from tests.unit.broker.restart_support import SEGMENT, Launches, commit, lost
from tests.unit.broker.support import (
    BROKER_ID,
    CHUNK_BYTES,
    EVERYTHING,
    SLOT_BYTES,
    STREAM_ID,
    Log,
    Outcome,
    chunk,
    headers,
    stream_info,
)

# --- the first launch --------------------------------------------------------------------------------------


def test_the_first_launch_finds_nothing(launches: Launches) -> None:
    log = launches.begin()

    assert launches.found == StartFindings()
    assert log.read() == ([], Position(0, 0, 0))
    assert log.streamlet.next_group_id == 1


def test_groups_before_the_first_group_of_a_streamlet_are_lost(launches: Launches) -> None:
    launches.start()
    log = launches.log(first_group_id=500)

    assert lost(log, Position(4, 1, 0)) == Position(500, 1, 0)
    assert log.append().group_id == 500


# --- a process that was killed -----------------------------------------------------------------------------


def test_a_killed_process_loses_no_appended_chunks(launches: Launches) -> None:
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
    assert log.append(sequence=1, record_count=10).duplicate
    assert log.append(sequence=1, record_count=10)[1:4] == (1, 1, CHUNK_BYTES)


def test_flushed_and_unflushed_segments_form_one_log_again(launches: Launches) -> None:
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


def test_repeated_kills_lose_no_chunks(launches: Launches) -> None:
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
def test_found_chunks_reach_the_durability_of_their_stream(launches: Launches, durability: int) -> None:
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


def test_a_slot_without_chunks_is_freed(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(SEGMENT)
    with pytest.raises(Exception, match="larger than a segment"):
        log.append(size=SLOT_BYTES + 64)
    log.entry.tail[0].slot.write_head(0)
    launches.kill()
    log = launches.begin()

    assert launches.engine.arena.free_slots == 8
    assert log.entry.tail == []


def test_the_file_of_an_open_segment_is_removed_once_a_new_one_replaces_it(launches: Launches) -> None:
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


def test_segments_that_retention_removed_do_not_come_back_from_memory(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(2 * SEGMENT + 1)
    log.entry.start, log.entry.start_record = Position(2, 1, 0), 8
    launches.engine.index.commit([put_entry(log.entry.log_id, log.entry.record())])
    launches.kill()
    log = launches.begin()

    assert [segment.key for segment in log.entry.tail] == [(2, 1)]
    assert launches.engine.arena.free_slots == 7
    assert log.read_all() == [8]


def test_memory_of_streams_that_no_longer_exist_is_freed(launches: Launches) -> None:
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


def test_committed_cursors_survive_a_kill(launches: Launches) -> None:
    log = launches.begin()
    log.append()
    launches.engine.memory.index_writer.commit_cursor(log.entry, "a", Position(1, 1, CHUNK_BYTES), Outcome())
    launches.engine.run()
    launches.kill()

    assert launches.begin().entry.committed == {"a": Position(1, 1, CHUNK_BYTES)}


# --- a clean end -------------------------------------------------------------------------------------------


def test_a_clean_end_puts_everything_on_disk_and_loses_nothing(launches: Launches) -> None:
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


@pytest.mark.parametrize("end", [Launches.kill, Launches.stop])
def test_watermarks_and_punctuations_outlive_a_restart(launches: Launches, end: Callable[[Launches], None]) -> None:
    log = launches.begin()
    log.append_many(SEGMENT, max_timestamp_us=900)
    log.append(max_timestamp_us=50)
    punctuation = log.streamlet.punctuate(log.entry, 2000)
    assert punctuation is not None
    log.streamlet.publish(punctuation)
    log.append_many(SEGMENT, max_timestamp_us=1000)
    log.entry.move_start(Position(1, 2, 0), SEGMENT)
    launches.engine.memory.removals.collect(log.entry)
    launches.engine.run()
    end(launches)
    log = launches.begin()

    assert (watermark_of(log.entry), log.entry.removed_watermark_us) == (2000, 900)
    assert dict(log.streamlet.producers) == {1: (0, 2 * SEGMENT + 1)}, "a punctuation is of no producer"
    log.read()
    found = headers(plan_read(log.streamlet, 0, EARLIEST, None, EVERYTHING))
    assert [is_punctuation(header) for header in found[:SEGMENT]] == [False, True, False, False]


# --- memory domains ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["nothing", "given", "altered"])
def test_an_open_segment_is_closed_when_its_memory_was_given_away_or_its_domain_changed(
    launches: Launches, what: str
) -> None:
    """Others who got the memory may have lost the right to it meanwhile, or the stream has another domain."""
    launches.start()
    launches.engine.streams.open(stream_info(memory_domain="eu"), BROKER_ID, 9)
    data = chunk()
    launches.engine.streams.streamlet(STREAM_ID, 0).append(memoryview(data), verify_header(data))
    if what == "given":
        launches.engine.arena.file("eu").note_given()
    launches.kill()
    launches.start()
    info = stream_info(memory_domain="us" if what == "altered" else "eu")
    launches.engine.streams.open(info, BROKER_ID, 9)
    entry = launches.engine.streams.streamlet(STREAM_ID, 0).entries[0]

    assert [segment.closed for segment in entry.tail] == [what != "nothing"]
