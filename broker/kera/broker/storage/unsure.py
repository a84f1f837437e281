"""The index's records of unsure tails: where they begin, see `UnsureTail`. Records belong to their streamlet."""

from __future__ import annotations

import struct
from typing import Protocol

from kera.broker.records import Change, UnsureTail
from kera.broker.storage.index_format import ENTRY_KEY, sealed
from kera.core.base.ids import EntryId, Position

_UNSURE = struct.Struct("<QIIQ")


class Index(Protocol):
    """Where they are written down."""

    def record(self, key: bytes) -> bytes | None:
        """The value of a key; None: there is none."""
        ...


def put_unsure(entry: EntryId, tail: UnsureTail) -> Change:
    """The change that writes where the unsure tail of an entry begins."""
    return sealed(ENTRY_KEY.pack(b"u", *entry), _UNSURE.pack(*tail.position, tail.record))


def delete_unsure(entry: EntryId) -> Change:
    """The change that says that all of an entry has its replicas."""
    return ENTRY_KEY.pack(b"u", *entry), None


def unsure_tail(index: Index, entry: EntryId) -> UnsureTail | None:
    """Where the unsure tail of an entry begins; None: there is none."""
    value = index.record(ENTRY_KEY.pack(b"u", *entry))
    if value is None:
        return None
    group_id, segment_id, offset, record = _UNSURE.unpack_from(value)
    return UnsureTail(Position(group_id, segment_id, offset), record)
