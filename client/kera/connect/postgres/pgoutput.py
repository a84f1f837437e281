"""Decodes messages of PostgreSQL's logical decoding plugin ``pgoutput``, version 1 of its protocol.

Pure code, without I/O. The messages of a transaction come together, after its commit, in this order:

    Begin, then for each change: Relation (before the first change of a table, and after its columns have changed),
    Insert | Update | Delete | Truncate, at last Commit

Values are texts, in the form of PostgreSQL's output functions. An update lacks the values of large columns that it left
unchanged; these are `UNCHANGED`, which differs from null.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from kera.core.errors import ProtocolError

EPOCH_US = 946_684_800_000_000
"""PostgreSQL's epoch, 2000-01-01, in microseconds since 1970."""


class Unchanged(enum.Enum):
    """The value of a large column that an update left unchanged, and PostgreSQL did not log."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED
Value: TypeAlias = str | Unchanged | None
Row: TypeAlias = tuple[Value, ...]
"""The values of all columns of a relation, in its order."""


class Begin(NamedTuple):
    """The begin of a transaction."""

    commit_lsn: int
    """The begin of the transaction's commit in the log. It is unique, and transactions come in this order."""
    committed_us: int
    """Microseconds since 1970."""
    xid: int
    """The low 32 bits of the transaction's id."""


class Commit(NamedTuple):
    """The end of a transaction."""

    commit_lsn: int
    end_lsn: int
    """The end of the commit; commits of later transactions begin there or later."""
    committed_us: int


class RelationColumn(NamedTuple):
    """One column of a relation."""

    name: str
    in_identity: bool
    """Whether the column is part of the replica identity, which identifies a deleted row."""
    type_oid: int
    type_modifier: int


class Relation(NamedTuple):
    """The form of a table in the following changes, which refer to it by its id."""

    relation_id: int
    schema: str
    name: str
    columns: tuple[RelationColumn, ...]


class Insert(NamedTuple):
    """A new row."""

    relation_id: int
    new: Row


class Update(NamedTuple):
    """A changed row."""

    relation_id: int
    old: Row | None
    """The old row; None: its replica identity has not changed."""
    whole: bool
    """Whether `old` has all columns (REPLICA IDENTITY FULL), and not only those of the identity."""
    new: Row


class Delete(NamedTuple):
    """A deleted row."""

    relation_id: int
    old: Row
    whole: bool
    """See `Update`."""


class Truncate(NamedTuple):
    """The deletion of all rows of some tables."""

    relation_ids: tuple[int, ...]


Message: TypeAlias = Begin | Commit | Relation | Insert | Update | Delete | Truncate


def decode(data: bytes) -> Message | None:
    """Decode a message; None: it does not concern rows. Raises `ProtocolError`."""
    try:
        return _decode(data)
    except (struct.error, LookupError, ValueError) as error:
        raise ProtocolError(f"a message of pgoutput is damaged: {data[:40]!r}: {error}") from error


def _decode(data: bytes) -> Message | None:
    kind = data[:1]
    if kind in _SILENT:
        return None
    return _DECODERS[kind](data)


def _begin(data: bytes) -> Begin:
    lsn, us, xid = struct.unpack_from(">QqI", data, 1)
    return Begin(lsn, EPOCH_US + us, xid)


def _commit(data: bytes) -> Commit:
    _, lsn, end, us = struct.unpack_from(">BQQq", data, 1)
    return Commit(lsn, end, EPOCH_US + us)


def _insert(data: bytes) -> Insert:
    relation_id, kind = struct.unpack_from(">Ic", data, 1)
    _expect(kind, b"N")
    return Insert(relation_id, _row(data, 6)[0])


def _update(data: bytes) -> Update:
    relation_id, kind = struct.unpack_from(">Ic", data, 1)
    if kind == b"N":
        return Update(relation_id, None, whole=False, new=_row(data, 6)[0])
    _expect(kind, b"K", b"O")
    old, at = _row(data, 6)
    _expect(data[at : at + 1], b"N")
    return Update(relation_id, old, kind == b"O", _row(data, at + 1)[0])


def _delete(data: bytes) -> Delete:
    relation_id, kind = struct.unpack_from(">Ic", data, 1)
    _expect(kind, b"K", b"O")
    return Delete(relation_id, _row(data, 6)[0], kind == b"O")


def _truncate(data: bytes) -> Truncate:
    count, _ = struct.unpack_from(">IB", data, 1)
    return Truncate(struct.unpack_from(f">{count}I", data, 6))


def _expect(found: bytes, *kinds: bytes) -> None:
    if found not in kinds:
        raise ValueError(f"{found!r} is not one of {kinds}")


def _text(data: bytes, at: int) -> tuple[str, int]:
    end = data.index(b"\0", at)
    return data[at:end].decode(), end + 1


def _relation(data: bytes) -> Relation:
    (relation_id,) = struct.unpack_from(">I", data, 1)
    schema, at = _text(data, 5)
    name, at = _text(data, at)
    _, count = struct.unpack_from(">cH", data, at)
    at += 3
    columns = []
    for _ in range(count):
        flags = data[at]
        column, at = _text(data, at + 1)
        type_oid, modifier = struct.unpack_from(">Ii", data, at)
        at += 8
        columns.append(RelationColumn(column, bool(flags & 1), type_oid, modifier))
    return Relation(relation_id, schema or "pg_catalog", name, tuple(columns))


def _row(data: bytes, at: int) -> tuple[Row, int]:
    (count,) = struct.unpack_from(">H", data, at)
    at += 2
    values: list[Value] = []
    for _ in range(count):
        kind = data[at]
        at += 1
        if kind == 0x74:  # t: a text
            (size,) = struct.unpack_from(">I", data, at)
            at += 4
            if at + size > len(data):
                raise ValueError("a value ends behind the message")
            values.append(data[at : at + size].decode())
            at += size
        elif kind == 0x6E:  # n
            values.append(None)
        elif kind == 0x75:  # u
            values.append(UNCHANGED)
        else:
            raise ValueError(f"a value of unknown kind {kind}")
    return tuple(values), at


_SILENT = (b"O", b"Y", b"M")
"""Messages that do not concern rows: origins, types, messages of applications."""
_DECODERS: dict[bytes, Callable[[bytes], Message]] = {
    b"B": _begin,
    b"C": _commit,
    b"R": _relation,
    b"I": _insert,
    b"U": _update,
    b"D": _delete,
    b"T": _truncate,
}


def parse_lsn(text: str) -> int:
    """Parse a place in the log, which PostgreSQL writes as ``16/B374D848``. Raises `ProtocolError`."""
    high, _, low = text.partition("/")
    try:
        return int(high, 16) << 32 | int(low, 16)
    except ValueError as error:
        raise ProtocolError(f"{text!r} is not an LSN") from error


def format_lsn(lsn: int) -> str:
    """Return the inverse of `parse_lsn`."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
