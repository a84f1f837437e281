"""What the index has of a closed virtual segment: where its replicas are, and which parts of which segments it covers.

Records belong to their stream, and go with it. One that is missing does no harm: what it covered is replicated again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Protocol

from kera.broker.records import Change, SegmentAddress
from kera.broker.replication.virtual_segment import Extent, VirtualSegment
from kera.broker.storage.index_format import sealed

_KEY = struct.Struct(">cQQ")
_HEAD = struct.Struct("<IIIHHI")
_BACKUP = struct.Struct("<I")
_EXTENT = struct.Struct("<IIQIII")


def put_virtual_segment(place: VirtualSegment) -> Change:
    """The change that writes down a closed virtual segment."""
    value = _HEAD.pack(place.log_id, place.head, place.checksum, place.wanted, len(place.backups), len(place.extents))
    value += b"".join(_BACKUP.pack(backup_id) for backup_id in place.backups)
    value += b"".join(_EXTENT.pack(*extent.address[1:], extent.start, extent.end) for extent in place.extents)
    return sealed(_key(place), value)


def delete_virtual_segment(place: VirtualSegment) -> Change:
    """The change that forgets it."""
    return _key(place), None


class Index(Protocol):
    """Where they are written down."""

    def records(self, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """All keys with this prefix, and their values."""
        ...


def virtual_segments(index: Index) -> Iterator[VirtualSegment]:
    """All that are written down."""
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
