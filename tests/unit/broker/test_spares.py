"""Spares: new segments reuse the files of removed ones, and neither is mistaken for the other."""

import errno
import mmap
from pathlib import Path
from random import Random

import pytest

from kera.broker.storage import spares
from kera.broker.storage.disk import BLOCK_BYTES, Disk, LocalDisk
from kera.broker.storage.spares import Spares
from tests.property.log_world import Crash, SimulatedDisk


@pytest.fixture(params=["direct", "cached", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    """The real disk, around the page cache and through it, and the simulated disk."""
    if request.param == "simulated":
        return SimulatedDisk(Random(1))
    disk = LocalDisk(tmp_path)
    if request.param == "cached":
        disk.direct = 0
    return disk


def aligned(fill: bytes, blocks: int) -> memoryview:
    """Memory on page boundaries, as slots have it."""
    view = memoryview(mmap.mmap(-1, blocks * BLOCK_BYTES))
    view[:] = fill * len(view)
    return view


class Files:
    """A directory of segments, and one of spares."""

    def __init__(self, root: Path, disk: Disk) -> None:
        self.disk = disk
        self.folder = root / "segments" / "000000"
        self.spare = root / "spare"
        self.spares = Spares(self.spare, disk, bytes_min=2 * BLOCK_BYTES)

    def write(self, name: str, fill: bytes, blocks: int) -> None:
        self.spares.write(self.folder / name, aligned(fill, blocks))

    def remove(self, name: str) -> None:
        self.spares.remove(self.folder / name)

    def content(self, name: str) -> bytes:
        """The content of a segment's file: a byte for each block."""
        into = aligned(b"?", 16)
        length = self.disk.read(self.folder / name, 0, into)
        assert length == self.disk.length(self.folder / name)
        return bytes(into[:length:BLOCK_BYTES])

    def names(self) -> tuple[list[str], list[str]]:
        """The names of segments, and of spares."""
        return self.disk.names(self.folder), self.disk.names(self.spare)


@pytest.fixture
def files(tmp_path: Path, disk: Disk) -> Files:
    return Files(tmp_path, disk)


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_a_removed_file_is_reused_and_keeps_none_of_its_old_content(files: Files, blocks: int) -> None:
    files.write("a", b"a", 3)
    files.remove("a")
    assert files.names() == ([], ["a"])
    files.write("b", b"b", blocks)

    assert files.names() == (["b"], [])
    assert files.content("b") == b"b" * blocks


def test_small_files_neither_use_nor_become_spares(files: Files) -> None:
    files.write("large", b"a", 2)
    files.remove("large")
    files.write("small", b"b", 1)
    assert files.names() == (["small"], ["large"])
    files.remove("small")
    files.remove("small")

    assert files.names() == ([], ["large"])


def test_the_bytes_of_spares_are_limited(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "SPARES_BYTES_MAX", 5 * BLOCK_BYTES)
    for name in "abc":
        files.write(name, b"x", 2)
    for name in "abc":
        files.remove(name)

    assert files.names() == ([], ["a", "b"])
    files.spares.clear()
    assert files.names() == ([], [])


def test_a_start_uses_the_spares_it_finds_and_leaves_other_files(files: Files, tmp_path: Path) -> None:
    for name in ("00000000000a.segment", "notes"):
        files.write(name, b"a", 2)
        files.remove(name)
    again = Files(tmp_path, files.disk)
    again.write("b", b"b", 2)
    again.write("c", b"c", 2)
    again.spares.clear()

    assert again.names() == (["b", "c"], ["notes"])


def test_a_failed_write_leaves_no_file(tmp_path: Path) -> None:
    disk = SimulatedDisk(Random(1))
    files = Files(tmp_path, disk)
    files.write("a", b"a", 2)
    files.remove("a")
    disk.fail.append(errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        files.write("b", b"b", 2)

    assert files.names() == ([], [])


@pytest.mark.parametrize("steps", [1, 2])
def test_a_write_that_a_crash_cuts_off_leaves_no_segment_file(tmp_path: Path, steps: int) -> None:
    disk = SimulatedDisk(Random(1))
    files = Files(tmp_path, disk)
    files.write("a", b"a", 2)
    files.remove("a")
    disk.crash_in = steps
    with pytest.raises(Crash):
        files.write("b", b"b", 2)

    assert files.names() == ([], ["a"])
    again = Files(tmp_path, disk)
    again.write("c", b"c", 2)
    assert again.content("c") == b"cc"
