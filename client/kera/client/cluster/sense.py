"""Handles invalid answers: they lack requested items, or name items that do not exist.

Code that processes such an answer fails with an error of Python. For callers this is a fault of the peer that answered,
not of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kera.core.errors import ProtocolError


@contextlib.contextmanager
def making_sense() -> Iterator[None]:
    """Process answers: turn `LookupError` and `ValueError` into `ProtocolError`."""
    try:
        yield
    except (LookupError, ValueError) as error:
        raise ProtocolError(f"invalid answer: {error!r}; is the peer newer?") from error
