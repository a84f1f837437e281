"""Answers that were given to gRPC and that clients have not read yet: their size is bounded, and slow clients are cut.

gRPC keeps a copy of an answer until the client has room for it. A client that reads its socket but not its answers
never has room, and yet its connection stays alive, since it answers pings. Promises:

* All answers of a server together have at most `bytes_max` bytes; small ones (`SMALL_BYTES_MAX`) do not count,
  as they are bounded by the number of calls.
* If there is no room for another answer, connections are closed that have left an answer unread for `impatient_s`, the
  longest first, until there is room. If there are no such connections, the answer is refused with `Unavailable`.
* In any case a connection is closed that does not read an answer within `stalled_s`, or longer for a large answer
  (`slowest_bytes_per_s`): gRPC does not report how much of it has been read.

The connection is closed, as with frames, because gRPC for Python cannot end a call whose client does not read its
answer: it keeps the answer as long as the client lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import unquote

from kera.core.base.address import split_address
from kera.core.base.telemetry import get_logger
from kera.core.errors import Unavailable
from kera.core.rpc.sockets import shut_down

log = get_logger("kera.grpc")

SMALL_BYTES_MAX = 4 << 10


class UntakenLimits(NamedTuple):
    """The bounds on bytes and time of gRPC answers that clients have not taken."""

    bytes_max: int = 128 << 20
    """Each of these bytes is in memory twice."""
    impatient_s: float = 5.0
    stalled_s: float = 30.0
    slowest_bytes_per_s: int = 256 << 10


UNTAKEN_LIMITS = UntakenLimits()


class Hold:
    """An answer that is not read yet."""

    __slots__ = ("_timer", "_untaken", "counted_bytes", "peer", "since_s")

    def __init__(self, untaken: Untaken, peer: str, counted_bytes: int, patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.peer = peer
        self.counted_bytes = counted_bytes
        self.since_s = loop.time()
        self._untaken = untaken
        self._timer = loop.call_later(patience_s, untaken.end, self)

    def release(self) -> None:
        """Note that the answer was read, or that its call is gone; may be called repeatedly."""
        self._timer.cancel()
        self._untaken.forget(self)


class Untaken:
    """The answers of one server that clients have not read. Belongs to its event loop."""

    def __init__(self, limits: UntakenLimits = UNTAKEN_LIMITS, *, close: Callable[[str], object] | None = None) -> None:
        """`close`: closes the connection with a peer, which is given by gRPC's name for it."""
        self._limits = limits
        self._close = close or _close
        self._holds: dict[Hold, None] = {}
        """Answers that count, the oldest first."""
        self.held_bytes = 0
        self.closed = 0
        """Number of connections that were closed because the peer read nothing."""

    def admit(self, peer: str, answer_bytes: int) -> Hold:
        """Count an answer that is about to be sent. Raises `Unavailable`."""
        counted = answer_bytes if answer_bytes > SMALL_BYTES_MAX else 0
        now_s = asyncio.get_running_loop().time()
        while counted and self._holds and self.held_bytes + counted > self._limits.bytes_max:
            oldest = next(iter(self._holds))
            if now_s < oldest.since_s + self._limits.impatient_s:
                raise Unavailable(
                    f"clients have not taken answers of {self.held_bytes} bytes yet; try again",
                    limit=self._limits.bytes_max,
                )
            self.end(oldest)
        patience_s = self._limits.stalled_s + answer_bytes / self._limits.slowest_bytes_per_s
        hold = Hold(self, peer, counted, patience_s)
        if counted:
            self._holds[hold] = None
            self.held_bytes += counted
        return hold

    def forget(self, hold: Hold) -> None:
        """Stop counting an answer."""
        if self._holds.pop(hold, hold) is None:
            self.held_bytes -= hold.counted_bytes

    def end(self, hold: Hold) -> None:
        """Close the connection of a peer that does not read an answer, which frees the answers of all its calls."""
        for each in [each for each in self._holds if each.peer == hold.peer]:
            each.release()
        hold.release()
        self.closed += 1
        log.warning("connection closed: the peer takes no replies", peer=hold.peer)
        self._close(hold.peer)


def _close(peer: str) -> None:
    host, port = split_address(unquote(peer).partition(":")[2])
    asyncio.get_running_loop().run_in_executor(None, shut_down, host, port)
