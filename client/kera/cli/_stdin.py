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

READ_BYTES = 1 << 20
"""10,000 lines of 100 bytes: the cost per block vanishes among them, and they still fit into the cache."""
BLOCKS_AHEAD_MAX = 4


async def line_blocks(fd: int, *, read_bytes: int = READ_BYTES) -> AsyncIterator[bytes]:
    """What is read from `fd`, in pieces that end with a newline; the last one may lack it.

    A piece comes as soon as it is there, so that lines typed at a terminal go out one by one.
    """
    rest: list[bytes] = []  # of a line that is not complete yet
    async for block in _blocks(fd, read_bytes):
        end = block.rfind(b"\n") + 1
        if end == 0:
            rest.append(block)
            continue
        yield b"".join([*rest, block[:end]])
        rest = [block[end:]] if end < len(block) else []
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
