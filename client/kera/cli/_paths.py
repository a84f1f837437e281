"""Paths in flags and arguments: an empty path is refused, and a file only replaces a regular file.

An empty path often comes from a shell variable that is not set, and Python would take it for the current directory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from kera.cli._run import UsageError
from kera.core.base.home import expanded
from kera.core.errors import InvalidArgument


def path_of(name: str) -> Callable[[str | Path], Path]:
    """Return a parser for typer that makes a path of the flag or argument `name`; it raises `UsageError` if empty."""

    def path(text: str | Path) -> Path:
        if not str(text):
            raise UsageError(f"{name} is empty; name a path, or . for the current directory")
        return Path(text)

    return path


def expanded_path(name: str, path: Path) -> Path:
    """Return the path of the flag or argument `name`, with ``~`` replaced by a home directory. Raises `UsageError`."""
    try:
        return expanded(path)
    except InvalidArgument as error:
        raise UsageError(f"{name}: {error.message}") from error


def file_to_replace(file: Path) -> Path:
    """Return the path of the file behind symbolic links; it need not exist. Raises `UsageError` for a special file.

    Replacing would take the name away from a device such as /dev/null, or replace a link instead of its target.
    """
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise UsageError(f"cannot write {file}: it is {what}; name a file, which is replaced, or a new one")
    return Path(os.path.realpath(file))
