"""Producers and consumers that nobody has closed: how they end with their event loop, their process or neither.

    the event loop ends         `asyncio.run` ends the loop's asynchronous generators before it closes it. There is one
    (`asyncio.run` returns)     of them per owner, which closes the owner: what was accepted is still delivered
    the interpreter ends        owners whose loop was only stopped, or runs on another thread, are closed at exit
    a child process of          the same: such a child ends without `atexit`, and has a list of its own
    `multiprocessing` ends
    a worker of Celery ends     the same: it ends with `os._exit`, and sends a signal before
    the loop is closed          nothing can be sent any more, as the connections were the loop's. The loss is counted
                                in a `ResourceWarning` and a line of log

A running loop needs none of it: it keeps its owners alive as long as they have something to send.

Promises: owners of one loop are closed together, in at most `CLOSE_TIMEOUT_S` (twice that at exit, see `Guard`). A
child process leaves alone what it has inherited by a fork. Left to the owner: to close itself though `asyncio.run` has
cancelled all tasks before, and to count its losses (`Unclosed.loss`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import sys
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from multiprocessing.util import Finalize
from typing import Any, NamedTuple, Protocol

from kera.core.base.forks import Origin, leave_loop_to_parent
from kera.core.base.telemetry import get_logger

log = get_logger("kera.client")

CLOSE_TIMEOUT_S = 10.0
"""For owners that nobody has closed: an end must not hang on a broker that is away."""
EXIT_MARGIN_S = 1.0
"""For another thread's loop to report that it is done."""
CHILD_EXIT_PRIORITY = -100
"""Behind other finalizers of a child process, which may still send something."""


class Loss(NamedTuple):
    """The loss if an owner were dropped now."""

    event: str
    """For the log: the owner, and what becomes of it."""
    attributes: Mapping[str, Any]
    text: str
    """The same, for the warning."""


class Unclosed(Protocol):
    """An owner: something that has to be closed."""

    async def close(self) -> None:
        """Deliver or commit what there is, and end. Does nothing the second time."""
        ...

    def loss(self) -> Loss | None:
        """The loss if it were dropped now; None: nothing."""
        ...


def ends_in_order(kind: type[BaseException] | None) -> bool:
    """Whether a `with` block that ends with an exception of this class delivers what it has.

    `sys.exit()` and the end of a generator are not failures, and may come with exit code 0.
    """
    return kind is None or issubclass(kind, SystemExit | GeneratorExit)


class Guard:
    """Closes its owner if nobody does; the owner calls `disarm` when it has been closed."""

    def __init__(self, owner: Unclosed, *, feeds: bool = False) -> None:
        """To be made on the owner's event loop. `feeds`: close the owner at exit before those that do not feed others.

        At exit both kinds have `CLOSE_TIMEOUT_S` each.
        """
        self._owner: Callable[[], Unclosed | None] = weakref.ref(owner)
        self.loop = asyncio.get_running_loop()
        leave_loop_to_parent(self.loop)
        self.feeds = feeds
        self._origin = Origin()
        self._armed = True
        self._ending: AsyncGenerator[None, None] = _at_end_of_loop(weakref.ref(self))
        with contextlib.suppress(StopIteration):
            self._ending.asend(None).send(None)  # its first step: from now on it is one of those that the loop ends
        _guards.add(self)
        _register_child_exit()

    @property
    def owner(self) -> Unclosed | None:
        """The owner that has to be closed; None: none, or none in this process."""
        return self._owner() if self._armed and self._origin.is_here else None

    async def disarm(self) -> None:
        """The owner is closed."""
        self._armed = False
        if not self._ending.ag_running:  # type: ignore[attr-defined]  # else it is what closes the owner
            await self._ending.aclose()

    def dropped(self, loss: Loss | None) -> None:
        """The owner goes, or its loop has gone, with this loss."""
        if loss is None or not self._armed or not self._origin.is_here:
            return
        self._armed = False
        log.error(loss.event, **loss.attributes)
        warnings.warn(loss.text, ResourceWarning, stacklevel=2)


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


async def _at_end_of_loop(guard: Callable[[], Guard | None]) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        armed = guard()
        owner = None if armed is None else armed.owner
        if owner is not None:
            await _close(owner)


async def _close(owner: Unclosed) -> None:
    """Close `owner`, in bounded time. Errors are logged, as there is nobody left to raise them to."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await owner.close()
    except Exception as error:  # noqa: BLE001 - whatever it is
        reason = str(error) or f"not done within {CLOSE_TIMEOUT_S:g} s"
        log.error("cannot close the remaining objects in order", error=reason)


async def _close_together(owners: Iterable[Unclosed]) -> None:
    await asyncio.gather(*map(_close, owners))


def _close_all() -> None:
    """Close all owners of this process. Those on one loop are closed together, those that feed others first."""
    for feeds in (True, False):
        of_loops: dict[asyncio.AbstractEventLoop, list[Unclosed]] = {}
        guards = [guard for guard in list(_guards) if guard.feeds is feeds]
        for guard in guards:
            if (owner := guard.owner) is not None:
                of_loops.setdefault(guard.loop, []).append(owner)
        for loop, owners in of_loops.items():
            with contextlib.suppress(Exception):  # whatever keeps them from being closed: the loss is logged below
                if loop.is_running():
                    closing = asyncio.run_coroutine_threadsafe(_close_together(owners), loop)
                    closing.result(CLOSE_TIMEOUT_S + EXIT_MARGIN_S)
                elif not loop.is_closed():
                    loop.run_until_complete(_close_together(owners))
        for guard in guards:
            if (owner := guard.owner) is not None:
                guard.dropped(owner.loss())


_child_exit_pid = 0
"""The process whose finalizers have `_close_all`."""


def _register_child_exit() -> None:
    """Have `_close_all` called where a child process of `multiprocessing` ends: it does without `atexit`.

    Such a child forgets the finalizers of its parent, so each process registers its own.
    """
    global _child_exit_pid  # noqa: PLW0603 - of the process
    if _child_exit_pid != os.getpid():
        _child_exit_pid = os.getpid()
        Finalize(None, _close_all, exitpriority=CHILD_EXIT_PRIORITY)
        ends = getattr(sys.modules.get("celery.signals"), "worker_process_shutdown", None)
        if ends is not None:
            ends.connect(_worker_ends, weak=False)


def _worker_ends(**_: object) -> None:
    """A worker of Celery's pool of processes has done its last task: `os._exit` comes next."""
    _close_all()


atexit.register(_close_all)
