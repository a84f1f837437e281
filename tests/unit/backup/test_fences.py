"""The file of fenced epochs."""

from pathlib import Path

import pytest

from kera.backup.fences import NAME, load_fences, store_fences
from kera.core.errors import StartError


def test_fences_outlive_the_process(tmp_path: Path) -> None:
    assert load_fences(tmp_path) == {}
    store_fences(tmp_path, {3: 1 << 40})
    store_fences(tmp_path, {3: 1 << 40, 7: 2})

    assert load_fences(tmp_path) == {3: 1 << 40, 7: 2}
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b'{"format": 1, "fences": [], "crc32c": "0"}'])
def test_a_damaged_file_stops_the_start_and_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(StartError, match=NAME):
        load_fences(tmp_path)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    store_fences(tmp_path, {3: 7})
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes().replace(b"7", b"6", 1))
    with pytest.raises(StartError, match="does not match its checksum"):
        load_fences(tmp_path)


def test_a_file_of_a_newer_version_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kera.backup.fences.FORMAT", 2)
    store_fences(tmp_path, {3: 7})
    monkeypatch.undo()
    with pytest.raises(StartError, match="has format 2"):
        load_fences(tmp_path)
