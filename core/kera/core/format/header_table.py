"""Headers of many chunks as rows of a table, so that an operation on all headers is one operation on columns.

A row is the header of ``kera.core.format.chunk`` as it lies in memory, its columns are the fields of `ChunkHeader`.
Numbers are read as signed 64-bit integers, so that differences and comparisons between columns do not wrap around.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kera.core.errors import CorruptChunk
from kera.core.format.checksum import crc32c
from kera.core.format.chunk import (
    ALIGNMENT_BYTES,
    HEADER_BYTES,
    HEADER_CRC_AT,
    MAGIC,
    PLACEMENT_AT,
    PLACEMENT_CRC_AT,
    VERSIONS,
    ChunkHeader,
    verify_header,
)
from kera.core.native import accelerated

Headers = npt.NDArray[np.void]
Column = npt.NDArray[np.int64]
Rows = npt.NDArray[np.bool_]
"""A mask with one value per row: True selects the row."""

_FORMATS = "S4 u1 u1 <u2 <u4 <u4 <u8 <u4 <u4 <u8 <u4 <u4 <u8 <i8 <i8 <i8 <u4 <u4 <u8 <u4 <u4 <u8 <u8 <u4 <u4"
HEADER = np.dtype(list(zip(ChunkHeader._fields, _FORMATS.split(), strict=True)))


def table(headers: Sequence[ChunkHeader] = ()) -> Headers:
    """Return a table of `headers`."""
    return np.array(list(headers), dtype=HEADER)


def verify_headers(buffer: memoryview) -> Headers:
    """Return the headers in `buffer`, with all checksums verified; raises `CorruptChunk` as `verify_header` does."""
    if len(buffer) % HEADER_BYTES:
        raise CorruptChunk("a chunk header is cut short", offset=len(buffer) - len(buffer) % HEADER_BYTES)
    check_headers(buffer)
    return np.frombuffer(buffer, dtype=HEADER)


@accelerated()
def check_headers(buffer: memoryview) -> None:
    """Verify a buffer of whole headers; raises `CorruptChunk` as `verify_header` does."""
    headers = np.frombuffer(buffer, dtype=HEADER)
    starts = range(0, len(buffer), HEADER_BYTES)
    good = (
        (headers["magic"] == MAGIC) & np.isin(headers["version"], VERSIONS) & (headers["header_bytes"] == HEADER_BYTES)
    )
    good &= headers["header_crc32c"] == _checksums(crc32c(buffer[at : at + HEADER_CRC_AT]) for at in starts)
    good &= headers["placement_crc32c"] == _checksums(
        crc32c(buffer[at + PLACEMENT_AT : at + PLACEMENT_CRC_AT]) for at in starts
    )
    for row in np.flatnonzero(~good).tolist():
        verify_header(buffer, row * HEADER_BYTES)  # raises, unless the header merely has no placement yet


def _checksums(checksums: Iterable[int]) -> npt.NDArray[np.uint32]:
    return np.fromiter(checksums, dtype=np.uint32)


def as_headers(headers: Headers) -> list[ChunkHeader]:
    """Return the rows as separate headers."""
    return [ChunkHeader(*row) for row in headers.tolist()]


def column(headers: Headers, name: str) -> Column:
    """Return a field of all headers. Numbers of more than 63 bits wrap around, but no log reaches them."""
    values: Any = headers[name]
    return values.astype(np.int64)  # type: ignore[no-any-return]  # numpy does not say so of fields


def chunk_bytes(headers: Headers) -> Column:
    """See `ChunkHeader.chunk_bytes`."""
    return (column(headers, "payload_bytes") + (HEADER_BYTES + ALIGNMENT_BYTES - 1)) & -ALIGNMENT_BYTES


def end_records(headers: Headers) -> Column:
    """Return the ordinal behind the last record of each chunk."""
    return column(headers, "first_record") + column(headers, "record_count")


def differs_from_before(headers: Headers, *names: str) -> Rows:
    """Return for each header whether one of these fields differs from the header before; True for the first one."""
    found = np.zeros(len(headers), dtype=np.bool_)
    found[:1] = True
    for name in names:
        found[1:] |= headers[name][1:] != headers[name][:-1]
    return found


def parted(headers: Headers, begins: Rows) -> list[Headers]:
    """Split a table before each row for which `begins` is True."""
    bounds = [*np.flatnonzero(begins).tolist(), len(headers)]
    return [headers[start:end] for start, end in pairwise(bounds)]
