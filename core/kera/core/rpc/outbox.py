"""The output of a connection: frames that are sent together, and whether the peer reads them.

A frame without bulk may wait for others, as a system call for each would cost as much as handling them. Only such
frames are gathered, and only few bytes, since bytes that a peer does not read have to be counted. The writer decides
when to `flush`.

A transport that encrypts copies all data that it is given at once, and keeps the copy until the peer reads it:
thousands of peers that read nothing would take gigabytes. So it gets `ENCRYPTED_BYTES_MAX` at a time, and the rest
waits here, as references to the memory of others. While the transport is full, no further requests are answered. It can
also be full of TLS's own messages, if a peer asks for new keys again and again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from kera.core.rpc.limits import SEND_BUFFER_BYTES_MAX

GATHERED_BYTES_MAX = 64 << 10
"""Maximum size of frames that are gathered before they are sent."""
ENCRYPTED_BYTES_MAX = 128 << 10


class Outbox:
    """The frames that one connection sends; they always stay in order."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stalled_s: float,
        stalled: Callable[[int], None],
        *,
        pause: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        """`pause` is called when the peer does not read the output, `resume` when it does again.

        `stalled` is called with the number of unsent bytes if the peer has read none of them for `stalled_s`.
        """
        self._loop = loop
        self._stalled_s = stalled_s
        self._stalled = stalled
        self._pause = pause
        self._resume = resume
        self._transport: asyncio.Transport | None = None
        self._encrypts = False
        self._waiting: deque[memoryview] = deque()  # pieces that wait until a transport that encrypts has room
        self._waiting_bytes = 0
        self._gathered: list[bytes] = []  # frames that go with the next one, or when they are flushed
        self._gathered_bytes = 0
        self._flushing_soon = False
        self._watching: asyncio.TimerHandle | None = None
        self._added_bytes = 0
        """Bytes that were added to `unsent_bytes` since the present watch began."""
        self.paused = False
        """Whether the transport is full: it gets nothing more for now, and no further requests are answered."""

    def open(self, transport: asyncio.Transport) -> None:
        """Send frames to `transport` from now on."""
        self._transport = transport
        self._encrypts = transport.get_extra_info("ssl_object") is not None
        self._bound()

    def close(self) -> None:
        """Close the connection when everything is sent."""
        self.flush()
        if self._transport is not None:
            if self._waiting and not self._transport.is_closing():
                self._transport.writelines(self._waiting)
                self._let_go()
            self._transport.close()

    def end(self) -> None:
        """Note that the connection is gone."""
        self._unwatch()
        self._let_go()
        self._transport = None

    def _bound(self) -> None:
        """Set the limit above which the transport pauses the protocol; this also checks what is unsent already."""
        if self._transport is not None:
            high = ENCRYPTED_BYTES_MAX if self._encrypts else SEND_BUFFER_BYTES_MAX
            self._transport.set_write_buffer_limits(high=high)

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the peer has not read, except those of gathered frames."""
        return self._waiting_bytes + self.given_bytes

    @property
    def given_bytes(self) -> int:
        """The part of `unsent_bytes` that was given to the transport."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    @property
    def empty(self) -> bool:
        """Whether everything is sent."""
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
        if self._transport is None or self._transport.is_closing():
            return
        if self._encrypts:
            self._wait(pieces)
            return
        self._added_bytes += sum(map(len, pieces))
        self._transport.writelines(pieces)
        if self.unsent_bytes > SEND_BUFFER_BYTES_MAX:
            self._bound()  # from Python 3.12 on, asyncio's own writelines does not check the limit

    def flush(self) -> None:
        """Send the gathered frames."""
        self._flushing_soon = False
        if not self._gathered:
            return
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if self._transport is None or self._transport.is_closing():
            return
        data = gathered[0] if len(gathered) == 1 else b"".join(gathered)
        if self._encrypts:
            self._wait([data])
        else:
            self._added_bytes += len(data)
            self._transport.write(data)

    def flush_soon(self) -> None:
        """Send the gathered frames in the loop's next round, as more may be added until then."""
        if self._gathered and not self._flushing_soon:
            self._flushing_soon = True
            self._loop.call_soon(self.flush)

    def is_full(self) -> None:
        """Note that the transport can take nothing more for now."""
        self.paused = True
        self._pause()
        self._watch()

    def has_room(self) -> None:
        """Note that the transport can take more."""
        self.paused = False
        self._unwatch()
        self._feed()
        if not self.paused:
            self._resume()

    def _wait(self, pieces: list[Any]) -> None:
        """Queue `pieces`, and send them as the transport has room."""
        for piece in pieces:
            view = memoryview(piece).cast("B")
            self._waiting.append(view)
            self._waiting_bytes += len(view)
            self._added_bytes += len(view)
        self._feed()

    def _feed(self) -> None:
        """Give the transport as much as it may have."""
        while self._waiting and not self.paused and self._transport is not None and not self._transport.is_closing():
            batch, room = [], ENCRYPTED_BYTES_MAX
            while self._waiting and room:
                piece = self._waiting.popleft()
                if len(piece) > room:
                    self._waiting.appendleft(piece[room:])
                    piece = piece[:room]
                batch.append(piece)
                room -= len(piece)
            self._waiting_bytes -= ENCRYPTED_BYTES_MAX - room
            self._transport.writelines(batch)  # this may call `is_full`

    def _let_go(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    def _watch(self) -> None:
        """Check after `stalled_s` whether the peer has read anything."""
        self._unwatch()
        self._added_bytes = 0
        self._watching = self._loop.call_later(self._stalled_s, self._look, self.unsent_bytes)

    def _unwatch(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def _look(self, before: int) -> None:
        unsent_bytes = self.unsent_bytes
        if unsent_bytes < before + self._added_bytes:
            self._watch()
        else:
            self._stalled(unsent_bytes)
