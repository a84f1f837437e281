"""Reads standard input as blocks of whole lines, without blocking the event loop.

A daemon thread reads, because blocking reads are the only way that works for a terminal, a pipe and a file alike;
Ctrl-C leaves the thread behind. It reads at most a few blocks ahead, so that a fast input does not fill the memory of a
slow producer.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
from collections.abc import AsyncIterator

from kera.core.errors import RecordTooLarge

READ_BYTES = 1 << 20
"""10,000 lines of 100 bytes: enough to make the cost per block negligible, and they still fit into the cache."""
BLOCKS_AHEAD_MAX = 4
LINE_BYTES_MAX = 64 << 20
"""More than the largest record has, even when written as JSON; a longer line must not fill the memory."""


async def line_blocks(
    fd: int, *, read_bytes: int = READ_BYTES, line_bytes_max: int = LINE_BYTES_MAX
) -> AsyncIterator[bytes]:
    """Read `fd` in pieces that end with a newline; the last one may lack it.

    A piece is yielded as soon as it was read, so that lines typed at a terminal are sent one by one. Raises
    `RecordTooLarge` as soon as more than `line_bytes_max` bytes of a line have been read.
    """
    rest: list[bytes] = []  # the beginning of a line that is not complete yet
    size = 0  # bytes of `rest`
    lines = 0
    async for block in _blocks(fd, read_bytes):
        end = block.rfind(b"\n") + 1
        if end == 0:
            rest.append(block)
            size += len(block)
            if size > line_bytes_max:
                raise RecordTooLarge(
                    f"line {lines + 1} of standard input has more than {line_bytes_max >> 20} MiB, and no record may",
                    line=lines + 1,
                    limit=line_bytes_max,
                )
            continue
        lines += block.count(b"\n")
        yield b"".join([*rest, block[:end]])
        rest = [block[end:]] if end < len(block) else []
        size = len(block) - end
    if rest:
        yield b"".join(rest)


async def _blocks(fd: int, read_bytes: int) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(BLOCKS_AHEAD_MAX)

    def read() -> None:
        with contextlib.suppress(OSError):  # only a pipe has a buffer size; a larger one saves system calls
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, read_bytes)
        while room.acquire():
            try:
                item: bytes | OSError = os.read(fd, read_bytes)
            except OSError as error:
                item = error
            try:
                loop.call_soon_threadsafe(queue.put_nowait, item)
            except RuntimeError:
                return  # the loop is closed
            if not item or isinstance(item, OSError):
                return

    threading.Thread(target=read, name="kera-stdin", daemon=True).start()
    while True:
        item = await queue.get()
        if isinstance(item, OSError):
            raise item
        if not item:
            return
        yield item
        room.release()
