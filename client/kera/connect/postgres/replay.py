"""Which changes of one table a copy takes out of the log, and where it is after each: decided without I/O.

A place (`Spot`) is a commit in the log, and how many messages of this transaction have been taken. Transactions come in
the order of their commits, and those of a slot are the same however often they are read.

The rows that were there at first are read in one snapshot, after the slot was made. So transactions that the snapshot
has seen come once more, and are passed over here (`Snapshot.has`).
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
    """Which transactions the rows that were read at first have seen."""

    text: str
    """``xmin:xmax:xip,xip…``, as txid_current_snapshot() has it."""
    until: int
    """An LSN: no transaction that commits at it or behind it was seen."""

    def has(self, xid: int, commit_lsn: int) -> bool:
        """Whether it has seen a transaction, which has ended; `xid` has 32 bits."""
        if commit_lsn >= self.until:
            return False
        _, upper, under_way = self.text.split(":")
        # Numbers of transactions wrap around; those compared here are close together.
        if (xid - int(upper)) % _XIDS < _XIDS // 2:
            return False
        return xid not in {int(each) % _XIDS for each in under_way.split(",") if each}


class Spot(NamedTuple):
    """Where a copy of changes is."""

    lsn: int
    """Transactions that commit before it are done."""
    taken: int
    """Messages of the transaction that commits at it that are done."""
    snapshot: Snapshot | None
    """Transactions that it has seen are done, too; None: none of them comes any more."""

    def within(self, end: Spot) -> bool:
        """Whether it is not behind `end`."""
        return self[:2] <= end[:2]

    def moved(self, to: Spot) -> Spot:
        """`to`, if it is behind this one; and without a snapshot whose transactions are all done."""
        spot = self if to.within(self) else to
        done = spot.snapshot is not None and spot.lsn >= spot.snapshot.until
        return spot._replace(snapshot=None) if done else spot

    def place(self, slot: str) -> dict[str, Any]:
        """As the journal has it."""
        found: dict[str, Any] = {"slot": slot, "lsn": format_lsn(self.lsn), "taken": self.taken}
        if self.snapshot is not None:
            found |= {"snapshot": self.snapshot.text, "until": format_lsn(self.snapshot.until)}
        return found

    @classmethod
    def of(cls, place: dict[str, Any]) -> Spot:
        """From the journal."""
        return cls(parse_lsn(place["lsn"]), int(place["taken"]), snapshot_of(place))


def snapshot_of(place: dict[str, Any]) -> Snapshot | None:
    """The snapshot of a place in the journal."""
    return Snapshot(place["snapshot"], parse_lsn(place["until"])) if "snapshot" in place else None


class Change(NamedTuple):
    """A change of the table that is copied."""

    op: str
    """c, u, d, and t for all rows (create, update, delete, truncate)."""
    relation: Relation
    before: Row | None
    whole: bool
    """`before` has all columns, and not only those of the key."""
    after: Row | None
    lsn: int
    """Position of the commit."""
    committed_us: int
    behind: Spot
    """Where the copy is once it has this."""


class Replay:
    """Follows the messages of a slot, from its beginning on; gives the changes behind a spot."""

    def __init__(self, start: Spot, schema: str, table: str, key: tuple[str, ...]) -> None:
        """`key`: the columns of the primary key."""
        self.spot = start
        """How far one is: grows with what `changes` gives, and with transactions that have nothing."""
        self._start = start
        self._table = schema, table
        self._key = key
        self._relations: dict[int, Relation] = {}
        self._begun: Begin | None = None
        self._count = 0
        """Messages of the transaction so far."""

    def changes(self, messages: Iterable[Message | None]) -> Iterator[Change | None]:
        """Those of the table that have not been taken yet; None stays None.

        Raises `ProtocolError` for what cannot follow.
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
        if message.whole:  # values that were not logged are those of before
            new = tuple(was if now is UNCHANGED else now for was, now in zip(old, new, strict=True))
        if self._key_of(relation, old) != self._key_of(relation, new):
            # The row with the old key is no more: readers that keep rows by key have to know.
            return [("d", old, message.whole, None), ("c", None, False, new)]
        return [("u", old if message.whole else None, message.whole, new)]

    def _key_of(self, relation: Relation, row: Row) -> tuple[object, ...]:
        names = [column.name for column in relation.columns]
        missing = [name for name in self._key if name not in names]
        invariant(not missing, "a change has the columns of the primary key", missing=missing, table=relation.name)
        return tuple(row[names.index(name)] for name in self._key)
