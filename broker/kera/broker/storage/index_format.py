"""The format of the index: keys and values of its records about the log. Pure: bytes in and out.

key (big-endian, so that LMDB's order is the order of the log)       value (ends with a crc32c over key and value)
"m"                                                                  JSON: format, whether the broker runs, counters
"e" stream u64, streamlet u32, entry u32                             EntryRecord
"s" stream u64, streamlet u32, entry u32, group u64, segment u32     SegmentRecord
"p" stream u64, streamlet u32, producer u64                          epoch u32, next sequence u64
"q" stream u64, streamlet u32, producer u64                          likewise, and the digests of the chunks before it
"c" stream u64, streamlet u32, entry u32, consumer group text           committed cursor: group, segment, offset
"r" physical id u64                                                  of a file to be removed: its segment, if known
"v" stream u64, virtual segment u64                                  see ``kera.broker.replication.virtual_index``
"o" stream u64, streamlet u32                                        OriginRecord
"h" stream u64, streamlet u32                                        see ``kera.broker.ownership.handover``
"u" stream u64, streamlet u32, entry u32                             see ``kera.broker.storage.unsure``
"d" stream u64                                                       see ``kera.broker.replication.virtual_index``
"i" stream u64                                                       see ``kera.broker.ownership.stream_records``
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from kera.broker.log.digests import joined
from kera.broker.records import (
    Change,
    Digests,
    EntryRecord,
    Gap,
    OriginRecord,
    ProducerRecord,
    SegmentAddress,
    SegmentRecord,
)
from kera.core.base.ids import EntryId, Position
from kera.core.format.checksum import crc32c
from kera.core.format.punctuation import NO_TIME

GAPS_MAX = 64
"""Maximum number of gaps of an entry; each gap is one loss of the host's memory."""

CRC = struct.Struct("<I")
ENTRY_KEY = struct.Struct(">cQII")
SEGMENT_KEY = struct.Struct(">cQIIQI")
PRODUCER_KEY = struct.Struct(">cQIQ")
REMOVAL_KEY = struct.Struct(">cQ")
_ADDRESS = struct.Struct("<QIIQI")
_SEGMENT = struct.Struct("<QIIIIQQqqq")
_ENTRY = struct.Struct("<QIIQQQQQII")
_WATERMARKS = struct.Struct("<qq")
_GAP = struct.Struct("<QIIQII")
PRODUCER = struct.Struct("<IQ")
POSITION = struct.Struct("<QII")
ORIGIN_KEY = struct.Struct(">cQI")
_ORIGIN = struct.Struct("<QQI")
_SOURCE = struct.Struct("<IQ")


def put_segment(address: SegmentAddress, record: SegmentRecord) -> Change:
    """Return the change that writes `record`."""
    value = _SEGMENT.pack(
        record.physical_id,
        record.length,
        record.open,
        record.chunk_count,
        record.crc32c,
        record.first_record,
        record.record_count,
        record.min_timestamp_us,
        record.max_timestamp_us,
        record.newest_us,
    )
    return sealed(segment_key(address), value)


def delete_segment(address: SegmentAddress) -> Change:
    """Return the change that deletes the record of a segment."""
    return segment_key(address), None


def put_entry(entry: EntryId, record: EntryRecord) -> Change:
    """Return the change that writes `record`."""
    value = _ENTRY.pack(
        *record.start,
        record.start_record,
        record.next_record,
        record.stored_bytes,
        record.stored_segments,
        record.last_group_id,
        record.last_segment_id,
        len(record.gaps),
    )
    gaps = b"".join(_GAP.pack(*gap.start, *gap.end) for gap in record.gaps)
    watermarks = _WATERMARKS.pack(record.watermark_us, record.removed_watermark_us)
    return sealed(ENTRY_KEY.pack(b"e", *entry), value + gaps + watermarks)


def put_producer(stream_id: int, streamlet_id: int, producer_id: int, record: ProducerRecord) -> Change:
    """Return the change that writes `record`."""
    return sealed(PRODUCER_KEY.pack(b"p", stream_id, streamlet_id, producer_id), PRODUCER.pack(*record))


def no_producer(stream_id: int, streamlet_id: int, producer_id: int) -> list[Change]:
    """Return the changes that delete the records of a producer."""
    return [(PRODUCER_KEY.pack(kind, stream_id, streamlet_id, producer_id), None) for kind in (b"p", b"q")]


def put_digests(stream_id: int, streamlet_id: int, found: Mapping[int, Digests]) -> list[Change]:
    """Return the changes that add digests of chunks, by producer, to the stored ones: see `merged`."""
    return [
        _digests_change(PRODUCER_KEY.pack(b"q", stream_id, streamlet_id, producer_id), digests)
        for producer_id, digests in found.items()
    ]


def merged(key: bytes, value: bytes, before: bytes | None) -> bytes:
    """Return the value to write for a change, given the present value `before`. Both include their checksums.

    Digests are joined with the present ones; all other records are replaced.
    """
    if key[:1] != b"q" or before is None or not intact(key, before):
        return value
    both = joined(digests_record(before[: -CRC.size]), digests_record(value[: -CRC.size]))
    return _digests_change(key, both)[1] or b""


def _digests_change(key: bytes, digests: Digests) -> Change:
    return sealed(key, PRODUCER.pack(digests.producer_epoch, digests.next_sequence) + digests.digests)


def put_cursor(entry: EntryId, consumer_group: str, position: Position) -> Change:
    """Return the change that writes how far a consumer group has read."""
    return sealed(ENTRY_KEY.pack(b"c", *entry) + consumer_group.encode(), POSITION.pack(*position))


def put_origin(stream_id: int, streamlet_id: int, record: OriginRecord) -> Change:
    """Return the change that writes `record`."""
    value = _ORIGIN.pack(record.next_group_id, record.records_lost, len(record.sources))
    value += b"".join(_SOURCE.pack(*source) for source in sorted(record.sources))
    return sealed(ORIGIN_KEY.pack(b"o", stream_id, streamlet_id), value)


def put_removal(physical_id: int, address: SegmentAddress | None = None) -> Change:
    """Return the change that marks a file for removal; `address`: remove it only if it has this segment."""
    return sealed(REMOVAL_KEY.pack(b"r", physical_id), b"" if address is None else _ADDRESS.pack(*address))


def delete_removal(physical_id: int) -> Change:
    """Return the change that deletes the mark of a removed file."""
    return REMOVAL_KEY.pack(b"r", physical_id), None


def stream_of(key: bytes) -> int | None:
    """Return the stream of a key; None if it belongs to no stream."""
    return int.from_bytes(key[1:9], "big") if key[:1] in b"espqcvohiu" and len(key) > 1 else None


def streamlet_of(key: bytes) -> tuple[int, int] | None:
    """Return the stream and streamlet of a key; None if it does not belong to a single streamlet."""
    if key[:1] not in b"espqcohu" or len(key) <= 1:
        return None
    return int.from_bytes(key[1:9], "big"), int.from_bytes(key[9:13], "big")


def with_gap(gaps: tuple[Gap, ...], gap: Gap) -> tuple[Gap, ...]:
    """Return `gaps` with another gap; if there are too many, the two oldest are joined."""
    gaps = (*gaps, gap)
    if len(gaps) <= GAPS_MAX:
        return gaps
    return (Gap(gaps[0].start, gaps[1].end), *gaps[2:])


def segment_key(address: SegmentAddress) -> bytes:
    """Return the key of a segment's record."""
    return SEGMENT_KEY.pack(b"s", *address)


def sealed(key: bytes, value: bytes) -> Change:
    """Return the change that writes `value`, with its checksum."""
    return key, value + CRC.pack(crc32c(value, crc32c(key)))


def intact(key: bytes, value: bytes) -> bool:
    """Whether the checksum of a record is right."""
    if len(value) < CRC.size:
        return False
    (checksum,) = CRC.unpack_from(value, len(value) - CRC.size)
    return bool(checksum == crc32c(value[: -CRC.size], crc32c(key)))


def segment_record(value: bytes) -> SegmentRecord:
    """Read the value that `put_segment` has written."""
    physical_id, length, is_open, chunks, crc, first, count, low, high, newest = _SEGMENT.unpack_from(value)
    return SegmentRecord(physical_id, length, bool(is_open), chunks, crc, first, count, low, high, newest)


def entry_record(value: bytes) -> EntryRecord:
    """Read the value that `put_entry` has written."""
    group, segment, offset, start_record, next_record, size, count, last_group, last_segment, gaps = _ENTRY.unpack_from(
        value
    )
    gaps_end = _ENTRY.size + gaps * _GAP.size
    watermarks = (NO_TIME, NO_TIME)
    if len(value) >= gaps_end + _WATERMARKS.size:  # otherwise an earlier version wrote it
        watermarks = _WATERMARKS.unpack_from(value, gaps_end)
    return EntryRecord(
        Position(group, segment, offset),
        start_record,
        next_record,
        size,
        count,
        last_group,
        last_segment,
        tuple(
            Gap(Position(*numbers[:3]), Position(*numbers[3:]))
            for numbers in _GAP.iter_unpack(value[_ENTRY.size : gaps_end])
        ),
        *watermarks,
    )


def removal_record(value: bytes) -> SegmentAddress | None:
    """Read the value that `put_removal` has written."""
    return SegmentAddress(*_ADDRESS.unpack(value)) if value else None


def digests_record(value: bytes) -> Digests:
    """Read the value that `put_digests` has written."""
    producer_epoch, next_sequence = PRODUCER.unpack_from(value)
    return Digests(producer_epoch, next_sequence, value[PRODUCER.size :])


def origin_record(value: bytes) -> OriginRecord:
    """Read the value that `put_origin` has written."""
    next_group_id, records_lost, count = _ORIGIN.unpack_from(value)
    sources = _SOURCE.iter_unpack(value[_ORIGIN.size : _ORIGIN.size + count * _SOURCE.size])
    return OriginRecord(frozenset((broker_id, epoch) for broker_id, epoch in sources), next_group_id, records_lost)
