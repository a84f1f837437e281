"""A group of commands, which adds options: ``--json`` beside ``--output``, and ``--context`` beside ``--bootstrap``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import typer
import typer.core

from kera.cli._client import CONTEXT_OPTION, in_context
from kera.cli._output import JSON_OPTION
from kera.cli._run import run_async

F = TypeVar("F", bound=Callable[..., Any])


class Command(typer.core.TyperCommand):
    """A command with the options that accompany its own, see `_BESIDE`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for name, beside in _BESIDE.items():
            for place in [place for place, each in enumerate(self.params) if each.name == name]:
                self.params[place + 1 : place + 1] = _params_of(beside)

    def invoke(self, ctx: Any) -> Any:
        """Run the command in the context that was chosen."""
        with in_context(ctx):
            return super().invoke(ctx)


class Commands(typer.Typer):
    """A group whose commands are of class `Command` by default."""

    def command(
        self, name: str | None = None, *, cls: type[typer.core.TyperCommand] | None = Command, **options: Any
    ) -> Callable[[F], F]:
        """Add a command as typer does; an asynchronous function runs in an event loop."""
        register = super().command(name, cls=cls, **options)

        def add(function: F) -> F:
            register(_in_event_loop(function) if inspect.iscoroutinefunction(function) else function)
            return function

        return add


def _in_event_loop(function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(**options: Any) -> Any:
        return run_async(function(**options))

    return run


def _json(as_json: bool = JSON_OPTION) -> None:
    del as_json


def _context(context: str | None = CONTEXT_OPTION) -> None:
    del context


_BESIDE: dict[str, Callable[..., None]] = {"output": _json, "bootstrap": _context}
"""Maps a parameter of a command to a function whose parameters are added behind it."""


def _params_of(function: Callable[..., None]) -> list[Any]:
    """Return typer's parameters for those of the function."""
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return list(typer.main.get_command(app).params)
