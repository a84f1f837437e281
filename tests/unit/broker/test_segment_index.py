"""The index of segments on disk: its records, their order, and the check when its file is damaged."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import lmdb
import pytest

from kera.broker.records import Change, EntryRecord, Gap, ProducerRecord, SegmentAddress, SegmentRecord
from kera.broker.storage.index import SegmentIndex, file_checksum
from kera.broker.storage.index_format import (
    delete_removal,
    delete_segment,
    intact,
    put_cursor,
    put_entry,
    put_producer,
    put_removal,
    put_segment,
    sealed,
)
from kera.core.base.ids import EntryId, Position
from kera.core.errors import StartError
from kera.core.format.punctuation import NO_TIME
from tests.unit.broker.support import ADDRESS

ENTRY = EntryId(*ADDRESS[:3])
RECORD = SegmentRecord(
    physical_id=2**40,
    length=4096,
    open=False,
    chunk_count=4,
    crc32c=0xDEADBEEF,
    first_record=2**50,
    record_count=9,
    min_timestamp_us=-(2**60),
    max_timestamp_us=2**60,
    newest_us=5,
)
OpenIndex = Callable[[], SegmentIndex]


def record(number: int, *, is_open: bool = False) -> SegmentRecord:
    return RECORD._replace(physical_id=number, open=is_open)


def address(group_id: int, segment_id: int, entry: EntryId = ENTRY) -> SegmentAddress:
    return SegmentAddress(*entry, group_id, segment_id)


@pytest.fixture
def path(root: Path) -> Path:
    return root / "index"


@pytest.fixture
def open_index(path: Path) -> Iterator[OpenIndex]:
    """Opens the index anew, as the next launch does."""
    made: list[SegmentIndex] = []

    def close() -> None:
        for index in made:
            with suppress(lmdb.Error):  # a test has closed it
                index.close()

    def open_it() -> SegmentIndex:
        close()
        made.append(SegmentIndex.open(path, durable=False))
        return made[-1]

    yield open_it
    close()


@pytest.fixture
def index(open_index: OpenIndex) -> SegmentIndex:
    return open_index()


# --- records -----------------------------------------------------------------------------------------------


def test_records_outlive_the_launch(index: SegmentIndex, open_index: OpenIndex) -> None:
    gaps = (Gap(Position(1, 1, 64), Position(9, 1, 0)), Gap(Position(2**50, 2, 128), Position(2**51, 1, 0)))
    entry_record = EntryRecord(Position(2**40, 7, 1024), 2**41, 2**42, 2**43, 5, 2**44, 3, gaps, 2**62, -5)
    index.commit(
        [
            put_segment(ADDRESS, RECORD),
            put_entry(ENTRY, entry_record),
            put_producer(7, 0, 2**63, ProducerRecord(3, 2**62)),
            put_cursor(ENTRY, "früh", Position(4, 2, 512)),
            put_removal(17),
            put_removal(18, ADDRESS),
        ],
        {"format": 1, "clean": True, "next_physical_id": 8},
    )
    index = open_index()

    assert index.segment(ADDRESS) == RECORD
    assert index.entry(ENTRY) == entry_record
    assert index.producers(7, 0) == {2**63: ProducerRecord(3, 2**62)}
    assert index.cursors(ENTRY) == {"früh": Position(4, 2, 512)}
    assert index.removals() == [17, 18]
    assert [index.removal(number) for number in (16, 17, 18)] == [None, None, ADDRESS]
    assert index.meta() == {"format": 1, "clean": True, "next_physical_id": 8}


def test_an_entry_record_of_an_older_version_has_no_watermarks(index: SegmentIndex) -> None:
    record = EntryRecord(Position(1, 1, 0), 0, 5, 64, 1, 1, 1, (Gap(Position(1, 1, 64), Position(9, 1, 0)),), 7, 8)
    key, value = put_entry(ENTRY, record)
    assert value is not None
    index.commit([sealed(key, value[:-20])])  # without the watermarks and the checksum

    assert index.entry(ENTRY) == record._replace(watermark_us=NO_TIME, removed_watermark_us=NO_TIME)


def test_a_new_index_is_empty(index: SegmentIndex) -> None:
    assert (index.segment(ADDRESS), index.entry(ENTRY), index.following(ADDRESS)) == (None, None, None)
    assert (index.meta(), index.producers(7, 0), index.cursors(ENTRY), index.removals()) == ({}, {}, {}, [])
    assert (list(index.entries()), list(index.all_segments()), index.stream_ids()) == ([], [], set())


def test_deleted_records_are_gone(index: SegmentIndex) -> None:
    index.commit([put_segment(ADDRESS, RECORD), put_removal(1), put_removal(2)])
    index.commit([delete_segment(ADDRESS), delete_removal(1), delete_segment(address(99, 1))])

    assert (index.segment(ADDRESS), index.removals()) == (None, [2])


@pytest.mark.parametrize("replaced", [True, False])
def test_commits_fail_while_the_index_file_is_renamed_or_replaced(
    index: SegmentIndex, path: Path, replaced: bool
) -> None:
    index.commit([put_removal(1)])
    file, aside = path / "data.mdb", path / "aside"
    file.rename(aside)
    if replaced:
        file.write_bytes(aside.read_bytes())
    with pytest.raises(OSError, match="removed or replaced while the broker runs; put it back, or restart the broker"):
        index.commit([put_removal(2)])
    assert index.removals() == [1]

    aside.replace(file)
    index.commit([put_removal(2)])
    assert index.removals() == [1, 2]


def test_a_record_with_a_flipped_bit_is_ignored(index: SegmentIndex) -> None:
    key, value = put_segment(ADDRESS, RECORD)
    assert value is not None
    for at in range(len(value)):
        index.commit([(key, value[:at] + bytes([value[at] ^ 4]) + value[at + 1 :])])
        assert index.segment(ADDRESS) is None


def test_a_record_under_the_key_of_another_segment_is_ignored(index: SegmentIndex) -> None:
    _, value = put_segment(address(1, 2), RECORD)
    index.commit([(put_segment(ADDRESS, RECORD)[0], value)])

    assert index.segment(ADDRESS) is None


@pytest.mark.parametrize("value", [b"", b"\0", b"\0\0\0", bytes(4)])
def test_a_value_without_its_checksum_is_not_intact(value: bytes) -> None:
    assert not intact(b"key", value)


# --- order -------------------------------------------------------------------------------------------------

KEYS = [(1, 1), (1, 2), (2, 1), (255, 1), (256, 1), (256, 300), (65536, 1), (2**40, 2)]


@pytest.fixture
def filled(index: SegmentIndex) -> SegmentIndex:
    """Segments of one entry, among those of its neighbours."""
    changes: list[Change] = []
    for entry in (ENTRY, ENTRY._replace(entry=1), ENTRY._replace(streamlet_id=1), ENTRY._replace(stream_id=6)):
        changes += [put_segment(address(*key, entry), record(number)) for number, key in enumerate(KEYS)]
    index.commit(changes)
    return index


def test_the_segments_of_an_entry_come_in_the_order_of_the_log(filled: SegmentIndex) -> None:
    found = list(filled.segments(ENTRY))

    assert [(each.group_id, each.segment_id) for each, _ in found] == KEYS
    assert [each.physical_id for _, each in found] == list(range(len(KEYS)))
    assert {each[:3] for each, _ in found} == {ENTRY}


@pytest.mark.parametrize("number", range(len(KEYS)))
def test_the_following_segment_is_the_next_one_of_the_same_entry(filled: SegmentIndex, number: int) -> None:
    following = filled.following(address(*KEYS[number]))
    expected = KEYS[number + 1] if number + 1 < len(KEYS) else None

    assert (following[0][3:] if following is not None else None) == expected


def test_the_segment_after_a_place_that_does_not_exist_is_found(filled: SegmentIndex) -> None:
    for place, expected in (((0, 0), (1, 1)), ((1, 0), (1, 1)), ((1, 3), (2, 1)), ((100, 7), (255, 1))):
        following = filled.following(address(*place))
        assert following is not None
        assert following[0][3:] == expected


def test_segments_may_change_during_an_iteration_over_them(filled: SegmentIndex) -> None:
    found = []
    for each, _ in filled.segments(ENTRY):
        found.append((each.group_id, each.segment_id))
        if found[-1] == (1, 2):
            filled.commit([delete_segment(address(2, 1)), put_segment(address(3, 1), RECORD)])

    assert found == [(1, 1), (1, 2), (3, 1), *KEYS[3:]]


def test_all_records_of_a_stream_are_found_without_its_neighbours(filled: SegmentIndex) -> None:
    entry = ENTRY._replace(stream_id=8)
    filled.commit([put_entry(entry, EntryRecord()), put_producer(8, 0, 1, ProducerRecord(0, 1))])
    filled.commit([put_cursor(entry, "a", Position(1, 1, 0)), put_segment(address(1, 1, entry), RECORD)])

    assert [each for each, _ in filled.segments_of_stream(8)] == [address(1, 1, entry)]
    assert len(filled.keys_of_stream(8)) == 4
    assert len(list(filled.segments_of_stream(7))) == 3 * len(KEYS)
    filled.commit([(key, None) for key in filled.keys_of_stream(8)])
    assert (filled.entry(entry), filled.producers(8, 0), filled.cursors(entry)) == (None, {}, {})
    assert len(list(filled.all_segments())) == 4 * len(KEYS)


@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_open_segments_are_the_last_ones_of_their_entry(index: SegmentIndex, count: int, neighbours: bool) -> None:
    changes = [put_segment(address(group, 1), record(group, is_open=group > 3 - count)) for group in (1, 2, 3)]
    if neighbours:
        for entry in (ENTRY._replace(entry=1), ENTRY._replace(stream_id=6)):
            changes += [put_segment(address(1, 1, entry), record(9, is_open=True))]
    index.commit(changes)

    assert [each.physical_id for _, each in index.open_segments(ENTRY)] == list(range(4 - count, 4))


def test_the_next_file_number_never_goes_back(index: SegmentIndex) -> None:
    for number in (3, 9, 5):
        index.commit([], {"next_physical_id": number})

    assert index.meta()["next_physical_id"] == 9


def test_a_commit_is_made_as_a_whole_or_not_at_all(index: SegmentIndex) -> None:
    with pytest.raises(OSError, match="index"):
        index.commit([put_segment(ADDRESS, RECORD), (b"", b"no key")])

    assert index.segment(ADDRESS) is None


def test_the_checksum_of_a_clean_stop_depends_on_the_records(path: Path) -> None:
    """A disk may lose the write of a page: the content from before is whole, and old."""
    path.mkdir()
    checksums = set()
    for next_record in (1, 2):
        key, value = put_entry(ENTRY, EntryRecord(next_record=next_record))
        (path / "data.mdb").write_bytes(b"page" + key + (value or b"") + b"page")
        checksums.add(file_checksum(path / "data.mdb"))

    assert len(checksums) == 2


# --- the check at the start --------------------------------------------------------------------------------


def fill(path: Path, count: int = 400) -> None:
    """Make an index of many pages, and close it without marking it clean."""
    index = SegmentIndex.open(path, durable=False)
    index.commit([put_segment(address(group, 1), record(group)) for group in range(1, count + 1)])
    index.close()


def reopened(path: Path) -> tuple[bool, list[int]]:
    """Whether the check found everything, and the groups in the index, each of them intact."""
    index, whole = SegmentIndex.open_checked(path)
    groups = [each.group_id for each, _ in index.all_segments()]
    assert [index.segment(address(group, 1)) for group in groups] == [record(group) for group in groups]
    index.commit([put_entry(ENTRY, EntryRecord())])
    index.close()
    return whole, groups


def test_a_cleanly_closed_index_is_opened_without_a_check_of_records(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path)
    SegmentIndex.open(path).close(clean=True)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("looked at each record"))

    assert reopened(path) == (True, list(range(1, 401)))


def test_the_checksum_of_a_clean_stop_is_used_for_one_start_only(path: Path) -> None:
    fill(path)
    SegmentIndex.open(path).close(clean=True)
    assert (path / "data.crc32").exists()
    for was_closed in (True, False):
        index, _ = SegmentIndex.open_checked(path)
        index.close()

        assert index.was_closed == was_closed
        assert not (path / "data.crc32").exists()


def test_the_index_of_a_killed_launch_is_checked_and_found_whole(path: Path) -> None:
    fill(path)

    assert reopened(path) == (True, list(range(1, 401)))
    assert sorted(each.name for each in path.iterdir()) == ["data.mdb", "lock.mdb"]
    assert [each.name for each in path.parent.iterdir()] == [path.name], "the copy is gone"


@pytest.mark.parametrize("clean", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_records_with_flipped_bits_are_reported_and_left_out(path: Path, share: float, clean: bool) -> None:
    fill(path)
    if clean:
        SegmentIndex.open(path).close(clean=True)
    data = path / "data.mdb"
    content = bytearray(data.read_bytes())
    for at in range(int(len(content) * share), int(len(content) * share) + 64):
        content[at] ^= 0xFF
    data.write_bytes(content)
    whole, groups = reopened(path)

    assert set(groups) <= set(range(1, 401))
    assert whole == (groups == list(range(1, 401))), "a page that is in no use may hold anything"


@pytest.mark.parametrize(
    "content", [b"", b"garbage", bytes(1 << 16), b"\xff" * (1 << 16)], ids=["empty", "text", "zeros", "ones"]
)
def test_a_file_that_is_not_an_index_is_replaced_by_an_empty_index(path: Path, content: bytes) -> None:
    path.mkdir()
    (path / "data.mdb").write_bytes(content)
    index, whole = SegmentIndex.open_checked(path)

    assert (list(index.all_segments()), whole) == ([], False)
    index.close()


def test_a_truncated_index_opens_and_is_reported_as_not_whole(path: Path) -> None:
    fill(path)
    data = path / "data.mdb"
    data.write_bytes(data.read_bytes()[: 6 * 4096])
    whole, groups = reopened(path)

    assert not whole
    assert set(groups) <= set(range(1, 401))


def test_a_cleanly_closed_index_that_is_gone_is_not_whole(path: Path) -> None:
    fill(path)
    SegmentIndex.open(path).close(clean=True)
    (path / "data.mdb").unlink()

    assert reopened(path) == (False, [])


def test_an_index_that_never_existed_is_whole(path: Path) -> None:
    assert reopened(path) == (True, [])


def test_the_leftover_of_an_interrupted_check_does_not_matter(path: Path) -> None:
    fill(path)
    leftover = path.with_name(path.name + ".copy")
    leftover.mkdir()
    (leftover / "data.mdb").write_bytes(b"half")

    assert reopened(path) == (True, list(range(1, 401)))


def test_an_index_that_cannot_be_opened_stops_the_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise lmdb.InvalidError("not a database")

    monkeypatch.setattr(lmdb, "open", fail)
    with pytest.raises(StartError, match="the broker rebuilds it"):
        SegmentIndex.open(path)
