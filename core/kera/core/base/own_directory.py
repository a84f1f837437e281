"""A directory that belongs to one daemon: locked while that runs, and no other daemon's, not even in part.

What a directory has in it once a daemon has started there says which kind of daemon that was (`others_in`); the lock
says whether one runs. Daemons' directories do not lie in each other either: who removes or moves one would take the
other along, and their disks would be counted twice. Whoever starts second is refused (`take`).
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
"""In each of a backup's ``--log-dirs``, which have no other file, and which it locks."""
TRACES = {
    "coordinator": ("metadata/data.mdb", "metadata.damaged"),
    "broker": ("broker.json", "broker.copy.json", "log/index", "log/segments"),
    "backup": ("backup.json", "backup.copy.json", f"log/{REPLICAS_NAME}", REPLICAS_NAME),
}
"""Files that exist in a directory once a daemon of a kind has started there."""
LOG_TRACES = {"broker": ("index", "segments"), "backup": (REPLICAS_NAME,)}
"""The same for a directory that only has a log."""
DATA = {"log", "metadata"}
"""Directories in which a daemon has so many files that nobody looks for others there."""
LOOKED_AT_MAX = 1_000
"""How many directories below its own a daemon looks at, the nearest first: a start takes no longer for it."""


def others_in(path: Path, role: str = "") -> str:
    """Which other kind of daemon than `role` has something in a directory, in words; empty: none has.

    Two that have shared one directory before go on with that.
    """
    # What cannot be looked at is told by who uses it next.
    found = [kind for kind, names in TRACES.items() if any(os.access(path / name, os.F_OK) for name in names)]
    if not found or role in found:
        return ""
    (kind, *_) = found
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        return f"{kind} {int(json.loads((path / f'{kind}.json').read_bytes())[f'{kind}_id'])}"
    return f"a {kind}"


def _refuse_log_of_others(path: Path, role: str) -> None:
    """Raise `StartError` if a log is that of another kind of daemon, and has nothing of this one's.

    The daemon would begin with an empty log there, and report all that its own log has as lost.
    """
    found = [kind for kind, names in LOG_TRACES.items() if any(os.access(path / name, os.F_OK) for name in names)]
    if found and role in LOG_TRACES and role not in found:
        raise StartError(
            f"{path} has the log of a {found[0]}, and a {role} needs its own: files of two data directories were mixed"
            " up; put each back in its place",
            path=str(path),
        )


def lock_id(path: Path) -> str:
    """Which file a daemon locks that uses a directory (device and inode); empty: no daemon has started there.

    Only this user can open that file. So a daemon that holds the lock knows that no other one lives that has noted the
    same id, whatever paths they call their directories by.
    """
    try:
        status = (path / LOCK_NAME).lstat()
    except OSError:
        return ""
    return f"{status.st_dev}:{status.st_ino}"


def take(path: Path, role: str, *, besides: Collection[Path] = (), in_use: type[StartError] = StartError) -> int:
    """Make the directory, if need be, and lock it: returns the lock, a descriptor that holds it until it is closed.

    `besides`: other directories of the same daemon, which may lie in each other and in this one, and are not locked.

    Raises `PathNotWritable`; `in_use` when another process has the lock; `StartError` when another kind of daemon has
    something there, or one of the directories lies in another daemon's, or has one in it.
    """
    directories = {_real(each): "--log-dirs" for each in besides} | {_real(path): "--data-dir"}
    own = {*directories, _real(path) / "log"}
    for each, flag in directories.items():  # before anything is made in what is another's
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
        if not besides:  # else a backup's replicas are there, and not here
            _refuse_log_of_others(path / "log", role)
        for each, flag in directories.items():  # once more, as of two that start now one at least has its lock by now
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
    with contextlib.suppress(OSError):  # for messages; a full disk is told where it matters
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{role} {os.getpid()}\n".encode(), 0)


def _holder(lock: int) -> str:
    """The holder of a lock, as written in it: ``broker (process 7)``; empty: unknown."""
    with contextlib.suppress(OSError, ValueError):
        role, _, process = os.pread(lock, 40, 0).decode("ascii").strip().rpartition(" ")
        # Else it was killed, and somebody else has it.
        if role in TRACES and process.isdecimal() and Path("/proc", process).exists():
            return f"{role} (process {process})"
    return ""


def _real(path: Path) -> Path:
    """Without symbolic links, as far as it can be followed."""
    return Path(os.path.realpath(path))


# -- directories that lie in each other --------------------------------------------------------------------------------


def _refuse_around(path: Path, own: Collection[Path], flag: str) -> None:
    """Raise `StartError` if a directory lies in another daemon's; `own` are the same daemon's."""
    for outer in path.parents:
        if outer not in own and (user := _user_of(outer) or _owner_of(outer)):
            raise _nested(path, outer, user, flag, f"{path} lies in it")


def _refuse_below(path: Path, own: Collection[Path], flag: str) -> None:
    """Raise `StartError` if another daemon's directory lies in one.

    What nobody uses counts only if no daemon has started here yet. Later somebody may have put a copy there, which is
    no reason not to start: if it is started, that is refused.
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
    """Directories below, the nearest first, without what is in a daemon's own data."""
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
    """The owner of the data in a directory, in words; empty: none.

    Others, too, have directories that are called ``log`` and ``metadata``, but nobody that runs there has no lock. What
    is left of a disk of replicas is nobody's, as a backup may have had it before.
    """
    return others_in(path) if os.access(path / LOCK_NAME, os.F_OK) else ""


def _user_of(path: Path) -> str:
    """Which process uses a directory, in words; empty: none, as far as can be seen."""
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
