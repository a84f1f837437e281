"""Rebuilds the index from the segment files, completely or in part; and the findings of a start, for the metrics."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from kera.broker.log.digests import digests_of
from kera.broker.records import Change, EntryRecord, ProducerRecord, SegmentAddress, SegmentRecord
from kera.broker.storage.index import SegmentIndex
from kera.broker.storage.index_format import (
    ORIGIN_KEY,
    origin_record,
    put_digests,
    put_entry,
    put_origin,
    put_producer,
    put_segment,
)
from kera.broker.storage.segment_files import SegmentStore, record_of, report_damage
from kera.core.base.ids import EARLIEST, EntryId, Position
from kera.core.base.telemetry import get_logger
from kera.core.format.chunk import ChunkHeader
from kera.core.format.header_table import table
from kera.core.format.punctuation import is_punctuation

log = get_logger("kera.restart")

UNKNOWN_CRC = 0
"""Makes a load verify each chunk, which a file that a crash has cut needs."""


@dataclass(slots=True)
class StartFindings:
    """The findings of the start, for the log and the metrics."""

    attached: bool = False
    """Whether the arena of the last launch was found."""
    lost_memory: bool = False
    """Whether the last launch did not stop cleanly, and its arena is gone."""
    repaired: bool = False
    """Whether the index was rebuilt, completely or in part."""
    segments_in_memory: int = 0
    bytes_in_memory: int = 0
    open_files: int = 0
    torn_tails: int = 0
    torn_bytes: int = 0
    chunks_damaged: int = 0


def producers_of(headers: list[ChunkHeader], known: dict[int, ProducerRecord]) -> dict[int, ProducerRecord]:
    """Update `known` with the producers of chunks; return it."""
    for header in headers:
        if is_punctuation(header):
            continue
        state = ProducerRecord(header.producer_epoch, header.sequence + 1)
        known[header.producer_id] = max(known.get(header.producer_id, state), state)
    return known


def producer_changes(address: SegmentAddress, headers: list[ChunkHeader]) -> list[Change]:
    """Return the changes to the index for the producers of a segment's chunks."""
    changes = [put_producer(*address[:2], *item) for item in producers_of(headers, {}).items()]
    return changes + put_digests(*address[:2], digests_of(table(headers)))


def entry_with(entry: EntryRecord, address: SegmentAddress, record: SegmentRecord) -> EntryRecord:
    """Return the record of `entry` with another stored segment behind the others."""
    start, start_record = entry.start, entry.start_record
    if start == EARLIEST:
        start, start_record = Position(address.group_id, address.segment_id, 0), record.first_record
    return entry._replace(
        start=start,
        start_record=start_record,
        next_record=record.first_record + record.record_count,
        stored_bytes=entry.stored_bytes + record.length,
        stored_segments=entry.stored_segments + 1,
        last_group_id=address.group_id,
        last_segment_id=address.segment_id,
        watermark_us=max(entry.watermark_us, record.max_timestamp_us),
    )


def repair_index(store: SegmentStore, found: StartFindings, in_memory: set[SegmentAddress]) -> set[int]:
    """Rebuild the records of segment files without one, and then the records of entries from all segments.

    Returns the ids of the files that have a record now.

    The newest segments of an entry that are `in_memory` count as unfinished on disk, because memory may have more data.
    """
    index = store.index
    known = {record.physical_id for _, record in index.all_segments()}
    removals = set(index.removals())
    changes: list[Change] = []
    last_id = max(known, default=0)
    segments: dict[SegmentAddress, SegmentRecord] = dict(index.all_segments())
    producers: dict[tuple[int, int], dict[int, ProducerRecord]] = defaultdict(dict)
    for physical_id in store.physical_ids():
        last_id = max(last_id, physical_id)
        if physical_id in known or physical_id in removals:
            continue
        path = store.path(physical_id)
        try:
            scan = store.scan_file(physical_id)
        except OSError as error:
            log.error("cannot read a segment file", path=str(path), error=str(error))
            continue
        if scan.address is None or not scan.headers:
            log.warning("a segment file has no chunk", path=str(path))
            continue
        if scan.torn_bytes:
            found.torn_tails += 1
            found.torn_bytes += scan.torn_bytes
            log.warning("cut a torn tail", path=str(path), offset=scan.end, length_bytes=scan.torn_bytes)
        found.chunks_damaged += len(scan.holes)
        report_damage(path, scan.holes)
        record = record_of(physical_id, scan, UNKNOWN_CRC, store.written_us(physical_id))
        older = segments.get(scan.address)
        if older is not None and older.length >= record.length:
            continue  # an abandoned file of the same segment
        segments[scan.address] = record
        changes.append(put_segment(scan.address, record))
        producers_of(scan.headers, producers[scan.address[:2]])
        changes += put_digests(*scan.address[:2], digests_of(table(scan.headers)))
    for address in _newest_in_memory(segments, in_memory):
        segments[address] = segments[address]._replace(open=True, length=0)
        changes.append(put_segment(address, segments[address]))
    changes += _entries_anew(index, segments)
    # The lost records may include segments that still had to come from backups: they are looked for again.
    for key, value in index.records(b"o"):
        _, stream_id, streamlet_id = ORIGIN_KEY.unpack(key)
        changes.append(put_origin(stream_id, streamlet_id, origin_record(value).without_sources()))
    for (stream_id, streamlet_id), states in producers.items():
        stored = index.producers(stream_id, streamlet_id)
        for producer_id, state in states.items():
            newest = max(state, stored.get(producer_id, state))
            changes.append(put_producer(stream_id, streamlet_id, producer_id, newest))
    meta = index.meta()
    meta["next_physical_id"] = meta["first_unsettled_id"] = max(last_id + 1, meta.get("next_physical_id", 1))
    meta["clean"] = False
    index.commit(changes, meta)
    log.warning("rebuilt the index from the segment files", segments=len(segments))
    return {record.physical_id for record in segments.values()} - known


def _newest_in_memory(
    segments: dict[SegmentAddress, SegmentRecord], in_memory: set[SegmentAddress]
) -> list[SegmentAddress]:
    found: list[SegmentAddress] = []
    finished: set[EntryId] = set()
    for address in sorted(segments, reverse=True):
        entry = EntryId(*address[:3])
        if entry in finished:
            continue
        if address in in_memory:
            found.append(address)
        else:
            finished.add(entry)
    return found


def _entries_anew(index: SegmentIndex, segments: dict[SegmentAddress, SegmentRecord]) -> list[Change]:
    by_entry: dict[EntryId, list[tuple[SegmentAddress, SegmentRecord]]] = defaultdict(list)
    for address, record in sorted(segments.items()):
        by_entry[EntryId(*address[:3])].append((address, record))
    changes = []
    for entry_id, items in by_entry.items():
        old = index.entry(entry_id) or EntryRecord()
        entry = EntryRecord(gaps=old.gaps, watermark_us=old.watermark_us, removed_watermark_us=old.removed_watermark_us)
        for address, record in items:
            if not record.open:
                entry = entry_with(entry, address, record)
        if entry.start < old.start:
            entry = entry._replace(start=old.start, start_record=old.start_record)
        if (old.last_group_id, old.last_segment_id) > (entry.last_group_id, entry.last_segment_id):
            entry = entry._replace(
                last_group_id=old.last_group_id,
                last_segment_id=old.last_segment_id,
                next_record=max(entry.next_record, old.next_record),
            )
        changes.append(put_entry(entry_id, entry))
    return changes
