"""Files of the log, with direct I/O and through the page cache."""

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from kera.broker.storage.disk import BLOCK_BYTES, LocalDisk, block_ceiling, block_floor
from kera.core.base.blocks import FileCalls


def blocks(*fills: bytes) -> memoryview:
    """Memory on page boundaries, like that of slots."""
    view = memoryview(mmap.mmap(-1, BLOCK_BYTES * max(1, len(fills))))
    for index, fill in enumerate(fills):
        view[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES] = fill * BLOCK_BYTES
    return view[: BLOCK_BYTES * len(fills)]


@pytest.fixture(params=["direct", "cached"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> LocalDisk:
    """A disk with direct I/O, if the file system of the tests has it, or through the page cache."""
    disk = LocalDisk(tmp_path)
    if request.param == "cached":
        disk.direct = 0
    return disk


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "segments" / "000000" / "a.segment"


def content(disk: LocalDisk, path: Path, count: int) -> list[bytes]:
    """The first byte of each block that a read of `count` blocks gives."""
    into = blocks(*[b"?"] * count)
    length = disk.read(path, 0, into)
    assert length % BLOCK_BYTES == 0
    return [bytes(into[at : at + 1]) for at in range(0, length, BLOCK_BYTES)]


@pytest.mark.parametrize(
    ("offset", "floor", "ceiling"), [(0, 0, 0), (1, 0, 4096), (4096, 4096, 4096), (4097, 4096, 8192)]
)
def test_offsets_are_rounded_to_blocks(offset: int, floor: int, ceiling: int) -> None:
    assert (block_floor(offset), block_ceiling(offset)) == (floor, ceiling)


def test_written_blocks_are_read_back(disk: LocalDisk, path: Path) -> None:
    disk.create(path, 4 * BLOCK_BYTES)
    disk.write(path, BLOCK_BYTES, blocks(b"b", b"c"))
    disk.write(path, 0, blocks(b"a"))

    assert content(disk, path, 4) == [b"a", b"b", b"c", b"\0"]
    assert disk.length(path) == 4 * BLOCK_BYTES


def test_a_read_returns_existing_blocks_and_their_length(disk: LocalDisk, path: Path) -> None:
    disk.create(path, 0)
    disk.write(path, 0, blocks(b"a", b"b"))
    into = blocks(b"?", b"?", b"?")

    assert disk.read(path, BLOCK_BYTES, into) == BLOCK_BYTES
    assert bytes(into[:BLOCK_BYTES]) == b"b" * BLOCK_BYTES
    assert disk.read(path, 2 * BLOCK_BYTES, into) == 0


def test_a_file_that_does_not_end_with_a_block_is_read_to_its_end(disk: LocalDisk, path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * (BLOCK_BYTES + 100))

    assert disk.read(path, 0, blocks(b"?", b"?", b"?")) == BLOCK_BYTES + 100


def test_room_is_reserved_when_a_file_is_created(disk: LocalDisk, path: Path) -> None:
    disk.create(path, 16 * BLOCK_BYTES)

    assert path.stat().st_blocks * 512 >= 16 * BLOCK_BYTES
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_created_again_is_empty(disk: LocalDisk, path: Path) -> None:
    disk.create(path, BLOCK_BYTES)
    disk.write(path, 0, blocks(b"a"))
    disk.create(path, BLOCK_BYTES)

    assert content(disk, path, 1) == [b"\0"]


def test_a_file_without_room_is_not_created(tmp_path: Path, path: Path) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk = LocalDisk(tmp_path, FileCalls(reserve=fail))
    with pytest.raises(OSError, match="No space"):
        disk.create(path, BLOCK_BYTES)

    assert disk.names(path.parent) == []


def test_truncating_a_file_removes_the_blocks_behind_the_new_length(disk: LocalDisk, path: Path) -> None:
    disk.create(path, 4 * BLOCK_BYTES)
    disk.write(path, 0, blocks(b"a", b"b"))
    disk.truncate(path, BLOCK_BYTES)

    assert content(disk, path, 4) == [b"a"]
    assert disk.length(path) == BLOCK_BYTES


def test_a_removed_file_is_gone_and_removing_it_again_is_no_error(disk: LocalDisk, path: Path) -> None:
    disk.create(path, 0)
    assert disk.names(path.parent) == ["a.segment"]
    disk.remove(path)
    disk.remove(path)

    assert disk.names(path.parent) == []


def test_names_are_sorted_and_a_missing_directory_has_none(disk: LocalDisk, tmp_path: Path) -> None:
    for name in "cab":
        disk.create(tmp_path / "d" / name, 0)

    assert disk.names(tmp_path / "d") == ["a", "b", "c"]
    assert disk.names(tmp_path / "nowhere") == []


def test_using_a_missing_file_is_an_error(disk: LocalDisk, path: Path) -> None:
    for use in (
        lambda: disk.read(path, 0, blocks(b"?")),
        lambda: disk.write(path, 0, blocks(b"?")),
        lambda: disk.truncate(path, 0),
        lambda: disk.length(path),
    ):
        with pytest.raises(FileNotFoundError):
            use()


# --- around the page cache, or not -------------------------------------------------------------------------


def test_a_file_system_without_direct_io_is_written_through_the_page_cache(tmp_path: Path, path: Path) -> None:
    flags = list[int]()

    def refuse(name: Any, how: int, *rest: Any) -> int:
        flags.append(how)
        if how & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.open(name, how, *rest)

    disk = LocalDisk(tmp_path, FileCalls(open=refuse))
    assert flags[0] & os.O_DIRECT
    disk.create(path, BLOCK_BYTES)
    disk.write(path, 0, blocks(b"a"))

    assert disk.direct == 0
    assert content(disk, path, 1) == [b"a"]
    assert [found.name for found in tmp_path.iterdir()] == ["segments"], "nothing is left of the attempt"


def test_other_errors_of_the_attempt_at_direct_io_are_raised(tmp_path: Path) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with pytest.raises(PermissionError):
        LocalDisk(tmp_path, FileCalls(open=refuse))


def test_a_short_write_is_continued(tmp_path: Path, path: Path) -> None:
    disk = LocalDisk(tmp_path, FileCalls(write=lambda fd, data, *rest: os.pwritev(fd, [data[0][:BLOCK_BYTES]], *rest)))
    disk.create(path, 0)
    disk.write(path, 0, blocks(b"a", b"b", b"c"))

    assert content(disk, path, 3) == [b"a", b"b", b"c"]


def test_a_write_that_ends_inside_a_block_means_a_full_disk(tmp_path: Path, path: Path) -> None:
    disk = LocalDisk(tmp_path, FileCalls(write=lambda *_: 100))
    if not disk.direct:
        pytest.skip("the file system of the tests does not write around the page cache")
    disk.create(path, 0)
    with pytest.raises(OSError, match="No space") as raised:
        disk.write(path, 0, blocks(b"a"))

    assert raised.value.errno == errno.ENOSPC
