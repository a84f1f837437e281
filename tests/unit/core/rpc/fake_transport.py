"""A transport without a network: a test plays the network."""

import asyncio
from collections.abc import Iterable
from typing import Any

from kera.core.rpc.frames import FrameProtocol


class FakeTransport(asyncio.Transport):
    """Remembers the calls of the protocol."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1234), "socket": self})
        self.family = 0  # the family of the pretended socket
        self.written = bytearray()
        self.reading = True
        self.closed = False
        self.unsent_bytes = 0

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.written += b"".join(list_of_data)

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def setsockopt(self, *_: int) -> None:
        """Like the socket's method."""


def feed(protocol: FrameProtocol, data: bytes, splits: Iterable[int] = ()) -> int:
    """Have `data` arrive in pieces that end at `splits`, as a loop would; returns the number of bytes taken.

    A loop offers the kernel's bytes, and the protocol's buffer may take fewer; the loop stops when the protocol asks.
    """
    transport: Any = protocol._transport
    at = 0
    for end in [*sorted(splits), len(data)]:
        while at < end:
            if not transport.reading or transport.closed:
                return at
            buffer = protocol.get_buffer(-1)
            assert len(buffer) > 0, "a loop takes an empty buffer for a defect"
            taken = min(len(buffer), end - at)
            buffer[:taken] = data[at : at + taken]
            at += taken
            protocol.buffer_updated(taken)
    return at
