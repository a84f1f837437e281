"""A connection to PostgreSQL through ADBC, which translates errors; messages never contain a password."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from kera.connect.errors import Refused, Unreachable
from kera.core.errors import DiskFull, KeraError, SchemaMismatch

APPLICATION = "kera connect"
_AWAY = ("08", "57P")
"""Classes of errors: a failed connection, and one that an administrator, a start or a stop of the server has ended."""
TEXT_FORMS = (*("datestyle = 'ISO'", "intervalstyle = 'postgres'", "bytea_output = 'hex'", "extra_float_digits = 1"),)
"""Settings that give values a fixed text form, whatever the server and the role have set."""
_DEFAULTS = {"connect_timeout": "15", "keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3"}
"""Defaults of libpq's parameters, which detect a vanished host."""


class Database:
    """A connection, with one transaction at a time. All methods block."""

    def __init__(self, uri: str, what: str) -> None:
        """`what`: the copied table, for messages. Raises `Unreachable`, `Refused`."""
        import adbc_driver_postgresql.dbapi as adbc

        self._what = what
        with self.translated():
            self._connection = adbc.connect(_with_defaults(uri))
        with self.translated():
            self.execute("SET standard_conforming_strings = on")
            self.execute(f"SET application_name = '{APPLICATION}'")
            self.execute("SET client_min_messages = warning")
            self.commit()

    def set(self, *settings: str) -> None:
        """Change settings of the session."""
        for setting in settings:
            self.execute(f"SET {setting}")
        self.commit()

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> None:
        """Run a statement."""
        with self.translated(), self._connection.cursor() as cursor:
            cursor.execute(statement, parameters=tuple(parameters) or None)

    def rows(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a query, and return its rows as Python values."""
        with self.translated(), self._connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.postgresql.use_copy": "false"})  # COPY supports queries only
            cursor.execute(statement, parameters=tuple(parameters) or None)
            return list(cursor.fetchall())

    @contextlib.contextmanager
    def batches(self, statement: str, batch_bytes: int) -> Iterator[Any]:
        """Run a query, and return its rows as a reader of Arrow batches of about `batch_bytes`."""
        with self.translated(), self._connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(batch_bytes)})
            cursor.execute(statement)
            yield cursor.fetch_record_batch()

    def ingest(self, table: str, rows: Any, *, schema: str | None = None, temporary: bool = False) -> None:
        """Append rows to a table; with `temporary`, create a temporary table from them."""
        with self.translated(), self._connection.cursor() as cursor:
            if temporary:
                cursor.adbc_ingest(table, rows, mode="create", temporary=True)
            else:
                cursor.adbc_ingest(table, rows, mode="append", db_schema_name=schema)

    def commit(self) -> None:
        """Commit the transaction."""
        with self.translated():
            self._connection.commit()

    def rollback(self) -> None:
        """Roll the transaction back; do nothing if there is none."""
        with contextlib.suppress(Exception):
            self._connection.rollback()

    def close(self) -> None:
        """Disconnect, without committing."""
        with contextlib.suppress(Exception):
            self._connection.close()

    @contextlib.contextmanager
    def translated(self) -> Iterator[None]:
        """Translate the errors of ADBC calls within this context."""
        import adbc_driver_manager as adbc

        try:
            yield
        except adbc.Error as error:
            raise translate(self._what, error) from error
        except OSError as error:  # while batches are read
            raise Unreachable(f"{self._what}: {error}") from error


def _with_defaults(uri: str) -> str:
    """Return `uri` with `_DEFAULTS` for parameters that neither it nor the environment sets."""
    given = {name for name, _ in parse_qsl(urlsplit(uri).query, keep_blank_values=True)}
    given |= {"connect_timeout"} if "PGCONNECT_TIMEOUT" in os.environ else set()
    more = urlencode({name: value for name, value in _DEFAULTS.items() if name not in given})
    return f"{uri}{'&' if '?' in uri else '?'}{more}" if more else uri


def translate(what: str, error: Any) -> KeraError:
    """Translate an error of PostgreSQL."""
    state = error.sqlstate or ""
    details = dict(error.details or ())
    text = details.get("PG_DIAG_MESSAGE_PRIMARY") or details.get(b"PG_DIAG_MESSAGE_PRIMARY") or str(error)
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    text = " ".join(text.split())
    if state == "53100":
        return DiskFull(f"{what}: PostgreSQL has no room on its disk: {text}")
    if state.startswith("22"):
        context = details.get("PG_DIAG_CONTEXT") or details.get(b"PG_DIAG_CONTEXT") or b""
        where = context.decode(errors="replace") if isinstance(context, bytes) else context
        return SchemaMismatch(f"{what}: {text}" + (f" ({where})" if where else ""))
    if not state or state.startswith(_AWAY):
        return Unreachable(f"{what}: PostgreSQL cannot be reached: {text}")
    return Refused(f"{what}: {text}", sqlstate=state)
