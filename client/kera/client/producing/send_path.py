"""The state that `Producer.send` changes for most records; where the native core is there, a function in C does it.

A record of a value, or of a value and a key, that goes to a chunk which is open, and stays so, and is of its epoch: it
is appended to the chunk's lists, and its bytes are taken from the room of the producer. That is all that happens to it
before its chunk is closed. The classes here hold what changes, so that the function in C finds it where it has put it;
they are bases of those who know what it means. For all other records that function calls `Producer.send`, its twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kera.client.headers import Header
from kera.core.native import native

if TYPE_CHECKING or native is None:

    class Room:
        """How much more a producer takes."""

        left_bytes: int
        """Below 0 when a record is larger than the buffer."""

    class Gathered:
        """The content of an open chunk: lists of the same length."""

        __slots__ = ("epoch_end_s", "headers", "keys", "size", "times_s", "values")

        values: list[bytes | None]
        times_s: list[float]
        """When each record was accepted, on the wall clock: a float costs half of what whole microseconds do."""
        keys: list[Sequence[bytes] | None] | None
        """None until the first record with a key."""
        headers: list[Sequence[Header] | None] | None
        size: int
        """Estimate of the chunk's bytes, from above."""
        epoch_end_s: float
        """A record that is accepted then, or later, is of a later epoch than the chunk."""

    class Accepted:
        """Which record it is."""

        __slots__ = ("_accumulator", "_index")

        _accumulator: Any
        _index: int

else:
    Room, Gathered, Accepted = native.Room, native.Gathered, native.Accepted
