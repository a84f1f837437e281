"""`kera.connect.postgres.replay`: each change once, from any place of a copy, without those in the snapshot."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kera.connect.postgres.pgoutput import (
    UNCHANGED,
    Begin,
    Commit,
    Delete,
    Insert,
    Message,
    Relation,
    RelationColumn,
    Truncate,
    Update,
)
from kera.connect.postgres.replay import Change, Replay, Snapshot, Spot

COLUMNS = (RelationColumn("id", True, 23, -1), RelationColumn("body", False, 25, -1))
ORDERS = Relation(1, "public", "orders", COLUMNS)
OTHERS = Relation(2, "public", "others", COLUMNS)
BEGINNING = Spot(0, 0, None)


def transaction(lsn: int, *changes: Message, xid: int = 1) -> list[Message]:
    """A transaction that commits at `lsn`."""
    return [Begin(lsn, lsn * 10, xid), ORDERS, OTHERS, *changes, Commit(lsn, lsn + 5, lsn * 10)]


def replayed(start: Spot, messages: Sequence[Message | None]) -> tuple[list[Change], Spot]:
    replay = Replay(start, "public", "orders", ("id",))
    return [change for change in replay.changes(messages) if change is not None], replay.spot


LOG = [
    *transaction(100, Insert(1, ("1", "a")), Insert(2, ("9", "z")), Insert(1, ("2", "b"))),
    *transaction(200, Update(1, None, False, ("1", "c")), Delete(1, ("2", None), False)),
    *transaction(300),
]


def test_changes_of_the_table_come_in_the_order_of_their_commits() -> None:
    changes, spot = replayed(BEGINNING, LOG)

    assert [(each.op, each.before, each.after, each.lsn, each.committed_us) for each in changes] == [
        ("c", None, ("1", "a"), 100, 1000),
        ("c", None, ("2", "b"), 100, 1000),
        ("u", None, ("1", "c"), 200, 2000),
        ("d", ("2", None), None, 200, 2000),
    ]
    assert spot == Spot(305, 0, None)


def test_a_copy_that_resumes_at_any_place_gets_exactly_the_rest() -> None:
    changes, _ = replayed(BEGINNING, LOG)

    for number, change in enumerate(changes, 1):
        again = Spot.of(change.behind.place("slot"))
        assert replayed(again, LOG)[0] == changes[number:]


def test_transactions_in_the_snapshot_are_skipped() -> None:
    snapshot = Snapshot("10:13:11", until=400)
    log = [
        *transaction(100, Insert(1, ("1", "a")), xid=9),
        *transaction(200, Insert(1, ("2", "a")), xid=11),  # in progress at the snapshot
        *transaction(300, Insert(1, ("3", "a")), xid=12),
        *transaction(350, Insert(1, ("4", "a")), xid=13),
        *transaction(400, Insert(1, ("5", "a")), xid=8),
    ]

    changes, spot = replayed(Spot(50, 0, snapshot), log)

    assert [each.after for each in changes] == [("2", "a"), ("4", "a"), ("5", "a")]
    assert [each.behind.snapshot for each in changes] == [snapshot, snapshot, None]
    assert spot == Spot(405, 0, None)


@pytest.mark.parametrize(("xid", "seen"), [(2**32 - 1, True), (4, True), (5, False), (6, True), (7, False), (8, False)])
def test_transaction_numbers_wrap_around(xid: int, seen: bool) -> None:
    assert Snapshot(f"{2**32 + 5}:{2**32 + 7}:{2**32 + 5}", until=10).has(xid, 9) is seen


def test_a_changed_key_is_a_deletion_and_a_creation() -> None:
    log = transaction(100, Update(1, ("1", None), False, ("7", "a")), Update(1, ("7", "a"), True, ("7", UNCHANGED)))

    changes, _ = replayed(BEGINNING, log)

    assert [(each.op, each.before, each.after) for each in changes] == [
        ("d", ("1", None), None),
        ("c", None, ("7", "a")),
        ("u", ("7", "a"), ("7", "a")),
    ]
    assert changes[0].behind == changes[1].behind, "no copy goes on between the two"


def test_only_truncations_of_the_table_are_changes() -> None:
    changes, _ = replayed(BEGINNING, transaction(100, Truncate((2,)), Truncate((1, 2))))

    assert [(each.op, each.before, each.after) for each in changes] == [("t", None, None)]


def test_a_place_after_the_snapshot_drops_the_snapshot() -> None:
    spot = Spot(100, 0, Snapshot("1:1:", 150))
    assert Spot.of(spot.place("s")) == spot
    assert spot.moved(Spot(120, 0, spot.snapshot)).snapshot is not None
    assert spot.moved(Spot(150, 0, spot.snapshot)) == Spot(150, 0, None)
    assert spot.moved(Spot(90, 0, None)) == spot
