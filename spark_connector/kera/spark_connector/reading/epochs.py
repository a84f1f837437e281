"""The questions to the cluster, and the progress, of a query whose micro-batches end with epochs."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kera.core.format.punctuation import NO_TIME
from kera.spark_connector.options.reading import ReadOptions
from kera.spark_connector.planning import Advance, Now, Piece, Planned, conclude, heads, ranges
from kera.spark_connector.planning.epochs import (
    Cadence,
    begin,
    closed_before,
    divided,
    held_up_by,
    next_epochs,
    reaches,
)
from kera.spark_connector.planning.offsets import EntryName, EpochMark, Offsets
from kera.spark_connector.reading.survey import answered, cutting_of_micro_batch, split

if TYPE_CHECKING:
    from kera.client import Client


LOOK_AGAIN_S = 0.05
"""Pause if there is no micro-batch. Spark alone would ask again after 10 ms: too often for brokers, and for epochs."""


class EpochPlanner:
    """The epochs of one query."""

    def __init__(self, options: ReadOptions, cadence: Cadence) -> None:
        self._options = options
        self._cadence = cadence
        self._until: int | None = None
        """With ``availableNow``: the first epoch that is not read."""
        self._closed: int | None = None
        """The first epoch that was not closed at the last look; None: no epoch was."""
        self._held_up_by: tuple[EntryName, int | None] | None = None
        """The entry that holds up that epoch, and the time up to which the entry is settled."""
        self.begun = False
        """Whether Spark has made a micro-batch in this launch, or has been given the start of its first one."""

    async def begin(self, client: Client, now: Now, *, now_us: int) -> Offsets:
        """Return where the query begins without a checkpoint."""
        return await answered(client, begin(self._options.stream_starting, now, self._cadence, now_us=now_us))

    def end_here(self, now: Now) -> None:
        """Let the query end with the last epoch that is closed now."""
        ends = heads(now)
        self._look(Advance(ends, ends), now)
        self._until = NO_TIME if self._closed is None else self._closed

    def _look(self, advance: Advance, now: Now) -> None:
        reached = reaches(advance, now)
        self._closed, self._held_up_by = closed_before(reached, self._cadence), held_up_by(reached)

    async def plan(
        self, client: Client, given: Offsets, now: Now, advance: Advance, *, group: str, first: bool
    ) -> Offsets:
        """Return the end of the micro-batch after `given`, or `given` itself if there is none yet.

        `first`: `given` is where the query begins. Spark makes an empty micro-batch if the first answer is that nothing
        is new. With `Cadence.exactly` a micro-batch's number determines its epochs, and must not depend on whether
        records had arrived: so the first answer always is that nothing is new, and micro-batch 0 is empty.
        """
        self._look(advance, now)
        if first and not self.begun and self._cadence.exactly is not None:
            self.begun = True
            return given
        asking = next_epochs(
            given,
            advance,
            now,
            self._cadence,
            until=self._until,
            fail_on_data_loss=self._options.fail_on_data_loss,
        )
        found = await answered(client, asking)
        if found is None:
            if self._until is None:
                await asyncio.sleep(LOOK_AGAIN_S)
            return given
        return conclude(given, found.advance, found.end, group=group, first=first, mark=found.mark)

    async def split(self, client: Client, planned: Planned, end: Offsets, now: Now) -> list[Piece]:
        """Return the partitions of a micro-batch. If rows have their epoch, each partition has records of one epoch."""
        mark, options = self._cadence.mark_of(end), self._options
        parts: Sequence[tuple[int | None, Planned]] = [(None, planned)]
        if options.include_epoch:
            parts = await answered(client, divided(planned, mark))
        pieces = []
        for epoch, part in parts:
            found = ranges(part.start, part.end, now)
            cutting = cutting_of_micro_batch(options)
            pieces += [
                replace(piece, epoch=epoch) for piece in await split(client, found, now, options, cutting=cutting)
            ]
        return pieces

    def marked(self, ends: Offsets) -> Offsets:
        """Return `ends`, the heads of the streams, with a mark at the first epoch that is not closed."""
        return replace(ends, epoch=EpochMark(self._cadence.epoch_ms, None, self._closed))

    def metrics(self, consumed: Offsets | None) -> dict[str, str]:
        """Return the query's metrics about epochs: how many closed ones wait, and which entry holds up the next one."""
        found = {}
        done = None if consumed is None or consumed.epoch is None else consumed.epoch.next
        if self._closed is not None and done is not None:
            found["closedEpochsWaiting"] = str(max(self._closed - done, 0))
        if self._held_up_by is not None:
            entry, settled_us = self._held_up_by
            found["nextEpochHeldUpBy"] = f"{entry.stream}/{entry.streamlet}/{entry.entry}"
            found["nextEpochSettledUntil"] = "" if settled_us is None else _as_text(settled_us)
        return found


def _as_text(time_us: int) -> str:
    """Return a time as text, or its number if it is out of the range of years."""
    try:
        return (dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=time_us)).isoformat()
    except OverflowError:
        return str(time_us)
