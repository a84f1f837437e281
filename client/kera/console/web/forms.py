"""A form that is shown again: what was typed into it, and what is wrong with each field. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from kera.console.web.parameters import Parameters
from kera.console.web.problems import Problem
from kera.core.errors import InvalidArgument

T = TypeVar("T")


class Form:
    """A submitted form with its values and the error of each field. Templates read `values`, `errors` and `problem`."""

    def __init__(self, defaults: Mapping[str, str], sent: Parameters | None = None) -> None:
        """`sent`: what somebody typed, in place of `defaults`; fields that were not sent are empty then."""
        self.values = {name: default if sent is None else sent.raw(name) for name, default in defaults.items()}
        self.errors: dict[str, str] = {}
        """By the name of the field."""
        self.problem: Problem | None = None
        """The problem with the form as a whole."""

    def read(self, name: str, parse: Callable[[], T]) -> T | None:
        """The result of `parse` for a field; None if that raises `InvalidArgument`, which is kept beside the field."""
        try:
            return parse()
        except InvalidArgument as error:
            self.errors.setdefault(name, error.message)
            return None

    @property
    def is_wrong(self) -> bool:
        """Whether something has to be corrected."""
        return bool(self.errors) or self.problem is not None
