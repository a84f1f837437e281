"""Bounds the memory of answers to readers of replicas, from the request until the answer is read.

An answer is a copy of a replica's chunks. Readers that send requests without reading the answers would make the backup
allocate more and more copies. So all answers together may have `ANSWERS_BYTES_MAX` bytes, and the answers of one
connection a share of that. A connection without answers gets one of any size, if all answers together still have room,
or there are no others. Other requests are refused with `Unavailable`, and have to be sent again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from kera.core.errors import Unavailable
from kera.core.rpc.method import Peer

ANSWERS_BYTES_MAX = 256 << 20
CONNECTION_SHARE = 4
"""One connection may have one part of this many."""
_HELD = "memory held by answers"


@dataclass(slots=True)
class _Held:
    """The memory of the answers to one connection."""

    count: int = 0
    held_bytes: int = 0


class Answers:
    """The outgoing answers of one backup. Belongs to its event loop."""

    def __init__(self, bytes_max: int | None = None) -> None:
        """`bytes_max`: None: `ANSWERS_BYTES_MAX`."""
        self._bytes_max = ANSWERS_BYTES_MAX if bytes_max is None else bytes_max
        self.held_bytes = 0

    def admit(self, peer: Peer, answer_bytes: int) -> HeldAnswer:
        """Count an answer to `peer` of at most `answer_bytes`. Raises `Unavailable`."""
        held: _Held = peer.state.setdefault(_HELD, _Held())
        of_connection = self._bytes_max // CONNECTION_SHARE
        if (self.held_bytes and self.held_bytes + answer_bytes > self._bytes_max) or (
            held.count and held.held_bytes + answer_bytes > of_connection
        ):
            raise Unavailable(
                f"readers have not taken answers of {self.held_bytes} bytes, here {held.held_bytes} of them;"
                " take those, and try again",
                limit=self._bytes_max,
            )
        self.held_bytes += answer_bytes
        held.held_bytes += answer_bytes
        held.count += 1
        return HeldAnswer(self, held, answer_bytes)

    def let_go(self, held: _Held, answer_bytes: int) -> None:
        """Stop counting an answer: it was read, or will not be sent."""
        self.held_bytes -= answer_bytes
        held.held_bytes -= answer_bytes
        held.count -= 1


class HeldAnswer:
    """A counted answer: until `give_up`, or until the result of `is_made` is no longer referred to."""

    __slots__ = ("_answer_bytes", "_answers", "_held")

    def __init__(self, answers: Answers, held: _Held, answer_bytes: int) -> None:
        self._answers = answers
        self._held = held
        self._answer_bytes = answer_bytes

    def is_made(self, data: bytearray) -> memoryview:
        """Return the data to send."""
        view = memoryview(data)
        weakref.finalize(view, self._answers.let_go, self._held, self._answer_bytes)
        return view

    def give_up(self) -> None:
        """Stop counting the answer, as nothing is sent."""
        self._answers.let_go(self._held, self._answer_bytes)
