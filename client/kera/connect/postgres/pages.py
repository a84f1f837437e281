"""Reads the rows of a table or query in pages: Arrow batches in the order of a key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kera.connect.pieces import Place
from kera.connect.postgres import sql
from kera.connect.postgres.connection import Database
from kera.core.errors import SchemaMismatch

DIGEST_BYTES = 16


class Page(NamedTuple):
    """Consecutive rows."""

    rows: pa.RecordBatch
    keys: list[pa.Array]
    """The values of each column of the key, as text."""

    @property
    def last(self) -> list[str]:
        """The key of the last row."""
        return [column[-1].as_py() for column in self.keys]


def pages(
    database: Database, statement: str, key: Sequence[str], start: Place, piece_bytes: int, shown: str
) -> Iterator[Page]:
    """Yield the rows of `statement` (from `sql.page`), which come after the key `start`.

    Raises `SchemaMismatch` for a row without a key, or with the key of the row before it.
    """
    last = start
    with database.batches(statement, piece_bytes) as reader:
        for batch in reader:
            if batch.num_rows:
                page = Page(batch, [batch.column(f"{sql.KEY_PREFIX}{number}") for number in range(len(key))])
                _check_keys(page.keys, last, key, shown)
                yield page
                last = page.last


def _check_keys(keys: Sequence[pa.Array], last: Place, names: Sequence[str], shown: str) -> None:
    """Raise `SchemaMismatch` for null or repeated keys: of two rows with the same key, one could be skipped."""
    if any(column.null_count for column in keys):
        raise SchemaMismatch(f"{shown}: a row has no key")
    first = [column[0].as_py() for column in keys]
    same = None
    for column in keys:
        equal = pc.equal(column[1:], column[:-1])
        same = equal if same is None else pc.and_(same, equal)
    if first == last or (same is not None and len(same) and pc.any(same).as_py()):
        raise SchemaMismatch(f"{shown}: two rows have the same key ({', '.join(names)}): add a column")


def digest_of(found: Sequence[Page]) -> str:
    """Return a digest of the keys of all rows, in order. It does not depend on the division into pages."""
    count = len(found[0].keys) if found else 0
    texts = [hashlib.blake2b(digest_size=DIGEST_BYTES) for _ in range(count)]
    lengths = [hashlib.blake2b(digest_size=DIGEST_BYTES) for _ in range(count)]
    for page in found:
        for column, text, length in zip(page.keys, texts, lengths, strict=True):
            plain = column.cast(pa.large_string())
            offsets = np.frombuffer(plain.buffers()[1], np.int64)[plain.offset : plain.offset + len(plain) + 1]
            length.update(np.diff(offsets).tobytes())
            if offsets[-1] > offsets[0]:
                text.update(memoryview(plain.buffers()[2])[offsets[0] : offsets[-1]])
    whole = b"".join(each.digest() for each in [*texts, *lengths])
    return hashlib.blake2b(whole, digest_size=DIGEST_BYTES).hexdigest()
