"""Checks LMDB's file before LMDB maps it.

LMDB trusts the file. If a page is missing because the file was cut off, the kernel kills the process with SIGBUS,
without a message; and an empty file becomes a new database. So `check` follows all pages that LMDB could reach:

    page 0, page 1     header, then meta: the roots of two trees as of one commit; the later of the two counts
    branch             header, then the offsets of its nodes; a node has the number of the page below it, and a key
    leaf               likewise; a node has a key, and a value, the root of a further tree (a database by name), or the
                       number of the first of the pages that have the value
    overflow           header, then the value, up to the end of the last page

Pages that no tree leads to may be missing, though the meta counts them: LMDB never reads free pages. The readers of the
records check their meaning, and the order of keys.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAGIC = 0xBEEFC0DE
VERSION = 1
PAGE_BYTES = frozenset(1 << bits for bits in range(9, 17))
"""Possible sizes of a page: the size on the machine that made the file."""

# LMDB writes its structures in the layout of this machine's C compiler.
_HEADER = struct.Struct("@NHHHH")
"""Page number, padding, kind, end of the nodes' offsets, end of the free room; in overflow pages the last two
have their count.
"""
_OVERFLOW_COUNT = struct.Struct("@I")
_DATABASE = "IHHNNNNN"
"""Padding (of the first database: the size of pages), flags, depth, counts of pages and records, root."""
_META = struct.Struct(f"@IIPN{_DATABASE}{_DATABASE}NN")
"""Magic, version, address, size of the map, database of free pages, main database, last page, commit."""
_NODE = struct.Struct("@HHHH")
"""Two halves of a number, flags (in a branch: its third part), length of the key."""
_SLOT = struct.Struct("@H")
_PAGE_NUMBER = struct.Struct("@N")
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_ON_OVERFLOW_PAGES, _IS_DATABASE = 1, 2
_NO_PAGE = (1 << 8 * _PAGE_NUMBER.size) - 1
"""Root of a database without records."""


class DamagedFile(Exception):
    """The file must not be given to LMDB; the text has the reason."""


def check(path: Path) -> None:
    """Follow everything in the file. Raises `DamagedFile`, or ``OSError`` if it cannot be read.

    A file of another version of LMDB is not checked.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        first = _meta(file.fileno(), 0, size)
        second = _meta(file.fileno(), first.page_bytes, size)
        if {first.version, second.version} != {VERSION}:
            return
        if first.page_bytes != second.page_bytes:
            raise DamagedFile("its first two pages do not agree on how long a page is")
        try:
            _Pages(file.fileno(), first.page_bytes, size).follow(max(first, second, key=lambda meta: meta.commit))
        except struct.error as error:
            raise DamagedFile("the contents of a page end beyond the page") from error


class _Meta(NamedTuple):
    version: int
    page_bytes: int
    roots: tuple[int, int]
    commit: int


def _meta(fd: int, offset: int, size: int) -> _Meta:
    data = os.pread(fd, _HEADER.size + _META.size, offset)
    if len(data) < _HEADER.size + _META.size:
        raise DamagedFile(f"it is cut off: it has {size} bytes")
    _, _, kind, _, _ = _HEADER.unpack_from(data)
    magic, version, _, _, page_bytes, *databases, _, commit = _META.unpack_from(data, _HEADER.size)
    if not kind & _META_PAGE or magic != MAGIC or page_bytes not in PAGE_BYTES:
        raise DamagedFile(f"it is not an LMDB file, or was changed from byte {offset} on")
    return _Meta(version, page_bytes, (databases[6], databases[14]), commit)


class _Pages:
    """The pages of a file."""

    def __init__(self, fd: int, page_bytes: int, size: int) -> None:
        self._fd = fd
        self._page_bytes = page_bytes
        self._count = size // page_bytes
        self._size = size

    def follow(self, meta: _Meta) -> None:
        """Read all pages of a commit. Raises `DamagedFile` or `struct.error`."""
        waiting, seen = [root for root in meta.roots if root != _NO_PAGE], set[int]()
        while waiting:
            number = waiting.pop()
            if number in seen:
                raise DamagedFile(f"two ways lead to its page {number}")
            seen.add(number)
            waiting += self._below(number)

    def _read(self, number: int, kinds: int, count: int = 1) -> tuple[bytes, int, int]:
        """Return the first of `count` pages, and the kind and the end of the slots from its header."""
        if not 2 <= number <= self._count - count:
            raise DamagedFile(f"it is cut off: it has {self._size} bytes, and no page {number + count - 1}")
        page = os.pread(self._fd, self._page_bytes, number * self._page_bytes)
        found, _, kind, slots_end, _ = _HEADER.unpack_from(page)
        if found != number or not kind & kinds:
            raise DamagedFile(f"its page {number} has other contents")
        return page, kind, slots_end

    def _below(self, number: int) -> Iterator[int]:
        """Yield the pages to which a page of a tree leads, without pages of values."""
        page, kind, slots_end = self._read(number, _BRANCH | _LEAF)
        for slot in range(_HEADER.size, slots_end, _SLOT.size):
            (at,) = _SLOT.unpack_from(page, slot)
            low, high, flags, key_bytes = _NODE.unpack_from(page, at)
            if kind & _BRANCH:
                yield low | high << 16 | flags << 32
                continue
            value_bytes, value_at = low | high << 16, at + _NODE.size + key_bytes
            if flags & _ON_OVERFLOW_PAGES:
                (first,) = _PAGE_NUMBER.unpack_from(page, value_at)
                self._check_value(first, value_bytes)
            elif value_at + value_bytes > len(page):
                raise DamagedFile(f"its page {number} has a value that ends beyond the page")
            elif flags & _IS_DATABASE:
                *_, root = struct.unpack_from(f"@{_DATABASE}", page, value_at)
                if root != _NO_PAGE:
                    yield root

    def _check_value(self, number: int, value_bytes: int) -> None:
        count = (_HEADER.size + value_bytes - 1) // self._page_bytes + 1
        page, _, _ = self._read(number, _OVERFLOW, count)
        if _OVERFLOW_COUNT.unpack_from(page, _HEADER.size - _OVERFLOW_COUNT.size)[0] < count:
            raise DamagedFile(f"the value from its page {number} on has other contents")
