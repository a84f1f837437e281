"""`kera.broker.verify`: findings in a data directory, and that a check changes nothing."""

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import sample_data_dir as sample

from kera.broker.log.scan import scan_segment
from kera.broker.records import Change, SegmentAddress, SegmentRecord
from kera.broker.registration import BrokerDirectory, BrokerIdentity
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import delete_segment, put_removal, put_segment
from kera.broker.verify import SegmentsChecked, verify
from kera.core.base.ids import EntryId
from kera.core.errors import StartError
from kera.core.format.chunk import HEADER_BYTES, Placement, place_chunk, verify_header
from kera.server.verifying import unused
from tests.unit.broker.forked_copy import run_forked

SAMPLE = Path(__file__).parents[2] / "data" / "broker-format-2"
FIRST, SECOND = SegmentAddress(1, 0, 0, 1, 1), SegmentAddress(1, 0, 0, 1, 2)
FIRST_FILE = "log/segments/000000/000000000001.segment"
WHOLE = (4, 24, 768, 54272)
"""Segments, chunks, records and bytes of the sample."""


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", run_forked)


@pytest.fixture
def tmp_path(root: Path) -> Path:
    """In memory: writes to a disk take most of the time of these tests."""
    return root


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "broker"))


def look(data_dir: Path) -> tuple[list[tuple[str, str, int | None, int]], tuple[int, int, int, int], list[str]]:
    """Findings without their texts, the totals, and the texts."""
    totals = SegmentsChecked()
    found = list(verify(data_dir, totals))
    places: list[tuple[str, str, int | None, int]] = [
        (finding.severity, str(finding.path.relative_to(data_dir)), finding.offset, finding.length_bytes)
        for finding in found
    ]
    whole = (totals.segments, totals.chunks, totals.records, totals.bytes)
    return places, whole, [finding.text for finding in found]


def change_index(data_dir: Path, change: Callable[[SegmentIndex], list[Change]]) -> None:
    """Change the index as the broker itself would: with a checksum after it."""
    index = SegmentIndex.open(data_dir / "log" / "index")
    index.commit(change(index))
    index.close(clean=True)


def record_of(index: SegmentIndex, address: SegmentAddress) -> SegmentRecord:
    record = index.segment(address)
    assert record is not None
    return record


def state_of(data_dir: Path) -> dict[Path, tuple[int, bytes]]:
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in data_dir.rglob("*")
    }


@pytest.mark.parametrize("clean", [True, False])
def test_punctuations_have_no_findings_unless_they_are_damaged(tmp_path: Path, clean: bool) -> None:
    data_dir = tmp_path / "punctuated"
    sample.write(data_dir, clean=clean, punctuated=True)
    found, (_, chunks, records, _), texts = look(data_dir)
    assert found == [], texts
    if clean:  # otherwise chunks that were only in memory are missing
        assert (chunks, records) == (2 * WHOLE[1], WHOLE[2])
    index = SegmentIndex.open(data_dir / "log" / "index")
    entry = index.entry(EntryId(*FIRST[:3]))
    last = record_of(index, FIRST)
    index.close(clean=clean)
    assert entry is not None
    assert entry.watermark_us >= last.max_timestamp_us
    path = data_dir / FIRST_FILE
    data = bytearray(path.read_bytes())
    (end, *_) = scan_segment(memoryview(data)).chunk_ends
    data[end + HEADER_BYTES // 2] ^= 1
    path.write_bytes(data)
    assert look(data_dir)[0] == [("damage", FIRST_FILE, end, HEADER_BYTES)], "a punctuation of which a bit was flipped"


def test_a_whole_directory_has_no_findings(data_dir: Path) -> None:
    assert look(data_dir) == ([], WHOLE, [])


def test_progress_is_reported_after_each_segment(data_dir: Path) -> None:
    totals, seen = SegmentsChecked(), []
    list(verify(data_dir, totals, lambda: seen.append((totals.segments, totals.segments_expected))))

    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_check_changes_nothing(data_dir: Path) -> None:
    (data_dir / FIRST_FILE).write_bytes(b"")
    (data_dir / "log/index/data.crc32").unlink()
    before = state_of(data_dir)

    assert look(data_dir)[0]
    assert state_of(data_dir) == before


def test_a_directory_that_a_broker_uses_is_refused(data_dir: Path) -> None:
    directory = BrokerDirectory(data_dir)
    with pytest.raises(StartError, match=r"a broker uses data directory .*; stop it first"):
        look(data_dir)
    directory.close()

    assert look(data_dir)[0] == []


def test_no_broker_starts_during_a_check_but_other_checks_may_run(data_dir: Path) -> None:
    findings = verify(data_dir, SegmentsChecked(), lambda: None)
    (data_dir / FIRST_FILE).unlink()
    next(findings)
    with pytest.raises(StartError, match="another process uses"):
        BrokerDirectory(data_dir)
    with unused(data_dir) as free:
        assert free
    list(findings)

    BrokerDirectory(data_dir).close()


@pytest.mark.parametrize("name", ["", "lock"])
def test_a_directory_that_is_not_a_data_directory_is_refused(tmp_path: Path, name: str) -> None:
    if name:
        (tmp_path / name).touch()
    with pytest.raises(StartError, match="is not a broker's data directory"):
        look(tmp_path)


def test_a_directory_of_a_newer_version_is_refused(data_dir: Path) -> None:
    (data_dir / "broker.json").write_bytes(BrokerIdentity(3, 1, "c").to_bytes())
    with pytest.raises(StartError, match="has format 3"):
        look(data_dir)


# --- identity and index ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["broker.json", "broker.copy.json"])
def test_a_damaged_identity_is_found(data_dir: Path, name: str) -> None:
    path = data_dir / name
    path.write_bytes(path.read_bytes().replace(b": 3", b": 7"))

    assert look(data_dir) == ([("damage", name, None, 0)], WHOLE, ["it does not match its checksum"])


@pytest.mark.parametrize("name", ["broker.json", "broker.copy.json"])
def test_a_missing_copy_of_the_identity_is_only_a_warning(data_dir: Path, name: str) -> None:
    (data_dir / name).unlink()

    assert look(data_dir)[:2] == ([("warning", name, None, 0)], WHOLE)


def test_a_log_without_an_identity_is_a_warning(data_dir: Path) -> None:
    for name in ("broker.json", "broker.copy.json"):
        (data_dir / name).unlink()

    assert look(data_dir)[:2] == ([("warning", "broker.json", None, 0)], WHOLE)


def test_a_missing_index_is_found_and_its_segments_are_checked_nevertheless(data_dir: Path) -> None:
    (data_dir / "log/index/data.mdb").unlink()

    places, whole, (text,) = look(data_dir)
    assert (places, whole) == ([("damage", "log/index/data.mdb", None, 0)], WHOLE)
    assert text == "is missing; the next start rebuilds it from the segment files"


def test_damage_is_found_in_segments_without_an_index(data_dir: Path) -> None:
    (data_dir / "log/index/data.mdb").write_bytes(b"nothing of LMDB")
    with (data_dir / FIRST_FILE).open("r+b") as file:
        file.seek(200)
        file.write(b"?")

    places, whole, texts = look(data_dir)
    assert places == [("damage", "log/index/data.mdb", None, 0), ("damage", FIRST_FILE, 0, 1216)]
    assert whole == (4, 23, 758, 54272)
    assert texts[0].startswith("cannot be read (")


def test_damaged_records_are_found_and_their_files_are_checked_nevertheless(data_dir: Path) -> None:
    def damage(index: SegmentIndex) -> list[Change]:
        key, value = put_segment(FIRST, record_of(index, FIRST))
        return [(key, (value or b"")[:-1] + b"?")]

    change_index(data_dir, damage)

    places, whole, (text,) = look(data_dir)
    assert (places, whole) == ([("damage", "log/index/data.mdb", None, 0)], WHOLE)
    assert text.startswith("1 records are damaged, 0 missing")


def test_an_index_that_does_not_match_its_checksum_is_found(data_dir: Path) -> None:
    (data_dir / "log/index/data.crc32").write_text("00000000")

    assert look(data_dir) == (
        [("damage", "log/index/data.mdb", None, 0)],
        WHOLE,
        ["does not match data.crc32; all its records are intact"],
    )


# --- segments ----------------------------------------------------------------------------------------------


def test_each_damaged_chunk_is_found_where_it_is(data_dir: Path) -> None:
    with (data_dir / FIRST_FILE).open("r+b") as file:
        for offset in (1216 + 130, 4480 + 16, 5824 + 100):
            file.seek(offset)
            file.write(b"?")

    places, whole, texts = look(data_dir)
    assert places == [
        ("damage", FIRST_FILE, 1216, 1536),
        ("damage", FIRST_FILE, 4480, 5824 + 2240 - 4480),
    ], "two damaged headers are one hole: where the second one was nobody can tell"
    assert "chunk payload at offset 1216 does not match its checksum" in texts[0]
    assert whole == (4, 21, 768 - 14 - 22 - 26, 54272)


@pytest.mark.parametrize(("size", "start"), [(12_000, 11_968), (4480, 4480), (0, 0)])
def test_a_truncated_file_is_found(data_dir: Path, size: int, start: int) -> None:
    os.truncate(data_dir / FIRST_FILE, size)

    assert look(data_dir)[0] == [("damage", FIRST_FILE, start, 14_848 - start)]


def test_a_missing_file_is_found(data_dir: Path) -> None:
    (data_dir / FIRST_FILE).unlink()

    places, whole, texts = look(data_dir)
    assert (places, whole) == ([("damage", FIRST_FILE, None, 14_848)], (3, 16, 576, 54_272 - 14_848))
    assert texts == ["is missing; it had stream 1, streamlet 0, entry 0, group 1, segment 1"]


def test_an_unreadable_file_is_found(data_dir: Path) -> None:
    (data_dir / FIRST_FILE).unlink()
    (data_dir / FIRST_FILE).mkdir()

    places, _, (text, *_) = look(data_dir)
    assert places[0] == ("damage", FIRST_FILE, None, 14_848)
    assert text.startswith("cannot be read: Is a directory")


def test_a_file_of_another_segment_is_damage(data_dir: Path) -> None:
    shutil.copy(data_dir / "log/segments/000000/000000000002.segment", data_dir / FIRST_FILE)

    places, _, texts = look(data_dir)
    assert places == [("damage", FIRST_FILE, 0, 14_848), ("damage", FIRST_FILE, None, 14_848)]
    assert texts[0] == "the chunk at offset 0 belongs to another segment"
    assert "has stream 2, streamlet 0, entry 0, group 1, segment 1 instead of stream 1, streamlet 0," in texts[1]


def test_a_file_set_aside_is_a_warning_that_names_its_segment(data_dir: Path) -> None:
    aside = data_dir / "log/set-aside"
    aside.mkdir()
    shutil.copy(data_dir / FIRST_FILE, aside / "000000000007.segment")
    (aside / "000000000008.segment").write_bytes(b"?")

    places, whole, texts = look(data_dir)
    assert whole == WHOLE
    assert places == [("warning", f"log/set-aside/00000000000{number}.segment", None, 0) for number in (7, 8)]
    assert texts[0].endswith("it has stream 1, streamlet 0, entry 0, group 1, segment 1")
    assert texts[1].endswith("it has no whole chunk")


@pytest.mark.parametrize(
    "name", ["000000/000000000009.segment", "000001/000000000002.segment", "000000/notes", "000000/1.segment", "notes"]
)
def test_a_file_that_no_record_names_is_a_warning(data_dir: Path, name: str) -> None:
    path = data_dir / "log/segments" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")

    assert look(data_dir) == (
        [("warning", f"log/segments/{name}", None, 0)],
        WHOLE,
        ["no record of the index names it"],
    )


def test_foreign_files_among_those_of_a_broker_are_warnings(data_dir: Path) -> None:
    names = [f"log/{folder}/{name}" for folder in ("arriving", "spare") for name in ("000000000007.segment", "notes")]
    for name in names:
        (data_dir / name).parent.mkdir(exist_ok=True)
        (data_dir / name).touch()

    places, _, texts = look(data_dir)
    assert places == [("warning", name, None, 0) for name in names if name.endswith("notes")]
    assert texts == ["not a file of a broker; it is left alone"] * 2


def test_a_file_with_a_pending_removal_has_no_findings(data_dir: Path) -> None:
    (data_dir / "log/segments/000000/000000000009.segment").touch()
    change_index(data_dir, lambda _: [put_removal(9)])

    assert look(data_dir) == ([], WHOLE, [])


@pytest.mark.parametrize(("crc", "findings"), [(12345, [("warning", FIRST_FILE, None, 14_848)]), (0, [])])
def test_a_wrong_checksum_in_the_index_is_a_warning_and_a_missing_one_has_no_findings(
    data_dir: Path, crc: int, findings: list[tuple[str, str, int | None, int]]
) -> None:
    change_index(data_dir, lambda index: [put_segment(FIRST, record_of(index, FIRST)._replace(crc32c=crc))])

    assert look(data_dir)[:2] == (findings, WHOLE)


def test_missing_records_of_an_entry_are_found(data_dir: Path) -> None:
    change_index(data_dir, lambda _: [delete_segment(FIRST)])
    assert look(data_dir)[0] == [
        ("damage", "log/index/data.mdb", None, 0),
        ("warning", FIRST_FILE, None, 0),
    ]


@pytest.mark.parametrize(
    ("first_record", "text"),
    [(200, "records 192 to 199 are missing before"), (190, "records 190 to 191 are there twice: in")],
)
def test_gaps_and_overlaps_of_ordinals_are_found(data_dir: Path, first_record: int, text: str) -> None:
    change_index(
        data_dir,
        lambda index: [put_segment(SECOND, record_of(index, SECOND)._replace(first_record=first_record))],
    )

    places, _, texts = look(data_dir)
    assert places[0] == ("damage", "log/segments/000000/000000000004.segment", None, 0)
    assert texts[0].startswith(text)


def test_damage_in_an_open_segment_is_distinguished_from_an_unfinished_write(tmp_path: Path) -> None:
    sample.write(tmp_path / "broker", clean=False)
    assert look(tmp_path / "broker") == ([], (3, 20, 576, 41_984), [])

    path = tmp_path / "broker" / "log/segments/000000/000000000003.segment"
    with path.open("r+b") as file:
        file.seek(3136 + 130)
        file.write(b"?")
        file.seek(12_288)
        file.write(b"half a chunk")
    places, _, texts = look(tmp_path / "broker")
    assert places == [
        ("damage", "log/segments/000000/000000000003.segment", 3136, 1600),
        ("warning", "log/segments/000000/000000000003.segment", 12_288, 12),
    ]
    assert texts[1] == "a write that was not finished; the next start cuts it"


def test_whole_chunks_behind_an_apparently_unfinished_write_are_damage(tmp_path: Path) -> None:
    sample.write(tmp_path / "broker", clean=False, ticked=False)
    path = tmp_path / "broker" / "log/segments/000000/000000000003.segment"
    with path.open("r+b") as file:
        for offset in (4736, 8384):  # the last two chunks, placed again as chunks of one commit
            view = memoryview(bytearray(path.read_bytes()))
            header = verify_header(view, offset)
            place_chunk(view, offset, Placement(1, 2, 0, header.first_record, header.broker_epoch, 3136))
            file.seek(offset)
            file.write(view[offset : offset + HEADER_BYTES])
            file.flush()
        file.seek(4736 + 130)
        file.write(b"?")

    assert look(tmp_path / "broker")[::2] == (
        [("damage", "log/segments/000000/000000000003.segment", 4736, 12_288 - 4736)],
        ["a write that was not finished, or damage: 1 whole chunks follow; the next start cuts it"],
    )
