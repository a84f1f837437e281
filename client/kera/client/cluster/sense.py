"""Handles invalid answers: they lack requested items, or name items that do not exist.

Code that processes such an answer fails with an error of Python. For callers this is a fault of the peer that answered,
not of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kera.core.base.ids import Position
from kera.core.errors import DataLost, ProtocolError


@contextlib.contextmanager
def making_sense() -> Iterator[None]:
    """Process answers: turn `LookupError` and `ValueError` into `ProtocolError`."""
    try:
        yield
    except (LookupError, ValueError) as error:
        raise ProtocolError(f"invalid answer: {error!r}; is the peer newer?") from error


def available_from(error: DataLost, default: Position | None = None) -> Position:
    """Return where an entry goes on behind removed records, or the `default` if the broker does not say.

    Raises `ProtocolError` for an invalid position, or for none without a default.
    """
    match error.attributes.get("available_from", default):
        case [int(group_id), int(segment_id), int(offset)]:
            return Position(group_id, segment_id, offset)
    raise ProtocolError(f"a broker does not report the start of an entry: {error.message}")
