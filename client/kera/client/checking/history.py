"""The actions and observations of a cluster's clients, as they saw them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """Where a record is in a stream."""

    streamlet_id: int
    entry: int
    record: int
    """Its ordinal within the entry."""

    def __str__(self) -> str:
        return f"streamlet {self.streamlet_id}, entry {self.entry}, record {self.record}"


class Value(NamedTuple):
    """The value of a record: its producer, and the number of the record among that producer's."""

    producer: str
    number: int

    def to_bytes(self) -> bytes:
        """As it is sent."""
        return f"{self.producer}/{self.number}".encode()

    @classmethod
    def from_bytes(cls, data: bytes | None) -> Value:
        """As it was read. Raises ``ValueError`` for what is none."""
        producer, slash, number = (data or b"").decode().rpartition("/")
        if not slash:
            raise ValueError(f"a record holds {data!r}, which no producer has sent")
        return cls(producer, int(number))

    def __str__(self) -> str:
        return f"{self.producer}/{self.number}"


@dataclass(slots=True)
class History:
    """The history of one stream."""

    sent: set[Value] = field(default_factory=set)
    """That were given to a producer; what becomes of them is not known until they are in one of the following."""
    acknowledged: dict[Value, Place | None] = field(default_factory=dict)
    """With the place that the producer was told; None: it was told none."""
    refused: set[Value] = field(default_factory=set)
    """Values of which the producer got an error: they are not stored."""
    read: dict[str, list[tuple[Place, Value]]] = field(default_factory=lambda: defaultdict(list))
    """By reader, in the order in which they came; each reader has begun with the oldest record of each entry."""
    processed: dict[str, set[Value]] = field(default_factory=lambda: defaultdict(set))
    """By consumer group: what its members were given."""
    stored: list[tuple[Place, Value]] = field(default_factory=list)
    """The stored values at the end, when everything was acknowledged or given up: each entry from its beginning on."""
    removed: dict[tuple[int, int], int] = field(default_factory=dict)
    """By streamlet and entry: somebody has asked that records before this one be removed, so they may be missing."""

    def is_removed(self, place: Place) -> bool:
        """Whether what is at a place may have been removed on purpose."""
        return place.record < self.removed.get(place[:2], 0)

    def may_be_removed(self, value: Value) -> bool:
        """Whether a record that was acknowledged may have been; of one without a place nobody can say."""
        place = self.acknowledged.get(value)
        return bool(self.removed) if place is None else self.is_removed(place)
