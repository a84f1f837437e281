"""A directory that belongs to one daemon, which locks it while it runs; no other daemon shares any part of it.

The files that a daemon leaves in its directory show which kind of daemon has started there (`others_in`); the lock
shows whether a daemon runs. Directories of daemons must not be nested either: removing or moving the outer one would
take the inner one along, and disk space would be counted twice. The daemon that starts second is refused (`take`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path

from kera.core.errors import PathNotWritable, StartError

LOCK_NAME = "lock"
REPLICAS_NAME = "replicas.log"
"""The only file in each of a backup's ``--log-dirs``; the backup locks it."""
TRACES = {
    "coordinator": ("metadata/data.mdb", "metadata.damaged"),
    "broker": ("broker.json", "broker.copy.json", "log/index", "log/segments"),
    "backup": ("backup.json", "backup.copy.json", f"log/{REPLICAS_NAME}", REPLICAS_NAME),
}
"""Files that exist in a directory once a daemon of a kind has started there."""
LOG_TRACES = {"broker": ("index", "segments"), "backup": (REPLICAS_NAME,)}
"""The same for a directory that contains only a log."""
DATA = {"log", "metadata"}
"""Directories of a daemon that have too many files to search them for directories of other daemons."""
LOOKED_AT_MAX = 1_000
"""How many directories below its own a daemon searches, the nearest first; the bound keeps its start short."""


def others_in(path: Path, role: str = "") -> str:
    """Return which kind of daemon other than `role` has files in a directory, in words; empty: none has.

    Two daemons that already share a directory go on sharing it.
    """
    # If a file cannot be looked at, its next use reports why.
    found = [kind for kind, names in TRACES.items() if any(os.access(path / name, os.F_OK) for name in names)]
    if not found or role in found:
        return ""
    (kind, *_) = found
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        return f"{kind} {int(json.loads((path / f'{kind}.json').read_bytes())[f'{kind}_id'])}"
    return f"a {kind}"


def _refuse_log_of_others(path: Path, role: str) -> None:
    """Raise `StartError` if a log belongs to another kind of daemon, and has no files of this kind.

    The daemon would begin with an empty log there, and report everything in its own log as lost.
    """
    found = [kind for kind, names in LOG_TRACES.items() if any(os.access(path / name, os.F_OK) for name in names)]
    if found and role in LOG_TRACES and role not in found:
        raise StartError(
            f"{path} has the log of a {found[0]}, and a {role} needs its own: files of two data directories were mixed"
            " up; put each back in its place",
            path=str(path),
        )


def lock_id(path: Path) -> str:
    """Return the identity of a directory's lock file (device and inode); empty: no daemon has started there.

    Only this user can open that file. So a daemon that holds the lock knows that no other running daemon has recorded
    the same id, by whatever paths the two refer to their directories.
    """
    try:
        status = (path / LOCK_NAME).lstat()
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"


def take(path: Path, role: str, *, besides: Collection[Path] = (), in_use: type[StartError] = StartError) -> int:
    """Create the directory, if need be, and lock it; return a descriptor that holds the lock until it is closed.

    `besides`: other directories of the same daemon, which may lie in each other and in this one, and are not locked.

    Raises `PathNotWritable`; `in_use` if another process has the lock; `StartError` if another kind of daemon has files
    there, or if one of the directories lies in another daemon's directory or contains one.
    """
    directories = {_real(each): "--log-dirs" for each in besides} | {_real(path): "--data-dir"}
    own = {*directories, _real(path) / "log"}
    for each, flag in directories.items():  # before anything is created in a directory of another daemon
        _refuse_around(each, own, flag)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise PathNotWritable(
            f"cannot write data directory {path}: {error.strerror}; choose another --data-dir", path=str(path)
        ) from error
    try:
        _lock(path, lock, role, in_use)
        if others := others_in(path, role):
            raise StartError(
                f"{path} has the data of {others}, and a {role} needs a directory of its own;"
                " choose another --data-dir",
                path=str(path),
            )
        if not besides:  # otherwise the replicas of a backup are in those, and not here
            _refuse_log_of_others(path / "log", role)
        # Once more: of two daemons that start at the same time, at least one has its lock by now.
        for each, flag in directories.items():
            _refuse_around(each, own, flag)
            _refuse_below(each, own, flag)
            _refuse_log_of_others(each, role)
            if each != _real(path) and (user := _user_of(each) or others_in(each, role)):
                raise StartError(
                    f"{each} belongs to {user}, and a {role} needs its own; choose another {flag}", path=str(each)
                )
    except BaseException:
        os.close(lock)
        raise
    return lock


def _lock(path: Path, lock: int, role: str, in_use: type[StartError]) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(lock)
        who = f"{'another' if holder.startswith(f'{role} ') else 'a'} {holder}" if holder else "another process"
        raise in_use(f"{who} uses data directory {path}; choose another --data-dir", path=str(path)) from error
    with contextlib.suppress(OSError):  # only messages use it; a full disk is reported where it matters
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{role} {os.getpid()}\n".encode(), 0)


def _holder(lock: int) -> str:
    """Return the holder of a lock, as written in its file: ``broker (process 7)``; empty: unknown."""
    with contextlib.suppress(OSError, ValueError):
        role, _, process = os.pread(lock, 40, 0).decode("ascii").strip().rpartition(" ")
        # If that process does not exist, it was killed, and another process holds the lock.
        if role in TRACES and process.isdecimal() and Path("/proc", process).exists():
            return f"{role} (process {process})"
    return ""


def _real(path: Path) -> Path:
    """Return `path` with its symbolic links resolved, as far as possible."""
    return Path(os.path.realpath(path))


# -- nested directories ------------------------------------------------------------------------------------------------


def _refuse_around(path: Path, own: Collection[Path], flag: str) -> None:
    """Raise `StartError` if `path` lies in another daemon's directory; `own`: the directories of this daemon."""
    for outer in path.parents:
        if outer not in own and (user := _user_of(outer) or _owner_of(outer)):
            raise _nested(path, outer, user, flag, f"{path} lies in it")


def _refuse_below(path: Path, own: Collection[Path], flag: str) -> None:
    """Raise `StartError` if another daemon's directory lies in `path`.

    A directory that no process uses counts only if no daemon has started in `path` yet. Later it may be a copy that an
    operator has put there, which is no reason not to start: a daemon that is started on the copy is refused instead.
    """
    is_new = not others_in(path)
    for inner in _below(path):
        if inner not in own and (user := _user_of(inner) or (_owner_of(inner) if is_new else "")):
            raise _nested(path, inner, user, flag, f"it lies in {path}")


def _nested(here: Path, other: Path, user: str, flag: str, how: str) -> StartError:
    return StartError(
        f"{other} belongs to {user}, and {how}: directories of daemons must not lie in each other;"
        f" choose another {flag}",
        path=str(here),
        other=str(other),
    )


def _below(path: Path) -> Iterator[Path]:
    """Yield the directories below `path`, the nearest first, but none inside the data of a daemon."""
    waiting, left = deque([path]), LOOKED_AT_MAX
    while waiting and left:
        left -= 1
        here = waiting.popleft()
        found = []
        with contextlib.suppress(OSError), os.scandir(here) as entries:
            found = sorted(Path(each) for each in entries if each.is_dir(follow_symlinks=False))
        yield from found
        waiting += (each for each in found if not (each.name in DATA and _owner_of(here)))


def _owner_of(path: Path) -> str:
    """Return the owner of the data in a directory, in words; empty: none.

    Other programs, too, have directories called ``log`` and ``metadata``, so only a directory with a lock file counts.
    A directory that has replicas but no lock file has no owner: a backup may have used it before.
    """
    return others_in(path) if os.access(path / LOCK_NAME, os.F_OK) else ""


def _user_of(path: Path) -> str:
    """Return which process uses a directory, in words; empty: none, as far as can be seen."""
    for name in (LOCK_NAME, REPLICAS_NAME):
        with contextlib.suppress(OSError):
            lock = os.open(path / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if not _is_held(lock):
                    continue
                if name == REPLICAS_NAME:
                    return "a backup"
                if holder := _holder(lock):
                    return f"a {holder}"
            finally:
                os.close(lock)
    return ""


def _is_held(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False
