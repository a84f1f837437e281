"""Errors of a copy besides those of its streams."""

from __future__ import annotations

from kera.core.errors import InvalidArgument, KeraError


class CopyMismatch(InvalidArgument):
    """A copy of this name has another source, another target, or is kept in a form that is not known here."""


class CopyElsewhere(KeraError):
    """Another process runs the same copy: this one ends, and has written nothing that the other one has not."""


class SourceChanged(KeraError):
    """Rows that were being copied when the copy ended are not in the source any more as they were then."""


class RecordsGone(KeraError):
    """The source has removed records before they were copied."""


class Refused(KeraError):
    """The other system does not do what is asked of it; the message is its own, with what it is about."""


class Unreachable(KeraError):
    """The other system does not answer."""

    retriable = True


class Untranslatable(KeraError):
    """An offset of Kafka has no known place in the stream; the message says why, and the way out."""


class NotCopied(KeraError):
    """The copy has not come as far as an offset yet."""
