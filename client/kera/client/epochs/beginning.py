"""The beginning of a reader of epochs: the first epoch, and the place in each entry."""

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
"""Bounds of entries, by stream, streamlet and entry."""
Starts: TypeAlias = Mapping[tuple[int, int], Position]
"""Positions in a stream, by streamlet and entry."""


LOOKS_MAX = 100
"""Maximum number of looks for a beginning, while records are removed."""


class Found(NamedTuple):
    """The beginning of a reader."""

    bounds: Bounds
    starts: Mapping[int, Starts]
    """Positions to start from, by stream."""
    first: int | None
    """The first epoch to read; None: whichever comes first."""
    committed: bool
    """Whether these are the cursors of a consumer group."""


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
        """Find the beginning. Raises `DataLost` if records of the first epoch were removed."""
        bounds = await self._bounds()
        committed = await self._committed()
        for _ in range(LOOKS_MAX):
            first = None if committed else self._first_epoch(bounds)
            starts = committed or {
                stream.stream_id: await self._starts(stream, bounds[stream.stream_id], first)
                for stream in self._streams
            }
            before, bounds = bounds, await self._bounds()
            if first is None or _beginnings(before) == _beginnings(bounds) or self._is_whole(first, bounds):
                return Found(bounds, starts, first, bool(committed))
        raise DataLost(
            f"records of {self._names()} are removed faster than a start is found: start with 'latest', or keep the"
            " records for longer"
        )

    async def _bounds(self) -> Bounds:
        return {stream.stream_id: await self._cluster.bounds(stream.name, promise=True) for stream in self._streams}

    async def _committed(self) -> dict[int, Starts]:
        """Return the cursors of the group, by stream; empty if it has none, or the start is not ``"committed"``."""
        found: dict[int, Starts] = {}
        if self._start_at == "committed":
            for stream in self._streams:
                cursors = await committed_cursors(self._cluster, self._settings.consumer_group, stream)
                found[stream.stream_id] = {(at.streamlet_id, at.entry): place for at, place in cursors.items()}
        return found if any(found.values()) else {}

    def _first_epoch(self, bounds: Bounds) -> int | None:
        """Return the first epoch to read; None: whichever comes first. Raises `DataLost`."""
        whole = self._first_whole(bounds)
        if isinstance(self._start_at, int):
            if whole is not None and self._start_at < whole:
                raise DataLost(
                    f"retention or truncation removed records of {self._names()} before epoch {whole}, and the start"
                    f" {self._start_at} is earlier: start at {whole}, or with 'earliest'",
                    epoch=self._start_at,
                    first_whole=whole,
                )
            return self._start_at
        if self._start_at == "latest":
            opened = open_now(bounds, self._epoch_us)
            return opened if whole is None else max(opened, whole)
        return whole

    def _is_whole(self, epoch: int, bounds: Bounds) -> bool:
        """Return whether no records of an epoch or later ones were removed."""
        whole = self._first_whole(bounds)
        return whole is None or whole <= epoch

    def _names(self) -> str:
        return ", ".join(stream.name for stream in self._streams)

    def _first_whole(self, bounds: Bounds) -> int | None:
        """Return the first epoch without removed records; None: no records were removed."""
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
        """Return where to begin in each entry: exact positions, because retention may move the starts of entries."""
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
    """Return the first epoch that is not closed yet, as far as known."""
    settled = [
        time_us
        for streamlets in bounds.values()
        for entries in streamlets.values()
        for entry in entries
        if (time_us := _settled_us(entry)) is not None
    ]
    return epoch_of(min(settled, default=0), epoch_us)


def _latest_removed(entry: EntryBounds) -> int:
    """Return the greatest time of records that were removed from an entry, or a greater time."""
    times = (entry.removed_watermark_us, entry.watermark_us)
    return next((time_us for time_us in times if time_us is not None), 0)


def _beginnings(bounds: Bounds) -> list[int]:
    """Return the number of removed records of each entry."""
    return [entry.first_record for each in bounds.values() for entries in each.values() for entry in entries]


def _settled_us(entry: EntryBounds) -> int | None:
    """Return the time before which no records will follow, as far as known; None: no records, and no promise."""
    times = [time_us for time_us in (entry.watermark_us, entry.promised_us) if time_us is not None]
    return max(times) if times else None
