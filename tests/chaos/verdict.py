"""The error of a chaos test that reports a broken promise, and the errors in groups of exceptions."""

from __future__ import annotations

from collections.abc import Iterator


class Wrong(AssertionError):
    """A promise was broken."""


def leaves(group: BaseExceptionGroup[Exception]) -> Iterator[Exception]:
    """The errors in a group, and in its nested groups."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
