"""Turns changes into records: PostgreSQL converts their values, and values that were not logged are looked up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pyarrow as pa

from kera.connect.postgres import sql
from kera.connect.postgres.change_records import Form, Typed, lookup, missing_of
from kera.connect.postgres.connection import Database
from kera.connect.postgres.pgoutput import Relation
from kera.connect.postgres.replay import Change
from kera.core.errors import invariant


class Converter:
    """Turns the changes of one table into records."""

    def __init__(
        self, database: Database, form: Form, table: str, key: Sequence[str], note: Callable[[str], None]
    ) -> None:
        """`table`: the quoted name. `key`: the columns of its primary key. `note` is called with notes for users."""
        self._database = database
        self._form = form
        self._table = table
        self._key = tuple(key)
        self._note = note
        self._types: dict[Relation, Typed] = {}

    def records(self, changes: Sequence[Change]) -> pa.RecordBatch:
        """Return the records of `changes`, in order, which have the same form of the table. Raises `SchemaMismatch`."""
        relation = changes[0].relation
        typed = self._types.get(relation)
        if typed is None:
            kinds = [(column.type_oid, column.type_modifier) for column in relation.columns]
            (types,) = self._database.rows(sql.names_of_types(kinds))
            typed = self._types[relation] = Typed(tuple(column.name for column in relation.columns), tuple(types))
        completed = self._completed(changes, typed)
        with self._database.batches(self._form.statement(typed, completed), 1 << 20) as reader:
            found = [self._form.records(batch) for batch in reader if batch.num_rows]
        self._database.commit()
        return pa.concat_batches(found)

    def _completed(self, changes: Sequence[Change], typed: Typed) -> list[Change]:
        """Fill in the present values of large columns that updates left unchanged, and PostgreSQL did not log."""
        completed = list(changes)
        lacking = [(at, missing) for at, change in enumerate(changes) if (missing := missing_of(change))]
        if not lacking:
            return completed
        names = sorted({name for _, missing in lacking for name in missing})
        columns = ", ".join(names)
        self._note(
            f"updates that leave large values of {columns} as they are do not log them: the copy reads them from the"
            f" table, where they may be newer already. ALTER TABLE {self._table} REPLICA IDENTITY FULL logs them"
        )
        keys = [self._key_of(changes[at], typed) for at, _ in lacking]
        present = {row[0]: row[1:] for row in self._database.rows(lookup(self._table, typed, names, keys))}
        self._database.commit()
        for number, (at, missing) in enumerate(lacking, 1):
            row = present.get(number)
            if row is None:
                self._note(
                    f"values of {columns} that were not logged are gone from the table, too: records of these updates"
                    " are without them"
                )
                continue
            after = list(changes[at].after or ())
            for name in missing:
                after[typed.names.index(name)] = row[names.index(name)]
            completed[at] = changes[at]._replace(after=tuple(after))
        return completed

    def _key_of(self, change: Change, typed: Typed) -> dict[str, str]:
        found = {}
        for name in self._key:
            value = (change.after or ())[typed.names.index(name)]
            invariant(isinstance(value, str), "the columns of a primary key are logged", column=name)
            found[name] = str(value)
        return found
