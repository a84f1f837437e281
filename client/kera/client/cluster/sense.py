"""Answers that make no sense: those that lack what was asked for, or name what there is not.

Whoever looks into an answer finds that out as Python tells it. For those who asked it is an error of who has answered,
and not of theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from kera.core.errors import ProtocolError


@contextlib.contextmanager
def making_sense() -> Iterator[None]:
    """Look into answers: one that makes no sense is a `ProtocolError`."""
    try:
        yield
    except (LookupError, ValueError) as error:
        raise ProtocolError(f"invalid answer: {error!r}; is the peer newer?") from error
