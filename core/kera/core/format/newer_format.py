"""Undamaged chunks of a format version that this program does not know, because a newer program has written them.

They can be told from damaged chunks because all versions have the version and the header's checksum in the same place.
"""

from __future__ import annotations

from kera.core.errors import CorruptChunk, StartError
from kera.core.format.chunk import LEAN_VERSION


def unknown_version(error: CorruptChunk) -> int:
    """Return the version of a header that `verify_header` refuses only for its version; 0: another error."""
    return int(error.attributes.get("version", 0))


def refuse_unknown_version(path: str, version: int) -> None:
    """Raise `StartError` if chunks of the unknown `version` were found in `path` (0: there were none).

    A daemon that started anyway would take them for damage, and cut them off.
    """
    if version:
        raise StartError(
            f"{path} was written by a newer program: it has chunks of format version {version}, this program knows"
            f" {LEAN_VERSION} and older ones; start the newer one",
            path=path,
            version=version,
        )
