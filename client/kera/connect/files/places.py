"""Which files a copy reads, and where in them it is: decided from names and sizes alone.

Files are copied in the order of their names. A place is ``[number, name, at, size, before, mark]``:

    number, before   so many files are done, and so many bytes they had together
    name, size       the file that follows them, and its bytes when it was read
    at               what is before it in that file is done: rows of Parquet, bytes of text
    mark             tells whether the file is still the one that was read, see `text`

When the copy goes on, the files before have to be as many as they were, with as many bytes, and that one has to be
there: then nothing that was added since is passed over without an error. Files of text may have grown, as logs do.

Places of earlier versions end behind `size`, and count rows of CSV.
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
    """None: the place is one of an earlier version."""
    mark: str = ""

    @classmethod
    def of(cls, place: Place) -> Spot:
        """From its JSON."""
        return cls(*place)

    def place(self) -> list[object]:
        """As JSON."""
        return list(self)


def find_files(end: FilesEnd) -> list[str]:
    """The files that an address means, in order. Raises `Refused` when there are none."""
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
    """See that the files up to `spot` are those that were copied. Raises `SourceChanged`."""
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
