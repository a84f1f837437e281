"""Asks brokers which groups their streamlets have.

The ids of a streamlet's groups grow, over all its entries and brokers. An answer is an interval of ids and all groups
in it with records to read. It is final: a group that is not in it never appears later with an id of that interval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kera.client.cluster.asking import ask_broker, broker_failed
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.intervals import check_part, merged_bounds
from kera.client.cluster.retry import retrying
from kera.client.cluster.sense import making_sense
from kera.client.tasks import Tasks
from kera.client.types import EntryBounds, Interval, StreamDescription, fill_cursor, position_of
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.base.telemetry import get_logger
from kera.core.errors import KeraError, NotOwner
from kera.core.rpc import api
from kera.v1 import broker_pb2, consumer_group_pb2

log = get_logger("kera.consumer")

GROUPS_MAX = 1000
"""Maximum number of groups of a streamlet in one answer; the next look returns the rest."""


TOLD_MAX = 4096
"""Maximum number of groups and of entries' start positions in one message to the coordinator: some 50 bytes each."""


@dataclass(slots=True)
class Finds:
    """Answers to `Look`s."""

    starts: list[consumer_group_pb2.StreamletStart] = field(default_factory=list)
    seen: list[consumer_group_pb2.SeenGroups] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.starts or self.seen)

    def add(self, finds: Finds) -> None:
        """Add more finds."""
        self.starts.extend(finds.starts)
        self.seen.extend(finds.seen)

    def take(self, told_max: int = TOLD_MAX) -> Finds:
        """Remove and return the finds for one message; the rest stays."""
        taken, count = Finds(), 0
        for each in self.starts:
            count += len(each.cursors)
            if taken and count > told_max:
                break
            taken.starts.append(each)
        for found in self.seen:
            count += len(found.groups)
            if taken and count > told_max:
                break
            taken.seen.append(found)
        self.starts, self.seen = self.starts[len(taken.starts) :], self.seen[len(taken.seen) :]
        return taken


class Discovery:
    """Answers the coordinator's questions about streamlets, for one member of a consumer group.

    It looks at each streamlet separately, so that a broker that does not answer delays no other one.
    """

    def __init__(
        self,
        cluster: Cluster,
        streams: Mapping[int, StreamDescription],
        tasks: Tasks,
        *,
        start: str,
        on_found: Callable[[], None],
    ) -> None:
        """`start`: see `look_around`. `on_found`: called when there are finds for the coordinator."""
        self._cluster = cluster
        self._streams = streams
        self._tasks = tasks
        self._start = start
        self._on_found = on_found
        self._looking: set[tuple[int, int]] = set()
        self.finds = Finds()
        """Finds that have to be sent to the coordinator."""

    def look(self, looks: Iterable[consumer_group_pb2.Look]) -> None:
        """Answer these looks, in the background."""
        for look in looks:
            place = (look.stream_id, look.streamlet_id)
            if place not in self._looking and look.stream_id in self._streams:
                self._looking.add(place)
                self._tasks.start(self._look(look))

    async def _look(self, look: consumer_group_pb2.Look) -> None:
        try:
            with making_sense():
                finds = await look_around(self._cluster, self._streams[look.stream_id].name, [look], start=self._start)
            self.finds.add(finds)
            if finds:
                self._on_found()
        finally:
            self._looking.discard((look.stream_id, look.streamlet_id))


async def look_around(cluster: Cluster, name: str, looks: Sequence[consumer_group_pb2.Look], *, start: str) -> Finds:
    """Answer `looks` at streamlets of one stream. A look is left out if a broker does not answer.

    `start`: where a consumer group that is new to a streamlet begins, ``earliest`` or ``latest``.
    Raises `UnknownStream`.
    """
    if any(look.start for look in looks):
        cluster.forget(name)  # if a streamlet has moved, its former broker does not know its end
    stream = await cluster.stream_or_last_seen(name)
    finds = Finds()
    for result in await asyncio.gather(
        *(_look(cluster, stream, look, start) for look in looks), return_exceptions=True
    ):
        if isinstance(result, KeraError):
            if not result.retriable:
                raise result
            log.debug("groups not listed", stream=name, error=result.message)
        elif isinstance(result, BaseException):
            raise result
        else:
            begun, seen = result
            if begun is not None:
                finds.starts.append(begun)
            if seen.through_group_id > seen.after_group_id:
                finds.seen.append(seen)
    return finds


async def list_groups(cluster: Cluster, name: str, streamlet_id: int) -> list[consumer_group_pb2.SeenGroup]:
    """Return all groups of a streamlet that have records to read, by id."""
    found: list[consumer_group_pb2.SeenGroup] = []
    after_group_id = 0

    async def attempt() -> consumer_group_pb2.SeenGroups:
        return await _list(cluster, await cluster.stream(name), streamlet_id, after_group_id)

    while True:
        seen = await retrying(attempt, cluster.settings)
        found += seen.groups
        if seen.through_group_id == after_group_id:
            return found
        after_group_id = seen.through_group_id


async def _look(
    cluster: Cluster, stream: StreamDescription, look: consumer_group_pb2.Look, start: str
) -> tuple[consumer_group_pb2.StreamletStart | None, consumer_group_pb2.SeenGroups]:
    """Return where to begin, if the look asks for it, and the groups from there on."""
    if not look.start:
        return None, await _list(cluster, stream, look.streamlet_id, look.after_group_id)
    begun = consumer_group_pb2.StreamletStart(stream_id=stream.stream_id, streamlet_id=look.streamlet_id)
    entries = [EntryId(stream.stream_id, look.streamlet_id, entry) for entry in range(stream.config.entries)]
    if start == "latest":
        bounds = await _bounds(cluster, stream, look.streamlet_id)
        for entry, known in zip(entries, bounds, strict=True):
            fill_cursor(begun.cursors.add(), entry, known.end)
            begun.records.add(record=known.next_record)
        return begun, await _list(
            cluster, stream, look.streamlet_id, max(0, min(known.end.group_id for known in bounds) - 1)
        )
    seen = await _list(cluster, stream, look.streamlet_id, 0)
    first: dict[int, int] = {}
    for group in seen.groups:
        first.setdefault(group.start.entry, group.first_record)
    for number, known in enumerate(await _bounds(cluster, stream, look.streamlet_id)):
        first.setdefault(number, known.first_record)  # so that records removed from a still empty entry are noticed
        if known.starts_behind_loss:
            first[number] += 1  # ordinals that go back mean that an unknown number of records is gone
    for entry in entries:
        fill_cursor(begun.cursors.add(), entry, EARLIEST)
        begun.records.add(record=first[entry.entry])
    return begun, seen


async def _bounds(cluster: Cluster, stream: StreamDescription, streamlet_id: int) -> list[EntryBounds]:
    """Ask the brokers of a streamlet once for the starts and ends of its entries."""
    assignment = stream.assignments[streamlet_id]
    request = broker_pb2.DescribeStreamletsRequest(stream_id=stream.stream_id, streamlet_ids=[streamlet_id])
    parts: dict[int, list[EntryBounds]] = {}
    for broker_id in assignment.broker_ids:
        answer = await ask_broker(cluster, stream, broker_id, api.DESCRIBE_STREAMLETS, request)
        for info in answer.streamlets:
            check_part(assignment, broker_id, info)
        parts[broker_id] = [EntryBounds.from_message(entry) for info in answer.streamlets for entry in info.entries]
    return [
        merged_bounds(assignment, entry, {broker_id: rows[entry] for broker_id, rows in parts.items()})
        for entry in range(stream.config.entries)
    ]


async def _list(
    cluster: Cluster, stream: StreamDescription, streamlet_id: int, after_group_id: int
) -> consumer_group_pb2.SeenGroups:
    """List the groups of a streamlet behind `after_group_id`, interval by interval."""
    seen = consumer_group_pb2.SeenGroups(
        stream_id=stream.stream_id,
        streamlet_id=streamlet_id,
        after_group_id=after_group_id,
        through_group_id=after_group_id,
    )
    assignment = stream.assignments[streamlet_id]
    intervals = assignment.intervals or (Interval(0, assignment.broker_id),)
    for interval, following in zip(intervals, [*intervals[1:], None], strict=True):
        last_id = following.first_group_id - 1 if following is not None else None
        if last_id is not None and last_id <= after_group_id:
            continue
        if not await _list_interval(cluster, stream, seen, interval, last_id):
            break
    return seen


async def _list_interval(
    cluster: Cluster,
    stream: StreamDescription,
    seen: consumer_group_pb2.SeenGroups,
    interval: Interval,
    last_id: int | None,
) -> bool:
    """Add the groups of an interval up to `last_id`. Returns whether the interval is complete.

    Raises `NotOwner` when the last known interval is no longer the last one.
    """
    from_id = max(seen.through_group_id, interval.first_group_id - 1)
    while True:
        request = broker_pb2.ListGroupsRequest(
            stream_id=stream.stream_id, streamlet_id=seen.streamlet_id, after_group_id=from_id
        )
        answer = await ask_broker(cluster, stream, interval.broker_id, api.LIST_GROUPS, request)
        for group in answer.groups:
            if last_id is not None and group.group_id > last_id:
                break
            if len(seen.groups) >= GROUPS_MAX:
                return False
            start = position_of(group.start)
            # An empty group whose start has moved had records that were removed: its id belongs to this entry for good.
            if position_of(group.end) > start or (not group.closed and start > Position(group.group_id, 1, 0)):
                found = seen.groups.add(
                    first_record=group.first_record, end_record=group.next_record if group.closed else None
                )
                entry = EntryId(stream.stream_id, seen.streamlet_id, group.entry)
                fill_cursor(found.start, entry, start)
            elif not group.closed:
                return False  # nothing can be read yet; the group may still be lost, and another group get its id
            from_id = seen.through_group_id = group.group_id
        if last_id is None and answer.end_group_id:
            moved = NotOwner(
                f"groups of streamlet {seen.streamlet_id} from {answer.end_group_id} on are at another broker",
                streamlet_id=seen.streamlet_id,
                group_id=answer.end_group_id,
            )
            raise broker_failed(cluster, stream.name, moved)
        if answer.complete or not answer.groups or (last_id is not None and answer.groups[-1].group_id >= last_id):
            break
    if last_id is not None:
        seen.through_group_id = max(seen.through_group_id, last_id)
    return last_id is not None
