"""The output of a connection: frames that go together, and whether the peer takes them.

A frame without bulk may wait for others: a system call each would cost as much as handling them. Only those are
gathered, and few bytes: what a peer does not take has to be seen. When to `flush` what is left is up to whoever writes.

A transport that encrypts makes a copy of what it is given, of all of it at once, and keeps that until the peer takes
it: thousands of peers that take nothing would have gigabytes. So it is given `ENCRYPTED_BYTES_MAX` at a time, and the
rest waits here, where it is still somebody else's memory. While it is full nothing more is answered either: it also is
of what TLS itself says, to a peer that asks for other keys again and again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from kera.core.rpc.limits import SEND_BUFFER_BYTES_MAX

GATHERED_BYTES_MAX = 64 << 10
"""Maximum of frames that are sent together."""
ENCRYPTED_BYTES_MAX = 128 << 10


class Outbox:
    """The frames of one connection on their way; they overtake each other nowhere."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        stalled_s: float,
        stalled: Callable[[int], None],
        *,
        pause: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        """`pause` is called when the peer does not take what is sent, `resume` when it does again.

        `stalled` is called with the bytes that are unsent when it has taken none of them for `stalled_s`.
        """
        self._loop = loop
        self._stalled_s = stalled_s
        self._stalled = stalled
        self._pause = pause
        self._resume = resume
        self._transport: asyncio.Transport | None = None
        self._encrypts = False
        self._waiting: deque[memoryview] = deque()  # until a transport that encrypts has room
        self._waiting_bytes = 0
        self._gathered: list[bytes] = []  # go with the next frame, or when they are flushed
        self._gathered_bytes = 0
        self._flushing_soon = False
        self._watching: asyncio.TimerHandle | None = None
        self.paused = False
        """The transport is to be given nothing more for now, and nothing more is to be answered."""

    def open(self, transport: asyncio.Transport) -> None:
        """From now on frames go to `transport`."""
        self._transport = transport
        self._encrypts = transport.get_extra_info("ssl_object") is not None
        self._bound()

    def close(self) -> None:
        """Have the connection end when all has left."""
        self.flush()
        if self._transport is not None:
            if self._waiting and not self._transport.is_closing():
                self._transport.writelines(self._waiting)
                self._let_go()
            self._transport.close()

    def end(self) -> None:
        """The connection is gone."""
        self._unwatch()
        self._let_go()
        self._transport = None

    def _bound(self) -> None:
        """Have the protocol told to pause when too much is unsent, also if it is already."""
        if self._transport is not None:
            high = ENCRYPTED_BYTES_MAX if self._encrypts else SEND_BUFFER_BYTES_MAX
            self._transport.set_write_buffer_limits(high=high)

    @property
    def unsent_bytes(self) -> int:
        """That the peer has not taken, but for those that are gathered."""
        return self._waiting_bytes + self.given_bytes

    @property
    def given_bytes(self) -> int:
        """Bytes of these that were given to the transport."""
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
        if self._transport is None or self._transport.is_closing():
            return
        if self._encrypts:
            self._wait(pieces)
            return
        self._transport.writelines(pieces)
        if self.unsent_bytes > SEND_BUFFER_BYTES_MAX:
            self._bound()  # from Python 3.12 on, asyncio's own writelines does not look

    def flush(self) -> None:
        """Send what is gathered."""
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
            self._transport.write(data)

    def flush_soon(self) -> None:
        """Send what is gathered in the loop's next round: more may come until then."""
        if self._gathered and not self._flushing_soon:
            self._flushing_soon = True
            self._loop.call_soon(self.flush)

    def is_full(self) -> None:
        """The transport is to be given nothing more for now."""
        self.paused = True
        self._pause()
        self._watch()

    def has_room(self) -> None:
        """The transport may be given more."""
        self.paused = False
        self._unwatch()
        self._feed()
        if not self.paused:
            self._resume()

    def _wait(self, pieces: list[Any]) -> None:
        """Send as the transport takes it."""
        for piece in pieces:
            view = memoryview(piece).cast("B")
            self._waiting.append(view)
            self._waiting_bytes += len(view)
        self._feed()

    def _feed(self) -> None:
        """Give the transport what it may have."""
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
            self._transport.writelines(batch)  # which may say that it is full

    def _let_go(self) -> None:
        self._waiting.clear()
        self._waiting_bytes = 0

    def _watch(self) -> None:
        """See whether the peer takes anything of what is unsent now."""
        self._unwatch()
        self._watching = self._loop.call_later(self._stalled_s, self._look, self.unsent_bytes)

    def _unwatch(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def _look(self, before: int) -> None:
        if self.unsent_bytes < before:
            self._watch()
        else:
            self._stalled(before)
