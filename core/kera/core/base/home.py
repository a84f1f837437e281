"""Home directories in paths that people write: ``~`` is one's own, ``~name`` that of another user.

A shell puts them in only where a word begins with them, so ``--data-dir=~/kera`` and what is in a settings file come
as they were written.
"""

from __future__ import annotations

from pathlib import Path

from kera.core.errors import InvalidArgument


def expanded(path: Path) -> Path:
    """The path with the home directory in it that it begins with, if it does. Raises `InvalidArgument`.

    Who calls adds which setting or flag the path is from.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:  # all that pathlib says is that it could not determine a home directory
        user = path.parts[0][1:]
        reason = f"no user {user} with a home directory is known" if user else "this user has no home directory"
        raise InvalidArgument(f"{path} cannot be used: {reason}", path=str(path)) from error
