"""The files of fenced epochs."""

from pathlib import Path

import pytest

from kera.backup.fences import NAME, NAMES, check_fences, load_fences, store_fences
from kera.core.errors import StartError

DAMAGES = [b"", b"{", b"[" * 4096, b"[]", b"{}", b"\xff", b'{"format": 1, "fences": [], "crc32c": "0"}']


@pytest.fixture
def tmp_path(in_memory: Path) -> Path:
    return in_memory


def test_fences_outlive_the_process(tmp_path: Path) -> None:
    assert load_fences(tmp_path) == {}
    store_fences(tmp_path, {3: 1 << 40})
    store_fences(tmp_path, {3: 1 << 40, 7: 2})

    assert load_fences(tmp_path) == {3: 1 << 40, 7: 2}
    assert {path.name for path in tmp_path.iterdir()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", [*DAMAGES, None])
def test_a_damaged_or_missing_file_is_rewritten_from_the_other(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    store_fences(tmp_path, {3: 7})
    path = tmp_path / name
    whole = path.read_bytes()
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert check_fences(tmp_path) == (
        ({}, [path]) if content is None else ({path: check_fences(tmp_path)[0][path]}, [])
    )

    assert load_fences(tmp_path) == {3: 7}
    assert path.read_bytes() == whole
    assert check_fences(tmp_path) == ({}, [])


@pytest.mark.parametrize("content", DAMAGES)
def test_two_damaged_files_stop_the_start_with_an_error_that_names_both(tmp_path: Path, content: bytes) -> None:
    for name in NAMES:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(StartError, match=rf"{NAMES[0]} and .*{NAMES[1]}: .*restore one of .*, or remove both"):
        load_fences(tmp_path)


def test_the_higher_epoch_in_two_files_holds_for_each_broker(tmp_path: Path) -> None:
    """A process that ends between the two writes leaves a newer and an older file."""
    store_fences(tmp_path, {3: 7, 5: 1})
    newer = (tmp_path / NAME).read_bytes()
    store_fences(tmp_path, {3: 6, 4: 2})
    (tmp_path / NAME).write_bytes(newer)
    assert load_fences(tmp_path) == {3: 7, 4: 2, 5: 1}


def test_missing_files_of_a_backup_with_replicas_are_reported_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_fences(tmp_path, has_replicas=True) == {}
    assert "there are replicas and no fences" in "".join(capsys.readouterr())
    assert {path.name for path in tmp_path.iterdir()} == set(NAMES)
    load_fences(tmp_path, has_replicas=True)
    assert "no fences" not in "".join(capsys.readouterr())


def test_a_changed_digit_fails_the_checksum_and_the_other_file_is_used(tmp_path: Path) -> None:
    store_fences(tmp_path, {3: 7})
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes().replace(b"7", b"6", 1))
    assert check_fences(tmp_path)[0] == {path: "it does not match its checksum"}
    assert load_fences(tmp_path) == {3: 7}


def test_a_file_of_a_newer_version_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kera.backup.fences.FORMAT", 2)
    store_fences(tmp_path, {3: 7})
    monkeypatch.undo()
    with pytest.raises(StartError, match="has format 2"):
        load_fences(tmp_path)
