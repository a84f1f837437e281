"""Takes over streamlets of a lost broker: finds out from backups where they end, and makes this broker their owner.

    take_over, prepare   find out what backups have (``kera.broker.recovery.survey``), and plan each streamlet
    commit               write the plan into the index, as if everything were here: segments are `TO_COME`
    (streams open them)  like streamlets that have always been here: chunks are taken at once, in new groups
    opened               get the segments to come in the background (``kera.broker.recovery.rebuild``)

The streamlet's `OriginRecord` names the launches whose replicas the index knows. If an assignment has further sources,
as after a crash before `commit`, or after the index was rebuilt, the scan is made (again) before the streamlet is
opened. When an assignment has no sources any more, the record is cleared. See docs/design-notes.md, "Two homes of a
streamlet", for which part of a streamlet is here.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from kera.broker.backup_ways import OVER_TCP, BackupWays
from kera.broker.log.bounds import removed_before
from kera.broker.log.entry import Entry
from kera.broker.log.waiting import until_done, woken
from kera.broker.ownership.streams import Streams
from kera.broker.records import Change, EntryRecord, Graft, OriginRecord, SegmentAddress, UnsureTail
from kera.broker.recovery.plan import EntryPlan, EntryStart, StreamletPlan
from kera.broker.recovery.progress import WAITS_MAX, RebuildProgress, RecoveryTotals
from kera.broker.recovery.rebuild import Rebuild, RebuildLimits
from kera.broker.recovery.scan import Launches, Ref
from kera.broker.recovery.survey import Materials, Sought, Sources, Survey, SurveyResult, SurveyResults, launches, seek
from kera.broker.replication.manager import Replication
from kera.broker.storage.index_format import (
    delete_segment,
    put_digests,
    put_entry,
    put_origin,
    put_producer,
    put_segment,
)
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.restart import Restart
from kera.broker.storage.unsure import Index, delete_unsure, put_unsure, unsure_tail
from kera.core.base.done import nothing
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument, Recovering, TooFewBackups
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2

log = get_logger("kera.recovery")

_ORIGINS_KEY = struct.Struct(">cQ")
"""The prefix of the keys of a stream's origins in the index."""
UNOPENED_S_MAX = 10.0
"""How long the reasons are reported why streamlets could not be opened; an opening is tried again sooner."""
FLUSH_WAIT_S = 5.0
"""Maximum wait until older groups of an open streamlet are on disk."""


def found_unsure(index: Index, ref: Ref, plan: StreamletPlan) -> dict[int, UnsureTail]:
    """Return the unsure tails by entry; a tail that was found before may still be unsure."""
    found = {}
    for number, entry in enumerate(plan.entries):
        if entry.unsure is not None:
            known = unsure_tail(index, EntryId(*ref, number))
            found[number] = entry.unsure if known is None else min(known, entry.unsure)
    return found


def settled(entries: Iterable[Entry], uncovered: Collection[SegmentAddress]) -> list[Entry]:
    """Clear the unsure tails that have their replicas; return their entries. `uncovered`: segments without replicas."""
    found = []
    for entry in entries:
        tail = entry.unsure
        if tail is not None and not any(
            address.entry == entry.index and address[3:] >= tail.position[:2] for address in uncovered
        ):
            entry.unsure = None
            found.append(entry)
    return found


@dataclass(slots=True)
class _Unopened:
    """Why streamlets cannot be opened."""

    sources: Sources
    waits_for: list[str]
    told_s: float


class Takeovers:
    """Makes streamlets of a lost broker this broker's own: surveys backups, writes the index, starts the rebuild.

    Belongs to one event loop.
    """

    def __init__(
        self,
        restart: Restart,
        memory: PersistenceManager,
        streams: Streams,
        replication: Replication,
        *,
        backups: Callable[[], Iterable[common_pb2.BackupInfo]],
        broker_id: Callable[[], int],
        ways: BackupWays = OVER_TCP,
        limits: RebuildLimits,
    ) -> None:
        """`backups`: returns all known backups; `broker_id`: returns this broker's id, once it is known."""
        self._restart = restart
        self._index = restart.index
        self._memory = memory
        self._streams = streams
        self._replication = replication
        self._backups = backups
        self._broker_id = broker_id
        self._loop = asyncio.get_running_loop()
        self._survey = Survey(self._index, ways=ways)
        self._results = SurveyResults()
        self._unopened: dict[int, _Unopened] = {}
        """Why streamlets could not be opened, by stream."""
        self._joined: dict[bytes, asyncio.Task[broker_pb2.TakeOverResponse]] = {}
        """Requests that are under way, by their content."""
        self._turn = asyncio.Lock()
        """Allows one scan, or one change of the index, at a time."""
        self._infos: dict[int, common_pb2.StreamInfo] = {}
        """The descriptions of streams with sources, as they were last opened."""
        self._rebuild = Rebuild(
            restart.store,
            memory,
            replication,
            find=lambda address: streams.entry(EntryId(*address[:3])),
            backups=backups,
            rescan=self._rescan,
            ways=ways,
            limits=limits,
        )
        self._book = self._rebuild.book
        self._began: dict[Ref, list[Position]] = {}
        """The starts of entries at the last `commit` of their streamlet."""
        memory.events.awaited.listen(self._rebuild.wanted)

    @property
    def totals(self) -> RecoveryTotals:
        """The recovered data since the start."""
        return self._book.totals

    @property
    def active(self) -> bool:
        """Whether taken over data still has to come, or lacks replicas."""
        return any(not progress.restored for progress in self._book.streamlets.values())

    async def close(self) -> None:
        """End all requests under way, and the rebuild."""
        for task in self._joined.values():
            task.cancel()
        if self._joined:
            await asyncio.wait(self._joined.values())
        await self._rebuild.close()

    # -- finding out ----------------------------------------------------------------------------------------------

    async def take_over(self, request: broker_pb2.TakeOverRequest) -> broker_pb2.TakeOverResponse:
        """Find out where streamlets of a lost broker end. A repeated request joins one that is under way."""
        token = request.SerializeToString(deterministic=True)
        task = self._joined.get(token)
        if task is None:
            task = self._joined[token] = asyncio.create_task(self._take_over(request))
            task.add_done_callback(partial(self._joined_over, token))
        return await asyncio.shield(task)

    def _joined_over(self, token: bytes, task: asyncio.Task[broker_pb2.TakeOverResponse]) -> None:
        self._joined.pop(token, None)
        if not task.cancelled():
            task.exception()  # retrieved also if all who have asked are gone

    async def _take_over(self, request: broker_pb2.TakeOverRequest) -> broker_pb2.TakeOverResponse:
        source = (request.source.broker_id, request.source.before_epoch)
        wanted = {}
        unopened = []
        for item in request.streams:
            assignments = {each.streamlet_id: each for each in item.stream.assignments}
            for streamlet_id in item.streamlet_ids:
                assignment = assignments.get(streamlet_id)
                if assignment is None:
                    raise InvalidArgument(f"stream {item.stream.name!r} has no streamlet {streamlet_id}")
                ref = item.stream.stream_id, streamlet_id
                sources = frozenset({source, *launches(assignment.sources)})
                # If the owner is an earlier launch of this broker that was lost itself, it will not be opened here.
                stays = assignment.broker_id != source[0] or assignment.broker_epoch >= source[1]
                ours = stays and assignment.broker_id == self._broker_id()
                if ours and not self._committed(ref, sources - {source}):
                    # This scan covers the source's groups, so it would not include the findings about other sources.
                    unopened.append(
                        f"streamlet {streamlet_id} of stream {item.stream.name!r} has yet to be opened here with what"
                        " was taken over before"
                    )
                    continue
                wanted[ref] = seek(
                    item.stream,
                    assignment,
                    sources,
                    held_by=source[0],
                    starts=item.starts,
                    cursors=item.cursors,
                    states=item.handed_over,
                    is_ours=source[0] == self._broker_id(),
                )
        async with self._turn:
            todo = {ref: each for ref, each in wanted.items() if not self._results.has(ref, each.sources)}
            waits = unopened + await self._find(todo, list(request.backups))
            response = broker_pb2.TakeOverResponse(waits_for=waits[:WAITS_MAX])
            for ref, each in wanted.items():
                await self._answer(ref, each.sources, response)
        return response

    async def _answer(self, ref: Ref, sources: Sources, response: broker_pb2.TakeOverResponse) -> None:
        result = self._results.get(ref, sources)
        if result is None:
            return
        plan = await self._survey.plan(ref, result.merge, self._removed_since(ref))
        records = []
        for index, each in enumerate(plan.entries):
            live = self._streams.entry(EntryId(*ref, index))
            records.append(max(each.record.next_record, live.next_record if live is not None else 0))
        state = common_pb2.StreamletState(streamlet_id=ref[1], next_group_id=plan.next_group_id, next_records=records)
        response.streamlets.add(stream_id=ref[0], state=state)
        response.bytes_total += plan.bytes_new
        response.records_lost += plan.records_lost

    async def _find(
        self, wanted: dict[Ref, Sought], backups: Sequence[common_pb2.BackupInfo], *, alone: bool = False
    ) -> list[str]:
        """Find out the wanted streamlets; return the reasons for which the others wait.

        Waits for removals of their earlier data here, which would otherwise count as data that need not come.
        """
        for ref in wanted:
            await self._removed(ref)
        found, waits = await self._survey.find(wanted, backups, alone=alone)
        for ref, result in found.items():
            self._results.add(ref, result)
        return waits

    def prepared(self, stream_id: int, streamlet_id: int, sources: Iterable[common_pb2.RecoverySource]) -> bool:
        """Whether the state needed to open a streamlet with these sources is known."""
        wanted, ref = launches(sources), (stream_id, streamlet_id)
        if self._results.get(ref, wanted) is not None:
            return True
        origin = self._index.origin(*ref)
        return origin is not None and origin.sources >= wanted

    async def prepare(self, info: common_pb2.StreamInfo, streamlet_ids: Sequence[int]) -> None:
        """Find out the state needed to open streamlets that have sources. Raises `Recovering` if that has to wait."""
        wanted = {}
        for assignment in info.assignments:
            if assignment.streamlet_id in streamlet_ids:
                ref = info.stream_id, assignment.streamlet_id
                wanted[ref] = seek(
                    info,
                    assignment,
                    launches(assignment.sources),
                    held_by=self._broker_id(),
                    starts=assignment.starts,
                    states=[assignment.handed_over] if assignment.HasField("handed_over") else (),
                )
        async with self._turn:
            todo = {ref: each for ref, each in wanted.items() if self._results.get(ref, each.sources) is None}
            waits = await self._find(todo, list(self._backups()), alone=True)
        if waits:
            sources = Sources().union(*(each.sources for each in wanted.values()))
            self._unopened[info.stream_id] = _Unopened(sources, waits[:WAITS_MAX], self._loop.time())
            raise Recovering(waits[0], waits_for=waits[:WAITS_MAX])
        self._unopened.pop(info.stream_id, None)

    async def _rescan(self, refs: set[Ref]) -> Materials:
        """Scan for chunks of open streamlets, after a restart, or again for chunks that no backup had."""
        wanted = {}
        for ref in refs:
            info = self._infos.get(ref[0])
            assignments = {each.streamlet_id: each for each in info.assignments} if info is not None else {}
            assignment = assignments.get(ref[1])
            if info is None or assignment is None:
                raise Recovering(f"streamlet {ref} is not open")
            wanted[ref] = seek(info, assignment, launches(assignment.sources), held_by=self._broker_id())
        async with self._turn:
            return await self._survey.find_again(wanted, list(self._backups()))

    # -- writing the index -----------------------------------------------------------------------------------------

    async def commit(self, info: common_pb2.StreamInfo, streamlet_ids: Sequence[int]) -> None:
        """Write the plans of streamlets into the index, so that they open as if they had always been here.

        Streamlets that were not prepared, because the index knows them already, stay as they are. Raises the disk's
        error.
        """
        async with self._turn:
            for assignment in info.assignments:
                ref = info.stream_id, assignment.streamlet_id
                if assignment.streamlet_id not in streamlet_ids:
                    continue
                result = self._results.get(ref, launches(assignment.sources))
                if result is not None and not self._committed(ref, result.sources):
                    await self._commit(ref, result)

    def _committed(self, ref: Ref, sources: Sources) -> bool:
        if not sources:
            return True
        origin = self._index.origin(*ref)
        return origin is not None and origin.sources >= sources

    def _removed_since(self, ref: Ref) -> dict[int, EntryStart]:
        """Return the present starts of entries from which data was removed here, and with it all older data.

        The findings about a streamlet may be from before an earlier takeover of it was committed, whose data may have
        been removed since.
        """
        if not self._is_open(ref):
            return {}
        streamlet = self._streams.get(ref[0]).streamlets[ref[1]]
        began = self._began.get(ref, ())
        removed = {}
        for entry in streamlet.entries.made:
            taken_over = began[entry.index] if entry.index < len(began) else EARLIEST
            has_moved = entry.start > taken_over != EARLIEST
            is_lost = any(gap.start < entry.start for gap in entry.gaps)
            place = removed_before(streamlet, entry)
            if place is not None and (has_moved or not is_lost):
                removed[entry.index] = EntryStart(*place)
            elif has_moved and streamlet.intervals[0].leads:  # no broker has older data
                removed[entry.index] = EntryStart(entry.start, entry.start_record)
        return removed

    async def _removed(self, ref: Ref) -> None:
        await until_done(lambda done: self._streams.removal.when_removed(*ref, lambda: done(None)))

    async def _commit(self, ref: Ref, result: SurveyResult) -> None:
        await self._removed(ref)
        live = self._streams.get(ref[0]).streamlets.get(ref[1]) if ref[0] in self._streams else None
        plan = await self._survey.plan(ref, result.merge, self._removed_since(ref))
        if live is not None:
            await self._flushed(live.entries, plan)
            plan = await self._survey.plan(ref, result.merge, self._removed_since(ref))
        origin = self._index.origin(*ref)
        changes: list[Change] = [
            put_segment(address, record) for entry in plan.entries for address, record in entry.new.items()
        ]
        changes += [put_producer(*ref, producer_id, state) for producer_id, state in plan.producers.items()]
        changes += put_digests(*ref, plan.digests)
        sources, lost = result.sources, plan.records_lost
        if origin is not None:
            sources, lost = sources | origin.sources, lost + origin.records_lost
        changes.append(put_origin(*ref, OriginRecord(sources, plan.next_group_id, lost)))
        unsure = found_unsure(self._index, ref, plan)
        changes += [put_unsure(EntryId(*ref, index), tail) for index, tail in unsure.items()]
        grafts: dict[Entry, Graft] = {}
        if live is None:
            changes += [put_entry(EntryId(*ref, index), entry.record) for index, entry in enumerate(plan.entries)]
            changes += [delete_segment(address) for entry in plan.entries for address in entry.gone]
        else:
            for entry, each in zip(live.entries, plan.entries, strict=True):
                grafts[entry] = _graft(each)
        if live is not None:
            for index, tail in unsure.items():
                live.entries[index].unsure = tail  # before readers can find the data
        await until_done(lambda done: self._memory.arrivals.graft(grafts, changes, done))
        self._restart.taken_over.add(ref)
        starts = (each.record for each in plan.entries) if live is None else live.entries
        self._began[ref] = [each.start for each in starts]
        if live is None:
            self._memory.removals.remove_files(
                [physical_id for entry in plan.entries for physical_id in entry.replaced]
            )
        else:
            live.learn(plan.producers)
            live.next_group_id = max(live.next_group_id, plan.next_group_id)
        log.info(
            "streamlet taken over",
            stream_id=ref[0],
            streamlet_id=ref[1],
            bytes=plan.bytes_new,
            records_lost=plan.records_lost,
            chunks_cut=plan.chunks_cut,
        )

    async def _flushed(self, entries: Iterable[Entry], plan: StreamletPlan) -> None:
        """Wait until no data older than the plan's is only in memory: the index must have all older segments."""
        until = self._loop.time() + FLUSH_WAIT_S
        for entry, each in zip(entries, plan.entries, strict=True):
            last = max(((address.group_id, address.segment_id) for address in each.new), default=(0, 0))
            while entry.tail and entry.tail[0].key < last:
                if not await woken([entry], until):
                    raise Recovering(
                        f"older groups of streamlet {entry.log_id.streamlet_id} are still being written to disk"
                    )

    # -- rebuilding ------------------------------------------------------------------------------------------------

    def opened(self, info: common_pb2.StreamInfo) -> None:
        """Begin to get the missing data of open streamlets with sources; forget the origins of the others."""
        if info.stream_id not in self._streams:
            return
        stream = self._streams.get(info.stream_id)
        if info.assignments_version < stream.assignments_version:
            return
        self._infos.pop(info.stream_id, None)
        taken_over = any(True for _ in self._index.records(_ORIGINS_KEY.pack(b"o", info.stream_id)))
        if not taken_over and not any(ref[0] == info.stream_id for ref in self._book.streamlets):
            return  # as with nearly all streams, which may have thousands of streamlets
        for assignment in info.assignments:
            ref = info.stream_id, assignment.streamlet_id
            tracked = self._book.streamlets.get(ref)
            ours = assignment.streamlet_id in stream.streamlets and assignment.broker_id == self._broker_id()
            origin = self._index.origin(*ref)
            if ours and assignment.sources and origin is not None:
                self._infos[info.stream_id] = info
                if tracked is None or tracked.sources != origin.sources:
                    result = self._results.take(ref, launches(assignment.sources))
                    materials = result.materials if result is not None else None
                    cursors = result.cursors if result is not None else {}
                    self._rebuild.begin(ref, origin.sources, origin.records_lost, materials, cursors)
            elif not assignment.sources:
                if tracked is not None:
                    self._rebuild.end(ref)
                self._began.pop(ref, None)
                self._settle(ref)
                if origin is not None and origin.sources:
                    self._memory.index_writer.note([put_origin(*ref, origin.without_sources())], nothing)
                    if ours:
                        # While data was missing, the coordinator has also kept earlier starts.
                        entries = stream.streamlets[assignment.streamlet_id].entries.made
                        self._streams.moved_starts.note(entry for entry in entries if entry.start_record)

    def _settle(self, ref: Ref) -> None:
        """End the unsure tails of a streamlet that have their replicas now, and wake readers."""
        progress = self._book.streamlets.get(ref)
        if not self._is_open(ref) or (progress is not None and not progress.begun):
            return
        uncovered = () if progress is None else progress.uncovered
        for entry in settled(self._streams.get(ref[0]).streamlets[ref[1]].entries.made, uncovered):
            self._memory.index_writer.note([delete_unsure(entry.log_id)], nothing)
            entry.wake()

    def progress(self) -> list[coordinator_pb2.RecoveryProgress]:
        """Return the progress of this broker's recoveries, by source."""
        self._results.forget_old(self._loop.time())
        for ref in [ref for ref in self._book.streamlets if not self._is_open(ref)]:
            self._rebuild.end(ref)
            self._began.pop(ref, None)
        self._book.look()
        for ref in self._book.streamlets:
            self._settle(ref)
        found: defaultdict[Launches, coordinator_pb2.RecoveryProgress]
        found = defaultdict(coordinator_pb2.RecoveryProgress)
        for ref, each in sorted(self._book.streamlets.items()):
            for source in sorted(each.sources):
                progress = found[source]
                progress.bytes_total += each.bytes_total
                progress.bytes_recovered += each.bytes_total - each.bytes_to_come
                progress.bytes_restored += each.bytes_total - each.bytes_uncovered
                progress.records_lost += each.records_lost
                waits = self._waits_for(ref, each)
                progress.waits_for.extend(waits[: WAITS_MAX - len(progress.waits_for)])
                if each.readable:
                    progress.readable.add(stream_id=ref[0], streamlet_id=ref[1])
                if each.restored:
                    progress.restored.add(stream_id=ref[0], streamlet_id=ref[1])
        for unopened in self._still_unopened():
            for source in unopened.sources:
                waits_for = found[source].waits_for
                waits_for.extend(unopened.waits_for[: WAITS_MAX - len(waits_for)])
        for source, progress in found.items():
            progress.source.broker_id, progress.source.before_epoch = source
        return list(found.values())

    def _still_unopened(self) -> Iterable[_Unopened]:
        until_s = self._loop.time() - UNOPENED_S_MAX
        self._unopened = {stream_id: each for stream_id, each in self._unopened.items() if each.told_s > until_s}
        return self._unopened.values()

    def _waits_for(self, ref: Ref, progress: RebuildProgress) -> list[str]:
        if not progress.readable:
            return progress.waits_for
        stream = self._streams.get(ref[0])
        if not progress.restored and stream.logs is not None:
            try:
                self._replication.backups.check(stream.logs.replication, stream.name)
            except TooFewBackups as error:
                return [error.message]
        return []

    def _is_open(self, ref: Ref) -> bool:
        return ref[0] in self._streams and ref[1] in self._streams.get(ref[0]).streamlets


def _graft(plan: EntryPlan) -> Graft:
    """Return the addition of a plan to an open entry."""
    record: EntryRecord = plan.record
    if not plan.new:
        start, start_record = (EARLIEST, 0) if record.stored_segments else (record.start, record.start_record)
        return Graft(start, start_record, record.next_record, 0, 0, EARLIEST, plan.gaps)
    (first, first_record), (last, last_record) = min(plan.new.items()), max(plan.new.items())
    start = Position(first.group_id, first.segment_id, 0)
    if record.start[:2] == start[:2]:
        start, start_record = record.start, record.start_record
    else:
        start_record = first_record.first_record
    return Graft(
        start,
        start_record,
        record.next_record,
        sum(each.length for each in plan.new.values()),
        len(plan.new),
        Position(last.group_id, last.segment_id, last_record.length),
        plan.gaps,
        max(each.max_timestamp_us for each in plan.new.values()),
    )
