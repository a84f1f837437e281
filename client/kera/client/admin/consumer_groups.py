"""Consumer groups from outside: their members, their cursors, and their lag."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from kera.client import arguments
from kera.client.cluster.asking import ask_broker
from kera.client.cluster.batches import CURSORS_MAX, batched
from kera.client.cluster.cluster import Cluster
from kera.client.cluster.intervals import start_of_group
from kera.client.cluster.sense import available_from, making_sense
from kera.client.types import StreamDescription, fill_cursor, position_of
from kera.core.base.ids import EntryId, Position
from kera.core.base.telemetry import get_logger
from kera.core.errors import DataLost, KeraError
from kera.core.rpc import api
from kera.core.rpc.wire import error_from_message
from kera.v1 import broker_pb2, consumer_group_pb2

log = get_logger("kera.consumer_groups")


@dataclass(frozen=True, slots=True)
class ConsumerGroupSummary:
    """A consumer group, in short."""

    consumer_group: str
    streams: tuple[str, ...]
    """Streams that it has begun to read."""
    members: int
    """Number of active consumers."""
    idle_ms: int = 0
    """Time since it was last used; counts only time during which a coordinator led."""
    unnamed: bool = False
    """Whether its name was generated."""
    expires_in_ms: int | None = None
    """Time without use after which it is deleted; None: it is kept."""


@dataclass(frozen=True, slots=True)
class LeasedGroup:
    """A group of segments that a consumer reads."""

    stream: str
    streamlet: int
    entry: int
    group_id: int


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """A consumer of a consumer group."""

    member_id: str
    client: str
    """Host and process."""
    held: tuple[LeasedGroup, ...]
    silent_ms: int
    """Time since its last heartbeat."""
    busy_ms: int
    """Time since it has been in its user's code; 0: it waits for records."""
    bytes_consumed: int
    session_timeout_ms: int
    progress_timeout_ms: int


@dataclass(frozen=True, slots=True)
class ConsumerLag:
    """The records that are left to read."""

    records: int
    bytes: int
    oldest_us: int
    """Time when the oldest of them was made, microseconds since the Unix epoch; 0: there are none."""


@dataclass(frozen=True, slots=True)
class EntryProgress:
    """How far a consumer group is in an entry."""

    stream: str
    streamlet: int
    entry: int
    cursor: Position
    """Position before which all records are processed."""
    groups: int
    """Number of known groups behind the cursor, including the group of the cursor."""
    member_id: str
    """The consumer that has the first unfinished group of these; empty: none has it."""
    lag: ConsumerLag | None
    """The records that are left; None: a broker gave no answer."""


@dataclass(frozen=True, slots=True)
class ConsumerGroupDescription:
    """A consumer group, in full."""

    consumer_group: str
    members: tuple[MemberDescription, ...]
    entries: tuple[EntryProgress, ...]


_Span = tuple[Position, Position | None]
"""Start and end of a span of an entry; None: up to the end of the entry."""


class _Point(NamedTuple):
    entry: EntryId
    position: Position


async def list_consumer_groups(cluster: Cluster, names: Mapping[int, str] | None = None) -> list[ConsumerGroupSummary]:
    """Return all consumer groups, by name. `names`: names of streams, by id, if known; other streams are left out."""
    answer = await cluster.ask(api.LIST_CONSUMER_GROUPS, consumer_group_pb2.ListConsumerGroupsRequest())
    if names is None:
        names = await _names(cluster)
    return [
        ConsumerGroupSummary(
            info.consumer_group,
            tuple(sorted(names[stream_id] for stream_id in info.stream_ids if stream_id in names)),
            info.members,
            info.idle_ms,
            info.unnamed,
            info.expires_in_ms if info.HasField("expires_in_ms") else None,
        )
        for info in answer.consumer_groups
    ]


async def describe_consumer_group(
    cluster: Cluster, name: str, names: Mapping[int, str] | None = None
) -> ConsumerGroupDescription:
    """Return members, cursors and lag of a consumer group. Raises `InvalidArgument` if it does not exist.

    `names`: see `list_consumer_groups`.
    """
    arguments.text("name", name, "the name of a consumer group")
    answer = await cluster.ask(
        api.DESCRIBE_CONSUMER_GROUP, consumer_group_pb2.DescribeConsumerGroupRequest(consumer_group=name)
    )
    if names is None:
        names = await _names(cluster)
    entries: list[EntryProgress] = []
    for stream_id in sorted({progress.stream_id for progress in answer.streamlets} & set(names)):
        progresses = [progress for progress in answer.streamlets if progress.stream_id == stream_id]
        entries += await _progress(cluster, names[stream_id], progresses)
    return ConsumerGroupDescription(name, tuple(_member(info, names) for info in answer.members), tuple(entries))


async def delete_consumer_group(cluster: Cluster, name: str, *, idle_ms: int = 0) -> None:
    """See `Admin.delete_consumer_group`."""
    arguments.text("name", name, "the name of a consumer group")
    idle_ms = arguments.whole("idle_ms", idle_ms, 0, arguments.UINT64_MAX)
    request = consumer_group_pb2.DeleteConsumerGroupRequest(consumer_group=name, idle_ms=idle_ms)
    await cluster.ask(api.DELETE_CONSUMER_GROUP, request)


async def _names(cluster: Cluster) -> dict[int, str]:
    return {info.stream_id: info.name for info in await cluster.all_streams()}


def _member(info: consumer_group_pb2.MemberInfo, names: Mapping[int, str]) -> MemberDescription:
    cursors = [lease.next for lease in info.held]
    return MemberDescription(
        member_id=info.member_id,
        client=info.client,
        held=tuple(
            LeasedGroup(names[each.stream_id], each.streamlet_id, each.entry, each.group_id)
            for each in cursors
            if each.stream_id in names
        ),
        silent_ms=info.silent_ms,
        busy_ms=info.busy_ms,
        bytes_consumed=info.bytes_consumed,
        session_timeout_ms=info.session_timeout_ms,
        progress_timeout_ms=info.progress_timeout_ms,
    )


# -- lag -----------------------------------------------------------------------------------------------------------


async def _progress(
    cluster: Cluster, name: str, progresses: Sequence[consumer_group_pb2.StreamletProgress]
) -> list[EntryProgress]:
    """Return the progress in the entries of one stream."""
    found: list[tuple[EntryId, Position, list[consumer_group_pb2.GroupProgress], list[_Span]]] = []
    points: set[_Point] = set()
    for progress in progresses:
        for number, cursor in enumerate(progress.cursors):
            entry = EntryId(progress.stream_id, progress.streamlet_id, number)
            groups = known_groups(progress, number)
            spans = unread(position_of(cursor), groups)
            found.append((entry, position_of(cursor), groups, spans))
            points.update(_Point(entry, position) for span in spans for position in span if position is not None)
    lags = await measure_lag(cluster, name, points)
    return [
        EntryProgress(
            stream=name,
            streamlet=entry.streamlet_id,
            entry=entry.entry,
            cursor=cursor,
            groups=len(groups),
            member_id=next((group.member_id for group in groups if not group.done), ""),
            lag=_sum(entry, spans, lags),
        )
        for entry, cursor, groups, spans in found
    ]


def known_groups(progress: consumer_group_pb2.StreamletProgress, entry: int) -> list[consumer_group_pb2.GroupProgress]:
    """Return the groups of an entry that a consumer group knows, in order; a group in parts as its parts."""
    groups = (part for group in progress.groups for part in group.parts or (group,))
    return [group for group in groups if group.next.entry == entry]


def unread(cursor: Position, groups: Sequence[consumer_group_pb2.GroupProgress]) -> list[_Span]:
    """Return the unprocessed spans of an entry. `groups`: the known groups, in order."""
    if not groups:
        return [(cursor, None)]
    spans: list[_Span] = []
    for group, following in zip(groups, [*groups[1:], None], strict=True):
        if following is None:
            spans.append((position_of(group.next), None))
        elif not group.done:
            end = position_of(group.end) if group.HasField("end") else start_of_group(following.next.group_id)
            spans.append((position_of(group.next), end))
    return spans


def _sum(
    entry: EntryId,
    spans: Iterable[_Span],
    lags: Mapping[tuple[EntryId, Position], ConsumerLag | None],
) -> ConsumerLag | None:
    records = size_bytes = oldest_us = 0
    for start, end in spans:
        before, after = lags[entry, start], lags[entry, end] if end is not None else ConsumerLag(0, 0, 0)
        if before is None or after is None:
            return None
        records += max(0, before.records - after.records)
        size_bytes += max(0, before.bytes - after.bytes)
        if before.records > after.records and before.oldest_us:
            oldest_us = min(oldest_us or before.oldest_us, before.oldest_us)
    return ConsumerLag(records, size_bytes, oldest_us)


async def measure_lag(
    cluster: Cluster, name: str, points: Iterable[tuple[EntryId, Position]]
) -> dict[tuple[EntryId, Position], ConsumerLag | None]:
    """Measure the records from each position to the end of its entry, at all brokers that have parts of it.

    The lag is None if a broker gave no answer. Raises `UnknownStream`.
    """
    cluster.forget(name)
    stream = await cluster.stream(name)
    asked: dict[int, list[tuple[_Point, Position]]] = {}
    for entry, position in points:
        for broker_id, start in _parts(stream, entry, position).items():
            asked.setdefault(broker_id, []).append((_Point(entry, position), start))
    with making_sense():
        answers = await asyncio.gather(*(_measure(cluster, stream, *each) for each in asked.items()))
    sums: dict[tuple[EntryId, Position], ConsumerLag | None] = {}
    for parts, lags in zip(asked.values(), answers, strict=True):
        for (point, _), lag in zip(parts, lags, strict=True):
            known = sums.get(point, ConsumerLag(0, 0, 0))
            if known is None or lag is None:
                sums[point] = None
                continue
            moments = [moment for moment in (known.oldest_us, lag.oldest_us) if moment]
            sums[point] = ConsumerLag(known.records + lag.records, known.bytes + lag.bytes, min(moments, default=0))
    return sums


def _parts(stream: StreamDescription, entry: EntryId, position: Position) -> dict[int, Position]:
    """Return the start of the measurement at each broker that has groups from a position on."""
    assignment = stream.assignments[entry.streamlet_id]
    parts = {assignment.broker_at(position): position}
    for interval in assignment.intervals:
        if interval.first_group_id > position.group_id:
            parts.setdefault(interval.broker_id, start_of_group(interval.first_group_id))
    return parts


async def _measure(
    cluster: Cluster, stream: StreamDescription, broker_id: int, parts: Sequence[tuple[_Point, Position]]
) -> list[ConsumerLag | None]:
    """Measure at one broker. Removed records do not count: the measurement starts behind them."""
    if len(parts) > CURSORS_MAX:
        each = [await _measure(cluster, stream, broker_id, some) for some in batched(parts, CURSORS_MAX)]
        return list(chain.from_iterable(each))
    found: list[ConsumerLag | None] = [None] * len(parts)
    asked = {at: start for at, (_, start) in enumerate(parts)}
    while asked:
        request = broker_pb2.MeasureLagRequest()
        for at, start in asked.items():
            fill_cursor(request.cursors.add(), parts[at][0].entry, start)
        try:
            answer = await ask_broker(cluster, stream, broker_id, api.MEASURE_LAG, request)
        except KeraError as error:
            if not error.retriable:
                raise
            return [None] * len(parts)
        again: dict[int, Position] = {}
        for (at, start), lag in zip(asked.items(), answer.lags, strict=True):
            if not lag.HasField("error"):
                found[at] = ConsumerLag(lag.records, lag.bytes, lag.oldest_us if lag.records else 0)
                continue
            behind = _behind(error_from_message(lag.error), start)
            if behind is None:
                continue
            if stream.assignments[parts[at][0].entry.streamlet_id].broker_at(behind) == broker_id:
                again[at] = behind
            else:
                found[at] = ConsumerLag(0, 0, 0)
        asked = again
    return found


def _behind(error: KeraError, start: Position) -> Position | None:
    """Return the position behind removed records; None: `error` is not about removed records."""
    if not isinstance(error, DataLost):
        return None
    available = available_from(error, start)
    return available if available > start else None
