"""Paths as flags and arguments take them: an empty one is refused.

Python takes it for the directory that the command happens to run in, and a shell makes one of a variable that is not
set. What is at a path is looked at by whoever uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kera.cli._run import UsageError


def path_of(name: str) -> Callable[[str | Path], Path]:
    """What typer calls with the text of the flag or argument `name`. Raises `UsageError` if that is empty."""

    def path(text: str | Path) -> Path:
        if not str(text):
            raise UsageError(f"{name} is empty; name a path, or . for the current directory")
        return Path(text)

    return path
