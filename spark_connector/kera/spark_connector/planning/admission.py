"""How much of what waits a micro-batch may take. Pure: no connection, no clock.

``maxOffsetsPerTrigger`` and ``maxBytesPerTrigger`` are shared out over the entries in proportion to what waits in each,
so that none falls behind the others. Chunks are whole: an entry where anything waits gives at least one chunk, so a
limit is met to within one chunk per entry.

``minOffsetsPerTrigger`` holds a micro-batch back until so many records wait, but for no longer than ``maxTriggerDelay``
after the last one, and never the first one of a launch (as with Kafka).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kera.spark_connector.planning.offsets import EntryName

DELAY_MAX_MS = 15 * 60 * 1000
"""Default of ``maxTriggerDelay``."""


@dataclass(frozen=True)
class BatchLimits:
    """The options for the size of micro-batches; None: no such limit."""

    records_max: int | None = None
    bytes_max: int | None = None
    records_min: int | None = None
    delay_max_ms: int = DELAY_MAX_MS
    latency_target_ms: int | None = None
    """See ``pacing``."""


class Waiting(NamedTuple):
    """The data of an entry that no micro-batch has taken."""

    records: int
    """At least 1 where anything waits."""
    bytes: int
    """Estimated: it decides on proportions only."""
    bytes_most: int
    """It cannot be more than that."""


class EntryShare(NamedTuple):
    """The most that an entry may give; None: no such limit. Where both are given the nearer place counts."""

    records_max: int | None
    bytes_max: int | None


@dataclass(frozen=True)
class Wait:
    """No micro-batch yet: give Spark the start back as it came."""

    records: int
    """How many wait."""


@dataclass(frozen=True)
class Take:
    """A micro-batch: up to the head in each entry, but in those of `shares` only so much."""

    shares: Mapping[EntryName, EntryShare]
    """The entries where a chunk boundary before the head has to be looked up, with `Client.locate` from the start of
    the entry's range up to its head; then `planning.limited`."""


def decide(
    waiting: Mapping[EntryName, Waiting], limits: BatchLimits, *, waited_ms: int | None, available_now: bool = False
) -> Wait | Take:
    """Decide which part of `waiting` the next micro-batch takes (see `planning.waiting`).

    `waited_ms`: since the last micro-batch of this launch was taken; None: there was none yet. `available_now`: the
    query ends when it has all there is, so nothing is waited for.
    """
    records = sum(entry.records for entry in waiting.values())
    held_back = limits.records_min is not None and records < limits.records_min and not available_now
    if held_back and waited_ms is not None and waited_ms < limits.delay_max_ms:
        return Wait(records)
    record_shares = _record_shares(waiting, limits.records_max)
    byte_shares = _byte_shares(waiting, limits.bytes_max)
    shares = {entry: EntryShare(record_shares.get(entry), byte_shares.get(entry)) for entry in waiting}
    return Take({entry: share for entry, share in shares.items() if share != EntryShare(None, None)})


def _record_shares(waiting: Mapping[EntryName, Waiting], records_max: int | None) -> dict[EntryName, int]:
    total = sum(entry.records for entry in waiting.values())
    if records_max is None or total <= records_max:
        return {}
    return {entry: max(1, there.records * records_max // total) for entry, there in waiting.items()}


def _byte_shares(waiting: Mapping[EntryName, Waiting], bytes_max: int | None) -> dict[EntryName, int]:
    # What waits is only estimated. So unless it is certain that there is no more than may be, each entry gets a share:
    # where the estimate is below the limit, a larger one than it is expected to need.
    if bytes_max is None or sum(entry.bytes_most for entry in waiting.values()) <= bytes_max:
        return {}
    total = max(1, sum(entry.bytes for entry in waiting.values()))
    return {entry: max(1, there.bytes * bytes_max // total) for entry, there in waiting.items()}
