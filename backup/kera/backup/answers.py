"""The memory of answers to readers of replicas, from when they are asked for until they are taken.

What is read from a replica is a copy. Readers who ask again and again and take nothing would have ever more of them
made. So all together have at most `ANSWERS_BYTES_MAX` bytes, those for one connection a part of that; whoever has none
gets one answer, however large, as long as there is room at all. The others are refused with `Unavailable`, and ask
again.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from kera.core.errors import Unavailable
from kera.core.rpc.method import Peer

ANSWERS_BYTES_MAX = 256 << 20
CONNECTION_SHARE = 4
"""One byte of so many may be for one connection."""
_HELD = "memory held by answers"


@dataclass(slots=True)
class _Held:
    """By the answers to one connection."""

    count: int = 0
    held_bytes: int = 0


class Answers:
    """The outgoing answers of one backup. Everything happens on its loop."""

    def __init__(self, bytes_max: int | None = None) -> None:
        """None: `ANSWERS_BYTES_MAX`."""
        self._bytes_max = ANSWERS_BYTES_MAX if bytes_max is None else bytes_max
        self.held_bytes = 0

    def admit(self, peer: Peer, answer_bytes: int) -> HeldAnswer:
        """Count an answer to `peer` of so many bytes at most. Raises `Unavailable`."""
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
        """An answer was taken, or there will be none."""
        self.held_bytes -= answer_bytes
        held.held_bytes -= answer_bytes
        held.count -= 1


class HeldAnswer:
    """One that counts: until `give_up`, or until nothing refers to what `is_made` returned."""

    __slots__ = ("_answer_bytes", "_answers", "_held")

    def __init__(self, answers: Answers, held: _Held, answer_bytes: int) -> None:
        self._answers = answers
        self._held = held
        self._answer_bytes = answer_bytes

    def is_made(self, data: bytearray) -> memoryview:
        """The data to send."""
        view = memoryview(data)
        weakref.finalize(view, self._answers.let_go, self._held, self._answer_bytes)
        return view

    def give_up(self) -> None:
        """There is nothing to be sent."""
        self._answers.let_go(self._held, self._answer_bytes)
