"""Decides without I/O which changes of one table a copy takes from the log, and its place after each change.

A place (`Spot`) is a commit in the log, and the number of messages of this transaction that have been taken.
Transactions come in the order of their commits, and a slot gives the same ones however often it is read.

The initial rows are read in one snapshot, after the slot was made. So the log repeats transactions that the snapshot
has seen, and these are skipped here (`Snapshot.has`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kera.connect.postgres.pgoutput import (
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    Message,
    Relation,
    Row,
    Truncate,
    Update,
    format_lsn,
    parse_lsn,
)
from kera.core.errors import ProtocolError, invariant

_XIDS = 1 << 32


class Snapshot(NamedTuple):
    """The transactions that the initial rows include."""

    text: str
    """``xmin:xmax:xip,xip…``, in the form of txid_current_snapshot()."""
    until: int
    """An LSN: the snapshot includes no transaction that commits at it or later."""

    def has(self, xid: int, commit_lsn: int) -> bool:
        """Return whether the snapshot includes an ended transaction; `xid` has 32 bits."""
        if commit_lsn >= self.until:
            return False
        _, upper, under_way = self.text.split(":")
        # Transaction ids wrap around, but the ids compared here are close together.
        if (xid - int(upper)) % _XIDS < _XIDS // 2:
            return False
        return xid not in {int(each) % _XIDS for each in under_way.split(",") if each}


class Spot(NamedTuple):
    """The place of a copy of changes."""

    lsn: int
    """Transactions that commit before this place are done."""
    taken: int
    """Number of messages that are done of the transaction that commits at `lsn`."""
    snapshot: Snapshot | None
    """The snapshot whose transactions are done, too; None: no more of them can come."""

    def within(self, end: Spot) -> bool:
        """Return whether this place is not after `end`."""
        return self[:2] <= end[:2]

    def moved(self, to: Spot) -> Spot:
        """Return the later of this place and `to`, without a snapshot whose transactions are all done."""
        spot = self if to.within(self) else to
        done = spot.snapshot is not None and spot.lsn >= spot.snapshot.until
        return spot._replace(snapshot=None) if done else spot

    def place(self, slot: str) -> dict[str, Any]:
        """Return the place in the journal's form."""
        found: dict[str, Any] = {"slot": slot, "lsn": format_lsn(self.lsn), "taken": self.taken}
        if self.snapshot is not None:
            found |= {"snapshot": self.snapshot.text, "until": format_lsn(self.snapshot.until)}
        return found

    @classmethod
    def of(cls, place: dict[str, Any]) -> Spot:
        """Parse a place of the journal."""
        return cls(parse_lsn(place["lsn"]), int(place["taken"]), snapshot_of(place))


def snapshot_of(place: dict[str, Any]) -> Snapshot | None:
    """Return the snapshot of a place of the journal; None: it has none."""
    return Snapshot(place["snapshot"], parse_lsn(place["until"])) if "snapshot" in place else None


class Change(NamedTuple):
    """A change of the copied table."""

    op: str
    """c, u, d, or t for all rows (create, update, delete, truncate)."""
    relation: Relation
    before: Row | None
    whole: bool
    """Whether `before` has all columns, and not only those of the key."""
    after: Row | None
    lsn: int
    """Position of the commit."""
    committed_us: int
    behind: Spot
    """The place of the copy after this change."""


class Replay:
    """Follows the messages of a slot from its beginning, and returns the changes after a place."""

    def __init__(self, start: Spot, schema: str, table: str, key: tuple[str, ...]) -> None:
        """`key`: the columns of the primary key."""
        self.spot = start
        """The place so far, which moves with each change that `changes` yields, and with transactions without any."""
        self._start = start
        self._table = schema, table
        self._key = key
        self._relations: dict[int, Relation] = {}
        self._begun: Begin | None = None
        self._count = 0
        """Number of messages of the transaction so far."""

    def changes(self, messages: Iterable[Message | None]) -> Iterator[Change | None]:
        """Yield the changes of the table that have not been taken yet; pass None on.

        Raises `ProtocolError` for a message that cannot follow.
        """
        for message in messages:
            match message:
                case None:
                    yield None
                case Begin():
                    self._begun, self._count = message, 0
                case Commit():
                    self.spot = self.spot.moved(Spot(message.end_lsn, 0, self.spot.snapshot))
                    self._begun = None
                case Relation():
                    self._relations[message.relation_id] = message
                case _:
                    yield from self._changes_of(message)

    def _changes_of(self, message: Insert | Update | Delete | Truncate) -> Iterator[Change]:
        begun = self._begun
        if begun is None:
            raise ProtocolError("a change of pgoutput outside of a transaction")
        self._count += 1
        behind = Spot(begun.commit_lsn, self._count, self._start.snapshot)
        if behind.within(self._start):
            return
        if self._start.snapshot is not None and self._start.snapshot.has(begun.xid, begun.commit_lsn):
            return
        self.spot = self.spot.moved(behind)
        ids = message.relation_ids if isinstance(message, Truncate) else (message.relation_id,)
        for relation_id in ids:
            relation = self._relations.get(relation_id)
            if relation is None:
                raise ProtocolError(f"a change of pgoutput of relation {relation_id}, which it has not described")
            if (relation.schema, relation.name) == self._table:
                for op, before, whole, after in self._parts(message, relation):
                    yield Change(op, relation, before, whole, after, begun.commit_lsn, begun.committed_us, self.spot)

    def _parts(
        self, message: Insert | Update | Delete | Truncate, relation: Relation
    ) -> list[tuple[str, Row | None, bool, Row | None]]:
        match message:
            case Insert():
                return [("c", None, False, message.new)]
            case Delete():
                return [("d", message.old, message.whole, None)]
            case Truncate():
                return [("t", None, False, None)]
        old, new = message.old, message.new
        if old is None:
            return [("u", None, False, new)]
        if message.whole:  # values that were not logged are unchanged, so the old row has them
            new = tuple(was if now is UNCHANGED else now for was, now in zip(old, new, strict=True))
        if self._key_of(relation, old) != self._key_of(relation, new):
            # Readers that keep rows by key have to delete the row with the old key.
            return [("d", old, message.whole, None), ("c", None, False, new)]
        return [("u", old if message.whole else None, message.whole, new)]

    def _key_of(self, relation: Relation, row: Row) -> tuple[object, ...]:
        names = [column.name for column in relation.columns]
        missing = [name for name in self._key if name not in names]
        invariant(not missing, "a change has the columns of the primary key", missing=missing, table=relation.name)
        return tuple(row[names.index(name)] for name in self._key)
