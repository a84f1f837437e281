"""The disk of a machine: real files, and a kernel that loses unsynced data when power is lost.

Written data is visible at once, and durable after a sync. A power loss randomly takes unsynced data: contents block by
block, and the last changes of names (`tests.simulation.engine.names`). An operation in progress is carried out in part.
Data of a failed sync is not durable, and no later sync makes it so, unless it is written again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from kera.core.base.blocks import BLOCK_BYTES, FileCalls
from tests.simulation.engine.names import Names

Blocks = dict[int, bytes]


class PowerLost(BaseException):
    """The machine is gone in the middle of an operation; error handlers must not catch this."""


class MachineDisk:
    """See the head of this module."""

    def __init__(self, kept: Path, random: Random, on_power_lost: Callable[[], None]) -> None:
        """`kept`: a directory for files that may come back."""
        self.error = 0
        """The error number of all changes of the disk; 0: it works. Faults set this and the next field."""
        self.operations_left: int | None = None
        """The changes before power is lost; None: power is not lost."""
        self.operations = 0
        """The number of changes so far."""
        self._names = Names(kept)
        self._random = random
        self._on_power_lost = on_power_lost
        self._paths: dict[int, Path] = {}
        """The paths of open files."""
        self._unsynced: dict[Path, Blocks] = {}
        """By file: the durable contents of written blocks that were not synced."""
        self._unknown: dict[Path, Blocks] = {}
        """By file: the durable contents of blocks of a failed sync."""

    def calls(self) -> FileCalls:
        """The file calls of this disk."""
        return FileCalls(
            open=self._open,
            close=self._close,
            reserve=self._reserve,
            write=self._write,
            truncate=self._truncate,
            sync=self._sync,
            rename=self._rename,
            remove=self._remove,
        )

    # -- failures ----------------------------------------------------------------------------------------------

    def step(self, path: Path) -> bool:
        """Begin a change; return whether power is lost during it. Raises ``OSError``."""
        self.operations += 1
        if self.operations_left is not None:
            self.operations_left -= 1
            if self.operations_left < 0:
                return True
        if self.error:
            raise OSError(self.error, os.strerror(self.error), str(path))
        return False

    def lose_power(self) -> NoReturn:
        """Lose power now."""
        self._on_power_lost()
        raise PowerLost

    def _step(self, path: Path) -> None:
        if self.step(path):
            self.lose_power()

    def power_lost(self) -> tuple[int, int]:
        """Lose a random part of unsynced data; return the numbers of lost names and blocks."""
        self.operations_left = None
        names = self._names.lost(self._random)
        blocks = 0
        for path, old in self._unknown.items():
            blocks += _put_back(path, old)
        for path, old in self._unsynced.items():
            blocks += _put_back(path, {number: data for number, data in old.items() if self._random.random() < 0.5})
        self._unknown.clear()
        self._unsynced.clear()
        return names, blocks

    # -- contents ----------------------------------------------------------------------------------------------

    def _remember(self, path: Path, offset: int, length: int) -> None:
        """Keep the durable contents of blocks before a write."""
        unsynced, unknown = self._unsynced.setdefault(path, {}), self._unknown.get(path, {})
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for number in _blocks(offset, length):
                if number in unknown:
                    unsynced[number] = unknown.pop(number)
                elif number not in unsynced:
                    unsynced[number] = os.pread(fd, BLOCK_BYTES, number * BLOCK_BYTES)
        finally:
            os.close(fd)

    def _write(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        path, length = self._paths[fd], sum(len(buffer) for buffer in buffers)
        lost = self.step(path)
        self._remember(path, offset, length)
        if lost:
            self._write_some(fd, buffers, offset)
            self.lose_power()
        written = os.pwritev(fd, buffers, offset)
        if flags & os.RWF_DSYNC:
            for number in _blocks(offset, length):
                self._unsynced[path].pop(number, None)
        return written

    def _write_some(self, fd: int, buffers: Sequence[Any], offset: int) -> None:
        for buffer in buffers:
            for start in range(0, len(buffer), BLOCK_BYTES):
                if self._random.random() < 0.5:
                    os.pwritev(fd, [buffer[start : start + BLOCK_BYTES]], offset + start)
            offset += len(buffer)

    def _truncate(self, target: int | Path, length: int) -> None:
        path = self._paths[target] if isinstance(target, int) else target
        self._step(path)
        before = path.stat().st_size
        if before > length:
            self._remember(path, length, before - length)
        os.truncate(target, length)

    def _reserve(self, fd: int, offset: int, length: int) -> None:
        self._step(self._paths[fd])
        os.posix_fallocate(fd, offset, length)

    def _sync(self, fd: int) -> None:
        path = self._paths[fd]
        try:
            self._step(path)
        except OSError:
            if path in self._unsynced:
                self._unknown.setdefault(path, {}).update(self._unsynced.pop(path))
            raise
        if path.is_dir():
            self._names.synced(path)
        else:
            self._unsynced.pop(path, None)

    # -- names -------------------------------------------------------------------------------------------------

    def _open(self, path: Path, flags: int, mode: int = 0o777) -> int:
        there = path.exists()
        if not there and flags & os.O_CREAT:
            self._step(path)
        elif there and flags & os.O_TRUNC:
            self._step(path)
            self._remember(path, 0, path.stat().st_size)
        fd = os.open(path, flags, mode)
        self._paths[fd] = path
        if not there:
            self._names.changed(path, lambda: path.unlink(missing_ok=True))
        return fd

    def _close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        os.close(fd)

    def _rename(self, path: Path, to: Path) -> None:
        self._step(path)
        kept, of_the_other = self._names.keep(to), self._taken(to)
        path.rename(to)
        self._given(to, self._taken(path))

        def undo() -> None:
            if to.exists():  # later changes of the file are already undone
                to.rename(path)
                self._given(path, self._taken(to))
            if kept is not None:
                kept.rename(to)
                self._given(to, of_the_other)

        self._names.changed(to, undo, kept)

    def _remove(self, path: Path) -> None:
        self._step(path)
        kept, blocks = self._names.keep(path), self._taken(path)
        path.unlink()

        def undo() -> None:
            if kept is not None:
                kept.rename(path)
                self._given(path, blocks)

        self._names.changed(path, undo, kept)

    def _taken(self, path: Path) -> tuple[Blocks, Blocks]:
        """Remove and return the records about the content of a file."""
        return self._unsynced.pop(path, {}), self._unknown.pop(path, {})

    def _given(self, path: Path, blocks: tuple[Blocks, Blocks]) -> None:
        self._unsynced[path], self._unknown[path] = blocks


def _blocks(offset: int, length: int) -> range:
    return range(offset // BLOCK_BYTES, -(-(offset + length) // BLOCK_BYTES))


def _put_back(path: Path, blocks: Blocks) -> int:
    with suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for number, old in blocks.items():
                os.pwrite(fd, old.ljust(BLOCK_BYTES, b"\0"), number * BLOCK_BYTES)
        finally:
            os.close(fd)
        return len(blocks)
    return 0
