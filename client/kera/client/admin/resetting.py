"""Resets of consumer groups: finds the new cursors, reports the changes, and sets the cursors.

`plan_reset` changes nothing; `reset_consumer_group` carries out such a plan, or takes the same arguments. The types of
both are in `kera.client.admin.reset_plan`.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kera.client import arguments
from kera.client.admin.consumer_groups import known_groups, unread
from kera.client.admin.locating import ChunkQuery, locate, positions_at
from kera.client.admin.reset_plan import CursorChange, OffsetSpan, ResetPlan, ResetTo, ShiftBy, ToOffset, compare
from kera.client.cluster.asking import same_stream
from kera.client.cluster.batches import batched
from kera.client.cluster.cluster import Cluster
from kera.client.consuming.committed import streamlets_max
from kera.client.positions import ChunkPlace, check_place
from kera.client.types import EntryBounds, StreamDescription, fill_cursor, position_of
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.base.telemetry import get_logger
from kera.core.errors import DataLost, InvalidArgument, InvalidCursor, KeraError
from kera.core.rpc import api
from kera.v1 import consumer_group_pb2

log = get_logger("kera.consumer_groups")

TELL_TIMEOUT_S = 5.0


class _Target(NamedTuple):
    """The new cursor of a consumer group in an entry."""

    position: Position
    record: int | None = None
    """Ordinal of the record there; None: not known, or the first existing one."""
    note: str = ""
    """See `CursorChange.note`."""

    @classmethod
    def at(cls, place: ChunkPlace) -> _Target:
        """Return the target for a place, or the start of a loss right before it, so that consumers notice the loss."""
        lost = place.lost_from
        note = "" if lost is None else f"records from {tuple(lost)} up to {tuple(place.position)} are lost"
        return cls(place.start, place.record, note)


_Targets = Mapping[int, Sequence[_Target]]
"""The targets of entries, by streamlet."""


async def plan_reset(
    cluster: Cluster, name: str, stream_name: str, to: ResetTo, streamlets: Sequence[int] | None = None
) -> ResetPlan:
    """See `Admin.plan_reset`."""
    stream = await _current(cluster, name, stream_name)
    if isinstance(to, ResetPlan):
        raise InvalidArgument("to is a plan already: give it to reset_consumer_group")
    known = await _known(cluster, name, stream)
    targets = await _targets(cluster, stream, known, to, _chosen(stream, streamlets))
    return await _planned(known, targets)


async def reset_consumer_group(
    cluster: Cluster, name: str, stream_name: str, to: ResetTo, *, force: bool, streamlets: Sequence[int] | None = None
) -> None:
    """See `Admin.reset_consumer_group`."""
    arguments.flag("force", force)
    stream = await _current(cluster, name, stream_name)
    chosen = _chosen(stream, streamlets)
    if isinstance(to, ResetPlan):
        targets = _carried_out(to, name, stream, chosen)
    else:
        known = await _known(cluster, name, stream) if isinstance(to, ShiftBy) else None
        targets = await _targets(cluster, stream, known, to, chosen)
    starts = [_start(stream, streamlet_id, each) for streamlet_id, each in targets.items()]
    for some in batched(starts, streamlets_max(stream)):
        await cluster.ask(
            api.RESET_CONSUMER_GROUP,
            consumer_group_pb2.ResetConsumerGroupRequest(consumer_group=name, force=force, starts=some),
        )
    try:
        async with asyncio.timeout(TELL_TIMEOUT_S):
            await _tell_brokers(cluster, name, stream, starts)
    except (KeraError, TimeoutError) as error:
        log.warning(
            "consumer group was reset, but not all brokers know it yet: until its next commit, retention goes by the"
            " old cursors",
            consumer_group=name,
            stream=stream_name,
            error=str(error),
        )


async def _current(cluster: Cluster, name: str, stream_name: str) -> StreamDescription:
    arguments.text("name", name, "the name of a consumer group")
    cluster.forget(stream_name)
    return await cluster.stream(stream_name)


def _chosen(stream: StreamDescription, streamlets: Sequence[int] | None) -> list[int]:
    """Return the streamlets to reset. Raises `StreamletOutOfRange`, `InvalidArgument`."""
    if streamlets is None:
        return sorted(stream.assignments)
    arguments.all_of("streamlets", streamlets, Sequence, int, "a list of numbers of streamlets")
    return sorted({stream.entry_id(streamlet_id, 0).streamlet_id for streamlet_id in streamlets})


def _start(
    stream: StreamDescription, streamlet_id: int, targets: Sequence[_Target]
) -> consumer_group_pb2.StreamletStart:
    start = consumer_group_pb2.StreamletStart(stream_id=stream.stream_id, streamlet_id=streamlet_id)
    if len(targets) != stream.config.entries:
        raise InvalidArgument(
            f"stream {stream.name!r} has {stream.config.entries} entries per streamlet, and {len(targets)}"
            f" positions are given for streamlet {streamlet_id}",
            stream=stream.name,
            streamlet_id=streamlet_id,
        )
    for entry, target in enumerate(targets):
        fill_cursor(start.cursors.add(), stream.entry_id(streamlet_id, entry), Position(*target.position))
        start.records.add(record=target.record)
    return start


async def _tell_brokers(
    cluster: Cluster, name: str, stream: StreamDescription, starts: Iterable[consumer_group_pb2.StreamletStart]
) -> None:
    """Send the new cursors to brokers: retention follows them, and must not remove what the group will read again."""
    positions = {
        EntryId(cursor.stream_id, cursor.streamlet_id, cursor.entry): position_of(cursor)
        for start in starts
        for cursor in start.cursors
    }
    if EARLIEST in positions.values():
        bounds = await cluster.bounds(stream.name)
        for entry, position in positions.items():
            positions[entry] = max(position, bounds[entry.streamlet_id][entry.entry].start)
    await cluster.commit(name, stream.name, positions)


# -- targets -------------------------------------------------------------------------------------------------------


async def _targets(
    cluster: Cluster, stream: StreamDescription, known: _Known | None, to: ResetTo, chosen: Sequence[int]
) -> _Targets:
    """Return the targets of the entries of streamlets in `chosen`. `known` is needed to shift cursors."""
    if isinstance(to, ToOffset | ShiftBy):
        return await _by_record(cluster, stream, known, to, chosen)
    if isinstance(to, datetime.datetime):
        places = await positions_at(cluster, stream.name, round(to.timestamp() * 1e6))
        return {streamlet_id: [_Target.at(place) for place in places[streamlet_id]] for streamlet_id in chosen}
    check_place("to", to, ("earliest", "latest"), others="a time (datetime), ToOffset, ShiftBy")
    if isinstance(to, Mapping):
        _check_positions(stream, to, await cluster.bounds(stream.name))
        return {
            streamlet_id: list(map(_Target, positions))
            for streamlet_id, positions in to.items()
            if streamlet_id in chosen or streamlet_id not in stream.assignments
        }
    if to == "earliest":
        return {streamlet_id: [_Target(EARLIEST)] * stream.config.entries for streamlet_id in chosen}
    bounds = await cluster.bounds(stream.name)
    return {
        streamlet_id: [_Target(entry.end, entry.next_record) for entry in bounds[streamlet_id]]
        for streamlet_id in chosen
    }


def _check_positions(
    stream: StreamDescription, to: Mapping[int, Sequence[Position]], bounds: Mapping[int, Sequence[EntryBounds]]
) -> None:
    """Raise `InvalidArgument` for a position beyond the durable head: the group would miss records that come later."""
    for streamlet_id, positions in to.items():
        for entry, (position, known) in enumerate(zip(positions, bounds.get(streamlet_id, ()), strict=False)):
            if Position(*position) > known.end:
                raise InvalidArgument(
                    f"{tuple(position)} is beyond the end of stream {stream.name!r}, streamlet {streamlet_id}, entry"
                    f" {entry}, which is {tuple(known.end)}",
                    stream=stream.name,
                    streamlet_id=streamlet_id,
                    entry=entry,
                    position=list(position),
                    end=list(known.end),
                )


async def _by_record(
    cluster: Cluster, stream: StreamDescription, known: _Known | None, to: ToOffset | ShiftBy, chosen: Sequence[int]
) -> _Targets:
    if isinstance(to, ToOffset):
        arguments.whole("offset", to.offset, 0, (1 << 63) - 1)
        bounds: Mapping[int, Sequence[EntryBounds]] = await cluster.bounds(stream.name)
    else:
        arguments.whole("records", to.records, -(1 << 63), (1 << 63) - 1)
        bounds = known.bounds if known is not None else {}
    wanted: dict[EntryId, int] = {}
    for streamlet_id in chosen:
        for number in range(stream.config.entries):
            entry = stream.entry_id(streamlet_id, number)
            wanted[entry] = to.offset if isinstance(to, ToOffset) else _cursor_of(known, entry) + to.records
    found = await at_offsets(cluster, stream, wanted, bounds)
    return {
        streamlet_id: [found[stream.entry_id(streamlet_id, number)] for number in range(stream.config.entries)]
        for streamlet_id in chosen
    }


def _cursor_of(known: _Known | None, entry: EntryId) -> int:
    """Return the offset to shift from. Raises `InvalidArgument` if it is not known."""
    offset = None if known is None else known.old_offset(entry)
    if known is None or offset is None:
        whose = "" if known is None else f"consumer group {known.consumer_group!r} "
        raise InvalidArgument(
            f"{whose}has no cursor to shift in streamlet {entry.streamlet_id}, entry {entry.entry}; reset it to"
            " earliest, latest, a time or an offset",
            streamlet_id=entry.streamlet_id,
            entry=entry.entry,
        )
    return offset


async def at_offsets(
    cluster: Cluster,
    stream: StreamDescription,
    wanted: Mapping[EntryId, int],
    bounds: Mapping[int, Sequence[EntryBounds]],
) -> dict[EntryId, _Target]:
    """Find, for each entry, the start of the chunk that has the record with the offset in `wanted`."""
    found: dict[EntryId, _Target] = {}
    queries: dict[EntryId, ChunkQuery] = {}
    for entry, offset in wanted.items():
        known = bounds[entry.streamlet_id][entry.entry]
        if offset <= known.first_record:
            note = f"offset {offset} is before the first record, {known.first_record}"
            found[entry] = _Target(EARLIEST, note=note if offset < known.first_record else "")
        elif offset >= known.next_record:
            note = f"offset {offset} is beyond the end, {known.next_record}"
            found[entry] = _Target(known.end, known.next_record, note if offset > known.next_record else "")
        else:
            before = offset - known.first_record
            queries[entry] = ChunkQuery(entry.streamlet_id, entry.entry, known.start, known.end, records_max=before)
    for entry, place in zip(queries, await locate(cluster, stream.name, list(queries.values())), strict=True):
        # A query always passes the first chunk, however many records it has.
        is_behind = place.record > wanted[entry] and place.lost_from is None
        found[entry] = _Target(EARLIEST) if is_behind else _Target.at(place)
    return found


# -- changes -------------------------------------------------------------------------------------------------------


class _Known:
    """The present cursors of a consumer group in a stream."""

    def __init__(
        self,
        consumer_group: str,
        stream: StreamDescription,
        bounds: Mapping[int, Sequence[EntryBounds]],
        unread_spans: Mapping[EntryId, Sequence[tuple[Position, Position | None]]],
        cluster: Cluster,
    ) -> None:
        self.consumer_group = consumer_group
        self.stream = stream
        self.bounds = bounds
        self._unread = unread_spans
        self._cluster = cluster
        self._offsets: dict[tuple[EntryId, Position], int | None] = {}
        """Offsets of the records at positions; None: the place is lost."""

    async def look_up(self, points: Iterable[tuple[EntryId, Position]] = ()) -> None:
        """Find the offsets of all known positions, and of `points`."""
        wanted = {
            (entry, position)
            for entry, spans in self._unread.items()
            for span in spans
            for position in span
            if position
        }
        await self._find((wanted | set(points)) - self._offsets.keys())

    async def _find(self, points: Iterable[tuple[EntryId, Position]]) -> None:
        queries: dict[tuple[EntryId, Position], ChunkQuery] = {}
        for entry, position in sorted(points):
            known = self.bounds[entry.streamlet_id][entry.entry]
            if position <= known.start:
                self._offsets[entry, position] = known.first_record
            elif position >= known.end:
                self._offsets[entry, position] = known.next_record
            else:
                queries[entry, position] = ChunkQuery(entry.streamlet_id, entry.entry, position, position, bytes_max=0)
        try:
            places = await locate(self._cluster, self.stream.name, list(queries.values()))
        except (DataLost, InvalidCursor):
            if len(queries) > 1:  # one of the places no longer exists: find out which
                for point in queries:
                    await self._find([point])
                return
            self._offsets |= dict.fromkeys(queries)
        else:
            self._offsets |= {point: place.record for point, place in zip(queries, places, strict=True)}

    def offset(self, entry: EntryId, position: Position) -> int | None:
        """Return the offset of the record at a position that was looked up; None: the place is lost."""
        return self._offsets[entry, position]

    def old(self, entry: EntryId) -> Position | None:
        """Return the first unread position; None: there is no cursor."""
        spans = self._unread.get(entry)
        return spans[0][0] if spans else None

    def old_offset(self, entry: EntryId) -> int | None:
        """Return the offset of the first unread record; None: there is no cursor, or its place is lost."""
        position = self.old(entry)
        return None if position is None else self.offset(entry, position)

    def unread_offsets(self, entry: EntryId) -> list[OffsetSpan] | None:
        """Return the unread spans, the whole entry if the consumer group has no cursor; None: unknown."""
        bounds = self.bounds[entry.streamlet_id][entry.entry]
        if entry not in self._unread:
            return [(bounds.first_record, bounds.next_record)]
        found: list[OffsetSpan] = []
        for start, end in self._unread[entry]:
            first = self.offset(entry, start)
            behind = bounds.next_record if end is None else self.offset(entry, end)
            if first is None or behind is None:
                return None
            found.append((first, behind))
        return found


async def _known(cluster: Cluster, name: str, stream: StreamDescription) -> _Known:
    """Look up the cursors of a consumer group in a stream; a group that does not exist has none."""
    request = consumer_group_pb2.DescribeConsumerGroupRequest(consumer_group=name)
    spans: dict[EntryId, list[tuple[Position, Position | None]]] = {}
    try:
        answer = await cluster.ask(api.DESCRIBE_CONSUMER_GROUP, request)
    except InvalidArgument:
        answer = consumer_group_pb2.DescribeConsumerGroupResponse()  # the reset makes the group
    for progress in answer.streamlets:
        if progress.stream_id != stream.stream_id:
            continue
        for number, cursor in enumerate(progress.cursors):
            groups = known_groups(progress, number)
            spans[stream.entry_id(progress.streamlet_id, number)] = unread(position_of(cursor), groups)
    known = _Known(name, stream, await cluster.bounds(stream.name), spans, cluster)
    await known.look_up()
    return known


async def _planned(known: _Known, targets: _Targets) -> ResetPlan:
    stream = known.stream
    for streamlet_id, each in targets.items():
        _start(stream, streamlet_id, each)  # raises for positions of entries that the stream does not have
    entries = {
        stream.entry_id(streamlet_id, number): target
        for streamlet_id, each in sorted(targets.items())
        for number, target in enumerate(each)
    }
    await known.look_up((entry, target.position) for entry, target in entries.items() if target.record is None)
    return ResetPlan(
        known.consumer_group,
        stream.name,
        stream.stream_id,
        tuple(_change(known, entry, target) for entry, target in entries.items()),
    )


def _change(known: _Known, entry: EntryId, target: _Target) -> CursorChange:
    new_offset = target.record if target.record is not None else known.offset(entry, target.position)
    bounds = known.bounds[entry.streamlet_id][entry.entry]
    if new_offset is None:
        raise InvalidCursor(
            f"{tuple(target.position)} is not a place in streamlet {entry.streamlet_id}, entry {entry.entry} of stream"
            f" {known.stream.name!r}: positions are starts of chunks",
            stream=known.stream.name,
            streamlet_id=entry.streamlet_id,
            entry=entry.entry,
        )
    spans = known.unread_offsets(entry)
    again, skipped = (None, None) if spans is None else compare(spans, new_offset, max(bounds.next_record, new_offset))
    return CursorChange(
        streamlet=entry.streamlet_id,
        entry=entry.entry,
        old=known.old(entry),
        old_offset=known.old_offset(entry),
        new=target.position,
        new_offset=new_offset,
        records_again=again,
        records_skipped=skipped,
        note=target.note,
    )


def _carried_out(plan: ResetPlan, name: str, stream: StreamDescription, chosen: Sequence[int]) -> _Targets:
    if (plan.consumer_group, plan.stream) != (name, stream.name):
        raise InvalidArgument(
            f"the plan is for consumer group {plan.consumer_group!r} in stream {plan.stream!r}, not for {name!r} in"
            f" {stream.name!r}"
        )
    same_stream(stream, plan.stream_id)
    targets: dict[int, list[_Target]] = {}
    for change in plan.changes:
        if change.streamlet in chosen:
            record = None if change.new == EARLIEST else change.new_offset
            targets.setdefault(change.streamlet, []).append(_Target(change.new, record))
    return targets
