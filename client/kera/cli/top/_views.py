"""The views of a snapshot: their columns, the order and the filter of their rows, and the rows on the screen. Pure.

Both the live view and the printed tables use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kera.cli.top._constraints import HELD, worst_text, worst_us
from kera.cli.top._rows import ConstraintRow, Snapshot
from kera.cli.top._text import count_text, ms_text, part_text, size_text, us_text

ROWS_MAX = 200
"""Maximum of rows on the screen, after sorting and filtering."""


FILTERED = ("streams", "groups", "latency")
"""Views that the option ``--filter`` applies to."""


class Column(NamedTuple):
    """A column of a view."""

    title: str
    value: Callable[[Any], Any]
    """The value of a row to sort by; None: unknown, sorted last."""
    text: Callable[[Any], str]
    falling: bool = True
    """Whether the largest values come first when rows are sorted by the column."""
    well: frozenset[str] = frozenset()
    """For a column of states: the states that need no attention."""


class View(NamedTuple):
    """A view: one kind of rows."""

    name: str
    title: str
    rows: Callable[[Snapshot], Sequence[Any]]
    key: Callable[[Any], str]
    """The unique name of a row."""
    columns: tuple[Column, ...]
    sorted_by: int
    """The index of the column to sort by at first."""
    words: Callable[[Any], str]
    """The text that a filter searches."""
    why: Callable[[Any], Sequence[str]]
    """The problems of a row, the worst first."""


def _of(used: float | None, limit: float | None) -> float | None:
    return None if used is None or not limit else used / limit


def _count(title: str, name: str) -> Column:
    return Column(title, lambda row: getattr(row, name), lambda row: count_text(getattr(row, name)))


def _size(title: str, name: str) -> Column:
    return Column(title, lambda row: getattr(row, name), lambda row: size_text(getattr(row, name)))


def _ms(title: str, name: str) -> Column:
    return Column(title, lambda row: getattr(row, name), lambda row: ms_text(getattr(row, name)))


def _us(title: str, name: str) -> Column:
    return Column(title, lambda row: getattr(row, name), lambda row: us_text(getattr(row, name)))


def _part(title: str, value: Callable[[Any], float | None]) -> Column:
    return Column(title, value, lambda row: part_text(value(row)))


def _word(title: str, name: str) -> Column:
    return Column(title, lambda row: getattr(row, name), lambda row: str(getattr(row, name)), falling=False)


def _state(*well: str) -> Column:
    return _word("STATE", "state")._replace(well=frozenset(well))


def _why(row: Any) -> Sequence[str]:
    found: Sequence[str] = row.why
    return found


def _limit(row: ConstraintRow) -> str:
    return ("p99 " if row.statistic == "p99" else "") + us_text(row.limit_ms * 1000)


_WHY = Column("WHY", lambda row: len(row.why), lambda row: "; ".join(row.why))

VIEWS = (
    View(
        "brokers",
        "Brokers",
        lambda snapshot: snapshot.brokers,
        lambda row: str(row.broker_id),
        (
            _word("BROKER", "broker_id"),
            _state("alive", "ok", "idle"),
            _count("REC/S", "records_in_per_s"),
            _size("IN/S", "bytes_in_per_s"),
            _size("OUT/S", "bytes_out_per_s"),
            _ms("P99", "append_ms"),
            _part("LOOP", lambda row: row.loop),
            _part("MEM", lambda row: _of(row.memory_bytes, row.memory_bytes_max)),
            _size("LAG", "lag_bytes"),
            _WHY,
        ),
        0,
        lambda row: f"{row.broker_id} {row.state} {row.address} {row.node}",
        _why,
    ),
    View(
        "backups",
        "Backups",
        lambda snapshot: snapshot.backups,
        lambda row: str(row.backup_id),
        (
            _word("BACKUP", "backup_id"),
            _state("alive", "ok", "idle"),
            _size("IN/S", "bytes_in_per_s"),
            _part("LOOP", lambda row: row.loop),
            _part("MEM", lambda row: _of(row.memory_bytes, row.memory_bytes_max)),
            _part("DISK", lambda row: _of(row.disk_bytes, row.disk_bytes_max)),
            _size("DISK USED", "disk_bytes"),
            _count("REPLICAS", "replicas"),
            _WHY,
        ),
        0,
        lambda row: f"{row.backup_id} {row.state} {row.address} {row.node}",
        _why,
    ),
    View(
        "streams",
        "Streams",
        lambda snapshot: snapshot.streams,
        lambda row: str(row.name),
        (
            _word("STREAM", "name"),
            _state("alive", "ok", "idle"),
            _count("REC/S", "records_in_per_s"),
            _size("IN/S", "bytes_in_per_s"),
            _size("OUT/S", "bytes_out_per_s"),
            _size("LAG", "lag_bytes"),
            _ms("EPOCH", "epoch_lag_ms"),
            _count("LETS", "streamlets"),
            _count("REPL", "replication"),
            _WHY,
        ),
        2,
        lambda row: f"{row.name} {row.state}",
        _why,
    ),
    View(
        "groups",
        "Groups",
        lambda snapshot: snapshot.groups,
        lambda row: str(row.name),
        (
            _word("GROUP", "name"),
            _word("KIND", "kind"),
            _state("alive", "ok", "idle"),
            _count("CONS", "members"),
            _count("LAG", "lag_records"),
            _count("LAG/S", "lag_per_s"),
            _ms("BEHIND", "behind_ms"),
            _size("READ/S", "bytes_per_s"),
            _WHY,
        ),
        4,
        lambda row: f"{row.name} {row.kind} {row.state} {' '.join(row.streams)}",
        _why,
    ),
    View(
        "findings",
        "Findings",
        lambda snapshot: snapshot.findings,
        lambda row: f"{row.subject}: {row.text}",
        (
            Column("SEVERITY", lambda row: int(row.severity), lambda row: row.severity.word),
            _word("SUBJECT", "subject"),
            _word("FINDING", "text"),
        ),
        0,
        lambda row: f"{row.severity.word} {row.subject} {row.text}",
        lambda row: (row.advice,) if row.advice else (),
    ),
    View(
        "latency",
        "Latency",
        lambda snapshot: snapshot.constraints,
        lambda row: str(row.name),
        (
            _word("CONSTRAINT", "name"),
            _state(*HELD),
            _us("MEAN", "mean_us"),
            _us("P99", "p99_us"),
            Column("LIMIT", lambda row: row.limit_ms, _limit),
            _part("USED", lambda row: row.used),
            _count("VIOL", "violations"),
            Column("WORST HOP", worst_us, worst_text),
            _WHY,
        ),
        5,
        lambda row: f"{row.name} {row.state} {' '.join(row.path)}",
        _why,
    ),
)
BY_NAME = {view.name: view for view in VIEWS}


class Order(NamedTuple):
    """How a view's rows are sorted and which of them are shown."""

    column: int
    reverse: bool = False
    """Whether the usual order of the column is reversed."""
    filter: str = ""
    """Only rows with this text are shown; upper and lower case are the same."""

    @classmethod
    def of(cls, view: View) -> Order:
        """Return the initial order of a view."""
        return cls(view.sorted_by)


class Shown(NamedTuple):
    """The part of a view that is on the screen."""

    rows: list[Any]
    matching: int
    total: int

    @property
    def text(self) -> str:
        """The number of rows, and of how many if some are left out."""
        if len(self.rows) < self.matching:
            return f"first {len(self.rows)} of {self.matching}"
        return f"{self.matching} of {self.total}" if self.matching < self.total else str(self.total)


def shown(view: View, snapshot: Snapshot, order: Order, rows_max: int = ROWS_MAX) -> Shown:
    """Return the rows to show, in order. Rows with an unknown value come last in either order."""
    rows = view.rows(snapshot)
    wanted = order.filter.casefold()
    matching = [row for row in rows if wanted in view.words(row).casefold()] if wanted else list(rows)
    column = view.columns[order.column]
    known = [row for row in matching if column.value(row) is not None]
    known.sort(key=view.key)
    known.sort(key=column.value, reverse=column.falling is not order.reverse)
    if len(known) < rows_max:
        known += sorted((row for row in matching if column.value(row) is None), key=view.key)
    return Shown(known[:rows_max], len(matching), len(rows))
