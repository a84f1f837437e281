"""Requests that are taken straight from a connection's buffer: several at once, bypassing messages and handlers.

The work of a small request may cost less than its message, its handler's call and its answer. So besides its handler a
method may have a *taker*. It carries out requests from the first one on, as long as it supports them, makes their
answers itself, and leaves the next request to the handler; then it is called again. A taker changes only the time that
requests take: with and without it they are carried out in their order, within the same bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from kera.core.rpc.method import Peer


class Asker(Protocol):
    """A connection whose requests are taken."""

    bulk_bytes_max: int
    peer: Peer

    def answer(self, answers: bytes, requests: int) -> None:
        """Answer `requests` held requests with the frames in `answers`."""


class Taken(NamedTuple):
    """The outcome of a taker's call."""

    end: int
    """The end of the requests in the buffer that were carried out."""
    requests: int
    held: int
    """Number of these requests that `Asker.answer` will answer."""
    answers: bytes
    """Frames that answer the other requests."""
    bulk_bytes: int = 0
    """Bulk of all requests together, in bytes, if it is counted."""


NOTHING = Taken(0, 0, 0, b"")

Taker = Callable[[Asker, memoryview, int], Taken]
"""Called with a buffer that begins with a request of its method, and with the maximum of requests to take. An error
that it raises is a defect, and ends the connection, as it is unknown what was carried out."""
