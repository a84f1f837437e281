"""The index's records of closed virtual segments: where their replicas are, and which parts of segments they cover.

Records belong to their stream, and are removed with it. A missing record does no harm: its data is replicated again.
For a stream that was dropped while backups were away, the index remembers these backups: they may have replicas of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Protocol

from kera.broker.records import Change, SegmentAddress
from kera.broker.replication.virtual_segment import Extent, VirtualSegment
from kera.broker.storage.index_format import sealed

_KEY = struct.Struct(">cQQ")
_DROPPED_KEY = struct.Struct(">cQ")
_HEAD = struct.Struct("<IIIHHI")
_BACKUP = struct.Struct("<I")
_EXTENT = struct.Struct("<IIQIII")


def put_virtual_segment(place: VirtualSegment) -> Change:
    """Return the change that records a closed virtual segment."""
    value = _HEAD.pack(place.log_id, place.head, place.checksum, place.wanted, len(place.backups), len(place.extents))
    value += b"".join(_BACKUP.pack(backup_id) for backup_id in place.backups)
    value += b"".join(_EXTENT.pack(*extent.address[1:], extent.start, extent.end) for extent in place.extents)
    return sealed(_key(place), value)


def delete_virtual_segment(place: VirtualSegment) -> Change:
    """Return the change that removes the record of a virtual segment."""
    return _key(place), None


def put_dropped(stream_id: int, backup_ids: Iterable[int]) -> Change:
    """Return the change that records the backups that may have replicas of a dropped stream."""
    value = b"".join(_BACKUP.pack(backup_id) for backup_id in sorted(backup_ids))
    return sealed(_DROPPED_KEY.pack(b"d", stream_id), value)


def delete_dropped(stream_id: int) -> Change:
    """Return the change that removes the record of a dropped stream."""
    return _DROPPED_KEY.pack(b"d", stream_id), None


class Index(Protocol):
    """The index that has the records."""

    def records(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over all keys with this prefix, and their values."""
        ...


def virtual_segments(index: Index) -> Iterator[VirtualSegment]:
    """Yield all recorded virtual segments."""
    for key, value in index.records(b"v"):
        _, stream_id, virtual_segment_id = _KEY.unpack(key)
        log_id, head, checksum, wanted, backups, extents = _HEAD.unpack_from(value)
        at = _HEAD.size
        found = [_BACKUP.unpack_from(value, at + index * _BACKUP.size)[0] for index in range(backups)]
        at += backups * _BACKUP.size
        place = VirtualSegment(virtual_segment_id, stream_id, log_id, found, 0)
        place.head, place.checksum, place.wanted = head, checksum, wanted
        for index_ in range(extents):
            *address, start, end = _EXTENT.unpack_from(value, at + index_ * _EXTENT.size)
            place.extents.append(Extent(SegmentAddress(stream_id, *address), start, end))
        yield place


def _key(place: VirtualSegment) -> bytes:
    return _KEY.pack(b"v", place.stream_id, place.virtual_segment_id)


def dropped_streams(index: Index) -> dict[int, set[int]]:
    """Return the dropped streams, and the backups that may have replicas of them."""
    return {
        _DROPPED_KEY.unpack(key)[1]: {backup_id for (backup_id,) in _BACKUP.iter_unpack(value)}
        for key, value in index.records(b"d")
    }
