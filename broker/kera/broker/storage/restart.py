"""Finds the data of earlier launches when a broker starts: in the arena of its last launch, and on its disk.

    arena of the last launch (killed)  ──► tails of all entries, as they were: no appended data is lost
    no arena, last launch not stopped  ──► the disk has all persisted data; a gap is behind it
    no arena, last launch stopped      ──► everything was flushed
    index damaged or missing           ──► rebuilt from the segment files

The arena takes precedence over the disk: it has all data of a segment's file, and maybe more. A start reads the arena,
and the files of segments that were open, but not the history. Blocks; runs on a thread before anything is served.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kera.broker.log.arena import Arena, Slot, SlotContent
from kera.broker.log.entry import Entries, Entry
from kera.broker.log.scan import SegmentScan, scan_segment
from kera.broker.log.segment import Segment
from kera.broker.records import Change, EntryRecord, Gap, ProducerRecord, SegmentAddress, SegmentRecord, place_of
from kera.broker.storage.disk import block_ceiling
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import delete_segment, put_entry, put_removal, put_segment, with_gap
from kera.broker.storage.index_repair import (
    UNKNOWN_CRC,
    StartFindings,
    entry_with,
    producer_changes,
    producers_of,
    repair_index,
)
from kera.broker.storage.segment_files import SegmentStore, record_of, report_damage
from kera.broker.storage.unsure import unsure_tail
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.base.telemetry import get_logger
from kera.core.errors import StartError
from kera.core.format.chunk import ALIGNMENT_BYTES
from kera.core.format.newer_format import refuse_unknown_version

log = get_logger("kera.restart")

_ENTRIES_KEY = struct.Struct(">cQI")
"""The prefix of the keys of a streamlet's entries in the index; the entry's number follows."""
PATHS_LOGGED_MAX = 10
LOST_GROUPS_MAX = 1 << 24
"""More groups than any memory holds: group ids jump by this number after a loss of memory, because the ids that were
given last are unknown."""


class _InSlot(NamedTuple):
    slot: Slot
    content: SlotContent
    scan: SegmentScan


class Unserved(NamedTuple):
    """The size of the local part of a stream that is not open."""

    bytes: int = 0
    records: int = 0
    """The sum of its entries' end ordinals."""


@dataclass(slots=True)
class RestoredStreamlet:
    """The state of a streamlet that a start has found."""

    entries: Entries
    producers: dict[int, ProducerRecord]
    next_group_id: int
    segments: list[Segment]
    """The segments of the tails, in memory."""
    moved: list[Entry]
    """Entries whose changed records have to be written to the index."""


@dataclass(slots=True)
class Restart:
    """Finds the data of earlier launches, and then restores each streamlet from it."""

    arena: Arena | None
    """The arena of the last launch; None if it has left none."""
    index: SegmentIndex
    store: SegmentStore
    found: StartFindings = field(default_factory=StartFindings)
    taken_over: set[tuple[int, int]] = field(default_factory=set)
    """Stream and streamlet ids whose complete state the index has got since, by a takeover."""
    taken_in: set[int] = field(default_factory=set)
    """Files that the index did not know. Their chunks name their stream, but not their broker."""
    _in_slots: dict[EntryId, list[_InSlot]] = field(default_factory=lambda: defaultdict(list))
    _fresh: bool = True
    """Whether the index is new or incomplete, so that data of earlier launches may be unknown."""
    _open_files: dict[SegmentAddress, int] = field(default_factory=dict)
    """Files of segments that are also in memory: they are abandoned when the segments are stored anew."""

    def look(self, *, index_whole: bool, slot_bytes: int) -> None:
        """Read the arena and the open files, and update the index with them. Raises `StartError`."""
        meta = self.index.meta()
        self._fresh = not meta or not index_whole
        if not index_whole or (not meta and any(True for _ in self.store.physical_ids())):
            self.taken_in |= repair_index(self.store, self.found, self._in_memory())
            self.found.repaired = True
            meta = self.index.meta()  # not `clean`: how the last launch ended is unknown
        largest = max(meta.get("slot_bytes", 0), self.arena.slot_bytes if self.arena else 0)
        if largest > slot_bytes:
            raise StartError(
                f"the data directory has segments of {largest} bytes, which do not fit into segments of {slot_bytes};"
                f" start the broker with --segment-bytes {largest}, or more",
                segment_bytes=largest,
            )
        self.found.attached = self.arena is not None
        ended_well = meta.get("clean", False) or self.index.was_closed
        # The last launch may have found the memory lost, and ended before it reported that: its arena then lacks data.
        known_as_lost = meta.get("lost_memory", False)
        self.found.lost_memory = known_as_lost or (self.arena is None and bool(meta) and not ended_well)
        self.store.remove_files(self.index.removals())
        self.store.clear_arriving()
        self._look_at_arena()
        self._look_at_open_files()
        self._adopt_strays(meta)
        if self.found.lost_memory and not known_as_lost:
            self._remember_loss()

    def _adopt_strays(self, meta: dict[str, Any]) -> None:
        """Add files that the index does not know to it, if they continue their entry; remove the others.

        A job that a crash interrupts leaves such files, which are written and not in the index yet. A file from the
        middle of an entry that has no record here is not from such a job, but from another broker: it is left alone.
        """
        scans: dict[SegmentAddress, tuple[int, SegmentScan]] = {}
        strays = []
        for physical_id, scan in self._find_strays(meta.get("first_unsettled_id", meta.get("next_physical_id", 1))):
            strays.append(physical_id)
            if scan.address is not None and scan.headers:
                known = scans.get(scan.address)
                if known is None or scan.end > known[1].end:
                    scans[scan.address] = (physical_id, scan)
        changes: list[Change] = []
        adopted: set[int] = set()
        foreign: set[int] = set()
        entries: dict[EntryId, EntryRecord] = {}
        for address, (physical_id, scan) in sorted(scans.items()):
            entry_id = EntryId(*address[:3])
            if entry_id in self._in_slots:
                continue  # memory has it, and all following segments
            known_entry = entries.get(entry_id) or self.index.entry(entry_id)
            entry = known_entry or EntryRecord()
            if not _goes_on(entry, address, scan):
                foreign.update(() if known_entry else [physical_id])
                continue
            record = record_of(physical_id, scan, UNKNOWN_CRC, self.store.written_us(physical_id))
            entries[entry_id] = entry_with(entry, address, record)
            changes.append(put_segment(address, record))
            changes += producer_changes(address, scan.headers)
            adopted.add(physical_id)
        if not strays:
            return
        changes += [put_entry(entry_id, entry) for entry_id, entry in entries.items()]
        self.taken_in |= adopted
        self._tell_left(foreign)
        useless = [self.store.path(physical_id) for physical_id in strays if physical_id not in adopted | foreign]
        for path in useless:
            self.store.disk.remove(path)
        self.store.disk.sync_removals(useless)  # later starts do not look at these ids again
        next_id = max(strays[-1] + 1, meta.get("next_physical_id", 1))
        self.index.commit(changes, dict(meta, next_physical_id=next_id, first_unsettled_id=next_id))

    def leave_alone(self, is_gone: Callable[[int, int], bool]) -> None:
        """Forget files in `taken_in` of streamlets for which `is_gone`, but leave the files where they are.

        Other brokers have those streamlets, and may miss the files if files of two brokers were mixed up.
        """
        records = ((address, record.physical_id) for address, record in self.index.all_segments())
        found = {address: each for address, each in records if each in self.taken_in and is_gone(*address[:2])}
        if found:
            self.index.commit([delete_segment(address) for address in found])
        self._tell_left(found.values())

    def _tell_left(self, physical_ids: Collection[int]) -> None:
        if physical_ids:
            log.warning(
                "left segment files alone that no record of the index named, and that other brokers may miss; kera"
                " verify names all",
                files=len(physical_ids),
                paths=[str(self.store.path(each)) for each in sorted(physical_ids)[:PATHS_LOGGED_MAX]],
            )

    def _find_strays(self, first: int) -> Iterator[tuple[int, SegmentScan]]:
        """Yield files from `first` on that the index does not know; set aside files with other data than it says."""
        known: dict[int, SegmentAddress] | None = None
        for physical_id in self.store.physical_ids(first=first):
            try:
                scan = self.store.scan_file(physical_id, finished=False)
            except OSError as error:
                log.error("cannot read a segment file", path=str(self.store.path(physical_id)), error=str(error))
                continue
            record = self.index.segment(scan.address) if scan.address is not None else None
            if record is not None and record.physical_id == physical_id:
                continue
            if known is None:
                known = {record.physical_id: address for address, record in self.index.all_segments()}
            if physical_id not in known:
                yield physical_id, scan
            elif scan.address is not None:
                self.store.set_aside_foreign(physical_id, known[physical_id], place_of(scan.address))

    def _in_memory(self) -> set[SegmentAddress]:
        slots = self.arena.slots() if self.arena is not None else ()
        return {
            SegmentAddress(*content[:5]) for slot in slots if (content := slot.content) is not None and content.head
        }

    def _look_at_arena(self) -> None:
        if self.arena is None:
            return
        for slot in self.arena.slots():
            content = slot.content
            if content is None:
                continue
            address = SegmentAddress(*content[:5])
            record = self.index.segment(address)
            scan = None
            if (record is None or record.open) and content.head:
                scan = scan_segment(slot.view, address=address, length=content.head)
                refuse_unknown_version(str(self.arena.path), scan.unknown_version)
            if scan is None or not scan.headers:
                slot.retire()  # its segment is on disk, or was never written to
                continue
            self.found.segments_in_memory += 1
            self.found.bytes_in_memory += scan.end
            self.found.chunks_damaged += len(scan.holes)
            report_damage(self.arena.path, scan.holes)
            self._in_slots[EntryId(*address[:3])].append(_InSlot(slot, content, scan))

    def _look_at_open_files(self) -> None:
        changes: list[Change] = []
        for entry in list(self.index.entries()):
            in_memory = {SegmentAddress(*item.content[:5]) for item in self._in_slots.get(entry, [])}
            record = self.index.entry(entry) or EntryRecord()
            for address, open_record in self.index.open_segments(entry):
                if address in in_memory:
                    self._open_files[address] = open_record.physical_id
                    continue
                self.found.open_files += 1
                record = self._finish_file(address, open_record, record, changes)
            if record != self.index.entry(entry):
                changes.append(put_entry(entry, record))
        if changes:
            self.index.commit(changes)

    def _finish_file(
        self, address: SegmentAddress, open_record: SegmentRecord, entry: EntryRecord, changes: list[Change]
    ) -> EntryRecord:
        """Close the file of a segment that was open when its memory was lost; return the entry's new record."""
        physical_id = open_record.physical_id
        path = self.store.path(physical_id)
        try:
            scan = self.store.scan_file(physical_id, address=address, durable=open_record.length)
        except OSError as error:
            log.error("cannot read the file of an open segment", path=str(path), error=str(error))
            return entry
        if scan.torn_bytes:
            self.found.torn_tails += 1
            self.found.torn_bytes += scan.torn_bytes
            log.warning(
                "cut the torn tail of an unfinished write",
                path=str(path),
                offset=scan.end,
                length_bytes=scan.torn_bytes,
            )
        self.found.chunks_damaged += len(scan.holes)
        report_damage(path, scan.holes)
        if not scan.headers:
            changes.append(delete_segment(address))
            other = self.store.scan_file(physical_id).address
            if other is not None and other != address:
                self.store.set_aside_foreign(physical_id, address, place_of(other))
            else:
                changes.append(put_removal(physical_id))
            return entry
        record = record_of(physical_id, scan, UNKNOWN_CRC, self.store.written_us(physical_id))
        changes.append(put_segment(address, record))
        changes += producer_changes(address, scan.headers)
        self.store.disk.truncate(path, block_ceiling(scan.end))
        return entry_with(entry, address, record)

    def _remember_loss(self) -> None:
        """Record a gap behind the stored part of each entry, and in the index's meta record that memory was lost."""
        last_groups: dict[tuple[int, int], int] = defaultdict(int)
        records = {entry: self.index.entry(entry) or EntryRecord() for entry in self.index.entries()}
        for entry, record in records.items():
            known = max(record.last_group_id, record.start.group_id, *(gap.end.group_id for gap in record.gaps), 0)
            last_groups[entry[:2]] = max(last_groups[entry[:2]], known)
        changes = []
        for entry, record in records.items():
            end = EARLIEST
            if record.last_group_id:
                last = self.index.segment(SegmentAddress(*entry, record.last_group_id, record.last_segment_id))
                end = Position(record.last_group_id, record.last_segment_id, last.length if last else 0)
            gap = Gap(max(record.start, end), Position(last_groups[entry[:2]] + LOST_GROUPS_MAX, 1, 0))
            changes.append(put_entry(entry, record._replace(gaps=with_gap(record.gaps, gap))))
        self.index.commit(changes, dict(self.index.meta(), lost_memory=True))

    # -- restoring -------------------------------------------------------------------------------------------------

    def restore(
        self,
        stream_id: int,
        streamlet_id: int,
        entries: int,
        first_group_id: int,
        *,
        persisted: bool = False,
        fresh: bool = False,
    ) -> RestoredStreamlet:
        """Return the state of a streamlet; it is empty if the streamlet is new, or was lost completely.

        `persisted`: readers of the stream see only data on disk, so a reader at the end has missed nothing.
        `fresh`: the streamlet was handed over to this launch, which cannot have lost any of it.
        `first_group_id`: the first group of a lost streamlet; a gap before it stands for the data that it may have had.
        """
        producers = self.index.producers(stream_id, streamlet_id)
        numbers = sorted(self._entries_there(stream_id, streamlet_id, entries))
        ids = [EntryId(stream_id, streamlet_id, number) for number in numbers]
        there = [Entry(entry_id, self.index, self.index.entry(entry_id)) for entry_id in ids]
        all_entries = Entries(stream_id, streamlet_id, entries, self.index, there)
        result = RestoredStreamlet(all_entries, producers, 1, [], [])
        origin = self.index.origin(stream_id, streamlet_id)
        if origin is not None:
            result.next_group_id = origin.next_group_id
        known = False
        for entry in there:
            entry.unsure = unsure_tail(self.index, entry.log_id)
            known = known or self.index.entry(entry.log_id) is not None
            entry.committed = self.index.cursors(entry.log_id)
            result.segments += self._restore_tail(entry, producers)
            for gap in entry.gaps:
                result.next_group_id = max(result.next_group_id, gap.end.group_id)
            last = max(entry.last_stored[0], entry.start.group_id, entry.tail[-1].key[0] if entry.tail else 0)
            result.next_group_id = max(result.next_group_id, last + 1)
        known_by_all = fresh or (stream_id, streamlet_id) in self.taken_over
        unsure = (self.found.lost_memory or self._fresh) and not known_by_all
        if unsure or (not known and not result.segments):
            result.next_group_id = max(result.next_group_id, first_group_id)
        for entry in there:
            self._settle_gaps(entry, result, unsure=unsure, persisted=persisted)
        if unsure and result.next_group_id > 1:
            for entry in result.entries:
                if entry.start == EARLIEST:
                    entry.start = Position(result.next_group_id, 1, 0)
                    if not persisted:
                        entry.gaps = [Gap(EARLIEST, entry.start)]
                    result.moved.append(entry)
        return result

    def _entries_there(self, stream_id: int, streamlet_id: int, entries: int) -> set[int]:
        """Return the entries of a streamlet that have data in the index or in memory."""
        prefixes = (_ENTRIES_KEY.pack(kind, stream_id, streamlet_id) for kind in (b"e", b"c"))
        keys = (key for prefix in prefixes for key, _ in self.index.records(prefix))
        there = {int.from_bytes(key[_ENTRIES_KEY.size : _ENTRIES_KEY.size + 4], "big") for key in keys}
        if self._in_slots:
            there.update(n for n in range(entries) if EntryId(stream_id, streamlet_id, n) in self._in_slots)
        return {number for number in there if number < entries}

    def _settle_gaps(self, entry: Entry, result: RestoredStreamlet, *, unsure: bool, persisted: bool) -> None:
        """Let the gap of a loss end where this launch begins; if `persisted`, let gaps begin behind the readers."""
        gaps = list(entry.gaps)
        if self.found.lost_memory and unsure and gaps:
            gaps[-1] = Gap(gaps[-1].start, Position(result.next_group_id, 1, 0))
        if persisted:
            # A reader at the end of the last chunk, a multiple of the alignment, is then before the gap.
            gaps = [Gap(behind(gap.start), gap.end) for gap in gaps]
        if gaps != entry.gaps:
            entry.gaps = gaps
            result.moved.append(entry)

    def _restore_tail(self, entry: Entry, producers: dict[int, ProducerRecord]) -> list[Segment]:
        tail: list[Segment] = []
        for item in sorted(self._in_slots.pop(entry.log_id, []), key=lambda item: item.content[3:5]):
            key = (item.content.group_id, item.content.segment_id)
            if key <= entry.last_stored or Position(*key, item.scan.end) <= entry.start:
                item.slot.retire()  # its segment was removed, and its slot not freed yet
                continue
            segment = Segment.found(entry, item.slot, item.content, item.scan)
            if segment.address in self._open_files:
                segment.abandoned.append(self._open_files.pop(segment.address))
            producers_of(item.scan.headers, producers)
            tail.append(segment)
        for segment in tail:
            if segment is not tail[-1] and not segment.closed:
                segment.close()
            entry.add(segment)
        if tail:
            entry.go_on_from(tail[-1].first_record + tail[-1].record_count)
        return tail

    def leftovers(self) -> set[EntryId]:
        """Return the entries with segments in memory that were not restored yet."""
        return set(self._in_slots)

    def restore_entry(self, entry_id: EntryId) -> list[Segment]:
        """Return the tail of an entry, without its streamlet."""
        return self._restore_tail(Entry(entry_id, self.index, self.index.entry(entry_id)), {})

    def unserved(self, stream_id: int) -> Unserved:
        """Return the size of the local part of a stream that is not open."""
        ends: dict[EntryId, int] = {}
        size = sum(record.length for _, record in self.index.segments_of_stream(stream_id) if not record.open)
        for entry_id in self.index.entries():
            record = self.index.entry(entry_id) if entry_id.stream_id == stream_id else None
            if record is not None:
                ends[entry_id] = record.next_record
        for entry_id, items in self._in_slots.items():
            for item in items if entry_id.stream_id == stream_id else ():
                size += item.scan.end
                last = item.scan.headers[-1]
                ends[entry_id] = max(ends.get(entry_id, 0), last.first_record + last.record_count)
        return Unserved(size, sum(ends.values()))

    def drop_leftovers(self, is_gone: Callable[[int, int], bool]) -> None:
        """Free the memory of each streamlet for which `is_gone` (stream and streamlet id) is true."""
        for entry_id in [entry_id for entry_id in self._in_slots if is_gone(*entry_id[:2])]:
            for item in self._in_slots.pop(entry_id):
                item.slot.retire()


def behind(position: Position) -> Position:
    """Return the start of a gap right behind readers at `position`, who have seen all data and are not in the gap.

    No chunk can begin there, because chunks begin at multiples of the alignment.
    """
    return position if position.offset % ALIGNMENT_BYTES else position._replace(offset=position.offset + 1)


def _goes_on(entry: EntryRecord, address: SegmentAddress, scan: SegmentScan) -> bool:
    """Whether a segment is the next one behind the stored part of its entry."""
    return (entry.last_group_id, entry.last_segment_id) < (address.group_id, address.segment_id) and (
        scan.headers[0].first_record == entry.next_record
    )
