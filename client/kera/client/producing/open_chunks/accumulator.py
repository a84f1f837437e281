"""The open chunk of a streamlet: collects records until the chunk is closed and encoded."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

from kera.client.headers import Header
from kera.client.producing.encoding.epoch_cuts import NEVER_US, in_seconds
from kera.client.producing.encoding.payloads import Payload, record_payloads, timestamps
from kera.client.producing.outcomes.outcome import Outcome
from kera.client.types import Delivery, StreamDescription
from kera.core.errors import KeraError
from kera.core.native import native

# Base classes with the attributes that `native.sender` changes for each record; the native core has its own, see
# `records`.
if TYPE_CHECKING or native is None:

    class Gathered:
        """The content of an open chunk: lists of the same length."""

        __slots__ = ("epoch_end_s", "headers", "keys", "size", "times_s", "values")

        values: list[bytes | None]
        times_s: list[float]
        """Times of acceptance of the records, on the wall clock: a float costs half as much as whole microseconds."""
        keys: list[Sequence[bytes] | None] | None
        """None until the first record with a key."""
        headers: list[Sequence[Header] | None] | None
        size: int
        """Estimate of the chunk's bytes, from above."""
        epoch_end_s: float
        """A record accepted at this time, or later, is of a later epoch than the chunk."""

    class Accepted:
        """A reference to an accepted record: its chunk and index."""

        __slots__ = ("_accumulator", "_index")

        _accumulator: Any
        _index: int

else:
    Gathered, Accepted = native.Gathered, native.Accepted


class Pending(Accepted, Awaitable[Delivery]):
    """An accepted record; await it for its `Delivery`."""

    __slots__ = ()
    # No __init__, because there is one object for each record: two assignments cost half as much as a call.
    _accumulator: Accumulator
    _index: int

    def __await__(self) -> Generator[Any, None, Delivery]:
        yield from self._accumulator.delivered.wait()  # until then the chunk may be split
        first, outcome = self._accumulator.part_of(self._index)
        yield from outcome.wait()
        return self._of(outcome.result(), first)

    def _of(self, chunk: Delivery, first: int) -> Delivery:
        if chunk.record_count == 1:
            return chunk
        record = None if chunk.record is None else chunk.record + self._index - first
        return chunk._replace(record=record, record_count=1)

    def done(self) -> bool:
        """Return whether the record is delivered or has failed."""
        return self._accumulator.part_of(self._index)[1].done()

    def result(self) -> Delivery:
        """Return the delivery without waiting. Raises the record's error, or `asyncio.InvalidStateError`."""
        first, outcome = self._accumulator.part_of(self._index)
        return self._of(outcome.result(), first)

    def exception(self) -> KeraError | None:
        """Return the record's error if it has failed. Raises `asyncio.InvalidStateError` if that is not known yet."""
        return self._accumulator.part_of(self._index)[1].exception()

    def add_done_callback(self, callback: Callable[[Pending], object]) -> None:
        """Have the event loop call `callback` with this object when the record is delivered or has failed."""
        outcome = self._accumulator.part_of(self._index)[1]

        def known() -> None:
            if self.done():
                callback(self)
            else:  # the chunk has been split meanwhile, and this record is in another part
                self.add_done_callback(callback)

        outcome.when_done(known)


class Accumulator(Gathered):
    """The records of one open chunk."""

    __slots__ = ("_parts", "delivered", "epoch_end_us", "opened_s", "stream", "streamlet", "timestamps_us")

    def __init__(self, stream: str, streamlet: int, opened_s: float, epoch_end_us: int = NEVER_US) -> None:
        """`epoch_end_us`: records from this time on are of a later epoch."""
        self.stream = stream
        self.streamlet = streamlet
        self.opened_s = opened_s
        """Time of acceptance of the first record, on the loop's clock."""
        self.delivered = Outcome()
        """Outcome of the chunk, or of its first part if it is split."""
        self.epoch_end_us = epoch_end_us
        self.epoch_end_s = in_seconds(epoch_end_us)
        self.size = 0
        self.values = []
        self.times_s = []
        self.timestamps_us: dict[int, int] | None = None
        """Timestamps that the caller gave, by index; the other records have the time of their acceptance."""
        self.keys = None
        self.headers = None
        self._parts: list[tuple[int, Outcome]] | None = None

    @property
    def created_us(self) -> int:
        """Time of acceptance of the first record, on the wall clock."""
        return round(self.times_s[0] * 1e6)

    def append(self, value: bytes | None, time_s: float, size: int) -> Pending:
        """Add a record. `Producer.send` does the same inline for most records."""
        pending = Pending()
        pending._accumulator, pending._index = self, len(self.values)  # noqa: SLF001 - it has no __init__
        self.values.append(value)
        self.times_s.append(time_s)
        if self.keys is not None:
            self.keys.append(None)
        if self.headers is not None:
            self.headers.append(None)
        self.size += size
        return pending

    def describe_last(
        self, keys: Sequence[bytes] | None, timestamp_us: int | None, headers: Sequence[Header] | None
    ) -> None:
        """Add keys, time and headers to the record that was added last."""
        index = len(self.values) - 1
        if keys is not None:
            if self.keys is None:
                self.keys = [None] * (index + 1)
            self.keys[index] = keys
        if timestamp_us is not None:
            if self.timestamps_us is None:
                self.timestamps_us = {}
            self.timestamps_us[index] = timestamp_us
        if headers is not None:
            if self.headers is None:
                self.headers = [None] * (index + 1)
            self.headers[index] = headers

    def chunks(self, stream: StreamDescription, chunk_bytes_max: int, *, lean: bool) -> list[tuple[Payload, Outcome]]:
        """Make chunks of the records, each with its outcome: one chunk, unless that would be too large.

        Can be called once. Raises what `record_payloads` does.
        """
        # The estimate is usually about a chunk's size, but a single record may be as large as a segment.
        bytes_max = max(self.size * 2, chunk_bytes_max)
        times_us = timestamps(self.times_s, self.timestamps_us)
        made = list(record_payloads(self.values, times_us, self.keys, self.headers, stream, bytes_max, lean=lean))
        if len(made) == 1:
            return [(made[0], self.delivered)]
        outcomes = [self.delivered, *(Outcome() for _ in made[1:])]
        self.split([payload.record_count for payload in made], outcomes)
        return [*zip(made, outcomes, strict=True)]

    def split(self, record_counts: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        """Note that the records have become several chunks, with these record counts and outcomes."""
        self._parts, first = [], 0
        for count, outcome in zip(record_counts, outcomes, strict=True):
            self._parts.append((first, outcome))
            first += count

    def part_of(self, index: int) -> tuple[int, Outcome]:
        """Return the index of the first record in the chunk that record `index` is in, and the chunk's outcome."""
        found = (0, self.delivered)
        for part in self._parts or ():
            if part[0] <= index:
                found = part
        return found

    def fail(self, error: KeraError) -> None:
        """Fail all records with `error`."""
        self.delivered.settle(error)
