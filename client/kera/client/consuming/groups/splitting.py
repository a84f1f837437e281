"""Giving up the rest of a group of segments, when other consumers of the consumer group have nothing to read.

The coordinator asks for the rest of a lease. As soon as the member has fetched enough, it cuts the lease where a chunk
ends, stops fetching, and reports the cut with the next round. If the coordinator agrees, the lease ends there. If it
does not, because no other member wants the rest any more, fetching goes on behind the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from kera.client.cluster.fetch import Fetched
from kera.client.consuming.fetching.fetcher import Fetcher
from kera.client.consuming.groups.lease import Lease
from kera.client.consuming.groups.work_pace import WorkPace
from kera.core.base.ids import Position
from kera.v1 import consumer_group_pb2


class Splitting:
    """Splits the leases of one member."""

    def __init__(self, fetcher: Fetcher, pace: WorkPace, *, report_soon: Callable[[], None]) -> None:
        """`pace`: decides how much to keep. `report_soon`: called when a lease is cut, to report that."""
        self._fetcher = fetcher
        self._pace = pace
        self._report_soon = report_soon

    def watch(self, lease: Lease) -> None:
        """Watch the data of a lease's range."""
        self._fetcher.arrivals.watch(lease.range, partial(self._came, lease))

    def asked(self, lease: Lease, split_bytes: int) -> None:
        """Note that other members want the rest of a lease after about `split_bytes`; 0: none does."""
        lease.split_behind(self._pace.part_bytes(split_bytes), self._waiting(lease))
        self._stop_at_cut(lease)

    def answered(self, lease: Lease, message: consumer_group_pb2.GroupLease) -> Position | None:
        """Apply the coordinator's answer to a cut. Returns where to go on reading; None: it agrees, the lease ends."""
        cut, lease.cut = lease.cut, None
        if cut is None or not message.HasField("end"):
            return cut.position if cut is not None else None
        lease.end, lease.end_record = cut.position, cut.record
        return None

    def _came(self, lease: Lease, fetched: Fetched) -> None:
        lease.came(fetched)
        self._stop_at_cut(lease)

    def _waiting(self, lease: Lease) -> Iterator[Fetched]:
        """Yield the fetched data of a lease that are not being delivered yet."""
        for each in self._fetcher.arrivals.waiting():
            if each.range is lease.range and each.fetched is not None:
                yield each.fetched

    def _stop_at_cut(self, lease: Lease) -> None:
        if lease.cut is not None and not lease.range.closed:
            self._fetcher.remove(lease.range)
            self._report_soon()
