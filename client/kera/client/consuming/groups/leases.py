"""The leases of one member of a consumer group: which it has, may deliver, has to report, and has lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from kera.client.cluster.fetch import Wanted
from kera.client.cluster.retry import RetryTime
from kera.client.cluster.sense import making_sense
from kera.client.consuming.fetching.fetcher import Fetcher
from kera.client.consuming.fetching.ranges import Range, rest_of_group
from kera.client.consuming.groups.lease import Lease, LeaseKey, Reach
from kera.client.consuming.groups.splitting import Splitting
from kera.client.consuming.groups.work_pace import WorkPace
from kera.client.types import StreamDescription, position_of
from kera.core.base.ids import Position
from kera.core.errors import DataLost, LeaseLost
from kera.v1 import consumer_group_pb2

STEPS_MAX = 4096
"""Maximum number of steps in one request to the coordinator, of some 60 bytes each; the rest goes with the next round,
which follows at once."""
ENDED_MAX = 8192
"""Maximum number of ended groups that one request reports as waiting for a commit. A member with more gets no new
groups before it commits."""


class LostGroup(NamedTuple):
    """A group of segments that another member has now."""

    stream: str
    streamlet: int
    entry: int
    group_id: int


class Leases:
    """The leases of one member. Their groups are fetched for as long as they may be delivered."""

    def __init__(
        self,
        consumer_group: str,
        streams: Mapping[int, StreamDescription],
        fetcher: Fetcher,
        *,
        pace: WorkPace,
        processed_when_back: bool,
        report_soon: Callable[[], None],
        on_lost: Callable[[list[LostGroup]], None] | None,
        steps_max: int = STEPS_MAX,
    ) -> None:
        """`pace`: of the caller. `processed_when_back`: delivered chunks count as processed when the caller asks for
        more; otherwise only with `process_all`. `report_soon`: called when there is something to report. `on_lost`: see
        `raise_lost`.
        """
        self._consumer_group = consumer_group
        self._streams = streams
        self._fetcher = fetcher
        self._processed_when_back = processed_when_back
        self._report_soon = report_soon
        self._splitting = Splitting(fetcher, pace, report_soon=report_soon)
        self._on_lost = on_lost
        self._steps_max = steps_max
        self._held: dict[LeaseKey, Lease] = {}
        self._of_range: dict[Range, Lease] = {}
        self._with_gaps: deque[Lease] = deque()
        """Leases with gaps before them that are to be reported to the caller."""
        self._lost: list[LostGroup] = []
        """Lost groups that are to be reported to the caller."""
        self._in_hand: Lease | None = None
        """The lease of the chunk that the caller may not have processed."""

    # -- what the caller gets --------------------------------------------------------------------------------------

    def of(self, fetched: Range) -> Lease | None:
        """Return the lease of a fetched range, if more of it may be delivered."""
        lease = self._of_range.get(fetched)
        return lease if lease is not None and lease.usable else None

    def positions(self, stream: str) -> dict[tuple[int, int], Position]:
        """Return how far groups were delivered, by streamlet and group; for several parts of a group, the first one."""
        return {
            (key.entry.streamlet_id, key.group_id): lease.delivered.next
            for key, lease in sorted(self._held.items(), key=lambda item: item[1].delivered.next, reverse=True)
            if self._streams[key.entry.stream_id].name == stream
        }

    @property
    def in_hand(self) -> Lease | None:
        """The lease of the last chunk, while the caller has not asked for more."""
        return self._in_hand

    def take_in_hand(self, lease: Lease) -> None:
        """Note that the caller gets a chunk of a lease."""
        self._in_hand = lease

    def caller_is_back(self) -> None:
        """Note that the caller asks for more: it has processed its last chunk."""
        lease, self._in_hand = self._in_hand, None
        if lease is not None:
            self._process(lease)
            self._report_if_over(lease)

    def process_all(self) -> None:
        """Count all delivered chunks as processed."""
        for lease in self._held.values():
            lease.processed = lease.delivered

    def end(self, lease: Lease) -> None:
        """Note that a lease is closed, and delivered completely."""
        lease.ended = True
        self._report_soon()

    def end_opened(self, lease: Lease) -> None:
        """Note that the opened data of a lease are delivered. If it is cut there, it ends."""
        opened, lease.opened = lease.opened, None
        if opened is None or lease.opened_range is not lease.range or not lease.usable:
            return
        if lease.range.cut_at is not None and opened.next >= lease.range.cut_at:
            self.end(lease)

    def pass_gap(self, lease: Lease, gap: DataLost) -> DataLost | None:
        """See `Lease.pass_gap`."""
        told = lease.pass_gap(self._name(lease), gap)
        self._process(lease)
        self._report_if_over(lease)
        return told

    def next_gaps(self) -> DataLost | None:
        """Return the next error for the caller about records that were removed before a group was found; else None."""
        while self._with_gaps:
            lease = self._with_gaps.popleft()
            if not lease.usable or lease.finished or not lease.gaps:
                continue  # another member reports it
            told = lease.deliver_gaps(self._name(lease))
            if self._processed_when_back:
                lease.processed = lease.processed._replace(gaps=lease.delivered.gaps)
            self._report_soon()
            return told
        return None

    def raise_lost(self, *, committing: bool) -> None:
        """Report lost groups to the caller: by `on_lost`, or with `LeaseLost`. When committing, raise in any case."""
        lost, self._lost = self._lost, []
        if not lost:
            return
        if self._on_lost is not None:
            self._on_lost(lost)
            if not committing:
                return
        names = ", ".join(f"{each.group_id} of {each.stream}/{each.streamlet}" for each in lost[:5])
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        raise LeaseLost(
            f"consumer group {self._consumer_group!r}: group {names}{more} belongs to another consumer now: this one"
            " was silent or stuck for too long, or the consumer group was reset; uncommitted records are read again."
            " Ask for more with another call of records(), batches() or poll()",
            consumer_group=self._consumer_group,
            groups=[list(each) for each in lost],
        )

    def _process(self, lease: Lease) -> None:
        if self._processed_when_back:
            lease.processed = lease.delivered

    def _name(self, lease: Lease) -> str:
        return self._streams[lease.key.entry.stream_id].name

    # -- reports to the coordinator, and its answers ---------------------------------------------------------------

    def report(self, request: consumer_group_pb2.ConsumeRoundRequest, *, due: bool) -> bool:
        """Fill in the progress of leases that are over and, when it is `due`, of all leases with progress.

        Returns whether some are left for the next round.
        """
        for lease in list(self._held.values()):
            over = self._is_over(lease)
            if (
                not over
                and lease.cut is None
                and lease.ended
                and not lease.asked_back
                and len(request.ended) < ENDED_MAX
            ):
                request.ended.append(lease.step())
            if not (over or lease.cut is not None or (due and lease.processed != lease.reported)):
                continue
            if len(request.steps) == self._steps_max:
                return True
            step = lease.step()
            step.released = over and not step.finished
            request.steps.append(step)
            self._held[lease.key] = self._held.pop(lease.key)  # moves behind the others, in case there are too many
        return False

    def last_steps(self) -> list[list[consumer_group_pb2.GroupStep]]:
        """Return the steps of leases with progress, or finished ones, request by request; the last may be empty."""
        steps = [each.step() for each in self._held.values() if each.processed != each.reported or each.finished]
        return [steps[first : first + self._steps_max] for first in range(0, max(1, len(steps)), self._steps_max)]

    def apply(
        self,
        request: consumer_group_pb2.ConsumeRoundRequest,
        answer: consumer_group_pb2.ConsumeRoundResponse,
    ) -> None:
        """Apply the coordinator's answer to a round."""
        refused = {LeaseKey.of(step) for step in answer.refused}
        lost = []
        for step in request.steps:
            key = LeaseKey.of(step)
            lease = self._held.get(key)
            if lease is None:
                continue
            if key in refused:
                lost.append(lease)
            elif step.finished or step.released:
                self._drop(lease)
            else:
                lease.reported = Reach.of_step(step)
        given = {LeaseKey.of(each): each for each in answer.held}
        lost += [
            lease
            for key, lease in self._held.items()
            if key not in refused and (key not in given or lease.ends_elsewhere(given[key]))
        ]
        for lease in lost:
            self._lose(lease)
        asked = {LeaseKey.of(step) for step in request.steps if step.HasField("split")}
        for key, message in given.items():
            lease = self._held.get(key) or self._take_up(key, message)
            if lease.cut is not None and (message.HasField("end") or key in asked):
                behind = self._splitting.answered(lease, message)
                if behind is not None:
                    self._go_on(lease, behind)
            gaps = [(gap.first_record, gap.end_record) for gap in message.lost]
            lease.gaps = [gap for gap in gaps if gap not in lease.delivered.gaps]
            if lease.gaps and lease not in self._with_gaps:
                self._with_gaps.append(lease)
                self._fetcher.arrivals.wake()
            if message.give_back and not lease.asked_back:
                lease.asked_back = True
                self._fetcher.remove(lease.range)
            self._splitting.asked(lease, 0 if lease.asked_back else message.split_bytes)
            self._report_if_over(lease)
        if lost:
            self._fetcher.arrivals.wake()

    def _take_up(self, key: LeaseKey, message: consumer_group_pb2.GroupLease) -> Lease:
        start, end = position_of(message.next), position_of(message.end) if message.HasField("end") else None
        if end is not None and start >= end:  # all of it is processed, but no member has reported it as finished
            fetched = Range(rest_of_group(key.entry, start, end), RetryTime(self._fetcher.cluster.settings))
            fetched.closed = True
        else:
            fetched = self._fetch(key, rest_of_group(key.entry, start, end))
        lease = self._held[key] = self._of_range[fetched] = Lease(key, message, fetched)
        lease.ended = fetched.closed
        self._splitting.watch(lease)
        return lease

    def _fetch(self, key: LeaseKey, wanted: Wanted) -> Range:
        with making_sense():
            return self._fetcher.add(self._streams[key.entry.stream_id], wanted, is_group=True)

    def _go_on(self, lease: Lease, start: Position) -> None:
        """Fetch the data behind a cut that the coordinator has not accepted."""
        lease.go_on_with(self._fetch(lease.key, rest_of_group(lease.key.entry, start)))
        self._of_range[lease.range] = lease
        self._splitting.watch(lease)

    def _drop(self, lease: Lease) -> None:
        del self._held[lease.key]
        for each in (lease.range, *lease.former):
            self._fetcher.remove(each)
            self._fetcher.arrivals.unwatch(each)
            each.dropped = True
            del self._of_range[each]

    def _lose(self, lease: Lease) -> None:
        lease.lost = True
        self._drop(lease)
        _, streamlet_id, entry = lease.key.entry
        self._lost.append(LostGroup(self._name(lease), streamlet_id, entry, lease.key.group_id))

    def _is_over(self, lease: Lease) -> bool:
        """Return whether a group is finished, or can be given back."""
        given_back = lease.asked_back and lease.processed == lease.delivered and lease is not self._in_hand
        return lease.finished or given_back

    def _report_if_over(self, lease: Lease) -> None:
        if not lease.lost and self._is_over(lease):
            self._report_soon()
