"""Where the reading of epochs begins: with which one, and at which place of each entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from kera.client.admin.locating import positions_at
from kera.client.cluster.cluster import Cluster
from kera.client.consuming.committed import committed_cursors
from kera.client.epochs.marks import epoch_of
from kera.client.settings import ConsumerSettings
from kera.client.types import EntryBounds, StreamDescription
from kera.core.base.ids import Position
from kera.core.errors import DataLost

EpochStart: TypeAlias = int | Literal["earliest", "latest", "committed"]
Bounds: TypeAlias = Mapping[int, Mapping[int, Sequence[EntryBounds]]]
"""By stream, streamlet and entry."""
Starts: TypeAlias = Mapping[tuple[int, int], Position]
"""Positions in a stream, by streamlet and entry."""


class Found(NamedTuple):
    """The beginning of a reader."""

    bounds: Bounds
    starts: Mapping[int, Starts]
    """By stream."""
    first: int | None
    """The first epoch that is wanted; None: whichever comes first."""
    committed: bool
    """Whether a consumer group goes on there."""


class Beginning:
    """Finds the beginning in some streams."""

    def __init__(
        self,
        cluster: Cluster,
        streams: Sequence[StreamDescription],
        settings: ConsumerSettings,
        start: int | str,
        epoch_us: int,
    ) -> None:
        self._cluster = cluster
        self._streams = streams
        self._settings = settings
        self._start_at = start
        self._epoch_us = epoch_us

    async def find(self) -> Found:
        """Where it is. Raises `DataLost` where something of the first epoch was removed."""
        bounds = await self._bounds()
        committed = await self._committed()
        while True:
            first = None if committed else self._first_epoch(bounds)
            starts = committed or {
                stream.stream_id: await self._starts(stream, bounds[stream.stream_id], first)
                for stream in self._streams
            }
            before, bounds = bounds, await self._bounds()
            if first is None or _beginnings(before) == _beginnings(bounds):
                return Found(bounds, starts, first, bool(committed))  # else something was removed meanwhile

    async def _bounds(self) -> Bounds:
        return {stream.stream_id: await self._cluster.bounds(stream.name, promise=True) for stream in self._streams}

    async def _committed(self) -> dict[int, Starts]:
        """Where the consumer group is to go on, by stream; nothing: it has not begun, or is not asked."""
        found: dict[int, Starts] = {}
        if self._start_at == "committed":
            for stream in self._streams:
                cursors = await committed_cursors(self._cluster, self._settings.consumer_group, stream)
                found[stream.stream_id] = {(at.streamlet_id, at.entry): place for at, place in cursors.items()}
        return found if any(found.values()) else {}

    def _first_epoch(self, bounds: Bounds) -> int | None:
        """The first epoch that is wanted; None: whichever comes first. Raises `DataLost`."""
        whole = self._first_whole(bounds)
        if isinstance(self._start_at, int):
            if whole is not None and self._start_at < whole:
                names = ", ".join(stream.name for stream in self._streams)
                raise DataLost(
                    f"retention or truncation removed records of {names} before epoch {whole}, and the start"
                    f" {self._start_at} is earlier: start at {whole}, or with 'earliest'",
                    epoch=self._start_at,
                    first_whole=whole,
                )
            return self._start_at
        if self._start_at == "latest":
            opened = open_now(bounds, self._epoch_us)
            return opened if whole is None else max(opened, whole)
        return whole

    def _first_whole(self, bounds: Bounds) -> int | None:
        """The first epoch of which nothing was removed; None: nothing was of any."""
        removed = [
            epoch_of(_latest_removed(entry), self._epoch_us)
            for streamlets in bounds.values()
            for entries in streamlets.values()
            for entry in entries
            if entry.first_record
        ]
        return max(removed) + 1 if removed else None

    async def _starts(
        self, stream: StreamDescription, bounds: Mapping[int, Sequence[EntryBounds]], first: int | None
    ) -> Starts:
        """Where to begin with each entry: not "wherever it begins", which may be elsewhere when it is read."""
        if first is None:
            return {
                (streamlet_id, number): bound.start
                for streamlet_id, entries in bounds.items()
                for number, bound in enumerate(entries)
            }
        first_us = min(max(first * self._epoch_us, -(1 << 63)), (1 << 63) - 1)
        places = await positions_at(self._cluster, stream.name, first_us)
        return {
            (streamlet_id, number): place.start if isinstance(self._start_at, int) else place.position
            for streamlet_id, entries in places.items()
            for number, place in enumerate(entries)
        }


def open_now(bounds: Bounds, epoch_us: int) -> int:
    """The first epoch that is not closed yet, as far as is known."""
    settled = [
        time_us
        for streamlets in bounds.values()
        for entries in streamlets.values()
        for entry in entries
        if (time_us := _settled_us(entry)) is not None
    ]
    return epoch_of(min(settled, default=0), epoch_us)


def _latest_removed(entry: EntryBounds) -> int:
    """The greatest time of what was removed from an entry, or more."""
    times = (entry.removed_watermark_us, entry.watermark_us)
    return next((time_us for time_us in times if time_us is not None), 0)


def _beginnings(bounds: Bounds) -> list[int]:
    """How much was removed of each entry."""
    return [entry.first_record for each in bounds.values() for entries in each.values() for entry in entries]


def _settled_us(entry: EntryBounds) -> int | None:
    """Nothing older comes, as far as is known; None: nothing has come, and nobody says so."""
    times = [time_us for time_us in (entry.watermark_us, entry.promised_us) if time_us is not None]
    return max(times) if times else None
