"""The conditions of the records that a user looks for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from kera.console.browsing.filters.evaluating import fits
from kera.console.browsing.filters.parsing import Node, roots_of
from kera.console.browsing.formats import Decoder
from kera.console.browsing.rows import Row
from kera.console.browsing.windows import EntryKey

_DECODED = {"value", "key", "keys"}


class Match(NamedTuple):
    """The conditions that a record must meet; an empty text or None: no condition."""

    key: str = ""
    """One of the record's keys is exactly this."""
    text: str = ""
    """The value, one of the keys, or a header contains this, in any case."""

    since_us: int | None = None
    """The record's time is this or later."""
    condition: Node | None = None
    """The record fits this filter expression."""

    @property
    def everything(self) -> bool:
        """Whether all records fit."""
        return not (self.key or self.text) and self.since_us is None and self.condition is None

    @property
    def decodes(self) -> bool:
        """Whether `fits` decodes values or keys."""
        return self.condition is not None and not _DECODED.isdisjoint(roots_of(self.condition))

    def fits(self, row: Row, place: EntryKey, decoder: Decoder) -> bool:
        """Return whether a record of this entry fits."""
        if self.since_us is not None and row.timestamp_us < self.since_us:
            return False
        return (
            (not self.key or self.key.encode() in row.keys)
            and (not self.text or self._has_text(row))
            and (self.condition is None or fits(self.condition, _Subject(row, place, decoder)))
        )

    def _has_text(self, row: Row) -> bool:
        wanted = self.text.casefold()
        if row.columns is not None:
            return row.has(wanted)
        parts = [row.value, *row.keys, *(part for name, value in row.headers for part in (name.encode(), value))]
        return any(part is not None and wanted in part.decode(errors="replace").casefold() for part in parts)


class _Subject:
    """A record for filter expressions, whose parts are decoded only when an expression uses them."""

    def __init__(self, row: Row, place: EntryKey, decoder: Decoder) -> None:
        self.streamlet, self.entry = place
        self.offset, self.time_us = row.offset, row.timestamp_us
        self._row, self._decoder = row, decoder

    @cached_property
    def value(self) -> Any:
        """The decoded value; in a typed stream, the row."""
        return self._decoder.document(self._row.value) if self._row.columns is None else self._row.columns

    @cached_property
    def keys(self) -> Sequence[Any]:
        """The decoded keys."""
        return [self._decoder.key(each) for each in self._row.keys]

    @cached_property
    def headers(self) -> Mapping[str, Any]:
        """The last value of each header, as text."""
        return dict(self._row.headers)
