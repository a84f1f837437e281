"""Segment files: written, read back, and removed; missing or damaged bytes become a hole."""

import contextlib
import errno
from collections.abc import Callable

import pytest

from kera.broker.log.scan import scan_segment
from kera.broker.log.segment import Segment
from kera.broker.records import Hole, SegmentRecord
from kera.broker.storage import segment_files
from kera.broker.storage.index_format import delete_segment, put_removal
from kera.broker.storage.jobs import IndexJob, LoadJob, RemoveJob, StoreJob
from kera.broker.storage.segment_files import SegmentStore, chunk_ends, record_of, segment_path
from kera.core.format.checksum import crc32c
from kera.core.format.chunk import HEADER_BYTES
from tests.native_twins import python_only
from tests.unit.broker.support import ADDRESS, CHUNK_BYTES, SLOT_BYTES, Engine, Log, Outcome, placed

SECOND = ADDRESS._replace(segment_id=2)


def flushed(log: Log, count: int = 4) -> SegmentRecord:
    """Put one segment with `count` chunks on disk only; return its record."""
    log.append_many(count, record_count=10)
    log.engine.memory.segments.close_all()
    log.engine.run()
    log.engine.fill_memory()
    log.engine.memory.slots.allocate().retire()
    assert log.entry.resident == {}
    record = log.engine.index.segment(ADDRESS)
    assert record is not None
    return record


def load(log: Log) -> tuple[LoadJob, Segment]:
    """Bring the first segment back."""
    log.engine.memory.loads.load(log.entry, (1, 1))
    (job,) = log.engine.memory.plan()
    assert isinstance(job, LoadJob)
    log.engine.perform(job)
    return job, job.segment


def overwrite(log: Log, physical_id: int, at: int, data: bytes) -> None:
    with log.engine.store.path(physical_id).open("r+b") as file:
        file.seek(at)
        file.write(data)


# --- files -------------------------------------------------------------------------------------------------


def test_files_are_named_by_their_ids_and_a_directory_has_a_thousand_of_them(engine: Engine) -> None:
    names = [str(segment_path(engine.root, number).relative_to(engine.root)) for number in (1, 1023, 1024, 0x2B1F)]

    assert names == [
        "segments/000000/000000000001.segment",
        "segments/000000/0000000003ff.segment",
        "segments/000001/000000000400.segment",
        "segments/00000a/000000002b1f.segment",
    ]


def test_segment_files_are_found_in_order_and_other_files_are_ignored(engine: Engine) -> None:
    for number in (3000, 5, 1024, 1023):
        engine.disk.create(engine.store.path(number), 0)
    for name in ("000000/x.segment", "000000/5.segment", "else/000000000007.segment", "000000/000000000008.segment~"):
        engine.disk.create(engine.root / "segments" / name, 0)

    assert list(engine.store.physical_ids()) == [5, 1023, 1024, 3000]
    assert list(engine.store.physical_ids(first=1024)) == [1024, 3000]
    assert list(engine.store.physical_ids(first=3001)) == []


# --- writing -----------------------------------------------------------------------------------------------


def test_a_closed_segment_is_written_whole_and_recorded_in_the_index(log: Log) -> None:
    log.engine.memory.now_us = 77
    log.append_many(5, record_count=10)
    (job,) = log.engine.memory.plan()
    assert isinstance(job, StoreJob)
    log.engine.store.perform(job)

    path = log.engine.store.path(1)
    assert path.read_bytes() == bytes(log.entry.tail[0].slot.view)
    record = log.engine.index.segment(ADDRESS)
    assert record is not None
    assert (record.physical_id, record.length, record.open, record.chunk_count) == (1, SLOT_BYTES, False, 4)
    assert (record.first_record, record.record_count, record.newest_us) == (0, 40, 77)
    assert log.engine.index.meta()["next_physical_id"] == 2
    entry = log.engine.index.entry(log.entry.log_id)
    assert entry is not None
    assert (entry.last_group_id, entry.last_segment_id, entry.next_record, entry.stored_bytes) == (1, 1, 40, SLOT_BYTES)
    assert log.engine.index.producers(7, 0)[1].next_sequence == 4, "up to the end of the segment"


def test_the_rest_of_the_last_block_is_zeros_whatever_was_in_the_slot(log: Log) -> None:
    slot = log.engine.arena.allocate()
    slot.view[:] = b"?" * SLOT_BYTES
    slot.retire()
    log.append()
    log.engine.memory.segments.close_all()
    log.engine.run()

    content = log.engine.store.path(1).read_bytes()
    assert len(content) == SLOT_BYTES
    assert content[CHUNK_BYTES:] == bytes(SLOT_BYTES - CHUNK_BYTES)


def test_a_failed_job_has_its_error_and_leaves_the_index_unchanged(log: Log) -> None:
    log.append_many(5)
    log.engine.disk.write_error = errno.EIO
    (job,) = log.engine.memory.plan()
    log.engine.store.perform(job)

    assert job.error is not None
    assert job.error.errno == errno.EIO
    assert log.engine.index.segment(ADDRESS) is None
    assert log.engine.index.entry(log.entry.log_id) is None


# --- loading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 4])
def test_a_segment_is_loaded_byte_by_byte_as_it_was_written(log: Log, count: int) -> None:
    record = flushed(log, count)
    written = log.engine.store.path(record.physical_id).read_bytes()
    job, segment = load(log)

    assert (job.error, segment.holes) == (None, [])
    assert bytes(segment.slot.view[: segment.head]) == written[: count * CHUNK_BYTES]
    assert list(segment.chunk_ends) == [CHUNK_BYTES * n for n in range(1, count + 1)]
    assert (segment.head, segment.durable_head, segment.record_count) == (count * CHUNK_BYTES,) * 2 + (10 * count,)


def test_a_flipped_bit_is_a_hole_of_its_chunk(log: Log) -> None:
    record = flushed(log)
    overwrite(log, record.physical_id, CHUNK_BYTES + 300, b"\xff")
    job, segment = load(log)

    assert job.error is None
    assert [(hole.start, hole.end) for hole in segment.holes] == [(CHUNK_BYTES, 2 * CHUNK_BYTES)]
    assert log.engine.memory.totals.chunks_damaged == 1


@pytest.mark.parametrize("core", ["native", "python"])
@pytest.mark.parametrize("at", [0, 9, 30, 82, 85, 90, 121, 126, HEADER_BYTES, CHUNK_BYTES - 1])
def test_a_chunk_damaged_in_memory_before_its_write_is_a_hole(log: Log, at: int, core: str) -> None:
    """The checksum of a segment is that of the appended bytes, not of the damaged ones."""
    appended = log.append_many(4)[1]
    assert appended.segment is not None
    appended.segment.slot.view[CHUNK_BYTES + at] ^= 4
    with python_only(segment_files) if core == "python" else contextlib.nullcontext():
        flushed(log, 0)
    _, segment = load(log)

    assert [(hole.start, hole.end) for hole in segment.holes] == [(CHUNK_BYTES, 2 * CHUNK_BYTES)]


def test_the_checksum_of_a_segment_written_in_steps_is_that_of_its_file(log: Log) -> None:
    for count, size in enumerate((384, 1024, 128, 640), 1):
        appended = log.append(size=size)
        assert appended.segment is not None
        log.engine.memory.commits.persist([(appended.segment, appended.end)], Outcome())
        log.engine.run()
        assert log.engine.memory.totals.commits == count
    record = flushed(log, 0)

    content = log.engine.store.path(record.physical_id).read_bytes()
    assert record.crc32c == crc32c(content[: record.length])


def test_a_segment_with_known_damage_has_no_checksum(log: Log) -> None:
    appended = log.append_many(4)[1]
    assert appended.segment is not None
    appended.segment.slot.view[CHUNK_BYTES + 300] ^= 4
    appended.segment.holes = [Hole(CHUNK_BYTES, 2 * CHUNK_BYTES, "found at the start")]

    assert flushed(log, 0).crc32c == 0
    _, segment = load(log)
    assert [(hole.start, hole.end) for hole in segment.holes] == [(CHUNK_BYTES, 2 * CHUNK_BYTES)]


def gone(log: Log, physical_id: int) -> int:
    log.engine.store.path(physical_id).unlink()
    return 0


def cut(log: Log, physical_id: int) -> int:
    path = log.engine.store.path(physical_id)
    path.write_bytes(path.read_bytes()[: 2 * CHUNK_BYTES])
    return 2 * CHUNK_BYTES


def emptied(log: Log, physical_id: int) -> int:
    log.engine.store.path(physical_id).write_bytes(b"")
    return 0


@pytest.mark.parametrize("damage", [gone, cut, emptied])
def test_the_missing_part_of_a_file_is_a_hole_up_to_the_end_of_the_segment(
    log: Log, damage: Callable[[Log, int], int]
) -> None:
    start = damage(log, flushed(log).physical_id)
    job, segment = load(log)

    assert job.error is None
    assert [(hole.start, hole.end) for hole in segment.holes] == [(start, SLOT_BYTES)]
    assert segment.chunk_ends[-1] == SLOT_BYTES


@pytest.mark.parametrize("fill", [b"y", b"x"])
def test_a_file_with_the_chunks_of_another_segment_is_one_hole(log: Log, fill: bytes) -> None:
    """Also if the payloads of the chunks are the same."""
    record = flushed(log)
    overwrite(log, record.physical_id, 0, b"".join(placed(n, SECOND, fill=fill) for n in range(4)))
    _, segment = load(log)

    assert [(hole.start, hole.end) for hole in segment.holes] == [(0, SLOT_BYTES)]
    assert not log.engine.store.path(record.physical_id).exists(), "it is set aside"
    assert log.engine.disk.names(log.engine.root / "set-aside") == [log.engine.store.path(record.physical_id).name]


@pytest.mark.parametrize("chunks", [4, 2])
def test_a_file_with_chunks_of_another_cluster_is_one_hole_and_set_aside(log: Log, chunks: int) -> None:
    """The stream has the same number in the other cluster."""
    record = flushed(log)
    overwrite(log, record.physical_id, 0, b"".join(placed(n, fill=b"y", max_timestamp_us=70) for n in range(chunks)))
    _, segment = load(log)

    assert [(hole.start, hole.end) for hole in segment.holes] == [(0, SLOT_BYTES)]
    assert not log.engine.store.path(record.physical_id).exists(), "it is set aside"


def test_a_file_set_aside_does_not_overwrite_an_earlier_one_of_its_number(log: Log) -> None:
    path = log.engine.store.path(5)
    for content in (b"one", b"other"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        aside = log.engine.store.set_aside(5)
        assert aside is not None
        assert aside.read_bytes() == content
    assert log.engine.store.set_aside(5) is None
    assert sorted(each.read_bytes() for each in (log.engine.root / "set-aside").iterdir()) == [b"one", b"other"]


def test_old_bytes_in_a_slot_are_not_mistaken_for_the_segment(log: Log) -> None:
    """The file is gone, and each slot still holds its very bytes."""
    record = flushed(log)
    content = log.engine.store.path(record.physical_id).read_bytes()
    for slot in log.engine.arena.slots():
        slot.view[: len(content)] = content
    gone(log, record.physical_id)
    _, segment = load(log)

    assert [(hole.start, hole.end) for hole in segment.holes] == [(0, SLOT_BYTES)]


def test_a_read_error_of_the_disk_is_an_error_and_not_a_hole(log: Log) -> None:
    flushed(log)
    log.engine.disk.read_error = errno.EIO
    job, _ = load(log)

    assert job.error is not None
    assert log.entry.resident == {}


# --- removing ----------------------------------------------------------------------------------------------


def test_a_removal_first_changes_the_index_and_then_the_disk(log: Log) -> None:
    record = flushed(log)
    job = IndexJob([delete_segment(ADDRESS), put_removal(record.physical_id)], {record.physical_id: None}, [], [])
    log.engine.store.perform(job)

    assert job.error is None
    assert log.engine.index.segment(ADDRESS) is None
    assert log.engine.index.removals() == list(log.engine.store.physical_ids()) == [record.physical_id]

    removal = RemoveJob([record.physical_id])
    log.engine.store.perform(removal)
    assert removal.error is None
    assert log.engine.index.removals() == list(log.engine.store.physical_ids()) == []


def test_a_file_that_could_not_be_removed_is_remembered(log: Log) -> None:
    record = flushed(log)
    log.engine.disk.remove_error = errno.EROFS
    log.engine.store.perform(IndexJob([delete_segment(ADDRESS), put_removal(record.physical_id)], {}, [], []))
    job = RemoveJob([record.physical_id])
    log.engine.store.perform(job)

    assert job.error is not None
    assert log.engine.index.segment(ADDRESS) is None
    assert log.engine.index.removals() == [record.physical_id]


def test_a_failed_commit_frees_the_disk_space_of_spare_files(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    record, engine = flushed(log), log.engine
    store = SegmentStore(engine.root, engine.disk, engine.index, spare_bytes_min=1)
    store.perform(RemoveJob([record.physical_id]))
    assert engine.disk.names(engine.root / "spare") == [store.path(record.physical_id).name]

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(engine.index, "commit", fail)
    job = StoreJob([], [], {}, commit=False)
    store.perform(job)
    assert job.error is not None
    assert engine.disk.names(engine.root / "spare") == []


def test_a_segment_removed_during_its_load_is_not_reported_as_damaged(
    log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    record = flushed(log)
    overwrite(log, record.physical_id, 0, b"another segment's")
    log.engine.memory.loads.load(log.entry, (1, 1))
    (job,) = log.engine.memory.plan()
    assert isinstance(job, LoadJob)
    job.segment.dropped = True
    log.engine.perform(job)

    assert (job.holes, log.engine.memory.totals.chunks_damaged, caplog.messages) == ([], 0, [])


# --- looking at files --------------------------------------------------------------------------------------


def test_a_scan_of_a_file_finds_its_address_and_its_record(log: Log) -> None:
    record = flushed(log, 3)
    scan = log.engine.store.scan_file(record.physical_id)

    assert (scan.address, scan.end, scan.holes, scan.torn_bytes) == (ADDRESS, 3 * CHUNK_BYTES, [], 0)
    assert record_of(record.physical_id, scan, record.crc32c, record.newest_us) == record


def test_a_scan_of_a_short_file_has_a_hole_up_to_the_length_of_the_segment(log: Log) -> None:
    record = flushed(log, 3)
    log.engine.store.path(record.physical_id).write_bytes(b"")
    scan = log.engine.store.scan_file(record.physical_id, address=ADDRESS, length=record.length)

    assert [(hole.start, hole.end) for hole in scan.holes] == [(0, 3 * CHUNK_BYTES)]


def test_the_ends_of_chunks_are_where_a_scan_finds_them() -> None:
    data = memoryview(bytearray(b"".join(placed(n, size=size) for n, size in enumerate((512, 1024, 128, 2048)))))

    assert chunk_ends(data, len(data), ADDRESS) == scan_segment(data, address=ADDRESS).chunk_ends
    assert chunk_ends(data, len(data), SECOND) is None
