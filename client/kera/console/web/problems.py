"""Turns errors into pages: status, title, and advice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from kera.core.errors import (
    AuthenticationFailed,
    DataLost,
    InvalidArgument,
    InvalidCursor,
    KeraError,
    NotAllowed,
    QuotaExceeded,
    RecordTooLarge,
    SchemaMismatch,
    StreamExists,
    StreamletOutOfRange,
    Uncertain,
    UnknownGroup,
    UnknownSchema,
    UnknownStream,
    UnknownSubject,
    UnknownUser,
    UserExists,
)


class Problem(NamedTuple):
    """An error page: its status, its title and the way out."""

    status: int
    title: str
    text: str
    advice: str = ""


class Refused(KeraError):
    """A request that the console itself refuses, with an HTTP status."""

    code = "console_refused"

    def __init__(self, status: int, title: str, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.problem = Problem(status, title, message, advice)


_STATUS: tuple[tuple[type[KeraError] | tuple[type[KeraError], ...], int, str], ...] = (
    ((UnknownStream, UnknownUser, UnknownGroup, UnknownSubject, UnknownSchema), 404, "Not found"),
    ((StreamExists, UserExists), 409, "It exists already"),
    (QuotaExceeded, 429, "The quota does not allow this"),
    (DataLost, 410, "Records are no longer there"),
    (
        (InvalidArgument, InvalidCursor, StreamletOutOfRange, SchemaMismatch, RecordTooLarge),
        400,
        "Invalid request",
    ),
)
"""Status and title by kind of error; the first that fits counts."""


def problem_of(error: KeraError, *, changes: bool = False) -> Problem:  # noqa: PLR0911 - a kind of error each
    """Return the page for an error of the cluster or the console; `changes`: the request was for a change."""
    if isinstance(error, Refused):
        return error.problem
    if isinstance(error, NotAllowed):
        return Problem(403, "You may not do this", error.message, _missing(error))
    if isinstance(error, AuthenticationFailed):
        return Problem(401, "Not signed in", error.message, "Sign in.")
    for kinds, status, title in _STATUS:
        if isinstance(error, kinds):
            return Problem(status, title, error.message)
    if changes and isinstance(error, Uncertain):
        return Problem(503, "The outcome is unknown", error.message, "Check whether it was done before you repeat it.")
    if error.retriable or isinstance(error, Uncertain):
        return Problem(503, "The cluster does not answer", error.message, "Try again in a moment.")
    return Problem(502, "The cluster refused this", error.message)


def _missing(error: NotAllowed) -> str:
    """Return advice on the missing right; empty: it is not known."""
    operation, resource = error.attributes.get("operation"), error.attributes.get("resource")
    if not operation or not resource:
        return ""
    return f"Missing right: {operation} on {resource}."


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Limit the time within this context; raise `Refused` after `seconds`, because the cluster does not answer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Refused(*too_slow(seconds)) from None


def too_slow(seconds: float) -> Problem:
    """Return the problem of a page that was not made in time."""
    return Problem(503, "The cluster does not answer", f"No answer within {seconds:.0f} s.", "Try again in a moment.")
