"""The memory that answers hold while they are being sent: slots of the arena, and copies.

An answer refers to the bytes of a segment in its slot, so the slot cannot be reused until the reader has taken them.
Without bounds, readers that do not take their answers could block the writers. The bounds:

* Answers hold at most one in `ARENA_SHARE` slots, and the answers to one connection at most one in `CONNECTION_SHARE`.
* Further data is copied, and so is data that readers may not hold (``PersistenceManager.may_lease``). All copies
  together have at most `COPIED_BYTES_MAX` bytes, and the copies for one connection a part of that. A connection without
  copies may exceed its own part by one copy.
* Data beyond these bounds is refused with `AnswersNotTaken`, and the reader asks again.
"""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field

from kera.broker.log.arena import Slot
from kera.core.errors import Unavailable
from kera.core.rpc.method import Peer


class AnswersNotTaken(Unavailable):
    """There is no memory for another answer. A handler that gets this error need not add more to the same answer."""


ARENA_SHARE = 4
"""Answers may hold one in this many slots."""
CONNECTION_SHARE = 16
"""The answers to one connection may hold one in this many slots, and at least `CONNECTION_SLOTS_MIN`."""
CONNECTION_SLOTS_MIN = 2
COPIED_BYTES_MAX = 64 << 20
COPIES_SHARE = 4
"""One connection may have one in this many of the `COPIED_BYTES_MAX` bytes."""
_HELD = "memory held by answers"


@dataclass(slots=True)
class _Held:
    """The memory that the answers to one connection hold."""

    slots: Counter[int] = field(default_factory=Counter)
    """How often each slot is held."""
    copied_bytes: int = 0


class Outgoing:
    """The outgoing answers of one broker. Used on its loop only."""

    def __init__(self, slot_count: int, *, copied_bytes_max: int = COPIED_BYTES_MAX) -> None:
        self._slots_max = max(1, slot_count // ARENA_SHARE)
        self._connection_slots_max = max(CONNECTION_SLOTS_MIN, slot_count // CONNECTION_SHARE)
        self._copied_bytes_max = copied_bytes_max
        self._slots: Counter[int] = Counter()
        """How often each slot is held."""
        self.copied_bytes = 0

    @property
    def slots(self) -> int:
        """The number of slots that answers hold now."""
        return len(self._slots)

    def give(self, peer: Peer, slot: Slot, begin: int, end: int, *, lend: bool = True) -> memoryview:
        """Return bytes of a slot for an answer to `peer`; they are copied unless `lend` and the bounds allow a lease.

        Raises `AnswersNotTaken`.
        """
        held: _Held | None = peer.state.get(_HELD)
        if held is None:
            held = peer.state[_HELD] = _Held()
        index = slot.index
        known = index in self._slots or len(self._slots) < self._slots_max
        if lend and known and (index in held.slots or len(held.slots) < self._connection_slots_max):
            slot.lease()
            self._slots[index] += 1
            held.slots[index] += 1
            view = slot.view[begin:end]
            weakref.finalize(view, self._let_go, slot, held.slots)  # the transport lets go of it when it is sent
            return view
        length = end - begin
        total, of_connection = self._copied_bytes_max, self._copied_bytes_max // COPIES_SHARE
        if self.copied_bytes + length > total or (held.copied_bytes and held.copied_bytes + length > of_connection):
            raise AnswersNotTaken(
                f"readers have not taken answers of {self.copied_bytes} bytes, here {held.copied_bytes} of them;"
                " take those, and try again",
                limit=self._copied_bytes_max,
            )
        self.copied_bytes += length
        held.copied_bytes += length
        copy = memoryview(bytes(slot.view[begin:end]))
        weakref.finalize(copy, self._let_go_of_copy, held, length)
        return copy

    def _let_go(self, slot: Slot, held: Counter[int]) -> None:
        for count in (self._slots, held):
            count[slot.index] -= 1
            if not count[slot.index]:
                del count[slot.index]
        slot.release()

    def _let_go_of_copy(self, held: _Held, length: int) -> None:
        self.copied_bytes -= length
        held.copied_bytes -= length
