"""Data directories of earlier formats, and the effect of one flipped bit on the start and on `verify`."""

import json
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from scripts import sample_data_dir as sample

from kera.broker.log.arena import Arena
from kera.broker.log.scan import scan_segment
from kera.broker.log.segment import Segment
from kera.broker.log.watermarks import watermark_of
from kera.broker.records import EntryRecord
from kera.broker.registration import BrokerDirectory
from kera.broker.storage.disk import LocalDisk
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.jobs import LoadJob
from kera.broker.storage.restart import Restart
from kera.broker.storage.segment_files import SegmentStore
from kera.broker.verify import SegmentsChecked, verify
from kera.core.base.ids import EARLIEST, EntryId
from kera.core.format.chunk import read_header, verify_chunk
from kera.core.format.punctuation import NO_TIME
from kera.server.verifying import Defect
from tests.examples import first_quick
from tests.unit.broker.forked_copy import run_forked

DATA = Path(__file__).parents[2] / "data"
FORMAT_1, FORMAT_2 = DATA / "broker-format-1", DATA / "broker-format-2"
SEGMENTS = sorted(path.relative_to(FORMAT_2) for path in FORMAT_2.rglob("*.segment"))
INDEX = Path("log/index/data.mdb")
INDEX_CHECKSUM = Path("log/index/data.crc32")
INDEX_LOCK = Path("log/index/lock.mdb")
ROUNDS = 15
FLIPS = 8
"""The number of flips in each round."""

Chunks = dict[tuple[int, int], bytes]
"""The bytes of each chunk, by stream and sequence."""


@pytest.fixture
def tmp_path(root: Path) -> Path:
    """In memory: writes to a disk take most of the time of these tests."""
    return root


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FORMAT_2, tmp_path / "broker"))


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(prefix="kera-test-", dir="/dev/shm") as shm_dir:
        arena = Arena.create(
            Path(shm_dir),
            arena_bytes=sample.SEGMENT_BYTES,
            slot_bytes=sample.SEGMENT_BYTES,
            data_dir=Path("/data"),
            ephemeral=True,
        )
        yield arena
        arena.close()


def read_by_engine(data_dir: Path, arena: Arena) -> Chunks:
    """Start the log as a broker does, and load all segments."""
    root = data_dir / "log"
    index, whole = SegmentIndex.open_checked(root / "index")
    try:
        store = SegmentStore(root, LocalDisk(root), index)
        restart = Restart(None, index, store)
        restart.look(index_whole=whole, slot_bytes=sample.SEGMENT_BYTES)
        found: Chunks = {}
        for stream_id in (sample.LEADER, sample.PERSISTED):
            (entry,) = restart.restore(stream_id, 0, 1, 1).entries
            assert entry.start == EARLIEST._replace(group_id=1, segment_id=1)
            for key, record in entry.segments():
                assert not isinstance(record, Segment)
                found |= load(store, Segment.stub(entry, entry.address(key), arena.allocate(), record))
    finally:
        index.close()
    return found


def load(store: SegmentStore, segment: Segment) -> Chunks:
    job = LoadJob(segment)
    store.perform(job)
    assert job.error is None
    view, damaged = segment.slot.view, {hole.start for hole in job.holes}
    found, start = {}, 0
    for end in job.chunk_ends:
        if start not in damaged:
            header = read_header(view, start)
            found[header.stream_id, header.sequence] = bytes(view[start:end])
        start = end
    segment.slot.retire()
    return found


class Place(NamedTuple):
    """A chunk in a file of the sample."""

    path: Path
    start: int
    end: int
    key: tuple[int, int]


def places() -> list[Place]:
    found = []
    for path in SEGMENTS:
        scan = scan_segment(memoryview((FORMAT_2 / path).read_bytes()))
        starts = [0, *scan.chunk_ends[:-1]]
        found += [
            Place(path, start, end, (header.stream_id, header.sequence))
            for start, end, header in zip(starts, scan.chunk_ends, scan.headers, strict=True)
        ]
    return found


PLACES = places()
WRITTEN: Chunks = {place.key: (FORMAT_2 / place.path).read_bytes()[place.start : place.end] for place in PLACES}


def findings_of(data_dir: Path) -> tuple[list[Defect], SegmentsChecked]:
    totals = SegmentsChecked()
    return list(verify(data_dir, totals)), totals


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


# --- formats -----------------------------------------------------------------------------------------------


def test_a_directory_of_format_1_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "broker"
    shutil.copytree(FORMAT_1, path)
    directory = BrokerDirectory(path)
    broker_id, cluster_id = directory.load()
    assert not (path / "broker.copy.json").exists(), "upgraded only when it is known that the coordinator agrees"
    directory.store(broker_id, cluster_id)
    directory.close()

    assert (broker_id, cluster_id) == (4, "416e95b064e24483b9090a6027df39b4")
    assert json.loads((path / "broker.json").read_text())["format"] == 2
    assert (path / "broker.copy.json").read_bytes() == (path / "broker.json").read_bytes()
    assert findings_of(path) == ([], SegmentsChecked())


def test_a_directory_of_format_2_has_all_its_chunks(data_dir: Path, arena: Arena) -> None:
    directory = BrokerDirectory(data_dir)
    identity = directory.load()
    found = read_by_engine(data_dir, arena)
    directory.close()

    assert identity == (sample.BROKER_ID, sample.CLUSTER_ID)
    assert sorted(found) == [(stream, sequence) for stream in (1, 2) for sequence in range(sample.CHUNKS)]
    assert found == WRITTEN
    assert sum(verify_chunk(chunk).record_count for chunk in found.values()) == 768


def test_entries_of_a_directory_from_before_epochs_get_a_watermark(data_dir: Path) -> None:
    index, whole = SegmentIndex.open_checked(data_dir / "log" / "index")
    try:
        store = SegmentStore(data_dir / "log", LocalDisk(data_dir / "log"), index)
        restart = Restart(None, index, store)
        restart.look(index_whole=whole, slot_bytes=sample.SEGMENT_BYTES)
        for stream_id in (sample.LEADER, sample.PERSISTED):
            assert (index.entry(EntryId(stream_id, 0, 0)) or EntryRecord()).watermark_us == NO_TIME, "as it was then"
            (entry,) = restart.restore(stream_id, 0, 1, 1).entries
            written = max(read_header(data).max_timestamp_us for (of, _), data in WRITTEN.items() if of == stream_id)
            assert watermark_of(entry) == written
    finally:
        index.close()


def test_the_sample_is_what_the_script_writes(tmp_path: Path, arena: Arena) -> None:
    sample.write(tmp_path / "broker")

    (tmp_path / "broker/log/spare").rmdir()  # it has no spare files
    written = sorted(path.relative_to(tmp_path / "broker") for path in (tmp_path / "broker").rglob("*"))
    assert written == sorted(path.relative_to(FORMAT_2) for path in FORMAT_2.rglob("*"))
    assert read_by_engine(tmp_path / "broker", arena).keys() == WRITTEN.keys()


# --- one flipped bit ---------------------------------------------------------------------------------------


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", run_forked)


def positions(path: Path, seed: int) -> list[tuple[int, int]]:
    """Some bits of a file, most of them in used bytes, which are not 0."""
    chance, content = random.Random(f"{path.name} {seed}"), path.read_bytes()
    used = [offset for offset, byte in enumerate(content) if byte]
    return [
        (chance.choice(used if number % 4 else range(len(content))), chance.randrange(8)) for number in range(FLIPS)
    ]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("seed", first_quick(range(ROUNDS), 1))
def test_a_flipped_bit_in_a_segment_costs_one_chunk_and_is_found(tmp_path: Path, arena: Arena, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(FLIPS):
        place = chance.choice(PLACES)
        data_dir = Path(shutil.copytree(FORMAT_2, tmp_path / f"{number}"))
        flip(data_dir / place.path, chance.randrange(place.start, place.end), chance.randrange(8))

        (finding,), totals = findings_of(data_dir)
        found = read_by_engine(data_dir, arena)

        assert (finding.severity, finding.path) == ("damage", data_dir / place.path)
        assert (finding.offset, finding.length_bytes) == (place.start, place.end - place.start)
        assert (totals.segments, totals.chunks) == (len(SEGMENTS), len(WRITTEN) - 1)
        assert found == {key: chunk for key, chunk in WRITTEN.items() if key != place.key}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("seed", first_quick(range(ROUNDS), 1))
def test_a_flipped_bit_in_the_index_costs_no_chunk_and_is_found(tmp_path: Path, arena: Arena, seed: int) -> None:
    for number, position in enumerate(positions(FORMAT_2 / INDEX, seed)):
        data_dir = Path(shutil.copytree(FORMAT_2, tmp_path / f"{number}"))
        flip(data_dir / INDEX, *position)

        found, totals = findings_of(data_dir)

        assert {(finding.severity, finding.path) for finding in found} == {("damage", data_dir / INDEX)}, position
        assert (totals.segments, totals.chunks) == (len(SEGMENTS), len(WRITTEN)), position
        assert read_by_engine(data_dir, arena) == WRITTEN, position


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("seed", first_quick(range(3), 1))
def test_a_flipped_bit_in_the_lock_file_of_the_index_has_no_effect(data_dir: Path, arena: Arena, seed: int) -> None:
    for position in positions(FORMAT_2 / INDEX_LOCK, seed):
        flip(data_dir / INDEX_LOCK, *position)
        assert findings_of(data_dir)[0] == []
        assert read_by_engine(data_dir, arena) == WRITTEN
        shutil.rmtree(data_dir)
        shutil.copytree(FORMAT_2, data_dir)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("bit", first_quick(range(8), 1))
def test_a_flipped_bit_in_the_checksum_of_the_index_costs_no_chunk_and_is_found(
    data_dir: Path, arena: Arena, bit: int
) -> None:
    for offset in range((FORMAT_2 / INDEX_CHECKSUM).stat().st_size):
        flip(data_dir / INDEX_CHECKSUM, offset, bit)
        assert [finding.path for finding in findings_of(data_dir)[0]] == [data_dir / INDEX]
        assert read_by_engine(data_dir, arena) == WRITTEN
        shutil.rmtree(data_dir)
        shutil.copytree(FORMAT_2, data_dir)


def test_a_flipped_bit_in_the_index_is_found_in_a_process_that_may_crash(data_dir: Path, arena: Arena) -> None:
    content = (data_dir / INDEX).read_bytes()
    flip(data_dir / INDEX, content.rindex(b"s" + (1).to_bytes(8)), 3)

    assert {finding.path for finding in findings_of(data_dir)[0]} == {data_dir / INDEX}
    assert read_by_engine(data_dir, arena) == WRITTEN


@pytest.mark.parametrize("bit", first_quick(range(8), 1))
@pytest.mark.parametrize("name", ["broker.json", "broker.copy.json"])
def test_a_flipped_bit_in_an_identity_file_does_not_stop_a_start(data_dir: Path, name: str, bit: int) -> None:
    path = data_dir / name
    directory = BrokerDirectory(data_dir)
    directory.load()  # gives a directory of an earlier version its own id
    content = path.read_bytes()
    for offset in range(len(content)):
        flip(path, offset, bit)
        assert directory.load() == (sample.BROKER_ID, sample.CLUSTER_ID)
        assert path.read_bytes() == content
    directory.close()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("seed", first_quick(range(3), 1))
def test_a_flipped_bit_in_a_committed_open_segment_costs_one_chunk(tmp_path: Path, arena: Arena, seed: int) -> None:
    sample.write(tmp_path / "whole", clean=False)
    whole = read_by_engine(Path(shutil.copytree(tmp_path / "whole", tmp_path / "read")), arena)
    path = Path("log/segments/000000/000000000003.segment")
    end = scan_segment(memoryview((tmp_path / "whole" / path).read_bytes())).end
    chance = random.Random(seed)
    for number, position in enumerate((chance.randrange(end), chance.randrange(8)) for _ in range(FLIPS)):
        data_dir = Path(shutil.copytree(tmp_path / "whole", tmp_path / f"{number}"))
        flip(data_dir / path, *position)

        (finding,), _ = findings_of(data_dir)
        found = read_by_engine(data_dir, arena)

        assert finding.path == data_dir / path
        assert found.items() <= whole.items()
        assert len(found) == len(whole) - 1


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("ticked", "cost"), [(True, 1), (False, 3)])
def test_a_flipped_bit_in_the_last_commit_costs_one_chunk_once_a_tick_has_noted_it(
    tmp_path: Path, arena: Arena, ticked: bool, cost: int
) -> None:
    """Before the tick, damage in the last commit looks like a write that the loss of the host has cut off."""
    sample.write(tmp_path / "whole", clean=False, commit_chunks=4, ticked=ticked)
    whole = read_by_engine(Path(shutil.copytree(tmp_path / "whole", tmp_path / "read")), arena)
    flip(tmp_path / "whole" / "log/segments/000000/000000000003.segment", 3136 + 130, 0)

    assert len(read_by_engine(tmp_path / "whole", arena)) == len(whole) - cost


@pytest.mark.usefixtures("forked")
def test_verify_reports_a_flipped_bit_in_the_last_commit_as_one_damaged_chunk(tmp_path: Path) -> None:
    sample.write(tmp_path / "broker", clean=False, commit_chunks=4)
    path = tmp_path / "broker" / "log/segments/000000/000000000003.segment"
    ends = scan_segment(memoryview(path.read_bytes())).chunk_ends
    before = findings_of(tmp_path / "broker")[1]
    flip(path, 3136 + 130, 0)
    (finding,), totals = findings_of(tmp_path / "broker")

    assert (finding.offset, finding.length_bytes) == (3136, ends[ends.index(3136) + 1] - 3136)
    assert "the next start cuts it" not in finding.text
    assert totals.chunks == before.chunks - 1


@pytest.mark.usefixtures("forked")
def test_a_first_commit_with_only_a_later_header_on_disk_is_a_torn_tail(tmp_path: Path, arena: Arena) -> None:
    sample.write(tmp_path / "broker", clean=False, ticked=False)
    path = tmp_path / "broker" / "log/segments/000000/000000000003.segment"
    content = path.read_bytes()
    path.write_bytes(bytes(3136) + content[3136 : 3136 + 140] + bytes(len(content) - 3136 - 140))

    assert [finding.severity for finding in findings_of(tmp_path / "broker")[0]] == ["warning"]
    assert len(read_by_engine(tmp_path / "broker", arena)) == 16
