"""Home directories in paths that people write: ``~`` is that of this user, ``~name`` that of another user.

A shell expands ``~`` only at the start of a word, so ``--data-dir=~/kera`` and paths in a settings file arrive
unexpanded.
"""

from __future__ import annotations

from pathlib import Path

from kera.core.errors import InvalidArgument


def expanded(path: Path) -> Path:
    """Return `path` with a leading ``~`` or ``~name`` expanded. Raises `InvalidArgument` if there is no such home.

    The caller adds to the error which setting or flag the path is from.
    """
    try:
        return path.expanduser()
    except RuntimeError as error:  # pathlib only says that it could not determine a home directory
        user = path.parts[0][1:]
        reason = f"no user {user} with a home directory is known" if user else "this user has no home directory"
        raise InvalidArgument(f"{path} cannot be used: {reason}", path=str(path)) from error
