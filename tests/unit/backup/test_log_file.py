"""The file of one disk, on a real file system, around the page cache and through it."""

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
    """The first byte of each block that is there."""
    into = blocks(*[b"?"] * count)
    length = file.read(first * BLOCK_BYTES, into)
    return [bytes(into[at : at + 1]) for at in range(0, length, BLOCK_BYTES)]


def test_what_is_written_in_pieces_is_read(file: LogFile) -> None:
    file.write(BLOCK_BYTES, [blocks(b"a"), blocks(b"b", b"c")])
    file.sync()

    assert content(file, 0, 9) == [b"\0", b"a", b"b", b"c"]


def test_the_names_of_all_directories_that_are_made_are_durable(tmp_path: Path) -> None:
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
def test_nothing_is_durable_in_a_file_that_has_its_name_no_more(file: LogFile, tmp_path: Path, replaced: bool) -> None:
    path, aside = Path(file.name), tmp_path / "aside"
    path.rename(aside)
    if replaced:
        path.write_bytes(b"")
    file.write(0, [blocks(b"a")])
    with pytest.raises(OSError, match="removed or replaced while the backup runs; put it back, or restart the backup"):
        file.sync()

    aside.replace(path)
    file.sync()


def test_a_write_that_takes_several_calls_is_finished(open_file: OpenFile) -> None:
    def slowly(fd: int, pieces: list[Any], offset: int) -> int:
        return os.pwritev(fd, [pieces[0][:BLOCK_BYTES]], offset)

    file = open_file(calls=FileCalls(write=slowly))
    file.write(0, [blocks(b"a", b"b"), blocks(b"c")])

    assert content(file, 0, 9) == [b"a", b"b", b"c"]


def test_a_write_that_ends_inside_a_block_is_an_error_of_a_full_disk(
    open_file: OpenFile, request: pytest.FixtureRequest
) -> None:
    if "cached" in request.node.name:
        pytest.skip("the page cache takes any length")
    file = open_file(calls=FileCalls(write=lambda *_: 100))
    with pytest.raises(OSError, match="No space") as raised:
        file.write(0, [blocks(b"a")])

    assert raised.value.errno == errno.ENOSPC


def test_room_that_is_given_back_is_a_hole(file: LogFile) -> None:
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
def test_a_file_system_without_holes_keeps_the_room(open_file: OpenFile, code: int, fails: bool) -> None:
    def refuse(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    file = open_file(punch_hole=refuse)
    if fails:
        with pytest.raises(OSError, match="Input/output"):
            file.punch(0, BLOCK_BYTES)
    else:
        file.punch(0, BLOCK_BYTES)


def test_the_file_system_says_what_it_has(file: LogFile) -> None:
    assert 0 < file.free_bytes() <= file.total_bytes()


def test_a_directory_is_for_one_backup_alone(file: LogFile) -> None:
    with pytest.raises(StartError, match="another backup uses"):
        LogFile(Path(file.name).parent)
