"""Determines the files that a copy reads, and its place in them, from names and sizes alone.

Files are copied in the order of their names. A place is ``[number, name, at, size, before, mark]``:

    number, before   the number of files that are done, and their total size in bytes
    name, size       the next file, and its size in bytes when it was read
    at               how much of that file is done: in rows of Parquet, or in bytes of text
    mark             shows whether the file is still the same, see `text`

When the copy continues, the number and the total size of the files before must be the same, and the next file must
exist: so rows that were added since are never skipped without an error. Text files may have grown, as logs do.

Places of earlier versions end after `size`, and count rows of CSV.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kera.connect.endpoints import CODECS, FORMATS, FilesEnd
from kera.connect.errors import Refused, SourceChanged
from kera.connect.pieces import Place


class Spot(NamedTuple):
    """A place in files."""

    number: int
    name: str
    at: int
    size: int
    before: int | None = None
    """None: the place comes from an earlier version."""
    mark: str = ""

    @classmethod
    def of(cls, place: Place) -> Spot:
        """Parse a place from its JSON."""
        return cls(*place)

    def place(self) -> list[object]:
        """Return the place as JSON."""
        return list(self)


def find_files(end: FilesEnd) -> list[str]:
    """Return the files of an address, in order. Raises `Refused` if there are none."""
    if end.path.endswith("/") and not any(sign in end.path for sign in "*?["):
        endings = {ending for ending, kind in FORMATS.items() if kind == end.format}
        if not os.path.isdir(end.path):  # noqa: PTH112 - its last sign counts
            raise Refused(f"there is no directory {end.path}")
        found = [str(each) for each in Path(end.path).iterdir() if _counts(each, endings)]
    elif end.many:
        found = [name for name in glob.glob(end.path, recursive=True) if Path(name).is_file()]  # noqa: PTH207 - the pattern is absolute or not
    else:
        if Path(end.path).is_dir():
            raise Refused(f"{end.path} is a directory; write {end.path}/ for the files in it")
        found = [end.path] if Path(end.path).exists() else []
    if not found:
        raise Refused(f"there is no file {end.path}")
    return sorted(found)


def _counts(path: Path, endings: set[str]) -> bool:
    name = path.name
    for ending in CODECS:
        name = name.removesuffix(ending)
    return path.is_file() and not name.startswith((".", "_")) and any(name.endswith(ending) for ending in endings)


def check_order(files: Sequence[str], sizes: Sequence[int], spot: Spot) -> None:
    """Check that the files up to `spot` are those that were copied. Raises `SourceChanged`."""
    if spot.number >= len(files) or files[spot.number] != spot.name:
        there = files.index(spot.name) if spot.name in files else None
        if there is None:
            raise SourceChanged(f"{spot.name} is gone, the last file that was copied; restore it, or start a new copy")
        raise SourceChanged(
            f"before {spot.name}, the last file that was copied, there were {spot.number} others, and now there are"
            f" {there}: files are copied in the order of their names, so later ones need later names"
        )
    before = sum(sizes[: spot.number])
    if spot.before not in (None, before):
        raise SourceChanged(
            f"the files before {spot.name} had {spot.before} bytes when they were copied, and have {before} now: a"
            " file is not read again once a later one has been begun. Restore them, or put the added rows into a"
            " file with a later name"
        )
