"""How far the entries of a stream are settled for its epochs. Pure; unlike a promise, looking has no effect.

The promise that a broker could make counts even if no reader asks for it: otherwise a stream without readers would seem
to lag more and more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

from kera.broker.log.epochs import EpochRules
from kera.broker.log.streamlet import Streamlet
from kera.broker.log.watermarks import watermark_of
from kera.broker.ownership.stream import Stream
from kera.core.format.punctuation import NO_TIME


class Furthest(NamedTuple):
    """The entry that is furthest behind, of a stream's entries that this broker owns."""

    settled_us: int
    """Older data can only come as late data."""
    streamlet_id: int
    entry: int

    def lag_ms(self, now_us: int) -> int:
        """Return how far the entry is behind the clock; 0 if it is ahead."""
        return max(0, now_us - self.settled_us) // 1000

    def held_up_ms(self, rules: EpochRules, now_us: int) -> int:
        """Return how far the entry lags beyond the grace; 0 for streams whose times need not be near the clock."""
        return max(0, self.lag_ms(now_us) - rules.grace_us // 1000) if rules.by_clock else 0


def furthest_behind(
    stream: Stream, now_us: int, may_promise: Callable[[int], bool]
) -> Generator[None, None, Furthest | None]:
    """Return the stream's entry here that is furthest behind, and yield between streamlets.

    Returns None if the stream has no epochs, or no entry here can delay one. `may_promise`: whether this broker may
    promise now, given a grace.
    """
    found = None
    if not stream.epochs.are_kept:
        return None
    for streamlet in list(stream.streamlets.values()):
        yield
        if not streamlet.owned:
            continue
        here = _of_streamlet(streamlet, could_promise_us(streamlet, now_us, may_promise), stream.created_us)
        if here is not None and (found is None or here < found):
            found = here
    return found


def could_promise_us(streamlet: Streamlet, now_us: int, may_promise: Callable[[int], bool]) -> int:
    """Return the time up to which the broker could promise now; `NO_TIME`: it could not. See `furthest_behind`."""
    rules = streamlet.epochs
    can = rules.by_clock and streamlet.takes_chunks and may_promise(rules.grace_us)
    return now_us - rules.grace_us if can else NO_TIME


def _of_streamlet(streamlet: Streamlet, promised_us: int, created_us: int) -> Furthest | None:
    found = None
    for index, time_us in _settled(streamlet, promised_us, created_us):
        if found is None or time_us < found.settled_us:
            found = Furthest(time_us, streamlet.streamlet_id, index)
        if time_us == promised_us:
            break  # no entry is behind what can be promised
    return found


def _settled(streamlet: Streamlet, promised_us: int, created_us: int) -> Iterator[tuple[int, int]]:
    """Yield for each entry the time before which no data comes.

    Entries without objects (`Entries.made`) are all alike, so only the first of them counts.
    """
    entries, by_clock = streamlet.entries, streamlet.epochs.by_clock
    if by_clock and len(entries.made_by_index) < len(entries):
        first = next(index for index in range(len(entries)) if index not in entries.made_by_index)
        yield first, _known(max(entries.first_promise_us, promised_us), created_us)
    for entry in list(entries.made_by_index.values()):
        time_us = max(watermark_of(entry), entry.promised_us, promised_us)
        if by_clock or time_us != NO_TIME:  # otherwise it delays no epoch
            yield entry.index, _known(time_us, created_us)


def _known(time_us: int, created_us: int) -> int:
    """Return the time, or the stream's creation for `NO_TIME`: an entry without writers delays all epochs."""
    return created_us if time_us == NO_TIME else time_us
