"""Standard input as blocks of whole lines, without holding up the event loop.

A daemon thread reads, because a terminal, a pipe and a file have nothing else in common; at Ctrl-C it is
simply left behind. It is a few blocks ahead at most, so that a fast input does not fill the memory of a slow
producer.
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
"""10,000 lines of 100 bytes: the cost per block vanishes among them, and they still fit into the cache."""
BLOCKS_AHEAD_MAX = 4
LINE_BYTES_MAX = 64 << 20
"""More than any record may have, also when it is written as JSON: so a line never fills the memory."""


async def line_blocks(
    fd: int, *, read_bytes: int = READ_BYTES, line_bytes_max: int = LINE_BYTES_MAX
) -> AsyncIterator[bytes]:
    """Read `fd` in pieces that end with a newline; the last one may lack it.

    A piece comes as soon as it is there, so that lines typed at a terminal go out one by one. Raises `RecordTooLarge`
    for a line of more than `line_bytes_max` bytes, once so many have been read.
    """
    rest: list[bytes] = []  # of a line that is not complete yet
    size = 0  # of `rest`
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
        with contextlib.suppress(OSError):  # only a pipe has a size; a larger one saves system calls
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, read_bytes)
        while room.acquire():
            try:
                item: bytes | OSError = os.read(fd, read_bytes)
            except OSError as error:
                item = error
            try:
                loop.call_soon_threadsafe(queue.put_nowait, item)
            except RuntimeError:
                return  # the loop is closed: nobody wants it any more
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
