"""The log file of one disk, on a real file system, with direct I/O and through the page cache."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kera.backup.log_file import LogFile, aligned
from kera.core.base.blocks import BLOCK_BYTES, FileCalls
from kera.core.errors import StartError

OpenFile = Callable[..., LogFile]


@pytest.fixture(params=["direct", "cached"])
def open_file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenFile]:
    with contextlib.ExitStack() as opened:

        def open_file(**how: Any) -> LogFile:
            file = LogFile(tmp_path / "a" / "b", direct=request.param == "direct", **how)
            opened.callback(file.close)
            return file

        yield open_file


@pytest.fixture
def file(open_file: OpenFile) -> LogFile:
    return open_file()


def blocks(*fills: bytes) -> memoryview:
    view = aligned(BLOCK_BYTES * len(fills))
    view[:] = b"".join(fill * BLOCK_BYTES for fill in fills)
    return view


def content(file: LogFile, first: int, count: int) -> list[bytes]:
    """The first byte of each block that the file has."""
    into = blocks(*[b"?"] * count)
    length = file.read(first * BLOCK_BYTES, into)
    return [bytes(into[at : at + 1]) for at in range(0, length, BLOCK_BYTES)]


def test_pieces_of_a_write_are_read_back(file: LogFile) -> None:
    file.write(BLOCK_BYTES, [blocks(b"a"), blocks(b"b", b"c")])
    file.sync()

    assert content(file, 0, 9) == [b"\0", b"a", b"b", b"c"]


def test_all_new_directories_are_made_durable(tmp_path: Path) -> None:
    synced: list[Path] = []

    def sync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())

    (tmp_path / "a").mkdir()
    directory = tmp_path / "a" / "b" / "c" / "d"
    LogFile(directory, calls=FileCalls(sync=sync)).close()
    assert set(synced) == {directory, *directory.parents[:3]}
    del synced[:]
    LogFile(directory, calls=FileCalls(sync=sync)).close()
    assert synced == [directory]


@pytest.mark.parametrize("replaced", [True, False])
def test_syncing_a_removed_or_replaced_file_fails(file: LogFile, tmp_path: Path, replaced: bool) -> None:
    path, aside = Path(file.name), tmp_path / "aside"
    path.rename(aside)
    if replaced:
        path.write_bytes(b"")
    file.write(0, [blocks(b"a")])
    with pytest.raises(OSError, match="removed or replaced while the backup runs; put it back, or restart the backup"):
        file.sync()

    aside.replace(path)
    file.sync()


def test_a_short_write_is_continued(open_file: OpenFile) -> None:
    def slowly(fd: int, pieces: list[Any], offset: int) -> int:
        return os.pwritev(fd, [pieces[0][:BLOCK_BYTES]], offset)

    file = open_file(calls=FileCalls(write=slowly))
    file.write(0, [blocks(b"a", b"b"), blocks(b"c")])

    assert content(file, 0, 9) == [b"a", b"b", b"c"]


def test_a_write_that_ends_inside_a_block_means_a_full_disk(
    open_file: OpenFile, request: pytest.FixtureRequest
) -> None:
    if "cached" in request.node.name:
        pytest.skip("the page cache takes any length")
    file = open_file(calls=FileCalls(write=lambda *_: 100))
    with pytest.raises(OSError, match="No space") as raised:
        file.write(0, [blocks(b"a")])

    assert raised.value.errno == errno.ENOSPC


def test_punched_room_is_a_hole_in_the_file(file: LogFile) -> None:
    file.write(0, [blocks(*[b"a"] * 16)])
    file.sync()
    before = Path(file.name).stat()
    file.punch(4 * BLOCK_BYTES, 8 * BLOCK_BYTES)
    file.sync()
    after = Path(file.name).stat()

    assert content(file, 3, 3) == [b"a", b"\0", b"\0"]
    assert after.st_size == before.st_size
    assert after.st_blocks < before.st_blocks
    assert [file.next_data(number * BLOCK_BYTES) for number in (3, 5, 16)] == [
        3 * BLOCK_BYTES,
        12 * BLOCK_BYTES,
        None,
    ]


@pytest.mark.parametrize(("code", "fails"), [(errno.EOPNOTSUPP, False), (errno.EIO, True)])
def test_punching_fails_on_an_io_error_but_not_without_support_for_holes(
    open_file: OpenFile, code: int, fails: bool
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    file = open_file(punch_hole=refuse)
    if fails:
        with pytest.raises(OSError, match="Input/output"):
            file.punch(0, BLOCK_BYTES)
    else:
        file.punch(0, BLOCK_BYTES)


def test_the_file_reports_free_and_total_bytes(file: LogFile) -> None:
    assert 0 < file.free_bytes() <= file.total_bytes()


def test_a_directory_in_use_by_another_backup_is_refused(file: LogFile) -> None:
    with pytest.raises(StartError, match="another backup uses"):
        LogFile(Path(file.name).parent)
