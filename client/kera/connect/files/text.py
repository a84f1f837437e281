"""Reads complete records of text files that may grow meanwhile, and recognizes the text before a place.

A record is copied once it has its end: a line with its newline, a row of CSV with a newline outside quotes. The text
after the last end is the file's tail, for which the caller decides (`TextFile.tail`). Positions are bytes of the text;
for a compressed file, of the decompressed text.

A position has a mark, a digest of the begin of the file and of the text just before the position. A file that was
truncated, replaced or rewritten has another mark there. So a copy never continues inside a record of another text.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import IO, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from kera.connect.endpoints import CODECS
from kera.connect.errors import SourceChanged
from kera.core.errors import SchemaMismatch

RECORD_BYTES_MAX = 64 << 20
MARK_BYTES = 64 << 10
"""A mark covers at most this number of bytes at the begin of the text, and as many before the position."""
STEP_BYTES = 64 << 10
"""Maximum number of bytes to decompress at once."""
_F_SETSIG = 10
"""A constant of Linux that Python's `fcntl` lacks."""
_CUT = "Truncated compressed stream"
"""Arrow's message for a compressed file that ends inside a frame."""


class Position(NamedTuple):
    """A place in a text, between two records."""

    at: int
    """The position in bytes."""
    mark: str = ""
    """The mark, see above; empty: not known, as in journals of earlier versions."""


class Records(Protocol):
    """The rules for the ends of records in a format."""

    def last_end(self, text: bytes) -> int:
        """Return the index after the last record in `text` with an end; 0: there is none. A record begins at 0."""
        ...

    def is_whole(self, tail: bytes) -> bool:
        """Return whether a record without its end can be complete."""
        ...

    def is_longer(self, following: bytes) -> bool:
        """Return whether a record that was copied without its end continues in the text that follows it."""
        ...


class JsonRecords:
    """Lines of JSON."""

    def last_end(self, text: bytes) -> int:
        """See `Records`."""
        return text.rfind(b"\n") + 1

    def is_whole(self, tail: bytes) -> bool:
        """See `Records`. A closed object cannot be the begin of another one."""
        try:
            return isinstance(json.loads(tail), dict)
        except (ValueError, RecursionError):
            return False

    def is_longer(self, following: bytes) -> bool:
        """See `Records`."""
        return bool(following.partition(b"\n")[0].strip())


_FIELD = rb'(?:"(?:[^"]++|"")*+"[^,\r\n]*+|[^",\r\n][^,\r\n]*+|)'
_ROW = rb"%b(?:,%b)*+(?:\r\n|\n|\r(?=[^\n]))" % (_FIELD, _FIELD)
"""A row with its end. A carriage return at the end of the text may be half of an end, and does not count."""
_FIRST_ROW = re.compile(_ROW)
_ROWS = re.compile(rb"(?:%b)*+" % _ROW)
_QUOTE, _COMMA, _NEWLINE, _RETURN = b'",\n\r'


class CsvRecords:
    """Rows of CSV, whose fields may have newlines inside quotes."""

    def last_end(self, text: bytes) -> int:
        """See `Records`."""
        if b'"' not in text:
            return text.rfind(b"\n") + 1 or text.rfind(b"\r", 0, -1) + 1
        found = np.frombuffer(text, np.uint8)
        quotes = np.flatnonzero(found == _QUOTE)
        opening = quotes[::2]
        before = found[opening - 1]
        regular = (opening == 0) | (before == _COMMA) | (before == _NEWLINE) | (before == _RETURN) | (before == _QUOTE)
        if not regular.all():
            # A quote inside a field that does not begin with a quote is an ordinary character.
            return self._last_end_of_irregular(text)
        at = len(text)
        while (at := text.rfind(b"\n", 0, at)) >= 0:
            count = int(np.searchsorted(quotes, at))
            if count % 2 == 0:
                return at + 1
            at = int(quotes[count - 1])
        return self._last_end_of_irregular(text)

    def _last_end_of_irregular(self, text: bytes) -> int:
        rows = _ROWS.match(text)
        return rows.end() if rows is not None else 0

    def first_end(self, text: bytes) -> int:
        """Return the index after the first row; 0: the row has no end."""
        row = _FIRST_ROW.match(text)
        return row.end() if row is not None else 0

    def is_whole(self, tail: bytes) -> bool:
        """See `Records`. The row is complete if no quote is open."""
        return self.first_end(tail + b"\n") == len(tail) + 1

    def is_longer(self, following: bytes) -> bool:
        """See `Records`."""
        return following[:1] not in (b"", b"\n", b"\r")


class TextFile:
    """One text file, read once from a position to its end."""

    def __init__(self, path: str, records: Records) -> None:
        self.tail = b""
        """The text after the last end of a record; known after `blocks`."""
        self.is_cut = False
        """Whether the file is compressed, and its last frame is incomplete; known after `blocks`."""
        self.size = 0
        """The size of the file in bytes; known after `blocks`."""
        self._path = path
        self._records = records
        self._marker = _Marker()

    @property
    def position(self) -> Position:
        """The position after the last record that `blocks` has yielded."""
        return self._marker.position

    def blocks(self, start: Position, size: int) -> Iterator[tuple[bytes, Position]]:
        """Yield complete records, about `size` bytes each time, with the position after them.

        Raises `SourceChanged` if the text before `start` differs from the copied one, or changes during the reading,
        and `SchemaMismatch` for a record of more than `RECORD_BYTES_MAX` bytes.
        """
        with open(self._path, "rb", buffering=0) as raw:  # noqa: PTH123 - names
            text = _Text(raw, self._path)
            self._begin(text, start)
            at_start = not self._marker.last or self._marker.last in b"\r\n"
            rest = b""
            while block := text.read(size):
                rest += block
                if not at_start and self._records.is_longer(rest):
                    raise changed(
                        self._path,
                        f"the last record that was copied ended at byte {start.at}, without a newline, and goes on now",
                    )
                end = self._records.last_end(rest)
                if end:
                    whole, rest = rest[:end], rest[end:]
                    at_start = True
                    self._marker.add(whole)
                    yield whole, self.position
                elif len(rest) > RECORD_BYTES_MAX:
                    raise SchemaMismatch(
                        f"a record behind byte {self.position.at} has more than {RECORD_BYTES_MAX} bytes"
                    )
            self.size = raw.tell()
            if os.fstat(raw.fileno()).st_size < self.size or text.differs_from(self._marker):
                raise changed(self._path, "it was truncated or rewritten while it was read")
        self.tail, self.is_cut = rest, text.is_cut

    def behind_tail(self) -> Position:
        """Return the position after the tail, which the caller takes as a record."""
        self._marker.add(self.tail)
        return self.position

    def between(self, start: Position, end: Position) -> bytes:
        """Return the text between two positions. Raises `SourceChanged` if the text has changed."""
        with open(self._path, "rb", buffering=0) as raw:  # noqa: PTH123 - names
            text = _Text(raw, self._path)
            self._begin(text, start)
            found = text.read(end.at - start.at)
        self._marker.add(found)
        self._check(end)
        return found

    def _begin(self, text: _Text, start: Position) -> None:
        self._marker = text.go_to(start.at)
        self._check(start)

    def _check(self, position: Position) -> None:
        here = self.position
        if here.at < position.at:
            raise changed(self._path, f"{position.at} bytes of it were copied, and it has {here.at} now")
        if position.mark not in ("", here.mark):
            raise changed(self._path, f"the text before byte {position.at} is not the one that was copied")


def changed(path: str, why: str) -> SourceChanged:
    """Return the error for a file that differs from the copied one, with the way out."""
    return SourceChanged(
        f"{path}: {why}: put the file back as it was, or copy it from its beginning, under another --name or after"
        " kera connect forget",
        path=path,
    )


def mark_of(path: str) -> str:
    """Return the mark of a whole file, for files that must not change at all."""
    with open(path, "rb") as file:  # noqa: PTH123 - names
        return _Marker.at(file.fileno(), os.fstat(file.fileno()).st_size).position.mark


def has_writer(path: str) -> bool:
    """Return whether a process has the file open for writing. False if the system cannot tell, as on network disks."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # A lease for reading is granted only while the file has no writer. If a writer opens it just then, the kernel
        # sends a signal: SIGURG, which is ignored, instead of SIGIO, which would end the process.
        fcntl.fcntl(descriptor, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    else:
        return False
    finally:
        os.close(descriptor)


class _Marker:
    """Follows a text, and computes the mark of the position."""

    def __init__(self) -> None:
        self._at = 0
        self._head = b""
        self._near = b""
        """The text before the position, at most `MARK_BYTES`."""

    @classmethod
    def at(cls, descriptor: int, at: int) -> _Marker:
        """Return the marker at a position of an uncompressed file."""
        marker, first = cls(), max(0, at - MARK_BYTES)
        marker._at = at
        marker._head, marker._near = (
            os.pread(descriptor, min(at, MARK_BYTES), 0),
            os.pread(descriptor, at - first, first),
        )
        return marker

    @property
    def last(self) -> bytes:
        """The byte before the position; empty at the beginning."""
        return self._near[-1:]

    @property
    def position(self) -> Position:
        """The present position."""
        digest = hashlib.blake2b(self._head, digest_size=8)
        digest.update(self._near)
        return Position(self._at, digest.hexdigest())

    def add(self, text: bytes) -> None:
        """Move past `text`, which comes next."""
        self._at += len(text)
        if len(self._head) < MARK_BYTES:
            self._head += text[: MARK_BYTES - len(self._head)]
        self._near = text[-MARK_BYTES:] if len(text) >= MARK_BYTES else (self._near + text)[-MARK_BYTES:]


class _Text:
    """The text of an open file, decompressed if its name has the ending of a codec."""

    def __init__(self, raw: IO[bytes], path: str) -> None:
        self.is_cut = False
        self._raw = raw
        self._codec = next((codec for ending, codec in CODECS.items() if path.endswith(ending)), None)
        self._stream = self._decompressed()
        self._step = STEP_BYTES
        self._at = 0

    def _decompressed(self) -> pa.NativeFile | None:
        if self._codec is None:
            return None
        # A duplicate, because Arrow closes the file that it reads.
        again = open(os.dup(self._raw.fileno()), "rb", buffering=0)  # noqa: PTH123, SIM115 - a descriptor; Arrow's
        return pa.CompressedInputStream(pa.PythonFile(again, "r"), self._codec)

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes; fewer at the end."""
        parts = []
        while count and (part := self._part(count)):
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _part(self, count: int) -> bytes:
        if self._stream is None:
            return self._raw.read(count)
        if self.is_cut:
            return b""
        try:
            found: bytes = self._stream.read(min(count, self._step))
        except OSError as error:
            if _CUT not in str(error):
                raise
            if self._step == 1:
                self.is_cut = True
                return b""
            # Arrow has dropped the text before the error. Read it again byte by byte, up to where the file is cut.
            self._raw.seek(0)
            self._stream, at, self._at = self._decompressed(), self._at, 0
            self._skip(at, _Marker())
            self._step = 1
            return self._part(count)
        self._at += len(found)
        return found

    def go_to(self, at: int) -> _Marker:
        """Skip the text up to `at`, or up to its end, and return the marker there."""
        marker = _Marker()
        if self._stream is not None:
            self._skip(at, marker)
            return marker
        at = min(at, os.fstat(self._raw.fileno()).st_size)
        self._raw.seek(at)
        return _Marker.at(self._raw.fileno(), at)

    def _skip(self, at: int, marker: _Marker) -> None:
        while at and (block := self.read(min(at, STEP_BYTES))):
            marker.add(block)
            at -= len(block)

    def differs_from(self, marker: _Marker) -> bool:
        """Return whether the file now has another text than `marker` has followed; False for a compressed file."""
        return self._stream is None and _Marker.at(self._raw.fileno(), marker.position.at).position != marker.position
