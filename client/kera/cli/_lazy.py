"""Commands whose flags are the fields of a settings class, imported at their first use.

`kera --help` needs only the name and the help line of each command. The function and the parameters of a command are
loaded when it is run, when its own help is shown, or when a shell completes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import typer
import typer.core

from kera.cli._commands import Commands


def add_lazy_command(app: typer.Typer, name: str, text: str, load: Callable[[], Callable[..., int]]) -> None:
    """Add a command to `app`; `load` returns the function that typer makes the command of. `text` is its help."""
    app.command(name, help=text, cls=_command_class(load))(_placeholder)


def _placeholder() -> None:
    """Stands for the function until that is loaded."""


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
            pass  # the placeholder has none

        @property
        def callback(self) -> Any:
            return self._loaded.callback

        @callback.setter
        def callback(self, value: Any) -> None:
            pass  # the placeholder

        def invoke(self, ctx: Any) -> Any:
            return self._loaded.invoke(ctx)

    return LazyCommand
