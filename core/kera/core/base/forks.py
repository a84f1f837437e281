"""A child process does not use clients and connections that it has inherited by a fork: they belong to the parent.

`Origin` tells a child from the process that created an object. `leave_to_parent` has `forked` called on an object in
the child, right after the fork: from then on the object refuses to be used, and `cut_off` replaces its copy of a
connection, over which the child would otherwise send, or receive data that the parent waits for.

After a fork in a running event loop, the child shares the loop's epoll. When an exception or `sys.exit` leaves the loop
in the child, Python closes it, and so removes the files of the parent's loop from the epoll. To prevent that, a loop
that was passed to `leave_loop_to_parent` gets its own epoll in the child.
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
    """Return the error for the use of a parent's object in a child."""
    return ClosedError(
        "this client belongs to the parent of a forked process: start processes with spawn, or create clients in the"
        " process that uses them"
    )


class Origin:
    """The process that created an object."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether it is the current process, and not a parent of it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise `ClosedError` in a child process."""
        if not self.is_here:
            raise inherited()


class Inherits(Protocol):
    """An object that has to know when it is in a child process."""

    def forked(self) -> None:
        """Called in the child, where no other thread runs; must not wait, nor write to resources of the parent."""
        ...


_inherited: WeakSet[Any] = WeakSet()
_loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()


def leave_to_parent(each: Inherits) -> None:
    """Call `each.forked()` in every child process that is forked from now on."""
    _inherited.add(each)


def leave_loop_to_parent(loop: asyncio.AbstractEventLoop) -> None:
    """Give `loop` a separate epoll in child processes."""
    _loops.add(loop)


def cut_off(sock: Any) -> None:
    """In the child: disconnect its copy of a connection. The parent's connection is unchanged."""
    ours, other = socket.socketpair()
    with ours, other, contextlib.suppress(OSError, ValueError):
        os.dup2(ours.fileno(), sock.fileno(), inheritable=False)


def _after_fork() -> None:
    for loop in list(_loops):
        _own_epoll(loop)
    for each in list(_inherited):
        each.forked()


def _own_epoll(loop: Any) -> None:
    """Give the child a separate epoll that can wake its loop, and that watches no file of the parent's."""
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
                os.dup2(receives.fileno(), loop._ssock.fileno(), inheritable=False)  # noqa: SLF001 - no public access
                os.dup2(sends.fileno(), loop._csock.fileno(), inheritable=False)  # noqa: SLF001 - the same
            fresh.register(loop._ssock.fileno(), select.EPOLLIN)  # noqa: SLF001 - the same
        os.dup2(fresh.fileno(), descriptor, inheritable=False)


def _epoll_of(loop: Any) -> int | None:
    """Return the descriptor of a loop's epoll; None: the loop is closed, or of an unknown kind."""
    with contextlib.suppress(Exception):
        if hasattr(loop, "_get_backend_id"):  # uvloop
            return int(loop._get_backend_id())  # noqa: SLF001 - no public access
        return int(loop._selector.fileno())  # noqa: SLF001 - the same
    return None


def _watched(epoll: int) -> list[tuple[int, int]]:
    """Return the descriptors that an epoll watches, each with its events."""
    text = Path(f"/proc/self/fdinfo/{epoll}").read_text(encoding="ascii")
    return [(int(number), int(events, 16)) for number, events in _WATCHED.findall(text)]


os.register_at_fork(after_in_child=_after_fork)
