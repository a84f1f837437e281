"""The end of producers and consumers that the program has not closed: with their event loop, their process or neither.

    the event loop ends         `asyncio.run` ends the loop's asynchronous generators before it closes the loop. Each
    (`asyncio.run` returns)     owner has one of them, which closes the owner: accepted records are still delivered
    the interpreter ends        owners whose loop was only stopped, or runs on another thread, are closed at exit
    a child process of          the same, by the child's own list, as such a child ends without `atexit`
    `multiprocessing` ends
    a worker of Celery ends     the same, at a signal that the worker sends before it ends with `os._exit`
    the loop is closed          nothing can be sent any more, as the connections belonged to the loop. The loss is
                                counted in a `ResourceWarning` and a log line

A running loop needs nothing of this: it keeps its owners alive as long as they have something to send.

Promises: the owners of a loop are closed together, within `CLOSE_TIMEOUT_S` (twice that at exit, see `Guard`). A child
process does not touch owners that it has inherited by a fork. An owner must be able to close itself even after
`asyncio.run` has cancelled all tasks, and must count its losses (`Unclosed.loss`).
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
"""Time limit for closing such owners: an exit must not hang because a broker is away."""
EXIT_MARGIN_S = 1.0
"""Time for another thread's loop to report that it is done."""
CHILD_EXIT_PRIORITY = -100
"""Priority behind other finalizers of a child process, which may still send something."""


class Loss(NamedTuple):
    """The loss if an owner were dropped now."""

    event: str
    """The event for the log: the owner and the loss."""
    attributes: Mapping[str, Any]
    text: str
    """The text for the warning, with the same facts."""


class Unclosed(Protocol):
    """An owner: an object that must be closed."""

    async def close(self) -> None:
        """Deliver or commit everything, and end. Does nothing the second time."""
        ...

    def loss(self) -> Loss | None:
        """Return the loss if the owner were dropped now; None: no loss."""
        ...


def ends_in_order(kind: type[BaseException] | None) -> bool:
    """Return whether a `with` block that ends with an exception of this class delivers its records.

    `sys.exit()` and the end of a generator are not failures: the exit code may be 0.
    """
    return kind is None or issubclass(kind, SystemExit | GeneratorExit)


class Guard:
    """Closes its owner if the program does not; the owner calls `disarm` when it has been closed."""

    def __init__(self, owner: Unclosed, *, feeds: bool = False) -> None:
        """Guard `owner`; call this on its event loop.

        `feeds`: the owner feeds another one, so close it first at exit. Both kinds have `CLOSE_TIMEOUT_S` each then.
        """
        self._owner: Callable[[], Unclosed | None] = weakref.ref(owner)
        self.loop = asyncio.get_running_loop()
        leave_loop_to_parent(self.loop)
        self.feeds = feeds
        self._origin = Origin()
        self._armed = True
        self._ending: AsyncGenerator[None, None] = _at_end_of_loop(weakref.ref(self))
        with contextlib.suppress(StopIteration):
            self._ending.asend(None).send(None)  # its first step: from now on the loop ends it
        _guards.add(self)
        _register_child_exit()

    @property
    def owner(self) -> Unclosed | None:
        """The owner that must be closed; None: there is none, or it belongs to another process."""
        return self._owner() if self._armed and self._origin.is_here else None

    async def disarm(self) -> None:
        """Note that the owner is closed."""
        self._armed = False
        if not self._ending.ag_running:  # type: ignore[attr-defined]  # else it is closing the owner itself
            await self._ending.aclose()

    def dropped(self, loss: Loss | None) -> None:
        """Log and warn about the loss of an owner that is dropped, or whose loop has ended."""
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
    """Close `owner`, in limited time. Errors are logged, as there is no caller left to raise them to."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await owner.close()
    except Exception as error:  # noqa: BLE001 - any error is only logged
        reason = str(error) or f"not done within {CLOSE_TIMEOUT_S:g} s"
        log.error("cannot close the remaining objects in order", error=reason)


async def _close_together(owners: Iterable[Unclosed]) -> None:
    await asyncio.gather(*map(_close, owners))


def _close_all() -> None:
    """Close all owners of this process, those of one loop together, and owners that feed others first."""
    for feeds in (True, False):
        of_loops: dict[asyncio.AbstractEventLoop, list[Unclosed]] = {}
        guards = [guard for guard in list(_guards) if guard.feeds is feeds]
        for guard in guards:
            if (owner := guard.owner) is not None:
                of_loops.setdefault(guard.loop, []).append(owner)
        for loop, owners in of_loops.items():
            with contextlib.suppress(Exception):  # the loss is logged below, whatever the error
                if loop.is_running():
                    closing = asyncio.run_coroutine_threadsafe(_close_together(owners), loop)
                    closing.result(CLOSE_TIMEOUT_S + EXIT_MARGIN_S)
                elif not loop.is_closed():
                    loop.run_until_complete(_close_together(owners))
        for guard in guards:
            if (owner := guard.owner) is not None:
                guard.dropped(owner.loss())


_child_exit_pid = 0
"""The process that has registered `_close_all` as a finalizer."""


def _register_child_exit() -> None:
    """Register `_close_all` for the end of a child process of `multiprocessing`, which does not run `atexit`.

    Such a child drops the finalizers of its parent, so each process registers its own.
    """
    global _child_exit_pid  # noqa: PLW0603 - one per process
    if _child_exit_pid != os.getpid():
        _child_exit_pid = os.getpid()
        Finalize(None, _close_all, exitpriority=CHILD_EXIT_PRIORITY)
        ends = getattr(sys.modules.get("celery.signals"), "worker_process_shutdown", None)
        if ends is not None:
            ends.connect(_worker_ends, weak=False)


def _worker_ends(**_: object) -> None:
    """Close all owners when a worker process of Celery has done its last task, just before its `os._exit`."""
    _close_all()


atexit.register(_close_all)
