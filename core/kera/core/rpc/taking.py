"""Requests that are taken as they lie in a connection's buffer: several at once, past messages and handlers.

What a small request asks for may cost less than its message, its handler's call and its answer. So a server may have a
*taker* for a method beside the handler. It carries out as many requests as it knows all about, from the first one on,
makes their answers itself, and leaves the next one to the handler; then it is asked again. Whether there is one is seen
in nothing but the time that it takes: requests are carried out in their order, and bounded, in either way.
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
        """Answer so many requests that were held, with these frames."""


class Taken(NamedTuple):
    """The outcome of a taker's call."""

    end: int
    """Up to where it has taken the buffer: whole requests, which were carried out."""
    requests: int
    held: int
    """Number of these requests that `Asker.answer` will answer."""
    answers: bytes
    """To the others: frames."""
    bulk_bytes: int = 0
    """Bytes of all of them, if they are counted."""


NOTHING = Taken(0, 0, 0, b"")

Taker = Callable[[Asker, memoryview, int], Taken]
"""Called with what begins with a request of its method, and with how many it may take at most. An error that it raises
is a defect, and ends the connection: nobody knows what was carried out."""
