"""How much of the waiting data a micro-batch may take. Pure: no connection, no clock.

``maxOffsetsPerTrigger`` and ``maxBytesPerTrigger`` are divided among the entries in proportion to their waiting data,
so that no entry falls behind the others. Chunks stay whole, and each entry with waiting data gives at least one chunk:
so a limit is met to within one chunk per entry.

``minOffsetsPerTrigger`` holds a micro-batch back until at least that number of records wait, but no longer than
``maxTriggerDelay`` after the last micro-batch, and never the first one of a launch (as with Kafka).
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
    """An estimate, used for proportions only."""
    bytes_most: int
    """An upper bound of the bytes."""


class EntryShare(NamedTuple):
    """The most that an entry may give; None: no such limit. If both are set, the limit that is reached first counts."""

    records_max: int | None
    bytes_max: int | None


@dataclass(frozen=True)
class Wait:
    """No micro-batch yet: return the start to Spark unchanged."""

    records: int
    """The number of waiting records."""


@dataclass(frozen=True)
class Take:
    """A micro-batch up to the head of each entry, but for the entries in `shares` only up to their share."""

    shares: Mapping[EntryName, EntryShare]
    """The entries that need a chunk boundary before the head. `Client.locate` looks it up between the start of the
    entry's range and its head; `planning.limited` comes next."""


def decide(
    waiting: Mapping[EntryName, Waiting], limits: BatchLimits, *, waited_ms: int | None, available_now: bool = False
) -> Wait | Take:
    """Decide which part of `waiting` the next micro-batch takes (see `planning.waiting`).

    `waited_ms`: the time since the last micro-batch of this launch was taken; None: this is the first one.
    `available_now`: the query ends at the present heads, so it never waits for more records.
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
    # The bytes are an estimate. So unless the upper bounds are within the limit, each entry gets a share. If the
    # estimate is below the limit, that share is larger than the entry is expected to need.
    if bytes_max is None or sum(entry.bytes_most for entry in waiting.values()) <= bytes_max:
        return {}
    total = max(1, sum(entry.bytes for entry in waiting.values()))
    return {entry: max(1, there.bytes * bytes_max // total) for entry, there in waiting.items()}
