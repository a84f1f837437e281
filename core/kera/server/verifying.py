"""Common to the checks of data directories: findings, the directory's owner, and a test that nothing uses it.

What there is to check of a broker and of a backup is in ``kera.broker.verify`` and ``kera.backup.verify``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kera.core.base.own_directory import LOCK_NAME
from kera.core.data_dir import MemberIdentity
from kera.core.errors import StartError


@dataclass(frozen=True, slots=True)
class Defect:
    """One thing that is not as it should be."""

    severity: Literal["damage", "warning"]
    """damage: something that was written is gone. warning: odd, and nothing is lost by it."""
    path: Path
    """File it is about."""
    offset: int | None
    """Where in the file it starts, in bytes; None: the file as a whole."""
    length_bytes: int
    """How much of the file it is about; 0 when that is not known."""
    text: str


@contextlib.contextmanager
def unused(data_dir: Path) -> Iterator[bool]:
    """Whether no daemon uses `data_dir`; if so, none can start as long as the context lasts. Raises `StartError`."""
    try:
        lock = os.open(data_dir / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    except OSError as error:
        raise StartError(f"cannot read {data_dir / LOCK_NAME}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        free = True
    except OSError:
        free = False
    try:
        yield free
    finally:
        os.close(lock)


def check_identity(data_dir: Path, kind: type[MemberIdentity]) -> Iterator[Defect]:
    """Whether both files say who the daemon is. Raises `StartError` when a newer version has written them."""
    identities: dict[Path, MemberIdentity | None] = {}
    for name in kind.names():
        path = data_dir / name
        try:
            identities[path] = kind.read(path)
        except (OSError, ValueError) as error:
            yield Defect("damage", path, None, 0, str(error))
    if list(identities.values()) == [None, None]:
        text = f"is missing: a {kind.role} would join as a new one, to which none of this belongs"
        yield Defect("warning", data_dir / kind.names()[0], None, 0, text)
        return
    formats = {identity.format for identity in identities.values() if identity is not None} or kind.formats
    for path, identity in identities.items():
        if identity is None and 1 not in formats:  # the one of format 1 had no copy
            yield Defect("warning", path, None, 0, "is missing; the next start rewrites it")
