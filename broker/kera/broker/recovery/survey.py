"""Finds out from backups which data a lost broker's streamlets have, and plans the streamlets.

    assignment, and the coordinator's information ──seek()──► Sought
    headers of all chunks that backups have (``scan``) ──Survey.find()──► SurveyResult ──Survey.plan()──► StreamletPlan

A streamlet waits while as many backups are away as it has replicas, because they may have data that no other backup
has. A backup that has lost replicas with damaged headers counts as away, too, while another one is away: the lost data
may be there. A backup that is gone for good has to be drained; then it does not count, and the missing data is lost and
reported.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kera.broker.backup_ways import OVER_TCP, BackupWays
from kera.broker.log.intervals import holding
from kera.broker.log.retention import Rules
from kera.broker.ownership.handover import begins_with, digests_of, handed_over, producers_of
from kera.broker.records import SegmentAddress, SegmentRecord
from kera.broker.recovery.layout import Places, places
from kera.broker.recovery.plan import EntryStart, Known, StreamletMerge, StreamletPlan
from kera.broker.recovery.scan import Launches, Ref, Scanned, scan
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.restart import LOST_GROUPS_MAX
from kera.core.base.ids import EARLIEST, Position
from kera.core.base.telemetry import get_logger
from kera.core.errors import InvalidArgument
from kera.core.format.header_table import table
from kera.v1 import common_pb2

log = get_logger("kera.recovery")

KEPT_S_MAX = 900.0
"""How long findings are kept for streamlets that are not opened."""

Sources = frozenset[Launches]


@dataclass(frozen=True, slots=True)
class Sought:
    """A streamlet to look for, and the facts about it that are known before."""

    info: common_pb2.StreamInfo
    known: Known
    sources: Sources
    cursors: dict[int, Position]
    is_ours: bool = True
    """Whether its groups belong to this broker, or an earlier launch of it; otherwise another broker has them."""


@dataclass(frozen=True, slots=True)
class Materials:
    """The headers of streamlets' chunks, and where the chunks can be read."""

    merges: Sequence[StreamletMerge]
    scanned: Scanned

    def places(self, records: Mapping[SegmentAddress, SegmentRecord]) -> dict[SegmentAddress, Places]:
        """Return the places of the chunks of segments."""
        chunks = {address: chunks for merge in self.merges for address, chunks in merge.chunks().items()}
        none = table()
        return {address: places(record, chunks.get(address, none)) for address, record in records.items()}


@dataclass(frozen=True, slots=True)
class SurveyResult:
    """The findings about a streamlet."""

    sources: Sources
    merge: StreamletMerge
    scanned: Scanned
    cursors: dict[int, Position]
    made_s: float

    @property
    def materials(self) -> Materials:
        """The chunks that were found."""
        return Materials([self.merge], self.scanned)


class SurveyResults:
    """The findings about streamlets that are not opened yet.

    They are kept by streamlet and sources, because several brokers that are lost at a time had different data of it.
    """

    def __init__(self) -> None:
        self._found: defaultdict[Ref, dict[Sources, SurveyResult]] = defaultdict(dict)

    def add(self, ref: Ref, result: SurveyResult) -> None:
        """Add the findings about a streamlet."""
        self._found[ref][result.sources] = result

    def has(self, ref: Ref, sources: Sources) -> bool:
        """Whether findings for exactly these sources are kept."""
        return sources in self._found[ref]

    def get(self, ref: Ref, sources: Sources) -> SurveyResult | None:
        """Return the findings for these sources; or for more, if some of them were released since."""
        fitting = [each for of, each in self._found.get(ref, {}).items() if of >= sources]
        return min(fitting, key=lambda each: len(each.sources), default=None)

    def take(self, ref: Ref, sources: Sources) -> SurveyResult | None:
        """Return the findings as `get`, and forget them."""
        result = self.get(ref, sources)
        if result is not None:
            del self._found[ref][result.sources]
        return result

    def forget_old(self, now_s: float) -> None:
        """Forget findings after `KEPT_S_MAX`: streamlets that were not opened belong to other brokers by now."""
        for ref, found in list(self._found.items()):
            for sources in [sources for sources, each in found.items() if now_s - each.made_s > KEPT_S_MAX]:
                del found[sources]
            if not found:
                del self._found[ref]


class Survey:
    """Finds the chunks of lost streamlets on backups, and plans each streamlet when no backup can add to it."""

    def __init__(self, index: SegmentIndex, *, ways: BackupWays = OVER_TCP) -> None:
        self._index = index
        self._ways = ways

    async def find(
        self, wanted: Mapping[Ref, Sought], backups: Sequence[common_pb2.BackupInfo], *, alone: bool = False
    ) -> tuple[dict[Ref, SurveyResult], list[str]]:
        """Scan headers; return the findings, and the reasons for which the other streamlets wait.

        The start of an entry here says nothing about groups of another broker, even if it lies in them: the streamlet
        may have been here before, and have moved there with all its data. Nor does the start of an entry where the
        streamlet was handed over say anything about earlier data: that was never here, and may have to come now, if the
        streamlet has moved back and its other owner was lost. `alone`: it is unknown which groups were here before.
        """
        if not wanted:
            return {}, []
        merges = {}
        for ref, each in wanted.items():
            entries = [self._index.entry(each.known.entry(index)) for index in range(each.known.entries)]
            before = handed_over(self._index, *ref)
            if not each.is_ours or (alone and before.first_group_id > 1):
                entries = []
            entries = [None if entry is not None and begins_with(before, entry) else entry for entry in entries]
            merges[ref] = StreamletMerge(each.known, await self._present(ref), entries)
        scanned = await self._scan(wanted, merges, backups)
        found, waits = {}, []
        now_s = asyncio.get_running_loop().time()
        away = scanned.incomplete | scanned.away if scanned.away else {}
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
                found[ref] = SurveyResult(each.sources, merges[ref], scanned, each.cursors, now_s)
        for text in scanned.unread:
            log.warning("a virtual segment cannot be read whole", which=text)
        return found, waits

    async def find_again(self, wanted: Mapping[Ref, Sought], backups: Sequence[common_pb2.BackupInfo]) -> Materials:
        """Scan for chunks of streamlets that are open already."""
        merges = {ref: StreamletMerge(each.known, {}) for ref, each in wanted.items()}
        return Materials(list(merges.values()), await self._scan(wanted, merges, backups))

    async def _scan(
        self,
        wanted: Mapping[Ref, Sought],
        merges: Mapping[Ref, StreamletMerge],
        backups: Sequence[common_pb2.BackupInfo],
    ) -> Scanned:
        by_source: defaultdict[Launches, dict[Ref, StreamletMerge]] = defaultdict(dict)
        for ref, each in wanted.items():
            for source in each.sources:
                by_source[source][ref] = merges[ref]
        scanned = await scan(backups, by_source, ways=self._ways)
        for backup in backups:
            if backup.draining:
                scanned.away.pop(backup.backup_id, None)
                scanned.incomplete.pop(backup.backup_id, None)
        return scanned

    async def _present(self, ref: Ref) -> dict[int, list[tuple[SegmentAddress, SegmentRecord]]]:
        """Return a streamlet's segments in the index, by entry."""

        def look() -> dict[int, list[tuple[SegmentAddress, SegmentRecord]]]:
            found: defaultdict[int, list[tuple[SegmentAddress, SegmentRecord]]] = defaultdict(list)
            for address, record in self._index.segments_of_streamlet(*ref):
                found[address.entry].append((address, record))
            return dict(found)

        return await asyncio.to_thread(look)

    async def plan(
        self, ref: Ref, merge: StreamletMerge, removed: Mapping[int, EntryStart] | None = None
    ) -> StreamletPlan:
        """Return the plan of a streamlet, as of now. `removed`: see `StreamletMerge.remove`."""
        merge.remove(removed or {})
        merge.present = await self._present(ref)

        def plan() -> StreamletPlan:
            entries = [self._index.entry(merge.known.entry(index)) for index in range(merge.known.entries)]
            return merge.plan(entries, self._index.producers(*ref))

        return await asyncio.to_thread(plan)


def launches(sources: Iterable[common_pb2.RecoverySource]) -> Sources:
    """Return the launches that sources name."""
    return frozenset((each.broker_id, each.before_epoch) for each in sources)


def seek(
    info: common_pb2.StreamInfo,
    assignment: common_pb2.StreamletAssignment,
    sources: Sources,
    *,
    held_by: int,
    starts: Iterable[common_pb2.EntryStart] = (),
    cursors: Iterable[common_pb2.Cursor] = (),
    states: Iterable[common_pb2.StreamletState] = (),
    is_ours: bool = True,
) -> Sought:
    """Return the search for the groups of a streamlet that broker `held_by` holds.

    `states`: the states handed over to it; `is_ours`: see `Sought`. Raises `InvalidArgument` if it holds none.
    """
    intervals = holding(assignment, held_by).intervals
    if not intervals:
        raise InvalidArgument(
            f"broker {held_by} has no groups of streamlet {assignment.streamlet_id} of stream {info.name!r}",
            stream=info.name,
            streamlet_id=assignment.streamlet_id,
            broker_id=held_by,
        )
    state = next((each for each in states if each.streamlet_id == assignment.streamlet_id), None)
    known = Known(
        info.stream_id,
        assignment.streamlet_id,
        info.config.entries,
        intervals,
        starts={
            each.start.entry: EntryStart(_position(each.start), each.first_record)
            for each in starts
            if each.start.streamlet_id == assignment.streamlet_id
        },
        next_records=tuple(state.next_records) if state is not None else (),
        next_group_id=max(assignment.first_group_id, state.next_group_id if state is not None else 1, 1),
        producers=producers_of(state) if state is not None else {},
        digests=digests_of(state) if state is not None else {},
        keeps_all=not Rules.of(info.config),
        may_lose=info.config.durability <= common_pb2.DURABILITY_LEADER,
        replication=info.config.replication,
        lost_groups=LOST_GROUPS_MAX,
    )
    mine = {
        each.entry: _position(each)
        for each in cursors
        if (each.stream_id, each.streamlet_id) == (info.stream_id, assignment.streamlet_id)
    }
    return Sought(info, known, sources, mine, is_ours)


def _position(cursor: common_pb2.Cursor) -> Position:
    return Position(cursor.group_id, cursor.segment_id, cursor.position) if cursor.group_id else EARLIEST
