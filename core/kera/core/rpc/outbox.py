"""What a connection sends: frames that go together, and whether the peer takes them.

A frame without bulk may wait for others: a system call each would cost as much as handling them. Only those are
gathered, and few bytes: what a peer does not take has to be seen by the transport. When to `flush` what is left is up
to whoever writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kera.core.rpc.limits import SEND_BUFFER_BYTES_MAX

GATHERED_BYTES_MAX = 64 << 10
"""Of frames that are sent together."""


class Outbox:
    """The frames of one connection on their way; they overtake each other nowhere."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stalled_s: float, stalled: Callable[[int], None]) -> None:
        """`stalled` is called with the bytes that are unsent when the peer has taken none of them for `stalled_s`."""
        self._loop = loop
        self._stalled_s = stalled_s
        self._stalled = stalled
        self._transport: asyncio.Transport | None = None
        self._gathered: list[bytes] = []  # go with the next frame, or when they are flushed
        self._gathered_bytes = 0
        self._flushing_soon = False
        self._watching: asyncio.TimerHandle | None = None

    def open(self, transport: asyncio.Transport) -> None:
        """From now on frames go to `transport`."""
        self._transport = transport
        self._bound()

    def end(self) -> None:
        """The connection is gone."""
        self.unwatch()
        self._transport = None

    def _bound(self) -> None:
        """Have the protocol told to pause when too much is unsent, also if it is already."""
        if self._transport is not None:
            self._transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES_MAX)

    @property
    def unsent_bytes(self) -> int:
        """That the peer has not taken, but for those that are gathered."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def empty(self) -> bool:
        """Whether everything has left."""
        return not self._gathered and not self.unsent_bytes

    def write(self, pieces: list[Any]) -> None:
        """Send a frame, or gather it."""
        if len(pieces) == 1:
            self._gathered.append(pieces[0])
            self._gathered_bytes += len(pieces[0])
            if self._gathered_bytes >= GATHERED_BYTES_MAX:
                self.flush()
            return
        self.flush()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(pieces)
            if self.unsent_bytes > SEND_BUFFER_BYTES_MAX:
                self._bound()  # from Python 3.12 on, asyncio's own writelines does not look

    def flush(self) -> None:
        """Send what is gathered."""
        self._flushing_soon = False
        if not self._gathered:
            return
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(gathered[0] if len(gathered) == 1 else b"".join(gathered))

    def flush_soon(self) -> None:
        """Send what is gathered in the loop's next round: more may come until then."""
        if self._gathered and not self._flushing_soon:
            self._flushing_soon = True
            self._loop.call_soon(self.flush)

    def watch(self) -> None:
        """See whether the peer takes anything of what is unsent now."""
        self.unwatch()
        self._watching = self._loop.call_later(self._stalled_s, self._look, self.unsent_bytes)

    def unwatch(self) -> None:
        """The peer takes what is sent, or is gone."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def _look(self, before: int) -> None:
        if self.unsent_bytes < before:
            self.watch()
        else:
            self._stalled(before)
