"""All changes of a table as the source of a copy, by logical decoding: first the initial rows, then each change.

The target reports up to where it never reads again (`kept`), and the slot advances no further than that. So a copy that
is killed finds everything that it needs.

    1. make the publication, then the slot: from there on PostgreSQL keeps its log; the target stores the place. If the
       stream has records already, a record that clears all rows (``op: t``) comes first, so that readers drop the rows
       of an earlier copy
    2. wait until the transactions that were writing have ended; take one snapshot; read rows in primary key order
    3. read the changes of the transactions that the snapshot has not seen, in the order of their commits

A copy that is killed during 2 reads the remaining rows in a new snapshot. Step 3 still delivers the changes between the
two snapshots, because the rows of the first part do not include them. So the remaining rows may return to an earlier
version for a while; for each key, the last record is right.

Promises: each change once, and the changes of one key in order. A place is that of `replay`, with the oid of the table;
while initial rows are read, it also has the last row's key (null before the first row).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from kera.connect.endpoints import TableEnd
from kera.connect.errors import Refused, SourceChanged
from kera.connect.pieces import Piece, Place, Span
from kera.connect.postgres import sql
from kera.connect.postgres.change_records import ColumnsForm, Form, JsonForm, Moment, Typed
from kera.connect.postgres.columns import Columns, columns_of
from kera.connect.postgres.connection import TEXT_FORMS, Database
from kera.connect.postgres.converting import Converter
from kera.connect.postgres.pages import Page, digest_of, pages
from kera.connect.postgres.pgoutput import Relation, parse_lsn
from kera.connect.postgres.replay import Change, Replay, Snapshot, Spot
from kera.connect.postgres.settling import PAUSE_S, SETTLE_S, settled
from kera.connect.postgres.slot import Look, Slot
from kera.connect.worker import Worker
from kera.core.errors import InternalError, InvalidArgument, KeraError
from kera.core.format.arrow_types import empty_batch
from kera.core.format.schema import DEFAULT_SCHEMA

PART = "changes"
PEEK_MESSAGES = 10_000
"""Number of messages to ask for at once, plus the rest of the last transaction; doubled if all were known already."""
PIECE_CHANGES = 10_000
LOOK_S = 0.2
"""Pause between two looks at the log if there was nothing new."""
IDLE_S = 10.0
"""Interval at which the place moves past changes of other tables, so that the slot can advance, too."""


class _Table(NamedTuple):
    """The table to copy, after the source was opened."""

    database: Database
    slot: Slot
    name: tuple[str, str]
    """Schema and table."""
    is_partitioned: bool
    rows: sql.Rows
    """The initial rows; `form` determines the selected columns."""
    form: Form
    converter: Converter
    oid: int
    quoted: str
    shown: str

    def place(self, spot: Spot) -> dict[str, Any]:
        """Return the place in the journal's form."""
        return {**spot.place(self.slot.name), "table": self.oid}

    def check(self, place: Place) -> None:
        """Check that the table exists, and is the one of `place`. Raises `Refused`.

        Journals of earlier versions do not have the table's oid.
        """
        ((oid,),) = self.database.rows(sql.OID_OF_TABLE, [self.quoted])
        self.database.commit()
        if oid != self.oid or place.get("table", oid) != oid:
            raise Refused(
                f"{self.shown}: the table that was copied was dropped or renamed, so no more changes of it come. To"
                " copy a new table of this name: kera connect forget, SELECT"
                f" pg_drop_replication_slot('{self.slot.name}'), drop the publication of the copy, and start it again"
            )

    def cleared(self, lsn: int) -> pa.RecordBatch:
        """Return a record that clears all rows, as for a TRUNCATE."""
        database = self.database
        logged = {name for name, generated in database.rows(sql.LOGGED_COLUMNS, [self.quoted]) if not generated}
        columns = [found for found in database.rows(sql.COLUMNS, [self.quoted]) if found[0] in logged]
        ((_, _, now_us),) = database.rows(sql.TAKE_SNAPSHOT)
        typed = Typed(tuple(name for name, *_ in columns), tuple(kind for _, _, kind, _ in columns))
        relation, behind = Relation(self.oid, *self.name, ()), Spot(lsn, 0, None)
        change = Change(
            "t", relation, before=None, whole=False, after=None, lsn=lsn, committed_us=now_us, behind=behind
        )
        with database.batches(self.form.statement(typed, [change]), 1 << 20) as reader:
            (records,) = [self.form.records(batch) for batch in reader if batch.num_rows]
        database.commit()
        return records


class ChangesSource:
    """See `kera.connect.pieces.Source`."""

    may_shrink = False
    streamlets = 0

    def __init__(
        self,
        end: TableEnd,
        wanted: pa.Schema | None,
        slot: str,
        *,
        follow: bool,
        from_latest: bool = False,
        refills: bool = False,
        settle_s: float = SETTLE_S,
    ) -> None:
        """`wanted`: the columns of the target, if it exists. `slot`: see `slot_name`; a slot of `end` takes precedence.

        `from_latest`: leave out the initial rows. `refills`: the target has records already, so a new copy begins with
        a record that clears all rows.
        """
        self.shown = self.identity = end.shown
        self.schema = pa.schema([])
        self.notes: list[str] = []
        self._end = end
        self._wanted = wanted
        self._slot = end.slot or slot
        self._publication = end.publication or slot
        self._follow = follow
        self._from_latest = from_latest
        self._refills = refills
        self._settle_s = settle_s
        self._connections: list[Database] = []
        self._table: _Table | None = None
        self._worker = Worker("postgres")

    # -- opening -------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """See `Source`. Raises `Refused`, `InvalidArgument`, `SchemaMismatch`, `Unreachable`."""
        await self._worker.call(self._open)

    def _open(self) -> None:
        database, log = self._connect(), self._connect()
        ((name,),) = database.rows(sql.DATABASE)
        ((level,),) = database.rows("SELECT current_setting('wal_level')::text")
        self.identity = f"{self.shown} of database {name}"
        if level != "logical":
            raise Refused(
                f"{self.shown}: needs a server with wal_level=logical, and this one has {level}: ALTER SYSTEM SET"
                " wal_level = logical, and restart PostgreSQL"
            )
        table = sql.table_name(self._end.table)
        found = database.rows(sql.ABOUT_TABLE, [table])
        if not found:
            raise Refused(f"there is no table {self._end.table!r} in database {name!r}")
        ((kind, identity, schema, own_name, oid),) = found
        key = self._check_table(database, table, kind, identity)
        source = table
        logged = database.rows(sql.LOGGED_COLUMNS, [table])
        if any(generated for _, generated in logged):  # the log does not have generated columns
            plain = ", ".join(sql.quoted(column) for column, generated in logged if not generated)
            source = f"(SELECT {plain} FROM {table})"
        form = self._form_for(database, source, key)
        database.commit()
        self.schema = form.schema
        self._table = _Table(
            database,
            Slot(database, log, self._slot, self.shown),
            (schema, own_name),
            kind == "p",
            sql.Rows(source, (), key),
            form,
            Converter(database, form, table, key, self._note),
            oid,
            table,
            self.shown,
        )

    def _connect(self) -> Database:
        database = Database(self._end.uri, self.shown)
        self._connections.append(database)
        database.set("timezone = 'UTC'", *TEXT_FORMS)  # values are texts in the log
        return database

    def _check_table(self, database: Database, table: str, kind: str, identity: str) -> tuple[str, ...]:
        """Check that the table has changes, and return its primary key. Raises `Refused`, `InvalidArgument`."""
        if kind not in ("r", "p"):
            raise Refused(f"{self.shown}: only tables have changes in the log, and this is not a table")
        uniques = database.rows(sql.UNIQUE_KEYS, [table])
        primary = [json.loads(columns) for is_primary, _, columns in uniques if is_primary]
        if not primary:
            raise InvalidArgument(
                f"{self.shown}: the table has no primary key to identify its rows: ALTER TABLE {table} ADD PRIMARY"
                " KEY (…); a replica identity does not replace it"
            )
        if identity not in ("d", "f"):
            raise Refused(
                f"{self.shown}: its replica identity has to be the primary key, or the whole row: ALTER TABLE {table}"
                " REPLICA IDENTITY DEFAULT, or FULL"
            )
        return tuple(primary[0])

    def _form_for(self, database: Database, source: str, key: Sequence[str]) -> Form:
        wanted = self._wanted
        typed = wanted is not None and not wanted.equals(DEFAULT_SCHEMA)
        values = self._end.values or ("columns" if typed else "json")
        if wanted is not None and (values == "columns") != typed:
            has = "columns of its own" if typed else "no columns of its own"
            raise InvalidArgument(f"values={values}: the stream has {has}; leave it out, or copy into another stream")
        if values == "json":
            return JsonForm(key, tombstones=self._end.tombstones)
        if self._end.tombstones:
            raise InvalidArgument("tombstones: only a stream without columns has records without a value")

        def probe(rows: str) -> Columns:
            return columns_of(database, rows, wanted)

        return ColumnsForm(probe(source), wanted, probe, shown=self.shown)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def _opened(self) -> _Table:
        if self._table is None:
            raise InternalError("the source was not opened")
        return self._table

    async def left(self, places: Mapping[str, Place]) -> int | None:
        """See `Source`. PostgreSQL's estimate, for the initial rows only."""
        return await self._worker.call(self._left, places.get(PART))

    def _left(self, place: Place) -> int | None:
        if self._from_latest or (place is not None and "key" not in place):
            return None
        table = self._opened
        ((plan,),) = table.database.rows(sql.estimate(table.rows, None if place is None else place["key"]))
        table.database.commit()
        found = json.loads(plan) if isinstance(plan, str) else plan
        return int(found[0]["Plan"]["Plan Rows"])

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, places: Mapping[str, Place], piece_bytes: int) -> AsyncGenerator[Piece, None]:
        """See `Source`. Raises `RecordsGone` if the slot no longer has the next changes."""
        return self._worker.each(self._pieces(places.get(PART), piece_bytes))

    def _pieces(self, place: Place, piece_bytes: int) -> Generator[Piece | None, None, None]:
        table = self._opened
        if place is not None:
            table.check(place)
        # Also for a copy that continues, because reading the slot requires the publication.
        made = not self._end.publication
        table.slot.publish(self._publication, table.name, make=made, by_root=table.is_partitioned)
        begin: Spot | None = None
        if place is None:
            begin = Spot(table.slot.begin(self._settle_s, own=not self._end.slot), 0, None)
            if table.slot.was_made:
                self._note(
                    f"replication slot {self._slot} was made: while this copy does not run, PostgreSQL keeps its log"
                    " for it, up to max_slot_wal_keep_size"
                )
            place = table.place(begin) if self._from_latest else {**table.place(begin), "key": None}
            # The target stores the place at once, so that a restart recognizes the slot of this copy.
            yield self._cleared(place) if self._refills and not self._from_latest else _empty(self.schema, None, place)
        else:
            table.slot.check(place)
            begin = Spot.of(place) if place.get("key", "") is None else None
        if "key" in place:
            for piece in self._first_rows(place, begin, piece_bytes):
                yield piece
                place = place if piece is None else piece.end
        yield from self._changes(place, piece_bytes)

    def _cleared(self, end: Place) -> Piece:
        self._note(
            "the stream has records already: this copy begins with a record op t in every streamlet, so that readers"
            " drop the rows of an earlier copy"
        )
        return Piece(PART, None, end, self._opened.cleared(parse_lsn(end["lsn"])), everywhere=True)

    # -- initial rows --------------------------------------------------------------------------------------------------

    def _first_rows(self, place: Place, begin: Spot | None, piece_bytes: int) -> Iterator[Piece | None]:
        table = self._opened
        if begin is not None:
            # The slot does not have transactions that commit before it begins, so the snapshot must see these.
            name = ".".join(map(sql.quoted, table.name))
            yield from settled(table.database, name, self.shown, is_table=True, settle_s=self._settle_s)
        snapshot, moment = self._snapshot()
        spot = Spot.of(place) if begin is None else begin._replace(snapshot=snapshot)
        where = table.place(spot)
        for page in self._page(place, None, moment, piece_bytes):
            end = {**where, "key": page.last}
            yield Piece(PART, place, end, table.form.records(page.rows), digest=digest_of([page]))
            place = end
        table.database.commit()
        yield _empty(self.schema, place, where)

    def _snapshot(self) -> tuple[Snapshot, Moment]:
        """Begin the transaction in which all initial rows are read, and return its snapshot and moment."""
        database = self._opened.database
        database.commit()
        database.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
        ((text, lsn, us),) = database.rows(sql.TAKE_SNAPSHOT)
        return Snapshot(text, parse_lsn(lsn)), Moment(us, parse_lsn(lsn))

    def _page(self, start: Place, end: Place, moment: Moment, piece_bytes: int) -> Iterator[Page]:
        """Return the rows between two places; None: from the first row, or up to the last one."""
        table = self._opened
        first, last = (None if place is None else place["key"] for place in (start, end))
        rows = table.rows._replace(columns=table.form.reading(moment))
        return pages(table.database, sql.page(rows, first, last, None), rows.key, first, piece_bytes, self.shown)

    # -- changes -------------------------------------------------------------------------------------------------------

    def _changes(self, place: Place, piece_bytes: int) -> Generator[Piece | None, None, None]:
        table, slot = self._opened, self._opened.slot
        spot, messages_max = Spot.of(place), PEEK_MESSAGES
        seen, candidate, moved_s = 0, 0, time.monotonic()
        end = None if self._follow else slot.log_ends()[1]
        while True:
            table.check(place)
            slot.let_go()
            inserted, flushed = slot.log_ends()
            # If an earlier end of the log has been flushed since, all commits before it can be read now.
            candidate = inserted if flushed >= inserted else candidate
            quiet = candidate if flushed >= candidate else 0
            candidate = candidate if candidate > quiet else inserted
            if flushed != seen:
                replay, look = _replay(table, spot), Look(messages_max)
                for piece in self._looked_at(place, replay, look, piece_bytes):
                    yield piece
                    if piece is not None:
                        place, moved_s = piece.end, time.monotonic()
                messages_max = messages_max * 2 if look.was_full and replay.spot == spot else PEEK_MESSAGES
                spot = replay.spot
                if look.was_full and (end is None or spot.lsn < end):
                    continue
                seen = 0 if look.was_full else flushed
            if flushed == seen:
                spot = spot.moved(Spot(quiet, 0, spot.snapshot))
            now_s, where = time.monotonic(), table.place(spot)
            if where != place and (end is not None or now_s - moved_s >= IDLE_S):
                yield _empty(self.schema, place, where)
                place, moved_s = where, now_s
            if end is not None:
                return
            while time.monotonic() < now_s + LOOK_S:
                time.sleep(PAUSE_S)
                yield None

    def _looked_at(self, place: Place, replay: Replay, look: Look, piece_bytes: int) -> Iterator[Piece | None]:
        """Yield the pieces of one look at the slot."""
        table = self._opened
        for changes in _groups(replay.changes(table.slot.messages(look)), look, piece_bytes):
            if not changes:
                yield None
                continue
            end = table.place(changes[-1].behind)
            yield Piece(PART, place, end, table.converter.records(changes), everywhere=changes[0].op == "t")
            place = end

    # -- reading again, and releasing the log --------------------------------------------------------------------------

    async def again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        """See `Source`. Raises `RecordsGone`, `SourceChanged`."""
        return await self._worker.call(self._again, spans)

    def _again(self, spans: Sequence[Span]) -> list[pa.RecordBatch | None]:
        for span in spans:
            self._opened.check(span.end)
        found: list[pa.RecordBatch | None] = [_no_rows(self.schema) for _ in spans]
        rows = [at for at, span in enumerate(spans) if span.rows and "key" in span.end]
        changes = [at for at, span in enumerate(spans) if span.rows and "key" not in span.end]
        if rows:
            _, moment = self._snapshot()
            for at in rows:
                found[at] = self._rows_again(spans[at], moment)
                if found[at] is None:
                    return found
            self._opened.database.commit()
        if changes:
            for at, again in zip(changes, self._changes_again([spans[at] for at in changes]), strict=True):
                found[at] = again
        return found

    def _rows_again(self, span: Span, moment: Moment) -> pa.RecordBatch | None:
        """Read the initial rows of a span again; None: their keys differ from before."""
        table = self._opened
        if span.end["key"] is None:
            return table.cleared(parse_lsn(span.end["lsn"]))
        parts = list(self._page(span.start, span.end, moment, 1 << 20))
        if sum(page.rows.num_rows for page in parts) != span.rows or digest_of(parts) != span.digest:
            self._note(
                f"rows up to {span.end['key']} have changed since they were being copied when the copy ended: they are"
                " copied again, so some may be there twice"
            )
            table.database.commit()
            return None
        return pa.concat_batches([table.form.records(page.rows) for page in parts])

    def _changes_again(self, spans: Sequence[Span]) -> Iterator[pa.RecordBatch]:
        table = self._opened
        start, ends = Spot.of(spans[0].start), [Spot.of(span.end) for span in spans]
        made = not self._end.publication
        table.slot.publish(self._publication, table.name, make=made, by_root=table.is_partitioned)
        table.slot.check(spans[0].start)
        messages_max = PEEK_MESSAGES
        while True:
            replay, look = _replay(table, start), Look(messages_max)
            groups: list[list[Change]] = [[] for _ in ends]
            at = 0
            for change in replay.changes(table.slot.messages(look)):
                if change is None:
                    continue
                while at < len(ends) and not change.behind.within(ends[at]):
                    at += 1
                if at == len(ends):
                    break
                groups[at].append(change)
            if at == len(ends) or not look.was_full:
                break
            messages_max *= 2
        for span, changes in zip(spans, groups, strict=True):
            rows = table.converter.records(changes) if changes else _no_rows(self.schema)
            if rows.num_rows != span.rows:
                raise SourceChanged(
                    f"{self.shown}: replication slot {self._slot} has no longer the {span.rows} changes up to"
                    f" {span.end['lsn']}, which were being copied when the copy ended. {table.slot.anew}"
                )
            yield rows

    async def kept(self, places: Mapping[str, Place]) -> None:
        """See `Source`. The slot advances before the next look at the log."""
        if PART in places:
            self._opened.slot.keep(parse_lsn(places[PART]["lsn"]))

    async def close(self) -> None:
        """See `Source`."""
        await self._worker.call(self._close)
        self._worker.close()

    def _close(self) -> None:
        if self._table is not None:
            with contextlib.suppress(KeraError):  # the next process will advance the slot
                self._table.database.rollback()
                self._table.slot.let_go()
            self._table = None
        while self._connections:
            self._connections.pop().close()


def _empty(schema: pa.Schema, start: Place, end: Place) -> Piece:
    return Piece(PART, start, end, _no_rows(schema))


def _no_rows(schema: pa.Schema) -> pa.RecordBatch:
    return empty_batch(schema)


def _replay(table: _Table, start: Spot) -> Replay:
    return Replay(start, *table.name, table.rows.key)


def _groups(changes: Iterator[Change | None], look: Look, piece_bytes: int) -> Iterator[list[Change]]:
    """Group changes into pieces: each has one form of the table, and all changes of a place. None becomes []."""
    group: list[Change] = []
    for change in changes:
        if change is None:
            yield []
            continue
        if group and change.behind != group[-1].behind:
            last = group[-1]
            full = len(group) >= PIECE_CHANGES or look.bytes >= piece_bytes
            if full or change.relation != last.relation or "t" in (change.op, last.op):
                yield group
                group, look.bytes = [], 0
        group.append(change)
    if group:
        yield group
