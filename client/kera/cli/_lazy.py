"""Commands whose flags are the fields of a settings class, imported at their first use.

`kera --help` shows a line per command and needs no more than its name; what the command itself takes and does
is looked at only when it is run, asked for its help, or completed by a shell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer
import typer.core

from kera.cli._commands import Commands


def add_lazy_command(app: typer.Typer, name: str, text: str, load: Callable[[], Callable[..., int]]) -> None:
    """Add a command to `app`; `load` gives the function that typer would make it of. `text` is its help."""
    app.command(name, help=text, cls=_command_class(load))(_placeholder)


def _placeholder() -> None:
    """Stands for the function until it is looked at."""


def _command_class(load: Callable[[], Callable[..., int]]) -> type[typer.core.TyperCommand]:
    class LazyCommand(typer.core.TyperCommand):
        @functools.cached_property
        def _loaded(self) -> Any:
            app = Commands(add_completion=False)
            app.command()(load())
            return typer.main.get_command(app)

        @property
        def params(self) -> Any:
            return self._loaded.params

        @params.setter
        def params(self, value: Any) -> None:
            pass  # the placeholder's: none

        @property
        def callback(self) -> Any:
            return self._loaded.callback

        @callback.setter
        def callback(self, value: Any) -> None:
            pass  # the placeholder

        def invoke(self, ctx: Any) -> Any:
            return self._loaded.invoke(ctx)

    return LazyCommand
