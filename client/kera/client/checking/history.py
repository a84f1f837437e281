"""The actions and observations of a cluster's clients."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """The place of a record in a stream."""

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
        """Return the bytes to send."""
        return f"{self.producer}/{self.number}".encode()

    @classmethod
    def from_bytes(cls, data: bytes | None) -> Value:
        """Parse bytes that were read. Raises ``ValueError`` if they are not such a value."""
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
    """Values that a producer was given; their outcome is not known unless they are also in one of the next fields."""
    acknowledged: dict[Value, Place | None] = field(default_factory=dict)
    """Acknowledged values, with the place that the producer got; None: it got none."""
    refused: set[Value] = field(default_factory=set)
    """Values for which the producer got an error: they are not stored."""
    read: dict[str, list[tuple[Place, Value]]] = field(default_factory=lambda: defaultdict(list))
    """Values by reader, in order of arrival; each reader has begun with the oldest record of each entry."""
    processed: dict[str, set[Value]] = field(default_factory=lambda: defaultdict(set))
    """Values that the members of consumer groups got, by consumer group."""
    stored: list[tuple[Place, Value]] = field(default_factory=list)
    """The stored values at the end, when all were acknowledged or given up: each entry from its beginning on."""
    removed: dict[tuple[int, int], int] = field(default_factory=dict)
    """By streamlet and entry: the ordinal before which records were removed on purpose, so that they may be missing."""

    def is_removed(self, place: Place) -> bool:
        """Return whether the record at a place may have been removed on purpose."""
        return place.record < self.removed.get(place[:2], 0)

    def may_be_removed(self, value: Value) -> bool:
        """Return whether an acknowledged record may have been removed; without a place, by any removal."""
        place = self.acknowledged.get(value)
        return bool(self.removed) if place is None else self.is_removed(place)
