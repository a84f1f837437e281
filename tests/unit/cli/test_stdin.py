"""`kera.cli._stdin`: blocks of whole lines."""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kera.cli._stdin import BLOCKS_AHEAD_MAX, line_blocks
from kera.core.errors import RecordTooLarge


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        with contextlib.suppress(OSError):
            os.close(fd)


async def test_lines_are_delivered_as_soon_as_they_arrive(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    blocks = line_blocks(reading)

    os.write(writing, b"one\ntwo\nthr")
    assert await anext(blocks) == b"one\ntwo\n"
    os.write(writing, b"ee\n")
    assert await anext(blocks) == b"three\n"
    os.write(writing, b"last")
    os.close(writing)
    assert [block async for block in blocks] == [b"last"]


async def test_blocks_of_a_file_end_with_whole_lines_whatever_the_read_size(tmp_path: Path) -> None:
    text = b"".join(b"%d\n" % 3**n for n in range(200))
    (tmp_path / "lines").write_bytes(text)

    with (tmp_path / "lines").open("rb") as file:
        blocks = [block async for block in line_blocks(file.fileno(), read_bytes=7)]

    assert b"".join(blocks) == text
    assert all(block.endswith(b"\n") for block in blocks)


async def test_a_line_above_the_limit_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"1\n2\n" + b"x" * 1000)

    with (tmp_path / "lines").open("rb") as file:
        blocks = line_blocks(file.fileno(), read_bytes=10, line_bytes_max=100)
        assert await anext(blocks) == b"1\n2\n"
        with pytest.raises(RecordTooLarge, match="line 3 of standard input has more than"):
            await anext(blocks)
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) < 200


async def test_no_input_gives_no_block() -> None:
    with Path(os.devnull).open("rb") as file:
        assert [block async for block in line_blocks(file.fileno())] == []


async def test_reading_ahead_of_a_slow_consumer_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"123456789\n" * 100)

    with (tmp_path / "lines").open("rb") as file:
        blocks = line_blocks(file.fileno(), read_bytes=10)
        await anext(blocks)
        while os.lseek(file.fileno(), 0, os.SEEK_CUR) < 10 * BLOCKS_AHEAD_MAX:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) <= 10 * (BLOCKS_AHEAD_MAX + 1)
        assert len([block async for block in blocks]) == 99


async def test_an_unreadable_input_is_an_error(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            await anext(line_blocks(fd))
    finally:
        os.close(fd)
