"""Restarts with files and an index that disagree, or without one of them: all whole data is kept."""

import errno
import shutil

import pytest
from structlog.testing import capture_logs

from kera.broker.log.bounds import lag_records
from kera.broker.records import EntryRecord
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import delete_segment, put_entry, put_removal
from kera.core.base.ids import Position
from tests.unit.broker.restart_support import SEGMENT, Launches, commit, read_all
from tests.unit.broker.support import ADDRESS, SLOT_BYTES, placed


def test_the_next_launch_finishes_the_removal_of_files(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(2 * SEGMENT)
    launches.engine.memory.segments.close_all()
    launches.engine.run()
    launches.engine.index.commit([delete_segment(ADDRESS), put_removal(1)])
    launches.kill()
    launches.start()

    assert list(launches.engine.store.physical_ids()) == [2]
    assert launches.engine.index.removals() == []


def test_a_written_segment_that_the_index_lacks_is_added_to_it(
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


@pytest.mark.parametrize("is_open", [False, True])
def test_another_brokers_file_in_the_place_of_a_segment_is_set_aside_and_not_indexed(
    launches: Launches, is_open: bool
) -> None:
    log = launches.begin()
    log.append_many(SEGMENT - 1 if is_open else SEGMENT)
    commit(log)
    store = launches.engine.store
    foreign = b"".join(placed(n, ADDRESS._replace(stream_id=99)) for n in range(SEGMENT))
    store.path(1).write_bytes(foreign)
    launches.lose_host()
    launches.start()

    assert {address.stream_id for address, _ in launches.engine.index.all_segments()} <= {ADDRESS.stream_id}
    assert list(store.physical_ids()) == []
    assert [path.read_bytes() for path in (store.root / "set-aside").iterdir()] == [foreign]


def test_a_file_that_does_not_continue_the_log_is_removed(launches: Launches) -> None:
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


def test_a_lone_file_from_the_middle_of_an_unknown_entry_is_left_alone(launches: Launches) -> None:
    launches.begin().append_many(SEGMENT)
    launches.engine.memory.segments.close_all()
    launches.engine.run()
    path = launches.engine.store.path(9)
    path.write_bytes(placed(0, ADDRESS._replace(stream_id=99), first_record=4))
    launches.kill()
    with capture_logs() as logged:
        log = launches.begin()
    assert [line["paths"] for line in logged if "paths" in line] == [[str(path)]]

    assert path.read_bytes()
    assert {address.stream_id for address, _ in launches.engine.index.all_segments()} == {ADDRESS.stream_id}
    assert log.read_all() == list(range(SEGMENT))


def test_a_start_removes_incomplete_files_but_no_others(launches: Launches) -> None:
    launches.begin()
    arriving = launches.root / "arriving"
    arriving.mkdir()
    for name in ("000000000007.segment", "notes"):
        (arriving / name).touch()
    launches.kill()
    launches.begin()

    assert [path.name for path in arriving.iterdir()] == ["notes"]


def test_new_files_never_get_the_number_of_an_existing_file(launches: Launches) -> None:
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


def test_a_lost_index_is_rebuilt_from_the_files(launches: Launches) -> None:
    log = launches.begin()
    log.append_many(5 * SEGMENT, record_count=10)
    launches.stop()
    shutil.rmtree(launches.root / "index")
    log = launches.begin()

    assert launches.found.repaired
    assert read_all(log) == (list(range(5 * SEGMENT)), [Position(3, 1, SLOT_BYTES)]), "it knew of the clean end"
    assert lag_records(log.streamlet, log.entry, log.entry.start) == 50 * SEGMENT
    assert log.append(sequence=0, record_count=10).duplicate
    assert log.append().first_record == 50 * SEGMENT
    assert launches.engine.memory.ids.meta["next_physical_id"] > 5


def test_losing_the_index_with_the_process_loses_no_chunks(launches: Launches) -> None:
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
def test_lost_records_of_a_damaged_index_are_restored(launches: Launches, was_closed: bool) -> None:
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


def test_a_repair_does_not_bring_back_removed_segments(launches: Launches) -> None:
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
