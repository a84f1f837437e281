"""Chunks of a version that this program does not know, which a newer one has written: whole, and no damage.

A version is told from damage because all versions have it, and the checksum of the header, in the same place.
"""

from __future__ import annotations

from kera.core.errors import CorruptChunk, StartError
from kera.core.format.chunk import LEAN_VERSION


def unknown_version(error: CorruptChunk) -> int:
    """The version of a header that `verify_header` refuses for nothing but that; 0: it is damaged, or none."""
    return int(error.attributes.get("version", 0))


def refuse_unknown_version(path: str, version: int) -> None:
    """Raise `StartError` if chunks of a version that is not known were found there (0: there were none).

    Whoever went on would take them for damage, and cut them off.
    """
    if version:
        raise StartError(
            f"{path} was written by a newer program: it has chunks of format version {version}, this program knows"
            f" {LEAN_VERSION} and older ones; start the newer one",
            path=path,
            version=version,
        )
