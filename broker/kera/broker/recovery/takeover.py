"""Takes over streamlets of a broker that is gone: finds out from backups where they end, and makes them this broker's.

    take_over, prepare   headers of all chunks there are of them (``kera.broker.recovery.scan``) ──► what each is to be
    commit               that is written into the index, as if everything were here: segments are `TO_COME`
    (streams open them)  as they open what has always been here: chunks are taken at once, in new groups
    opened               what is to come is got in the background (``kera.broker.recovery.rebuild``)

The streamlet's `OriginRecord` says which launches' replicas the index knows. While an assignment has other sources
besides, as after a crash before `commit`, or when the index was made anew, the scan is made (again) before that
streamlet is opened. When an assignment has no sources any more, it is forgotten.

A streamlet waits while as many backups are away as it has replicas: they may have what no other has. A backup that is
gone for good has to be drained, then it does not count; what is missing then is lost, and told.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kera.broker.log.entry import Entry
from kera.broker.log.intervals import holding
from kera.broker.log.retention import Rules
from kera.broker.log.waiting import until_done, woken
from kera.broker.ownership.handover import begins_with, handed_over
from kera.broker.ownership.streams import Streams
from kera.broker.records import Change, EntryRecord, Graft, OriginRecord, ProducerRecord, SegmentAddress, SegmentRecord
from kera.broker.recovery.plan import EntryPlan, Known, Start, StreamletMerge, StreamletPlan
from kera.broker.recovery.rebuild import Materials, Progress, Recovering, Totals
from kera.broker.recovery.scan import Launches, Ref, Scanned, scan
from kera.broker.replication.manager import Replication
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import (
    delete_origin,
    delete_segment,
    put_entry,
    put_origin,
    put_producer,
    put_segment,
)
from kera.broker.storage.persistence import PersistenceManager
from kera.broker.storage.restart import LOST_GROUPS_MAX, Restart
from kera.core.errors import InvalidArgument, KeraError, TooFewBackups
from kera.core.errors import Recovering as StillRecovering
from kera.core.ids import EARLIEST, EntryId, Position
from kera.core.telemetry import get_logger
from kera.v1 import broker_pb2, common_pb2, coordinator_pb2

log = get_logger("kera.recovery")

_ORIGINS_KEY = struct.Struct(">cQ")
"""How the keys of a stream's origins begin in the index."""
PREPARED_S_MAX = 900.0
"""How long is remembered what was found out and never opened."""
WAITS_MAX = 20
"""Of what is waited for, so much is told."""
UNOPENED_S_MAX = 10.0
"""How long it is told why streamlets could not be opened: whoever wants them tries again sooner."""
FLUSH_WAIT_S = 5.0
"""For older groups of a streamlet that is open already to be on disk."""


@dataclass(slots=True)
class _Prepared:
    """What was found out of a streamlet."""

    sources: frozenset[Launches]
    merge: StreamletMerge
    scanned: Scanned
    cursors: dict[int, Position]
    made_s: float


@dataclass(slots=True)
class _Unopened:
    """Why streamlets cannot be opened."""

    sources: frozenset[Launches]
    waits_for: list[str]
    told_s: float


@dataclass(slots=True)
class _Wanted:
    """What is to be found out."""

    info: common_pb2.StreamInfo
    known: Known
    sources: frozenset[Launches]
    cursors: dict[int, Position]


class Takeovers:
    """See the head of this module. Belongs to one event loop."""

    def __init__(
        self,
        restart: Restart,
        memory: PersistenceManager,
        streams: Streams,
        replication: Replication,
        *,
        backups: Callable[[], Iterable[common_pb2.BackupInfo]],
        broker_id: Callable[[], int],
        node_id: str = "",
    ) -> None:
        """`backups`: all there are; `broker_id`: of this broker, once it is known."""
        self._restart = restart
        self._index: SegmentIndex = restart.index
        self._memory = memory
        self._streams = streams
        self._replication = replication
        self._backups = backups
        self._broker_id = broker_id
        self._node_id = node_id
        self._loop = asyncio.get_running_loop()
        self._prepared: defaultdict[Ref, dict[frozenset[Launches], _Prepared]] = defaultdict(dict)
        """By streamlet and sources: of several brokers that are lost at a time, each had something else of it."""
        self._unopened: dict[int, _Unopened] = {}
        """By stream."""
        self._joined: dict[bytes, asyncio.Task[broker_pb2.TakeOverResponse]] = {}
        self._turn = asyncio.Lock()
        """One scan, or one change of the index, at a time."""
        self._infos: dict[int, common_pb2.StreamInfo] = {}
        """Streams with sources, as they were opened last."""
        self._recovering = Recovering(
            self._index,
            restart.store,
            memory,
            replication,
            find=lambda address: streams.entry(EntryId(*address[:3])),
            backups=backups,
            rescan=self._rescan,
            node_id=node_id,
        )

    @property
    def totals(self) -> Totals:
        """What was recovered since the start."""
        return self._recovering.totals

    @property
    def active(self) -> bool:
        """Whether anything that was taken over has yet to come, or lacks replicas."""
        return self._recovering.active

    async def close(self) -> None:
        """End what is under way."""
        for task in self._joined.values():
            task.cancel()
        if self._joined:
            await asyncio.wait(self._joined.values())
        await self._recovering.close()

    # -- finding out -----------------------------------------------------------------------------------------------

    async def take_over(self, request: broker_pb2.TakeOverRequest) -> broker_pb2.TakeOverResponse:
        """Find out where streamlets of a lost broker end. The same request again joins one that is under way."""
        token = request.SerializeToString(deterministic=True)
        task = self._joined.get(token)
        if task is None:
            task = self._joined[token] = asyncio.create_task(self._take_over(request))
            task.add_done_callback(lambda _: self._joined.pop(token, None))
        return await asyncio.shield(task)

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
                sources = frozenset({source, *_launches(assignment.sources)})
                if assignment.broker_id == self._broker_id() and not self._committed(ref, sources - {source}):
                    # What was found of those would not be in what is found now: this is about the source's groups.
                    unopened.append(
                        f"streamlet {streamlet_id} of stream {item.stream.name!r} has yet to be opened here with what"
                        " was taken over before"
                    )
                    continue
                wanted[ref] = await self._wanted(
                    item.stream,
                    assignment,
                    sources,
                    held_by=source[0],
                    starts=item.starts,
                    cursors=item.cursors,
                    handed_over=item.handed_over,
                )
        async with self._turn:
            todo = {ref: each for ref, each in wanted.items() if each.sources not in self._prepared[ref]}
            waits = unopened + await self._find(todo, list(request.backups))
            response = broker_pb2.TakeOverResponse(waits_for=waits[:WAITS_MAX])
            for ref, each in wanted.items():
                await self._answer(ref, each.sources, response)
        return response

    def _knows(self, ref: Ref, sources: frozenset[Launches]) -> bool:
        return self._found(ref, sources) is not None

    def _found(self, ref: Ref, sources: frozenset[Launches]) -> _Prepared | None:
        """What was found out for these sources; or for more, if some of those have been released since."""
        fitting = [each for of, each in self._prepared.get(ref, {}).items() if of >= sources]
        return min(fitting, key=lambda each: len(each.sources), default=None)

    async def _answer(self, ref: Ref, sources: frozenset[Launches], response: broker_pb2.TakeOverResponse) -> None:
        prepared = self._found(ref, sources)
        if prepared is None:
            return
        plan = await self._plan(ref, prepared)
        records = []
        for index, each in enumerate(plan.entries):
            live = self._streams.entry(EntryId(*ref, index))
            records.append(max(each.record.next_record, live.next_record if live is not None else 0))
        state = common_pb2.StreamletState(streamlet_id=ref[1], next_group_id=plan.next_group_id, next_records=records)
        response.streamlets.add(stream_id=ref[0], state=state)
        response.bytes_total += plan.bytes_new
        response.records_lost += plan.records_lost

    async def _wanted(
        self,
        info: common_pb2.StreamInfo,
        assignment: common_pb2.StreamletAssignment,
        sources: frozenset[Launches],
        *,
        held_by: int,
        starts: Iterable[common_pb2.EntryStart] = (),
        cursors: Iterable[common_pb2.Cursor] = (),
        handed_over: Iterable[common_pb2.StreamletState] = (),
    ) -> _Wanted:
        intervals = holding(assignment, held_by).intervals
        if not intervals:
            raise InvalidArgument(
                f"broker {held_by} has no groups of streamlet {assignment.streamlet_id} of stream {info.name!r}",
                stream=info.name,
                streamlet_id=assignment.streamlet_id,
                broker_id=held_by,
            )
        state = next((each for each in handed_over if each.streamlet_id == assignment.streamlet_id), None)
        found = {
            each.start.entry: Start(_position(each.start), each.first_record)
            for each in starts
            if each.start.streamlet_id == assignment.streamlet_id
        }
        leader = info.config.durability <= common_pb2.DURABILITY_LEADER
        known = Known(
            info.stream_id,
            assignment.streamlet_id,
            info.config.entries,
            intervals,
            starts=found,
            next_records=tuple(state.next_records) if state is not None else (),
            next_group_id=max(assignment.first_group_id, state.next_group_id if state is not None else 1, 1),
            producers={
                each.producer_id: ProducerRecord(each.producer_epoch, each.next_sequence)
                for each in (state.producers if state is not None else ())
            },
            keeps_all=not Rules.of(info.config),
            may_lose=leader,
            lost_groups=LOST_GROUPS_MAX,
        )
        mine = {
            each.entry: _position(each)
            for each in cursors
            if (each.stream_id, each.streamlet_id) == (info.stream_id, assignment.streamlet_id)
        }
        return _Wanted(info, known, sources, mine)

    async def _find(
        self, wanted: Mapping[Ref, _Wanted], backups: Sequence[common_pb2.BackupInfo], *, alone: bool = False
    ) -> list[str]:
        """Look through headers; returns what has to be waited for, of those streamlets that are not known then.

        An entry that starts here where the streamlet was handed over says nothing of what comes before: that was never
        here, and may have to come now, as when the streamlet went back and its other owner was lost then. `alone`:
        nobody says which of the groups were here before.
        """
        if not wanted:
            return []
        merges = {}
        for ref, each in wanted.items():
            entries = [self._index.entry(each.known.entry(index)) for index in range(each.known.entries)]
            before = handed_over(self._index, *ref)
            if alone and before.first_group_id > 1:
                entries = []
            entries = [None if entry is not None and begins_with(before, entry) else entry for entry in entries]
            merges[ref] = StreamletMerge(each.known, await self._present(ref), entries)
        by_source: dict[Launches, dict[Ref, StreamletMerge]] = {}
        for ref, each in wanted.items():
            for source in each.sources:
                by_source.setdefault(source, {})[ref] = merges[ref]
        scanned = await scan(backups, by_source, node_id=self._node_id)
        draining = {info.backup_id for info in backups if info.draining}
        away = {backup_id: reason for backup_id, reason in scanned.away.items() if backup_id not in draining}
        waits = []
        for ref, each in wanted.items():
            if len(away) >= max(1, each.info.config.replication):
                reasons = "; ".join(f"backup {backup_id}: {reason}" for backup_id, reason in sorted(away.items()))
                waits.append(
                    f"streamlet {ref[1]} of stream {each.info.name!r}: as many backups are away as it has replicas"
                    f" ({reasons}); start them, or drain those that are gone for good"
                )
            elif away and scanned.unread:
                waits.append(f"streamlet {ref[1]} of stream {each.info.name!r}: {'; '.join(scanned.unread[:3])}")
            else:
                prepared = _Prepared(each.sources, merges[ref], scanned, each.cursors, self._loop.time())
                self._prepared[ref][each.sources] = prepared
        for text in scanned.unread:
            log.warning("a virtual segment cannot be read whole", which=text)
        return waits

    async def _present(self, ref: Ref) -> dict[int, list[tuple[SegmentAddress, SegmentRecord]]]:
        """The segments that the index has of a streamlet, by entry."""

        def look() -> dict[int, list[tuple[SegmentAddress, SegmentRecord]]]:
            found: dict[int, list[tuple[SegmentAddress, SegmentRecord]]] = {}
            for address, record in self._index.segments_of_streamlet(*ref):
                found.setdefault(address.entry, []).append((address, record))
            return found

        return await asyncio.to_thread(look)

    async def _plan(self, ref: Ref, prepared: _Prepared) -> StreamletPlan:
        """What the streamlet is to be, as of now."""
        merge = prepared.merge
        merge.present = await self._present(ref)

        def plan() -> StreamletPlan:
            entries = [self._index.entry(merge.known.entry(index)) for index in range(merge.known.entries)]
            return merge.plan(entries, self._index.producers(*ref))

        return await asyncio.to_thread(plan)

    def prepared(self, stream_id: int, streamlet_id: int, sources: Iterable[common_pb2.RecoverySource]) -> bool:
        """Whether all is known that is needed to open a streamlet with these sources."""
        wanted, ref = _launches(sources), (stream_id, streamlet_id)
        if self._knows(ref, wanted):
            return True
        origin = self._index.origin(*ref)
        return origin is not None and origin.sources >= wanted

    async def prepare(self, info: common_pb2.StreamInfo, streamlet_ids: Sequence[int]) -> None:
        """Find out what is needed to open streamlets that have sources. Raises `Recovering` when it has to wait."""
        wanted = {}
        for assignment in info.assignments:
            if assignment.streamlet_id in streamlet_ids:
                ref = info.stream_id, assignment.streamlet_id
                wanted[ref] = await self._wanted(
                    info, assignment, _launches(assignment.sources), held_by=self._broker_id()
                )
        async with self._turn:
            todo = {ref: each for ref, each in wanted.items() if not self._knows(ref, each.sources)}
            waits = await self._find(todo, list(self._backups()), alone=True)
        if waits:
            sources = frozenset[Launches]().union(*(each.sources for each in wanted.values()))
            self._unopened[info.stream_id] = _Unopened(sources, waits[:WAITS_MAX], self._loop.time())
            raise StillRecovering(waits[0], waits_for=waits[:WAITS_MAX])
        self._unopened.pop(info.stream_id, None)

    async def _rescan(self, refs: set[Ref]) -> Materials:
        """Look for chunks of streamlets that are open already: after a restart, or what was nowhere before."""
        wanted = {}
        for ref in refs:
            info = self._infos.get(ref[0])
            assignments = {each.streamlet_id: each for each in info.assignments} if info is not None else {}
            assignment = assignments.get(ref[1])
            if info is None or assignment is None:
                raise StillRecovering(f"streamlet {ref} is not open")
            wanted[ref] = await self._wanted(info, assignment, _launches(assignment.sources), held_by=self._broker_id())
        merges = {ref: StreamletMerge(each.known, {}) for ref, each in wanted.items()}
        by_source: dict[Launches, dict[Ref, StreamletMerge]] = {}
        for ref, each in wanted.items():
            for source in each.sources:
                by_source.setdefault(source, {})[ref] = merges[ref]
        async with self._turn:
            backups = list(self._backups())
            scanned = await scan(backups, by_source, node_id=self._node_id)
        for backup in backups:
            if backup.draining:
                scanned.away.pop(backup.backup_id, None)
        return Materials(list(merges.values()), scanned)

    # -- writing it down -------------------------------------------------------------------------------------------

    async def commit(self, info: common_pb2.StreamInfo, streamlet_ids: Sequence[int]) -> None:
        """Write down what was found out, so that streamlets open as if they had always been here.

        Those that were not prepared, as the index knows them already, stay as they are. Raises the disk's error.
        """
        async with self._turn:
            for assignment in info.assignments:
                ref = info.stream_id, assignment.streamlet_id
                if assignment.streamlet_id not in streamlet_ids:
                    continue
                prepared = self._found(ref, _launches(assignment.sources))
                if prepared is not None and not self._committed(ref, prepared.sources):
                    await self._commit(ref, prepared)

    def _committed(self, ref: Ref, sources: frozenset[Launches]) -> bool:
        if not sources:
            return True
        origin = self._index.origin(*ref)
        return origin is not None and origin.sources >= sources

    async def _commit(self, ref: Ref, prepared: _Prepared) -> None:
        live = self._streams.get(ref[0]).streamlets.get(ref[1]) if ref[0] in self._streams else None
        plan = await self._plan(ref, prepared)
        if live is not None:
            await self._flushed(live.entries, plan)
            plan = await self._plan(ref, prepared)
        origin = self._index.origin(*ref)
        changes: list[Change] = [
            put_segment(address, record) for entry in plan.entries for address, record in entry.new.items()
        ]
        changes += [put_producer(*ref, producer_id, state) for producer_id, state in plan.producers.items()]
        sources, lost = prepared.sources, plan.records_lost
        if origin is not None:
            sources, lost = sources | origin.sources, lost + origin.records_lost
        changes.append(put_origin(*ref, OriginRecord(sources, plan.next_group_id, lost)))
        grafts: dict[Entry, Graft] = {}
        if live is None:
            changes += [put_entry(EntryId(*ref, index), entry.record) for index, entry in enumerate(plan.entries)]
            changes += [delete_segment(address) for entry in plan.entries for address in entry.gone]
        else:
            for entry, each in zip(live.entries, plan.entries, strict=True):
                grafts[entry] = _graft(each)
        await until_done(lambda done: self._memory.graft(grafts, changes, done))
        self._restart.taken_over.add(ref)
        if live is None:
            self._memory.remove_files([physical_id for entry in plan.entries for physical_id in entry.replaced])
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
        """Wait until nothing is in memory only that is older than what comes: the index has the older part of a log."""
        until = self._loop.time() + FLUSH_WAIT_S
        for entry, each in zip(entries, plan.entries, strict=True):
            last = max(((address.group_id, address.segment_id) for address in each.new), default=(0, 0))
            while entry.tail and entry.tail[0].key < last:
                if not await woken([entry], until):
                    raise StillRecovering(
                        f"older groups of streamlet {entry.log_id.streamlet_id} are still being written to disk"
                    )

    # -- getting it ------------------------------------------------------------------------------------------------

    def opened(self, info: common_pb2.StreamInfo) -> None:
        """The streamlets are open: get what is missing of them; or forget where they came from."""
        if info.stream_id not in self._streams:
            return
        stream = self._streams.get(info.stream_id)
        if info.assignments_version < stream.assignments_version:
            return
        self._infos.pop(info.stream_id, None)
        taken_over = any(True for _ in self._index.records(_ORIGINS_KEY.pack(b"o", info.stream_id)))
        if not taken_over and not any(ref[0] == info.stream_id for ref in self._recovering.streamlets):
            return  # as with nearly all streams, which may have thousands of streamlets
        for assignment in info.assignments:
            ref = info.stream_id, assignment.streamlet_id
            tracked = self._recovering.streamlets.get(ref)
            ours = assignment.streamlet_id in stream.streamlets and assignment.broker_id == self._broker_id()
            origin = self._index.origin(*ref)
            if ours and assignment.sources and origin is not None:
                self._infos[info.stream_id] = info
                if tracked is None or tracked.sources != origin.sources:
                    prepared = self._found(ref, _launches(assignment.sources))
                    if prepared is not None:
                        del self._prepared[ref][prepared.sources]
                    materials = Materials([prepared.merge], prepared.scanned) if prepared is not None else None
                    cursors = prepared.cursors if prepared is not None else {}
                    self._recovering.begin(ref, origin.sources, origin.records_lost, materials, cursors)
            elif not assignment.sources:
                if tracked is not None:
                    self._recovering.end(ref)
                if origin is not None:
                    self._memory.note([delete_origin(*ref)], _ignore)

    def progress(self) -> list[coordinator_pb2.RecoveryProgress]:
        """How far this broker is, by source."""
        self._forget_prepared()
        for ref in [ref for ref in self._recovering.streamlets if not self._is_open(ref)]:
            self._recovering.end(ref)
        self._recovering.look()
        found: defaultdict[Launches, coordinator_pb2.RecoveryProgress]
        found = defaultdict(coordinator_pb2.RecoveryProgress)
        for ref, each in sorted(self._recovering.streamlets.items()):
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

    def _forget_prepared(self) -> None:
        """What was found out and not opened for so long belongs to others by now."""
        now_s = self._loop.time()
        for ref, found in list(self._prepared.items()):
            for sources in [sources for sources, each in found.items() if now_s - each.made_s > PREPARED_S_MAX]:
                del found[sources]
            if not found:
                del self._prepared[ref]

    def _waits_for(self, ref: Ref, progress: Progress) -> list[str]:
        if not progress.readable:
            return progress.waits_for
        stream = self._streams.get(ref[0])
        if not progress.restored and stream.logs is not None:
            try:
                self._replication.check(stream.logs, stream.name)
            except TooFewBackups as error:
                return [error.message]
        return []

    def _is_open(self, ref: Ref) -> bool:
        return ref[0] in self._streams and ref[1] in self._streams.get(ref[0]).streamlets


def _launches(sources: Iterable[common_pb2.RecoverySource]) -> frozenset[Launches]:
    return frozenset((each.broker_id, each.before_epoch) for each in sources)


def _position(cursor: common_pb2.Cursor) -> Position:
    return Position(cursor.group_id, cursor.segment_id, cursor.position) if cursor.group_id else EARLIEST


def _graft(plan: EntryPlan) -> Graft:
    """What comes into an entry that is open."""
    if not plan.new:
        return Graft(EARLIEST, 0, 0, 0, 0, EARLIEST, plan.gaps)
    (first, first_record), (last, last_record) = min(plan.new.items()), max(plan.new.items())
    start = Position(first.group_id, first.segment_id, 0)
    record: EntryRecord = plan.record
    if record.start[:2] == start[:2]:
        start, start_record = record.start, record.start_record
    else:
        start_record = first_record.first_record
    return Graft(
        start,
        start_record,
        last_record.first_record + last_record.record_count,
        sum(each.length for each in plan.new.values()),
        len(plan.new),
        Position(last.group_id, last.segment_id, last_record.length),
        plan.gaps,
    )


def _ignore(_: KeraError | None) -> None:
    """A `Done` for which nobody waits."""
