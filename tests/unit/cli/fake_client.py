"""A client for commands that does not connect: a test sets its answers, and it notes each request."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

from kera.cli._client import connecting_by


class FakeClient:
    """A client, and each of its parts, such as `admin`.

    An answer is a value, an error to raise, a function of the request, or an iterator of answers.
    """

    def __init__(self, **looks: Any) -> None:
        """`looks`: answers, by method, to requests that are not noted."""
        self.admin = self.access = self.latency = self.schemas = self
        self.looks = looks
        self.answers: dict[str, Any] = {}
        """By method; `asked` notes these requests."""
        self.in_turn: list[Any] = []
        """Answers to the requests of methods without an answer in `answers`, in order."""
        self.asked: list[tuple[Any, ...]] = []
        """Requests: the method, the positional arguments, and then the named ones, if any."""
        self.options: dict[str, Any] = {}
        """The options of the last connection."""

    def __getattr__(self, name: str) -> Any:
        async def answer(*arguments: Any, **named: Any) -> Any:
            if name in self.looks:
                found = self.looks[name]
            else:
                found = self.answers[name] if name in self.answers else self.in_turn.pop(0)
                if not isinstance(found, Exception):
                    self.asked.append((name, *arguments, *([named] if named else [])))
            if isinstance(found, Iterator):
                found = next(found)
            if isinstance(found, Exception):
                raise found
            return found(*arguments, **named) if callable(found) else found

        return answer

    @contextlib.contextmanager
    def answering(self, error: Exception | None = None) -> Iterator[Self]:
        """Give commands this client, or have their connections fail with `error`."""

        @contextlib.asynccontextmanager
        async def connected(_: str, **options: Any) -> AsyncIterator[Self]:
            if error is not None:
                raise error
            self.options = options
            yield self

        with connecting_by(connected):
            yield self
