"""The collection of all replicas of one backup."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping

from kera.backup.errors import UnknownReplica
from kera.backup.replica import Replica


class Replicas:
    """The replicas of one backup, by broker and in the order of their virtual segments."""

    def __init__(self) -> None:
        self._by_broker: dict[int, dict[int, Replica]] = {}
        self._ids: dict[int, list[int]] = {}
        """Ids of each broker's replicas, ascending."""

    def __iter__(self) -> Iterator[Replica]:
        """Iterate over the present replicas; other threads than the store's may do so, too."""
        for replicas in list(self._by_broker.values()):
            yield from list(replicas.values())

    @property
    def by_broker(self) -> dict[int, dict[int, Replica]]:
        """The replicas by broker and virtual segment; read-only."""
        return self._by_broker

    def of_broker(self, broker_id: int) -> Mapping[int, Replica]:
        """Return the replicas of a broker by virtual segment."""
        return self._by_broker.get(broker_id, {})

    def find(self, broker_id: int, virtual_segment_id: int) -> Replica | None:
        """Return a replica; None: it does not exist."""
        replicas = self._by_broker.get(broker_id)
        return replicas.get(virtual_segment_id) if replicas is not None else None

    def get(self, broker_id: int, virtual_segment_id: int) -> Replica:
        """Return a replica. Raises `UnknownReplica`."""
        replica = self.find(broker_id, virtual_segment_id)
        if replica is None:
            raise UnknownReplica(
                f"this backup has no replica of virtual segment {virtual_segment_id:#x} of broker {broker_id}",
                broker_id=broker_id,
                virtual_segment_id=virtual_segment_id,
            )
        return replica

    def after(self, broker_id: int, virtual_segment_id: int, count_max: int) -> tuple[list[Replica], bool]:
        """Return up to `count_max` of the broker's replicas behind a virtual segment, and whether these are all."""
        ids = self._ids.get(broker_id, [])
        first = bisect_right(ids, virtual_segment_id)
        replicas = self.of_broker(broker_id)
        return [replicas[number] for number in ids[first : first + count_max]], first + count_max >= len(ids)

    def add(self, replica: Replica) -> None:
        """Add a replica, or a new version of an existing one."""
        replicas = self._by_broker.setdefault(replica.broker_id, {})
        if replica.virtual_segment_id not in replicas:
            insort(self._ids.setdefault(replica.broker_id, []), replica.virtual_segment_id)
        replicas[replica.virtual_segment_id] = replica

    def remove(self, replica: Replica) -> None:
        """Remove an existing replica."""
        replicas, ids = self._by_broker[replica.broker_id], self._ids[replica.broker_id]
        del replicas[replica.virtual_segment_id]
        del ids[bisect_right(ids, replica.virtual_segment_id) - 1]
        if not replicas:
            del self._by_broker[replica.broker_id], self._ids[replica.broker_id]
