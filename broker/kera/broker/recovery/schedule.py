"""The order in which a recovery reads virtual segments: those that readers want come first. Pure.

    replicas, and the segments that need them ──add()──► waiting ──next()──► being read ──ended()──► read, or failed

* Virtual segments with segments that a reader waits for (`want`) come first, then those with data that consumer groups
  still have to read, in the order of the log, then older ones, the newest first. The first wanted segment decides when
  a virtual segment is read; its chunks of other segments are read along with it.
* A virtual segment is read once, and again only if further segments need it, or further backups have it. A failed one
  waits until `retry`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping

from kera.broker.records import SegmentAddress
from kera.broker.recovery.scan import ReplicasToRead, VirtualKey
from kera.core.base.ids import EntryId, Position

_LAST = (2, 0)
"""The rank of segments that are no longer needed."""


class Schedule:
    """The queue of virtual segments to read: first those that readers wait for, and each only once."""

    def __init__(self) -> None:
        self._replicas: dict[VirtualKey, ReplicasToRead] = {}
        self._sources: dict[SegmentAddress, list[VirtualKey]] = {}
        """For each segment to come, the virtual segments with chunks of it."""
        self._queue: deque[VirtualKey] = deque()
        """Waiting virtual segments, in the order set by `order`."""
        self._urgent: deque[VirtualKey] = deque()
        """Virtual segments with segments that readers wait for."""
        self._taken: set[VirtualKey] = set()
        """Virtual segments that must not be begun (again): read, being read, or failed."""
        self._reading: set[VirtualKey] = set()
        self._failed: dict[VirtualKey, str] = {}
        """Virtual segments that have to be tried again, each with the reason."""

    # -- virtual segments to read ----------------------------------------------------------------------------------

    def add(self, found: Iterable[ReplicasToRead], addresses: Collection[SegmentAddress], *, new: bool) -> None:
        """Add those of the found replicas that have chunks of segments in `addresses`.

        `new`: none of them was read for these segments before.
        """
        for replicas in found:
            needed = [address for address in replicas.segments if address in addresses]
            if not needed:
                continue
            key = replicas.key
            known = self._replicas.setdefault(key, replicas)
            known.include(replicas)
            if new:
                known.tried.clear()  # a replica that was of no use to other segments may be to these
            for address in needed:
                sources = self._sources.setdefault(address, [])
                if key not in sources:
                    sources.append(key)
            if not known.tried.issuperset(known.backup_ids):
                self._taken.discard(key)

    def forget(self, address: SegmentAddress) -> None:
        """Forget a segment that has come, or was removed."""
        self._sources.pop(address, None)
        if not self._sources:
            for each in (self._replicas, self._taken, self._failed, self._queue, self._urgent):
                each.clear()

    def again(self, address: SegmentAddress, reason: str) -> None:
        """Read all replicas with chunks of a segment again, after `retry`, because the data that had come is lost."""
        for key in self._sources.get(address, ()):
            self._replicas[key].tried.clear()
            self._failed[key] = reason

    # -- order -----------------------------------------------------------------------------------------------------

    def order(self, lengths: Mapping[SegmentAddress, int], cursor: Callable[[EntryId], Position]) -> None:
        """Sort the waiting virtual segments; `cursor`: returns the position up to which all consumer groups have read.

        `lengths`: the lengths of the segments to come.
        """
        by_entry: defaultdict[EntryId, list[SegmentAddress]] = defaultdict(list)
        for address in sorted(lengths):
            by_entry[EntryId(*address[:3])].append(address)
        ranks: dict[SegmentAddress, tuple[int, int]] = {}
        for entry_id, addresses in by_entry.items():
            position = cursor(entry_id)
            behind = [each for each in addresses if (each.group_id, each.segment_id, lengths[each]) > position]
            before = addresses[: len(addresses) - len(behind)]
            ranks.update((address, (0, number)) for number, address in enumerate(behind))
            ranks.update((address, (1, number)) for number, address in enumerate(reversed(before)))

        def rank(replicas: ReplicasToRead) -> tuple[bool, tuple[int, int], VirtualKey]:
            wanted = replicas.first or replicas.also
            return not replicas.first, min((ranks.get(each, _LAST) for each in wanted), default=_LAST), replicas.key

        waiting = [replicas for key, replicas in self._replicas.items() if key not in self._taken]
        self._queue = deque(replicas.key for replicas in sorted(waiting, key=rank))

    def want(self, address: SegmentAddress) -> None:
        """Read a segment's virtual segments first, because a reader waits for it."""
        self._urgent.extend(key for key in self._sources.get(address, ()) if key not in self._urgent)

    def next(self, is_missing: Callable[[SegmentAddress], bool]) -> ReplicasToRead | None:
        """Return the replicas to read now, if any; they must be passed to `ended`.

        `is_missing`: whether a segment needs chunks.
        """
        for queue in (self._urgent, self._queue):
            while queue:
                key = queue.popleft()
                replicas = self._replicas.get(key)
                if replicas is None or key in self._taken or key in self._failed:
                    continue
                if any(map(is_missing, replicas.segments)):
                    self._taken.add(key)
                    self._reading.add(key)
                    return replicas
        return None

    def ended(self, key: VirtualKey, failure: str) -> None:
        """Note that a virtual segment was read; `failure`: why that must be tried again, or empty."""
        self._reading.discard(key)
        if failure and key in self._replicas:
            self._failed[key] = failure

    def retry(self) -> list[tuple[ReplicasToRead, str]]:
        """Let all failed virtual segments be tried again, after `order`; return them, with the reasons."""
        failed, self._failed = self._failed, {}
        self._taken.difference_update(failed)
        return [(self._replicas[key], failure) for key, failure in failed.items()]

    # -- progress --------------------------------------------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """Whether no virtual segment is being read, or can be read now."""
        return not (self._reading or self._queue or self._urgent)

    def unread(self, addresses: Iterable[SegmentAddress]) -> set[VirtualKey]:
        """Return the virtual segments with chunks of these segments that were not read to their end."""
        sources = {key for address in addresses for key in self._sources.get(address, ())}
        return {key for key in sources if key not in self._taken or key in self._reading}

    def may_come(self, address: SegmentAddress, unread: Collection[VirtualKey]) -> bool:
        """Whether chunks of a segment may come from virtual segments being read, failed, or among the `unread`."""
        return any(
            key in unread or key in self._failed or key in self._reading for key in self._sources.get(address, ())
        )

    def count_replicas(self, address: SegmentAddress) -> int:
        """Return the number of replicas of all virtual segments with chunks of a segment."""
        return sum(len(self._replicas[key].backup_ids) for key in self._sources.get(address, ()))
