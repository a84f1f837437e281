"""Errors of a copy besides those of its streams."""

from __future__ import annotations

from kera.core.errors import InvalidArgument, KeraError


class CopyMismatch(InvalidArgument):
    """A copy of this name has another source, another target, or a stored state that cannot be read."""


class CopyElsewhere(KeraError):
    """Another process runs the same copy. This process ends, and has written only what the other one writes, too."""


class SourceChanged(KeraError):
    """The source no longer has the rows, as they were, that were being copied when the copy ended."""


class RecordsGone(KeraError):
    """The source has removed records before they were copied."""


class Refused(KeraError):
    """The other system refuses a request; the message has that system's own text, with the context."""


class Unreachable(KeraError):
    """The other system does not answer."""

    retriable = True


class Untranslatable(KeraError):
    """An offset of Kafka has no known place in the stream; the message says why, and the way out."""


class NotCopied(KeraError):
    """The copy has not yet reached an offset."""
