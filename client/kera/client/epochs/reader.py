"""Reads the epochs of some streams in order: each once it is closed, equal for all readers.

It reads entries up to the ends that their brokers report, and fetches ahead beyond that. When the entries that hold up
the next epoch have no more to read, it asks brokers again for new ends and promises.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

from kera.client import arguments
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.fetch import Wanted
from kera.client.consuming.committed import report_cursors
from kera.client.epochs.beginning import Beginning, EpochStart, Starts, open_now
from kera.client.epochs.entry_reader import EntryReader
from kera.client.epochs.epoch import Epoch, in_order
from kera.client.epochs.merging import Decision, decide
from kera.client.epochs.resuming import Resumed
from kera.client.settings import ConsumerSettings
from kera.client.types import EntryBounds, StreamDescription
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.errors import ClosedError, InvalidArgument, RecordTooLarge

EpochEnd: TypeAlias = int | Literal["latest"]
STARTS = ("earliest", "latest", "committed")
ENDS = ("latest",)
EPOCH_BYTES_MAX = 1 << 30
POLL_S = 0.05
"""Minimum pause between two requests for the progress of entries that hold up an epoch."""
PAUSE_S_MAX = 1.0
LOOKS_SHARE = 0.1
"""Share of time for such requests: waiting readers must not keep brokers busy, however many entries they have."""
PREFETCH_BYTES_MIN = 1 << 20
"""Minimum prefetch of an entry, however many entries there are."""


class Epochs(AsyncIterator[Epoch]):
    """The epochs of some streams. Made by `Client.epochs`; use it as an async context manager.

    ``async for epoch in epochs`` gives the epochs with records, in order, each when it is closed: when no more records
    of it can come. Their contents and order depend on the streams' logs alone.
    """

    def __init__(
        self,
        cluster: Cluster,
        streams: Sequence[str],
        settings: ConsumerSettings,
        *,
        epoch_ms: int | None,
        start: EpochStart,
        end: EpochEnd | None,
        epoch_bytes_max: int,
        copied: bool = False,
    ) -> None:
        """`copied`: copy chunks out of brokers' memory, for callers that look at all values at once."""
        if not streams:
            raise InvalidArgument("an epoch consumer needs streams: name one at least")
        self._names = tuple(dict.fromkeys(arguments.names("streams", streams)))
        self._cluster = cluster
        self._settings = settings
        self._copied = copied
        self._asked_ms = None if epoch_ms is None else arguments.whole("epoch_ms", epoch_ms, 1, arguments.UINT32_MAX)
        self._start_at = _checked("start", start, STARTS)
        self._end_at = None if end is None else _checked("end", end, ENDS)
        self._bytes_max = epoch_bytes_max
        self._epoch_us = 0
        self._pause_s = POLL_S
        self._held_bytes = 0
        """Size of the chunks at hand, over all entries."""
        self._first: int | None = None
        """The first epoch to read; None: whichever comes first."""
        self._end: int | None = None
        """The epoch to stop before; None: read for ever."""
        self._last: int | None = None
        """The last delivered epoch."""
        self._readers: dict[EntryId, EntryReader] = {}
        self._order: dict[int, int] = {}
        """The index of each stream, by id, among the given streams."""
        self.epochs_read = self.records_read = 0
        """Number of delivered epochs and records."""
        self.late_records = 0
        """Number of late records among these: see `Epoch.late_records`."""
        self._resumed: Resumed | None = None
        """Checks for a start at the cursors of a consumer group; None: it starts elsewhere."""
        self._starting, self._in_turn = asyncio.Lock(), asyncio.Lock()
        self._started = self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def epoch_ms(self) -> int:
        """Length of an epoch; 0: the reader has not started."""
        return self._epoch_us // 1000

    async def start(self) -> None:
        """Look up the streams, and decide where to start.

        Raises `UnknownStream`, `InvalidArgument`, and `DataLost` if records of the first epoch were removed.
        """
        async with self._starting:
            if self._started:
                return
            self._check_open()
            streams = [await self._cluster.stream(name) for name in self._names]
            self._epoch_us = 1000 * _length_ms(streams, self._asked_ms)
            self._order = {stream.stream_id: number for number, stream in enumerate(streams)}
            beginning = Beginning(self._cluster, streams, self._settings, self._start_at, self._epoch_us)
            bounds, starts, first, committed = await beginning.find()
            self._check_open()  # `close` may have been called meanwhile
            if committed:
                self._resumed = Resumed(self._cluster, streams, starts, self._epoch_us)
            for stream in streams:
                self._add(stream, starts[stream.stream_id], bounds[stream.stream_id], first)
            if self._end_at == "latest":
                self._end = open_now(bounds, self._epoch_us)
            elif isinstance(self._end_at, int):
                self._end = self._end_at
            self._first = first
            self._started = True

    def _add(
        self,
        stream: StreamDescription,
        starts: Starts,
        bounds: Mapping[int, Sequence[EntryBounds]],
        first: int | None,
    ) -> None:
        count = sum(map(len, bounds.values())) * len(self._names)
        share = max(PREFETCH_BYTES_MIN, int(self._settings.prefetch_bytes_max) // max(1, count))
        settings = self._settings.model_copy(update={"prefetch_bytes_max": share})
        for streamlet_id, entries in bounds.items():
            for number, bound in enumerate(entries):
                entry_id = EntryId(stream.stream_id, streamlet_id, number)
                wanted = Wanted(entry_id, starts.get((streamlet_id, number), EARLIEST), None)
                reader = EntryReader(
                    self._cluster,
                    stream,
                    wanted,
                    settings,
                    epoch_us=self._epoch_us,
                    first_epoch=first,
                    copied=self._copied,
                )
                reader.learn(bound, by_clock=_is_by_clock(stream))
                self._readers[entry_id] = reader

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Epoch:
        """Return the next epoch with records, when it is closed.

        Raises the errors of `Consumer.batches`, `EpochPassed`, also if a group would go on within an epoch, and
        `RecordTooLarge` for an epoch of more than ``epoch_bytes_max``.
        """
        await self.start()
        async with self._in_turn:
            while True:
                self._check_open()
                decision = decide(reader.reached() for reader in self._readers.values())
                if self._is_over(decision):
                    raise StopAsyncIteration
                if self._last is not None and decision.epoch is not None and decision.epoch <= self._last:
                    for reader in self._readers.values():
                        reader.check_comes_after(self._last)
                if decision.epoch is not None and not decision.waits_for:
                    await self._check_whole(decision.epoch)
                    for reader in self._readers.values():
                        if not reader.is_intact(decision.epoch):
                            await reader.read_again(decision.epoch)
                    return self._take(decision.epoch)
                await self._advance(decision)

    async def _check_whole(self, epoch: int) -> None:
        if self._resumed is not None:
            in_it = {reader.entry.stream_id for reader in self._readers.values() if reader.reached().pending == epoch}
            await self._resumed.check(epoch, in_it)

    def _is_over(self, decision: Decision[EntryId]) -> bool:
        """Return whether there are no more epochs before the end."""
        if self._end is None or (decision.epoch is not None and decision.epoch < self._end):
            return False
        if self._first is not None and self._first >= self._end:
            return True  # entries that begin behind all records would never report that they have reached the end
        reached = (reader.reached() for reader in self._readers.values())
        return all(each.open is None or each.open >= self._end for each in reached)

    async def _advance(self, decision: Decision[EntryId]) -> None:
        """Read chunks that may be of the next epoch; if there are none, ask for the progress of entries."""
        found = False
        for entry in decision.waits_for:
            reader = self._readers[entry]
            while reader.has_more and reader.is_open(decision.epoch):
                found, before = True, reader.pending_bytes
                await reader.read(decision.epoch)
                self._held_bytes += reader.pending_bytes - before
                self._check_size()
        if not found:
            await asyncio.sleep(self._pause_s)
            clock = self._cluster.runtime.clock
            begun_s = clock.monotonic_s()
            await self._look()
            self._pause_s = pause_s(clock.monotonic_s() - begun_s)

    async def _look(self) -> None:
        for name in self._names:
            bounds = await self._cluster.bounds(name, promise=True)
            stream = await self._cluster.stream(name)
            for streamlet_id, entries in bounds.items():
                for number, bound in enumerate(entries):
                    reader = self._readers.get(EntryId(stream.stream_id, streamlet_id, number))
                    if reader is not None:
                        reader.learn(bound, by_clock=_is_by_clock(stream))

    def _check_size(self) -> None:
        if self._held_bytes > self._bytes_max:
            raise RecordTooLarge(
                f"an epoch of {self.epoch_ms} ms of {', '.join(self._names)} has more than {self._bytes_max} bytes:"
                " read shorter epochs, or set epoch_bytes_max higher",
                limit=self._bytes_max,
            )

    def _take(self, number: int) -> Epoch:
        chunks = {entry: reader.take(number) for entry, reader in self._readers.items()}
        self._held_bytes = sum(reader.pending_bytes for reader in self._readers.values())
        self._last = number
        epoch = Epoch(
            number,
            number * self._epoch_us,
            (number + 1) * self._epoch_us,
            in_order(chunks, self._order),
            self.streams(),
        )
        self.epochs_read += 1
        self.records_read += epoch.records
        self.late_records += epoch.late_records
        return epoch

    def streams(self) -> dict[int, StreamDescription]:
        """Return the streams, by id, with the newest columns that a chunk had."""
        found: dict[int, StreamDescription] = {}
        for reader in self._readers.values():
            stream = reader.stream
            known = found.get(stream.stream_id)
            if known is None or known.schema_id < stream.schema_id:
                found[stream.stream_id] = stream
        return found

    @property
    def throttled_ms(self) -> int:
        """Total time that brokers have held answers back because a quota was used up (docs/quotas.md)."""
        return sum(reader.throttled_ms for reader in self._readers.values())

    def held_up_by(self) -> list[EntryId]:
        """Return the entries that keep the next epoch from closing, as far as known."""
        return list(decide(reader.reached() for reader in self._readers.values()).waits_for)

    def positions(self, stream: str | None = None) -> dict[int, list[Position]]:
        """Return where the first undelivered epoch begins, per streamlet and entry."""
        return self.positions_of(self.cursors(), stream)

    def cursors(self) -> dict[EntryId, Position]:
        """Return where the first undelivered epoch begins in each entry of all streams."""
        return {entry: reader.position for entry, reader in self._readers.items()}

    def positions_of(self, cursors: Mapping[EntryId, Position], stream: str | None) -> dict[int, list[Position]]:
        """Return the positions of `cursors` in one stream, in the form of `positions`; None: in the first stream."""
        name = stream or self._names[0]
        found: dict[int, list[Position]] = {}
        for entry, position in sorted(cursors.items()):
            if self._readers[entry].stream.name == name:
                found.setdefault(entry.streamlet_id, []).append(position)
        return found

    async def commit(self) -> None:
        """Commit that all delivered epochs have been processed; ``start="committed"`` goes on there.

        Raises the errors of `Consumer.commit`.
        """
        await self.commit_up_to(self.cursors())

    async def commit_up_to(self, cursors: Mapping[EntryId, Position]) -> None:
        """Commit up to an earlier result of `cursors`."""
        for stream_id, stream in self.streams().items():
            mine = {entry: position for entry, position in cursors.items() if entry.stream_id == stream_id}
            await self._cluster.commit(self._settings.consumer_group, stream.name, mine)
            await report_cursors(self._cluster, self._settings.consumer_group, stream, mine)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the reader of epochs is closed")

    async def close(self) -> None:
        """Stop fetching. Delivered epochs stay valid."""
        self._closed = True
        await asyncio.gather(*(reader.close() for reader in self._readers.values()))


def pause_s(look_s: float) -> float:
    """Return the pause after a request for progress that took `look_s`."""
    return min(PAUSE_S_MAX, max(POLL_S, look_s * (1 / LOOKS_SHARE - 1)))


def _checked(what: str, place: Any, words: tuple[str, ...]) -> int | str:
    if isinstance(place, str):
        if place in words:
            return place
    elif isinstance(place, int) and not isinstance(place, bool):
        return place
    raise InvalidArgument(f"{what} is the number of an epoch, or one of {', '.join(words)}, not {place!r}")


def _length_ms(streams: Sequence[StreamDescription], asked_ms: int | None) -> int:
    """Return the length of epochs. Raises `InvalidArgument`."""
    for stream in streams:
        if not stream.config.epoch_ms:
            raise InvalidArgument(
                f"stream {stream.name!r} has no epochs; kera stream alter {stream.name} --epoch says how long they are",
                stream=stream.name,
            )
    length_ms = asked_ms or max(stream.config.epoch_ms for stream in streams)
    for stream in streams:
        if length_ms % stream.config.epoch_ms:
            raise InvalidArgument(
                f"epochs of {length_ms} ms are not a multiple of the {stream.config.epoch_ms} ms of stream"
                f" {stream.name!r}",
                stream=stream.name,
                epoch_ms=length_ms,
            )
    return length_ms


def _is_by_clock(stream: StreamDescription) -> bool:
    return stream.config.punctuation == "clock"
