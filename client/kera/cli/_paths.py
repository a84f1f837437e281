"""Paths as flags and arguments take them: an empty one is refused, and what is not a file is not replaced by one.

Python takes an empty path for the directory that the command happens to run in, and a shell makes one of a variable
that is not set.
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
    """A function that typer calls with the text of the flag or argument `name`. Raises `UsageError` if that is
    empty.
    """

    def path(text: str | Path) -> Path:
        if not str(text):
            raise UsageError(f"{name} is empty; name a path, or . for the current directory")
        return Path(text)

    return path


def expanded_path(name: str, path: Path) -> Path:
    """The path of the flag or argument `name`, with a home directory for ``~``. Raises `UsageError`."""
    try:
        return expanded(path)
    except InvalidArgument as error:
        raise UsageError(f"{name}: {error.message}") from error


def file_to_replace(file: Path) -> Path:
    """Where the file is, or would be, behind symbolic links. Raises `UsageError` if it is not a regular file.

    Replacing takes the name away from whatever has it: from /dev/null, too, and from a link, which would stay as it is.
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
