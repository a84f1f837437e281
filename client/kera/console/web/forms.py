"""A form that is shown again, with the user's input and the error of each field. Pure."""

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
        """`sent`: the user's input, instead of `defaults`; fields that were not sent are then empty."""
        self.values = {name: default if sent is None else sent.raw(name) for name, default in defaults.items()}
        self.errors: dict[str, str] = {}
        """The errors by the names of fields."""
        self.problem: Problem | None = None
        """The problem with the form as a whole."""

    def read(self, name: str, parse: Callable[[], T]) -> T | None:
        """Return the result of `parse` for a field; None if it raises `InvalidArgument`, which is the field's error."""
        try:
            return parse()
        except InvalidArgument as error:
            self.errors.setdefault(name, error.message)
            return None

    @property
    def is_wrong(self) -> bool:
        """Whether the user has to correct the form."""
        return bool(self.errors) or self.problem is not None
