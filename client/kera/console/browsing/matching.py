"""Which records somebody looks for. Pure."""

from __future__ import annotations

import json
from typing import NamedTuple

from kera.console.browsing.decoding import jsonable
from kera.console.browsing.rows import Row


class Match(NamedTuple):
    """What a record has to have; empty texts: nothing."""

    key: str = ""
    """One of its keys is exactly this."""
    text: str = ""
    """Its value, one of its keys or a header has this in it, in whatever case."""

    since_us: int | None = None
    """It is of then or later."""

    @property
    def everything(self) -> bool:
        """Whether all records fit."""
        return not (self.key or self.text) and self.since_us is None

    def fits(self, row: Row) -> bool:
        """Whether a record does."""
        if self.since_us is not None and row.timestamp_us < self.since_us:
            return False
        return (not self.key or self.key.encode() in row.keys) and (not self.text or self._has_text(row))

    def _has_text(self, row: Row) -> bool:
        wanted = self.text.casefold()
        if row.columns is not None:
            return wanted in json.dumps(jsonable(dict(row.columns)), ensure_ascii=False).casefold()
        parts = [row.value, *row.keys, *(part for name, value in row.headers for part in (name.encode(), value))]
        return any(part is not None and wanted in part.decode(errors="replace").casefold() for part in parts)
