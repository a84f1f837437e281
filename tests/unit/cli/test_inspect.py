"""`kera inspect`: segments and chunks of a data directory, as a table and as JSON."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from scripts import sample_data_dir as sample

from kera.broker.registration import BrokerDirectory
from kera.cli._run import run_app
from kera.cli.app import app
from kera.core.format.chunk import Placement, place_chunk, verify_chunk
from kera.core.format.punctuation import encode_punctuation

SAMPLE = Path(__file__).parents[2] / "data" / "broker-format-2"
FIRST_FILE = "log/segments/000000/000000000001.segment"


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "broker"))


@pytest.fixture
def open_dir(tmp_path: Path) -> Path:
    """A data directory with a segment that is still open."""
    sample.write(tmp_path / "open", clean=False)
    return tmp_path / "open"


def inspect(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> list[dict[str, Any]]:
    assert run_app(app, ["inspect", str(path), "--json", *arguments]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


def test_segments_are_listed_in_the_order_of_the_log(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["inspect", str(data_dir)]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()

    assert heading.split("  ")[0] == "STREAM"
    assert [row.split()[:11] for row in rows] == [
        ["1", "0", "0", "1", "1", "000000000001.segment", "closed", "8", "192", "14848", "0"],
        ["1", "0", "0", "1", "2", "000000000004.segment", "closed", "4", "192", "12288", "192"],
        ["2", "0", "0", "1", "1", "000000000002.segment", "closed", "8", "192", "14848", "0"],
        ["2", "0", "0", "1", "2", "000000000003.segment", "closed", "4", "192", "12288", "192"],
    ]


def test_stream_selects_the_segments_of_one_stream(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {segment["stream_id"] for segment in inspect(capsys, data_dir, "--stream", "2")} == {2}
    assert inspect(capsys, data_dir, "--stream", "9") == []
    assert run_app(app, ["inspect", str(data_dir), "--stream", "9"]) == 0
    assert capsys.readouterr() == ("", "no segments\n")


def test_the_json_output_has_full_paths_and_timestamps(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(capsys, data_dir)[0] == {
        "stream_id": 1,
        "streamlet_id": 0,
        "entry": 0,
        "group_id": 1,
        "segment_id": 1,
        "path": str(data_dir / FIRST_FILE),
        "state": "closed",
        "chunks": 8,
        "records": 192,
        "length_bytes": 14848,
        "first_record": 0,
        "min_timestamp_us": sample.START_US,
        "max_timestamp_us": sample.START_US + 7_000_037,
    }


def test_the_length_of_an_open_segment_comes_from_its_file(open_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *_, last = inspect(capsys, open_dir)

    assert (last["state"], last["chunks"], last["records"], last["length_bytes"]) == ("open", 4, 192, 12288)
    assert last["max_timestamp_us"] == sample.START_US + 11_000_053


@pytest.mark.parametrize("chunks", [False, True])
def test_a_segment_without_its_file_is_missing(
    data_dir: Path, capsys: pytest.CaptureFixture[str], chunks: bool
) -> None:
    (data_dir / FIRST_FILE).unlink()

    first, *rest = inspect(capsys, data_dir, *["--chunks"] * chunks)
    assert first["state"] == "missing"
    assert {segment["state"] for segment in rest} == {"closed"}


def test_chunks_are_listed_with_their_damage(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (data_dir / FIRST_FILE).open("r+b") as file:
        for offset in (1216 + 140, 4480 + 16):
            file.seek(offset)
            file.write(b"?")

    chunks = inspect(capsys, data_dir, "--stream", "1", "--chunks")[0]["chunk_list"]
    assert [chunk["offset"] for chunk in chunks] == [0, 1216, 2752, 4480, 5824, 8064, 10496, 11968]
    assert [chunk["sequence"] for chunk in chunks] == [0, 1, 2, None, 4, 5, 6, 7], "that header cannot be trusted"
    assert [chunk["offset"] for chunk in chunks if chunk["damage"]] == [1216, 4480]
    assert chunks[0] == {
        "offset": 0,
        "producer_id": 41,
        "producer_epoch": 0,
        "sequence": 0,
        "records": 10,
        "length_bytes": 1216,
        "min_timestamp_us": sample.START_US,
        "max_timestamp_us": sample.START_US + 9,
        "damage": None,
    }

    assert run_app(app, ["inspect", str(data_dir), "--chunks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("STREAM ")
    assert lines[3].startswith("OFFSET  PRODUCER  EPOCH  SEQUENCE")
    assert lines[5].split()[:6] == ["1216", "41", "0", "1", "14", "1536"]
    assert "damaged: chunk payload at offset 1216 does not match its checksum" in lines[5]
    assert lines[7].split()[:6] == ["4480", "-", "-", "-", "-", "1344"]
    assert lines[8].endswith("  ok")


def test_an_unfinished_write_is_shown_as_damage(open_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (open_dir / "log/segments/000000/000000000003.segment").open("r+b") as file:
        file.seek(12_288)
        file.write(b"half a chunk")

    *_, last = inspect(capsys, open_dir, "--chunks")
    assert last["chunk_list"][-1] == {
        **dict.fromkeys(last["chunk_list"][-1]),
        "offset": 12_288,
        "length_bytes": 12,
        "damage": "no chunk at offset 12288: magic is b'half'",
    }


def test_a_single_segment_file_is_inspected_without_an_index(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.segment"
    shutil.copy(data_dir / FIRST_FILE, path)

    (segment,) = inspect(capsys, path, "--chunks")
    assert (segment["stream_id"], segment["group_id"], segment["segment_id"]) == (1, 1, 1)
    assert (segment["path"], segment["state"]) == (str(path), None)
    assert len(segment["chunk_list"]) == segment["chunks"] == 8


def test_a_punctuation_is_not_reported_as_damage(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.segment"
    data = bytearray((data_dir / FIRST_FILE).read_bytes())
    first = verify_chunk(data)
    punctuation = bytearray(encode_punctuation(first.stream_id, first.streamlet_id, 1_700_000_000_000_000, 5))
    place_chunk(punctuation, 0, Placement(*first[-7:-1]))
    path.write_bytes(punctuation + data)

    (segment,) = inspect(capsys, path, "--chunks")
    chunk = segment["chunk_list"][0]
    assert (chunk["records"], chunk["producer_id"], chunk["damage"]) == (0, None, None)
    assert segment["chunks"] == 9
    assert run_app(app, ["inspect", str(path), "--chunks"]) == 0
    assert capsys.readouterr().out.count("punctuation") == 1


def test_chunks_after_damage_are_found_without_an_index(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = data_dir / FIRST_FILE
    with path.open("r+b") as file:
        for offset in (140, 11_968 + 140):
            file.seek(offset)
            file.write(b"?")

    (segment,) = inspect(capsys, path, "--chunks")
    assert (segment["chunks"], segment["records"]) == (6, 192 - 10 - 38)
    assert [chunk["offset"] for chunk in segment["chunk_list"] if chunk["damage"]] == [0, 11_968]


def test_inspect_works_while_the_broker_runs(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = BrokerDirectory(data_dir)
    assert run_app(app, ["inspect", str(data_dir)]) == 0
    directory.close()

    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 5
    assert shown.err == "kera: note: the broker is running; what is only in its memory is not shown\n"


def test_a_damaged_index_gets_a_warning(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data_dir / "log/index/data.mdb").write_bytes(b"?" * 8192)

    assert run_app(app, ["inspect", str(data_dir)]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "kera: warning: the index is damaged or missing; see kera verify" in shown.err


def test_a_path_that_cannot_be_inspected_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes").write_text("no segment")
    for arguments, says in (
        (["none"], "does not exist"),
        (["."], "is not a broker's data directory: it has no log"),
        (["notes"], "has no chunk: it is not a segment"),
        (["notes", "--stream", "1"], "--stream is for a data directory"),
    ):
        assert run_app(app, ["inspect", str(tmp_path / arguments[0]), *arguments[1:]]) == 2
        assert says in capsys.readouterr().err


def test_inspect_of_a_backup_directory_refers_to_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "backup.json").touch()
    assert run_app(app, ["inspect", str(tmp_path)]) == 2
    assert "kera verify" in capsys.readouterr().err


def test_inspect_does_not_change_the_data_directory(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def state() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in data_dir.rglob("*")}

    before = state()
    inspect(capsys, data_dir, "--chunks")

    assert state() == before
