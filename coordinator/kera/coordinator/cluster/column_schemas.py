"""The registry of schemas for operations on streams: it has the columns of typed streams, too.

A typed stream's schema is a version of the subject ``STREAM-value``, and comes and goes with the stream. Where the
registry cannot have it (there is no room, or it is too large), the stream is made all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol


class Registration(NamedTuple):
    """The changes to write together with a stream."""

    changes: Mapping[str, bytes | None]
    apply: Callable[[], None]
    """Once it is written."""


NOTHING = Registration({}, lambda: None)


class ColumnSchemas(Protocol):
    """Compares, registers and forgets the columns of typed streams in the schema registry."""

    async def compare(self, stream: str, arrow_schema: bytes) -> object:
        """Look whether a stream may have these columns; what is returned is for `register`.

        Raises `IncompatibleSchema`.
        """
        ...

    def register(self, stream: str, arrow_schema: bytes, compared: object) -> Registration:
        """The next version; `State.changing` is held. Raises `Unavailable` if others have changed the subject since."""
        ...

    def forget(self, stream: str) -> Registration:
        """The stream is deleted; likewise."""
        ...
