"""The schema registry as operations on streams use it, for the columns of typed streams.

A typed stream's schema is a version of the subject ``STREAM-value``, and comes and goes with the stream. If the
registry cannot take the schema (it has no room, or the schema is too large), the stream is created nevertheless.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol


class Registration(NamedTuple):
    """The changes to write together with a stream."""

    changes: Mapping[str, bytes | None]
    apply: Callable[[], None]
    """To be called once the changes are written."""


NOTHING = Registration({}, lambda: None)


class ColumnSchemas(Protocol):
    """Compares, registers and forgets the columns of typed streams in the schema registry."""

    async def compare(self, stream: str, arrow_schema: bytes) -> object:
        """Check that a stream may have these columns; the result is for `register`.

        Raises `IncompatibleSchema`.
        """
        ...

    def register(self, stream: str, arrow_schema: bytes, compared: object) -> Registration:
        """Prepare the next version; `State.changing` is held. Raises `Unavailable` if the subject has changed since."""
        ...

    def forget(self, stream: str) -> Registration:
        """Prepare what the deletion of the stream changes; `State.changing` is held."""
        ...
