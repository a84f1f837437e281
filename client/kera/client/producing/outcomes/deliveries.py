"""Results of stored chunks: brokers' answers, and the deliveries that are made from them on demand."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from kera.client.stream_config import durability_name
from kera.client.types import Delivery
from kera.core.base.ids import EntryId, Position
from kera.v1 import broker_pb2

Numbers: TypeAlias = npt.NDArray[np.int64]
"""A column with a number for each chunk."""


class Stored(NamedTuple):
    """A broker's answer that a chunk is stored; the `Delivery` is made on demand."""

    stream: str
    stream_id: int
    streamlet_id: int
    record_count: int
    status: broker_pb2.ChunkStatus
    backups: tuple[int, ...]

    def delivery(self) -> Delivery:
        """Return the delivery that users see."""
        status = self.status
        known = bool(status.group_id)  # the broker may no longer know the place of a duplicate
        return Delivery(
            stream=self.stream,
            entry=EntryId(self.stream_id, self.streamlet_id, status.entry),
            position=Position(status.group_id, status.segment_id, status.position) if known else None,
            record=status.first_record if known else None,
            record_count=self.record_count,
            durability=durability_name(status.durability),
            duplicate=status.duplicate,
            virtual_segment=status.virtual_segment_id,
            backups=self.backups,
        )


class StoredBundle(NamedTuple):
    """A broker's answer that the chunks of a bundle are stored."""

    stream: str
    stream_id: int
    streamlets: Numbers
    record_counts: Numbers
    statuses: Sequence[broker_pb2.ChunkStatus]
    """Statuses of all chunks in the answer; those of this bundle begin with the `first`."""
    first: int
    places: Mapping[int, tuple[int, ...]]
    """The backups of virtual segments."""

    def delivery(self, index: int) -> Delivery:
        """Return the delivery of chunk number `index`, as users see it."""
        status = self.statuses[self.first + index]
        backups = self.places.get(status.virtual_segment_id, ())
        count, streamlet = int(self.record_counts[index]), int(self.streamlets[index])
        return Stored(self.stream, self.stream_id, streamlet, count, status, backups).delivery()


class Deliveries(Sequence[Delivery]):
    """The deliveries of the chunks of a batch, in a sequence that makes each one on demand.

    A batch for many streamlets has many deliveries, and most callers only care that there is no error.
    """

    __slots__ = ("_ends", "_parts")

    def __init__(self, parts: Iterable[Delivery | StoredBundle]) -> None:
        self._parts = [*parts]
        self._ends = [
            *accumulate(len(part.streamlets) if isinstance(part, StoredBundle) else 1 for part in self._parts)
        ]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Delivery: ...

    @overload
    def __getitem__(self, index: slice) -> list[Delivery]: ...

    def __getitem__(self, index: int | slice) -> Delivery | list[Delivery]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        which = bisect_right(self._ends, at)
        part = self._parts[which]
        if isinstance(part, Delivery):
            return part
        return part.delivery(at - self._ends[which] + len(part.streamlets))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __repr__(self) -> str:
        return f"Deliveries({[*self]})"
