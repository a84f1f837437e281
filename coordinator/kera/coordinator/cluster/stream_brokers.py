"""The brokers that a stream's assignments name. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kera.coordinator.cluster.intervals import broker_ids_of
from kera.v1 import common_pb2


@dataclass(slots=True)
class StreamBrokers:
    """The brokers that a stream's assignments name, with counts, so that following a change of a few assignments is
    cheap.
    """

    owners: Counter[int] = field(default_factory=Counter)
    holders: Counter[int] = field(default_factory=Counter)
    """Owners, and brokers that have older groups."""
    concerned: Counter[int] = field(default_factory=Counter)
    """Holders, and brokers from which a streamlet is recovered."""

    @classmethod
    def of(cls, assignments: Iterable[common_pb2.StreamletAssignment]) -> StreamBrokers:
        """Return the counts of these assignments."""
        self = cls()
        for one in assignments:
            self._count(one, 1)
        return self

    @classmethod
    def of_new(cls, owners: Counter[int]) -> StreamBrokers:
        """Return the counts of a stream that has never been elsewhere."""
        return cls(Counter(owners), Counter(owners), Counter(owners))

    def changed(self, before: common_pb2.StreamInfo, after: common_pb2.StreamInfo) -> StreamBrokers:
        """Return the counts after a change of the stream from `before` to `after`."""
        if before.assignments_version == after.assignments_version:
            return self
        made = StreamBrokers(Counter(self.owners), Counter(self.holders), Counter(self.concerned))
        for old, new in zip(before.assignments, after.assignments, strict=True):
            if old != new:
                made._count(old, -1)
                made._count(new, 1)
        return made

    def _count(self, one: common_pb2.StreamletAssignment, count: int) -> None:
        self.owners[one.broker_id] += count
        if not (one.intervals or one.sources):
            self.holders[one.broker_id] += count
            self.concerned[one.broker_id] += count
            return
        holders = broker_ids_of(one)
        for broker_id in holders:
            self.holders[broker_id] += count
        for broker_id in holders.union(source.broker_id for source in one.sources):
            self.concerned[broker_id] += count
