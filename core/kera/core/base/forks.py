"""A child process uses nothing that it has inherited by a fork: it belongs to the parent.

`Origin` tells a child from the process that made something. `leave_to_parent` has an object told in the child, right
after the fork: there it refuses further use, and `cut_off` replaces its copy of a connection, over which the child
would otherwise send, or receive what the parent waits for.

A fork in a running event loop shares the loop's epoll with the child. Python ends the loop in the child when an
exception or `sys.exit` leaves it, and takes the files of the parent's loop out of the epoll with that. So a loop that
`leave_loop_to_parent` was called with gets an epoll of its own in the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import socket
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from kera.core.errors import ClosedError

_DESCRIPTORS = Path("/proc/self/fd")
_WATCHED = re.compile(r"^tfd:\s*(\d+) events:\s*([0-9a-f]+)", re.MULTILINE)
_WAKES = "anon_inode:[eventfd]"
"""The descriptor that wakes a loop other than asyncio's own."""


def inherited() -> ClosedError:
    """Why something of its parent's cannot be used in a child."""
    return ClosedError(
        "this client belongs to the parent of a forked process: start processes with spawn, or create clients in the"
        " process that uses them"
    )


class Origin:
    """The process that has made something."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether it is this one, and not a parent that was forked."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise `ClosedError` in a child process."""
        if not self.is_here:
            raise inherited()


class Inherits(Protocol):
    """An object that has to know that it is in a child process now."""

    def forked(self) -> None:
        """Called in the child, where no other thread runs; must neither wait nor write to what the parent has."""
        ...


_inherited: WeakSet[Any] = WeakSet()
_loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def leave_to_parent(each: Inherits) -> None:
    """Call `each.forked()` in every child process that is forked from now on."""
    _inherited.add(each)


def leave_loop_to_parent(loop: asyncio.AbstractEventLoop) -> None:
    """Give `loop` an epoll of its own in child processes."""
    _loops.add(loop)


def cut_off(sock: Any) -> None:
    """In the child: have a copy of a connection lead nowhere. The parent's is as it was."""
    ours, other = socket.socketpair()
    with ours, other, contextlib.suppress(OSError, ValueError):
        os.dup2(ours.fileno(), sock.fileno(), inheritable=False)


def _after_fork() -> None:
    for loop in list(_loops):
        _own_epoll(loop)
    for each in list(_inherited):
        each.forked()


def _own_epoll(loop: Any) -> None:
    """Give the child an epoll of its own that can wake its loop, and that watches nothing of the parent's."""
    descriptor = _epoll_of(loop)
    if descriptor is None:
        return
    with contextlib.suppress(OSError), select.epoll() as fresh:
        for number, events in _watched(descriptor):
            if str((_DESCRIPTORS / str(number)).readlink()) == _WAKES:
                own = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                os.dup2(own, number, inheritable=False)
                os.close(own)
                fresh.register(number, events)
        if getattr(loop, "_ssock", None) is not None:  # asyncio's own: a pair of sockets
            receives, sends = socket.socketpair(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            with receives, sends:
                os.dup2(receives.fileno(), loop._ssock.fileno(), inheritable=False)  # noqa: SLF001 - nothing else has it
                os.dup2(sends.fileno(), loop._csock.fileno(), inheritable=False)  # noqa: SLF001 - the same
            fresh.register(loop._ssock.fileno(), select.EPOLLIN)  # noqa: SLF001 - the same
        os.dup2(fresh.fileno(), descriptor, inheritable=False)


def _epoll_of(loop: Any) -> int | None:
    """None: it is closed, or of a kind that is not known."""
    with contextlib.suppress(Exception):
        if hasattr(loop, "_get_backend_id"):  # uvloop
            return int(loop._get_backend_id())  # noqa: SLF001 - nothing else has it
        return int(loop._selector.fileno())  # noqa: SLF001 - the same
    return None


def _watched(epoll: int) -> list[tuple[int, int]]:
    """Descriptors and events that an epoll has."""
    text = Path(f"/proc/self/fdinfo/{epoll}").read_text(encoding="ascii")
    return [(int(number), int(events, 16)) for number, events in _WATCHED.findall(text)]


os.register_at_fork(after_in_child=_after_fork)
