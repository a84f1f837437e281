"""The common part of the checks of data directories: findings, identities, and whether a daemon uses a directory.

The checks of brokers and backups are in ``kera.broker.verify`` and ``kera.backup.verify``.
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
    """A finding of a check."""

    severity: Literal["damage", "warning"]
    """damage: written data are lost. warning: unexpected, but no data are lost."""
    path: Path
    """The file with the defect."""
    offset: int | None
    """The offset of the defect in the file, in bytes; None: the file as a whole."""
    length_bytes: int
    """The length of the defect; 0: unknown."""
    text: str


@contextlib.contextmanager
def unused(data_dir: Path) -> Iterator[bool]:
    """Return whether no daemon uses `data_dir`; if so, none can start until the context ends. Raises `StartError`."""
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
    """Check both files with the daemon's identity. Raises `StartError` if a newer version has written them."""
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
        if identity is None and 1 not in formats:  # a file of format 1 had no copy
            yield Defect("warning", path, None, 0, "is missing; the next start rewrites it")
