"""Which brokers have to do with a stream. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kera.coordinator.cluster.intervals import broker_ids_of
from kera.v1 import common_pb2


@dataclass(slots=True)
class StreamBrokers:
    """Which brokers a stream's assignments name: counted, so that a change of few of thousands is cheap to follow."""

    owners: Counter[int] = field(default_factory=Counter)
    holders: Counter[int] = field(default_factory=Counter)
    """Owners, and those that have older groups."""
    concerned: Counter[int] = field(default_factory=Counter)
    """Holders, and those that a streamlet is recovered from."""

    @classmethod
    def of(cls, assignments: Iterable[common_pb2.StreamletAssignment]) -> StreamBrokers:
        """Those that these assignments name."""
        self = cls()
        for one in assignments:
            self._count(one, 1)
        return self

    @classmethod
    def of_new(cls, owners: Counter[int]) -> StreamBrokers:
        """The counts of a stream that has never been elsewhere."""
        return cls(Counter(owners), Counter(owners), Counter(owners))

    def changed(self, before: common_pb2.StreamInfo, after: common_pb2.StreamInfo) -> StreamBrokers:
        """Those of another version of the stream."""
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
