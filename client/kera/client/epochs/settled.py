"""Shows people how far the entries of a stream are settled for its epochs. Pure.

The times here are not promises: see `Client.bounds`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kera.client.stream_config import StreamConfig
from kera.client.types import EntryBounds

BY_RECORDS = "what was written"
BY_CLOCK = "its broker's clock"
BY_NOBODY = "nothing: its broker makes no promises now; check its clock"
NO_MATTER = "nothing was written to it: it delays no epoch"


class Settled(NamedTuple):
    """The settled time of an entry: older records count as late."""

    streamlet_id: int
    entry: int
    settled_us: int | None
    """The time; None: it is not settled."""
    by: str
    """A text about how it was settled."""
    holds_up: bool
    """Whether epochs wait for it at all."""

    def behind_ms(self, now_us: int) -> int | None:
        """Return how far it is behind a clock; 0: it is not behind; None: it is not settled."""
        return None if self.settled_us is None else max(0, now_us - self.settled_us) // 1000


def settled_entries(config: StreamConfig, bounds: Mapping[int, Sequence[EntryBounds]]) -> list[Settled]:
    """Return the entries: the one that holds up the next epoch first, entries that hold up no epoch last."""
    found = [
        _settled(config, streamlet_id, number, entry)
        for streamlet_id, entries in bounds.items()
        for number, entry in enumerate(entries)
    ]
    return sorted(found, key=_place)


def _place(each: Settled) -> tuple[bool, bool, int, int, int]:
    known = each.settled_us is not None
    return not each.holds_up, known, each.settled_us or 0, each.streamlet_id, each.entry


def _settled(config: StreamConfig, streamlet_id: int, number: int, entry: EntryBounds) -> Settled:
    if entry.settled_us is not None:
        by = BY_RECORDS if entry.settled_us == entry.watermark_us else BY_CLOCK
        return Settled(streamlet_id, number, entry.settled_us, by, holds_up=True)
    by_clock = config.punctuation == "clock"
    return Settled(streamlet_id, number, None, BY_NOBODY if by_clock else NO_MATTER, holds_up=by_clock)
