"""Paths in flags and arguments: an empty path is refused, and a file only replaces a regular file.

An empty path often comes from a shell variable that is not set, and Python would take it for the current directory.
`written_for_owner` writes every file that has secrets, or that a command must not leave half written.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from kera.cli._run import UsageError
from kera.core.base.blocks import sync_directory
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


@contextlib.contextmanager
def written_for_owner(target: Path) -> Iterator[IO[bytes]]:
    """Context manager that yields a new file, which replaces `target` durably when the block ends without an error.

    Only its owner can read the new file. It has a name of its own, so that processes that write the same target at the
    same time do not mix their data, and it is removed if the block raises. Raises `OSError`.
    """
    descriptor, name = tempfile.mkstemp(prefix=".kera-", dir=target.parent)  # mode 0600
    new = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as written:
            yield written
            written.flush()
            os.fsync(written.fileno())
        new.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    sync_directory(target.parent)
