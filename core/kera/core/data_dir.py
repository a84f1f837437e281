"""The data directory of a daemon with a lasting identity: it stores the identity, and only one process may use it.

The directory has two copies of the daemon's id, which the coordinator has assigned, and of its cluster: for a broker in
``broker.json`` and in ``broker.copy.json``, each with a checksum. One of them is enough, and a damaged one is written
anew. A lock on the directory keeps two processes from sharing one identity (``kera.core.base.own_directory``). The
daemon decides what else is in the directory.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from kera.core.base.blocks import FILE_CALLS, FileCalls, sync_directory
from kera.core.base.own_directory import take
from kera.core.base.telemetry import get_logger
from kera.core.errors import PathNotWritable, StartError
from kera.core.format.checksum import crc32c
from kera.core.runtime import random_id

log = get_logger("kera.data_dir")

FORMAT = 2
"""Version of the files. Version 1, which only brokers wrote, had no checksum."""


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """The identity of a daemon, as stored in one file. Each kind of daemon has a subclass."""

    role: ClassVar[str]
    """The kind of daemon, with which the names of the files begin: ``broker``."""
    formats: ClassVar[frozenset[int]] = frozenset({FORMAT})
    """The formats that can be read."""

    format: int
    member_id: int
    cluster_id: str
    directory_id: str = ""
    """Tells apart two directories to which the same id was assigned; empty in directories of earlier versions."""
    coordinator_epoch: int = 0
    """Epoch of the last coordinator that contacted the daemon; 0: unknown. A coordinator that does not know the daemon
    has older metadata."""

    @classmethod
    def names(cls) -> tuple[str, str]:
        """Return the names of the file and of its copy."""
        return f"{cls.role}.json", f"{cls.role}.copy.json"

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read the file; None: it does not exist.

        Raises ``OSError``, ``ValueError`` if it is damaged, and `StartError` if a newer version has written it.
        """
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if not isinstance(content, dict):
            raise ValueError(f"it names no {cls.role} and cluster")  # noqa: TRY004 - a damaged file, not an argument
        found, checksum = content.get("format"), content.get("crc32c")
        if "crc32c" in content and checksum != checksum_of(content):
            raise ValueError("it does not match its checksum")
        if "crc32c" in content and isinstance(found, int) and found > FORMAT:
            raise StartError(f"{path} has format {found}, this version knows {FORMAT}; use a newer version")
        known = (
            isinstance(found, int)
            and found in cls.formats
            and (len(content) == 3 if found == 1 else "crc32c" in content)
        )
        match found, content.get(f"{cls.role}_id"), content.get("cluster_id"):
            case int(number), int(member_id), str(cluster_id) if known:
                coordinator_epoch = int(content.get("coordinator_epoch", 0))
                return cls(number, member_id, cluster_id, str(content.get("directory_id", "")), coordinator_epoch)
        raise ValueError(f"it names no {cls.role} and cluster")

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        content = {
            "format": self.format,
            f"{self.role}_id": self.member_id,
            "cluster_id": self.cluster_id,
            "directory_id": self.directory_id,
            "coordinator_epoch": self.coordinator_epoch,
        }
        return json.dumps(content | {"crc32c": checksum_of(content)}).encode()


def checksum_of(content: Mapping[str, Any]) -> str:
    """Return the checksum of a small JSON file: over all fields except ``crc32c``, independent of their order."""
    covered = {name: value for name, value in content.items() if name != "crc32c"}
    return f"{crc32c(json.dumps(covered, sort_keys=True, separators=(',', ':')).encode()):08x}"


class DataDirectory:
    """Owner of a daemon's data directory; raises `PathNotWritable` or `StartError` if it cannot take the directory."""

    identity: ClassVar[type[MemberIdentity]]
    data_pattern: ClassVar[str | None] = None
    """Pattern of files below the directory that only a daemon with an identity writes; None: the daemon makes this
    check itself."""

    def __init__(
        self,
        path: Path,
        new_id: Callable[[], str] = random_id,
        calls: FileCalls = FILE_CALLS,
        *,
        besides: Collection[Path] = (),
    ) -> None:
        """`besides`: other directories of the same daemon."""
        self.path = path
        self._calls = calls
        self.directory_id = new_id()
        """See `MemberIdentity.directory_id`; the one in the files, once they are read."""
        self.coordinator_epoch = 0
        """See `MemberIdentity.coordinator_epoch`; the one in the files, once they are read."""
        self._files = [path / name for name in self.identity.names()]
        self._lock = take(path, self.identity.role, besides=besides)

    def load(self) -> tuple[int, str]:
        """Return the ids of the daemon and of its cluster; (0, "") for a daemon that was never registered.

        One of the two files is enough: the other one is written anew if it is damaged or missing. Raises `StartError`
        if none can be read although one exists, or if a newer version has written one.
        """
        identities: list[MemberIdentity | None] = []
        damaged: dict[Path, str] = {}
        for path in self._files:
            try:
                identities.append(self.identity.read(path))
            except (OSError, ValueError) as error:
                damaged[path] = str(error)
        found = next(filter(None, identities), None)
        if found is None:
            for path, reason in damaged.items():
                raise StartError(f"cannot read {path}: {reason}; restore it, or remove it to join as a new daemon")
            if self.data_pattern is not None and any(self.path.glob(self.data_pattern)):
                role = self.identity.role
                raise StartError(  # a new member would drop all of the data
                    f"{self.path} has the log of a {role}, and the file {role}.json with its identity is missing;"
                    " restore that file, or move the log away to join as a new daemon",
                    path=str(self.path),
                )
            return 0, ""
        for path, reason in damaged.items():
            log.error("a file is damaged; restoring it from its copy", path=str(path), reason=reason)
        self.directory_id = found.directory_id or self.directory_id
        self.coordinator_epoch = found.coordinator_epoch
        if found.format == FORMAT:
            self.store(found.member_id, found.cluster_id)
        return found.member_id, found.cluster_id

    def load_directory_id(self) -> str:
        """See `MemberIdentity.directory_id`; empty for a daemon that was never registered. Raises as `load`."""
        member_id, _ = self.load()
        return self.directory_id if member_id else ""

    def store(self, member_id: int, cluster_id: str, coordinator_epoch: int = 0) -> None:
        """Store the identity of this daemon and the epoch of its coordinator, durably when it returns.

        Raises `PathNotWritable`.
        """
        self.coordinator_epoch = max(self.coordinator_epoch, coordinator_epoch)
        identity = self.identity(FORMAT, member_id, cluster_id, self.directory_id, self.coordinator_epoch)
        data = identity.to_bytes()
        for path in self._files:
            try:
                self._replace(path, data)
            except OSError as error:
                raise PathNotWritable(f"cannot write {path}: {error.strerror}", path=str(path)) from error

    def _replace(self, path: Path, data: bytes) -> None:
        with contextlib.suppress(OSError):
            if path.read_bytes() == data:
                return  # the case at almost every start, which must not fail because of a full disk
        replace_durably(path, data, self._calls)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)


def replace_durably(path: Path, data: bytes, calls: FileCalls = FILE_CALLS) -> None:
    """Replace the content of a file by `data`; after a crash the file has all of it, or the old content.

    Raises ``OSError``.
    """
    temporary = path.with_suffix(".tmp")
    fd = calls.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        written = 0
        while written < len(data):
            written += calls.write(fd, [data[written:]], written)
        calls.sync(fd)
    finally:
        calls.close(fd)
    calls.rename(temporary, path)
    sync_directory(path.parent, calls)  # makes the rename durable
