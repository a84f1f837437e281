"""The limits of stages: the time of this machine for copies, checksums, and turns of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from crc32c import crc32c

from bench.stages.part import MEMORY_BYTES, Load, Samples, now_ns, since


class Memory:
    """The limits: to copy the bytes of a request once, to take the checksum of each chunk, to turn the loop once."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads
        self._target = memoryview(bytearray(MEMORY_BYTES))
        self._target[:] = bytes(MEMORY_BYTES)
        self._at = 0

    async def rounds(self, load: Load, samples: Samples) -> None:
        """See `Part`. The source is as warm as newly received data; the target moves on, as a log does."""
        source = memoryview(bytes(load.chunk_bytes))
        for _ in range(load.requests):
            if self._at + load.size_bytes > MEMORY_BYTES:
                self._at = 0
            begun_ns = now_ns()
            for at in range(self._at, self._at + load.size_bytes, load.chunk_bytes):
                self._target[at : at + load.chunk_bytes] = source
            samples.requests["copy"][load].append(since(begun_ns))
            self._at += load.size_bytes
            begun_ns = now_ns()
            for _ in range(load.chunks):
                crc32c(source)
            samples.requests["crc32c"][load].append(since(begun_ns))
            begun_ns = now_ns()
            await asyncio.sleep(0)
            samples.turns.append(since(begun_ns))
