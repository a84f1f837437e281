"""The index's records of unsure tails: where they begin, see `UnsureTail`. A record belongs to its streamlet."""

from __future__ import annotations

import struct
from typing import Protocol

from kera.broker.records import Change, UnsureTail
from kera.broker.storage.index_format import ENTRY_KEY, sealed
from kera.core.base.ids import EntryId, Position

_UNSURE = struct.Struct("<QIIQ")


class Index(Protocol):
    """The index that has the records."""

    def record(self, key: bytes) -> bytes | None:
        """Return the value of a key; None if it has no record."""
        ...


def put_unsure(entry: EntryId, tail: UnsureTail) -> Change:
    """Return the change that records where the unsure tail of an entry begins."""
    return sealed(ENTRY_KEY.pack(b"u", *entry), _UNSURE.pack(*tail.position, tail.record))


def delete_unsure(entry: EntryId) -> Change:
    """Return the change that deletes the record, when all data of an entry has its replicas."""
    return ENTRY_KEY.pack(b"u", *entry), None


def unsure_tail(index: Index, entry: EntryId) -> UnsureTail | None:
    """Return the unsure tail of an entry; None if it has none."""
    value = index.record(ENTRY_KEY.pack(b"u", *entry))
    if value is None:
        return None
    group_id, segment_id, offset, record = _UNSURE.unpack_from(value)
    return UnsureTail(Position(group_id, segment_id, offset), record)
