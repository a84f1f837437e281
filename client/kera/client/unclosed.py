"""What becomes of producers and consumers that nobody has closed.

    the event loop ends         `asyncio.run` ends the loop's asynchronous generators before it closes it, so there is
    (`asyncio.run` returns)     one of them per owner, which closes it: what was accepted is still delivered
    the interpreter ends        a loop that was only stopped, or that runs on another thread, gets the same at exit
    the loop is closed          nothing can be sent any more, as the connections were the loop's. What is lost is
                                counted, in a `ResourceWarning` and a line of log

A running loop needs none of it: it keeps whoever has something to send.

Promises: an end takes at most `CLOSE_TIMEOUT_S` longer for each loop; what a child process has inherited by a fork is
left alone. Left to the owner: to close itself in bounded time, and to say what it has lost (`Unclosed.loss`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import warnings
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, NamedTuple, Protocol

from kera.core.telemetry import get_logger

log = get_logger("kera.client")

CLOSE_TIMEOUT_S = 10.0
"""For owners that nobody has closed: an end must not hang on a broker that is away."""
EXIT_MARGIN_S = 1.0
"""For another thread's loop to tell that it is done."""


class Loss(NamedTuple):
    """What an owner would lose if it were dropped now."""

    event: str
    """For the log: who was not closed, and what becomes of it."""
    attributes: Mapping[str, Any]
    text: str
    """The same, for the warning."""


class Unclosed(Protocol):
    """Who has to be closed."""

    async def close(self) -> None:
        """Deliver or commit what there is, and end. Does nothing the second time."""
        ...

    def loss(self) -> Loss | None:
        """What would be lost now; None: nothing."""
        ...


class Guard:
    """Sees to it that its owner is closed; the owner calls `disarm` when it has been."""

    def __init__(self, owner: Unclosed) -> None:
        """To be made on the owner's event loop."""
        self._owner: Callable[[], Unclosed | None] = weakref.ref(owner)
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._armed = True
        self._ending: AsyncGenerator[None, None] = _at_end_of_loop(weakref.ref(self))
        with contextlib.suppress(StopIteration):
            self._ending.asend(None).send(None)  # its first step: from now on it is one of those that the loop ends
        _guards.add(self)

    @property
    def owner(self) -> Unclosed | None:
        """Who is to be closed; None: nobody any more."""
        return self._owner() if self._armed else None

    async def disarm(self) -> None:
        """The owner is closed."""
        self._armed = False
        if not self._ending.ag_running:  # type: ignore[attr-defined]  # else it is what closes the owner
            await self._ending.aclose()

    def dropped(self, loss: Loss | None) -> None:
        """The owner goes, or its loop has gone, with this loss."""
        if loss is None or not self._armed or os.getpid() != self._pid:
            return
        self._armed = False
        log.error(loss.event, **loss.attributes)
        warnings.warn(loss.text, ResourceWarning, stacklevel=2)

    def at_exit(self) -> None:
        """The interpreter ends."""
        owner, loop = self.owner, self._loop
        if owner is None or os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):  # whatever keeps it from being closed: what is lost is told below
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(_close(owner), loop).result(CLOSE_TIMEOUT_S + EXIT_MARGIN_S)
            elif not loop.is_closed():
                loop.run_until_complete(_close(owner))
        self.dropped(owner.loss())


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
    """Close `owner`, in bounded time. What goes wrong is told, as there is nobody left to raise it to."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await owner.close()
    except Exception as error:  # noqa: BLE001 - whatever it is
        reason = str(error) or f"not done within {CLOSE_TIMEOUT_S:g} s"
        log.error("what nobody has closed could not be closed in good order", error=reason)


@atexit.register
def _at_exit() -> None:
    for guard in list(_guards):
        guard.at_exit()
